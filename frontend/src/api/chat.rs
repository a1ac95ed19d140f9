//! `POST /v1/chat/completions`: renders messages by the model's template and responds with a message or a stream of
//! deltas.

mod messages;
mod tools;

use super::generate::{CompletedChoice, Endpoint, Envelope, FullResponse, Parsed, check_fits_context, check_not_empty};
use super::logprobs::{ChatLogprobs, PromptLogprobs};
use super::sse::{ChunkHead, ChunkWriter, Events, UsageSlot};
use crate::error::Error;
use crate::model::{Conversation, EncodeJob, ServedModel, Vocabulary};
use crate::output::{ChoiceDelta, FinishReason, Generation, StopReason};
use crate::params::{EndpointKind, Fields, GenerationParams, StreamUsage, TOP_LOGPROBS_MAX, known_fields};
use async_openai::types::chat::{CompletionUsage, FinishReason as ChatFinishReason, Role};
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;

/// Writes chat responses.
pub(crate) struct Chat {
    envelope: Envelope,
    head: ChunkHead,
    vocabulary: Arc<Vocabulary>,
    logprobs: bool,
    /// Alternatives per prompt token in `prompt_logprobs`; `None`: not requested.
    prompt_logprobs: Option<u8>,
    /// The prompt's tokens, if the response shows them or their log-probabilities.
    prompt: Option<Arc<[u32]>>,
    /// The response has token ids beside text.
    token_ids: bool,
    /// Which chunks have a `usage`.
    usage: StreamUsage,
    /// Per choice, whether its first chunk was written.
    begun: Vec<bool>,
}

impl Endpoint for Chat {
    const ID: &'static str = "chatcmpl-";
    const PATH: &'static str = "/v1/chat/completions";
    const PROMPT: &'static str = "messages";

    fn parse(
        mut fields: Fields,
        model: &Arc<ServedModel>,
        envelope: Envelope,
        job: &EncodeJob,
    ) -> Result<Parsed<Self>, Error> {
        let vocabulary = model.card.vocabulary;
        let max_tokens = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?;
        let max_tokens = fields.integer("max_completion_tokens", 1..=i64::from(u32::MAX))?.or(max_tokens);
        let mut params = GenerationParams::take(&mut fields, vocabulary, model.sampling_defaults(), max_tokens)?;
        params.sampling.logprobs = logprobs(&mut fields)?;
        reject_modalities(&mut fields)?;

        let special = fields.boolean("add_special_tokens")?.unwrap_or(false);
        let conversation = conversation(&mut fields)?;
        let unknown = known_fields::check(&mut fields, EndpointKind::Chat)?;
        let tokens: Arc<[u32]> = model.encode_chat(conversation, special, job)?.into();
        check_not_empty(Self::PROMPT, &tokens)?;
        check_fits_context(Self::PROMPT, tokens.len(), &params, model.card.context)?;
        let endpoint = Self {
            head: envelope.chunk_head("chat.completion.chunk"),
            envelope,
            vocabulary: model.vocabulary.clone(),
            logprobs: params.sampling.logprobs.is_some(),
            prompt_logprobs: params.sampling.prompt_logprobs,
            prompt: (params.return_token_ids || params.sampling.prompt_logprobs.is_some()).then(|| tokens.clone()),
            token_ids: params.return_token_ids,
            usage: params.delivery.usage(),
            begun: vec![false; params.n as usize],
        };
        Ok(Parsed { prompts: vec![tokens], params, unknown, endpoint })
    }

    fn full_response(self, choices: Vec<CompletedChoice>, usage: CompletionUsage) -> Response {
        let prompt = self.prompt.as_deref().unwrap_or_default();
        let vocabulary = &*self.vocabulary;
        let scores = choices.first().map_or(&[][..], |first| &first.prompt_logprobs);
        let prompt_logprobs =
            self.prompt_logprobs.map(|top| PromptLogprobs { vocabulary, tokens: prompt, scores, top });
        let choices = choices.iter().enumerate().map(|(index, choice)| ResponseChoice {
            index,
            message: Message { content: &choice.text, role: Role::Assistant },
            finish_reason: choice.finish.map(finish_reason),
            logprobs: self.logprobs.then(|| ChatLogprobs { vocabulary, tokens: &choice.logprobs }),
            stop_reason: choice.stop_reason.clone(),
            token_ids: self.token_ids.then_some(&*choice.ids),
        });
        let choices: Vec<_> = choices.collect();
        Json(ChatResponse {
            response: self.envelope.full_response("chat.completion", choices, usage),
            prompt_logprobs,
            prompt_token_ids: self.token_ids.then_some(prompt),
        })
        .into_response()
    }
}

