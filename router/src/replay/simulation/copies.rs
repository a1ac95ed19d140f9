//! Copies of shared prefixes ahead of demand: what workers do with the orders of routers.
//!
//! ```text
//!   ordered ─▶ loading, one block after the other ─▶ ended ─▶ the router knows
//!      │          ▲ └─▶ waiting, while requests wait or load blocks
//!      │          └────────┘
//!      └─▶ ended: declined
//! ```
//! Which copies are ordered is decided by the code of the live router.

use super::{Event, Simulation};
use crate::booking::CopyEnd;
use crate::load::assumed_speed;
use crate::replay::profile::{Link, Profile};
use crate::replay::results::Copies;
use crate::replay::trace::BLOCK_TOKENS;
use kvbm::Level;
use std::collections::VecDeque;

/// A copy that a router has ordered.
pub(super) struct Copying {
    router: usize,
    worker: usize,
    /// The worker whose memory is read. `None`: only the shared store is read.
    from: Option<usize>,
    /// Blocks of the prefix. Once the worker has begun: those that it has still to load.
    blocks: VecDeque<u32>,
    stage: CopyStage,
    deadline_ns: u64,
    loaded_blocks: u64,
    /// Loaded blocks that requests have onboarded.
    pub(super) used_blocks: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyStage {
    /// The order is on its way to the worker.
    Ordered,
    /// The worker waits until it has no queue.
    Waiting,
    /// The first of the remaining blocks is being loaded.
    Loading,
    /// The answer is on its way to the router, or was received.
    Ended(CopyEnd),
}

/// Longest time of a copy, as in `worker/src/llama/prefetch.rs`.
const TIME_LIMIT_NS: u64 = 10_000_000_000;
/// Interval at which a copy that waits checks whether it may go on, and bytes that it requests at a time, at least and
/// at most, as in `kvbm/src/manager/host_copy.rs`.
const POLL_INTERVAL_NS: u64 = 5_000_000;
const BATCH_BYTES: (u64, u64) = (4 << 20, 32 << 20);

impl Simulation<'_> {
    /// A router has ordered a copy of a prefix: the router, the worker, and the worker whose memory is read.
    pub(super) fn order_copy(
        &mut self,
        now: u64,
        (router, worker, from): (usize, usize, Option<usize>),
        prefix: Vec<u32>,
    ) {
        let number = self.copies.len() as u32;
        self.copies.push(Copying {
            router,
            worker,
            from,
            blocks: prefix.into(),
            stage: CopyStage::Ordered,
            deadline_ns: 0,
            loaded_blocks: 0,
            used_blocks: 0,
        });
        self.schedule(now + self.event_delay_ns, Event::Copy(number));
    }

    /// The current stage of a copy ends.
    pub(super) fn advance_copy(&mut self, now: u64, number: usize) {
        let Copying { router, worker, stage, .. } = self.copies[number];
        let (end_ns, stage) = match stage {
            CopyStage::Ordered => self.begin_copy(now, number),
            CopyStage::Waiting => self.copy_next_block(now, number),
            CopyStage::Loading => self.block_copied(now, number),
            CopyStage::Ended(end) => {
                self.routers[router].copy_ended(now, worker, end);
                return;
            }
        };
        self.copies[number].stage = stage;
        self.schedule(end_ns, Event::Copy(number as u32));
    }

    /// The worker begins a copy, or declines. Returns the end of the next stage and the stage, as those below do.
    fn begin_copy(&mut self, now: u64, number: usize) -> (u64, CopyStage) {
        let declined = (now + self.event_delay_ns, CopyStage::Ended(CopyEnd::Failed));
        let copy = &mut self.copies[number];
        let worker = &mut self.workers[copy.worker];
        if worker.is_copying || worker.engine.has_queue(now) {
            return declined;
        }
        let Some(missing) = worker.engine.blocks_to_copy(copy.blocks.iter().copied()) else { return declined };
        worker.is_copying = true;
        copy.blocks = missing.into();
        copy.deadline_ns = now + TIME_LIMIT_NS;
        self.copy_next_block(now, number)
    }

    /// Loads the next block, if no request waits.
    fn copy_next_block(&mut self, now: u64, number: usize) -> (u64, CopyStage) {
        let Copying { worker, from, deadline_ns, loaded_blocks, ref blocks, .. } = self.copies[number];
        let Some(block) = blocks.front().copied() else { return self.end_copy(now, worker, CopyEnd::Done) };
        if now >= deadline_ns {
            return self.end_copy(now, worker, CopyEnd::Failed);
        }
        if self.workers[worker].engine.has_queue(now) {
            return ((now + POLL_INTERVAL_NS).min(deadline_ns), CopyStage::Waiting);
        }
        let Some((link, sender)) = self.source_of_copy(from, block) else {
            // Later blocks are of no use without this one.
            let end = if loaded_blocks > 0 { CopyEnd::Done } else { CopyEnd::Failed };
            return self.end_copy(now, worker, end);
        };
        let seconds = block_seconds(self.profile, link);
        let sender_free_ns = sender.and_then(|from| self.environment.send_link_free_ns.get_mut(from));
        let loaded_ns = self.workers[worker].engine.load_for_copy(now, seconds, sender_free_ns);
        (loaded_ns.min(deadline_ns), CopyStage::Loading)
    }

