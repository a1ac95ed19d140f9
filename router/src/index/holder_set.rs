//! The holders of a page that has two or more. Workers with equal masks, as for a system prompt that all requests
//! share, form a group with a bitmap; other holders are listed individually.

use super::bits::Bits;
use super::holder::{HolderId, HolderLevel};
use super::sync::prefetch;
use std::sync::Arc;

/// Two or more holders. Immutable: a change creates a new set.
#[derive(PartialEq, Eq)]
pub(super) enum HolderSet {
    /// Up to [`INLINE`] holders, in one allocation.
    Inline { len: usize, holder_levels: [HolderLevel; INLINE], masks: [u64; INLINE] },
    /// More holders. Individual ones are sorted by holder and level.
    Boxed { holder_levels: Box<[HolderLevel]>, masks: Box<[u64]>, groups: Box<[BitmapGroup]> },
}

/// Workers that hold the same blocks at the same level.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct BitmapGroup {
    pub(super) level: usize,
    pub(super) mask: u64,
    pub(super) workers: Bits,
}

/// The holder set that was interned last. Pages of one chain mostly have equal holder sets and share one allocation, so
/// a lookup recognizes an equal set by its address.
#[derive(Default)]
pub(super) struct InternCache(Option<Arc<HolderSet>>);

impl InternCache {
    /// Returns the last interned set if it is equal, else interns this one.
    pub(super) fn intern(&mut self, holder_set: HolderSet) -> Arc<HolderSet> {
        if let Some(cache) = self.0.as_ref().filter(|cache| ***cache == holder_set) {
            return cache.clone();
        }
        let holder_set = Arc::new(holder_set);
        // A large set is not kept alive only to be shared.
        self.0 = (holder_set.bytes() <= INTERN_MAX_BYTES).then(|| holder_set.clone());
        holder_set
    }
}

/// A mutable copy of a holder set.
struct HolderSetBuilder {
    singles: Vec<(HolderLevel, u64)>,
    groups: Vec<BitmapGroup>,
}

const INLINE: usize = 4;
/// Largest set that is interned: two dozen holders.
const INTERN_MAX_BYTES: usize = 384;
/// Smallest group: reading fewer holders individually is as fast.
const GROUP_MIN: usize = 8;
/// Bytes of an individual holder.
const SINGLE_BYTES: usize = size_of::<HolderLevel>() + size_of::<u64>();

impl HolderSet {
    pub(super) fn pair(one: (HolderLevel, u64), other: (HolderLevel, u64)) -> Self {
        if one.0 < other.0 { [one, other] } else { [other, one] }.into_iter().collect()
    }

    /// A copy in which a holder has this mask; a holder with mask 0 is removed.
    pub(super) fn with_mask(&self, holder_level: HolderLevel, mask: u64) -> Self {
        let (holder_levels, masks) = self.singles();
        if !self.groups().is_empty() || holder_levels.len() >= GROUP_MIN {
            let singles = holder_levels.iter().copied().zip(masks.iter().copied()).collect();
            let mut builder = HolderSetBuilder { singles, groups: self.groups().to_vec() };
            builder.remove(holder_level);
            if mask != 0 {
                builder.insert(holder_level, mask);
            }
            return builder.finish();
        }
        let (Ok(at) | Err(at)) = holder_levels.binary_search(&holder_level);
        let after = at + usize::from(holder_levels.get(at) == Some(&holder_level));
        let others = |range: std::ops::Range<usize>| {
            holder_levels[range.clone()].iter().copied().zip(masks[range].iter().copied())
        };
        let this = (mask != 0).then_some((holder_level, mask));
        others(0..at).chain(this).chain(others(after..holder_levels.len())).collect()
    }

    /// The individual holders, sorted, and their masks.
    pub(super) fn singles(&self) -> (&[HolderLevel], &[u64]) {
        match self {
            Self::Inline { len, holder_levels, masks } => (&holder_levels[..*len], &masks[..*len]),
            Self::Boxed { holder_levels, masks, .. } => (holder_levels, masks),
        }
    }

    pub(super) fn groups(&self) -> &[BitmapGroup] {
        match self {
            Self::Inline { .. } => &[],
            Self::Boxed { groups, .. } => groups,
        }
    }

