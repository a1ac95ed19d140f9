//! A router with a fleet that only exists on paper, for `examples/decide.rs` to time: the live path of a decision, from
//! the request to its booking, with nobody behind it. Not for use.

use super::router::Simulated;
use crate::dispatch::place;
use crate::fleet::Worker;
use crate::hash::splitmix64;
use crate::settings::Settings;
use crate::state::Core;
use kvbm::{BlockEvent, ChainKey, Epoch, Level};
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::Request;
use worker::plane::{Instance, Load, OnboardSpeed, Phase, RouterId, Source, StoreId, WorkerId};

/// The router.
pub struct Decisions {
    core: Core,
    request: Request,
    members: Vec<Arc<Worker>>,
}

const MODEL: &str = "measured";
const BLOCK: usize = 16;
const STORE: StoreId = StoreId(1);

impl Decisions {
    /// A router over `workers` that all report, an eighth of which hold parts of a prompt of `tokens` tokens, some in G2,
    /// and a store that all reach holds three quarters of it. All hold the first blocks; the first holds most, and idles, so
    /// that the same decision is made over fleets of any size.
    pub fn new(workers: u64, tokens: usize) -> Self {
        let card = Simulated::card(MODEL, BLOCK);
        let core =
            Core::new(RouterId(0), Settings::default(), &prometheus::Registry::new()).expect("the defaults are sound");
        let tokens: Vec<u32> = (0..tokens as u32).collect();
        let request = Request::greedy("measured", MODEL, &tokens, 256);
        let names = ChainKey::root(&request.domain, MODEL, None).hashes(&request.tokens, BLOCK);
        let stored = |source, level, blocks: usize| {
            let blocks = names[..blocks.min(names.len())].to_vec();
            core.index.apply(source, &BlockEvent::Stored { level, parent: None, blocks });
        };
        let ids = (0..workers).map(WorkerId);
        let slots = core.index.join_all(ids.clone(), &[STORE]);
        let member = |(id, slot)| {
            let (model, stores) = (card.clone(), vec![STORE]);
            let instance = Instance { id, epoch: Epoch(1), phase: Phase::Both, model, stores };
            Arc::new(Worker::new(Arc::new(instance), Arc::new(Simulated), slot, None))
        };
        let members: Vec<_> = ids.zip(slots).map(member).collect();
        core.fleet.join_all(members.iter().cloned());
        for id in 0..workers {
            let source = Source::Worker(WorkerId(id));
            stored(source, Level::G1, 4);
            if id == 0 {
                stored(source, Level::G1, names.len() * 7 / 8);
            } else if id % 8 == 0 {
                let parts = names.len() * 3 / 4;
                stored(source, Level::G1, (splitmix64(id) as usize) % parts);
                stored(source, Level::G2, (splitmix64(id + 1) as usize) % parts);
            }
        }
        stored(Source::Store(STORE), Level::G3, names.len() * 3 / 4);
        let decisions = Self { core, request, members };
        decisions.report();
        decisions
    }

    /// Everybody reports, as workers do at least once a second.
    pub fn report(&self) {
        let now = Instant::now();
        for member in &self.members {
            let draw = if member.id().0 == 0 { 0 } else { splitmix64(member.id().0) };
            let onboard = [Level::G2, Level::G3].map(|level| OnboardSpeed {
                level,
                latency_seconds: 0.001,
                bytes_per_second: 5e9,
                queued_blocks: 0,
            });
            let load = Load {
                running: draw as u32 % 16,
                waiting_tokens: draw % 2000,
                active_blocks: draw % 4000,
                total_blocks: 5000,
                block_bytes: 1 << 20,
                prefill_tokens_per_second: Some(5000.0 + (draw % 1000) as f64),
                decode_step_seconds: Some(0.02),
                onboard: onboard.to_vec(),
                ..Load::default()
            };
            member.load.report(load, now);
        }
    }

    /// Places the request as a live router does, booking included. What it answers with gives the booking back when it is
    /// dropped.
    pub fn decide(&self) -> impl Sized {
        place(&self.core, &self.request, &[]).map_err(|error| error.to_string()).expect("there are workers")
    }

    /// The part of it that no router can save: naming the prompt's blocks.
    pub fn hash(&self) -> impl Sized {
        ChainKey::root(&self.request.domain, MODEL, None).hashes(&self.request.tokens, BLOCK)
    }

    /// Naming the blocks and asking the index for them.
    pub fn look_up(&self) -> impl Sized {
        let names = ChainKey::root(&self.request.domain, MODEL, None).hashes(&self.request.tokens, BLOCK);
        self.core.index.overlap(&names)
    }
}
