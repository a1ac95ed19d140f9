//! The view of one engine's cache (one per data-parallel rank): which of our block hashes it has, and where.
//!
//! An event has the engine's own hashes, the tokens and the parent. Our hash of a block is computed from the tokens and
//! the chain value of its parent ([`Chain`]), so the hash algorithm and the seed of the engine do not matter. The view
//! keeps engine hash → chain value, which removals and children need.
//!
//! - **References are counted** for each (block, medium, owner). A block stored twice, as two requests that compute the
//!   same prompt do, is removed after two removals.
//! - **Nothing is guessed.** A block whose parent is not known is ignored, and so are its children. [`Ignored`] counts
//!   what is ignored, by reason.
//! - **Memory is bounded**: [`View::BYTES_PER_BLOCK`] (72 in `cache_events`) in an array that is between half full and
//!   full, and 17 in a table that is between 7/16 and 7/8 full, so 91 to 183 bytes per block, for at most the number of
//!   blocks that the caller allows. While one of them grows, the old one takes half as much again.
//!
//! Two engine hashes may stand for one of our hashes: SGLang's pairs of tokens for EAGLE include the token after the
//! block. They are counted apart, so the first removal announces the removal of a block that the engine still has.
//!
//! Only blocks of the view's own block size are supported. The size of the engine is reported
//! ([`View::engine_block_size`]).

mod entry;
mod table;

use super::wire::{Event, ExtraKey, GroupKind, Medium, Removed, Stored};
use entry::{Entry, Holder, Holders};
use table::Table;

/// Computes our chained block hashes.
pub trait Chain {
    /// Chain value after a block, from which the hashes of its children are computed.
    type Key: Copy;
    /// Our hash of a block.
    type Hash: Copy + PartialEq;

    /// The chain value before the first block; `None` for an adapter or a salt that is not known.
    fn root(&self, root: Root<'_>) -> Option<Self::Key>;
    /// The chain value after a full block of `tokens`.
    fn child(&self, parent: &Self::Key, tokens: &[u32]) -> Self::Key;
    /// The hash of the block that ends at this chain value.
    fn hash(&self, key: &Self::Key) -> Self::Hash;
}

/// What separates chains of equal tokens. Two roots share no hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Root<'a> {
    /// Name of the adapter.
    pub lora: Option<&'a str>,
    /// Cache salt of the request.
    pub salt: Option<&'a str>,
}

/// A change of the blocks at one medium, in the shape of `kvbm::BlockEvent`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change<H> {
    /// Blocks were stored, each the child of the one before it.
    Stored {
        /// Where the blocks are.
        medium: Medium,
        /// Parent of the first block; `None` if it begins a sequence.
        parent: Option<H>,
        /// A run of one chain, not empty.
        blocks: Vec<H>,
    },
    /// Blocks were removed.
    Removed {
        /// Where the blocks were.
        medium: Medium,
        /// The blocks in any order, not empty.
        blocks: Vec<H>,
    },
    /// The medium is empty now.
    Cleared {
        /// The medium.
        medium: Medium,
    },
}

/// Numbers of blocks that were ignored, by reason; of all events since the view was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ignored {
    /// The parent is not known: it was ignored itself, or stored before the view began.
    pub unknown_parent: u64,
    /// An adapter or a salt that the chain does not know.
    pub unknown_root: u64,
    /// Removed, or announced without tokens, but not known.
    pub unknown_block: u64,
    /// The block size is not that of the view: a mismatched configuration, or an offloading tier with larger blocks.
    pub other_block_size: u64,
    /// The number of tokens is not the number of blocks times the block size.
    pub misaligned: u64,
    /// A group of a hybrid model that does not have the keys and values of all tokens.
    pub other_group: u64,
    /// Multimodal content or embeddings: the token ids do not identify the block.
    pub content: u64,
    /// An adapter that the engine names only by a number.
    pub unnamed_adapter: u64,
    /// A medium of an unknown name, or more than six pairs of a medium and an owner.
    pub unknown_medium: u64,
    /// The engine uses one hash for two positions.
    pub conflict: u64,
    /// The view is full.
    pub over_capacity: u64,
}

