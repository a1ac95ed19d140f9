//! The tokenizer of the built-in models: byte-level BPE, so that any text can be encoded; without normaliser and
//! prefix space, so that the tokens of a text are a prefix of the tokens of its continuation wherever a special token
//! separates them.
//!
//! Only the list of merges is stored (`merges.bin`, written by `train_merges.py`, which names the training text).
//! Token ids are the 256 bytes, then the results of the merges, then the special tokens. A smaller vocabulary is a
//! shorter list of merges.

use serde_json::{Map, Value, json};
use std::ops::Range;
use std::str::FromStr;
use tokenizers::Tokenizer;

const MERGES: &[u8] = include_bytes!("merges.bin");

/// A special token, by its index among them.
#[derive(Clone, Copy)]
pub(super) struct Special(usize);

/// Starts every conversation.
pub(super) const BEGIN: Special = Special(0);
/// Ends a turn, and with it generated text.
pub(super) const END: Special = Special(3);

const SPECIAL: [&str; 4] = ["<|begin_of_text|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"];

/// Special tokens surround role and content, so that no token spans two turns: the tokens of a conversation are a
/// prefix of those of its continuation.
const CHAT_TEMPLATE: &str = "{{- bos_token -}}\
    {%- for message in messages -%}\
    {{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' -}}\
    {%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}";

impl Special {
    /// Its id in a vocabulary of this size.
    pub(super) fn id(self, vocabulary: usize) -> u32 {
        (vocabulary - SPECIAL.len() + self.0) as u32
    }
}

/// The tokens and the merges that they come from.
pub(super) struct Vocabulary {
    /// The bytes of each token by id, without the special tokens.
    tokens: Vec<Vec<u8>>,
    /// The two tokens that each merge joins.
    merges: Vec<(usize, usize)>,
}

impl Vocabulary {
    /// A vocabulary of this size, special tokens included.
    pub(super) fn new(size: usize) -> Self {
        let count = size - 256 - SPECIAL.len();
        let number = |pair: &[u8]| usize::from(u16::from_le_bytes([pair[0], pair[1]]));
        let merges: Vec<_> = MERGES.chunks_exact(4).take(count).map(|m| (number(&m[..2]), number(&m[2..]))).collect();
        assert_eq!(merges.len(), count, "merges.bin is long enough for the largest vocabulary");
        let mut tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        for &(left, right) in &merges {
            tokens.push([&tokens[left][..], &tokens[right][..]].concat());
        }
        Self { tokens, merges }
    }

    /// Number of tokens, special tokens included.
    pub(super) fn size(&self) -> usize {
        self.tokens.len() + SPECIAL.len()
    }

    /// The ids of the special tokens.
    pub(super) fn special(&self) -> Range<usize> {
        self.tokens.len()..self.size()
    }

    /// The tokens that consist of a space and lower-case letters, and that the tokenizer produces from their own
    /// text. Any sequence of them reads as words and tokenizes to the same tokens in the next turn's prompt.
    pub(super) fn words(&self) -> Vec<usize> {
        let tokenizer =
            Tokenizer::from_str(&self.tokenizer_json().to_string()).expect("the generated tokenizer.json is valid");
        let is_word = |id: &usize| match self.tokens[*id].as_slice() {
            [b' ', letters @ ..] if letters.len() > 1 && letters.iter().all(u8::is_ascii_lowercase) => {
                let text = std::str::from_utf8(&self.tokens[*id]).expect("letters are text");
                tokenizer.encode_fast(text, false).is_ok_and(|encoding| *encoding.get_ids() == [*id as u32])
            }
            _ => false,
        };
        (0..self.tokens.len()).filter(is_word).collect()
    }

    /// The content of `tokenizer.json`.
    pub(super) fn tokenizer_json(&self) -> Value {
        let shown: Vec<String> = self.tokens.iter().map(|token| token.iter().copied().map(shown).collect()).collect();
        let vocab: Map<String, Value> =
            shown.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
        let merges: Vec<_> = self.merges.iter().map(|&(left, right)| json!([shown[left], shown[right]])).collect();
        let added: Vec<_> = self.special().zip(SPECIAL).map(|(id, content)| added_token(id, content)).collect();
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": byte_level,
            "post_processor": null,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges,
            },
        })
    }

    /// The content of `tokenizer_config.json`.
    pub(super) fn tokenizer_config_json(context: usize) -> Value {
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BEGIN.0],
            "eos_token": SPECIAL[END.0],
            "clean_up_tokenization_spaces": false,
            "model_max_length": context,
            "chat_template": CHAT_TEMPLATE,
        })
    }
}

fn added_token(id: usize, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    })
}

/// The character that byte-level BPE writes for a byte: the byte itself where it is printable Latin-1, otherwise one
/// from 256 on.
fn shown(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        char::from(byte)
    } else {
        let before = (0..byte).filter(|&other| !printable(other)).count() as u32;
        char::from_u32(256 + before).expect("there are 68 such bytes, and those characters exist")
    }
}
