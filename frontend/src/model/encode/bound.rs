//! How few tokens a text can have, from its bytes alone.
//!
//! Each token covers some bytes of the text, and at a place at most as many as the longest token of the vocabulary that begins with
//! the two bytes there. How many such steps reach the end of the text is a lower bound of its tokens, whatever the tokenizer chooses;
//! for text in words it is about half of them.

use super::Refused;
use crate::model::vocabulary::Vocabulary;
use serde_json::Value;
use tokenizers::Tokenizer;

/// What some tokenizers write for a space.
const WRITTEN_SPACE: char = '\u{2581}';

pub(super) struct Bound {
    /// The most bytes of a token, by its first two.
    longest: Vec<u16>,
    /// The tokenizer changes other text than ASCII before it looks for tokens.
    ascii: bool,
}

impl Bound {
    /// `None` for a tokenizer whose tokens may cover other bytes than those they spell.
    pub(super) fn new(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Option<Self> {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let strips = |token: &tokenizers::AddedToken| token.lstrip || token.rstrip;
        let whole = leaf_steps(&splitter).all(keeps_all) && !tokenizer.get_added_tokens_decoder().values().any(strips);
        // What has no token of its own becomes one token with what follows, unless each byte has one.
        let mut bytes = [false; 256];
        vocabulary.tokens().filter(|token| token.len() == 1).for_each(|token| bytes[usize::from(token[0])] = true);
        let ascii = leaf_steps(&normalizer).map(changes).try_fold(false, |some, step| step.map(|step| some | step))?;
        if !whole || bytes.contains(&false) {
            return None;
        }
        let mut longest = vec![1; 1 << 16];
        let mut note = |token: &[u8]| {
            if let [first, second, ..] = *token {
                let most = &mut longest[key(first, second)];
                *most = u16::try_from(token.len()).unwrap_or(u16::MAX).max(*most);
            }
        };
        for token in vocabulary.tokens() {
            note(token);
            // The space may be one that the tokenizer put there.
            note(token.strip_prefix(b" ").unwrap_or_default());
        }
        longest.iter().all(|most| *most < u16::MAX).then_some(Self { longest, ascii })
    }

    /// Refuses a text that has more than `limit` tokens for certain.
    pub(super) fn check(&self, text: &str, limit: usize) -> Result<(), Refused> {
        // Where a tokenizer writes U+2581 for a space, tokens with spaces cover that character too, which is longer.
        if text.len() <= limit || self.ascii && !text.is_ascii() || text.contains(WRITTEN_SPACE) {
            return Ok(());
        }
        let (mut tokens, mut reached, mut next) = (0, 0, 0);
        for (at, pair) in text.as_bytes().windows(2).enumerate() {
            next = next.max(at + usize::from(self.longest[key(pair[0], pair[1])]));
            if at == reached {
                tokens += 1;
                reached = next;
                if tokens > limit {
                    return Err(Refused::TooLong(tokens));
                }
            }
        }
        Ok(())
    }
}

fn key(first: u8, second: u8) -> usize {
    usize::from(first) << 8 | usize::from(second)
}

/// The steps of a normalizer or pre-tokenizer.
fn leaf_steps(step: &Value) -> impl Iterator<Item = &Value> {
    let one: &[Value] = if step.is_null() { &[] } else { std::slice::from_ref(step) };
    let steps = ["normalizers", "pretokenizers"].iter().find_map(|list| step[list].as_array());
    steps.map_or(one, Vec::as_slice).iter()
}

/// Whether a step of a pre-tokenizer leaves nothing of the text out.
fn keeps_all(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        // Inverted, it keeps what matches, and such patterns match everything.
        Some("Split") => step["behavior"] != "Removed" || step["invert"] == true,
        _ => false,
    }
}

/// Whether a step of a normalizer changes other text than ASCII; `None` when it changes ASCII too.
fn changes(step: &Value) -> Option<bool> {
    match step["type"].as_str() {
        Some("Prepend") => Some(false),
        Some("Replace") if step["pattern"]["String"] == " " => Some(false),
        Some("NFC" | "NFD" | "NFKC" | "NFKD") => Some(true),
        _ => None,
    }
}
