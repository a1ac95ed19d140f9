use super::*;

/// A cache of hashes without bytes.
struct Cache {
    index: EvictionIndex,
    free: Vec<u32>,
}

impl Cache {
    fn new(capacity: u32) -> Self {
        Self { index: EvictionIndex::new(capacity as usize), free: (0..capacity).collect() }
    }

    /// One request for a chain: its blocks are found or inserted.
    fn request(&mut self, chain: &[SequenceHash]) {
        let mut held = Vec::new();
        let mut parent = None;
        for hash in chain {
            let slot = self.index.find(*hash);
            let slot = slot.inspect(|slot| {
                self.index.hold(*slot);
                self.index.record_use(*slot);
            });
            held.push(slot.unwrap_or_else(|| {
                let slot = self.free.pop().unwrap_or_else(|| self.index.evict().expect("some block is evictable").0);
                self.index.insert(slot, (*hash, parent), Priority::Normal, 0);
                self.index.hold(slot);
                slot
            }));
            parent = Some(*hash);
        }
        held.into_iter().rev().for_each(|slot| assert!(!self.index.release(slot)));
    }

    /// One request per block.
    fn request_each(&mut self, hashes: &[SequenceHash]) {
        for hash in hashes {
            self.request(&[*hash]);
        }
    }

    fn resident(&self, hashes: &[SequenceHash]) -> usize {
        hashes.iter().filter(|hash| self.index.find(**hash).is_some()).count()
    }
}

fn hashes(from: u32, count: u32) -> Vec<SequenceHash> {
    let hash = |n: u32| SequenceHash::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap());
    (from..from + count).map(hash).collect()
}

#[test]
fn a_scan_does_not_evict_the_hot_set() {
    let mut cache = Cache::new(1_000);
    // Half single blocks, half the common head of conversations with different tails.
    let (single, head) = (hashes(0, 250), hashes(500, 250));
    for round in 0..8 {
        cache.request_each(&single);
        cache.request(&[head.clone(), hashes(10_000 + round * 10, 10)].concat());
    }
    for scan in 0..1_000 {
        cache.request(&hashes(100_000 + scan * 10, 10));
    }
    assert_eq!((cache.resident(&single), cache.resident(&head)), (250, 250));
    assert_eq!(cache.resident(&hashes(100_000 + 9_990, 10)), 10, "the latest blocks are resident");
}

#[test]
fn blocks_used_once_are_evicted_in_fifo_order() {
    let mut cache = Cache::new(100);
    let blocks = hashes(0, 150);
    cache.request_each(&blocks);
    assert_eq!(cache.resident(&blocks[50..]), 100);
}

#[test]
fn a_new_hot_set_replaces_the_old_one() {
    let mut cache = Cache::new(1_000);
    let (old, new) = (hashes(0, 500), hashes(5_000, 800));
    for _ in 0..30 {
        cache.request_each(&old);
    }
    // Too large for the space that the old set leaves, so that it has no hits at first: only the sketch counts its
    // uses.
    let rounds = (1..100).find(|_| {
        cache.request_each(&new);
        cache.resident(&new) == new.len()
    });
    assert!(rounds.is_some_and(|rounds| rounds <= 25), "{rounds:?}");
}

#[test]
fn a_new_block_is_admitted_among_hot_ones() {
    let mut cache = Cache::new(16);
    let hot = hashes(0, 16);
    for _ in 0..20 {
        cache.request_each(&hot);
    }
    let new = hashes(50, 6);
    for hash in &new {
        cache.request(&[*hash]);
        assert_eq!(cache.resident(&[*hash]), 1);
    }
    assert!(cache.resident(&new) >= 2, "and it stays for a while");
    assert!(cache.resident(&hot) >= 13, "new blocks displace new blocks");
}

#[test]
fn a_prefetched_block_that_was_evicted_is_not_found() {
    let mut cache = Cache::new(200);
    let hashes: Vec<SequenceHash> = (0..200)
        .map(|n: u16| {
            let mut bytes = [7; 16];
            bytes[..2].copy_from_slice(&n.to_le_bytes());
            SequenceHash::from_bytes(bytes)
        })
        .collect();
    cache.request(&hashes);
    let mut prefetcher = Prefetcher::default();
    let found =
        |cache: &Cache, prefetcher: &mut Prefetcher, at| cache.index.find_ahead(prefetcher, &hashes, at).is_some();
    assert!((0..128).all(|at| found(&cache, &mut prefetcher, at)));
    // Leaves first: the end of the chain, up to the first block after those found.
    for _ in 128..200 {
        cache.index.evict().expect("no block is held");
    }
    assert!(!(128..200).any(|at| found(&cache, &mut prefetcher, at)), "the slots may hold other blocks by now");
}
