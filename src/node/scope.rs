//! Ids of workers and stores, unique among the processes that know them.

use kvbm::Fingerprint;
use worker::plane::{StoreId, WorkerId};

/// Where the ids of workers and stores are known.
pub(super) enum Scope {
    /// In this process: workers are numbered, and a folder or a store has one id in all processes.
    Process,
    /// In all processes of a deployment: ids are derived from the URL of this process, because others have workers and
    /// folders of the same names.
    Deployment(Fingerprint),
}

impl Scope {
    /// The scope of a process at a URL.
    pub(super) fn of(url: &str) -> Self {
        Self::Deployment(Fingerprint::of([("process", url.as_bytes())]))
    }

    /// The id of the worker with a number, from 1.
    pub(super) fn worker(&self, number: u64) -> WorkerId {
        match self {
            Self::Process => WorkerId(number),
            Self::Deployment(process) => {
                let parts = [("process", &process.as_bytes()[..]), ("worker", &number.to_le_bytes())];
                // JSON represents integers exactly up to 53 bits.
                WorkerId(first(&Fingerprint::of(parts)) >> 16)
            }
        }
    }

    /// The id of a store whose name is `name`. In a deployment each process publishes what it knows of a shared store
    /// under an id of its own.
    pub(super) fn store(&self, name: &Fingerprint) -> StoreId {
        match self {
            Self::Process => StoreId(first(name)),
            Self::Deployment(process) => {
                let parts = [("process", &process.as_bytes()[..]), ("store", name.as_bytes())];
                StoreId(first(&Fingerprint::of(parts)))
            }
        }
    }
}

/// The first eight bytes as a number.
fn first(fingerprint: &Fingerprint) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *fingerprint.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_a_deployment_differ_by_process_and_stay_the_same() {
        let (one, other) = (Scope::of("http://a:8100"), Scope::of("http://b:8100"));
        let ids = [one.worker(1), one.worker(2), other.worker(1), other.worker(2)];
        assert!((1..4).all(|n| !ids[..n].contains(&ids[n])), "{ids:?}");
        assert_eq!(ids[0], Scope::of("http://a:8100").worker(1));
        assert!(ids.iter().all(|id| id.0 < 1 << 53), "JSON represents them exactly");
        let name = Fingerprint::of([("folder", &b"/data/g3"[..])]);
        assert_ne!(one.store(&name), other.store(&name));
        assert_eq!(Scope::Process.worker(3), WorkerId(3));
        assert_eq!(Scope::Process.store(&name), Scope::Process.store(&name));
    }
}
