//! Several holders of a page. Those of whom many have the same, as everybody has the beginning of a prompt that all share, are
//! a set of bits; the others stand one by one.

use super::bits::Bits;
use super::source::{Seat, Slot};
use super::sync::fetch;
use std::sync::Arc;

/// Two or more holders. It does not change: a change makes another.
#[derive(PartialEq, Eq)]
pub(super) enum Crowd {
    /// So few that looking at them is one visit to memory.
    Few { len: usize, seats: [Seat; FEW], masks: [u64; FEW] },
    /// More. Those one by one are in the order of their seats.
    Many { seats: Box<[Seat]>, masks: Box<[u64]>, groups: Box<[Group]> },
}

/// Workers that hold the same blocks at the same level.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) level: usize,
    pub(super) mask: u64,
    pub(super) workers: Bits,
}

/// The crowd of the page that was changed before. Pages of one chain mostly have the same, and share it: who walks along them then
/// sees by its number that nothing is different.
#[derive(Default)]
pub(super) struct Lately(Option<Arc<Crowd>>);

impl Lately {
    /// The same crowd, the one that there is already if it is no other.
    pub(super) fn share(&mut self, crowd: Crowd) -> Arc<Crowd> {
        if let Some(lately) = self.0.as_ref().filter(|lately| ***lately == crowd) {
            return lately.clone();
        }
        let crowd = Arc::new(crowd);
        // A large one stays for nobody's sake.
        self.0 = (crowd.bytes() <= LATELY_BYTES_MAX).then(|| crowd.clone());
        crowd
    }
}

/// A crowd on its way to the next.
struct Draft {
    singles: Vec<(Seat, u64)>,
    groups: Vec<Group>,
}

const FEW: usize = 4;
/// Larger ones are not shared: two dozen holders.
const LATELY_BYTES_MAX: usize = 384;
/// Fewer workers alike are not worth a set: one by one they are read as quickly.
const ALIKE: usize = 8;
/// What a holder takes that stands alone.
const SINGLE_BYTES: usize = size_of::<Seat>() + size_of::<u64>();

impl Crowd {
    pub(super) fn pair(one: (Seat, u64), other: (Seat, u64)) -> Self {
        if one.0 < other.0 { [one, other] } else { [other, one] }.into_iter().collect()
    }

    /// The same, but for one holder; without blocks it is none.
    pub(super) fn with(&self, seat: Seat, mask: u64) -> Self {
        let (seats, masks) = self.singles();
        if !self.groups().is_empty() || seats.len() >= ALIKE {
            let singles = seats.iter().copied().zip(masks.iter().copied()).collect();
            let mut draft = Draft { singles, groups: self.groups().to_vec() };
            draft.remove(seat);
            if mask != 0 {
                draft.insert(seat, mask);
            }
            return draft.finish();
        }
        let (Ok(at) | Err(at)) = seats.binary_search(&seat);
        let after = at + usize::from(seats.get(at) == Some(&seat));
        let others =
            |range: std::ops::Range<usize>| seats[range.clone()].iter().copied().zip(masks[range].iter().copied());
        let this = (mask != 0).then_some((seat, mask));
        others(0..at).chain(this).chain(others(after..seats.len())).collect()
    }

    /// Those that stand one by one, in the order of their seats, and the blocks of each.
    pub(super) fn singles(&self) -> (&[Seat], &[u64]) {
        match self {
            Self::Few { len, seats, masks } => (&seats[..*len], &masks[..*len]),
            Self::Many { seats, masks, .. } => (seats, masks),
        }
    }

    pub(super) fn groups(&self) -> &[Group] {
        match self {
            Self::Few { .. } => &[],
            Self::Many { groups, .. } => groups,
        }
    }

    /// The only one that is left, if so.
    pub(super) fn only(&self) -> Option<(Seat, u64)> {
        match self.singles() {
            ([seat], [mask]) if self.groups().is_empty() => Some((*seat, *mask)),
            _ => None,
        }
    }

    /// Each holder with its blocks, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Seat, u64)> {
        let (seats, masks) = self.singles();
        seats.iter().copied().zip(masks.iter().copied()).chain(self.groups().iter().flat_map(Group::iter))
    }

    pub(super) fn mask(&self, seat: Seat) -> u64 {
        let (seats, masks) = self.singles();
        let group = || self.groups().iter().find(|group| group.has(seat)).map_or(0, |group| group.mask);
        seats.binary_search(&seat).map_or_else(|_| group(), |at| masks[at])
    }

    /// The blocks that anybody holds.
    pub(super) fn union(&self) -> u64 {
        let singles = self.singles().1.iter().fold(0, |union, mask| union | mask);
        self.groups().iter().fold(singles, |union, group| union | group.mask)
    }

    /// Begins to bring near what it says of its holders.
    pub(super) fn fetch(&self) {
        if let Self::Many { seats, masks, groups } = self {
            seats.first().into_iter().for_each(fetch);
            masks.first().into_iter().for_each(fetch);
            groups.first().into_iter().for_each(fetch);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let apart = match self {
            Self::Few { .. } => 0,
            Self::Many { seats, groups, .. } => {
                seats.len() * SINGLE_BYTES
                    + groups.iter().map(|group| Group::bytes(group.workers.words().len())).sum::<usize>()
            }
        };
        size_of::<Self>() + 2 * size_of::<usize>() + apart
    }
}

