//! A router over a fleet without engines, to measure routing decisions: `examples/decide.rs` measures their time,
//! `tests/allocations.rs` their allocations. Public for these only.

use super::stub_engine::StubEngine;
use crate::dispatch::place;
use crate::fleet::Worker;
use crate::hash::splitmix64;
use crate::index::Holder;
use crate::state::{Core, Settings};
use kvbm::{BlockEvent, ChainKey, Epoch, Level};
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::Request;
use worker::plane::{Instance, Load, OnboardSpeed, Role, RouterId, StoreId, WorkerId};

/// A router and one request. Methods run parts of the live decision path, from block hashes to the reservation.
pub struct DecisionBenchmark {
    core: Core,
    request: Request,
    workers: Vec<Arc<Worker>>,
}

const MODEL: &str = "measured";
const BLOCK: usize = 16;
const STORE: StoreId = StoreId(1);

impl DecisionBenchmark {
    /// A router over `worker_count` workers that all report. All hold the first 4 blocks of a prompt of `tokens`
    /// tokens, an eighth hold more of it, some in G2, and a store that all reach holds three quarters. The first worker
    /// holds most and is idle, so that the decision is the same for fleets of any size. `prefetch`: whether copies
    /// ahead of demand are considered, as by default; at most ten times a second, whatever the number of decisions.
    pub fn new(worker_count: u64, tokens: usize, prefetch: bool) -> Self {
        let card = StubEngine::card(MODEL, BLOCK);
        let settings = Settings { prefetch, ..Settings::default() };
        let core =
            Core::new(RouterId(0), settings, &prometheus::Registry::new()).expect("the default settings are valid");
        let tokens: Vec<u32> = (0..tokens as u32).collect();
        let request = Request::greedy("measured", MODEL, &tokens, 256);
        let hashes = ChainKey::root(&request.domain, MODEL, None).hashes(&request.tokens, BLOCK);
        let stored = |holder, level, blocks: usize| {
            let blocks = hashes[..blocks.min(hashes.len())].to_vec();
            core.index.apply(holder, &BlockEvent::Stored { level, parent: None, blocks });
        };
        let ids = (0..worker_count).map(WorkerId);
        let slots = core.index.join_all(ids.clone(), &[STORE]);
        let worker = |(id, slot)| {
            let (model, stores) = (card.clone(), vec![STORE]);
            let instance = Instance { id, epoch: Epoch(1), role: Role::Both, model, stores, kv_cache: None };
            Arc::new(Worker::new(Arc::new(instance), Arc::new(StubEngine), slot, None))
        };
        let workers: Vec<_> = ids.zip(slots).map(worker).collect();
        core.fleet.join_all(workers.iter().cloned());
        for id in 0..worker_count {
            let holder = Holder::Worker(WorkerId(id));
            stored(holder, Level::G1, 4);
            if id == 0 {
                stored(holder, Level::G1, hashes.len() * 7 / 8);
            } else if id % 8 == 0 {
                let parts = hashes.len() * 3 / 4;
                stored(holder, Level::G1, (splitmix64(id) as usize) % parts);
                stored(holder, Level::G2, (splitmix64(id + 1) as usize) % parts);
            }
        }
        stored(Holder::Store(STORE), Level::G4, hashes.len() * 3 / 4);
        let benchmark = Self { core, request, workers };
        benchmark.report();
        benchmark
    }

    /// Sends a load report of every worker, as workers do at least once a second, and cancels the ordered copies, which
    /// the stub engines do not make: while four are not carried out, no further copy is considered.
    pub fn report(&self) {
        let now = Instant::now();
        while let Some((worker, _)) = self.core.copies.take() {
            self.core.copies.ended(worker.id(), None, now);
        }
        for worker in &self.workers {
            let random = if worker.id().0 == 0 { 0 } else { splitmix64(worker.id().0) };
            let onboard = [Level::G2, Level::G4].map(|level| OnboardSpeed {
                level,
                latency_seconds: 0.001,
                bytes_per_second: 5e9,
                queued_blocks: 0,
            });
            let load = Load {
                running: random as u32 % 16,
                waiting_tokens: random % 2000,
                active_blocks: random % 4000,
                total_blocks: 5000,
                block_bytes: 1 << 20,
                prefill_tokens_per_second: Some(5000.0 + (random % 1000) as f64),
                decode_step_seconds: Some(0.02),
                onboard: onboard.to_vec(),
                ..Load::default()
            };
            worker.load.report(load, now);
        }
    }

    /// Places the request as the live router does, including its reservation. Dropping the result releases the
    /// reservation.
    pub fn decide(&self) -> impl Sized {
        place(&self.core, &self.request, true, &[], None).map_err(|error| error.to_string()).expect("there are workers")
    }

    /// Time of placing a request of equal length whose tokens no request had before.
    pub fn decide_new(&self, nth: u32) -> std::time::Duration {
        let len = self.request.tokens.len() as u32;
        let tokens: Vec<u32> = (0..len).map(|at| at ^ (nth + 1) << 16).collect();
        let request = Request::greedy("new", MODEL, &tokens, 256);
        let since = std::time::Instant::now();
        let placed = place(&self.core, &request, true, &[], None).map_err(|error| error.to_string());
        let took = since.elapsed();
        drop(placed.expect("there are workers"));
        took
    }

    /// Hashes the prompt's blocks.
    pub fn hash(&self) -> impl Sized {
        ChainKey::root(&self.request.domain, MODEL, None).hashes(&self.request.tokens, BLOCK)
    }

    /// Hashes the prompt's blocks and looks them up in the index.
    pub fn lookup(&self) -> impl Sized {
        let hashes = ChainKey::root(&self.request.domain, MODEL, None).hashes(&self.request.tokens, BLOCK);
        self.core.index.overlap(&hashes)
    }
}
