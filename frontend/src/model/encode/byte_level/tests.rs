use super::normalization::is_inert;
use super::pre_tokenizer::Pattern;
use super::*;
use crate::model::encode::tests::{PATTERNS, byte_level, families, pieces, with_added_tokens};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;
use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

/// `DeepSeek`'s patterns: numbers, then Chinese and Japanese, then the rest.
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| \
     ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];

fn json_of(tokenizer: &Tokenizer) -> Value {
    serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap()
}

fn changed(tokenizer: &Tokenizer, change: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut json = json_of(tokenizer);
    change(&mut json);
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

fn split(pattern: &str, behavior: &str, invert: bool) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": behavior, "invert": invert })
}

/// Tokenizers that must be supported, by name.
fn supported() -> &'static [(String, Tokenizer, ByteLevel)] {
    static SUPPORTED: LazyLock<Vec<(String, Tokenizer, ByteLevel)>> = LazyLock::new(|| {
        let [gpt2, llama3, gpt4o, _] = PATTERNS;
        let patterns = [("built in", None), ("gpt2", Some(gpt2)), ("llama3", Some(llama3)), ("gpt4o", Some(gpt4o))];
        let mut all: Vec<(String, Tokenizer)> = Vec::new();
        for (name, pattern) in patterns {
            for (normalizer, json) in [("none", Value::Null), ("NFC", json!({ "type": "NFC" }))] {
                all.push((format!("{name}, {normalizer}"), byte_level(pattern, json)));
            }
        }
        let llama3 = all[4].1.clone();
        let sequence = json!({ "type": "Sequence", "normalizers": [{ "type": "NFKC" }, { "type": "Lowercase" }] });
        all.push(("NFKC and lowercase".to_owned(), changed(&llama3, |json| json["normalizer"] = sequence)));
        let whole = changed(&llama3, |json| json["model"]["ignore_merges"] = true.into());
        all.push(("ignore_merges".to_owned(), whole));
        // A merge whose token the other merges prevent: "word" without `ignore_merges` is not this token.
        let unreachable = changed(&llama3, |json| {
            let next = json["model"]["vocab"].as_object().unwrap().len() + 100;
            json["model"]["vocab"]["wordWor"] = next.into();
            json["model"]["vocab"]["HTTPz"] = (next + 1).into();
        });
        all.push(("unreachable tokens".to_owned(), unreachable));
        let invert = changed(&llama3, |json| {
            let pattern = json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].as_str().unwrap().to_owned();
            json["pre_tokenizer"]["pretokenizers"][0] = split(&pattern, "Removed", true);
        });
        all.push(("matches only".to_owned(), invert));
        let letters = changed(&llama3, |json| {
            json["pre_tokenizer"]["pretokenizers"][0] = split(r"\p{L}+|\p{N}", "Isolated", false);
        });
        all.push(("gaps".to_owned(), letters));
        let removed = changed(&llama3, |json| {
            json["pre_tokenizer"]["pretokenizers"][0] = split(r"\p{L}+|\p{N}", "Removed", true);
        });
        all.push(("gaps removed".to_owned(), removed));
        let deepseek = changed(&llama3, |json| {
            let steps = json["pre_tokenizer"]["pretokenizers"].as_array_mut().unwrap();
            steps.splice(0..1, DEEPSEEK.map(|pattern| split(pattern, "Isolated", false)));
        });
        all.push(("deepseek".to_owned(), deepseek));
        let flags: &[(&str, &[&str])] = &[
            ("<|im", &[]),
            ("art|>", &[]),
            ("[L]", &["lstrip"]),
            ("[N]", &["normalized"]),
            ("word", &["single_word"]),
        ];
        all.push(("added tokens".to_owned(), with_added_tokens(&llama3, Some(json!({ "type": "NFC" })), flags)));
        let found = all.into_iter().map(|(name, tokenizer)| {
            let byte_level = ByteLevel::new(&tokenizer).unwrap_or_else(|error| panic!("{name}: {error}"));
            (name, tokenizer, byte_level)
        });
        found.collect()
    });
    &SUPPORTED
}

