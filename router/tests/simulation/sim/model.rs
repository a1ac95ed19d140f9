//! The model of a simulation: KV and tokens are pure functions of the weights, of the tokens before, of the cache
//! domain and of the seed. A block with other bytes than its own changes every later token, as in attention.

use kvbm::device::copy_observed;
use kvbm::splitmix::splitmix64;
use kvbm::{BlockId, DeviceBlocks, DomainId, Fingerprint};
use parking_lot::Mutex;
use std::sync::Arc;
use worker::engine::ModelCard;

/// Tokens per block.
pub(super) const BLOCK: usize = 16;
/// Bytes of one block.
pub(super) const BLOCK_BYTES: usize = 64;
pub(super) const VOCABULARY: u64 = 5000;
pub(super) const MODEL: &str = "simulated";

/// What a worker serves under the name [`MODEL`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Variant {
    #[default]
    Usual,
    /// Other weights: other text, and blocks of other hashes.
    OtherWeights,
    /// The same weights with another layout of KV: the same text, and blocks of the same hashes with other bytes.
    OtherLayout,
}

impl Variant {
    /// One for each text that a request may get.
    pub(super) const OF_EACH_TEXT: [Self; 2] = [Self::Usual, Self::OtherWeights];

    fn identity(self) -> &'static str {
        match self {
            Self::Usual | Self::OtherLayout => "simulated@1",
            Self::OtherWeights => "simulated@2",
        }
    }

    /// What each word of KV is combined with.
    fn layout(self) -> u64 {
        match self {
            Self::Usual | Self::OtherWeights => 0,
            Self::OtherLayout => splitmix64(1),
        }
    }

    pub(super) fn card(self) -> Arc<ModelCard> {
        Arc::new(ModelCard {
            identity: self.identity().to_owned(),
            vocabulary: VOCABULARY as usize,
            eos: vec![0],
            ..ModelCard::new(MODEL, 4096, BLOCK)
        })
    }

    pub(super) fn fingerprint(self) -> Fingerprint {
        let layout = self.layout().to_le_bytes();
        Fingerprint::of([("weights", self.identity().as_bytes()), ("layout", &layout[..])])
    }
}

/// What attention has read so far: all full blocks, in order.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    state: u64,
    layout: u64,
}

impl Attention {
    /// Before the first block. KV depends on weights and domain, so that a block of others would change the text.
    pub(super) fn new(domain: DomainId, variant: Variant) -> Self {
        let bytes = domain.as_bytes().iter().chain(variant.identity().as_bytes());
        let state = bytes.fold(0, |hash, byte| splitmix64(hash ^ u64::from(*byte)));
        Self { state, layout: variant.layout() }
    }

    /// The KV of the next block.
    pub(super) fn kv(self, tokens: &[u32]) -> [u8; BLOCK_BYTES] {
        let state = fold_tokens(self.state, tokens);
        let mut bytes = [0; BLOCK_BYTES];
        for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(splitmix64(state ^ at as u64) ^ self.layout).to_le_bytes());
        }
        bytes
    }

    /// Reads the KV of the next block.
    pub(super) fn read(&mut self, kv: &[u8]) {
        for word in kv.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            self.state = splitmix64(self.state.rotate_left(7) ^ word ^ self.layout);
        }
    }

    /// The token after `tail`, which follows the last full block.
    pub(super) fn next_token(self, tail: &[u32], seed: u64) -> u32 {
        // Token 0 ends a sequence and is never chosen.
        (1 + fold_tokens(self.state ^ splitmix64(seed), tail) % (VOCABULARY - 1)) as u32
    }
}

fn fold_tokens(state: u64, tokens: &[u32]) -> u64 {
    tokens.iter().fold(state, |state, token| splitmix64(state ^ u64::from(*token)))
}

/// The text of a request on an engine without cache, faults or other requests.
pub(super) fn undisturbed(variant: Variant, prompt: &[u32], domain: DomainId, seed: u64, tokens: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    let (mut attention, mut read) = (Attention::new(domain, variant), 0);
    for _ in 0..tokens {
        while (read + 1) * BLOCK <= all.len() {
            attention.read(&attention.kv(&all[read * BLOCK..(read + 1) * BLOCK]));
            read += 1;
        }
        all.push(attention.next_token(&all[read * BLOCK..], seed));
    }
    all.split_off(prompt.len())
}

/// Device memory, and the model that computes on it.
pub(super) struct Device {
    pub(super) variant: Variant,
    slots: Vec<Mutex<[u8; BLOCK_BYTES]>>,
}

impl Device {
    pub(super) fn new(variant: Variant, blocks: usize) -> Arc<Self> {
        Arc::new(Self { variant, slots: (0..blocks).map(|_| Mutex::new([0; BLOCK_BYTES])).collect() })
    }

    pub(super) fn at(&self, slot: BlockId) -> [u8; BLOCK_BYTES] {
        *self.slots[slot.0 as usize].lock()
    }
}

impl DeviceBlocks for Device {
    fn capacity(&self) -> usize {
        self.slots.len()
    }

    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn fingerprint(&self) -> Fingerprint {
        self.variant.fingerprint()
    }

    fn read(&self, slot: BlockId, into: &mut [u8]) {
        into.copy_from_slice(&*self.slots[slot.0 as usize].lock());
    }

    fn write(&self, slot: BlockId, from: &[u8]) {
        self.slots[slot.0 as usize].lock().copy_from_slice(from);
    }

    fn write_observed(&self, slot: BlockId, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        copy_observed(from, &mut *self.slots[slot.0 as usize].lock(), observe);
    }
}