    /// The holder, if only one is left.
    pub(super) fn single(&self) -> Option<(HolderLevel, u64)> {
        match self.singles() {
            ([holder_level], [mask]) if self.groups().is_empty() => Some((*holder_level, *mask)),
            _ => None,
        }
    }

    /// Each holder with its mask, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (HolderLevel, u64)> {
        let (holder_levels, masks) = self.singles();
        holder_levels.iter().copied().zip(masks.iter().copied()).chain(self.groups().iter().flat_map(BitmapGroup::iter))
    }

    pub(super) fn mask(&self, holder_level: HolderLevel) -> u64 {
        let (holder_levels, masks) = self.singles();
        let group = || self.groups().iter().find(|group| group.contains(holder_level)).map_or(0, |group| group.mask);
        holder_levels.binary_search(&holder_level).map_or_else(|_| group(), |at| masks[at])
    }

    /// Blocks that have a holder.
    pub(super) fn union(&self) -> u64 {
        let singles = self.singles().1.iter().fold(0, |union, mask| union | mask);
        self.groups().iter().fold(singles, |union, group| union | group.mask)
    }

    /// Prefetches the data outside this allocation.
    pub(super) fn prefetch(&self) {
        if let Self::Boxed { holder_levels, masks, groups } = self {
            holder_levels.first().into_iter().for_each(prefetch);
            masks.first().into_iter().for_each(prefetch);
            groups.first().into_iter().for_each(prefetch);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let boxed = match self {
            Self::Inline { .. } => 0,
            Self::Boxed { holder_levels, groups, .. } => {
                holder_levels.len() * SINGLE_BYTES
                    + groups.iter().map(|group| BitmapGroup::bytes(group.workers.words().len())).sum::<usize>()
            }
        };
        size_of::<Self>() + 2 * size_of::<usize>() + boxed
    }
}

impl FromIterator<(HolderLevel, u64)> for HolderSet {
    /// Of individual holders, sorted by holder and level.
    fn from_iter<I: IntoIterator<Item = (HolderLevel, u64)>>(holders: I) -> Self {
        let mut holders = holders.into_iter();
        let (mut holder_levels, mut masks) = ([HolderLevel::NONE; INLINE], [0; INLINE]);
        for len in 0..INLINE {
            let Some(holder) = holders.next() else { return Self::Inline { len, holder_levels, masks } };
            (holder_levels[len], masks[len]) = holder;
        }
        let Some(next) = holders.next() else { return Self::Inline { len: INLINE, holder_levels, masks } };
        let first = holder_levels.into_iter().zip(masks).chain([next]);
        let (holder_levels, masks): (Vec<_>, Vec<_>) = first.chain(holders).unzip();
        Self::Boxed { holder_levels: holder_levels.into(), masks: masks.into(), groups: Box::default() }
    }
}

impl HolderSetBuilder {
    fn remove(&mut self, holder_level: HolderLevel) {
        if let Ok(at) = self.singles.binary_search_by_key(&holder_level, |(holder_level, _)| *holder_level) {
            self.singles.remove(at);
        } else if let Some(at) = self.groups.iter().position(|group| group.contains(holder_level)) {
            let workers = &mut self.groups[at].workers;
            workers.unset(holder_level.holder_id().index() as u32);
            // Hysteresis: a group is dissolved at half the size at which it forms.
            if !BitmapGroup::is_smaller(2 * workers.len(), workers.words().len()) {
                let group = self.groups.swap_remove(at);
                self.singles.extend(group.iter());
                self.singles.sort_unstable_by_key(|(holder_level, _)| *holder_level);
            }
        }
    }

    fn insert(&mut self, holder_level: HolderLevel, mask: u64) {
        let (worker, level) = (holder_level.holder_id().index() as u32, holder_level.level());
        let store = holder_level.holder_id().is_store();
        let group = self.groups.iter_mut().find(|group| group.level == level && group.mask == mask);
        if let Some(group) = group.filter(|_| !store) {
            group.workers.set(worker);
            return;
        }
        let at = self.singles.partition_point(|(before, _)| *before < holder_level);
        self.singles.insert(at, (holder_level, mask));
        let is = |(holder_level, other): &(HolderLevel, u64)| {
            *other == mask && holder_level.level() == level && !holder_level.holder_id().is_store()
        };
        let alike = || {
            self.singles.iter().filter(|single| is(single)).map(|(holder_level, _)| holder_level.holder_id().index())
        };
        let words = alike().next_back().map_or(0, |last| last / 64 + 1);
        if !store && BitmapGroup::is_smaller(alike().count(), words) {
            let workers = alike().map(|worker| worker as u32).collect();
            self.groups.push(BitmapGroup { level, mask, workers });
            self.singles.retain(|single| !is(single));
        }
    }

