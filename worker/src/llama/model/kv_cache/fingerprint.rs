//! The fingerprint of the bytes of a block: everything that decides them. Each value is encoded by itself, in a fixed
//! order and as little-endian bytes, so that renaming or reordering fields does not change the fingerprint.

use super::{SPLIT, Shape, TILE};
use crate::llama::loader::{Config, Llama3Scaling, Rope};
use crate::llama::model::linear;
use crate::llama::model::rope::Rotation;
use kvbm::Fingerprint;

/// The fingerprint of blocks that this machine computes. The instruction set and the system's library take part as far
/// as they change results.
pub(super) fn of(config: &Config, shape: Shape, identity: &[u8; 32]) -> Fingerprint {
    with_arithmetic(config, shape, identity, &angles(&config.rope, shape.head_dim), &linear::arithmetic())
}

fn with_arithmetic(
    config: &Config,
    shape: Shape,
    identity: &[u8; 32],
    angles: &[u8],
    arithmetic: &[u8],
) -> Fingerprint {
    let Shape { layers, kv_heads, head_dim, block_size } = shape;
    let numbers: Vec<u8> = [layers, kv_heads, head_dim, block_size, config.heads, config.hidden, config.intermediate]
        .iter()
        .chain(&[config.sliding_window.unwrap_or(0), TILE, SPLIT])
        .flat_map(|&n| (n as u64).to_le_bytes())
        .collect();
    Fingerprint::of([
        ("engine", b"llama 1".as_slice()),
        ("weights", identity),
        ("dtype", b"f32 little-endian"),
        ("layout", b"layer, k|v, kv head, token, dim"),
        ("shape", &numbers),
        ("norm", &config.norm_eps.to_le_bytes()),
        ("rope", &rope_bytes(&config.rope)),
        ("angles", angles),
        ("arithmetic", arithmetic),
    ])
}

/// Theta, then the four values of the scaling if there is one: 8 bytes each.
fn rope_bytes(Rope { theta, scaling }: &Rope) -> Vec<u8> {
    let mut bytes = theta.to_le_bytes().to_vec();
    if let Some(Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_context }) = scaling {
        bytes.extend([factor, low_freq_factor, high_freq_factor].iter().flat_map(|factor| factor.to_le_bytes()));
        bytes.extend((*original_context as u64).to_le_bytes());
    }
    bytes
}

/// Sines and cosines at two positions. They come from the system's library, and libraries differ in the last bit.
fn angles(rope: &Rope, head_dim: usize) -> Vec<u8> {
    let rotation = Rotation::new(rope, head_dim);
    let mut angles = vec![0.0; head_dim * 2];
    angles.chunks_exact_mut(head_dim).zip([1, 4099]).for_each(|(angles, position)| rotation.at(position, angles));
    angles.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::loader::{BLOCK_SIZE, LoadedModel};
    use std::path::Path;

    /// A changed fingerprint makes all stored blocks of earlier builds unusable: they are recomputed.
    #[test]
    fn fingerprints_of_the_reference_models_are_fixed() {
        let fingerprint = |name| {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/reference").join(name);
            let LoadedModel { config, weights, .. } = LoadedModel::open(&folder, None).unwrap();
            let Config { layers, kv_heads, head_dim, .. } = config;
            let shape = Shape { layers, kv_heads, head_dim, block_size: BLOCK_SIZE };
            // The bits of this machine's arithmetic are left out: machines may differ in them.
            let fingerprint = with_arithmetic(&config, shape, &weights.identity, b"angles", b"arithmetic");
            blake3::Hash::from_bytes(*fingerprint.as_bytes()).to_string()
        };
        assert_eq!(fingerprint("qwen2"), "aebe7a1448a57d8f92350aaf82e66101fd3296e0023e2b74d7707201e6c1eacb");
        assert_eq!(fingerprint("llama3"), "f03c8362abe8b6a9fbf28c2475a5791ba8c5f33887a79eb9c8749e4d48eb469c");
    }
}
