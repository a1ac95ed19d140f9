//! Split points of a long text: the pieces have the same tokens as the whole text.
//!
//! Tokenizers split a text into words before they look for tokens, and no token spans two words. A [`SplitKind`] is a
//! kind of position where a word always ends: before the space between two words, before a comma. [`detect`] checks
//! each kind when a model is loaded: no token of the vocabulary spans such a position, and a sample text in many
//! scripts has the same tokens whole and split at each such position. A kind that fails is not used.

use super::{EncodeError, ids};
use crate::model::vocabulary::Vocabulary;
use tokenizers::Tokenizer;

/// Minimum size of a piece: of a text that begins like an earlier one, less than this is tokenized twice. A piece takes
/// about 0.5 ms to tokenize, and 4 µs if its tokens are known. Cancellation is checked between pieces.
pub(super) const PIECE_BYTES: usize = 1 << 10;
/// Maximum size of a piece without a split point, which takes about 150 MiB to tokenize. Base64, hexadecimal digits and
/// tables of numbers have split points; a longer run is one character repeated.
const MAX_PIECE: usize = 1 << 20;

/// A kind of split point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SplitKind {
    /// Before the space between two words.
    Space,
    /// At the space between two words, which is dropped, for tokenizers that add a space before every text.
    DroppedSpace,
    /// Between a letter and the end of its line.
    Line,
    /// Between a letter or digit and a punctuation mark.
    Punctuation,
    /// Between a letter and a digit.
    Digit,
}

/// Punctuation marks that end a word. Not the apostrophe: in many tokenizers `'s` ends a word. Not the marks that
/// follow letters in special tokens like `<|im_start|>`, `[INST]` and `</s>`, which must not be split.
const MARKS: &str = ",.;:!?()\"\u{3001}\u{3002}\u{FF0C}\u{FF1A}\u{FF1F}\u{FF01}";

/// Words, numbers and punctuation of many scripts, with runs of spaces and lines, code, and contractions.
pub(super) const SAMPLE: &str = include_str!("sample.txt");

impl SplitKind {
    const ALL: [Self; 5] = [Self::Space, Self::DroppedSpace, Self::Line, Self::Punctuation, Self::Digit];

    /// Whether `at`, between `before` and `after`, may begin a piece.
    fn fits(self, before: char, at: char, after: char) -> bool {
        match self {
            Self::Space => !before.is_whitespace() && at == ' ' && is_letter(after),
            // These tokenizers add another space after a special token.
            Self::DroppedSpace => is_letter(before) && at == ' ' && is_letter(after),
            Self::Line => is_letter(before) && matches!(at, '\n' | '\r'),
            Self::Punctuation => (is_letter(before) || before.is_ascii_digit()) && MARKS.contains(at),
            Self::Digit => is_letter(before) && at.is_ascii_digit() || before.is_ascii_digit() && is_letter(at),
        }
    }

    /// Bytes that are dropped at the split point.
    fn dropped(self) -> usize {
        usize::from(self == Self::DroppedSpace)
    }
}

/// Letters of scripts whose words consist of letters only. In other scripts words contain marks, which tokenizers treat
/// differently.
fn is_letter(c: char) -> bool {
    matches!(c,
        'A'..='Z' | 'a'..='z' | '\u{C0}'..='\u{D6}' | '\u{D8}'..='\u{F6}' | '\u{F8}'..='\u{17F}' // Latin
        | '\u{3B1}'..='\u{3C9}' | '\u{410}'..='\u{44F}' // Greek, Cyrillic
        | '\u{5D0}'..='\u{5EA}' | '\u{620}'..='\u{63F}' | '\u{641}'..='\u{64A}' // Hebrew, Arabic
        | '\u{3041}'..='\u{3096}' | '\u{30A1}'..='\u{30FA}' | '\u{4E00}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7A3}' // CJK
    )
}

/// The split points of these kinds in a text, from byte `from` on.
fn split_points<'a>(
    text: &'a str,
    from: usize,
    splits: &'a [SplitKind],
) -> impl Iterator<Item = (usize, SplitKind)> + 'a {
    let mut chars = text[from..].char_indices().map(move |(at, c)| (from + at, c)).peekable();
    let mut before = None;
    std::iter::from_fn(move || {
        loop {
            let (at, c) = chars.next()?;
            let after = chars.peek().map_or('\n', |(_, after)| *after);
            let kind = before.replace(c).and_then(|before| splits.iter().find(|kind| kind.fits(before, c, after)));
            if let Some(kind) = kind {
                return Some((at, *kind));
            }
        }
    })
}

/// The kinds of split points that hold for this tokenizer.
pub(super) fn detect(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Result<Vec<SplitKind>, tokenizers::Error> {
    let mut kinds = Vec::new();
    let edge = |c: Option<char>| c.is_none_or(char::is_alphanumeric);
    let added = tokenizer.get_added_tokens_decoder();
    // An added token that strips spaces or depends on its neighbours would differ at a split point.
    let context_sensitive = added.values().filter(|token| token.lstrip || token.rstrip || token.single_word);
    if context_sensitive
        .map(|token| &token.content)
        .any(|text| edge(text.chars().next()) || edge(text.chars().next_back()))
    {
        return Ok(kinds);
    }
    let whole = ids(tokenizer, SAMPLE, false)?;
    let ends_in_letter = |text: &str| text.starts_with(is_letter) || text.ends_with(is_letter);
    let in_words = added.values().any(|token| ends_in_letter(&token.content));
    'next: for kind in SplitKind::ALL {
        if kind == SplitKind::DroppedSpace && (in_words || kinds.contains(&SplitKind::Space))
            || vocabulary.texts().any(|token| split_points(&token, 0, &[kind]).next().is_some())
        {
            continue;
        }
        for (at, _) in split_points(SAMPLE, 0, &[kind]) {
            let mut tokens = ids(tokenizer, &SAMPLE[..at], false)?;
            tokens.extend(ids(tokenizer, &SAMPLE[at + kind.dropped()..], false)?);
            if tokens != whole {
                continue 'next;
            }
        }
        kinds.push(kind);
    }
    Ok(kinds)
}

/// The pieces of a text. Each but the last has at least `piece` bytes. Without a kind of split points it is one piece.
pub(super) struct TextPieces<'a> {
    left: &'a str,
    splits: &'a [SplitKind],
    piece: usize,
}

impl<'a> TextPieces<'a> {
    pub(super) fn new(text: &'a str, splits: &'a [SplitKind], piece: usize) -> Self {
        Self { left: text, splits, piece }
    }
}

impl<'a> Iterator for TextPieces<'a> {
    type Item = Result<&'a str, EncodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left.is_empty() {
            return None;
        }
        let text = std::mem::take(&mut self.left);
        let point = (text.len() > self.piece && !self.splits.is_empty())
            .then(|| split_points(text, text.floor_char_boundary(self.piece), self.splits).next());
        let (end, kind) = point.flatten().map_or((text.len(), None), |(at, kind)| (at, Some(kind)));
        if end > MAX_PIECE && !self.splits.is_empty() {
            return Some(Err(EncodeError::Unsplittable(MAX_PIECE)));
        }
        self.left = &text[end + kind.map_or(0, SplitKind::dropped)..];
        Some(Ok(&text[..end]))
    }
}
