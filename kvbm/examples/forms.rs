//! What the forms of resting blocks cost and gain, on this machine: `cargo run --release -p kvbm --example forms [FILE…]`.
//!
//! Measures the lossless codec on synthetic KV, or on files of raw KV, on one core; medians of repeated runs.

use bytes::Bytes;
use kvbm::codec::synthetic::{self, Shape};
use kvbm::codec::{Coder, bound, favourite};
use kvbm::{Block, Codec, Fingerprint, SequenceHash};
use std::time::Instant;

/// Of 2 MiB, as bf16.
const SHAPE: Shape = Shape { layers: 32, tokens: 16, channels: 1024 };
const RUNS: usize = 31;

fn main() -> std::io::Result<()> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    if files.is_empty() {
        let values = synthetic::kv(1, SHAPE);
        codec("synthetic bf16", synthetic::bf16(&values));
        codec("synthetic f32", synthetic::f32(&values));
    }
    for file in files {
        codec(&file, std::fs::read(&file)?);
    }
    Ok(())
}

fn block(raw: Vec<u8>) -> Block {
    Block::seal(SequenceHash::from_bytes([1; 16]), None, Fingerprint::from_bytes([2; 32]), Bytes::from(raw))
}

fn codec(what: &str, raw: Vec<u8>) {
    let block = block(raw);
    let bytes = block.payload.len();
    let (codec, promised) = favourite(&block.payload);
    let (mut coder, mut decoder) = (Coder::default(), Coder::default());
    let encoded = coder.encode(&block, codec);
    let (encode, decode, sample) = (
        rate(bytes, || drop(coder.encode(&block, codec))),
        rate(bytes, || drop(decoder.decode(&encoded))),
        rate(bytes, || assert!(favourite(&block.payload).1 > 1.0)),
    );
    let (ratio, bound) = (bytes as f64 / encoded.payload.len() as f64, bound(codec, &block.payload));
    println!(
        "{what}: {codec:?}, ratio {ratio:.3} (sample {promised:.3}, order-0 bound {bound:.3}: {:.1} %), \
         encode {encode:.2} GB/s, decode {decode:.2} GB/s, sample {sample:.0} GB/s",
        ratio / bound * 100.0
    );
    assert!(codec != Codec::Raw);
}

/// GB/s, the median.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let began = Instant::now();
            work();
            began.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    bytes as f64 / seconds[RUNS / 2] / 1e9
}
