//! `POST /v1/completions`: text or tokens in, what follows them out.

mod prompts;

use super::generate::{Choice, Endpoint, Envelope, Understood, fit, not_empty};
use super::prompt_logprobs;
use super::sse::{Chunks, Events, UsageSlot};
use crate::error::Error;
use crate::model::{Model, Vocabulary};
use crate::output::{FinishReason, Generation, Piece, StopReason, TokenLogprobs, decimal, shown};
use crate::params::{CHOICES_MAX, Controls, Fields, Shape, StreamUsage, TOP_LOGPROBS_MAX, known_fields};
use async_openai::types::chat::{Choice as TextChoice, CompletionFinishReason, CompletionUsage, Logprobs};
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use worker::engine::Logprobs as Scores;

/// OpenAI's default here.
const MAX_TOKENS: i64 = 16;
/// Writes completions.
pub(crate) struct Completion {
    envelope: Envelope,
    vocabulary: Arc<Vocabulary>,
    /// How many alternatives to each token.
    logprobs: Option<u8>,
    /// The same of the prompt's tokens, when a field of its own asks for them.
    prompt_logprobs: Option<u8>,
    /// The answer has tokens beside text.
    token_ids: bool,
    /// Which chunks have a usage.
    usage: StreamUsage,
    /// Choices per prompt.
    n: usize,
    prompts: Vec<Prompt>,
    /// Per choice, whether its first chunk was written.
    begun: Vec<bool>,
}

/// A prompt, as far as answers say something of it.
struct Prompt {
    tokens: Arc<[u32]>,
    /// Its text, with `echo`.
    echo: Option<String>,
    /// Log-probabilities of its tokens from the second on. They come with its first choice.
    scores: Vec<Scores>,
}

impl Endpoint for Completion {
    const ID: &'static str = "cmpl-";
    const PATH: &'static str = "/v1/completions";
    const PROMPT: &'static str = "prompt";

    fn understand(
        mut fields: Fields,
        model: &Arc<Model>,
        envelope: Envelope,
        gone: &CancellationToken,
    ) -> Result<Understood<Self>, Error> {
        let max_tokens = fields.integer("max_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(MAX_TOKENS);
        let (vocabulary, defaults) = (model.card.vocabulary, model.sampling_defaults());
        let mut controls = Controls::take(&mut fields, vocabulary, defaults, Some(max_tokens))?;
        controls.sampling.logprobs = fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX)?.map(|top| top as u8);
        let echo = fields.flag("echo")?.unwrap_or(false);
        let prompt_logprobs = controls.sampling.prompt_logprobs;
        if echo {
            controls.sampling.prompt_logprobs = prompt_logprobs.max(controls.sampling.logprobs);
        }
        refuse_best_of(&mut fields, controls.n)?;

        let prompts = prompts::take(&mut fields, model, gone)?;
        let unknown = known::check(&mut fields, Shape::Completions)?;
        if prompts.len() * controls.n as usize > CHOICES_MAX as usize {
            let message = format!(
                "Invalid 'n': {} prompts of {} choices are more than {CHOICES_MAX}.",
                prompts.len(),
                controls.n
            );
            return Err(Error::invalid("n", "integer_above_max_value", message));
        }
        for prompt in &prompts {
            not_empty(Self::PROMPT, prompt)?;
            fit(Self::PROMPT, prompt.len(), &controls, model.card.context)?;
        }
        let prompt = |tokens: &Arc<[u32]>| Prompt {
            tokens: tokens.clone(),
            echo: echo.then(|| text(&model.vocabulary, tokens)),
            scores: Vec::new(),
        };
        let endpoint = Self {
            envelope,
            vocabulary: model.vocabulary.clone(),
            logprobs: controls.sampling.logprobs,
            prompt_logprobs,
            token_ids: controls.return_token_ids,
            usage: controls.delivery.usage(),
            n: controls.n as usize,
            prompts: prompts.iter().map(prompt).collect(),
            begun: vec![false; prompts.len() * controls.n as usize],
        };
        Ok(Understood { prompts, controls, unknown, endpoint })
    }

    fn whole(mut self, mut choices: Vec<Choice>, usage: CompletionUsage) -> Response {
        for (prompt, first) in self.prompts.iter_mut().zip(choices.iter_mut().step_by(self.n)) {
            prompt.scores = std::mem::take(&mut first.prompt_logprobs);
        }
        let choice = |(index, choice): (usize, Choice)| {
            let prompt = &self.prompts[index / self.n];
            let logprobs = self.logprobs(index, true, choice.logprobs.into_iter().chain(choice.end_logprobs));
            let by_id = |top| scores::by_id(&self.vocabulary, &prompt.tokens, &prompt.scores, top);
            AnswerChoice {
                choice: TextChoice {
                    index: index as u32,
                    text: prompt.echo.clone().unwrap_or_default() + &choice.text,
                    logprobs,
                    finish_reason: choice.finish.map(finish),
                },
                stop_reason: choice.stop_reason,
                prompt_logprobs: self.prompt_logprobs.map(by_id),
                prompt_token_ids: self.token_ids.then_some(&*prompt.tokens),
                token_ids: self.token_ids.then_some(choice.ids),
            }
        };
        Json(Answer {
            id: &self.envelope.id,
            object: OBJECT,
            created: self.envelope.created,
            model: &self.envelope.model,
            choices: choices.into_iter().enumerate().map(choice).collect(),
            usage,
        })
        .into_response()
    }
}

/// OpenAI's answer.
#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<AnswerChoice<'a>>,
    usage: CompletionUsage,
}

/// OpenAI's choice, and what vLLM adds to it.
#[derive(Serialize)]
struct AnswerChoice<'a> {
    #[serde(flatten)]
    choice: TextChoice,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