impl Ignored {
    /// Each number with the name of its reason.
    pub fn by_reason(&self) -> [(&'static str, u64); 11] {
        [
            ("unknown_parent", self.unknown_parent),
            ("unknown_root", self.unknown_root),
            ("unknown_block", self.unknown_block),
            ("other_block_size", self.other_block_size),
            ("misaligned", self.misaligned),
            ("other_group", self.other_group),
            ("content", self.content),
            ("unnamed_adapter", self.unnamed_adapter),
            ("unknown_medium", self.unknown_medium),
            ("conflict", self.conflict),
            ("over_capacity", self.over_capacity),
        ]
    }

    /// The numbers that are not 0, each with what it counts. Empty: nothing was ignored.
    pub fn in_words(&self) -> String {
        let words = [
            (self.unknown_parent, "whose parent block is not known"),
            (self.unknown_root, "of an adapter or a salt that is not known"),
            (self.unknown_block, "removed or announced without tokens that were not known"),
            (self.other_block_size, "of another block size"),
            (self.misaligned, "whose tokens do not fill them"),
            (self.other_group, "of another group of a hybrid model"),
            (self.content, "with images, sound or embeddings"),
            (self.unnamed_adapter, "of an adapter without a name"),
            (self.unknown_medium, "in a memory of an unknown kind"),
            (self.conflict, "with the hash of another block"),
            (self.over_capacity, "beyond the number that is kept"),
        ];
        let named = words.iter().filter(|(number, _)| *number > 0).map(|(number, what)| format!("{number} {what}"));
        named.collect::<Vec<_>>().join(", ")
    }
}

/// The blocks of one engine.
pub struct View<C: Chain> {
    chain: C,
    block_size: u32,
    max_blocks: usize,
    engine_block_size: Option<u32>,
    /// The group of a hybrid model that feeds the view: the first one with full attention.
    group: Option<u32>,
    holders: Holders,
    blocks: Table<Entry<C::Key, C::Hash>>,
    ignored: Ignored,
}

impl<C: Chain> View<C> {
    /// Size of a known block, without its hash and position in the table.
    pub const BYTES_PER_BLOCK: usize = size_of::<Entry<C::Key, C::Hash>>();

    /// An empty view for blocks of `block_size` tokens, of at most `max_blocks` blocks.
    pub fn new(chain: C, block_size: u32, max_blocks: usize) -> Self {
        Self {
            chain,
            block_size,
            max_blocks,
            engine_block_size: None,
            group: None,
            holders: Holders::default(),
            blocks: Table::default(),
            ignored: Ignored::default(),
        }
    }

    /// Block size of the engine's attention group, once it has announced a block in device memory.
    pub fn engine_block_size(&self) -> Option<u32> {
        self.engine_block_size
    }

    /// Number of known blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What was ignored so far.
    pub fn ignored(&self) -> Ignored {
        self.ignored
    }

    /// Applies an event and appends the changes that it makes.
    pub fn apply(&mut self, event: &Event, changes: &mut Vec<Change<C::Hash>>) {
        match event {
            Event::Stored(stored) => self.stored(stored, changes),
            Event::Removed(removed) => self.removed(removed, changes),
            Event::Cleared => self.clear(changes),
        }
    }

    /// Forgets all blocks: the engine cleared its cache, or which blocks it has is not known any more.
    pub fn clear(&mut self, changes: &mut Vec<Change<C::Hash>>) {
        self.blocks = Table::default();
        changes.extend(self.holders.clear().map(|medium| Change::Cleared { medium }));
    }

    /// Forgets all blocks and all about the engine, because it restarted.
    pub fn restart(&mut self, changes: &mut Vec<Change<C::Hash>>) {
        self.clear(changes);
        (self.engine_block_size, self.group) = (None, None);
    }

    fn stored(&mut self, stored: &Stored, changes: &mut Vec<Change<C::Hash>>) {
        let all = stored.blocks.len() as u64;
        if !self.feeds(stored.group, stored.group_kind) {
            self.ignored.other_group += all;
            return;
        }
        let Some(holder) = self.holders.of(stored.medium, stored.ownership.as_deref()) else {
            self.ignored.unknown_medium += all;
            return;
        };
        // Offloading tiers may have larger blocks.
        if stored.medium == Medium::G1 && stored.block_size > 0 {
            self.engine_block_size.get_or_insert(stored.block_size);
        }
        let run = Run { medium: stored.medium, parent: None, blocks: Vec::new(), changes };
        if stored.foreign_tokens {
            self.ignored.content += all;
        } else if stored.tokens.is_empty() || stored.block_size == 0 {
            self.attach(stored, holder, run);
        } else if stored.block_size != self.block_size {
            self.ignored.other_block_size += all;
        } else if stored.tokens.len() as u64 != all * u64::from(self.block_size) {
            self.ignored.misaligned += all;
        } else if stored.has_lora_id && stored.lora_name.is_none() {
            self.ignored.unnamed_adapter += all;
        } else {
            self.extend(stored, holder, run);
        }
    }

    /// A placeholder: known blocks are at one more medium.
    fn attach(&mut self, stored: &Stored, holder: Holder, mut run: Run<'_, C::Hash>) {
        for hash in &stored.blocks {
            let Some(entry) = self.blocks.get_mut(*hash) else {
                self.ignored.unknown_block += 1;
                continue;
            };
            if self.holders.add(&mut entry.counts, holder) {
                run.push(self.chain.hash(&entry.key), entry.parent);
            }
        }
        run.finish();
    }

