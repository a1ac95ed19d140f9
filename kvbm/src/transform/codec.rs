//! A lossless codec for KV: exponents of floats take less room, what is left of them stays as it is.
//!
//! The exponents of a layer's keys and values are few and unevenly frequent, about 2.8 bits each; signs and mantissas are
//! noise. So values are cut into a plane of exponents, Huffman-coded, and a rest: 1.46 : 1 for bf16, 1.19 : 1 for f32.
//! zstd does the coding, with its search for repetitions as good as off: there are none, and without it encoding is three
//! times as fast, decoding twice, and the ratio better.
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
//! [`encoded`] decides block by block: raw when a sample says that nothing is gained, or when the device below is too
//! fast for the codec. [`decoded`] encodes nothing, and reads all of it: whether blocks are encoded is a matter of writing.
//! Not here: anything that needs a block's neighbours.

mod byte_planes;
mod policy;
pub mod synthetic;
#[cfg(test)]
mod tests;
mod throughput;

pub use policy::{Rates, bound, favourite, pays};

use super::{Buffers, Form, Formed, Hands, Taken};
use crate::block::{Block, Codec, Corrupt, Header};
use crate::tier::{LoadError, StoreError, Tier};
use byte_planes::{Four, Planes, Two};
use bytes::Bytes;
use futures::future::{self, BoxFuture, FutureExt};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};
use throughput::{Gauge, Measured};
use tokio::time::Instant;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch, compress_bound};

/// When blocks are encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// When it makes onboarding faster, by what was measured of the device and of the codec. The default.
    #[default]
    Faster,
    /// When it makes them smaller: room counts for more than speed.
    Smaller,
}

/// Values coded together: enough that a table of code lengths costs little, few enough to stay in a core's cache.
const CHUNK: usize = 1 << 16;

/// Less than this is not worth the cores, whatever the device.
const LEAST_RATIO: f64 = 1.05;

/// The codec's speed on one core until it was measured.
const RATES: Rates = Rates { offload: 1e9, onboard: 2e9 };

/// A tier whose blocks rest encoded where that pays.
pub fn encoded(tier: Arc<dyn Tier>, mode: Mode) -> Arc<dyn Tier> {
    with(tier, Some(mode), LEAST_RATIO)
}

/// A tier whose blocks are stored as they are, and decoded where another process, or this one before a restart, encoded them.
pub fn decoded(tier: Arc<dyn Tier>) -> Arc<dyn Tier> {
    with(tier, None, LEAST_RATIO)
}

fn with(tier: Arc<dyn Tier>, mode: Option<Mode>, least_ratio: f64) -> Arc<dyn Tier> {
    let device = Arc::new(Gauge::default());
    let form = Encoding {
        mode,
        least_ratio,
        device: device.clone(),
        codec: Gauge::default(),
        hands: Hands::new(),
        coders: Mutex::default(),
        buffers: Arc::default(),
    };
    Arc::new(Formed::new(Arc::new(Measured::new(tier, device)), form))
}

struct Encoding {
    /// `None`: blocks are only decoded.
    mode: Option<Mode>,
    least_ratio: f64,
    device: Arc<Gauge>,
    /// On one core.
    codec: Gauge,
    hands: Hands,
    /// Idle ones; never more than there are hands.
    coders: Mutex<Vec<Coder>>,
    buffers: Arc<Buffers>,
}

impl Encoding {
    /// What to encode the bytes with, if it pays.
    fn choose(&self, raw: &[u8]) -> Option<Codec> {
        let mode = self.mode?;
        let (codec, ratio) = favourite(raw);
        let pays = match (mode, self.device.rates()) {
            (Mode::Faster, Some(device)) => {
                let one = self.codec.rates().unwrap_or(RATES);
                let hands = self.hands.count() as f64;
                pays(ratio, Rates { offload: one.offload * hands, onboard: one.onboard * hands }, device)
            }
            _ => true,
        };
        (pays && ratio >= self.least_ratio).then_some(codec)
    }