    fn finish(self) -> HolderSet {
        if self.groups.is_empty() {
            return self.singles.into_iter().collect();
        }
        let (holder_levels, masks): (Vec<_>, Vec<_>) = self.singles.into_iter().unzip();
        HolderSet::Boxed { holder_levels: holder_levels.into(), masks: masks.into(), groups: self.groups.into() }
    }
}

impl BitmapGroup {
    /// Whether a bitmap for this many members needs fewer bytes than listing them.
    fn is_smaller(members: usize, words: usize) -> bool {
        members >= GROUP_MIN && members * SINGLE_BYTES >= Self::bytes(words)
    }

    fn bytes(words: usize) -> usize {
        size_of::<Self>() + words * size_of::<u64>()
    }

    fn contains(&self, holder_level: HolderLevel) -> bool {
        self.level == holder_level.level()
            && !holder_level.holder_id().is_store()
            && self.workers.has(holder_level.holder_id().index() as u32)
    }

    fn iter(&self) -> impl Iterator<Item = (HolderLevel, u64)> {
        self.workers.iter().map(|worker| (HolderLevel::at(HolderId::worker(worker as usize), self.level), self.mask))
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
        fn holders_agree_with_a_map_under_churn(
            steps in proptest::collection::vec(
                (
                    any::<bool>(),
                    0..3_usize,
                    0..WORKERS,
                    1..WORKERS,
                    1..4_usize,
                    proptest::sample::select(vec![1, 0xff, 0xf0, u64::MAX]),
                ),
                1..30,
            ),
        ) {
            let (mut holders, mut model) = (Holders::Empty, BTreeMap::<u32, u64>::new());
            let mut cache = InternCache::default();
            for (added, level, first, many, stride, bits) in steps {
                // Some steps include a store.
                let workers = (first..WORKERS).step_by(stride).take(many).map(HolderId::worker);
                for holder_id in workers.chain((many % 4 == 0).then(|| HolderId::store(first))) {
                    let holder_level = HolderLevel::at(holder_id, level);
                    let had = model.get(&holder_level.raw()).copied().unwrap_or(0);
                    let (changed, has) = if added {
                        (holders.add(holder_level, bits, &mut cache), had | bits)
                    } else {
                        (holders.take(holder_level, bits, &mut cache), had & !bits)
                    };
                    prop_assert_eq!(changed, had ^ has);
                    prop_assert_eq!(holders.mask(holder_level), has);
                    if has == 0 { model.remove(&holder_level.raw()) } else { model.insert(holder_level.raw(), has) };
                }
                let raw = |(holder, mask): (HolderLevel, u64)| (holder.raw(), mask);
                let held: BTreeMap<u32, u64> = holders.to_vec().into_iter().map(raw).collect();
                prop_assert_eq!(&held, &model);
                prop_assert_eq!(holders.union(), model.values().fold(0, |union, mask| union | mask));
                let limit = 100 + 2 * SINGLE_BYTES * model.len();
                prop_assert!(holders.bytes() <= limit, "no bitmap is larger than a list of its members");
            }
        }
    }

    #[test]
    fn equal_masks_take_a_bit_per_holder() {
        let (mut holders, mut cache) = (Holders::Empty, InternCache::default());
        for worker in 0..1024 {
            holders.add(HolderLevel::at(HolderId::worker(worker), 0), 0xffff_ffff, &mut cache);
        }
        assert!(holders.bytes() < 300, "{} bytes", holders.bytes());
        for worker in 2..1024 {
            holders.take(HolderLevel::at(HolderId::worker(worker), 0), u64::MAX, &mut cache);
        }
        assert!(holders.bytes() < 100, "{} bytes are left for two", holders.bytes());
    }
}
