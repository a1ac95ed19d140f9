use super::*;
use crate::tiny_tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// Split patterns of widely used models.
pub(super) const PATTERNS: [&str; 4] = [
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // Llama 3 and Qwen 2.
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // GPT-4o.
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    // Numbers in groups of three from their end.
    r"\d{1,3}(?=(?:\d{3})*\b)| ?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
];

/// A `tokenizer.json` with these parts and an empty vocabulary.
#[expect(clippy::needless_pass_by_value, reason = "the callers write the values in place")]
fn parts(normalizer: Value, splitter: Value, decoder: Value) -> Value {
    json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": splitter, "post_processor": null, "decoder": decoder,
        "model": { "type": "BPE", "vocab": {}, "merges": [] } })
}

/// A tokenizer of those parts with a vocabulary trained on the sample text, which was split by `words`.
fn trained(mut parts: Value, words: Option<Value>, alphabet: impl IntoIterator<Item = char>) -> Tokenizer {
    let splitter = parts["pre_tokenizer"].clone();
    if let Some(words) = words {
        parts["pre_tokenizer"] = words;
    }
    let mut tokenizer = Tokenizer::from_bytes(parts.to_string()).unwrap();
    let trainer = BpeTrainer::builder()
        .vocab_size(1500)
        .min_frequency(1)
        .initial_alphabet(alphabet.into_iter().collect())
        .show_progress(false)
        .build();
    tokenizer.train(&mut TrainerWrapper::BpeTrainer(trainer), split::SAMPLE.lines()).unwrap();
    let mut json: Value = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
    json["pre_tokenizer"] = splitter;
    let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
    let mut next = vocabulary.len();
    if parts["decoder"]["type"] == "Sequence" {
        for byte in 0..=255 {
            vocabulary.insert(format!("<0x{byte:02X}>"), next.into());
            next += 1;
        }
        json["model"]["byte_fallback"] = true.into();
    }
    let special = |id: usize, text: &str| {
        json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true })
    };
    json["added_tokens"] = json!([special(next, "<|im_start|>"), special(next + 1, "<|im_end|>")]);
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

/// GPT-2's spelling of bytes, split by a pattern before it, or by GPT-2's own.
pub(super) fn byte_level(pattern: Option<&str>, normalizer: Value) -> Tokenizer {
    let bytes = |regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex
        })
    };
    let splitter = match pattern {
        None => bytes(true),
        Some(pattern) => {
            let split =
                json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
            json!({ "type": "Sequence", "pretokenizers": [split, bytes(false)] })
        }
    };
    trained(parts(normalizer, splitter, bytes(false)), None, ByteLevel::alphabet())
}

/// Sentence pieces with byte fallback, as Llama 2 has them: a space before every text, and no splitter.
pub(super) fn pieces(words: Option<Value>) -> Tokenizer {
    let prepend = json!({ "type": "Prepend", "prepend": "\u{2581}" });
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let back = json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " });
    let decoder = json!({ "type": "Sequence", "decoders": [back, { "type": "ByteFallback" }, { "type": "Fuse" }] });
    trained(parts(json!({ "type": "Sequence", "normalizers": [prepend, spaces] }), Value::Null, decoder), words, [])
}

fn metaspace(scheme: &str) -> Value {
    json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true })
}

/// Sentence pieces with a splitter, as newer exports have them.
fn split_pieces(scheme: &str) -> Tokenizer {
    let decoder = json!({ "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, metaspace(scheme)] });
    trained(parts(Value::Null, metaspace(scheme), decoder), None, [])
}

fn encoder(tokenizer: Tokenizer) -> Encoder {
    let vocabulary = Vocabulary::new(&tokenizer).unwrap();
    Encoder { piece: 16, ..Encoder::new(tokenizer, &vocabulary).unwrap() }
}

/// Tokenizers as models in use have them, each with pieces of 16 bytes.
pub(super) fn families() -> &'static [(&'static str, Encoder)] {
    static FAMILIES: LazyLock<Vec<(&str, Encoder)>> = LazyLock::new(|| {
        let [gpt2, llama3, gpt4o, threes] = PATTERNS;
        vec![
            ("tiny", encoder(Tokenizer::from_bytes(tiny_tokenizer::tokenizer()).unwrap())),
            ("byte level", encoder(byte_level(None, Value::Null))),
            ("gpt2", encoder(byte_level(Some(gpt2), Value::Null))),
            ("llama3", encoder(byte_level(Some(llama3), Value::Null))),
            ("qwen2", encoder(byte_level(Some(llama3), json!({ "type": "NFC" })))),
            ("gpt4o", encoder(byte_level(Some(gpt4o), Value::Null))),
            ("threes", encoder(byte_level(Some(threes), Value::Null))),
            ("llama2", encoder(pieces(Some(metaspace("always"))))),
            ("phrases", encoder(pieces(None))),
            ("metaspace", encoder(split_pieces("always"))),
            ("metaspace first", encoder(split_pieces("first"))),
        ]
    });
    &FAMILIES
}

