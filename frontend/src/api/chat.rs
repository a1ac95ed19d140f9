//! `POST /v1/chat/completions`: messages in, through the model's template; a message out, whole or in deltas.

mod messages;
mod tools;

use super::generate::{Choice, Endpoint, Envelope, Understood, fit, not_empty};
use super::prompt_logprobs;
use super::sse::{Chunks, Events, UsageSlot};
use crate::error::Error;
use crate::model::{Conversation, Model, Vocabulary};
use crate::output::{FinishReason, Generation, Piece, StopReason, TokenLogprobs};
use crate::params::{Controls, Fields, Shape, StreamUsage, TOP_LOGPROBS_MAX, known_fields};
use async_openai::types::chat::{
    ChatChoice, ChatChoiceLogprobs, ChatCompletionResponseMessage, ChatCompletionTokenLogprob, CompletionUsage,
    FinishReason as Finish, Role, TopLogprobs,
};
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Writes chat answers.
pub(crate) struct Chat {
    envelope: Envelope,
    vocabulary: Arc<Vocabulary>,
    logprobs: bool,
    /// Of the prompt's tokens, how many alternatives each.
    prompt_logprobs: Option<u8>,
    /// The prompt, when the answer says something of it.
    prompt: Option<Arc<[u32]>>,
    /// The answer has tokens beside text.
    token_ids: bool,
    /// Which chunks have a usage.
    usage: StreamUsage,
    /// The choices whose first chunk was written.
    begun: Vec<bool>,
}

impl Endpoint for Chat {
    const ID: &'static str = "chatcmpl-";
    const PATH: &'static str = "/v1/chat/completions";
    const PROMPT: &'static str = "messages";

    fn understand(
        mut fields: Fields,
        model: &Arc<Model>,
        envelope: Envelope,
        gone: &CancellationToken,
    ) -> Result<Understood<Self>, Error> {
        let vocabulary = model.card.vocabulary;
        let older = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?;
        let max_tokens = fields.integer("max_completion_tokens", 1..=i64::from(u32::MAX))?.or(older);
        let mut controls = Controls::take(&mut fields, vocabulary, model.sampling_defaults(), max_tokens)?;
        controls.sampling.logprobs = logprobs(&mut fields)?;
        refuse_modalities(&mut fields)?;

        let special = fields.flag("add_special_tokens")?.unwrap_or(false);
        let conversation = conversation(&mut fields)?;
        let unknown = known::check(&mut fields, Shape::Chat)?;
        let tokens: Arc<[u32]> = model.encode_chat(conversation, special, gone)?.into();
        not_empty(Self::PROMPT, &tokens)?;
        fit(Self::PROMPT, tokens.len(), &controls, model.card.context)?;
        let endpoint = Self {
            envelope,
            vocabulary: model.vocabulary.clone(),
            logprobs: controls.sampling.logprobs.is_some(),
            prompt_logprobs: controls.sampling.prompt_logprobs,
            prompt: (controls.return_token_ids || controls.sampling.prompt_logprobs.is_some()).then(|| tokens.clone()),
            token_ids: controls.return_token_ids,
            usage: controls.delivery.usage(),
            begun: vec![false; controls.n as usize],
        };
        Ok(Understood { prompts: vec![tokens], controls, unknown, endpoint })
    }

    fn whole(self, choices: Vec<Choice>, usage: CompletionUsage) -> Response {
        let prompt = self.prompt.as_deref().unwrap_or_default();
        let scores = choices.first().map_or(&[][..], |first| &first.prompt_logprobs);
        let prompt_logprobs = self.prompt_logprobs.map(|top| scores::by_id(&self.vocabulary, prompt, scores, top));
        let choice = |(index, choice): (usize, Choice)| AnswerChoice {
            choice: ChatChoice {
                index: index as u32,
                message: ChatCompletionResponseMessage {
                    content: Some(choice.text),
                    role: Role::Assistant,
                    ..Default::default()
                },
                finish_reason: choice.finish.map(finish),
                logprobs: self.logprobs.then(|| shown(&self.vocabulary, &choice.logprobs)),
            },
            stop_reason: choice.stop_reason,
            token_ids: self.token_ids.then_some(choice.ids),
        };
        Json(Answer {
            id: &self.envelope.id,
            object: "chat.completion",
            created: self.envelope.created,
            model: &self.envelope.model,
            choices: choices.into_iter().enumerate().map(choice).collect(),
            usage,
            prompt_logprobs,
            prompt_token_ids: self.token_ids.then_some(prompt),
        })
        .into_response()
    }
}

