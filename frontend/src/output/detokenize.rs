//! Tokens to text, one token at a time and each byte once. A character whose bytes are spread over tokens comes out when it
//! is complete; what cannot become a character comes out as U+FFFD, exactly as if all bytes had been decoded at once.

use crate::model::Vocabulary;
use std::sync::Arc;

/// The text of one choice, as far as its tokens are known.
pub(crate) struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// The first bytes of a character that is not complete yet, at most three.
    partial: Vec<u8>,
}

impl Detokenizer {
    /// Starts a text that goes on after a prompt: a first token's leading space is kept.
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        Self { vocabulary, skip_special, partial: Vec::new() }
    }

    /// Appends to `out` the text that is complete with this token.
    pub(crate) fn push(&mut self, token: u32, out: &mut String) {
        if self.skip_special && self.vocabulary.is_special(token) {
            return;
        }
        self.partial.extend_from_slice(self.vocabulary.bytes(token));
        let keep = {
            let bytes = self.partial.as_slice();
            let mut done = 0;
            for chunk in bytes.utf8_chunks() {
                out.push_str(chunk.valid());
                done += chunk.valid().len();
                let invalid = chunk.invalid();
                let more_may_come = done + invalid.len() == bytes.len() && is_beginning(invalid);
                if more_may_come {
                    break;
                }
                if !invalid.is_empty() {
                    out.push(char::REPLACEMENT_CHARACTER);
                    done += invalid.len();
                }
            }
            done
        };
        self.partial.drain(..keep);
    }

    /// The text has ended: a character that is still incomplete will stay so.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&self.partial));
        self.partial.clear();
    }
}

/// Whether more bytes could make a character of these.
fn is_beginning(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests;
