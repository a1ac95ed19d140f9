//! The native engine's KV memory (G1): one anonymous mapping divided into blocks of
//! `[layer][k|v][kv_head][token][head_dim]` in `f32`. A block is contiguous, so tiers move the same bytes that
//! attention reads.
//!
//! Pages take no memory until they are touched. Slots are written through a shared reference: ownership (kvbm's
//! `PartialBlock`) decides which sequence may write a slot, as the contract of [`DeviceBlocks`] demands. This file
//! has the `unsafe` code that relies on it.

mod fingerprint;

use crate::llama::loader::Config;
use kvbm::device::copy_observed;
use kvbm::{BlockId, DeviceBlocks, Fingerprint};
use memmap2::{MmapMut, MmapRaw};
use std::io;

/// Keys per step of the running softmax of attention: their scores for all lanes are 4 KiB and stay in the L1 cache.
/// Part of the fingerprint, because it decides the order of summation.
pub(super) const TILE: usize = 64;

/// Keys per partial softmax of attention: about 10 µs of work for one item, which is worth another thread, and merging
/// is cheap beside it. A multiple of [`TILE`]; part of the fingerprint for the same reason.
pub(super) const SPLIT: usize = 512;

/// The KV blocks of one model.
pub(crate) struct KvCache {
    memory: MmapRaw,
    shape: Shape,
    blocks: usize,
    fingerprint: Fingerprint,
}

/// The layout of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
}

/// Keys or values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KvHalf {
    /// Rotated keys.
    Keys,
    /// Values.
    Values,
}

impl Shape {
    /// Number of floats of one head's keys (or values) in one layer of a block.
    fn floats_per_head(self) -> usize {
        self.block_size * self.head_dim
    }

    fn floats_per_block(self) -> usize {
        self.layers * 2 * self.kv_heads * self.floats_per_head()
    }

    /// Index of the first float of one head's keys or values in a layer.
    fn start(self, slot: BlockId, layer: usize, half: KvHalf, kv_head: usize) -> usize {
        debug_assert!(layer < self.layers && kv_head < self.kv_heads);
        let head = (layer * 2 + half as usize) * self.kv_heads + kv_head;
        slot.0 as usize * self.floats_per_block() + head * self.floats_per_head()
    }
}

impl KvCache {
    /// Memory for `blocks` blocks of `block_size` tokens. `identity` is the hash of the weights.
    ///
    /// Fails when the address space cannot be reserved.
    pub(crate) fn new(config: &Config, block_size: usize, blocks: usize, identity: &[u8; 32]) -> io::Result<Self> {
        let shape = Shape { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim, block_size };
        let bytes = blocks
            .checked_mul(shape.floats_per_block() * size_of::<f32>())
            .ok_or_else(|| io::Error::new(io::ErrorKind::OutOfMemory, "the KV blocks exceed the address space"))?;
        // Mapping zero bytes is an error; a KV cache of no blocks is only useless.
        let memory = MmapMut::map_anon(bytes.max(1))?;
        // Attention reads megabytes per layer: huge pages save most page-table walks. A kernel without them is not an
        // error.
        #[cfg(target_os = "linux")]
        if let Err(error) = memory.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "huge pages are not available for KV blocks");
        }
        Ok(Self { memory: memory.into(), shape, blocks, fingerprint: fingerprint::of(config, shape, identity) })
    }

    /// Tokens per block.
    pub(crate) fn block_size(&self) -> usize {
        self.shape.block_size
    }

    /// Writes one token's keys and values, `[kv_head][head_dim]` each, into a block.
    ///
    /// The caller owns the slot: no other code reads or writes it meanwhile.
    pub(crate) fn write_token(&self, slot: BlockId, offset: usize, layer: usize, keys: &[f32], values: &[f32]) {
        let Shape { kv_heads, head_dim, block_size, .. } = self.shape;
        assert!((slot.0 as usize) < self.blocks && offset < block_size, "{slot:?} + {offset} is outside the KV cache");
        assert!(keys.len() == kv_heads * head_dim && values.len() == keys.len(), "one token's keys and values");
        for (half, from) in [(KvHalf::Keys, keys), (KvHalf::Values, values)] {
            for (kv_head, from) in from.chunks_exact(head_dim).enumerate() {
                let start = self.shape.start(slot, layer, half, kv_head) + offset * head_dim;
                // SAFETY: `start .. start + head_dim` is within this slot (asserted above), which the caller owns.
                unsafe { self.base().add(start).copy_from_nonoverlapping(from.as_ptr(), head_dim) };
            }
        }
    }

    /// The keys (or values) of the first `tokens` tokens of a block for one head, `[token][head_dim]`.
    ///
    /// The caller guarantees that they were written and that no code writes them while the slice exists.
    pub(crate) fn tokens(&self, slot: BlockId, layer: usize, half: KvHalf, kv_head: usize, tokens: usize) -> &[f32] {
        assert!((slot.0 as usize) < self.blocks && tokens <= self.shape.block_size, "{slot:?} is outside the KV cache");
        let start = self.shape.start(slot, layer, half, kv_head);
        // SAFETY: the range is within this slot (asserted above). The memory is initialised (zeroed by the system), and
        // by the contract these tokens are not written while they are read: a sequence writes only tokens after those
        // that it reads.
        unsafe { std::slice::from_raw_parts(self.base().add(start), tokens * self.shape.head_dim) }
    }

    /// The mapping as floats: page-aligned, so aligned for them.
    fn base(&self) -> *mut f32 {
        self.memory.as_mut_ptr().cast()
    }

    fn bytes_of(&self, slot: BlockId) -> *mut u8 {
        assert!((slot.0 as usize) < self.blocks, "{slot:?} is outside the KV cache");
        // SAFETY: the slot is within the mapping.
        unsafe { self.memory.as_mut_ptr().add(slot.0 as usize * self.block_bytes()) }
    }
}

