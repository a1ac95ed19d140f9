//! Several routers over the same workers: each sends its reservations to the others, so that they do not choose the
//! same worker at the same time.
//!
//! ```text
//!   Booking ──▶ ReplicaOutbox ──▶ events ──▶ PeerRouters ──▶ load and inflight prefixes, as if booked here
//! ```
//! Reports of workers soon contain the same requests, so this only bridges the time until they do: messages have no
//! sequence numbers, and of the changes only the end of a booking is sent again, with the next heartbeats. A router
//! without a message for some seconds has ended, and its bookings with it; a booking whose end was lost each time
//! expires after a while. Without peers only heartbeats are sent.

use crate::booking::{InflightPrefix, InflightPrefixes, ReplicaOutbox};
use crate::fleet::Fleet;
use crate::load::{Demand, WorkerLoad};
use futures::StreamExt;
use kvbm::Epoch;
use prometheus::IntGauge;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};
use worker::plane::{Event, EventBody, Events, ReservationUpdate, RouterId, Source, Topic};

/// The bookings of other routers.
#[derive(Default)]
pub(crate) struct PeerRouters(BTreeMap<RouterId, PeerRouter>);

/// One other router.
struct PeerRouter {
    last_message: Instant,
    /// Its open bookings, by its numbers.
    open: BTreeMap<u64, PeerBooking>,
}

/// One booking of another router.
struct PeerBooking {
    /// Load of the booked worker.
    load: Arc<WorkerLoad>,
    /// Number of the booking in `load`.
    number: u64,
    since: Instant,
    /// The prompt's prefix, until the first token: from then on KV events announce it.
    inflight: Option<InflightPrefix>,
}

/// Longest interval between two messages of a router.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);
/// A router without a message for this long has ended: three missed heartbeats.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(3);
/// A booking of another router expires after this time: reports contain the request by then, and its end and all
/// repeats of it may have been lost.
const BOOKING_TIMEOUT: Duration = Duration::from_mins(1);

impl PeerRouters {
    /// Applies a message of another router.
    pub(crate) fn apply(
        &mut self,
        from: RouterId,
        changes: Vec<ReservationUpdate>,
        fleet: &Fleet,
        inflight_prefixes: &Arc<InflightPrefixes>,
        now: Instant,
    ) {
        let peer = self.0.entry(from).or_insert_with(|| PeerRouter { last_message: now, open: BTreeMap::new() });
        peer.last_message = now;
        let workers = fleet.snapshot();
        for change in changes {
            match change {
                ReservationUpdate::Placed {
                    number,
                    worker,
                    prefill_tokens,
                    blocks,
                    decodes,
                    context_tokens,
                    anchors,
                } => {
                    // This router cannot send to a worker that it has not seen join.
                    let Some(local) = workers.get(worker) else { continue };
                    let prompts = u64::from(prefill_tokens > 0);
                    if let Some(pool) = workers.pool(&local.instance.model.id).filter(|_| prompts > 0) {
                        pool.prompt_placed_elsewhere(now.into());
                    }
                    let demand = Demand {
                        prefill_tokens,
                        blocks,
                        prompts,
                        sequences: u64::from(decodes),
                        context_tokens,
                        timed_tokens: 0,
                        prefill_micros: 0,
                    };
                    let inflight = Some(inflight_prefixes.add_anchors(local.slot, anchors.into()));
                    let load = local.load.clone();
                    let number_here = load.book_remote(demand, now);
                    let booking = PeerBooking { load, number: number_here, since: now, inflight };
                    if let Some(previous) = peer.open.insert(number, booking) {
                        previous.release(now);
                    }
                }
                ReservationUpdate::Dequeued(number) => {
                    peer.with(number, |booking| booking.load.dequeued(booking.number));
                }
                ReservationUpdate::Sent(number) => peer.with(number, |booking| booking.load.sent(booking.number, now)),
                ReservationUpdate::Revised { number, prefill_tokens } => {
                    peer.with(number, |booking| booking.load.revise(booking.number, prefill_tokens));
                }
                ReservationUpdate::Started(number) => peer.with(number, |booking| {
                    booking.load.started(booking.number, now);
                    booking.inflight = None;
                }),
                // Repeated, so it may be of a booking that has ended, or whose placement was lost or comes later.
                ReservationUpdate::Released(number) => {
                    if let Some(booking) = peer.open.remove(&number) {
                        booking.release(now);
                    }
                }
            }
        }
    }

    /// Removes routers that have ended, and bookings that have expired.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.0.retain(|_, peer| {
            let gone = now.saturating_duration_since(peer.last_message) > PEER_TIMEOUT;
            let ended = |booking: &PeerBooking| gone || now.saturating_duration_since(booking.since) > BOOKING_TIMEOUT;
            peer.open.extract_if(.., |_, booking| ended(booking)).for_each(|(_, booking)| booking.release(now));
            !gone
        });
    }

    /// The router with the lowest id.
    fn first(&self) -> Option<RouterId> {
        self.0.keys().next().copied()
    }

    /// Number of other routers.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

impl PeerRouter {
    /// Ignores changes of bookings that are unknown or have expired.
    fn with(&mut self, number: u64, change: impl FnOnce(&mut PeerBooking)) {
        if let Some(booking) = self.open.get_mut(&number) {
            change(booking);
        }
    }
}

impl PeerBooking {
    fn release(self, now: Instant) {
        self.load.release(self.number, 0, now);
    }
}

/// Sends this router's bookings to the others and applies theirs, until the event plane ends. Sets the number of
/// `replicas`, and whether this router `is_leader`: the one of them that plans roles.
pub(crate) async fn run(
    events: Arc<dyn Events>,
    id: RouterId,
    fleet: Arc<Fleet>,
    inflight: Arc<InflightPrefixes>,
    outbox: Arc<ReplicaOutbox>,
    replicas: IntGauge,
    is_leader: Arc<AtomicBool>,
) {
    let mut bookings = events.subscribe(Topic::Reservations);
    let mut beat = tokio::time::interval(HEARTBEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut peers = PeerRouters::default();
    let publish = |changes| {
        events.publish(Event { source: Source::Router(id), epoch: Epoch(0), body: EventBody::Reservations(changes) });
    };
    loop {
        tokio::select! {
            biased;
            event = bookings.next() => {
                let Some(Event { source, body, .. }) = event else { return };
                let (Source::Router(from), EventBody::Reservations(changes)) = (source, body) else { continue };
                if from != id {
                    peers.apply(from, changes, &fleet, &inflight, Instant::now());
                    outbox.set_has_peers(true);
                }
            }
            () = outbox.changed() => publish(outbox.take()),
            _ = beat.tick() => {
                peers.expire(Instant::now());
                outbox.set_has_peers(peers.count() > 0);
                replicas.set(peers.count() as i64 + 1);
                is_leader.store(peers.first().is_none_or(|first| id < first), Ordering::Relaxed);
                publish(outbox.take_heartbeat());
            }
        }
    }
}
