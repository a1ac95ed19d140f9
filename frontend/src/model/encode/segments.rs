//! Cuts a text before its added tokens, such as `<|im_start|>`, so that turns of a conversation are encoded one by one.
//!
//! A tokenizer looks for added tokens that are not normalized before anything else, and encodes the text between them
//! piece by piece. What a piece sees of the rest is whether it begins the text (Metaspace with `first`). So a
//! [segment](AddedTokens::segments) begins with the added token that ends the one before it: then its text begins the
//! whole text exactly if it did before.
//!
//! Why the same added tokens are found: they are matched leftmost, longest, and without overlap. A match that begins
//! before a cut ends before it, and at the cut the search begins anew either way. A cut is made only before tokens that
//! take no space from their left and do not depend on their neighbours.

use super::ids;
use super::split::SAMPLE;
use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// Added tokens with which the cuts are tried when a model is loaded. Models have up to thousands, all alike.
const TRIED: usize = 8;

/// The added tokens of a tokenizer before which a text may be cut.
pub(super) struct AddedTokens {
    /// Finds all added tokens that are not normalized.
    finder: AhoCorasick,
    /// By the number of the token in `finder`: whether a text may be cut before it.
    cuts: Vec<bool>,
}

impl AddedTokens {
    /// `None` if the texts of this tokenizer cannot be cut.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Option<Self>, tokenizers::Error> {
        let mut added: Vec<_> =
            tokenizer.get_added_tokens_decoder().into_values().filter(|token| !token.normalized).collect();
        added.sort_unstable_by(|one, other| one.content.cmp(&other.content));
        // A token that must be a whole word looks at the text behind it, which would be cut off.
        if tokenizer.get_encode_special_tokens() || added.iter().any(|token| token.single_word) {
            return Ok(None);
        }
        let cuts: Vec<bool> =
            added.iter().map(|token| !token.lstrip && !token.content.starts_with(char::is_whitespace)).collect();
        let texts: Vec<&str> = added.iter().map(|token| token.content.as_str()).collect();
        if !cuts.contains(&true) || texts.contains(&"") {
            return Ok(None);
        }
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&texts)?;
        let found = Self { finder, cuts };
        let tried = texts.iter().zip(&found.cuts).filter(|(_, cut)| **cut).take(TRIED);
        let sample: String = tried.flat_map(|(text, _)| [SAMPLE, text, " ", text, "a b"]).collect();
        let mut tokens = Vec::new();
        for segment in found.segments(&sample) {
            tokens.extend(ids(tokenizer, segment, false)?);
        }
        Ok((tokens == ids(tokenizer, &sample, false)?).then_some(found))
    }

    /// The segments of a text. Their tokens, one after the other, are the tokens of the text.
    pub(super) fn segments<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let found = self.finder.find_iter(text).filter(|found| self.cuts[found.pattern().as_usize()]);
        let mut start = 0;
        let ends = found.map(|found| found.start()).chain([text.len()]);
        ends.map(move |end| &text[std::mem::replace(&mut start, end)..end]).filter(|segment| !segment.is_empty())
    }
}
