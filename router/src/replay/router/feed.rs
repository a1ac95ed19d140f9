//! What the router of a replay learns: block events, load reports and snapshots of workers, and the reservations of
//! other routers.

use super::{EPOCH, SimulatedRouter};
use crate::control::{Outcome, SourceCursor};
use crate::index::Holder;
use crate::replay::baselines::Report;
use crate::replay::plane::Message;
use crate::replay::trace;
use kvbm::{Level, Run};
use worker::plane::{ReservationUpdate, RouterId};

/// A source of events, and the position up to which they are applied.
pub(super) struct Feed {
    holder: Holder,
    cursor: SourceCursor,
}

impl Feed {
    /// The source of this holder, whose snapshot without blocks is applied.
    pub(super) fn new(holder: Holder) -> Self {
        let mut cursor = SourceCursor::new(Some(EPOCH));
        cursor.snapshot_applied(EPOCH, 0);
        Self { holder, cursor }
    }
}

impl SimulatedRouter {
    /// Applies the reservation updates of another router.
    pub(in crate::replay) fn apply_updates(&mut self, now_ns: u64, from: usize, updates: Vec<ReservationUpdate>) {
        let now = self.instant(now_ns);
        self.peer_routers.apply(RouterId(from as u64), updates, &self.fleet, &self.inflight, now);
    }

    /// Removes the reservations of routers that have not sent anything for too long.
    pub(in crate::replay) fn expire_peers(&mut self, now_ns: u64) {
        let now = self.instant(now_ns);
        self.peer_routers.expire(now);
    }

    /// Applies an event or a report. Returns whether a snapshot of the source is needed.
    pub(in crate::replay) fn receive(&mut self, now_ns: u64, from: usize, message: Message) -> bool {
        let now = self.instant(now_ns);
        let feed = &mut self.feeds[from];
        match message {
            Message::Load(load) => {
                if let Some(baseline) = &mut self.baseline {
                    let kv_usage = load.active_blocks as f64 / load.total_blocks.max(1) as f64;
                    baseline.reported(from, Report { waiting: load.waiting, kv_usage });
                }
                feed.cursor.behind(EPOCH, load.number, now);
                self.workers[from].reported(&load);
                self.workers[from].load.report(load, now);
            }
            Message::Blocks(number, event) => {
                if let Outcome::Apply(event) = feed.cursor.event(EPOCH, number, event) {
                    self.index.apply(feed.holder, &event);
                }
            }
        }
        feed.cursor.next_request(0).is_some()
    }

    /// Applies a snapshot of a source, taken at this moment. Returns whether another one is needed.
    pub(in crate::replay) fn apply_snapshot(
        &mut self,
        from: usize,
        number: u64,
        blocks: impl Iterator<Item = (Level, u32)>,
    ) -> bool {
        let feed = &mut self.feeds[from];
        let run = |(level, block)| Run { level, parent: None, blocks: vec![trace::block_hash(block)] };
        let runs: Vec<Run> = blocks.map(run).collect();
        if feed.cursor.accept_snapshot(EPOCH, number) {
            self.index.replace(feed.holder, &runs);
            feed.cursor.snapshot_applied(EPOCH, number);
        }
        while let Some(event) = feed.cursor.next() {
            self.index.apply(feed.holder, &event);
        }
        feed.cursor.next_request(0).is_some()
    }
}
