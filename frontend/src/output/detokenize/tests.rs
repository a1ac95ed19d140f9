use super::Detokenizer;
use crate::model::Vocabulary;
use crate::tiny_tokenizer;
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};
use tokenizers::Tokenizer;

static TOKENIZER: LazyLock<(Tokenizer, Arc<Vocabulary>)> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_bytes(tiny_tokenizer::tokenizer()).unwrap();
    let vocabulary = Arc::new(Vocabulary::new(&tokenizer).unwrap());
    (tokenizer, vocabulary)
});

fn one_by_one(tokens: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(TOKENIZER.1.clone(), skip_special);
    let mut pieces: Vec<String> = Vec::new();
    for token in tokens {
        let mut piece = String::new();
        detokenizer.push(*token, &mut piece);
        pieces.push(piece);
    }
    let mut tail = String::new();
    detokenizer.finish(&mut tail);
    pieces.push(tail);
    pieces
}

proptest! {
    /// Bytes in any order: split characters, continuation bytes without a start, surrogates.
    #[test]
    fn one_by_one_is_as_the_tokenizer_decodes_all(
        tokens in prop::collection::vec(
            prop_oneof![
                0..tiny_tokenizer::VOCABULARY as u32,
                prop::sample::select(vec![0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 261]),
            ],
            0..24,
        ),
        skip_special: bool,
    ) {
        let whole = TOKENIZER.0.decode(&tokens, skip_special).unwrap();
        prop_assert_eq!(one_by_one(&tokens, skip_special).concat(), whole);
    }

    #[test]
    fn text_survives_the_way_there_and_back(text in "\\PC{0,40}") {
        let tokens = TOKENIZER.0.encode_fast(text.as_str(), false).unwrap();
        prop_assert_eq!(one_by_one(tokens.get_ids(), true).concat(), text);
    }
}

#[test]
fn a_character_is_released_when_it_is_complete() {
    // U+4E2D as a merged pair and a byte; then half of it, at the end.
    assert_eq!(one_by_one(&[261, 0xAD, 261], true), ["", "中", "", "\u{FFFD}"]);
}

#[test]
fn sentence_pieces_keep_the_space_before_a_word_and_join_bytes() {
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [],
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" },
            { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 }
        ] },
        "model": { "type": "BPE", "byte_fallback": true, "merges": [],
            "vocab": { "<0xE4>": 0, "<0xB8>": 1, "<0xAD>": 2, "▁word": 3, "s": 4 } },
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
    let mut detokenizer = Detokenizer::new(Arc::new(Vocabulary::new(&tokenizer).unwrap()), true);
    let mut text = String::new();
    for token in [3, 4, 0, 1, 2] {
        detokenizer.push(token, &mut text);
    }
    assert_eq!(text, " words中");
    assert_eq!(tokenizer.decode(&[4, 3, 4, 0, 1, 2], true).unwrap(), "s words中");
}

#[test]
fn a_decoder_of_another_family_is_refused_by_name() {
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [], "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": { "type": "BPE", "merges": [], "vocab": { "a": 0 } },
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
    let refused = Vocabulary::new(&tokenizer).err().map(|e| e.to_string());
    assert!(refused.is_some_and(|message| message.contains("WordPiece")));
}
