//! Byte-level BPE, with exactly the tokens of the tokenizer library in a small part of its time.
//!
//! The library matches the pattern that splits a text into words with a backtracking engine, and records the origin of
//! each character. Here words are found by a lazy DFA, and a word that is one token by one look-up. Added tokens,
//! normalization and words are those of the library:
//!
//! ```text
//!   text ── added tokens ── parts ── normalizer ── pre_tokenizer ── words ── merges ── tokens
//! ```
//! A tokenizer with anything else, such as Metaspace, is left to the library, with the reason in the log; so is a text
//! with an added token that takes the spaces around it or is searched in normalized text. When a tokenizer is loaded,
//! its tokens of a sample are compared with the library's. The memory is that of a second vocabulary, about 30 MB for
//! 150,000 tokens, and of the DFAs, which are limited.

mod merges;
mod normalization;
mod pre_tokenizer;

use super::ids;
use super::split::SAMPLE;
use aho_corasick::{AhoCorasick, MatchKind};
use merges::Merges;
use normalization::Normalization;
use pre_tokenizer::PreTokenizer;
use tokenizers::{AddedToken, Tokenizer};

/// Added tokens in the sample. Models have up to thousands, all alike.
const TRIED: usize = 8;
/// Text that is added to the sample of [`split`](super::split): its words depend on what follows, and on Unicode.
const BOUNDARIES: &str = "a  b   c \n d\t\te\r\n\r\n f  \u{A0}\u{3000}g\u{85}h\u{2028} 's'S'\u{17F}'LL'rE\u{2019}s x'y \
    1234567 \u{B2}\u{663}\u{BD}\u{2164}x e\u{301}e\u{323}\u{301}\u{212B}\u{FB01}\u{1100}\u{1161}\u{11A8}\u{AC00} \
    \u{1F468}\u{200D}\u{1F469} \u{0}\u{7F}\u{AD}\u{FEFF}\u{E000}\u{10FFFF} \u{1C5}\u{2B0}\u{AA}A\u{300}Ab \
    \u{AC00}\u{11A8}\u{4E2D}\u{6587},\u{3002}abc!?/\n/\n  ";

/// A byte-level BPE tokenizer.
pub(super) struct ByteLevel {
    added: AddedTokens,
    normalization: Normalization,
    pre_tokenizer: PreTokenizer,
    merges: Merges,
}

/// Why a tokenizer is left to the library.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unsupported {
    /// It has something that is not known here.
    #[error("{0} is not supported")]
    Feature(String),
    /// The tokens of the sample differ, which is an error of this module.
    #[error("the tokens of a sample differ: {0}")]
    Differs(String),
    /// It cannot be read.
    #[error("tokenizer.json: {0}")]
    Broken(String),
}

impl Unsupported {
    fn feature(what: impl Into<String>) -> Self {
        Self::Feature(what.into())
    }

    fn broken(error: &impl ToString) -> Self {
        Self::Broken(error.to_string())
    }
}

/// Added tokens that are searched in the text as it is.
struct AddedTokens {
    /// `None` without such tokens.
    finder: Option<AhoCorasick>,
    /// By the number of the token in `finder`. `None`: it takes space, or depends on its neighbours.
    ids: Vec<Option<u32>>,
}

impl ByteLevel {
    /// The same as `tokenizer`, without the tokens that it adds around a text.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, Unsupported> {
        if tokenizer.get_encode_special_tokens() {
            return Err(Unsupported::feature("text of special tokens as text"));
        }
        if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
            return Err(Unsupported::feature("truncation or padding"));
        }
        // The pre-tokenizer first: it tells most other kinds of tokenizers apart, before their vocabulary is read.
        let found = Self {
            pre_tokenizer: PreTokenizer::new(tokenizer)?,
            added: AddedTokens::new(tokenizer)?,
            normalization: Normalization::new(tokenizer)?,
            merges: Merges::new(tokenizer)?,
        };
        found.compare(tokenizer)?;
        Ok(found)
    }

    /// Compares the tokens of a sample with those of the library.
    fn compare(&self, tokenizer: &Tokenizer) -> Result<(), Unsupported> {
        let mut texts: Vec<String> = SAMPLE.split_inclusive('\n').map(str::to_owned).collect();
        texts.extend([SAMPLE.to_owned(), BOUNDARIES.to_owned()]);
        let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let between = |text: String, (_, token): &(u32, AddedToken)| text + " a " + token.content.as_str() + "b";
        texts.push(added.iter().take(TRIED).fold(String::new(), between));
        let mut tokens = Vec::new();
        for text in texts {
            tokens.clear();
            let want = ids(tokenizer, &text, false).map_err(|error| Unsupported::broken(&error))?;
            if self.encode(&text, &mut tokens) && tokens != want {
                let at = tokens.iter().zip(&want).take_while(|(one, other)| one == other).count();
                return Err(Unsupported::Differs(format!("token {at} of {text:?}")));
            }
        }
        Ok(())
    }

    /// Adds the tokens of a text. `false`: only the library has them, and nothing was added.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> bool {
        let known = tokens.len();
        let encoded = self.encode_parts(text, tokens).is_some();
        if !encoded {
            tokens.truncate(known);
        }
        encoded
    }

    fn encode_parts(&self, text: &str, tokens: &mut Vec<u32>) -> Option<()> {
        let mut start = 0;
        for found in self.added.finder.iter().flat_map(|finder| finder.find_iter(text)) {
            let id = self.added.ids[found.pattern().as_usize()]?;
            self.encode_part(&text[start..found.start()], tokens)?;
            tokens.push(id);
            start = found.end();
        }
        self.encode_part(&text[start..], tokens)
    }

    /// Adds the tokens of a text between added tokens.
    fn encode_part(&self, text: &str, tokens: &mut Vec<u32>) -> Option<()> {
        if text.is_empty() {
            return Some(());
        }
        let text = self.normalization.apply(text)?;
        self.pre_tokenizer.words(&text, |word| self.merges.encode(word.as_bytes(), tokens))
    }
}

impl AddedTokens {
    fn new(tokenizer: &Tokenizer) -> Result<Self, Unsupported> {
        let added = tokenizer.get_added_tokens_decoder().into_values().filter(|token| !token.normalized);
        let mut added: Vec<AddedToken> = added.filter(|token| !token.content.is_empty()).collect();
        added.sort_unstable_by(|one, other| one.content.cmp(&other.content));
        let is_plain = |token: &AddedToken| !token.lstrip && !token.rstrip && !token.single_word;
        let id = |token: &AddedToken| tokenizer.token_to_id(&token.content).filter(|_| is_plain(token));
        let ids = added.iter().map(id).collect();
        let finder = (!added.is_empty()).then(|| {
            let texts = added.iter().map(|token| &token.content);
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts)
        });
        Ok(Self { finder: finder.transpose().map_err(|error| Unsupported::broken(&error))?, ids })
    }
}

#[cfg(test)]
mod tests;