    /// A block has been loaded.
    fn block_copied(&mut self, now: u64, number: usize) -> (u64, CopyStage) {
        let copy = &mut self.copies[number];
        let worker = copy.worker;
        if now >= copy.deadline_ns {
            return self.end_copy(now, worker, CopyEnd::Failed);
        }
        if let Some(block) = copy.blocks.pop_front() {
            copy.loaded_blocks += 1;
            self.workers[worker].engine.store_copied(block, number as u32, &mut self.effects);
        }
        self.publish_effects(now, worker);
        self.copy_next_block(now, number)
    }

    fn end_copy(&mut self, now: u64, worker: usize, end: CopyEnd) -> (u64, CopyStage) {
        self.workers[worker].is_copying = false;
        (now + self.event_delay_ns, CopyStage::Ended(end))
    }

    /// The link over which a block comes, and the worker that sends it if the store does not.
    fn source_of_copy(&self, from: Option<usize>, block: u32) -> Option<(Link, Option<usize>)> {
        let sender = from.filter(|from| self.workers[*from].engine.has_in_memory(block));
        if sender.is_some() {
            return peer_link(self.profile).map(|link| (link, sender));
        }
        let is_stored = self.environment.store.as_ref().is_some_and(|store| store.contains(block));
        self.profile.shared.filter(|_| is_stored).map(|store| (store.link(), None))
    }

    /// The copies of the run; `None` if routers order none.
    pub(super) fn copies_made(&self) -> Option<Copies> {
        let count = |wanted: fn(&Copying) -> bool| self.copies.iter().filter(|copy| wanted(copy)).count() as u64;
        let sum = |blocks: fn(&Copying) -> u64| self.copies.iter().map(blocks).sum::<u64>();
        let (loaded, used) = (sum(|it| it.loaded_blocks), sum(|it| it.used_blocks));
        self.routers[0].orders_copies().then(|| Copies {
            ordered: self.copies.len() as u64,
            completed: count(|it| it.stage == CopyStage::Ended(CopyEnd::Done)),
            failed: count(|it| it.stage == CopyStage::Ended(CopyEnd::Failed)),
            used: count(|it| it.used_blocks > 0),
            unused: count(|it| it.loaded_blocks > 0 && it.used_blocks == 0),
            copied_tokens: loaded * BLOCK_TOKENS,
            copied_bytes: loaded * self.profile.block_bytes(),
            used_tokens: used * BLOCK_TOKENS,
        })
    }
}

/// The link between workers. A profile without one has the speed that the router assumes.
fn peer_link(profile: &Profile) -> Option<Link> {
    let assumed = |(latency_s, bytes_per_second)| Link { bytes_per_second, latency_s };
    profile.peer.or_else(|| assumed_speed(Level::Peer).map(assumed))
}

