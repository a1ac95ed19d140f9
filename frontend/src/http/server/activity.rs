//! The state of one connection, as its stream and its requests report it, and the time limit that applies to it.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use transport::Socket;

/// The first bytes of an HTTP/2 connection (RFC 9113, 3.4). The header limit applies until all of them have arrived.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Maximum bytes of a write that has no response data: pings and other HTTP/2 control frames.
const HTTP2_CONTROL_BYTES: usize = 64;

/// The time limits of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// Maximum time from a connection's start, or from the first byte of a later request, to the end of the request's
    /// headers.
    pub(super) header: Duration,
    /// Maximum time between two requests.
    pub(super) idle: Duration,
    /// Maximum time without a written byte while there are bytes to write.
    pub(super) write: Duration,
}

/// Why the server ends a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Expired {
    /// The headers of a request did not arrive in time.
    Header {
        /// Some bytes of them arrived.
        begun: bool,
    },
    /// No further request arrived.
    Idle,
    /// The client did not read.
    Write,
    /// A new connection needed its slot, and it had waited for its client for the longest time.
    Evicted,
}

/// The state of one connection.
pub(super) struct Activity {
    state: Mutex<State>,
    /// Wakes [`expired`](Activity::expired) when the connection is evicted.
    changed: Notify,
    /// The connection speaks another protocol than HTTP.
    switched: AtomicBool,
}

struct State {
    /// Requests whose response is not completely passed to the transport. Above 0, only the write limit applies.
    requests: usize,
    /// Those of `requests` whose next output the server is computing. The others wait for the client to read, which
    /// over HTTP/2 the socket does not show.
    working: usize,
    /// Those of `requests` whose body has not arrived completely.
    receiving: usize,
    /// Since when `receiving` is above 0.
    receiving_since: Instant,
    /// When a response last passed data to its transport, or the transport to the client.
    progressed: Instant,
    phase: Phase,
    http2: bool,
    /// Bytes of the HTTP/2 preface that have arrived; `None` after other bytes.
    preface: Option<usize>,
    /// Since when the transport has accepted no bytes.
    blocked: Option<Instant>,
    evicted: bool,
    /// The client may still be sending: the close is a lingering one, which reads for a while first.
    linger: bool,
    /// The socket, after the HTTP layer has dropped its stream.
    returned: Option<Socket>,
}

/// A connection without a request.
#[derive(Clone, Copy)]
enum Phase {
    /// Waits for the rest of a request's headers; `begun` after the first byte.
    Header { since: Instant, begun: bool },
    /// Waits for the next request.
    Idle { since: Instant },
}