/// OpenAI's response, with vLLM's additional fields.
#[derive(Serialize)]
struct ChatResponse<'a> {
    #[serde(flatten)]
    response: FullResponse<'a, ResponseChoice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

/// OpenAI's choice, with vLLM's additional fields.
#[derive(Serialize)]
struct ResponseChoice<'a> {
    index: usize,
    message: Message<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<ChatFinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<ChatLogprobs<'a>>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Message<'a> {
    content: &'a str,
    role: Role,
}

/// A choice in a chunk of a stream. It borrows its content.
#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<ChatFinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<Role>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl ChunkWriter for Chat {
    fn delta(&mut self, delta: ChoiceDelta, usage: &CompletionUsage, events: &mut Events) {
        let usage = || UsageSlot::of(self.usage, usage);
        let empty = |role| ChunkChoice {
            index: delta.choice,
            delta: Delta { role, content: role.map(|_| "") },
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        };
        // A choice's first chunk has the role and no text.
        if !self.begun[delta.choice] {
            let prompt_token_ids = self.prompt.as_deref().filter(|_| self.token_ids && !self.begun.contains(&true));
            events.push_chunk(&self.head, &[empty(Some(Role::Assistant))], usage(), prompt_token_ids);
        }
        let has_ids = self.token_ids && !delta.ids.is_empty();
        if !delta.text.is_empty() || !delta.logprobs.is_empty() || delta.finish.is_some() || has_ids {
            let choice = ChunkChoice {
                delta: Delta { role: None, content: (!delta.text.is_empty()).then_some(&delta.text) },
                logprobs: self.logprobs.then(|| ChatLogprobs { vocabulary: &self.vocabulary, tokens: &delta.logprobs }),
                finish_reason: delta.finish.map(finish_reason),
                stop_reason: delta.stop_reason.clone(),
                token_ids: self.token_ids.then_some(&delta.ids),
                ..empty(None)
            };
            events.push_chunk(&self.head, &[choice], usage(), None);
        }
        self.begun[delta.choice] = true;
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.usage != StreamUsage::Never {
            events.push_usage(&self.head, generation.usage());
        }
    }
}

fn finish_reason(reason: FinishReason) -> ChatFinishReason {
    match reason {
        FinishReason::Stop => ChatFinishReason::Stop,
        FinishReason::Length => ChatFinishReason::Length,
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<u8>, Error> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        let message = "Invalid 'top_logprobs': 'logprobs' must be true when it is used.";
        return Err(Error::invalid("top_logprobs", "invalid_value", message));
    }
    Ok(wanted.then_some(top.unwrap_or(0) as u8))
}

/// The tokens of the conversation in a request to `/tokenize`.
pub(crate) fn tokens(fields: &mut Fields, model: &ServedModel, job: &EncodeJob) -> Result<Vec<u32>, Error> {
    let special = fields.boolean("add_special_tokens")?.unwrap_or(false);
    model.encode_chat(conversation(fields)?, special, job)
}

fn conversation(fields: &mut Fields) -> Result<Conversation, Error> {
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(!continue_final_message);
    if continue_final_message && add_generation_prompt {
        let message = "'continue_final_message' and 'add_generation_prompt' exclude each other.";
        return Err(Error::invalid("continue_final_message", "invalid_value", message));
    }
    let mut variables = fields.object("chat_template_kwargs")?.map(Fields::into_remaining).unwrap_or_default();
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(Conversation {
        messages: messages::take(fields)?,
        tools: tools::take(fields)?,
        add_generation_prompt,
        continue_final_message,
        variables,
    })
}

/// Rejects modalities other than text.
fn reject_modalities(fields: &mut Fields) -> Result<(), Error> {
    for (i, modality) in fields.array("modalities")?.unwrap_or_default().iter().enumerate() {
        if modality != "text" {
            let message = format!("Unsupported value: 'modalities[{i}]' {modality}. Supported here: 'text'.");
            return Err(Error::unsupported(format!("modalities[{i}]"), message));
        }
    }
    Ok(())
}
