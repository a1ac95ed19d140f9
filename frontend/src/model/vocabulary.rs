//! The bytes of each token, so that decoding is a table look-up.
//!
//! Supports the two families of decoders of language models: byte-level BPE, and SentencePiece with byte fallback.
//! Other decoders are rejected by name.

use crate::error::Error;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use tokenizers::Tokenizer;

/// SentencePiece's character for a space.
const META_SPACE: char = '\u{2581}';

/// The byte table, by token id.
pub(crate) struct Vocabulary {
    /// The bytes of all tokens, concatenated.
    bytes: Vec<u8>,
    /// Per token, the end of its bytes in `bytes`.
    ends: Vec<u32>,
    special: HashSet<u32>,
}

/// How a token's string encodes its bytes.
enum TokenEncoding {
    ByteLevel(HashMap<char, u8>),
    /// SentencePiece: this character is a space; with byte fallback, `<0x0A>` is a byte.
    SentencePiece {
        space: char,
        fallback: bool,
    },
}

impl Vocabulary {
    /// The byte table of a tokenizer.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, Error> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()).map_err(|e| Error::Failed(e.to_string()))?;
        let encoding = TokenEncoding::of(&decoder)?;
        let added = tokenizer.get_added_tokens_decoder();
        let mut names: Vec<(String, u32)> = tokenizer.get_vocab(true).into_iter().collect();
        names.sort_unstable_by_key(|(_, id)| *id);
        names.dedup_by_key(|(_, id)| *id);
        let mut table = Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            special: added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect(),
        };
        for (name, id) in names {
            table.ends.resize(id as usize, table.bytes.len() as u32);
            encoding.decode(&name, &mut table.bytes);
            table.ends.push(table.bytes.len() as u32);
        }
        Ok(table)
    }

    /// A token's bytes; empty for an unknown id.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        let end = |i: usize| self.ends.get(i).map(|end| *end as usize);
        let token = token as usize;
        let start = token.checked_sub(1).map_or(Some(0), end);
        match (start, end(token)) {
            (Some(start), Some(end)) => &self.bytes[start..end],
            _ => &[],
        }
    }

    /// The bytes of every token.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.ends.len() as u32).map(|token| self.bytes(token))
    }

    /// The text of every token, with U+FFFD for bytes that are part of a character.
    pub(crate) fn texts(&self) -> impl Iterator<Item = Cow<'_, str>> {
        self.tokens().map(String::from_utf8_lossy)
    }

    /// Whether the token is a special one, which is not text.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.special.contains(&token)
    }
}

impl TokenEncoding {
    fn of(decoder: &Value) -> Result<Self, Error> {
        let one = std::slice::from_ref(decoder);
        let steps = decoder["decoders"].as_array().map_or(one, Vec::as_slice);
        let mut pieces = None;
        let mut fallback = false;
        for step in steps {
            match step["type"].as_str() {
                Some("ByteLevel") => return Ok(Self::ByteLevel(byte_of_char())),
                Some("Metaspace") => pieces = step["replacement"].as_str().and_then(|c| c.chars().next()),
                Some("Replace") if step["content"] == " " => {
                    pieces = step["pattern"]["String"].as_str().and_then(|c| c.chars().next());
                }
                Some("ByteFallback") => fallback = true,
                // The table joins bytes anyway. Stripping concerns the first token of a text, and output follows a
                // prompt.
                Some("Fuse" | "Strip") => {}
                other => {
                    let name = other.unwrap_or("none");
                    let problem = "is not supported; supported are ByteLevel and the decoders of SentencePiece";
                    return Err(Error::Failed(format!("tokenizer.json: decoder {name} {problem}")));
                }
            }
        }
        Ok(Self::SentencePiece { space: pieces.unwrap_or(META_SPACE), fallback })
    }

    fn decode(&self, name: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel(byte) => {
                let start = out.len();
                for c in name.chars() {
                    let Some(byte) = byte.get(&c) else {
                        // Not byte-level: an added token, whose string is its text.
                        out.truncate(start);
                        out.extend_from_slice(name.as_bytes());
                        return;
                    };
                    out.push(*byte);
                }
            }
            Self::SentencePiece { space, fallback } => {
                let hex = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
                match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| *fallback) {
                    Some(byte) => out.push(byte),
                    None => out.extend_from_slice(name.replace(*space, " ").as_bytes()),
                }
            }
        }
    }
}

/// GPT-2's encoding of bytes: printable Latin-1 characters stand for themselves, the others for characters from U+0100
/// on.
pub(super) fn byte_of_char() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let itself = (0..=u8::MAX).filter(|b| printable(*b)).map(|b| (char::from(b), b));
    let moved = (0..=u8::MAX).filter(|b| !printable(*b)).zip('\u{100}'..).map(|(b, c)| (c, b));
    itself.chain(moved).collect()
}