/// OpenAI's answer, and what vLLM adds to it.
#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<AnswerChoice>,
    usage: CompletionUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct AnswerChoice {
    #[serde(flatten)]
    choice: ChatChoice,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

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
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatChoiceLogprobs>,
    finish_reason: Option<Finish>,
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

impl Chat {
    fn chunk<'a>(&'a self, choices: &'a [ChunkChoice<'a>], usage: Option<UsageSlot>) -> Chunk<'a> {
        let Envelope { id, created, model } = &self.envelope;
        let object = "chat.completion.chunk";
        Chunk { id, object, created: *created, model, choices, usage, prompt_token_ids: None }
    }
}

impl Chunks for Chat {
    fn piece(&mut self, piece: Piece, usage: &CompletionUsage, events: &mut Events) {
        let usage = || UsageSlot::of(self.usage, usage);
        let empty = |role| ChunkChoice {
            index: piece.choice,
            delta: Delta { role, content: role.map(|_| "") },
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        };
        // A choice's first delta names the role and says nothing.
        if !self.begun[piece.choice] {
            let prompt_token_ids = self.prompt.as_deref().filter(|_| self.token_ids && !self.begun.contains(&true));
            let choices = [empty(Some(Role::Assistant))];
            events.push(&Chunk { prompt_token_ids, ..self.chunk(&choices, usage()) });
        }
        let has_ids = self.token_ids && !piece.ids.is_empty();
        if !piece.text.is_empty() || !piece.logprobs.is_empty() || piece.finish.is_some() || has_ids {
            let choice = ChunkChoice {
                delta: Delta { role: None, content: (!piece.text.is_empty()).then_some(&piece.text) },
                logprobs: self.logprobs.then(|| shown(&self.vocabulary, &piece.logprobs)),
                finish_reason: piece.finish.map(finish),
                stop_reason: piece.stop_reason.clone(),
                token_ids: self.token_ids.then_some(&piece.ids),
                ..empty(None)
            };
            events.push(&self.chunk(&[choice], usage()));
        }
        self.begun[piece.choice] = true;
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.usage != StreamUsage::Never {
            events.push(&self.chunk(&[], Some(UsageSlot(Some(generation.usage())))));
        }
    }
}

fn finish(reason: FinishReason) -> Finish {
    match reason {
        FinishReason::Stop => Finish::Stop,
        FinishReason::Length => Finish::Length,
    }
}

fn shown(vocabulary: &Vocabulary, logprobs: &[TokenLogprobs]) -> ChatChoiceLogprobs {
    let text = |token| String::from_utf8_lossy(vocabulary.bytes(token)).into_owned();
    let bytes = |token| Some(vocabulary.bytes(token).to_vec());
    let rival =
        |(token, logprob): &(u32, f32)| TopLogprobs { token: text(*token), logprob: *logprob, bytes: bytes(*token) };
    let content = logprobs.iter().map(|of| ChatCompletionTokenLogprob {
        token: text(of.token),
        logprob: of.logprob,
        bytes: bytes(of.token),
        top_logprobs: of.top.iter().map(rival).collect(),
    });
    ChatChoiceLogprobs { content: Some(content.collect()), refusal: None }
}

fn logprobs(fields: &mut Fields) -> Result<Option<u8>, Error> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        let message = "Invalid 'top_logprobs': 'logprobs' must be true when it is used.";
        return Err(Error::invalid("top_logprobs", "invalid_value", message));
    }
    Ok(wanted.then_some(top.unwrap_or(0) as u8))
}

/// The tokens of the conversation that a request to tokenize has.
pub(crate) fn tokens(fields: &mut Fields, model: &Model, gone: &CancellationToken) -> Result<Vec<u32>, Error> {
    let special = fields.flag("add_special_tokens")?.unwrap_or(false);
    model.encode_chat(conversation(fields)?, special, gone)
}

fn conversation(fields: &mut Fields) -> Result<Conversation, Error> {
    let continue_last = fields.flag("continue_final_message")?.unwrap_or(false);
    let open_turn = fields.flag("add_generation_prompt")?.unwrap_or(!continue_last);
    if continue_last && open_turn {
        let message = "'continue_final_message' and 'add_generation_prompt' exclude each other.";
        return Err(Error::invalid("continue_final_message", "invalid_value", message));
    }
    let mut variables = fields.object("chat_template_kwargs")?.map(Fields::rest).unwrap_or_default();
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(Conversation {
        messages: messages::take(fields)?,
        tools: tools::take(fields)?,
        open_turn,
        continue_last,
        variables,
    })
}

/// Text is the only modality.
fn refuse_modalities(fields: &mut Fields) -> Result<(), Error> {
    for (i, modality) in fields.array("modalities")?.unwrap_or_default().iter().enumerate() {
        if modality != "text" {
            let message = format!("Unsupported value: 'modalities[{i}]' {modality}. Supported here: 'text'.");
            return Err(Error::unsupported(format!("modalities[{i}]"), message));
        }
    }
    Ok(())
}