/// Fragments whose boundaries tokenizers see differently.
fn any_text() -> impl Strategy<Value = String> {
    let fragments = [
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "a",
        "I",
        "word",
        "Word",
        "HTTP",
        "camelCase",
        "snake_case",
        "'s",
        "'",
        "'ll",
        "\u{2019}s",
        "1",
        "12",
        "123",
        "4567",
        "3.14",
        "1,000",
        ",",
        ".",
        "...",
        "!?",
        "(",
        ")",
        "{\"a\":",
        "//",
        "/",
        "-",
        "_",
        "=",
        "\u{4E2D}\u{6587}",
        "\u{3002}",
        "\u{FF0C}",
        "\u{3072}\u{3089}",
        "\u{D55C}",
        "\u{431}\u{44B}",
        "\u{3B1}\u{3B2}",
        "\u{E9}",
        "e\u{301}",
        "\u{939}\u{93F}",
        "\u{E44}\u{E17}",
        "\u{1F600}",
        "\u{200D}",
        "\u{A0}",
        "\u{2581}",
        "<|im_start|>",
        "<|im_end|>",
        "<0x41>",
        "It's the text of",
        " of the",
        "\u{5E9}\u{5DC}",
        "\u{644}\u{627}",
        "\u{FFFD}",
        "Z\u{17C}",
    ];
    prop::collection::vec(prop::sample::select(fragments.to_vec()), 0..60).prop_map(|parts| parts.concat())
}

fn never() -> EncodeJob {
    EncodeJob::default()
}

#[test]
fn each_family_has_its_split_points() {
    use SplitKind::{Digit, DroppedSpace, Line, Punctuation, Space};
    let found: Vec<(&str, Vec<SplitKind>)> =
        families().iter().map(|(name, encoder)| (*name, encoder.splits.clone())).collect();
    let all = vec![Space, Line, Punctuation, Digit];
    let want = vec![
        ("tiny", all.clone()),
        ("byte level", all.clone()),
        ("gpt2", all.clone()),
        ("llama3", all.clone()),
        ("qwen2", all.clone()),
        ("gpt4o", all),
        // How it groups digits depends on what is behind them.
        ("threes", vec![Space, Line, Punctuation]),
        ("llama2", vec![DroppedSpace]),
        // Its tokens span words.
        ("phrases", vec![]),
        ("metaspace", vec![Space]),
        ("metaspace first", vec![Space]),
    ];
    assert_eq!(found, want);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn pieces_have_the_tokens_of_the_whole_text(text in any_text()) {
        for (name, encoder) in families() {
            let whole = ids(&encoder.tokenizer, &text, false).unwrap();
            prop_assert_eq!(encoder.encode(&text, false, usize::MAX, &never()), Ok(whole), "{}", name);
        }
    }

    #[test]
    fn a_text_never_has_fewer_tokens_than_its_bound(text in any_text()) {
        for (name, encoder) in families() {
            let Some(bound) = &encoder.bound else { continue };
            let tokens = ids(&encoder.tokenizer, &text, false).unwrap().len();
            prop_assert_eq!(bound.check(&text, tokens), Ok(()), "{}", name);
        }
    }
}

