//! Decisions from a shortlist are those from the costs of all workers.

use super::*;
use crate::fleet::{Needs, PromptTokens, Worker};
use crate::hash::splitmix64;
use crate::index::Holder;
use crate::load::{Demand, ExpectedOutput, SharedPrefix, Timestamp};
use crate::policy::inputs::{FleetView, Overlaps};
use crate::policy::select::select;
use crate::policy::{Scratch, decide};
use crate::replay::stub_engine::StubEngine;
use crate::state::{Core, Settings};
use kvbm::{BlockEvent, ChainKey, Epoch, Level};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Request;
use worker::plane::{Instance, Load, OnboardSpeed, RouterId, StoreId, WorkerId};

proptest! {
    #[test]
    fn the_selection_is_the_one_among_all(
        candidates in proptest::collection::vec((0.0..0.2_f64, 0.0..0.05_f64, 0..4_u64, 0..20_u8), 2..40),
        random in any::<u64>(),
    ) {
        let score = |nth: usize, entry: u32| {
            let (cost, _, chosen, kind) = candidates[nth];
            let cost = if kind == 0 { f64::NAN } else { cost };
            Candidate { entry, nth: nth as u32, passes: 0, worker: 0, cost, load: 0.0, device_compute: 0.0, chosen }
        };
        let bound = |(entry, (cost, below, _, kind)): (u32, &(f64, f64, u64, u8))| {
            (if *kind == 1 { f64::NEG_INFINITY } else { cost - below }, entry)
        };
        let bounds: Vec<_> = (0..).zip(&candidates).map(bound).collect();
        let all: Vec<_> = bounds.iter().enumerate().map(|(nth, (_, entry))| score(nth, *entry)).collect();
        let mut few = Vec::new();
        if !score_lowest(&bounds, score, &mut few) {
            prop_assert!(all.iter().all(|candidate| candidate.cost.is_nan()));
            return Ok(());
        }
        let context = SelectionContext { random, session: None };
        let chosen = |among: &[Candidate]| {
            let (at, why) = select(&Policy::Kv, among, context).unwrap();
            let others = among.iter().filter(|other| other.nth != among[at].nth).map(|other| other.cost);
            (among[at].nth, why, others.fold(f64::INFINITY, f64::min).to_bits())
        };
        prop_assert_eq!(chosen(&few), chosen(&all));
    }
}

const MODEL: &str = "model";
const BLOCK: usize = 16;
const STORE: StoreId = StoreId(1);
const WORKERS: u64 = 60;

struct Fleet {
    core: Core,
    workers: Vec<Arc<Worker>>,
    request: Request,
    open: Vec<(usize, u64)>,
    now: Instant,
}

impl Fleet {
    /// Workers of which some hold parts of a prompt. `roles`: drawn for each.
    fn new(seed: u64, roles: &[Role]) -> Self {
        let core = Core::new(RouterId(0), Settings::default(), &prometheus::Registry::new()).unwrap();
        let tokens: Vec<u32> = (0..64 * BLOCK as u32 + 3).collect();
        let request = Request::greedy("request", MODEL, &tokens, 256);
        let hashes = ChainKey::root(&request.domain, MODEL, None).hashes(&request.tokens, BLOCK);
        let card = StubEngine::card(MODEL, BLOCK);
        let slots = core.index.join_all((0..WORKERS).map(WorkerId), &[STORE]);
        let worker = |(id, slot): (u64, _)| {
            let role = roles[splitmix64(seed ^ id) as usize % roles.len()];
            let (model, stores) = (card.clone(), vec![STORE]);
            let instance = Instance { id: WorkerId(id), epoch: Epoch(1), role, model, stores, kv_cache: None };
            Arc::new(Worker::new(Arc::new(instance), Arc::new(StubEngine), slot, None))
        };
        let workers: Vec<_> = (0..WORKERS).zip(slots).map(worker).collect();
        core.fleet.join_all(workers.iter().cloned());
        for id in 0..WORKERS {
            let draw = splitmix64(seed.rotate_left(32) ^ id);
            for (level, blocks) in [(Level::G1, draw % 64), (Level::G2, draw >> 8 & 63)] {
                let blocks = if (draw >> 16).is_multiple_of(4) { hashes[..blocks as usize].to_vec() } else { continue };
                core.index.apply(Holder::Worker(WorkerId(id)), &BlockEvent::Stored { level, parent: None, blocks });
            }
        }
        let blocks = hashes[..seed as usize % 40].to_vec();
        core.index.apply(Holder::Store(STORE), &BlockEvent::Stored { level: Level::G4, parent: None, blocks });
        Self { core, workers, request, open: Vec::new(), now: Instant::now() }
    }

