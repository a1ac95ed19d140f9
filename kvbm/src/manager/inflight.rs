//! Single flight: the blocks that loads are bringing into G1, so that concurrent requests load a prefix once.
//!
//! The request that loads blocks holds a [`LoadClaim`] and reports each step; other requests follow it, each with its
//! own wait budget, and take over when the claim is dropped. Two copies of a prefix would be read twice, and would
//! evict other blocks from G1.

use crate::block::SequenceHash;
use crate::table::{BlockMap, BlockSet};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

/// The claimed blocks of one G1, each with the progress of the load that claimed it.
#[derive(Default)]
pub(super) struct InflightLoads(Mutex<BlockMap<watch::Receiver<()>>>);

/// The exclusive right to load some blocks. Dropping it tells followers that the load has ended.
pub(super) struct LoadClaim<'a> {
    loads: &'a InflightLoads,
    claimed: BlockSet,
    progress: watch::Sender<()>,
}

impl InflightLoads {
    /// Claims `hashes`, unless another load has claimed the first of them: then returns that load's later progress.
    pub(super) fn claim(&self, hashes: &[SequenceHash]) -> Result<LoadClaim<'_>, watch::Receiver<()>> {
        let loads = self.0.lock();
        if let Some(other) = hashes.first().and_then(|first| loads.get(first)) {
            let mut progress = other.clone();
            progress.mark_unchanged();
            return Err(progress);
        }
        Ok(self.claim_free(loads, hashes))
    }

    /// Claims those of `hashes` that no other load has claimed.
    pub(super) fn claim_rest(&self, hashes: &[SequenceHash]) -> LoadClaim<'_> {
        self.claim_free(self.0.lock(), hashes)
    }

    fn claim_free(
        &self,
        loads: MutexGuard<'_, BlockMap<watch::Receiver<()>>>,
        hashes: &[SequenceHash],
    ) -> LoadClaim<'_> {
        let mut claim = LoadClaim { loads: self, claimed: BlockSet::default(), progress: watch::Sender::new(()) };
        claim.add(loads, hashes);
        claim
    }
}

impl LoadClaim<'_> {
    /// Also claims those of `hashes` that no other load has claimed.
    pub(super) fn extend(&mut self, hashes: &[SequenceHash]) {
        self.add(self.loads.0.lock(), hashes);
    }

    fn add(&mut self, mut loads: MutexGuard<'_, BlockMap<watch::Receiver<()>>>, hashes: &[SequenceHash]) {
        for hash in hashes {
            loads.entry(*hash).or_insert_with(|| {
                self.claimed.insert(*hash);
                self.progress.subscribe()
            });
        }
    }

    /// Gives the claimed blocks up, so that another load may claim them.
    pub(super) fn release(&mut self) {
        *self = Self { loads: self.loads, claimed: BlockSet::default(), progress: watch::Sender::new(()) };
    }

    /// Tells followers that more of the blocks are in G1.
    pub(super) fn notify_progress(&self) {
        self.progress.send_replace(());
    }

    /// Whether this claim includes the block.
    pub(super) fn includes(&self, hash: &SequenceHash) -> bool {
        self.claimed.contains(hash)
    }
}

impl Drop for LoadClaim<'_> {
    fn drop(&mut self) {
        let mut loads = self.loads.0.lock();
        for hash in &self.claimed {
            loads.remove(hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(n: u8) -> Vec<SequenceHash> {
        (0..n).map(|n| SequenceHash::from_bytes([n; 16])).collect()
    }

    #[tokio::test]
    async fn a_second_load_follows_until_the_first_ends() {
        let loads = InflightLoads::default();
        let Ok(first) = loads.claim(&hashes(3)) else { panic!("no other load claimed them") };
        first.notify_progress();
        let Err(mut progress) = loads.claim(&hashes(5)) else { panic!("the first load claimed them") };
        assert!(!progress.has_changed().unwrap(), "only later progress");
        first.notify_progress();
        assert!(progress.changed().await.is_ok());
        drop(first);
        assert!(progress.changed().await.is_err());
        assert!(loads.claim(&hashes(5)).is_ok());
        assert!(loads.0.lock().is_empty());
    }

    #[test]
    fn a_claim_of_the_middle_stays_exclusive() {
        let loads = InflightLoads::default();
        let Ok(middle) = loads.claim(&hashes(3)[1..]) else { panic!("no other load claimed them") };
        let whole = loads.claim(&hashes(4));
        assert!(whole.is_ok(), "the first block is not claimed");
        drop(whole);
        assert!(loads.claim(&hashes(3)[1..]).is_err(), "still claimed by the first load");
        let mut rest = loads.claim_rest(&hashes(4)[1..]);
        assert_eq!([1, 2, 3].map(|at| rest.includes(&hashes(4)[at])), [false, false, true]);
        drop(middle);
        rest.extend(&hashes(4));
        assert!(hashes(4).iter().all(|hash| rest.includes(hash)), "the first claim is released");
    }
}