    fn encode(&self, block: Block) -> Block {
        if block.header.codec != Codec::Raw || block.header.key.is_some() {
            return block;
        }
        let Some(codec) = self.choose(&block.payload) else { return block };
        let began = Instant::now();
        let encoded = self.coder(|coder| coder.encode(&block, codec));
        self.codec.offload.learn(block.header.length, began.elapsed());
        let ratio = block.header.length as f64 / encoded.header.length.max(1) as f64;
        if ratio >= self.least_ratio { encoded } else { block }
    }

    fn decode(&self, block: &Block) -> Result<Block, Corrupt> {
        let began = Instant::now();
        let raw = self.coder(|coder| coder.decode(block))?;
        self.codec.onboard.learn(raw.header.length, began.elapsed());
        Ok(raw)
    }

    fn coder<T>(&self, work: impl FnOnce(&mut Coder) -> T) -> T {
        let idle = || self.coders.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let mut coder = taken.unwrap_or_else(|| Coder::new(self.buffers.clone()));
        let done = work(&mut coder);
        idle().push(coder);
        done
    }
}

impl Form for Encoding {
    fn give(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Block, StoreError>> {
        if self.mode.is_none() {
            return future::ready(Ok(block)).boxed();
        }
        async move {
            let form = self.clone();
            Ok(self.hands.run(move || form.encode(block)).await?)
        }
        .boxed()
    }

    fn take(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Taken, LoadError>> {
        if block.header.key.is_some() {
            // Sound, and for those who have its data key; the tier that decrypts is not below.
            return future::ready(Ok(Taken::Miss)).boxed();
        }
        if block.header.codec == Codec::Raw {
            return future::ready(Ok(Taken::Block(block))).boxed();
        }
        async move {
            let form = self.clone();
            Ok(Taken::Block(self.hands.run(move || form.decode(&block)).await??))
        }
        .boxed()
    }
}

/// Encodes and decodes, one block at a time; keeps what that needs of memory.
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
        // Entropy coding of single bytes, whatever zstd's level would think of it, and a search that finds nothing: it
        // steps over all of the chunk at once.
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

    /// The block, which is in the engine's own bytes, encoded. It may turn out larger.
    ///
    /// # Panics
    /// When the block is encoded or encrypted already.
    pub fn encode(&mut self, block: &Block, codec: Codec) -> Block {
        assert!(block.header.codec == Codec::Raw && block.header.key.is_none(), "a block in the engine's own bytes");
        let payload = match codec {
            Codec::Raw => return block.clone(),
            Codec::Bf16 => self.pack::<Two>(block),
            Codec::F32 => self.pack::<Four>(block),
        };
        let header = Header { codec, ..block.header }.for_payload(&payload);
        Block { header, payload }
    }

    /// The block as it was before it was encoded, with the checksum that it had.
    ///
    /// Any bytes are safe to decode: what is allocated is at most twice the payload.
    pub fn decode(&mut self, block: &Block) -> Result<Block, Corrupt> {
        if block.header.key.is_some() {
            return Err(Corrupt::Transform);
        }
        let (payload, checksum) = match block.header.codec {
            Codec::Raw => return Ok(block.clone()),
            Codec::Bf16 => self.unpack::<Two>(&block.payload),
            Codec::F32 => self.unpack::<Four>(&block.payload),
        }
        .ok_or(Corrupt::Encoding)?;
        let header = Header { codec: Codec::Raw, length: payload.len() as u64, checksum, ..block.header };
        Ok(Block { header, payload })
    }

    fn pack<P: Planes>(&mut self, block: &Block) -> Bytes {
        let (values, tail) = block.payload.split_at(block.payload.len() / P::WIDTH * P::WIDTH);
        let chunks = values.chunks(CHUNK * P::WIDTH);
        // What does not shrink grows by less than this, and then is thrown away.
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

    /// The bytes and their checksum; `None` when `packed` was not packed so.
    fn unpack<P: Planes>(&mut self, packed: &[u8]) -> Option<(Bytes, u64)> {
        let (length, packed) = packed.split_first_chunk()?;
        let (checksum, packed) = packed.split_first_chunk()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let count = length / P::WIDTH;
        // All but the exponents is there byte by byte, so this bounds what is allocated.
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
