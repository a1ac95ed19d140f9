//! `POST /v1/chat/completions`: messages in, through the model's template; a message out, whole or in deltas.

mod messages;
mod tools;

use crate::choice::{FinishReason, Piece, TokenLogprobs};
use crate::controls::{Controls, Delivery, TOP_LOGPROBS_MAX};
use crate::endpoint::{Choice, Endpoint, Envelope, Understood, fit, not_empty};
use crate::error::Error;
use crate::fields::Fields;
use crate::generation::Generation;
use crate::model::Model;
use crate::sse::{Chunks, Events, UsageSlot};
use crate::template::Conversation;
use crate::vocabulary::Vocabulary;
use async_openai::types::chat::{
    ChatChoice, ChatChoiceLogprobs, ChatCompletionResponseMessage, ChatCompletionTokenLogprob, CompletionUsage,
    CreateChatCompletionResponse, FinishReason as Finish, Role, TopLogprobs,
};
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Writes chat answers.
pub(crate) struct Chat {
    envelope: Envelope,
    vocabulary: Arc<Vocabulary>,
    logprobs: bool,
    /// Chunks have a usage.
    usage: bool,
    /// The choices whose first chunk was written.
    begun: Vec<bool>,
}

impl Endpoint for Chat {
    const ID: &'static str = "chatcmpl-";
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
        let mut controls = Controls::take(&mut fields, vocabulary, max_tokens)?;
        controls.sampling.logprobs = logprobs(&mut fields)?;
        refuse_unsupported(&mut fields)?;

        let special = fields.flag("add_special_tokens")?.unwrap_or(false);
        let prompt = model.template()?.render(conversation(&mut fields)?)?;
        let tokens: Arc<[u32]> = model.encode(Self::PROMPT, &prompt, special, gone)?.into();
        not_empty(Self::PROMPT, &tokens)?;
        fit(Self::PROMPT, tokens.len(), &controls, model.card.context)?;
        let endpoint = Self {
            envelope,
            vocabulary: model.vocabulary.clone(),
            logprobs: controls.sampling.logprobs.is_some(),
            usage: controls.delivery == Delivery::Stream { usage: true },
            begun: vec![false; controls.n as usize],
        };
        Ok(Understood { prompts: vec![tokens], controls, endpoint })
    }

    fn whole(self, choices: Vec<Choice>, usage: CompletionUsage) -> Response {
        let choice = |(index, choice): (usize, Choice)| ChatChoice {
            index: index as u32,
            message: ChatCompletionResponseMessage {
                content: Some(choice.text),
                role: Role::Assistant,
                ..Default::default()
            },
            finish_reason: choice.finish.map(finish),
            logprobs: self.logprobs.then(|| shown(&self.vocabulary, &choice.logprobs)),
        };
        let choices = choices.into_iter().enumerate().map(choice).collect();
        Json(CreateChatCompletionResponse {
            id: self.envelope.id,
            object: "chat.completion".into(),
            created: self.envelope.created as u32,
            model: self.envelope.model,
            choices,
            usage: Some(usage),
            ..Default::default()
        })
        .into_response()
    }
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
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatChoiceLogprobs>,
    finish_reason: Option<Finish>,
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
        Chunk { id, object: "chat.completion.chunk", created: *created, model, choices, usage }
    }
}

impl Chunks for Chat {
    fn piece(&mut self, piece: Piece, events: &mut Events) {
        if piece.text.is_empty() && piece.logprobs.is_empty() && piece.finish.is_none() {
            return;
        }
        // A choice's first delta names the role, and has a content, be it empty.
        let first = !std::mem::replace(&mut self.begun[piece.choice], true);
        let choice = ChunkChoice {
            index: piece.choice,
            delta: Delta {
                role: first.then_some(Role::Assistant),
                content: (first || !piece.text.is_empty()).then_some(&piece.text),
            },
            logprobs: self.logprobs.then(|| shown(&self.vocabulary, &piece.logprobs)),
            finish_reason: piece.finish.map(finish),
        };
        events.push(&self.chunk(&[choice], self.usage.then_some(UsageSlot(None))));
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        if self.usage {
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

fn conversation(fields: &mut Fields) -> Result<Conversation, Error> {
    let continue_last = fields.flag("continue_final_message")?.unwrap_or(false);
    let open_turn = fields.flag("add_generation_prompt")?.unwrap_or(!continue_last);
    if continue_last && open_turn {
        let message = "'continue_final_message' and 'add_generation_prompt' exclude each other.";
        return Err(Error::invalid("continue_final_message", "invalid_value", message));
    }
    Ok(Conversation {
        messages: messages::take(fields)?,
        tools: tools::take(fields)?,
        open_turn,
        continue_last,
        variables: fields.object("chat_template_kwargs")?.map(Fields::rest).unwrap_or_default(),
    })
}

/// What would be wrong to ignore: the answer would not be what was asked for.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), Error> {
    if let Some(mut format) = fields.object("response_format")?
        && let Some(kind) = format.text("type")?.filter(|kind| kind != "text")
    {
        let message = format!("Unsupported value: 'response_format.type' '{kind}'. Supported here: 'text'.");
        return Err(Error::unsupported("response_format", message));
    }
    for (i, modality) in fields.array("modalities")?.unwrap_or_default().iter().enumerate() {
        if modality != "text" {
            let message = format!("Unsupported value: 'modalities[{i}]' {modality}. Supported here: 'text'.");
            return Err(Error::unsupported(format!("modalities[{i}]"), message));
        }
    }
    for name in ["audio", "functions", "function_call", "web_search_options"] {
        if fields.raw(name).is_some() {
            let message = format!("Unsupported parameter: '{name}' is not supported with this model.");
            return Err(Error::invalid(name, "unsupported_parameter", message));
        }
    }
    Ok(())
}
