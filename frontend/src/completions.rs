//! `POST /v1/completions`: text or tokens in, what follows them out.

mod prompts;

use crate::choice::{FinishReason, Piece, TokenLogprobs};
use crate::controls::{CHOICES_MAX, Controls, Delivery, TOP_LOGPROBS_MAX};
use crate::endpoint::{Choice, Endpoint, Envelope, Understood, fit, not_empty};
use crate::error::Error;
use crate::fields::Fields;
use crate::generation::Generation;
use crate::model::Model;
use crate::sse::{Chunks, Events, UsageSlot};
use crate::vocabulary::Vocabulary;
use async_openai::types::chat::{Choice as TextChoice, CompletionFinishReason, CompletionUsage, Logprobs};
use async_openai::types::completions::CreateCompletionResponse;
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// OpenAI's default here.
const MAX_TOKENS: i64 = 16;
/// Writes completions.
pub(crate) struct Completion {
    envelope: Envelope,
    vocabulary: Arc<Vocabulary>,
    logprobs: bool,
    /// Chunks have a usage.
    usage: bool,
    /// Per choice, what is still to be written before its text: with `echo`, the prompt.
    echo: Vec<String>,
}

impl Endpoint for Completion {
    const ID: &'static str = "cmpl-";
    const PROMPT: &'static str = "prompt";

    fn understand(
        mut fields: Fields,
        model: &Arc<Model>,
        envelope: Envelope,
        gone: &CancellationToken,
    ) -> Result<Understood<Self>, Error> {
        let max_tokens = fields.integer("max_tokens", 1..=i64::from(u32::MAX))?.unwrap_or(MAX_TOKENS);
        let mut controls = Controls::take(&mut fields, model.card.vocabulary, Some(max_tokens))?;
        controls.sampling.logprobs = fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX)?.map(|top| top as u8);
        let echo = fields.flag("echo")?.unwrap_or(false);
        if echo && controls.sampling.logprobs.is_some() {
            let message = "Unsupported value: 'echo' with 'logprobs': the prompt's log-probabilities are not computed.";
            return Err(Error::unsupported("echo", message));
        }
        refuse_unsupported(&mut fields, controls.n)?;

        let prompts = prompts::take(&mut fields, model, gone)?;
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
        let each = prompts.iter().map(|tokens| if echo { text(&model.vocabulary, tokens) } else { String::new() });
        let echo = each.flat_map(|text| vec![text; controls.n as usize]).collect();
        let endpoint = Self {
            envelope,
            vocabulary: model.vocabulary.clone(),
            logprobs: controls.sampling.logprobs.is_some(),
            usage: controls.delivery == Delivery::Stream { usage: true },
            echo,
        };
        Ok(Understood { prompts, controls, endpoint })
    }

    fn whole(self, choices: Vec<Choice>, usage: CompletionUsage) -> Response {
        let choice = |((index, choice), echo): ((usize, Choice), String)| TextChoice {
            index: index as u32,
            text: echo + &choice.text,
            logprobs: self.logprobs.then(|| shown(&self.vocabulary, &choice.logprobs)),
            finish_reason: choice.finish.map(finish),
        };
        let choices = choices.into_iter().enumerate().zip(self.echo).map(choice).collect();
        Json(CreateCompletionResponse {
            id: self.envelope.id,
            object: OBJECT.into(),
            created: self.envelope.created as u32,
            model: self.envelope.model,
            choices,
            usage: Some(usage),
            ..Default::default()
        })
        .into_response()
    }
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
}

impl Completion {
    fn chunk<'a>(&'a self, choices: &'a [ChunkChoice<'a>], usage: Option<UsageSlot>) -> Chunk<'a> {
        let Envelope { id, created, model } = &self.envelope;
        Chunk { id, object: OBJECT, created: *created, model, choices, usage }
    }
}

impl Chunks for Completion {
    fn piece(&mut self, piece: Piece, events: &mut Events) {
        let mut text = std::mem::take(&mut self.echo[piece.choice]);
        text.push_str(&piece.text);
        if text.is_empty() && piece.logprobs.is_empty() && piece.finish.is_none() {
            return;
        }
        let choice = ChunkChoice {
            index: piece.choice,
            text: &text,
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

fn finish(reason: FinishReason) -> CompletionFinishReason {
    match reason {
        FinishReason::Stop => CompletionFinishReason::Stop,
        FinishReason::Length => CompletionFinishReason::Length,
    }
}

fn shown(vocabulary: &Vocabulary, logprobs: &[TokenLogprobs]) -> Logprobs {
    let rivals = |of: &TokenLogprobs| {
        let all = of.top.iter().copied().chain([(of.token, of.logprob)]);
        let by_name: Map<String, Value> =
            all.map(|(token, logprob)| (label(vocabulary, token), logprob.into())).collect();
        by_name.into()
    };
    Logprobs {
        tokens: logprobs.iter().map(|of| label(vocabulary, of.token)).collect(),
        token_logprobs: logprobs.iter().map(|of| Some(of.logprob)).collect(),
        top_logprobs: logprobs.iter().map(rivals).collect(),
        text_offset: logprobs.iter().map(|of| of.at.chars as u32).collect(),
    }
}

/// A token's text; of a token that is a part of a character its bytes, as OpenAI writes them, so that labels differ.
fn label(vocabulary: &Vocabulary, token: u32) -> String {
    let bytes = vocabulary.bytes(token);
    std::str::from_utf8(bytes).map_or_else(
        |_| {
            bytes.iter().fold("bytes:".to_owned(), |mut label, byte| {
                write!(label, "\\x{byte:02x}").expect("a string takes everything");
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

/// What would be wrong to ignore: the answer would not be what was asked for.
fn refuse_unsupported(fields: &mut Fields, n: u32) -> Result<(), Error> {
    if let Some(best_of) = fields.integer("best_of", 1..=CHOICES_MAX)?
        && best_of != i64::from(n)
    {
        let message = format!("Unsupported value: 'best_of' {best_of}. Only the value of 'n' ({n}) is supported here.");
        return Err(Error::unsupported("best_of", message));
    }
    if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        let message = "Unsupported parameter: 'suffix' is not supported with this model.";
        return Err(Error::invalid("suffix", "unsupported_parameter", message));
    }
    Ok(())
}