    /// Something happens to a worker.
    fn change(&mut self, draw: u64) {
        self.now += Duration::from_millis(draw >> 48 & 127);
        let (at, now) = ((draw % WORKERS) as usize, self.now);
        let load = &self.workers[at].load;
        match draw >> 8 & 7 {
            0..=2 => {
                let few = draw >> 11 & 1 == 0;
                let onboard = OnboardSpeed {
                    level: Level::G4,
                    latency_seconds: if (draw >> 12).is_multiple_of(64) { -1.0 } else { 0.001 },
                    bytes_per_second: 5e9,
                    queued_blocks: draw >> 13 & 15,
                };
                load.report(
                    Load {
                        running: if few { (draw >> 16 & 1) as u32 } else { (draw >> 16 & 31) as u32 },
                        waiting_tokens: if few { 0 } else { draw >> 21 & 4095 },
                        waiting: (draw >> 33 & 1) as u32,
                        active_blocks: draw >> 21 & 1023,
                        total_blocks: 1000,
                        block_bytes: 1 << 20,
                        prefill_tokens_per_second: (draw >> 34 & 3 > 0).then_some(5000.0 + (draw & 1023) as f64),
                        decode_step_seconds: Some(0.01 + (draw >> 36 & 7) as f64 * 0.002),
                        onboard: vec![onboard],
                        ..Load::default()
                    },
                    now,
                );
            }
            3..=5 => {
                let (tokens, cached) = (draw >> 20 & 1023, draw >> 30 & 511);
                let demand = Demand {
                    prefill_tokens: tokens,
                    prompts: 1,
                    sequences: 1,
                    blocks: tokens / 16 + 20,
                    context_tokens: tokens + cached,
                    ..Demand::default()
                };
                let number = load.book(demand, Some(cached), ExpectedOutput::default(), now);
                load.sent(number, now);
                self.open.push((at, number));
            }
            6 if (draw >> 16).is_multiple_of(8) => {
                load.eject_until(Some(Timestamp::from(now + Duration::from_millis(draw >> 20 & 2047))));
            }
            _ => {}
        }
        if self.open.len() > 40 {
            for (at, number) in self.open.drain(..20) {
                self.workers[at].load.started(number, now);
                self.workers[at].load.release(number, 100, now);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn decisions_are_those_from_the_costs_of_all_workers() {
    let (mut scored, mut of, mut reasons) = (0, 0, HashMap::<&str, u32>::new());
    for seed in 0..20 {
        let roles = if seed % 4 == 0 { &[Role::Both, Role::Decode][..] } else { &[Role::Both] };
        let mut fleet = Fleet::new(splitmix64(seed), roles);
        for round in 0..60 {
            let draw = splitmix64(seed << 32 | round);
            (0..20).for_each(|nth| fleet.change(splitmix64(draw ^ nth)));
            let Fleet { core, workers, request, now, .. } = &fleet;
            let (snapshot, resolved) = (core.fleet.snapshot(), core.settings());
            let pool = snapshot.pool(MODEL).unwrap();
            let tokens = &request.tokens[..if draw.is_multiple_of(4) { 100 } else { request.tokens.len() }];
            let overlaps =
                Overlaps::of(tokens, PromptTokens::Known, &request.domain, pool, &core.hash_cache, &core.index);
            let mut tuning = resolved.of(MODEL).clone();
            tuning.decode_tokens *= (draw >> 8 & 3) as f64;
            let (blocks, requests) = (1 + (draw >> 10 & 63) as u32, (draw >> 17 & 511) as f64);
            let shared = SharedPrefix { blocks, requests, share: (draw >> 26 & 15) as f64 / 15.0 };
            let placement = PlacementRequest {
                shared: (draw >> 16 & 1 == 0).then_some(shared),
                ..PlacementRequest::of(request, None, (draw >> 20 & 63) as f64 * 8.0, 256.0, *now)
            };
            let tried = if (draw >> 26).is_multiple_of(8) { vec![workers[0].run()] } else { vec![] };
            let view = FleetView::new(pool, &overlaps, tokens.len(), Needs::default(), &tried, *now);
            let (mut scratch, selection) = (Scratch::default(), SelectionContext { random: draw, session: None });
            let decision = decide(&tuning, placement, view, &mut scratch, selection).unwrap();

            let mut all = Vec::new();
            decision.context.score_candidates(false, None, &mut all);
            let (at, why) = select(&tuning.policy, &all, selection).unwrap();
            let others = all.iter().filter(|other| other.nth as usize != at).map(|other| other.cost);
            let expected = (all[at].entry as usize, why, all.len(), others.fold(f64::INFINITY, f64::min).to_bits());
            let found = (decision.chosen.at, decision.why, decision.candidate_count, decision.runner_up().to_bits());
            assert_eq!(found, expected, "seed {seed}, round {round}");
            assert!(decision.candidates.iter().all(|it| all[it.nth as usize] == *it), "the same costs");
            assert!(decision.all_candidates() == all, "all are explained");
            (scored, of) = (scored + decision.candidates.len(), of + all.len());
            *reasons.entry(why.name()).or_default() += 1;
            let chosen = decision.chosen.at;
            drop(decision);
            core.fleet.choose(&workers[chosen]);
        }
    }
    // Few workers are alike here, and some report impossible times, so that they are always scored.
    assert!(scored * 4 < of * 3, "{scored} of {of} candidates were scored");
    assert!(reasons.len() == 2 && reasons.values().all(|times| *times > 50), "{reasons:?}");
}
