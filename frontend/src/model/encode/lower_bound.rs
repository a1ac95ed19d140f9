//! A lower bound of the number of tokens of a text, from its bytes alone.
//!
//! A token at a position covers at most as many bytes as the longest token of the vocabulary that begins with the two
//! bytes there. The number of such steps to the end of the text is a lower bound of its tokens, for any tokenization.
//! For text in words it is about half of the tokens.

use super::EncodeError;
use crate::model::vocabulary::Vocabulary;
use serde_json::Value;
use tokenizers::Tokenizer;

/// The character that some tokenizers use for a space.
const WRITTEN_SPACE: char = '\u{2581}';

/// The longest tokens of a vocabulary.
pub(super) struct TokenLowerBound {
    /// Maximum bytes of a token, by its first two bytes.
    longest: Vec<u16>,
    /// The normalizer changes other characters than ASCII, so the bound holds for ASCII texts only.
    ascii: bool,
}

impl TokenLowerBound {
    /// `None` for a tokenizer whose tokens may cover other bytes than their own.
    pub(super) fn new(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Option<Self> {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let strips = |token: &tokenizers::AddedToken| token.lstrip || token.rstrip;
        let whole = leaf_steps(&splitter).all(keeps_all) && !tokenizer.get_added_tokens_decoder().values().any(strips);
        // Without a token for each byte, a run of unknown bytes of any length may become one token.
        let mut bytes = [false; 256];
        vocabulary.tokens().filter(|token| token.len() == 1).for_each(|token| bytes[usize::from(token[0])] = true);
        let ascii = leaf_steps(&normalizer).map(changes).try_fold(false, |some, step| step.map(|step| some | step))?;
        if !whole || bytes.contains(&false) {
            return None;
        }
        let mut longest = vec![1; 1 << 16];
        let mut insert = |token: &[u8]| {
            if let [first, second, ..] = *token {
                let max = &mut longest[key(first, second)];
                *max = u16::try_from(token.len()).unwrap_or(u16::MAX).max(*max);
            }
        };
        for token in vocabulary.tokens() {
            insert(token);
            // The space may be one that the tokenizer added.
            insert(token.strip_prefix(b" ").unwrap_or_default());
        }
        longest.iter().all(|max| *max < u16::MAX).then_some(Self { longest, ascii })
    }

    /// Rejects a text that certainly has more than `limit` tokens.
    pub(super) fn check(&self, text: &str, limit: usize) -> Result<(), EncodeError> {
        // Tokenizers that use U+2581 for a space cover that character, which has more bytes, by tokens with spaces.
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
                    return Err(EncodeError::TooLong(tokens));
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

/// Whether a step of a pre-tokenizer keeps all of the text.
fn keeps_all(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        // Inverted, it keeps matches, and such patterns match all text.
        Some("Split") => step["behavior"] != "Removed" || step["invert"] == true,
        _ => false,
    }
}

/// Whether a step of a normalizer changes other characters than ASCII; `None` if it changes ASCII too.
fn changes(step: &Value) -> Option<bool> {
    match step["type"].as_str() {
        Some("Prepend") => Some(false),
        Some("Replace") if step["pattern"]["String"] == " " => Some(false),
        Some("NFC" | "NFD" | "NFKC" | "NFKD") => Some(true),
        _ => None,
    }
}
