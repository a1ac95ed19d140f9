//! One choice: converts an engine's stream of tokens to deltas of text. It removes stop strings and releases
//! log-probabilities together with the text of their tokens.

use super::detokenize::Detokenizer;
use super::logprobs::{TextPosition, TokenLogprobs};
use super::stop::{Matcher, StopState};
use crate::error::Error;
use crate::model::Vocabulary;
use crate::params::GenerationParams;
use futures::{Stream, StreamExt};
use serde::Serialize;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use worker::engine::{self, EndToken, Logprobs, Output, OutputStream, PromptReport, Tokens};

/// Output of one choice from one item of the engine's stream.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct ChoiceDelta {
    /// The index of the choice.
    pub(crate) choice: usize,
    /// Text that is final.
    pub(crate) text: String,
    /// Tokens generated in this item, including the token that ended the choice. Their text may come in a later delta.
    pub(crate) generated: u32,
    /// The ids of these tokens, without an end token that the engine does not report.
    pub(crate) ids: Vec<u32>,
    /// Log-probabilities of tokens whose text is final, if requested.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Set on the choice's last delta.
    pub(crate) finish: Option<FinishReason>,
    /// On the last delta: the stop string or stop token of the request that ended the choice.
    pub(crate) stop_reason: Option<StopReason>,
    /// Log-probabilities of the token that ended the choice, if requested. The token has no text.
    pub(crate) end_logprobs: Option<TokenLogprobs>,
    /// On the first delta: log-probabilities of the prompt's tokens from the second on, if requested.
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    /// On the first delta: cached and computed tokens of the prompt.
    pub(crate) prompt: Option<PromptReport>,
    /// On the first delta: the router's decision, if requested.
    pub(crate) explain: Option<Arc<str>>,
}

/// OpenAI's finish reasons.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FinishReason {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

impl FinishReason {
    /// OpenAI's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// The stop string or stop token of the request that ended a choice.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason {
    /// A stop token.
    Token(u32),
    /// A stop string.
    Text(String),
}

/// Converts tokens to deltas.
pub(crate) struct ChoiceAssembler {
    choice: usize,
    vocabulary: Arc<Vocabulary>,
    detokenizer: Detokenizer,
    matcher: Matcher,
    include_stop: bool,
    min_tokens: u32,
    generated: u32,
    /// The text of one token; a buffer that is reused.
    text: String,
    /// Length of the decoded text, including text that is withheld.
    decoded: TextPosition,
    /// Length of the released text in bytes.
    released: usize,
    /// Log-probabilities of tokens whose text is not released yet.
    pending: VecDeque<TokenLogprobs>,
}

impl ChoiceAssembler {
    /// An assembler for one choice of a request.
    pub(crate) fn new(choice: usize, vocabulary: &Arc<Vocabulary>, params: &GenerationParams) -> Self {
        Self {
            choice,
            vocabulary: vocabulary.clone(),
            detokenizer: Detokenizer::new(vocabulary.clone(), params.skip_special),
            matcher: Matcher::new(params.stop_strings.clone(), params.include_stop),
            include_stop: params.include_stop,
            min_tokens: params.stop.min_tokens,
            generated: 0,
            text: String::new(),
            decoded: TextPosition::default(),
            released: 0,
            pending: VecDeque::new(),
        }
    }

    /// Converts one item. After a delta with `finish` the caller must not push again.
    pub(crate) fn push(&mut self, tokens: Tokens) -> ChoiceDelta {
        let Tokens { ids, logprobs, finish, end, prompt_logprobs, prompt, explain } = tokens;
        let mut delta =
            ChoiceDelta { choice: self.choice, ids, prompt, explain, prompt_logprobs, ..ChoiceDelta::default() };
        let mut logprobs = logprobs.into_iter();
        for at in 0..delta.ids.len() {
            let id = delta.ids[at];
            delta.generated += 1;
            self.generated += 1;
            self.pending.extend(logprobs.next().map(|scores| TokenLogprobs::new(id, scores, self.decoded)));
            self.text.clear();
            self.detokenizer.push(id, &mut self.text);
            if self.push_text(&mut delta.text) == StopState::Stop {
                delta.ids.truncate(at + 1);
                self.stop_at_string(&mut delta);
                return delta;
            }
        }
        match finish {
            None => self.release(&mut delta),
            Some(finish) => self.end(finish, end, &mut delta),
        }
        delta
    }