fn fragments() -> impl Strategy<Value = String> {
    let fragments = [
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "\t",
        "\u{B}",
        "\u{85}",
        "\u{2028}",
        "\u{3000}",
        "\u{A0}",
        "a",
        "I",
        "word",
        "Word",
        "wordWor",
        "HTTP",
        "HTTPz",
        "camelCase",
        "snake_case",
        "'s",
        "'S",
        "'\u{17F}",
        "'",
        "'LL",
        "\u{2019}s",
        "1",
        "12",
        "4567",
        "3.14",
        "\u{B2}",
        "\u{663}",
        "\u{2164}",
        ",",
        "...",
        "!?",
        "(",
        "{\"a\":",
        "//",
        "/\n",
        "-",
        "_",
        "=",
        "\u{4E2D}\u{6587}",
        "\u{3002}",
        "\u{3072}",
        "\u{D55C}",
        "\u{1112}\u{1161}\u{11AB}",
        "\u{431}\u{44B}",
        "\u{3B1}",
        "\u{E9}",
        "e\u{301}",
        "\u{301}",
        "\u{345}\u{301}\u{323}",
        "\u{939}\u{93F}",
        "\u{E44}",
        "\u{1F600}",
        "\u{200D}",
        "\u{2581}",
        "<|im_start|>",
        "<|im_end|>",
        "<|im",
        "art|>",
        "[L]",
        "[N]",
        "It's the text of",
        " of the",
        "\u{5E9}",
        "\u{644}",
        "\u{FFFD}",
        "\u{0}",
        "\u{1C5}",
        "\u{2B0}",
        "\u{FB01}",
        "\u{212B}",
        "\u{10FFFF}",
        "\u{1E9B}\u{323}",
        "\u{8D1}",
    ];
    prop::collection::vec(prop::sample::select(fragments.to_vec()), 0..60).prop_map(|parts| parts.concat())
}

/// Fragments, any characters, or one long word.
fn any_text() -> impl Strategy<Value = String> {
    let any = prop::collection::vec(any::<char>(), 0..60).prop_map(|chars| chars.into_iter().collect());
    let word = ("[a-e]{60,400}", 0..3_usize).prop_map(|(word, repeat)| word.repeat(repeat + 1));
    prop_oneof![4 => fragments(), 1 => any, 1 => word]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_tokens_are_those_of_the_library(text in any_text()) {
        for (name, tokenizer, byte_level) in supported() {
            let mut tokens = vec![7];
            if byte_level.encode(&text, &mut tokens) {
                prop_assert_eq!(&tokens[1..], &ids(tokenizer, &text, false).unwrap()[..], "{}: {:?}", name, text);
            } else {
                prop_assert_eq!(name, "added tokens");
                prop_assert_eq!(tokens, [7]);
            }
        }
    }
}

/// The words of the library, and those of this module.
fn words(tokenizer: &Tokenizer, byte_level: &ByteLevel, text: &str) -> [Vec<String>; 2] {
    let mut split = PreTokenizedString::from(text);
    tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut split).unwrap();
    let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
    let library = splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect();
    let mut words = Vec::new();
    byte_level.pre_tokenizer.words(text, |word| words.push(word.to_owned())).unwrap();
    [library, words]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A small vocabulary has no tokens for most words, and so does not tell how text was split.
    #[test]
    fn the_words_are_those_of_the_library(text in any_text().prop_filter("it has no words", |text| !text.is_empty())) {
        for (name, tokenizer, byte_level) in supported() {
            let [library, words] = words(tokenizer, byte_level, &text);
            prop_assert_eq!(words, library, "{}: {:?}", name, text);
        }
    }
}

#[test]
fn words_do_not_depend_on_the_memory_of_the_dfa() {
    let text: String = ('\u{20}'..'\u{3000}').flat_map(|c| [c, 'a', c, ' ', ' ', c, '1', '\n', ' ', c]).collect();
    for pattern in &PATTERNS[..3] {
        // Without memory the states are dropped within most words.
        let [enough, none] = [1 << 26, 0].map(|bytes| {
            let (pattern, mut words) = (Pattern::within(pattern, true, bytes).unwrap(), Vec::new());
            pattern.matches(&text, |word| words.push(word)).unwrap();
            words
        });
        assert!(enough == none, "{pattern}");
    }
}

