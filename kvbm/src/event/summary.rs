//! An order-independent digest of a set of block hashes. It compares views of a tier: the tier's own, the router's
//! index, and what `blockyard cache ls` finds.

use super::Digest;
use crate::block::SequenceHash;
use serde::ser::{Serialize, SerializeStruct, Serializer};

/// How many names, and which.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Census {
    /// How many.
    pub blocks: u64,
    /// The sum of each one's [`Digest::part`], modulo 2⁶⁴, in whatever order.
    pub sum: u64,
}

/// Of names that are all different.
impl FromIterator<SequenceHash> for Census {
    fn from_iter<N: IntoIterator<Item = SequenceHash>>(names: N) -> Self {
        let with = |all: Self, name: SequenceHash| Self {
            blocks: all.blocks + 1,
            sum: all.sum.wrapping_add(Digest::part(name.short())),
        };
        names.into_iter().fold(Self::default(), with)
    }
}

impl Serialize for Census {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut said = serializer.serialize_struct("Census", 2)?;
        said.serialize_field("blocks", &self.blocks)?;
        // As text: many JSON readers do not keep all bits of a 64-bit number.
        said.serialize_field("digest", &format!("{:016x}", self.sum))?;
        said.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_names_in_any_order_are_the_same_and_one_other_name_is_not() {
        let of = |names: &[u8]| names.iter().map(|n| SequenceHash::from_bytes([*n; 16])).collect::<Census>();
        assert_eq!(of(&[1, 2, 3]), of(&[3, 1, 2]));
        assert_ne!(of(&[1, 2, 3]), of(&[1, 2, 4]), "as many");
        assert_ne!(of(&[1, 2]), of(&[1, 2, 3]));
    }
}
