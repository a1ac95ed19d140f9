//! `POST /v1/completions`: continues prompts of text or tokens.

mod prompts;

use super::generate::{CompletedChoice, Endpoint, Envelope, Parsed, check_fits_context, check_not_empty};
use super::logprobs::{PromptLogprobs, TextLogprobs};
use super::sse::{ChunkHead, ChunkWriter, Events, UsageSlot};
use crate::error::Error;
use crate::model::{EncodeJob, ServedModel, Vocabulary};
use crate::output::{ChoiceDelta, FinishReason, Generation, StopReason, TokenLogprobs};
use crate::params::{CHOICES_MAX, EndpointKind, Fields, GenerationParams, StreamUsage, TOP_LOGPROBS_MAX, known_fields};
use async_openai::types::chat::{CompletionFinishReason, CompletionUsage};
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;
use worker::engine::Logprobs;

/// OpenAI's default of `max_tokens` for completions.
const DEFAULT_MAX_TOKENS: i64 = 16;

/// Writes completions.
pub(crate) struct Completion {
    envelope: Envelope,
    head: ChunkHead,
    vocabulary: Arc<Vocabulary>,
    /// Alternatives per output token; `None`: no log-probabilities.
    logprobs: Option<u8>,
    /// Alternatives per prompt token in `prompt_logprobs`; `None`: not requested.
    prompt_logprobs: Option<u8>,
    /// The response has token ids beside text.
    token_ids: bool,
    /// Which chunks have a `usage`.
    usage: StreamUsage,
    /// Choices per prompt.
    n: usize,
    prompts: Vec<Prompt>,
    /// Per choice, whether its first chunk was written.
    begun: Vec<bool>,
}

/// What responses repeat of a prompt.
struct Prompt {
    tokens: Arc<[u32]>,
    /// Its text, if `echo` is set.
    echo: Option<String>,
    /// Log-probabilities of its tokens from the second on. They arrive with the first choice of the prompt.
    scores: Vec<Logprobs>,
}

impl Endpoint for Completion {
    const ID: &'static str = "cmpl-";
    const PATH: &'static str = "/v1/completions";
    const PROMPT: &'static str = "prompt";

    fn parse(
        mut fields: Fields,
        model: &Arc<ServedModel>,
        envelope: Envelope,
        job: &EncodeJob,
    ) -> Result<Parsed<Self>, Error> {
        let max_tokens = fields.integer("max_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_MAX_TOKENS);
        let vocabulary = model.card.vocabulary;
        let defaults = model.sampling_defaults();
        let mut params = GenerationParams::take(&mut fields, vocabulary, defaults, Some(max_tokens))?;
        params.sampling.logprobs = fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX)?.map(|top| top as u8);
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let prompt_logprobs = params.sampling.prompt_logprobs;
        if echo {
            params.sampling.prompt_logprobs = prompt_logprobs.max(params.sampling.logprobs);
        }
        reject_best_of(&mut fields, params.n)?;

        let prompts = prompts::take(&mut fields, model, job)?;
        let unknown = known_fields::check(&mut fields, EndpointKind::Completions)?;
        if prompts.len() * params.n as usize > CHOICES_MAX as usize {
            let message =
                format!("Invalid 'n': {} prompts of {} choices are more than {CHOICES_MAX}.", prompts.len(), params.n);
            return Err(Error::invalid("n", "integer_above_max_value", message));
        }
        for prompt in &prompts {
            check_not_empty(Self::PROMPT, prompt)?;
            check_fits_context(Self::PROMPT, prompt.len(), &params, model.card.context)?;
        }
        let prompt = |tokens: &Arc<[u32]>| Prompt {
            tokens: tokens.clone(),
            echo: echo.then(|| text(&model.vocabulary, tokens)),
            scores: Vec::new(),
        };
        let endpoint = Self {
            head: envelope.chunk_head(OBJECT),
            envelope,
            vocabulary: model.vocabulary.clone(),
            logprobs: params.sampling.logprobs,
            prompt_logprobs,
            token_ids: params.return_token_ids,
            usage: params.delivery.usage(),
            n: params.n as usize,
            prompts: prompts.iter().map(prompt).collect(),
            begun: vec![false; prompts.len() * params.n as usize],
        };
        Ok(Parsed { prompts, params, unknown, endpoint })
    }