#[test]
fn a_text_at_which_the_library_gives_up_is_left_to_it() {
    let (_, tokenizer, byte_level) = supported().iter().find(|(name, ..)| name == "deepseek").unwrap();
    for run in [" ", "\u{3000}", "\0"] {
        let text = run.repeat(10_000 / run.len()) + "a text";
        let [library, words] = words(tokenizer, byte_level, &text);
        assert_eq!(words, library, "{run:?}");
        assert!(!byte_level.encode(&(run.repeat(20_000) + "a text"), &mut Vec::new()), "{run:?}");
    }
}

#[test]
fn a_text_with_added_tokens_that_look_around_is_left_to_the_library() {
    let (_, _, byte_level) = supported().iter().find(|(name, ..)| name == "added tokens").unwrap();
    let mut tokens = Vec::new();
    for text in ["a [L]", "a [N]", "a word"] {
        assert!(!byte_level.encode(text, &mut tokens), "{text}");
    }
    assert!(byte_level.encode("a <|im_start|>b <|im", &mut tokens));
    assert!(!tokens.is_empty());
}

#[test]
fn other_tokenizers_are_left_to_the_library() {
    let llama3 = byte_level(Some(PATTERNS[1]), Value::Null);
    let reason = |tokenizer: &Tokenizer| match ByteLevel::new(tokenizer) {
        Err(Unsupported::Feature(reason)) => reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it is supported"),
    };
    assert_eq!(reason(&pieces(None)), "pre-tokenizer none without ByteLevel at its end");
    for (_, tokenizer) in families().iter().map(|(name, encoder)| (name, encoder.tokenizer())).take(1) {
        assert!(ByteLevel::new(tokenizer).is_ok(), "the built-in tokenizer is byte-level BPE");
    }
    for pattern in [PATTERNS[3], r"\b\p{L}+|.", r"\p{L}*", r"\p{L}++|.", r"[a-z]?+\p{L}|.", r"(?i)a+|\s+(?!\S)|\s+"] {
        let other = byte_level(Some(pattern), Value::Null);
        assert!(reason(&other).starts_with("the pattern"), "{}", reason(&other));
    }
    let merged = changed(&llama3, |json| {
        json["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext".into();
    });
    assert!(reason(&merged).starts_with("pre-tokenizer"), "{}", reason(&merged));
    let prefixed = changed(&llama3, |json| json["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into());
    assert_eq!(reason(&prefixed), "add_prefix_space");
    let dropout = changed(&llama3, |json| json["model"]["dropout"] = 0.1.into());
    assert_eq!(reason(&dropout), "dropout");
    let mut truncated = llama3.clone();
    truncated.with_truncation(Some(tokenizers::TruncationParams::default())).unwrap();
    assert_eq!(reason(&truncated), "truncation or padding");
}

#[test]
fn nfc_changes_no_text_of_inert_characters() {
    let json = json!({ "type": "NFC" });
    let nfc: NormalizerWrapper = serde_json::from_value(json).unwrap();
    let normalized = |text: String| {
        let mut normalized = NormalizedString::from(text.as_str());
        nfc.normalize(&mut normalized).unwrap();
        normalized.get() == text
    };
    let inert: Vec<char> = ('\0'..=char::MAX).filter(|c| is_inert(*c)).collect();
    assert!(inert.len() > 30_000);
    // Composition is of a starter and what follows: each character after letters that compose with many.
    for first in ["", "a", "A", "o", "\u{1100}", "\u{AC00}", "\u{3B1}", "\u{418}", "\u{627}", "\u{304B}"] {
        let text: String = inert.iter().flat_map(|c| first.chars().chain([*c])).collect();
        assert!(normalized(text), "after {first:?}");
    }
}

#[test]
fn a_long_word_has_the_tokens_of_a_short_ones_algorithm() {
    let (_, tokenizer, byte_level) = &supported()[4];
    for len in [63, 64, 65, 66, 1000, 20_000] {
        let text: String = "thetextofalongprompt".chars().cycle().take(len).collect();
        let mut tokens = Vec::new();
        assert!(byte_level.encode(&text, &mut tokens));
        assert_eq!(tokens, ids(tokenizer, &text, false).unwrap(), "{len}");
    }
}
