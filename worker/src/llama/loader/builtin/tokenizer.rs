//! The tokenizer of the built-in models: byte-level BPE, so that any text survives; no normaliser and no prefix space,
//! so that a longer text starts with the tokens of a shorter one wherever a special token parts them.
//!
//! All that is stored is the list of merges (`merges.bin`, made by `train_merges.py`, which says from what text).
//! Tokens are numbered: the 256 bytes, what each merge makes, then the special ones. A smaller vocabulary is a shorter
//! list of merges.

use serde_json::{Map, Value, json};
use std::ops::Range;
use std::str::FromStr;
use tokenizers::Tokenizer;

const MERGES: &[u8] = include_bytes!("merges.bin");

/// A special token, by its place among them.
#[derive(Clone, Copy)]
pub(super) struct Special(usize);

/// Starts every conversation.
pub(super) const BEGIN: Special = Special(0);
/// Ends a turn, and so a generated text.
pub(super) const END: Special = Special(3);

const SPECIAL: [&str; 4] = ["<|begin_of_text|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"];

/// Special tokens on both sides of role and content: nothing of a turn can melt into the tokens of its neighbour, so
/// the tokens of a conversation are a prefix of those of its continuation.
const CHAT_TEMPLATE: &str = "{{- bos_token -}}\
    {%- for message in messages -%}\
    {{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' -}}\
    {%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}";

impl Special {
    /// Its number in a vocabulary of that size.
    pub(super) fn id(self, vocabulary: usize) -> u32 {
        (vocabulary - SPECIAL.len() + self.0) as u32
    }
}

/// The tokens: what each stands for, and how it came about.
pub(super) struct Vocabulary {
    /// By number, the special ones apart.
    tokens: Vec<Vec<u8>>,
    /// The two tokens that each merge joins.
    merges: Vec<(usize, usize)>,
}

impl Vocabulary {
    /// A vocabulary of that size, special tokens included.
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

    /// How many, special tokens included.
    pub(super) fn size(&self) -> usize {
        self.tokens.len() + SPECIAL.len()
    }

    /// The numbers of the special tokens.
    pub(super) fn special(&self) -> Range<usize> {
        self.tokens.len()..self.size()
    }

    /// The tokens that are a space and small letters, and that the tokenizer makes of their own text. Any sequence of
    /// them reads as words, and becomes the same tokens when it comes back as the next turn's prompt.
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

/// The character that byte-level BPE writes for a byte: itself where it is printable Latin-1, else one from 256 on.
fn shown(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        char::from(byte)
    } else {
        let before = (0..byte).filter(|&other| !printable(other)).count() as u32;
        char::from_u32(256 + before).expect("there are 68 such bytes, and those characters exist")
    }
}
