//! A minimal byte-level BPE tokenizer: token ids below 256 are bytes, followed by six merges and three special tokens.

use serde_json::{Map, Value, json};

/// The merges in order: token 256 is `he`, 257 `ll`, and so on. The last one is the first two bytes of U+4E2D.
const MERGES: [(&[u8], &[u8]); 6] =
    [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b"hell", b"o"), (b" ", b"w"), (b"\xE4", b"\xB8")];

/// Begins a sequence.
pub(crate) const BOS: u32 = 262;
/// Ends a sequence.
pub(crate) const EOS: u32 = 263;
/// Separates turns.
pub(crate) const TURN: u32 = 264;
/// The number of tokens.
pub(crate) const VOCABULARY: usize = 265;

/// The text of `tokenizer.json`.
pub(crate) fn tokenizer() -> String {
    let spelled = |bytes: &[u8]| bytes.iter().map(|byte| char_of(*byte)).collect::<String>();
    let mut vocabulary: Map<String, Value> = (0..=255).map(|b| (spelled(&[b]), b.into())).collect();
    for (i, (left, right)) in MERGES.iter().enumerate() {
        vocabulary.insert(spelled(&[*left, *right].concat()), (256 + i).into());
    }
    let merges: Vec<_> = MERGES.iter().map(|(left, right)| json!([spelled(left), spelled(right)])).collect();
    let special = |id: u32, text: &str| {
        json!({ "id": id, "content": text, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true })
    };
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(BOS, "<|bos|>"), special(EOS, "<|eos|>"), special(TURN, "<|turn|>")],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                { "SpecialToken": { "id": "<|bos|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
            ],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<|bos|>": { "id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"] } },
        },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges },
    })
    .to_string()
}

/// GPT-2's encoding of a byte.
fn char_of(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + before).expect("below the surrogates")
}
