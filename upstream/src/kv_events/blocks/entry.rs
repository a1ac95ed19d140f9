//! A known block, and where it is held: reference counts per pair of a medium and an owner.

use crate::kv_events::wire::Medium;

/// Maximum number of pairs of a medium and an owner. An engine has up to three media, and each offloading tier is one
/// more owner. Each pair costs two bytes per block.
pub(super) const MAX_HOLDERS: usize = 6;

/// References to one block by holder. A count stops at its maximum: an engine holds a block once per running request,
/// which is far less.
pub(super) type Counts = [u16; MAX_HOLDERS];

/// A known block.
pub(super) struct Entry<K, H> {
    pub(super) key: K,
    pub(super) parent: Option<H>,
    pub(super) counts: Counts,
}

impl<K, H> Entry<K, H> {
    pub(super) fn new(key: K, parent: Option<H>) -> Self {
        Self { key, parent, counts: [0; MAX_HOLDERS] }
    }

    pub(super) fn is_unused(&self) -> bool {
        self.counts == [0; MAX_HOLDERS]
    }
}

/// Position of a pair in [`Counts`].
#[derive(Clone, Copy)]
pub(super) struct Holder(usize);

/// The pairs of a medium and an owner, in the order in which they appeared.
#[derive(Default)]
pub(super) struct Holders(Vec<(Medium, Option<Box<str>>)>);

impl Holders {
    /// The position of a pair, or `None` for an unknown medium and beyond [`MAX_HOLDERS`].
    pub(super) fn of(&mut self, medium: Medium, owner: Option<&str>) -> Option<Holder> {
        if let Some(at) = self.0.iter().position(|known| known.0 == medium && known.1.as_deref() == owner) {
            return Some(Holder(at));
        }
        if medium == Medium::Unknown || self.0.len() == MAX_HOLDERS {
            return None;
        }
        self.0.push((medium, owner.map(Box::from)));
        Some(Holder(self.0.len() - 1))
    }

    /// Adds a reference. Returns whether the block is new at the medium.
    pub(super) fn add(&self, counts: &mut Counts, holder: Holder) -> bool {
        let new = !self.is_at(counts, holder);
        counts[holder.0] = counts[holder.0].saturating_add(1);
        new
    }

    /// Removes a reference. Returns whether it was the last one at the medium.
    pub(super) fn remove(&self, counts: &mut Counts, holder: Holder) -> bool {
        let before = counts[holder.0];
        counts[holder.0] = before.saturating_sub(1);
        before > 0 && !self.is_at(counts, holder)
    }

    /// Forgets all pairs, and returns their media without repetition.
    pub(super) fn clear(&mut self) -> impl Iterator<Item = Medium> + use<> {
        let mut media: Vec<Medium> = std::mem::take(&mut self.0).into_iter().map(|(medium, _)| medium).collect();
        media.sort_unstable();
        media.dedup();
        media.into_iter()
    }

    /// Whether any owner has the block at the holder's medium.
    fn is_at(&self, counts: &Counts, holder: Holder) -> bool {
        let medium = self.0[holder.0].0;
        self.0.iter().zip(counts).any(|((at, _), count)| *at == medium && *count > 0)
    }
}