impl Activity {
    /// The activity of a connection that was accepted now.
    pub(super) fn new() -> Arc<Self> {
        let state = State {
            requests: 0,
            working: 0,
            receiving: 0,
            receiving_since: Instant::now(),
            progressed: Instant::now(),
            phase: Phase::Header { since: Instant::now(), begun: false },
            http2: false,
            preface: Some(0),
            blocked: None,
            evicted: false,
            linger: false,
            returned: None,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new(), switched: AtomicBool::new(false) })
    }

    /// Reports received bytes.
    pub(super) fn received(&self, bytes: &[u8]) {
        let mut state = self.state();
        if state.requests > 0 || state.http2 {
            return;
        }
        state.preface = state.preface.and_then(|before| {
            let missing = &HTTP2_PREFACE[before..];
            let arrived = bytes;
            let length = missing.len().min(arrived.len());
            (missing[..length] == arrived[..length]).then_some(before + length)
        });
        if state.preface == Some(HTTP2_PREFACE.len()) {
            state.http2 = true;
            state.phase = Phase::Idle { since: Instant::now() };
            return;
        }
        let since = match state.phase {
            Phase::Header { since, .. } => since,
            Phase::Idle { .. } => Instant::now(),
        };
        state.phase = Phase::Header { since, begun: true };
    }

    /// Reports a request, which counts until the guard is dropped.
    pub(super) fn request(self: &Arc<Self>, http2: bool) -> RequestGuard {
        let mut state = self.state();
        // A request that comes first keeps the connection.
        state.evicted = false;
        state.requests += 1;
        state.working += 1;
        state.http2 |= http2;
        RequestGuard { activity: Arc::clone(self), working: true, http2 }
    }

    /// The number of requests in progress.
    pub(super) fn requests(&self) -> usize {
        self.state().requests
    }

    /// Reports that the transport accepts no bytes for now.
    pub(super) fn write_blocked(&self) {
        self.state().blocked.get_or_insert_with(Instant::now);
    }

    /// Reports that the transport accepted `bytes`.
    pub(super) fn write_progressed(&self, bytes: usize) {
        let mut state = self.state();
        state.blocked = None;
        // Over HTTP/1 the time of progress matters only after the last request.
        let matters = if state.http2 { bytes > HTTP2_CONTROL_BYTES } else { state.requests == 0 };
        if matters {
            state.progressed = Instant::now();
        }
    }

    /// Requests a lingering close: the client may not have finished sending.
    pub(super) fn linger(&self) {
        self.state().linger = true;
    }

    /// Whether the connection needs a lingering close.
    pub(super) fn lingers(&self) -> bool {
        self.state().linger
    }

    /// Reports that the connection switches to another protocol.
    pub(super) fn switch(&self) {
        self.switched.store(true, Ordering::Relaxed);
    }

    /// Whether the connection speaks another protocol than HTTP.
    pub(super) fn has_switched(&self) -> bool {
        self.switched.load(Ordering::Relaxed)
    }

    /// Stores the socket when the HTTP layer drops its stream.
    pub(super) fn return_stream(&self, stream: Socket) {
        self.state().returned = Some(stream);
    }

    /// Takes the socket, if the HTTP layer has dropped its stream.
    pub(super) fn take_stream(&self) -> Option<Socket> {
        self.state().returned.take()
    }

    /// Reports a request's body that has not arrived completely, until the guard is dropped.
    pub(super) fn receiving(self: &Arc<Self>) -> ReceivingGuard {
        let mut state = self.state();
        if state.receiving == 0 {
            state.receiving_since = Instant::now();
        }
        state.receiving += 1;
        ReceivingGuard(Arc::clone(self))
    }

    /// Since when the connection has waited for its client: for a request, or for the bodies of all its requests.
    /// `None` if it is evicted, or if the server works on a request.
    pub(super) fn waits_for_client_since(&self) -> Option<Instant> {
        let state = self.state();
        let (Phase::Header { since, .. } | Phase::Idle { since }) = state.phase;
        let since = if state.requests == 0 { since } else { state.receiving_since };
        (state.waits_for_client() && !state.evicted).then_some(since)
    }

    /// Ends the connection if it waits for its client. Returns whether it ends.
    pub(super) fn evict(&self) -> bool {
        let mut state = self.state();
        state.evicted |= state.waits_for_client();
        if state.evicted {
            self.changed.notify_one();
        }
        state.evicted
    }

    /// Resolves when a time limit has passed.
    ///
    /// A limit that begins later is not announced, because limits begin with every request: it ends no earlier than the
    /// shortest limit from now, and is found then.
    pub(super) async fn expired(&self, timeouts: &Timeouts) -> Expired {
        let shortest = timeouts.header.min(timeouts.idle).min(timeouts.write);
        loop {
            let (at, expired) = self.next_limit(timeouts);
            let now = Instant::now();
            if at <= now {
                return expired;
            }
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = sleep_until(at.min(now + shortest)) => {}
            }
        }
    }

    /// Resolves when the connection is evicted.
    pub(super) async fn evicted(&self) {
        while !self.state().evicted {
            self.changed.notified().await;
        }
    }

    fn next_limit(&self, timeouts: &Timeouts) -> (Instant, Expired) {
        let state = self.state();
        if state.evicted && state.waits_for_client() {
            return (Instant::now(), Expired::Evicted);
        }
        let waiting = match state.phase {
            // While the server computes, this polls once per limit, so that responses need not wake the waiter.
            _ if state.requests > 0 => {
                let since = if state.working == 0 { state.progressed } else { Instant::now() };
                (since + timeouts.write, Expired::Write)
            }
            Phase::Header { since, begun } => (since + timeouts.header, Expired::Header { begun }),
            // The last response may still be in transit to the client.
            Phase::Idle { since } => (since.max(state.progressed) + timeouts.idle, Expired::Idle),
        };
        let blocked = state.blocked.map(|since| (since + timeouts.write, Expired::Write));
        blocked.filter(|(at, _)| *at < waiting.0).unwrap_or(waiting)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Whether nothing can happen on the connection before its client sends more.
    fn waits_for_client(&self) -> bool {
        self.requests == self.receiving
    }
}

/// A request's body that has not arrived completely.
#[must_use]
pub(super) struct ReceivingGuard(Arc<Activity>);

impl Drop for ReceivingGuard {
    fn drop(&mut self) {
        self.0.state().receiving -= 1;
    }
}

/// A request in progress. Dropping it ends the request.
#[must_use]
pub(super) struct RequestGuard {
    activity: Arc<Activity>,
    /// The server is computing its next output. Over HTTP/1 it counts as that all the time, because the socket shows
    /// when the client does not read.
    working: bool,
    http2: bool,
}

impl RequestGuard {
    /// Reports that the response passed data to its transport, which polls again when the client has read it.
    pub(super) fn handed_over(&mut self) {
        if !self.http2 {
            return;
        }
        let mut state = self.activity.state();
        state.progressed = Instant::now();
        state.working -= usize::from(std::mem::take(&mut self.working));
    }

