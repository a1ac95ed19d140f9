//! Bit masks, and a bitmap of small numbers.

/// A bitmap. Its length is that of its largest member.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub(super) fn set(&mut self, bit: u32) {
        let word = bit as usize / 64;
        if self.0.len() <= word {
            self.0.reserve_exact(word + 1 - self.0.len());
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (bit % 64);
    }

    pub(super) fn unset(&mut self, bit: u32) {
        if let Some(word) = self.0.get_mut(bit as usize / 64) {
            *word &= !(1 << (bit % 64));
        }
    }

    pub(super) fn has(&self, bit: u32) -> bool {
        self.0.get(bit as usize / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().enumerate().flat_map(|(index, word)| each(*word).map(move |bit| index as u32 * 64 + bit))
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Words of 64 members, the smallest member in the lowest bit.
    pub(super) fn words(&self) -> &[u64] {
        &self.0
    }
}

impl FromIterator<u32> for Bits {
    fn from_iter<I: IntoIterator<Item = u32>>(members: I) -> Self {
        let mut bits = Self::default();
        members.into_iter().for_each(|bit| bits.set(bit));
        bits
    }
}

/// A mask of the lowest `len` bits.
pub(super) fn ones(len: u32) -> u64 {
    if len >= u64::BITS { u64::MAX } else { (1 << len) - 1 }
}

/// Set bits of a word, lowest first.
pub(super) fn each(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let at = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(at)
    })
}
