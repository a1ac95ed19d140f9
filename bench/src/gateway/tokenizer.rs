//! The tokenizer of the engines: a byte-level BPE that is computed here without a library, and whose files a gateway
//! can load.
//!
//! A token is a byte, or a space with the beginning of one of [`WORDS`]. Each merge adds one letter to such a
//! beginning, so at most one merge applies at a time, and the token is the longest beginning that the text has.

use anyhow::Result;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// The words of all prompts. With its space a word is one token of five bytes on average.
pub const WORDS: [&str; 64] = [
    "a", "about", "after", "all", "and", "answer", "are", "as", "at", "batch", "be", "block", "by", "cache", "can",
    "code", "engine", "event", "for", "from", "gateway", "group", "has", "have", "if", "in", "index", "input", "is",
    "it", "layer", "limit", "load", "memory", "model", "more", "not", "of", "on", "one", "or", "output", "page",
    "prefix", "prompt", "queue", "request", "router", "same", "step", "store", "stream", "that", "the", "their",
    "this", "tier", "time", "to", "token", "weight", "which", "with", "worker",
];
/// Ids below this are those of bytes.
const BYTES: u32 = 256;

/// The tokenizer.
pub struct Tokenizer {
    /// For each beginning of a word the number of the one that is a letter longer, by that letter; 0 if there is none.
    /// Number 0 is the space alone.
    longer: Vec<[u32; 26]>,
    /// The beginnings from number 1 on, without the space.
    beginnings: Vec<&'static str>,
}

impl Default for Tokenizer {
    fn default() -> Self {
        let mut tokenizer = Self { longer: vec![[0; 26]], beginnings: Vec::new() };
        for word in WORDS {
            let mut number = 0;
            for (at, letter) in word.bytes().enumerate() {
                number = tokenizer.longer(number, letter).unwrap_or_else(|| tokenizer.add(number, &word[..=at]));
            }
        }
        tokenizer
    }
}

impl Tokenizer {
    /// Adds a beginning that is a letter longer than the one of this number.
    fn add(&mut self, number: u32, beginning: &'static str) -> u32 {
        let new = self.longer.len() as u32;
        let letter = beginning.as_bytes()[beginning.len() - 1];
        self.longer[number as usize][usize::from(letter - b'a')] = new;
        self.longer.push([0; 26]);
        self.beginnings.push(beginning);
        new
    }

    fn longer(&self, number: u32, letter: u8) -> Option<u32> {
        let at = usize::from(letter.checked_sub(b'a')?);
        self.longer[number as usize].get(at).copied().filter(|longer| *longer > 0)
    }

    /// Number of ids.
    pub fn vocabulary_size(&self) -> usize {
        BYTES as usize + self.beginnings.len()
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 4);
        let mut bytes = text.bytes().peekable();
        while let Some(byte) = bytes.next() {
            let mut number = 0;
            if byte == b' ' {
                while let Some(longer) = bytes.peek().and_then(|letter| self.longer(number, *letter)) {
                    number = longer;
                    bytes.next();
                }
            }
            tokens.push(if number > 0 { BYTES - 1 + number } else { u32::from(byte) });
        }
        tokens
    }

    /// Writes the files of a model that has this tokenizer. Its chat template is the texts of the messages alone.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let names = byte_names();
        let name = |beginning: &str| format!("{}{beginning}", names[usize::from(b' ')]);
        let mut vocabulary: Map<String, Value> =
            (0_u32..).zip(&names).map(|(id, name)| (name.to_string(), id.into())).collect();
        vocabulary.extend((BYTES..).zip(&self.beginnings).map(|(id, beginning)| (name(beginning), id.into())));
        let merge = |beginning: &&'static str| {
            let (shorter, letter) = beginning.split_at(beginning.len() - 1);
            json!([name(shorter), letter])
        };
        let merges: Vec<Value> = self.beginnings.iter().map(merge).collect();
        let byte_level = |add_prefix_space: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": true,
            })
        };
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": byte_level(false), "post_processor": null, "decoder": byte_level(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocabulary, "merges": merges,
            },
        });
        let config = json!({ "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}" });
        fs::create_dir_all(folder)?;
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?;
        Ok(fs::write(folder.join("tokenizer_config.json"), config.to_string())?)
    }
}

/// The character that stands for each byte in the files of byte-level tokenizers: itself where it is printable, the
/// others from U+0100 on.
fn byte_names() -> Vec<char> {
    let mut others = '\u{100}'..;
    let name = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => others.next().expect("68 bytes are not printable"),
    };
    (0..=255).map(name).collect()
}

/// Text of this many characters, that of a seed.
pub fn words(seed: u64, length: usize) -> String {
    // SplitMix64.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut text = String::with_capacity(length + 128);
    while text.len() < length {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        for _ in 0..10 {
            text.push(' ');
            text.push_str(WORDS[(bits % 64) as usize]);
            bits >>= 6;
        }
    }
    text.truncate(length);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_with_its_space_is_one_token() {
        let tokenizer = Tokenizer::default();
        let text = [" ", &WORDS.join(" ")].concat();
        let tokens = tokenizer.encode(&text);
        assert_eq!(tokens.len(), WORDS.len());
        assert!(tokens.iter().all(|token| (BYTES..BYTES + tokenizer.beginnings.len() as u32).contains(token)));
        assert!(words(1, 16 << 10).len() / tokenizer.encode(&words(1, 16 << 10)).len() >= 4, "bytes per token");
    }

    #[test]
    fn other_text_is_bytes_and_the_longest_beginning_of_a_word() {
        let tokenizer = Tokenizer::default();
        let known = |word: &str| tokenizer.encode(&format!(" {word}"))[0];
        assert_eq!(tokenizer.encode("cache"), b"cache".map(u32::from));
        assert_eq!(tokenizer.encode(" caches  blo\n"), [known("cache"), 115, 32, known("blo"), 10]);
        assert_eq!(tokenizer.encode(" \u{E9}"), [32, 0xc3, 0xa9]);
    }

    #[test]
    fn the_files_have_a_merge_for_each_token_of_several_bytes() {
        let (tokenizer, folder) = (Tokenizer::default(), tempfile::tempdir().unwrap());
        tokenizer.write(folder.path()).unwrap();
        let file: Value = serde_json::from_slice(&fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap();
        let (vocabulary, merges) = (&file["model"]["vocab"], file["model"]["merges"].as_array().unwrap());
        assert_eq!(vocabulary.as_object().unwrap().len(), 256 + merges.len());
        assert_eq!(tokenizer.vocabulary_size(), 256 + merges.len());
        assert_eq!((&vocabulary["a"], &vocabulary["\u{120}"]), (&json!(97), &json!(32)));
        for (id, merge) in (BYTES..).zip(merges) {
            let [left, right] = [0, 1].map(|at| merge[at].as_str().unwrap());
            assert!(vocabulary[left].as_u64().is_some_and(|left| left < u64::from(id)), "{merge}");
            assert_eq!(vocabulary[format!("{left}{right}")], id);
        }
    }
}
