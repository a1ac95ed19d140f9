//! Order-independent digests of sets of block hashes. They compare views of the same blocks: a tier's own, the
//! router's index, and the output of `blockyard cache ls`.

use crate::block::{Level, SequenceHash};
use crate::table::splitmix::splitmix64;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};

/// Digest of the blocks of one worker or store at all levels: the sum of all terms modulo 2⁶⁴, weighted by level. It
/// does not depend on the order of the events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheDigest(u64);

impl CacheDigest {
    /// The digest with more blocks at `level`; `sum` is the sum of their [terms](SetDigest::term).
    #[must_use]
    pub fn with(self, level: Level, sum: u64) -> Self {
        Self(self.0.wrapping_add(Self::weight(level).wrapping_mul(sum)))
    }

    /// The digest without blocks at `level`; `sum` is the sum of their [terms](SetDigest::term).
    #[must_use]
    pub fn without(self, level: Level, sum: u64) -> Self {
        self.with(level, sum.wrapping_neg())
    }

    /// Weight of a level: odd, so that no bit of a sum is lost, and different for each level. Blocks in a peer's
    /// memory belong to the peer's digest.
    fn weight(level: Level) -> u64 {
        match level {
            Level::G1 => 1,
            Level::G2 => 3,
            Level::G3 => 5,
            Level::G4 => 7,
            Level::G3_5 => 9,
            Level::Peer => 0,
        }
    }
}

/// Digest of a set of block hashes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetDigest {
    /// Number of hashes.
    pub blocks: u64,
    /// Sum of the hashes' [terms](Self::term), modulo 2⁶⁴.
    pub sum: u64,
}

impl SetDigest {
    /// The term of a block in the sum: the [first eight bytes](SequenceHash::short) of its hash through `SplitMix64`,
    /// so that hashes that differ in one bit do not cancel out.
    pub fn term(short: u64) -> u64 {
        splitmix64(short)
    }
}

/// Collects distinct hashes.
impl FromIterator<SequenceHash> for SetDigest {
    fn from_iter<N: IntoIterator<Item = SequenceHash>>(hashes: N) -> Self {
        let with = |all: Self, hash: SequenceHash| Self {
            blocks: all.blocks + 1,
            sum: all.sum.wrapping_add(Self::term(hash.short())),
        };
        hashes.into_iter().fold(Self::default(), with)
    }
}

impl Serialize for SetDigest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("SetDigest", 2)?;
        fields.serialize_field("blocks", &self.blocks)?;
        // As text: many JSON readers do not keep all bits of a 64-bit number.
        fields.serialize_field("digest", &format!("{:016x}", self.sum))?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_depends_on_the_hashes_and_not_on_their_order() {
        let of = |hashes: &[u8]| hashes.iter().map(|n| SequenceHash::from_bytes([*n; 16])).collect::<SetDigest>();
        assert_eq!(of(&[1, 2, 3]), of(&[3, 1, 2]));
        assert_ne!(of(&[1, 2, 3]), of(&[1, 2, 4]), "the same number of blocks");
        assert_ne!(of(&[1, 2]), of(&[1, 2, 3]));
    }
}