    fn full_response(mut self, mut choices: Vec<CompletedChoice>, usage: CompletionUsage) -> Response {
        for (prompt, first) in self.prompts.iter_mut().zip(choices.iter_mut().step_by(self.n)) {
            prompt.scores = std::mem::take(&mut first.prompt_logprobs);
        }
        let choices = choices.iter().enumerate().map(|(index, choice)| {
            let prompt = &self.prompts[index / self.n];
            ResponseChoice {
                index,
                text: prompt.echo.clone().unwrap_or_default() + &choice.text,
                logprobs: self.logprobs(index, true, &choice.logprobs, choice.end_logprobs.as_ref()),
                finish_reason: choice.finish.map(finish_reason),
                stop_reason: choice.stop_reason.clone(),
                prompt_logprobs: self.prompt_logprobs.map(|top| self.prompt_logprobs(prompt, top)),
                prompt_token_ids: self.token_ids.then_some(&*prompt.tokens),
                token_ids: self.token_ids.then_some(&*choice.ids),
            }
        });
        let choices: Vec<_> = choices.collect();
        Json(self.envelope.full_response(OBJECT, choices, usage)).into_response()
    }
}

/// OpenAI's choice, with vLLM's additional fields.
#[derive(Serialize)]
struct ResponseChoice<'a> {
    text: String,
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<TextLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<CompletionFinishReason>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

const OBJECT: &str = "text_completion";

/// A choice in a chunk of a stream. It borrows its content.
#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<TextLogprobs<'a>>,
    finish_reason: Option<CompletionFinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl Completion {
    /// Log-probabilities of a choice's tokens if requested, preceded by those of an echoed prompt if `first`.
    fn logprobs<'a>(
        &'a self,
        choice: usize,
        first: bool,
        tokens: &'a [TokenLogprobs],
        end: Option<&'a TokenLogprobs>,
    ) -> Option<TextLogprobs<'a>> {
        let top = self.logprobs?;
        let prompt = &self.prompts[choice / self.n];
        Some(TextLogprobs {
            vocabulary: &self.vocabulary,
            prompt: prompt.echo.as_ref().filter(|_| first).map(|_| self.prompt_logprobs(prompt, top)),
            chars_before: prompt.echo.as_ref().map_or(0, |echo| echo.chars().count()),
            tokens,
            end,
        })
    }

    fn prompt_logprobs<'a>(&'a self, prompt: &'a Prompt, top: u8) -> PromptLogprobs<'a> {
        PromptLogprobs { vocabulary: &self.vocabulary, tokens: &prompt.tokens, scores: &prompt.scores, top }
    }
}

impl ChunkWriter for Completion {
    fn delta(&mut self, delta: ChoiceDelta, usage: &CompletionUsage, events: &mut Events) {
        let first = !std::mem::replace(&mut self.begun[delta.choice], true);
        let prompt = &mut self.prompts[delta.choice / self.n];
        if !delta.prompt_logprobs.is_empty() {
            prompt.scores = delta.prompt_logprobs;
        }
        let echo = prompt.echo.as_deref().filter(|_| first).unwrap_or_default();
        let has_ids = self.token_ids && (first || !delta.ids.is_empty());
        if echo.is_empty() && delta.text.is_empty() && delta.logprobs.is_empty() && delta.finish.is_none() && !has_ids {
            return;
        }
        let text = if echo.is_empty() { delta.text } else { format!("{echo}{}", delta.text) };
        let prompt = &self.prompts[delta.choice / self.n];
        let choice = ChunkChoice {
            index: delta.choice,
            text: &text,
            logprobs: self.logprobs(delta.choice, first, &delta.logprobs, delta.end_logprobs.as_ref()),
            finish_reason: delta.finish.map(finish_reason),
            stop_reason: delta.stop_reason,
            prompt_token_ids: (self.token_ids && first).then_some(&*prompt.tokens),
            token_ids: self.token_ids.then_some(delta.ids),
        };
        events.push_chunk(&self.head, &[choice], UsageSlot::of(self.usage, usage), None);
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.usage != StreamUsage::Never {
            events.push_usage(&self.head, generation.usage());
        }
    }
}

fn finish_reason(reason: FinishReason) -> CompletionFinishReason {
    match reason {
        FinishReason::Stop => CompletionFinishReason::Stop,
        FinishReason::Length => CompletionFinishReason::Length,
    }
}

/// The text of a prompt, without special tokens.
fn text(vocabulary: &Vocabulary, tokens: &[u32]) -> String {
    let visible = tokens.iter().filter(|token| !vocabulary.is_special(**token));
    let bytes: Vec<u8> = visible.flat_map(|token| vocabulary.bytes(*token)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Rejects a `best_of` other than `n`: choices are not ranked.
fn reject_best_of(fields: &mut Fields, n: u32) -> Result<(), Error> {
    if let Some(best_of) = fields.integer("best_of", 1..=CHOICES_MAX)?
        && best_of != i64::from(n)
    {
        let message = format!("Unsupported value: 'best_of' {best_of}. Only the value of 'n' ({n}) is supported here.");
        return Err(Error::unsupported("best_of", message));
    }
    Ok(())
}