const OBJECT: &str = "text_completion";

/// A chunk, written without copying what it says.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageSlot>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Logprobs>,
    finish_reason: Option<CompletionFinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl Completion {
    /// Log-probabilities of a choice's tokens, when asked for; of those of an echoed prompt before the first.
    fn logprobs(&self, choice: usize, first: bool, of: impl Iterator<Item = TokenLogprobs>) -> Option<Logprobs> {
        let top = self.logprobs?;
        let prompt = &self.prompts[choice / self.n];
        let mut all = match &prompt.echo {
            Some(_) if first => of_prompt(&self.vocabulary, &prompt.tokens, &prompt.scores, top),
            _ => Logprobs { tokens: vec![], token_logprobs: vec![], top_logprobs: vec![], text_offset: vec![] },
        };
        let before = prompt.echo.as_ref().map_or(0, |echo| echo.chars().count());
        for of in of {
            all.tokens.push(label(&self.vocabulary, of.token));
            all.token_logprobs.push(Some(of.logprob));
            all.top_logprobs.push(rivals(&self.vocabulary, of.token, of.logprob, &of.top));
            all.text_offset.push((before + of.at.chars) as u32);
        }
        Some(all)
    }

    fn chunk<'a>(&'a self, choices: &'a [ChunkChoice<'a>], usage: Option<UsageSlot>) -> Chunk<'a> {
        let Envelope { id, created, model } = &self.envelope;
        Chunk { id, object: OBJECT, created: *created, model, choices, usage }
    }
}

impl Chunks for Completion {
    fn piece(&mut self, piece: Piece, usage: &CompletionUsage, events: &mut Events) {
        let first = !std::mem::replace(&mut self.begun[piece.choice], true);
        let prompt = &mut self.prompts[piece.choice / self.n];
        if !piece.prompt_logprobs.is_empty() {
            prompt.scores = piece.prompt_logprobs;
        }
        let echo = prompt.echo.clone().filter(|_| first).unwrap_or_default();
        let has_ids = self.token_ids && (first || !piece.ids.is_empty());
        if echo.is_empty() && piece.text.is_empty() && piece.logprobs.is_empty() && piece.finish.is_none() && !has_ids {
            return;
        }
        let text = echo + &piece.text;
        let prompt = &self.prompts[piece.choice / self.n];
        let choice = ChunkChoice {
            index: piece.choice,
            text: &text,
            logprobs: self.logprobs(piece.choice, first, piece.logprobs.into_iter().chain(piece.end_logprobs)),
            finish_reason: piece.finish.map(finish),
            stop_reason: piece.stop_reason,
            prompt_token_ids: (self.token_ids && first).then_some(&*prompt.tokens),
            token_ids: self.token_ids.then_some(piece.ids),
        };
        events.push(&self.chunk(&[choice], UsageSlot::of(self.usage, usage)));
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.usage != StreamUsage::Never {
            events.push(&self.chunk(&[], Some(UsageSlot(Some(generation.usage())))));
        }
    }
}

fn finish(reason: FinishReason) -> CompletionFinishReason {
    match reason {
        FinishReason::Stop => CompletionFinishReason::Stop,
        FinishReason::Length => CompletionFinishReason::Length,
    }
}

/// Log-probabilities of a prompt's tokens. Its first has none.
fn of_prompt(vocabulary: &Vocabulary, tokens: &[u32], scores: &[Scores], top: u8) -> Logprobs {
    let mut all = Logprobs {
        tokens: tokens.iter().map(|token| label(vocabulary, *token)).collect(),
        token_logprobs: vec![None],
        top_logprobs: vec![Value::Null],
        text_offset: Vec::with_capacity(tokens.len()),
    };
    for (token, score) in tokens[1..].iter().zip(scores) {
        let logprob = shown(score.chosen);
        let likeliest: Vec<_> = score.top.iter().take(top.into()).map(|(rival, of)| (*rival, shown(*of))).collect();
        all.token_logprobs.push(Some(logprob));
        all.top_logprobs.push(rivals(vocabulary, *token, logprob, &likeliest));
    }
    let mut chars = 0;
    for token in tokens {
        all.text_offset.push(chars);
        // Characters begin where a byte does not continue one.
        let bytes = vocabulary.bytes(*token).iter().filter(|byte| (**byte & 0xC0) != 0x80).count();
        chars += if vocabulary.is_special(*token) { 0 } else { bytes as u32 };
    }
    all
}

/// The likeliest tokens at a place by their text, with the one that is there.
fn rivals(vocabulary: &Vocabulary, token: u32, logprob: f32, top: &[(u32, f32)]) -> Value {
    let all = top.iter().copied().chain([(token, logprob)]);
    let by_name: Map<String, Value> =
        all.map(|(token, logprob)| (label(vocabulary, token), decimal(logprob).into())).collect();
    by_name.into()
}

/// A token's text; of a token that is a part of a character its bytes, as OpenAI writes them, so that labels differ.
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

/// The text of a prompt, special tokens left out.
fn text(vocabulary: &Vocabulary, tokens: &[u32]) -> String {
    let said = tokens.iter().filter(|token| !vocabulary.is_special(**token));
    let bytes: Vec<u8> = said.flat_map(|token| vocabulary.bytes(*token)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The best of several is not chosen here.
fn refuse_best_of(fields: &mut Fields, n: u32) -> Result<(), Error> {
    if let Some(best_of) = fields.integer("best_of", 1..=CHOICES_MAX)?
        && best_of != i64::from(n)
    {
        let message = format!("Unsupported value: 'best_of' {best_of}. Only the value of 'n' ({n}) is supported here.");
        return Err(Error::unsupported("best_of", message));
    }
    Ok(())
}