impl DeviceBlocks for KvCache {
    fn capacity(&self) -> usize {
        self.blocks
    }

    fn block_bytes(&self) -> usize {
        self.shape.floats_per_block() * size_of::<f32>()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, slot: BlockId, into: &mut [u8]) {
        assert_eq!(into.len(), self.block_bytes());
        // SAFETY: both are `block_bytes` long, `into` is exclusive, and by the contract the slot is not written now.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(self.bytes_of(slot), self.block_bytes()) };
    }

    fn write(&self, slot: BlockId, from: &[u8]) {
        assert_eq!(from.len(), self.block_bytes());
        // SAFETY: both are `block_bytes` long, and by the contract the caller owns the slot.
        unsafe { self.bytes_of(slot).copy_from_nonoverlapping(from.as_ptr(), self.block_bytes()) };
    }

    fn bytes(&self, slot: BlockId) -> Option<&[u8]> {
        // SAFETY: the slot's bytes are initialised, and by the contract it is not written while they are read.
        Some(unsafe { std::slice::from_raw_parts(self.bytes_of(slot), self.block_bytes()) })
    }

    fn write_part(&self, slot: BlockId, at: usize, from: &[u8], observe: &mut dyn FnMut(&[u8])) -> bool {
        assert!(at + from.len() <= self.block_bytes(), "a part is within its slot");
        // SAFETY: the range is within the slot, whose bytes are initialised, and by the contract the caller owns it.
        copy_observed(
            from,
            unsafe { std::slice::from_raw_parts_mut(self.bytes_of(slot).add(at), from.len()) },
            observe,
        );
        true
    }

    fn read_observed(&self, slot: BlockId, into: &mut [u8], observe: &mut dyn FnMut(&[u8])) {
        // SAFETY: the slot's bytes are initialised, and by the contract the slot is not written now.
        copy_observed(unsafe { std::slice::from_raw_parts(self.bytes_of(slot), self.block_bytes()) }, into, observe);
    }

    fn write_observed(&self, slot: BlockId, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        // SAFETY: the slot's bytes are initialised, and by the contract the caller owns the slot.
        copy_observed(
            from,
            unsafe { std::slice::from_raw_parts_mut(self.bytes_of(slot), self.block_bytes()) },
            observe,
        );
    }
}