    /// Reports that the transport polled for data and there is none yet.
    pub(super) fn working(&mut self) {
        if !std::mem::replace(&mut self.working, true) {
            self.activity.state().working += 1;
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let mut state = self.activity.state();
        state.requests -= 1;
        state.working -= usize::from(self.working);
        if state.requests == 0 {
            state.phase = Phase::Idle { since: Instant::now() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Activity, Expired, Timeouts};
    use std::time::Duration;
    use tokio::time::Instant;

    const TIMEOUTS: Timeouts =
        Timeouts { header: Duration::from_secs(10), idle: Duration::from_secs(75), write: Duration::from_secs(30) };

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_own_timeout() {
        let start = Instant::now();
        let activity = Activity::new();
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Header { begun: false });
        assert_eq!(start.elapsed().as_secs(), 10);
        activity.received(b"GET / HT");
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Header { begun: true });

        let request = activity.request(false);
        let long = tokio::time::timeout(Duration::from_hours(1), activity.expired(&TIMEOUTS));
        assert!(long.await.is_err(), "a request in progress has no limit here");
        activity.write_blocked();
        let start = Instant::now();
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Write);
        assert_eq!(start.elapsed().as_secs(), 30);
        activity.write_progressed(0);

        drop(request);
        let start = Instant::now();
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Idle);
        assert_eq!(start.elapsed().as_secs(), 75);
        activity.received(b"G");
        let start = Instant::now();
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Header { begun: true });
        assert_eq!(start.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn responses_that_all_wait_for_the_client_expire() {
        let activity = Activity::new();
        let mut one = activity.request(true);
        let mut other = activity.request(true);
        one.handed_over();
        let long = tokio::time::timeout(Duration::from_hours(1), activity.expired(&TIMEOUTS));
        assert!(long.await.is_err(), "the server works on the other one");
        other.handed_over();
        let start = Instant::now();
        assert_eq!((activity.expired(&TIMEOUTS).await, start.elapsed().as_secs()), (Expired::Write, 30));
        one.working();
        let long = tokio::time::timeout(Duration::from_hours(1), activity.expired(&TIMEOUTS));
        assert!(long.await.is_err(), "the client has taken what there was");
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_that_is_still_written_is_not_idle() {
        for (http2, bytes, expected) in [(false, 1, 135), (true, 1000, 135), (true, 17, 75)] {
            let start = Instant::now();
            let activity = Activity::new();
            drop(activity.request(http2));
            let write = async {
                tokio::time::sleep(Duration::from_mins(1)).await;
                activity.write_progressed(bytes);
            };
            let (expired, ()) = tokio::join!(activity.expired(&TIMEOUTS), write);
            assert_eq!((expired, start.elapsed().as_secs()), (Expired::Idle, expected), "{bytes} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_shorter_limit_that_begins_later_is_noticed() {
        let activity = Activity::new();
        drop(activity.request(false));
        let start = Instant::now();
        let begin = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            activity.received(b"P");
        };
        let (expired, ()) = tokio::join!(activity.expired(&TIMEOUTS), begin);
        assert_eq!((expired, start.elapsed().as_secs()), (Expired::Header { begun: true }, 15));
    }

    #[tokio::test(start_paused = true)]
    async fn http2_frames_are_no_request_headers() {
        let activity = Activity::new();
        activity.received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        activity.received(b"\0\0\0\x04\0\0\0\0\0");
        let start = Instant::now();
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Idle);
        assert_eq!(start.elapsed().as_secs(), 75);
    }

    #[tokio::test(start_paused = true)]
    async fn part_of_the_http2_preface_is_an_unfinished_header() {
        let activity = Activity::new();
        activity.received(b"PRI * HT");
        let start = Instant::now();
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Header { begun: true });
        assert_eq!(start.elapsed().as_secs(), 10);
        let activity = Activity::new();
        for part in ["PRI * HTTP/2.0\r\n", "\r\nSM\r\n\r", "\n"] {
            activity.received(part.as_bytes());
        }
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Idle);
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_connection_that_waits_for_its_client_is_evicted() {
        let activity = Activity::new();
        let request = activity.request(false);
        assert!(!activity.evict() && activity.waits_for_client_since().is_none());
        drop(request);
        assert!(activity.waits_for_client_since().is_some() && activity.evict());
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Evicted);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_comes_before_the_eviction_is_served() {
        let activity = Activity::new();
        assert!(activity.evict());
        let request = activity.request(false);
        let served = tokio::time::timeout(Duration::from_hours(1), activity.expired(&TIMEOUTS));
        assert!(served.await.is_err());
        drop(request);
        assert!(activity.evict(), "it can be evicted later");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_bodies_are_all_incomplete_is_evicted() {
        let activity = Activity::new();
        let incomplete = (activity.request(true), activity.receiving());
        let complete = activity.request(true);
        assert!(!activity.evict(), "the server works on one of them");
        drop(complete);
        assert!(activity.evict());
        assert_eq!(activity.expired(&TIMEOUTS).await, Expired::Evicted);
        drop(incomplete);
    }
}
