//! Whose blocks go down next, and whose are forgotten when too many wait. Pure.
//!
//! Each cache domain has a line of its own. **Turns**: the domain that has had least, for its weight, goes first; one that
//! comes begins where the others stand, and one that comes back no earlier than where it stood. **Room**: when there is none left, the domain with most names for
//! its weight loses its own, the latest first. So a flood costs whoever sends it, and nobody else a block.

use crate::block::{DomainId, SequenceHash};
use crate::tier::Shares;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A block that waits, by name, and whose it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::manager) struct Offer {
    pub(in crate::manager) name: SequenceHash,
    pub(in crate::manager) domain: DomainId,
}

/// Names that wait, by domain.
pub(super) struct Turns {
    room: usize,
    shares: Shares,
    lines: BTreeMap<DomainId, Line>,
    /// Who is next: what each domain that waits has had, for its weight.
    order: BTreeSet<(Served, DomainId)>,
    /// What those had had whose lines are empty, where that is more than `now`: who comes with a little each time has had its
    /// turns, too.
    had: BTreeMap<DomainId, Served>,
    /// What who went last had had.
    now: Served,
    waiting: usize,
    /// Of the next name, counted up.
    number: u64,
}

/// Names that a domain has had its turn for, over its weight.
type Served = u64;

struct Line {
    weight: u32,
    served: Served,
    names: VecDeque<(u64, SequenceHash)>,
}

impl Line {
    fn cost(&self, names: usize) -> Served {
        /// So that whole numbers do for heavy domains.
        const FINE: u64 = 1 << 20;
        names as u64 * FINE / u64::from(self.weight.max(1))
    }

    fn load(&self) -> u64 {
        self.cost(self.names.len())
    }
}

impl Turns {
    pub(super) fn new(room: usize) -> Self {
        let (lines, order, had) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { room, shares: Shares::default(), lines, order, had, now: 0, waiting: 0, number: 0 }
    }

    /// Weighs those who come from now on.
    pub(super) fn weigh(&mut self, shares: &Shares) {
        self.shares = shares.clone();
    }

