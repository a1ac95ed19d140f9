//! Tokens to text, incrementally, in constant time per token. A character whose bytes are spread over several tokens is
//! released when it is complete; bytes that cannot become a character are released as U+FFFD, exactly as if all bytes
//! were decoded together.
//!
//! Not `tokenizers::DecodeStream` (0.23): it decodes a window of tokens twice per step, withholds all text that ends in
//! U+FFFD, and has no call for the end of the text, so incomplete UTF-8 at the end is lost, and so is a real U+FFFD
//! there. SentencePiece decoders would also strip the space before the first output token. Skipped special tokens and
//! byte fallback work there as here, except that bytes that are not UTF-8 become one U+FFFD each.

use crate::model::Vocabulary;
use std::sync::Arc;

/// The decoder of one choice.
pub(crate) struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// The first bytes of an incomplete character, at most three.
    partial: Vec<u8>,
}

impl Detokenizer {
    /// A decoder for text that follows a prompt: the leading space of the first token is kept.
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        Self { vocabulary, skip_special, partial: Vec::new() }
    }

    /// Appends to `out` the text that this token completes.
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
                let more_may_come = done + invalid.len() == bytes.len() && is_incomplete(invalid);
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

    /// Ends the text: an incomplete character becomes U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&self.partial));
        self.partial.clear();
    }
}

/// Whether more bytes could complete a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests;