/// A tokenizer with further added tokens: some begin like others, take space, depend on their neighbours, or are
/// searched in normalized text.
pub(super) fn with_added_tokens(
    tokenizer: &Tokenizer,
    normalizer: Option<Value>,
    flags: &[(&str, &[&str])],
) -> Tokenizer {
    let mut json: Value = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
    if let Some(normalizer) = normalizer {
        json["normalizer"] = normalizer;
    }
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (text, set) in flags {
        let mut token = added[0].clone();
        token["id"] = added.iter().map(|token| token["id"].as_u64().unwrap()).max().map(|id| id + 1).into();
        token["content"] = (*text).into();
        set.iter().for_each(|flag| token[*flag] = true.into());
        added.push(token);
    }
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

/// The families, with more kinds of added tokens and normalizers, and whether their texts are cut before added tokens.
fn segmented() -> &'static [(String, bool, Encoder)] {
    static SEGMENTED: LazyLock<Vec<(String, bool, Encoder)>> = LazyLock::new(|| {
        let overlapping: &[(&str, &[&str])] = &[("<|im", &[]), ("art|>", &[]), ("|><|", &[]), ("[X]", &["normalized"])];
        let stripping: &[(&str, &[&str])] = &[
            ("<|im", &["rstrip"]),
            ("[L]", &["lstrip"]),
            ("[R]", &["rstrip"]),
            (" [S]", &[]),
            ("[N]", &["normalized", "lstrip"]),
        ];
        let whole_words: &[(&str, &[&str])] = &[("word", &["single_word"])];
        let normalizers = [
            ("its own", None),
            ("NFKC", Some(json!({ "type": "NFKC" }))),
            ("Strip", Some(json!({ "type": "Strip", "strip_left": true, "strip_right": true }))),
            ("Prepend", Some(json!({ "type": "Prepend", "prepend": "\u{2581}" }))),
        ];
        let mut found = Vec::new();
        for (kind, normalizer) in normalizers {
            for (name, family) in families() {
                // One of each kind of splitter is enough.
                if !["llama3", "llama2", "metaspace", "metaspace first"].contains(name) {
                    continue;
                }
                for (flags, cut) in [(overlapping, true), (stripping, true), (whole_words, false)] {
                    let tokenizer = with_added_tokens(&family.tokenizer, normalizer.clone(), flags);
                    found.push((format!("{name}, {kind}, {}", flags[0].0), cut, encoder(tokenizer)));
                }
            }
        }
        found
    });
    &SEGMENTED
}

/// Texts of added tokens, whole and broken, among others.
fn any_turns() -> impl Strategy<Value = String> {
    let tokens =
        ["<|im_start|>", "<|im_end|>", "<|im", "_start|>", "|><|", "<|", "[X]", "[L]", "[R]", " [S]", "[N]", "word"];
    let between =
        [" ", "  ", "\n", "\t", "a", "Word", "e", "\u{301}", "\u{FB01}", "\u{E9}", "\u{2581}", "\u{1F600}", "'s", "12"];
    let any = prop::sample::select([&tokens[..], &between[..]].concat());
    prop::collection::vec(any, 0..40).prop_map(|parts| parts.concat())
}

