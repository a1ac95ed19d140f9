//! A lossless codec for KV: the exponents of floats are compressed, the other bits are stored unchanged.
//!
//! The exponents of a layer's keys and values have an entropy of about 2.8 bits; signs and mantissas are noise. Values
//! are split into a plane of exponents, which is Huffman-coded, and the remaining bits: 1.46 : 1 for bf16, 1.19 : 1 for
//! f32. zstd does the coding, with its search for matches nearly off: there are none, and without the search encoding
//! is three times as fast, decoding twice as fast, and the ratio is better.
//!
//! Payload of an encoded block, little endian:
//!
//! | bytes | field |
//! | --: | --- |
//! | 8 | length of the engine's bytes |
//! | 8 | checksum of the block in the engine's bytes |
//! | 4 each | coded length of each chunk's exponents; a chunk has 65,536 values, the last one fewer |
//! | | per chunk: its coded exponents, then the rest: one byte per value, or one, then two |
//! | 0 to 3 | bytes after the last value |
//!
//! [`encoded`] decides per block: raw if a sample shows no gain, or if the device below is faster than the codec.
//! [`decoded`] encodes nothing and reads both: only writers decide about the encoding.
//! Not here: compression across blocks.

mod byte_planes;
mod policy;
pub mod synthetic;
#[cfg(test)]
mod tests;
mod throughput;

pub use policy::{Rates, best_codec, entropy_bound, is_worth_it};

use super::{BlockingPool, Buffers, Inverted, Transform, TransformedTier, Undecryptable};
use crate::block::{Block, Codec, Corrupt, Header};
use crate::metrics::Metrics;
use crate::tier::{LoadError, StoreError, Tier};
use byte_planes::{Bf16Planes, F32Planes, Planes};
use bytes::Bytes;
use futures::future::{self, BoxFuture, FutureExt};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use throughput::{MeasuredTier, Throughput};
use tokio::time::Instant;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch, compress_bound};

/// When blocks are encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// If it makes onboarding faster, by the measured throughput of device and codec. The default.
    #[default]
    Faster,
    /// If it makes them smaller: capacity matters more than speed.
    Smaller,
}

/// Values coded together: enough that the table of code lengths costs little, few enough for a core's cache.
const CHUNK: usize = 1 << 16;

/// Minimum compression ratio: less is not worth the CPU time on any device.
const MIN_RATIO: f64 = 1.05;

/// Assumed throughput of the codec on one core before it is measured.
const DEFAULT_RATES: Rates = Rates { offload: 1e9, onboard: 2e9 };

/// A tier that stores blocks encoded where that is worth it.
pub fn encoded(tier: Arc<dyn Tier>, mode: Mode, metrics: Metrics) -> Arc<dyn Tier> {
    with(tier, Some(mode), MIN_RATIO, metrics)
}

/// A tier that stores blocks raw, and decodes blocks that another process, or this one before a restart, encoded.
pub fn decoded(tier: Arc<dyn Tier>, metrics: Metrics) -> Arc<dyn Tier> {
    with(tier, None, MIN_RATIO, metrics)
}

fn with(tier: Arc<dyn Tier>, mode: Option<Mode>, min_ratio: f64, metrics: Metrics) -> Arc<dyn Tier> {
    let device = Arc::new(Throughput::default());
    let encoding = Encoding {
        mode,
        min_ratio,
        device: device.clone(),
        codec: Throughput::default(),
        undecryptable: Undecryptable::new(tier.level(), metrics),
        pool: BlockingPool::new(),
        coders: Mutex::default(),
        buffers: Arc::default(),
    };
    Arc::new(TransformedTier::new(Arc::new(MeasuredTier::new(tier, device)), encoding))
}

struct Encoding {
    /// `None`: blocks are only decoded.
    mode: Option<Mode>,
    min_ratio: f64,
    /// Throughput of the wrapped tier.
    device: Arc<Throughput>,
    /// Throughput of the codec on one core.
    codec: Throughput,
    /// Encrypted blocks: a tier that decrypts them is below, if there is one.
    undecryptable: Undecryptable,
    pool: BlockingPool,
    /// Idle coders, at most one per thread of the pool.
    coders: Mutex<Vec<Coder>>,
    buffers: Arc<Buffers>,
}