    fn stop_at_string(&mut self, delta: &mut ChoiceDelta) {
        delta.finish = Some(FinishReason::Stop);
        delta.stop_reason = self.matcher.found().map(|text| StopReason::Text(text.to_owned()));
        self.release(delta);
    }

    /// Releases all withheld text when the engine has ended the choice.
    fn end(&mut self, finish: engine::FinishReason, end: Option<EndToken>, delta: &mut ChoiceDelta) {
        let mut rest = String::new();
        if let (engine::FinishReason::StopToken(token), true) = (finish, self.include_stop) {
            rest.push_str(&String::from_utf8_lossy(self.vocabulary.bytes(token)));
        }
        self.text.clear();
        self.detokenizer.finish(&mut self.text);
        delta.finish = Some(match finish {
            engine::FinishReason::Stop | engine::FinishReason::StopToken(_) => FinishReason::Stop,
            engine::FinishReason::Length => FinishReason::Length,
        });
        if delta.finish == Some(FinishReason::Stop) {
            delta.generated += 1;
            delta.ids.extend(end.as_ref().map(|end| end.id));
        }
        if self.push_text(&mut delta.text) == StopState::Stop {
            return self.stop_at_string(delta);
        }
        if let engine::FinishReason::StopToken(token) = finish {
            delta.stop_reason = Some(StopReason::Token(token));
        }
        delta.end_logprobs = end.and_then(|end| Some(TokenLogprobs::new(end.id, end.logprobs?, self.decoded)));
        self.matcher.finish(&mut delta.text);
        delta.text.push_str(&rest);
        delta.logprobs.extend(self.pending.drain(..));
    }

    /// Passes the text of the last token to the stop matcher.
    fn push_text(&mut self, out: &mut String) -> StopState {
        self.decoded.bytes += self.text.len();
        self.decoded.chars += self.text.chars().count();
        if self.generated <= self.min_tokens {
            // Stop strings do not apply to the first `min_tokens` tokens.
            out.push_str(&self.text);
            return StopState::Continue;
        }
        self.matcher.push(&self.text, out)
    }

    /// Adds the log-probabilities of tokens whose text is at least partly released.
    fn release(&mut self, delta: &mut ChoiceDelta) {
        self.released += delta.text.len();
        let ready = self.pending.iter().take_while(|token| token.position.bytes < self.released).count();
        delta.logprobs.extend(self.pending.drain(..ready));
    }
}

/// The deltas of one choice, until it ends or fails. The engine's stream is dropped before the last delta is returned.
pub(crate) struct Deltas {
    /// `None` after the last delta.
    stream: Option<OutputStream>,
    assembler: ChoiceAssembler,
}

impl Deltas {
    /// The deltas of an engine's stream.
    pub(crate) fn new(stream: OutputStream, assembler: ChoiceAssembler) -> Self {
        Self { stream: Some(stream), assembler }
    }
}

impl Stream for Deltas {
    type Item = Result<ChoiceDelta, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(None) };
        let delta = match ready!(stream.poll_next_unpin(cx)) {
            Some(Ok(Output::Tokens(tokens))) => Ok(self.assembler.push(tokens)),
            Some(Ok(_)) => Err(Error::Failed("the engine sent an unexpected kind of output".into())),
            Some(Err(error)) => Err(error.into()),
            None => Err(engine::Error::Failed("the engine's stream ended without a finish reason".into()).into()),
        };
        if delta.as_ref().map_or(true, |delta| delta.finish.is_some()) {
            self.stream = None;
        }
        Poll::Ready(Some(delta))
    }
}

#[cfg(test)]
mod tests;