#[test]
fn texts_are_cut_before_added_tokens_where_that_is_exact() {
    for (name, cut, encoder) in segmented() {
        assert_eq!(encoder.segments.is_some(), *cut, "{name}");
    }
    let (.., encoder) = &segmented()[0];
    let segments: Vec<_> = encoder.segments.as_ref().unwrap().segments("a<|im_start|>b<|im_end|><|im").collect();
    assert_eq!(segments, ["a", "<|im_start|>b", "<|im_end|>", "<|im"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn turns_have_the_tokens_of_the_whole_text(before in any_turns(), new in any_turns()) {
        for (name, _, encoder) in segmented() {
            // The first text fills the cache for the second.
            for text in [&before, &format!("{before}{new}")] {
                let whole = ids(&encoder.tokenizer, text, false).unwrap();
                prop_assert_eq!(encoder.encode(text, false, usize::MAX, &never()), Ok(whole), "{} {:?}", name, text);
            }
        }
    }
}

#[test]
fn text_that_was_encoded_before_is_not_encoded_again() {
    for (name, encoder) in families().iter().filter(|(_, encoder)| !encoder.splits.is_empty()) {
        let encoder = Encoder { piece: 256, segments: None, cache: TokenCache::new(1 << 20), ..copy(encoder) };
        let first = "the text of a long prompt again and again ".repeat(100);
        encoder.encode(&first, false, usize::MAX, &never()).unwrap();
        let known = encoder.cache.entries();
        encoder
            .encode(&format!("{first}{}", "and then new text of this turn ".repeat(4)), false, usize::MAX, &never())
            .unwrap();
        let new = encoder.cache.entries() - known;
        assert!((1..=2).contains(&new), "{name}: {new} of {known} pieces are new");
        let tenant = EncodeJob::new(Domain::derived(b"secret", "ann"));
        encoder.encode(&first, false, usize::MAX, &tenant).unwrap();
        assert_eq!(encoder.cache.entries(), 2 * known + new, "{name}: texts of another tenant are not found");
    }
}

#[test]
fn a_text_of_which_too_much_is_new_is_not_tokenized() {
    for (name, encoder) in families() {
        let encoder = Encoder { piece: 256, segments: None, cache: TokenCache::new(1 << 20), ..copy(encoder) };
        let first = "the text of a long prompt again and again ".repeat(100);
        let (last, within) = ("and then new text of this turn ".repeat(4), 1 << 10);
        let (known, both) =
            (|text: &str| encoder.encode_known(text, false, within, &never()), format!("{first}{last}"));
        assert_eq!(known(&first), Ok(None), "{name}");
        let whole = ids(&encoder.tokenizer, &both, false).unwrap();
        assert_eq!(encoder.encode_known(&both, false, both.len(), &never()), Ok(Some(whole)), "{name}");
        if !encoder.splits.is_empty() {
            let next = format!("{both}{last}");
            let whole = ids(&encoder.tokenizer, &next, false).unwrap();
            assert_eq!(known(&next), Ok(Some(whole)), "{name}: all but the end is known");
        }
    }
}

#[test]
fn tokenizers_that_keep_all_text_have_a_bound() {
    let long = "the text of a long prompt, again and again; ".repeat(2000);
    for (name, encoder) in families() {
        let bound = encoder.bound.as_ref().unwrap_or_else(|| panic!("{name}"));
        let tokens = ids(&encoder.tokenizer, &long, false).unwrap().len();
        assert!(bound.check(&long, tokens / 100).is_err(), "{name}: a hundredth of the tokens is too few for certain");
    }
    let mut json: Value = serde_json::from_str(&tiny_tokenizer::tokenizer()).unwrap();
    json["added_tokens"][0]["rstrip"] = true.into();
    assert!(
        encoder(Tokenizer::from_bytes(json.to_string()).unwrap()).bound.is_none(),
        "its token takes any number of spaces"
    );
    json["added_tokens"][0]["rstrip"] = false.into();
    json["normalizer"] = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
    assert!(encoder(Tokenizer::from_bytes(json.to_string()).unwrap()).bound.is_none(), "it strips spaces");
}

#[test]
fn added_tokens_surround_all_pieces() {
    let encoder = encoder(Tokenizer::from_bytes(tiny_tokenizer::tokenizer()).unwrap());
    let text = "hello world, hello world, hello world";
    let tokens = encoder.encode(text, true, 100, &never()).unwrap();
    assert_eq!(tokens, ids(&encoder.tokenizer, text, true).unwrap());
    assert_eq!(tokens[0], tiny_tokenizer::BOS);
}

#[test]
fn a_text_is_tokenized_up_to_the_limit() {
    let text = "hello world ".repeat(1 << 20);
    for (name, encoder) in families() {
        let bounded = Encoder { piece: 1024, ..copy(encoder) };
        let refused = encoder.encode(&text, false, 1000, &never());
        assert_eq!(refused, Err(EncodeError::TooLong(1001)), "{name}: from its bytes");
        if !bounded.splits.is_empty() {
            let Err(EncodeError::TooLong(tokens)) = bounded.encode(&text, false, 1000, &never()) else {
                panic!("{name}")
            };
            assert!((1001..=2100).contains(&tokens), "{name}: {tokens} tokens of pieces");
        }
    }
}

fn copy(encoder: &Encoder) -> Encoder {
    let Encoder { tokenizer, splits, added, .. } = encoder;
    Encoder {
        tokenizer: tokenizer.clone(),
        byte_level: None,
        splits: splits.clone(),
        segments: None,
        added: added.clone(),
        bound: None,
        piece: 16,
        cache: TokenCache::new(0),
    }
}

#[test]
fn tokenization_stops_when_cancelled() {
    let (_, encoder) = &families()[0];
    let cancelled = EncodeJob::default();
    drop(cancelled.cancel_on_drop());
    assert_eq!(encoder.encode(&"hello world ".repeat(10), false, usize::MAX, &cancelled), Err(EncodeError::Cancelled));
}

#[test]
fn a_long_text_without_split_points_is_rejected() {
    let (_, encoder) = &families()[3];
    let line = |len| encoder.encode(&" ".repeat(len), false, usize::MAX, &never());
    assert_eq!(line((1 << 20) + 1), Err(EncodeError::Unsplittable(1 << 20)));
    assert!(line(1 << 16).is_ok());
}
