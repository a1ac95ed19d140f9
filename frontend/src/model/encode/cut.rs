//! Where a long text is cut, so that its pieces have the tokens of the whole.
//!
//! Tokenizers split a text into words before they look for tokens, and no token spans two words. A [`Cut`] is a kind of place where a
//! word ends whatever comes before and after: before the space between two words, before a comma. Whether that holds for a tokenizer
//! is checked when its model is loaded: no token of the vocabulary spans such a place, so that none can be lost there, and a sample
//! text in many scripts has the same tokens whole and cut at any such place. A kind that fails is not used.

use super::{Refused, ids};
use crate::model::vocabulary::Vocabulary;
use tokenizers::Tokenizer;

/// Bytes of text tokenised at a time: about 20 ms, and 6 MiB of memory. Between two pieces it is noticed that a client is gone.
pub(super) const PIECE: usize = 64 << 10;
/// A piece goes on for so long until it can be cut, which takes about 150 MiB. Base64, hexadecimal digits and tables of numbers can be
/// cut everywhere; what is longer is one character many times over.
const WORD_MAX: usize = 1 << 20;

/// A kind of place to cut a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// Before the space between two words.
    Space,
    /// At the space between two words, for tokenizers that put one before every text.
    SpaceAway,
    /// Between a letter and the end of its line.
    Line,
    /// Between a letter or digit and a punctuation mark.
    Mark,
    /// Between a letter and a digit.
    Digit,
}

/// Marks that end a word. Not the apostrophe: `'s` is a word's end to many tokenizers. Nor what stands behind letters in special tokens
/// like `<|im_start|>`, `[INST]` and `</s>`: a cut could part one.
const MARKS: &str = ",.;:!?()\"\u{3001}\u{3002}\u{FF0C}\u{FF1A}\u{FF1F}\u{FF01}";

/// Words, numbers and marks of many scripts, with runs of spaces and lines, code, and contractions.
pub(super) const SAMPLE: &str = include_str!("sample.txt");

impl Cut {
    const ALL: [Self; 5] = [Self::Space, Self::SpaceAway, Self::Line, Self::Mark, Self::Digit];

    /// Whether `at`, which comes between the other two, may begin a piece.
    fn fits(self, before: char, at: char, after: char) -> bool {
        match self {
            Self::Space => !before.is_whitespace() && at == ' ' && is_letter(after),
            // After a special token such tokenizers put another space.
            Self::SpaceAway => is_letter(before) && at == ' ' && is_letter(after),
            Self::Line => is_letter(before) && matches!(at, '\n' | '\r'),
            Self::Mark => (is_letter(before) || before.is_ascii_digit()) && MARKS.contains(at),
            Self::Digit => is_letter(before) && at.is_ascii_digit() || before.is_ascii_digit() && is_letter(at),
        }
    }

    /// Bytes left out at the cut.
    fn dropped(self) -> usize {
        usize::from(self == Self::SpaceAway)
    }
}

/// Letters of scripts whose words are letters alone. In others marks belong to words, and tokenizers differ in how they see them.
fn is_letter(c: char) -> bool {
    matches!(c,
        'A'..='Z' | 'a'..='z' | '\u{C0}'..='\u{D6}' | '\u{D8}'..='\u{F6}' | '\u{F8}'..='\u{17F}' // Latin
        | '\u{3B1}'..='\u{3C9}' | '\u{410}'..='\u{44F}' // Greek, Cyrillic
        | '\u{5D0}'..='\u{5EA}' | '\u{620}'..='\u{63F}' | '\u{641}'..='\u{64A}' // Hebrew, Arabic
        | '\u{3041}'..='\u{3096}' | '\u{30A1}'..='\u{30FA}' | '\u{4E00}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7A3}' // CJK
    )
}

/// The places of these kinds in a text, from `from` on.
fn places<'a>(text: &'a str, from: usize, cuts: &'a [Cut]) -> impl Iterator<Item = (usize, Cut)> + 'a {
    let mut chars = text[from..].char_indices().map(move |(at, c)| (from + at, c)).peekable();
    let mut before = None;
    std::iter::from_fn(move || {
        loop {
            let (at, c) = chars.next()?;
            let after = chars.peek().map_or('\n', |(_, after)| *after);
            let cut = before.replace(c).and_then(|before| cuts.iter().find(|cut| cut.fits(before, c, after)));
            if let Some(cut) = cut {
                return Some((at, *cut));
            }
        }
    })
}

/// The kinds of places where texts of this tokenizer may be cut.
pub(super) fn learn(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Result<Vec<Cut>, tokenizers::Error> {
    let mut learnt = Vec::new();
    let edge = |c: Option<char>| c.is_none_or(char::is_alphanumeric);
    let added = tokenizer.get_added_tokens_decoder();
    // One that takes the spaces beside it, or looks at its neighbours, would find others at a cut.
    let looks = added.values().filter(|token| token.lstrip || token.rstrip || token.single_word);
    if looks.map(|token| &token.content).any(|text| edge(text.chars().next()) || edge(text.chars().next_back())) {
        return Ok(learnt);
    }
    let whole = ids(tokenizer, SAMPLE, false)?;
    let ends_in_letter = |text: &str| text.starts_with(is_letter) || text.ends_with(is_letter);
    let in_words = added.values().any(|token| ends_in_letter(&token.content));
    'next: for cut in Cut::ALL {
        if cut == Cut::SpaceAway && (in_words || learnt.contains(&Cut::Space))
            || vocabulary.texts().any(|token| places(&token, 0, &[cut]).next().is_some())
        {
            continue;
        }
        for (at, _) in places(SAMPLE, 0, &[cut]) {
            let mut tokens = ids(tokenizer, &SAMPLE[..at], false)?;
            tokens.extend(ids(tokenizer, &SAMPLE[at + cut.dropped()..], false)?);
            if tokens != whole {
                continue 'next;
            }
        }
        learnt.push(cut);
    }
    Ok(learnt)
}

/// The pieces of a text, each of at least `piece` bytes but the last.
pub(super) struct Pieces<'a> {
    left: &'a str,
    cuts: &'a [Cut],
    piece: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(text: &'a str, cuts: &'a [Cut], piece: usize) -> Self {
        Self { left: text, cuts, piece }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Result<&'a str, Refused>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left.is_empty() {
            return None;
        }
        let text = std::mem::take(&mut self.left);
        let place =
            (text.len() > self.piece).then(|| places(text, text.floor_char_boundary(self.piece), self.cuts).next());
        let (end, cut) = place.flatten().map_or((text.len(), None), |(at, cut)| (at, Some(cut)));
        if end > WORD_MAX {
            return Some(Err(Refused::Word(WORD_MAX)));
        }
        self.left = &text[end + cut.map_or(0, Cut::dropped)..];
        Some(Ok(&text[..end]))
    }
}