/// Seconds to load a block for a copy. Each batch is requested when the one before has arrived. Batches have the size
/// to which live ones grow: until two thirds of their time are not latency.
fn block_seconds(profile: &Profile, link: Link) -> f64 {
    let (bytes, (mut batch, max)) = (profile.block_bytes(), BATCH_BYTES);
    while batch < max && (batch as f64) < 2.0 * link.latency_s * link.bytes_per_second {
        batch *= 2;
    }
    bytes.div_ceil(batch) as f64 * link.latency_s + bytes as f64 / link.bytes_per_second
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission;
    use crate::policy::Policy;
    use crate::replay::tests::options;
    use crate::replay::trace::{RequestSpec, Trace};
    use crate::replay::{Options, PolicyUnderTest, Store};

    const PREFIX: usize = 8;
    const KV: PolicyUnderTest = PolicyUnderTest::Policy(Policy::Kv);

    /// Two requests with the same prompt: the prefix and a part of a block.
    fn trace() -> Trace {
        let spec = RequestSpec {
            arrival_ms: 0,
            input_tokens: PREFIX as u64 * BLOCK_TOKENS + 100,
            output_tokens: 4,
            blocks: (0..=PREFIX as u32).collect(),
            session: 0,
            model: "".into(),
            tenant: "".into(),
            max_tokens: None,
        };
        Trace { requests: vec![spec.clone(), spec] }
    }

    /// Two workers with host memory for this number of blocks.
    fn with_host(blocks: u64) -> Options {
        let mut options = options(2);
        let capacity_bytes = blocks * options.profile.block_bytes();
        options.profile.host = Some(Store { capacity_bytes, bytes_per_second: 20e9, latency_s: 0.001 });
        options
    }

    /// Serves one of the requests, and holds the other one back. Returns that, the worker, and the time.
    fn serve_one(simulation: &mut Simulation<'_>) -> (u32, usize, u64) {
        let (_, other) = simulation.arrivals.remove(0);
        let first = 1 - other as usize;
        while simulation.records[first].finished_ns == 0 {
            let (now, event) = simulation.next_event().unwrap();
            simulation.advance(now, event);
        }
        (other, simulation.records[first].worker, simulation.records[first].finished_ns)
    }

    /// Runs until the first copy has loaded this number of blocks or has ended. Returns the time.
    fn run_until(simulation: &mut Simulation<'_>, blocks: u64) -> u64 {
        loop {
            let (now, event) = simulation.next_event().unwrap();
            simulation.advance(now, event);
            let copy = &simulation.copies[0];
            if copy.loaded_blocks >= blocks || matches!(copy.stage, CopyStage::Ended(_)) {
                return now;
            }
        }
    }

    #[test]
    fn a_copy_takes_the_time_of_its_link_and_is_used_by_a_request() {
        let (trace, options) = (trace(), with_host(64));
        let mut simulation = Simulation::new(&trace, &options, &KV, 1.0, 0).unwrap();
        let (request, from, begin_ns) = serve_one(&mut simulation);
        let (to, prefix) = (1 - from, trace.requests[0].blocks[..PREFIX].to_vec());
        simulation.order_copy(begin_ns, (0, to, Some(from)), prefix);
        let end_ns = run_until(&mut simulation, PREFIX as u64);
        // The way of the order; each block of 64 MiB in two batches of 32 MiB, with a latency of 1 ms each.
        let expected_s = 0.005 + PREFIX as f64 * (0.002 + 67_108_864.0 / 25e9);
        let took_s = (end_ns - begin_ns) as f64 / 1e9;
        assert!((took_s - expected_s).abs() < 1e-6, "{took_s} {expected_s}");
        let tokens = PREFIX as u64 * BLOCK_TOKENS;
        let copied_bytes = tokens * options.profile.kv_bytes_per_token;
        let copied = Copies { ordered: 1, completed: 1, copied_tokens: tokens, copied_bytes, ..Copies::default() };
        assert_eq!(simulation.copies_made(), Some(Copies { unused: 1, ..copied }));

        let spec = &trace.requests[request as usize];
        simulation.workers[to].engine.accept(request, spec, admission::Stage::Whole, None);
        simulation.start_step(end_ns, to);
        simulation.run_events().unwrap();
        assert_eq!(simulation.records[request as usize].hits, PREFIX as u64);
        assert_eq!(simulation.copies_made(), Some(Copies { used: 1, used_tokens: tokens, ..copied }));
    }

    #[test]
    fn a_copy_without_a_source_or_without_room_fails() {
        for (has_source, host_blocks) in [(false, 64), (true, 4 * PREFIX as u64 - 4)] {
            let (trace, options) = (trace(), with_host(host_blocks));
            let mut simulation = Simulation::new(&trace, &options, &KV, 1.0, 0).unwrap();
            let (_, from, begin_ns) = serve_one(&mut simulation);
            let prefix = trace.requests[0].blocks[..PREFIX].to_vec();
            simulation.order_copy(begin_ns, (0, 1 - from, has_source.then_some(from)), prefix);
            run_until(&mut simulation, 1);
            let failed = Copies { ordered: 1, failed: 1, ..Copies::default() };
            assert_eq!(simulation.copies_made(), Some(failed), "{has_source} {host_blocks}");
        }
    }

    #[test]
    fn a_copy_waits_for_queued_requests_and_gives_up_after_ten_seconds() {
        let (trace, options) = (trace(), with_host(64));
        let mut simulation = Simulation::new(&trace, &options, &KV, 1.0, 0).unwrap();
        let (request, from, begin_ns) = serve_one(&mut simulation);
        let (to, prefix) = (1 - from, trace.requests[0].blocks[..PREFIX].to_vec());
        simulation.order_copy(begin_ns, (0, to, Some(from)), prefix);
        run_until(&mut simulation, 2);
        // The worker takes no request from its queue.
        let spec = &trace.requests[request as usize];
        simulation.workers[to].is_busy = true;
        simulation.workers[to].engine.accept(request, spec, admission::Stage::Whole, None);
        let end_ns = run_until(&mut simulation, u64::MAX);
        assert_eq!(end_ns - begin_ns, 5_000_000 + TIME_LIMIT_NS);
        let copies = simulation.copies_made().unwrap();
        // The block that was being loaded has arrived, too.
        assert_eq!((copies.failed, copies.copied_tokens), (1, 3 * BLOCK_TOKENS));
    }
}
