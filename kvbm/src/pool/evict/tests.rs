use super::*;

/// A pool of nothing but names.
struct Cache {
    residents: Residents,
    free: Vec<u32>,
}

impl Cache {
    fn new(capacity: u32) -> Self {
        Self { residents: Residents::new(capacity as usize), free: (0..capacity).collect() }
    }

    /// One request for a chain: its blocks are found, or come in.
    fn ask(&mut self, chain: &[SequenceHash]) {
        let mut held = Vec::new();
        let mut parent = None;
        for name in chain {
            let slot = self.residents.find(*name);
            let slot = slot.inspect(|slot| {
                self.residents.hold(*slot);
                self.residents.used(*slot);
            });
            held.push(slot.unwrap_or_else(|| {
                let slot = self.free.pop().unwrap_or_else(|| self.residents.evict().expect("something is idle").0);
                self.residents.insert(slot, (*name, parent), Priority::Normal, 0);
                self.residents.hold(slot);
                slot
            }));
            parent = Some(*name);
        }
        held.into_iter().rev().for_each(|slot| assert!(!self.residents.release(slot)));
    }

    /// A request for each block alone.
    fn ask_each(&mut self, names: &[SequenceHash]) {
        for name in names {
            self.ask(&[*name]);
        }
    }

    fn has(&self, names: &[SequenceHash]) -> usize {
        names.iter().filter(|name| self.residents.find(**name).is_some()).count()
    }
}

fn names(from: u32, count: u32) -> Vec<SequenceHash> {
    let name = |n: u32| SequenceHash::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap());
    (from..from + count).map(name).collect()
}

#[test]
fn a_scan_of_ten_times_the_capacity_leaves_the_hot_set_alone() {
    let mut cache = Cache::new(1_000);
    // Half single blocks, half the common heads of conversations whose tails differ.
    let (single, head) = (names(0, 250), names(500, 250));
    for round in 0..8 {
        cache.ask_each(&single);
        cache.ask(&[head.clone(), names(10_000 + round * 10, 10)].concat());
    }
    for scan in 0..1_000 {
        cache.ask(&names(100_000 + scan * 10, 10));
    }
    assert_eq!((cache.has(&single), cache.has(&head)), (250, 250));
    assert_eq!(cache.has(&names(100_000 + 9_990, 10)), 10, "what came last is here");
}

#[test]
fn what_was_used_once_goes_as_it_came() {
    let mut cache = Cache::new(100);
    let blocks = names(0, 150);
    cache.ask_each(&blocks);
    assert_eq!(cache.has(&blocks[50..]), 100);
}

#[test]
fn another_hot_set_takes_the_place_of_the_old_one() {
    let mut cache = Cache::new(1_000);
    let (old, new) = (names(0, 500), names(5_000, 800));
    for _ in 0..30 {
        cache.ask_each(&old);
    }
    // Too large for what the old one leaves, so that nothing of it is found at first: it is known by what is remembered.
    let rounds = (1..100).find(|_| {
        cache.ask_each(&new);
        cache.has(&new) == new.len()
    });
    assert!(rounds.is_some_and(|rounds| rounds <= 25), "{rounds:?}");
}

#[test]
fn a_new_block_gets_in_however_hot_the_others_are() {
    let mut cache = Cache::new(16);
    let hot = names(0, 16);
    for _ in 0..20 {
        cache.ask_each(&hot);
    }
    let new = names(50, 6);
    for name in &new {
        cache.ask(&[*name]);
        assert_eq!(cache.has(&[*name]), 1);
    }
    assert!(cache.has(&new) >= 2, "and stays for a while");
    assert!(cache.has(&hot) >= 13, "but newcomers take the places of newcomers");
}

#[test]
fn a_block_that_was_seen_ahead_and_then_given_up_is_not_found() {
    let mut cache = Cache::new(200);
    let names: Vec<SequenceHash> = (0..200)
        .map(|n: u16| {
            let mut bytes = [7; 16];
            bytes[..2].copy_from_slice(&n.to_le_bytes());
            SequenceHash::from_bytes(bytes)
        })
        .collect();
    cache.ask(&names);
    let mut ahead = Ahead::default();
    let found = |cache: &Cache, ahead: &mut Ahead, at| cache.residents.find_of(ahead, &names, at).is_some();
    assert!((0..128).all(|at| found(&cache, &mut ahead, at)));
    // Leaves go first: the end of the chain, up to right behind what was found.
    for _ in 128..200 {
        cache.residents.evict().expect("nobody holds it");
    }
    assert!(!(128..200).any(|at| found(&cache, &mut ahead, at)), "somebody else's blocks may lie there by now");
}