    /// Blocks with tokens: a run that continues a known chain or begins one.
    fn extend(&mut self, stored: &Stored, holder: Holder, mut run: Run<'_, C::Hash>) {
        let all = stored.blocks.len();
        let keys = ExtraKeys::read(stored);
        let (mut key, mut parent) = match stored.parent {
            None => {
                let Some(root) = self.chain.root(Root { lora: stored.lora_name.as_deref(), salt: keys.salt }) else {
                    self.ignored.unknown_root += all as u64;
                    return;
                };
                (root, None)
            }
            Some(hash) => {
                let Some(known) = self.blocks.get(hash) else {
                    self.ignored.unknown_parent += all as u64;
                    return;
                };
                (known.key, Some(self.chain.hash(&known.key)))
            }
        };
        let usable = keys.usable.min(all);
        self.ignored.content += (all - usable) as u64;
        let room = self.max_blocks.saturating_sub(self.blocks.len());
        self.blocks.prepare(&stored.blocks[..usable], room);
        let tokens = stored.tokens.chunks_exact(self.block_size as usize);
        for (at, (hash, tokens)) in stored.blocks[..usable].iter().zip(tokens).enumerate() {
            key = self.chain.child(&key, tokens);
            let own = self.chain.hash(&key);
            let full = self.blocks.len() >= self.max_blocks;
            let entry = match self.blocks.get_mut(*hash) {
                Some(known) if self.chain.hash(&known.key) != own => {
                    self.ignored.conflict += (usable - at) as u64;
                    break;
                }
                Some(known) => known,
                None if full => {
                    self.ignored.over_capacity += (usable - at) as u64;
                    break;
                }
                None => self.blocks.insert(*hash, Entry::new(key, parent)),
            };
            if self.holders.add(&mut entry.counts, holder) {
                run.push(own, parent);
            }
            parent = Some(own);
        }
        run.finish();
    }

    fn removed(&mut self, removed: &Removed, changes: &mut Vec<Change<C::Hash>>) {
        let all = removed.blocks.len() as u64;
        if !self.feeds(removed.group, GroupKind::Unspecified) {
            self.ignored.other_group += all;
            return;
        }
        let Some(holder) = self.holders.of(removed.medium, removed.ownership.as_deref()) else {
            self.ignored.unknown_medium += all;
            return;
        };
        let mut blocks = Vec::new();
        for hash in &removed.blocks {
            let Some(entry) = self.blocks.get_mut(*hash) else {
                self.ignored.unknown_block += 1;
                continue;
            };
            if self.holders.remove(&mut entry.counts, holder) {
                blocks.push(self.chain.hash(&entry.key));
                if entry.is_unused() {
                    self.blocks.remove(*hash);
                }
            }
        }
        if !blocks.is_empty() {
            changes.push(Change::Removed { medium: removed.medium, blocks });
        }
    }

    /// Whether the events of a group feed the view. Removals do not name the kind of the group.
    fn feeds(&mut self, group: Option<u32>, kind: GroupKind) -> bool {
        match (kind, group) {
            (GroupKind::Other, _) => false,
            (_, None) => true,
            (GroupKind::FullAttention, Some(group)) => *self.group.get_or_insert(group) == group,
            // Releases that do not send the kind number the attention group first.
            (GroupKind::Unspecified, Some(group)) => self.group.unwrap_or(0) == group,
        }
    }
}

/// What the extra keys of a run mean.
struct ExtraKeys<'a> {
    salt: Option<&'a str>,
    /// Number of leading blocks that their tokens identify.
    usable: usize,
}

impl<'a> ExtraKeys<'a> {
    /// On the first block of a chain one text that is not the adapter's name is the salt. Any other text may be a
    /// multimodal item, as old releases announce them.
    fn read(stored: &'a Stored) -> Self {
        let mut keys = Self { salt: stored.cache_salt.as_deref(), usable: usize::MAX };
        for (block, key) in &stored.extra_keys {
            match key {
                ExtraKey::Text(text) if Some(text) == stored.lora_name.as_ref() => {}
                ExtraKey::Text(text) if keys.salt == Some(text) => {}
                ExtraKey::Text(text) if *block == 0 && stored.parent.is_none() && keys.salt.is_none() => {
                    keys.salt = Some(text);
                }
                ExtraKey::Text(_) | ExtraKey::Content => keys.usable = keys.usable.min(*block as usize),
            }
        }
        keys
    }
}

/// Collects stored blocks into runs of one chain.
struct Run<'a, H> {
    medium: Medium,
    parent: Option<H>,
    blocks: Vec<H>,
    changes: &'a mut Vec<Change<H>>,
}

impl<H: Copy + PartialEq> Run<'_, H> {
    fn push(&mut self, hash: H, parent: Option<H>) {
        if self.blocks.last().copied() != parent || parent.is_none() {
            self.flush();
            self.parent = parent;
        }
        self.blocks.push(hash);
    }

    fn flush(&mut self) {
        if !self.blocks.is_empty() {
            let blocks = std::mem::take(&mut self.blocks);
            self.changes.push(Change::Stored { medium: self.medium, parent: self.parent, blocks });
        }
    }

    fn finish(mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests;