impl Encoding {
    /// The codec for the bytes; `None` if encoding is not worth it.
    fn choose(&self, raw: &[u8]) -> Option<Codec> {
        let mode = self.mode?;
        let (codec, ratio) = best_codec(raw);
        let is_worth_it = match (mode, self.device.rates()) {
            (Mode::Faster, Some(device)) => {
                let core = self.codec.rates().unwrap_or(DEFAULT_RATES);
                let threads = self.pool.threads() as f64;
                is_worth_it(ratio, Rates { offload: core.offload * threads, onboard: core.onboard * threads }, device)
            }
            _ => true,
        };
        (is_worth_it && ratio >= self.min_ratio).then_some(codec)
    }

    fn encode(&self, block: Block) -> Block {
        if block.header.codec != Codec::Raw || block.header.key.is_some() {
            return block;
        }
        let Some(codec) = self.choose(&block.payload) else { return block };
        let began = Instant::now();
        let encoded = self.with_coder(|coder| coder.encode(&block, codec));
        self.codec.offload.record(block.header.length, began.elapsed());
        let ratio = block.header.length as f64 / encoded.header.length.max(1) as f64;
        if ratio >= self.min_ratio { encoded } else { block }
    }

    fn decode(&self, block: &Block) -> Result<Block, Corrupt> {
        let began = Instant::now();
        let raw = self.with_coder(|coder| coder.decode(block))?;
        self.codec.onboard.record(raw.header.length, began.elapsed());
        Ok(raw)
    }

    fn with_coder<T>(&self, work: impl FnOnce(&mut Coder) -> T) -> T {
        let idle = || self.coders.lock();
        let taken = idle().pop();
        let mut coder = taken.unwrap_or_else(|| Coder::new(self.buffers.clone()));
        let done = work(&mut coder);
        idle().push(coder);
        done
    }
}