impl FromIterator<(Seat, u64)> for Crowd {
    /// Of holders one by one, in the order of their seats.
    fn from_iter<I: IntoIterator<Item = (Seat, u64)>>(holders: I) -> Self {
        let mut holders = holders.into_iter();
        let (mut seats, mut masks) = ([Seat::NOBODY; FEW], [0; FEW]);
        for len in 0..FEW {
            let Some(holder) = holders.next() else { return Self::Few { len, seats, masks } };
            (seats[len], masks[len]) = holder;
        }
        let Some(next) = holders.next() else { return Self::Few { len: FEW, seats, masks } };
        let first = seats.into_iter().zip(masks).chain([next]);
        let (seats, masks): (Vec<_>, Vec<_>) = first.chain(holders).unzip();
        Self::Many { seats: seats.into(), masks: masks.into(), groups: Box::default() }
    }
}

impl Draft {
    fn remove(&mut self, seat: Seat) {
        if let Ok(at) = self.singles.binary_search_by_key(&seat, |(seat, _)| *seat) {
            self.singles.remove(at);
        } else if let Some(at) = self.groups.iter().position(|group| group.has(seat)) {
            let workers = &mut self.groups[at].workers;
            workers.unset(seat.slot().number() as u32);
            // It goes when it is half of what would make another, so that nothing sways to and fro.
            if !Group::pays(2 * workers.len(), workers.words().len()) {
                let group = self.groups.swap_remove(at);
                self.singles.extend(group.iter());
                self.singles.sort_unstable_by_key(|(seat, _)| *seat);
            }
        }
    }

    fn insert(&mut self, seat: Seat, mask: u64) {
        let (worker, level) = (seat.slot().number() as u32, seat.level());
        let store = seat.slot().is_store();
        let group = self.groups.iter_mut().find(|group| group.level == level && group.mask == mask);
        if let Some(group) = group.filter(|_| !store) {
            group.workers.set(worker);
            return;
        }
        let at = self.singles.partition_point(|(before, _)| *before < seat);
        self.singles.insert(at, (seat, mask));
        let is = |(seat, other): &(Seat, u64)| *other == mask && seat.level() == level && !seat.slot().is_store();
        let alike = || self.singles.iter().filter(|single| is(single)).map(|(seat, _)| seat.slot().number());
        let words = alike().next_back().map_or(0, |last| last / 64 + 1);
        if !store && Group::pays(alike().count(), words) {
            let workers = alike().map(|worker| worker as u32).collect();
            self.groups.push(Group { level, mask, workers });
            self.singles.retain(|single| !is(single));
        }
    }

    fn finish(self) -> Crowd {
        if self.groups.is_empty() {
            return self.singles.into_iter().collect();
        }
        let (seats, masks): (Vec<_>, Vec<_>) = self.singles.into_iter().unzip();
        Crowd::Many { seats: seats.into(), masks: masks.into(), groups: self.groups.into() }
    }
}

impl Group {
    /// Whether a set of so many takes less than they would one by one.
    fn pays(members: usize, words: usize) -> bool {
        members >= ALIKE && members * SINGLE_BYTES >= Self::bytes(words)
    }

    fn bytes(words: usize) -> usize {
        size_of::<Self>() + words * size_of::<u64>()
    }

    fn has(&self, seat: Seat) -> bool {
        self.level == seat.level() && !seat.slot().is_store() && self.workers.has(seat.slot().number() as u32)
    }

    fn iter(&self) -> impl Iterator<Item = (Seat, u64)> {
        self.workers.iter().map(|worker| (Seat::at(Slot::worker(worker as usize), self.level), self.mask))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::holders::Holders;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const WORKERS: usize = 200;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn holders_are_known_however_they_come_and_go_together(
            steps in proptest::collection::vec(
                (any::<bool>(), 0..3_usize, 0..WORKERS, 1..WORKERS, 1..4_usize, proptest::sample::select(vec![1, 0xff, 0xf0, u64::MAX])),
                1..30,
            ),
        ) {
            let (mut holders, mut model) = (Holders::Nobody, BTreeMap::<u32, u64>::new());
            let mut lately = Lately::default();
            for (comes, level, first, many, stride, bits) in steps {
                // A store now and then among many workers.
                let workers = (first..WORKERS).step_by(stride).take(many).map(Slot::worker);
                for slot in workers.chain((many % 4 == 0).then(|| Slot::store(first))) {
                    let seat = Seat::at(slot, level);
                    let had = model.get(&seat.raw()).copied().unwrap_or(0);
                    let (changed, has) = if comes {
                        (holders.add(seat, bits, &mut lately), had | bits)
                    } else {
                        (holders.take(seat, bits, &mut lately), had & !bits)
                    };
                    prop_assert_eq!(changed, had ^ has);
                    prop_assert_eq!(holders.mask(seat), has);
                    if has == 0 { model.remove(&seat.raw()) } else { model.insert(seat.raw(), has) };
                }
                let held: BTreeMap<u32, u64> = holders.to_vec().into_iter().map(|(seat, mask)| (seat.raw(), mask)).collect();
                prop_assert_eq!(&held, &model);
                prop_assert_eq!(holders.union(), model.values().fold(0, |union, mask| union | mask));
                prop_assert!(holders.bytes() <= 100 + 2 * SINGLE_BYTES * model.len(), "no set outweighs its members");
            }
        }
    }

    #[test]
    fn what_everybody_holds_takes_a_bit_for_each() {
        let (mut holders, mut lately) = (Holders::Nobody, Lately::default());
        for worker in 0..1024 {
            holders.add(Seat::at(Slot::worker(worker), 0), 0xffff_ffff, &mut lately);
        }
        assert!(holders.bytes() < 300, "{} bytes", holders.bytes());
        for worker in 2..1024 {
            holders.take(Seat::at(Slot::worker(worker), 0), u64::MAX, &mut lately);
        }
        assert!(holders.bytes() < 100, "{} bytes are left for two", holders.bytes());
    }
}
