//! Log-probabilities as responses show them. Those of each token are encoded by themselves, so that only one token's
//! values are in memory beside the JSON of an answer.

use crate::model::Vocabulary;
use crate::output::{TokenLogprobs, decimal, finite};
use async_openai::types::chat::{ChatCompletionTokenLogprob, TopLogprobs};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::iter::once;
use worker::engine::Logprobs;

/// The tokens of a choice in a chat completion.
#[derive(Clone, Copy)]
pub(crate) struct ChatLogprobs<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    pub(crate) tokens: &'a [TokenLogprobs],
}

/// The tokens of a choice in a text completion.
#[derive(Clone, Copy)]
pub(crate) struct TextLogprobs<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    /// The prompt, if its tokens come before those of the choice.
    pub(crate) prompt: Option<PromptLogprobs<'a>>,
    /// Characters of text before the choice's own.
    pub(crate) chars_before: usize,
    pub(crate) tokens: &'a [TokenLogprobs],
    /// The token that ended the choice.
    pub(crate) end: Option<&'a TokenLogprobs>,
}

/// The tokens of a prompt.
#[derive(Clone, Copy)]
pub(crate) struct PromptLogprobs<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    pub(crate) tokens: &'a [u32],
    /// Those of all tokens but the first.
    pub(crate) scores: &'a [Logprobs],
    /// Alternatives per token.
    pub(crate) top: u8,
}

/// An array of the items of an iterator.
struct Items<F>(F);

/// A token at a position of the prompt.
#[derive(Serialize)]
struct RankedToken {
    logprob: f64,
    /// 1 is the most likely token at the position.
    rank: u32,
    decoded_token: String,
}

impl<F, I> Serialize for Items<F>
where
    F: Fn() -> I,
    I: Iterator<Item: Serialize>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

impl Serialize for ChatLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("ChatLogprobs", 2)?;
        fields.serialize_field("content", &Items(|| self.tokens.iter().map(|of| chat_token(self.vocabulary, of))))?;
        fields.serialize_field("refusal", &Value::Null)?;
        fields.end()
    }
}

impl Serialize for TextLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { vocabulary, chars_before, tokens, end, .. } = *self;
        let prompt = || self.prompt.iter();
        let own = || tokens.iter().chain(end);
        let ids = || prompt().flat_map(|prompt| prompt.tokens.iter().copied()).chain(own().map(|of| of.token));
        let logprobs = || {
            let of_prompt =
                prompt().flat_map(|prompt| once(None).chain(prompt.scored().map(|(_, of)| Some(finite(of.chosen)))));
            of_prompt.chain(own().map(|of| Some(of.logprob)))
        };
        let top = || {
            let of_prompt = prompt().flat_map(|prompt| {
                once(Value::Null).chain(prompt.scored().map(|(token, of)| prompt.by_label(token, of)))
            });
            of_prompt.chain(own().map(|of| by_label(vocabulary, of.token, of.logprob, of.top.iter().copied())))
        };
        let offsets = || {
            let of_prompt = prompt().flat_map(PromptLogprobs::offsets);
            of_prompt.chain(own().map(|of| chars_before + of.position.chars))
        };
        let mut fields = serializer.serialize_struct("TextLogprobs", 4)?;
        fields.serialize_field("tokens", &Items(|| ids().map(|token| label(vocabulary, token))))?;
        fields.serialize_field("token_logprobs", &Items(logprobs))?;
        fields.serialize_field("top_logprobs", &Items(top))?;
        fields.serialize_field("text_offset", &Items(offsets))?;
        fields.end()
    }
}

/// In vLLM's format: per token an object by token id; null for the first token.
impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(once(Value::Null).chain(self.scored().map(|(token, of)| self.by_id(token, of))))
    }
}

impl<'a> PromptLogprobs<'a> {
    /// The tokens that have log-probabilities.
    fn scored(&self) -> impl Iterator<Item = (u32, &'a Logprobs)> + use<'a> {
        self.tokens.iter().skip(1).copied().zip(self.scores)
    }

    /// Start of each token's text in the prompt's, in characters.
    fn offsets(&self) -> impl Iterator<Item = usize> + use<'a> {
        let vocabulary = self.vocabulary;
        self.tokens.iter().scan(0, move |chars, token| {
            let at = *chars;
            // Each byte that is not a UTF-8 continuation byte begins a character.
            let bytes = vocabulary.bytes(*token).iter().filter(|byte| (**byte & 0xC0) != 0x80).count();
            *chars += if vocabulary.is_special(*token) { 0 } else { bytes };
            Some(at)
        })
    }

    fn by_label(&self, token: u32, of: &Logprobs) -> Value {
        let top = of.top.iter().take(self.top.into()).map(|(token, logprob)| (*token, finite(*logprob)));
        by_label(self.vocabulary, token, finite(of.chosen), top)
    }

    fn by_id(&self, token: u32, of: &Logprobs) -> Value {
        let entry = |token: u32, logprob: f32, rank: u32| {
            let decoded_token = String::from_utf8_lossy(self.vocabulary.bytes(token)).into_owned();
            (token.to_string(), json!(RankedToken { logprob: decimal(finite(logprob)), rank, decoded_token }))
        };
        let alternatives =
            (1..).zip(&of.top).take(self.top.into()).filter(|(_, (alternative, _))| *alternative != token);
        let alternatives = alternatives.map(|(rank, (alternative, logprob))| entry(*alternative, *logprob, rank));
        once(entry(token, of.chosen, of.rank)).chain(alternatives).collect::<Map<_, _>>().into()
    }
}

fn chat_token(vocabulary: &Vocabulary, of: &TokenLogprobs) -> ChatCompletionTokenLogprob {
    let text = |token| String::from_utf8_lossy(vocabulary.bytes(token)).into_owned();
    let bytes = |token| Some(vocabulary.bytes(token).to_vec());
    let alternative =
        |(token, logprob): &(u32, f32)| TopLogprobs { token: text(*token), logprob: *logprob, bytes: bytes(*token) };
    ChatCompletionTokenLogprob {
        token: text(of.token),
        logprob: of.logprob,
        bytes: bytes(of.token),
        top_logprobs: of.top.iter().map(alternative).collect(),
    }
}

/// The most likely tokens at a position, by their text, and the token that is there.
fn by_label(vocabulary: &Vocabulary, token: u32, logprob: f32, top: impl Iterator<Item = (u32, f32)>) -> Value {
    let all = top.chain([(token, logprob)]);
    all.map(|(token, logprob)| (label(vocabulary, token), decimal(logprob).into())).collect::<Map<_, _>>().into()
}

/// A token's text. For a token that is a part of a character: its bytes, as OpenAI writes them, so that labels differ.
fn label(vocabulary: &Vocabulary, token: u32) -> String {
    let bytes = vocabulary.bytes(token);
    std::str::from_utf8(bytes).map_or_else(
        |_| {
            bytes.iter().fold("bytes:".to_owned(), |mut label, byte| {
                write!(label, "\\x{byte:02x}").expect("writing to a string does not fail");
                label
            })
        },
        str::to_owned,
    )
}