    /// How many names wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// The number that the next name gets; those that wait have lower ones.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The number of the name that has waited longest.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.lines.values().filter_map(|line| line.names.front()).map(|(number, _)| *number).min()
    }

    /// Lets names wait, and says how many were forgotten for it: of these, or of others.
    pub(super) fn push(&mut self, offers: &[Offer]) -> usize {
        for same in offers.chunk_by(|one, next| one.domain == next.domain) {
            let domain = same[0].domain;
            let line = self.lines.entry(domain).or_insert_with(|| {
                let served = self.had.remove(&domain).unwrap_or_default().max(self.now);
                self.order.insert((served, domain));
                Line { weight: self.shares.weight(domain), served, names: VecDeque::new() }
            });
            line.names.extend((self.number..).zip(same).map(|(number, offer)| (number, offer.name)));
            self.number += same.len() as u64;
            self.waiting += same.len();
        }
        let forgotten = self.waiting.saturating_sub(self.room);
        while self.waiting > self.room {
            self.forget(self.waiting - self.room);
        }
        forgotten
    }

    /// Forgets up to so many names of the domain with most of them, until another one has as many.
    fn forget(&mut self, most: usize) {
        let mut loads: [Option<(u64, DomainId)>; 2] = [None; 2];
        for (domain, line) in &self.lines {
            let load = Some((line.load(), *domain));
            if load > loads[0] {
                loads = [load, loads[0]];
            } else {
                loads[1] = loads[1].max(load);
            }
        }
        let [Some((load, domain)), next] = loads else { return };
        let line = self.lines.get_mut(&domain).expect("it was just seen");
        let above = load - next.map_or(0, |(load, _)| load);
        let some = (above / line.cost(1).max(1)).clamp(1, most as u64) as usize;
        let left = line.names.len().saturating_sub(some);
        self.waiting -= line.names.len() - left;
        line.names.truncate(left);
        if left == 0 {
            self.leave(domain);
        }
    }

    /// Takes up to so many names, of the domains in turn.
    pub(super) fn take(&mut self, most: usize) -> Vec<Offer> {
        let mut taken = Vec::with_capacity(most.min(self.waiting));
        while taken.len() < most
            && let Some((served, domain)) = self.order.pop_first()
        {
            self.now = served;
            let line = self.lines.get_mut(&domain).expect("a waiting domain has a queue");
            let some = line.names.len().min(most - taken.len());
            taken.extend(line.names.drain(..some).map(|(_, name)| Offer { name, domain }));
            self.waiting -= some;
            line.served += line.cost(some);
            if line.names.is_empty() {
                self.had.insert(domain, line.served);
                self.lines.remove(&domain);
            } else {
                self.order.insert((line.served, domain));
            }
        }
        if self.waiting == 0 {
            self.had.clear();
        } else {
            self.had.retain(|_, served| *served > self.now);
        }
        taken
    }

    fn leave(&mut self, domain: DomainId) {
        if let Some(line) = self.lines.remove(&domain) {
            self.order.remove(&(line.served, domain));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: usize = 100;

    fn domain(n: u8) -> DomainId {
        DomainId::from_bytes([n; 16])
    }

    fn offers(of: u8, from: u64, count: u64) -> Vec<Offer> {
        let name = |n: u64| {
            let mut bytes = [of; 16];
            bytes[8..].copy_from_slice(&n.to_le_bytes());
            SequenceHash::from_bytes(bytes)
        };
        (from..from + count).map(|n| Offer { name: name(n), domain: domain(of) }).collect()
    }

    fn of(offers: &[Offer], whose: u8) -> usize {
        offers.iter().filter(|offer| offer.domain == domain(whose)).count()
    }

    #[test]
    fn a_flood_forgets_its_own_and_keeps_what_came_first() {
        let mut turns = Turns::new(ROOM);
        assert_eq!(turns.push(&offers(1, 0, 100)), 0);
        assert_eq!(turns.push(&offers(2, 0, 30)), 30);
        assert_eq!(turns.push(&offers(1, 100, 1_000)), 1_000);
        assert_eq!(turns.len(), ROOM);
        let all = turns.take(ROOM);
        assert_eq!((of(&all, 1), of(&all, 2)), (70, 30));
        let first: Vec<Offer> = all.into_iter().filter(|offer| offer.domain == domain(1)).collect();
        assert_eq!(first, offers(1, 0, 70));
        assert!(turns.lines.is_empty() && turns.order.is_empty() && turns.len() == 0);
    }

    #[test]
    fn room_is_shared_by_weight_among_those_who_want_more_than_their_part() {
        let mut turns = Turns::new(ROOM);
        turns.weigh(&Shares::default().weigh(domain(3), 2.0));
        let forgotten: usize =
            (0..50).map(|n| (1..=3).map(|of| turns.push(&offers(of, n * 9, 9))).sum::<usize>()).sum();
        assert_eq!(forgotten, 50 * 27 - ROOM);
        let all = turns.take(ROOM);
        assert!(of(&all, 1).abs_diff(25) <= 1 && of(&all, 2).abs_diff(25) <= 1, "{} {}", of(&all, 1), of(&all, 2));
    }

    #[test]
    fn who_comes_waits_for_one_batch_of_another_and_weights_say_how_often() {
        let mut turns = Turns::new(10_000);
        turns.weigh(&Shares::default().weigh(domain(3), 2.0));
        turns.push(&offers(1, 0, 3_000));
        assert_eq!(of(&turns.take(10), 1), 10);
        turns.push(&offers(2, 0, 4));
        turns.push(&offers(3, 0, 3_000));
        let next = [turns.take(10), turns.take(10)].concat();
        assert_eq!(of(&next, 2), 4, "a flood is no reason to wait");
        let many: Vec<Offer> = (0..90).flat_map(|_| turns.take(10)).collect();
        assert!(of(&many, 3).abs_diff(600) <= 20, "two parts of three: {}", of(&many, 3));
        assert_eq!(many.len(), 900);
    }

    #[test]
    fn the_oldest_of_all_lines_is_known() {
        let mut turns = Turns::new(ROOM);
        assert_eq!((turns.oldest(), turns.number()), (None, 0));
        turns.push(&[offers(1, 0, 2), offers(2, 0, 2), offers(1, 2, 1)].concat());
        assert_eq!((turns.oldest(), turns.number()), (Some(0), 5));
        turns.take(3);
        assert_eq!(turns.oldest(), Some(2));
    }

    #[test]
    fn who_comes_with_a_little_each_time_does_not_keep_the_others_from_their_turns() {
        let mut turns = Turns::new(10_000);
        turns.push(&offers(9, 0, 5_000));
        let mut got = 0;
        for round in 0..100 {
            // Whatever is taken, as much comes again.
            for of in 1..=4 {
                turns.push(&offers(of, 10 * round, 10));
            }
            got += self::of(&turns.take(40), 9);
        }
        assert!((700..=900).contains(&got), "{got} of 4,000 went to the fifth of five who want alike");
        assert!(turns.had.len() <= 5);
    }
}
