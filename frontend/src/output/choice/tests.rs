use super::{ChoiceAssembler, ChoiceDelta, FinishReason};
use crate::model::Vocabulary;
use crate::params::{Fields, GenerationParams};
use crate::tiny_tokenizer;
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};
use tokenizers::Tokenizer;
use worker::engine::{self, Logprobs, SamplingDefaults, Tokens};

static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_bytes(tiny_tokenizer::tokenizer()).unwrap();
    Arc::new(Vocabulary::new(&tokenizer).unwrap())
});

fn assembler(controls: &str) -> ChoiceAssembler {
    let mut fields = Fields::parse(&controls.to_owned().into()).unwrap();
    ChoiceAssembler::new(
        0,
        &VOCABULARY,
        &GenerationParams::take(&mut fields, tiny_tokenizer::VOCABULARY, SamplingDefaults::default(), None).unwrap(),
    )
}

fn tokens(ids: &[u32], finish: Option<engine::FinishReason>) -> Tokens {
    let logprobs = ids.iter().map(|id| Logprobs { chosen: -(*id as f32), rank: 1, top: Vec::new() }).collect();
    Tokens { ids: ids.to_vec(), logprobs, finish, ..Tokens::default() }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// All pieces as one.
fn joined(pieces: impl IntoIterator<Item = ChoiceDelta>) -> ChoiceDelta {
    pieces.into_iter().fold(ChoiceDelta::default(), |mut all, piece| {
        assert_eq!(all.finish, None, "nothing follows the end");
        all.text.push_str(&piece.text);
        all.generated += piece.generated;
        all.ids.extend(piece.ids);
        all.logprobs.extend(piece.logprobs);
        all.finish = piece.finish;
        all.stop_reason = piece.stop_reason;
        all.end_logprobs = piece.end_logprobs;
        all
    })
}

proptest! {
    #[test]
    fn how_tokens_are_batched_changes_nothing(
        ids in prop::collection::vec(prop_oneof![0..tiny_tokenizer::VOCABULARY as u32, 97..100_u32], 0..24),
        cuts in prop::collection::vec(any::<bool>(), 24),
        stop in "[abc]{1,3}",
        min_tokens in 0..4,
    ) {
        let controls = format!(r#"{{"stop": ["{stop}", "b\ufffd"], "min_tokens": {min_tokens}}}"#);
        let whole = assembler(&controls).push(tokens(&ids, Some(engine::FinishReason::Length)));
        let mut assembler = assembler(&controls);
        let mut pieces = Vec::new();
        let mut from = 0;
        for to in 1..=ids.len() {
            if cuts[to - 1] {
                pieces.push(assembler.push(tokens(&ids[from..to], None)));
                from = to;
                if pieces.last().is_some_and(|piece| piece.finish.is_some()) {
                    break;
                }
            }
        }
        if pieces.last().is_none_or(|piece| piece.finish.is_none()) {
            pieces.push(assembler.push(tokens(&ids[from..], Some(engine::FinishReason::Length))));
        }
        prop_assert_eq!(joined(pieces), whole);
    }
}

#[test]
fn a_stop_string_ends_text_and_logprobs_where_it_begins() {
    let mut assembler = assembler(r#"{"stop": "END"}"#);
    let first = assembler.push(tokens(&bytes("abE"), None));
    assert_eq!((first.text.as_str(), first.logprobs.len(), first.finish), ("ab", 2, None));
    let last = assembler.push(tokens(&bytes("NDxyz"), None));
    assert_eq!((last.text.as_str(), last.logprobs.len(), last.finish), ("", 0, Some(FinishReason::Stop)));
    assert_eq!(last.generated, 2, "what comes after the stop string was not asked for");
}

#[test]
fn withheld_text_is_released_at_the_end() {
    let mut assembler = assembler(r#"{"stop": "END"}"#);
    assert_eq!(assembler.push(tokens(&bytes("abEN"), None)).text, "ab");
    let last = assembler.push(tokens(&[], Some(engine::FinishReason::Length)));
    assert_eq!((last.text.as_str(), last.logprobs.len(), last.finish), ("EN", 2, Some(FinishReason::Length)));
}

#[test]
fn the_stop_token_is_shown_when_asked_for() {
    let end = |controls| {
        assembler(controls).push(tokens(&bytes("ab"), Some(engine::FinishReason::StopToken(u32::from(b'c'))))).text
    };
    assert_eq!(end("{}"), "ab");
    assert_eq!(end(r#"{"include_stop_str_in_output": true}"#), "abc");
}

#[test]
fn logprobs_say_where_their_token_begins() {
    let piece =
        assembler("{}").push(tokens(&[u32::from(b'a'), 261, 0xAD, u32::from(b'b')], Some(engine::FinishReason::Stop)));
    assert_eq!(piece.text, "a中b");
    let positions: Vec<_> = piece.logprobs.iter().map(|of| of.position.chars).collect();
    assert_eq!(positions, [0, 1, 1, 2]);
}
