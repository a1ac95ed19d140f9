//! A set of small numbers, one bit each, as long as its largest member needs.

/// The set.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub(super) fn set(&mut self, bit: u32) {
        let word = bit as usize / 64;
        if self.0.len() <= word {
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
        self.0.iter().enumerate().flat_map(|(index, word)| ones(*word).map(move |bit| index as u32 * 64 + bit))
    }
}

/// The positions of the bits that are set, lowest first.
fn ones(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}
