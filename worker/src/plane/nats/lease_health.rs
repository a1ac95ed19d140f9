//! Whether leases can be renewed, for `/ready`: JetStream may refuse writes, as with a full disk, while the connection
//! to NATS is there.
//!
//! Not here: the connection itself ([`Connection::problem`](super::Connection::problem)).

use crate::plane::WorkerId;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// What a process knows of the renewals of its own leases and of those that it follows.
pub(super) struct LeaseHealth {
    lease: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Workers of this process whose last renewal failed.
    failing: BTreeMap<WorkerId, Failing>,
    /// Workers that this process has found.
    followed: usize,
    /// The time in which one of them renews, if that is longer than the lease of this process.
    renewed_within: Duration,
    /// When a change of a worker was last received; `None` before this process follows any.
    changed_at: Option<Instant>,
}

struct Failing {
    /// When the lease was renewed last.
    renewed_at: Instant,
    error: String,
}

/// What an operator is to check.
const ADVICE: &str = "check JetStream of the NATS server: its disk, its limits, and in a cluster its leader";

impl LeaseHealth {
    pub(super) fn new(lease: Duration) -> Self {
        Self { lease, state: Mutex::default() }
    }

    /// A renewal has failed of a lease that was last renewed at this time.
    pub(super) fn renewal_failed(&self, id: WorkerId, renewed_at: Instant, error: &str) {
        self.state.lock().failing.insert(id, Failing { renewed_at, error: error.to_owned() });
    }

    /// A lease was renewed, or has ended.
    pub(super) fn clear(&self, id: WorkerId) {
        self.state.lock().failing.remove(&id);
    }

    /// A change of a worker was received, or this process has begun to follow changes.
    pub(super) fn change_received(&self, now: Instant) {
        self.state.lock().changed_at = Some(now);
    }

    /// The number of workers that this process has found, and the time in which one of them renews.
    pub(super) fn set_followed(&self, workers: usize, renewed_within: Duration) {
        let mut state = self.state.lock();
        (state.followed, state.renewed_within) = (workers, renewed_within);
    }

    /// What is wrong, while the process is connected to NATS: own leases that were not renewed for longer than a lease,
    /// and no renewal of any worker for two leases.
    pub(super) fn problems(&self, now: Instant) -> Vec<String> {
        let state = self.state.lock();
        let failing = state.failing.iter().filter(|(_, failing)| now - failing.renewed_at > self.lease);
        let failing = failing.map(|(id, Failing { renewed_at, error })| {
            let seconds = (now - *renewed_at).as_secs();
            format!(
                "the lease of worker {id} could not be renewed for {seconds} s ({error}); frontends may send it no new \
                 requests; {ADVICE}"
            )
        });
        let max_silence = state.renewed_within.max(self.lease) * 2;
        let silent_since = state.changed_at.filter(|at| state.followed > 0 && now - *at > max_silence);
        let silence = silent_since.map(|at| {
            let seconds = (now - at).as_secs();
            format!(
                "no worker has renewed its lease for {seconds} s, although NATS is connected; the last view of workers \
                 is used; {ADVICE}"
            )
        });
        failing.chain(silence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(6);

    #[test]
    fn a_lease_is_reported_when_its_renewals_fail_for_longer_than_a_lease() {
        let (health, start) = (LeaseHealth::new(LEASE), Instant::now());
        for id in [1, 2] {
            health.renewal_failed(WorkerId(id), start, "no space left");
        }
        assert_eq!(health.problems(start + LEASE), [""; 0], "it may still be renewed in time");
        health.clear(WorkerId(1));
        let problems = health.problems(start + LEASE * 2);
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        assert!(problem.contains("worker w2 could not be renewed for 12 s (no space left)"), "{problem}");
    }

    #[test]
    fn a_silence_of_all_workers_is_reported_while_there_are_workers() {
        let (health, start) = (LeaseHealth::new(LEASE), Instant::now());
        let late = start + LEASE * 3;
        health.set_followed(2, LEASE);
        assert_eq!(health.problems(late), [""; 0], "this process follows none yet");
        health.change_received(start);
        assert_eq!(health.problems(start + LEASE * 2), [""; 0]);
        let problems = health.problems(late);
        assert!(problems.len() == 1 && problems[0].starts_with("no worker has renewed its lease for 18 s"));
        health.set_followed(2, LEASE * 2);
        assert_eq!(health.problems(late), [""; 0], "the workers have longer leases");
        health.set_followed(0, LEASE);
        assert_eq!(health.problems(late), [""; 0]);
    }
}