impl Transform for Encoding {
    fn apply(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Block, StoreError>> {
        if self.mode.is_none() {
            return future::ready(Ok(block)).boxed();
        }
        async move {
            let encoding = self.clone();
            Ok(self.pool.run(move || encoding.encode(block)).await?)
        }
        .boxed()
    }

    fn invert(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Inverted, LoadError>> {
        if block.header.key.is_some() {
            // This process decrypts nothing below. Others may have the data key.
            self.undecryptable.count(&block, "the blocks are encrypted, and encryption is off");
            return future::ready(Ok(Inverted::Undecryptable)).boxed();
        }
        if block.header.codec == Codec::Raw {
            return future::ready(Ok(Inverted::Block(block))).boxed();
        }
        async move {
            let encoding = self.clone();
            Ok(Inverted::Block(self.pool.run(move || encoding.decode(&block)).await??))
        }
        .boxed()
    }
}

/// Encodes and decodes one block at a time, and reuses its memory.
pub struct Coder {
    compressor: Compressor<'static>,
    decompressor: Decompressor<'static>,
    exponents: Vec<u8>,
    rest: Vec<u8>,
    coded: Vec<u8>,
    buffers: Arc<Buffers>,
}

impl Default for Coder {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Coder {
    fn new(buffers: Arc<Buffers>) -> Self {
        let mut compressor = Compressor::default();
        // Always entropy coding of single bytes, and a match search that skips the whole chunk at once.
        let settings = [
            CParameter::CompressionLevel(1),
            CParameter::MinMatch(7),
            CParameter::HashLog(6),
            CParameter::TargetLength(1 << 17),
            CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        ];
        for setting in settings {
            compressor.set_parameter(setting).expect("a setting within its range");
        }
        Self {
            compressor,
            decompressor: Decompressor::default(),
            exponents: vec![0; CHUNK],
            rest: Vec::new(),
            coded: vec![0; compress_bound(CHUNK)],
            buffers,
        }
    }

    /// Encodes a raw block. The result may be larger.
    ///
    /// # Panics
    /// Panics if the block is encoded or encrypted already.
    pub fn encode(&mut self, block: &Block, codec: Codec) -> Block {
        assert!(block.header.codec == Codec::Raw && block.header.key.is_none(), "a block in the engine's own bytes");
        let payload = match codec {
            Codec::Raw => return block.clone(),
            Codec::Bf16 => self.pack::<Bf16Planes>(block),
            Codec::F32 => self.pack::<F32Planes>(block),
        };
        let header = Header { codec, ..block.header }.for_payload(&payload);
        Block { header, payload }
    }

    /// The block as it was before it was encoded, with its checksum of then.
    ///
    /// Any input is safe to decode: at most twice the payload's length is allocated.
    pub fn decode(&mut self, block: &Block) -> Result<Block, Corrupt> {
        if block.header.key.is_some() {
            return Err(Corrupt::Transform);
        }
        let (payload, checksum) = match block.header.codec {
            Codec::Raw => return Ok(block.clone()),
            Codec::Bf16 => self.unpack::<Bf16Planes>(&block.payload),
            Codec::F32 => self.unpack::<F32Planes>(&block.payload),
        }
        .ok_or(Corrupt::Encoding)?;
        let header = Header { codec: Codec::Raw, length: payload.len() as u64, checksum, ..block.header };
        Ok(Block { header, payload })
    }

    fn pack<P: Planes>(&mut self, block: &Block) -> Bytes {
        let (values, tail) = block.payload.split_at(block.payload.len() / P::WIDTH * P::WIDTH);
        let chunks = values.chunks(CHUNK * P::WIDTH);
        // Enough for a payload that does not shrink; such an encoding is discarded.
        let mut packed = self.buffers.take(64 + 64 * chunks.len() + block.payload.len());
        packed.clear();
        packed.extend(block.header.length.to_le_bytes());
        packed.extend(block.header.checksum.to_le_bytes());
        let table = packed.len();
        packed.resize(table + 4 * chunks.len(), 0);
        self.rest.resize(CHUNK * (P::WIDTH - 1), 0);
        for (n, chunk) in chunks.enumerate() {
            let count = chunk.len() / P::WIDTH;
            let (exponents, rest) = (&mut self.exponents[..count], &mut self.rest[..chunk.len() - count]);
            P::split(chunk, exponents, rest);
            let coded = self.compressor.compress_to_buffer(exponents, &mut self.coded[..]);
            let coded = coded.expect("the buffer has the worst case's size");
            packed[table + 4 * n..][..4].copy_from_slice(&(coded as u32).to_le_bytes());
            packed.extend_from_slice(&self.coded[..coded]);
            packed.extend_from_slice(rest);
        }
        packed.extend_from_slice(tail);
        packed.freeze()
    }

    /// The bytes and their checksum; `None` if `packed` is malformed.
    fn unpack<P: Planes>(&mut self, packed: &[u8]) -> Option<(Bytes, u64)> {
        let (length, packed) = packed.split_first_chunk()?;
        let (checksum, packed) = packed.split_first_chunk()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let count = length / P::WIDTH;
        // All bytes except the exponents are stored one by one, so this bounds the allocation.
        if length - count > packed.len() {
            return None;
        }
        let (table, mut packed) = packed.split_at_checked(count.div_ceil(CHUNK) * 4)?;
        let mut raw = self.buffers.take(length);
        raw.resize(length, 0);
        let (values, tail) = raw.split_at_mut(count * P::WIDTH);
        for (chunk, coded) in values.chunks_mut(CHUNK * P::WIDTH).zip(table.as_chunks().0) {
            let count = chunk.len() / P::WIDTH;
            let coded = packed.split_off(..u32::from_le_bytes(*coded) as usize)?;
            let rest = packed.split_off(..chunk.len() - count)?;
            let exponents = &mut self.exponents[..count];
            let decoded = self.decompressor.decompress_to_buffer(coded, exponents).ok()?;
            if decoded != count {
                return None;
            }
            P::merge(exponents, rest, chunk);
        }
        if packed.len() != tail.len() {
            return None;
        }
        tail.copy_from_slice(packed);
        Some((raw.freeze(), u64::from_le_bytes(*checksum)))
    }
}
