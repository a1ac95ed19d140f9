//! One choice: an engine's stream of tokens becomes pieces of text, with stop strings cut and log-probabilities beside the
//! text that they belong to.

use super::detokenize::Detokenizer;
use super::logprobs::{Position, TokenLogprobs};
use super::stop::{Matcher, Seen};
use crate::error::Error;
use crate::model::Vocabulary;
use crate::params::Controls;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use worker::engine::{self, EndToken, Finish, Logprobs, Output, OutputStream, PromptReport, Tokens};

/// What one item of an engine's stream became.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Piece {
    /// Which choice.
    pub(crate) choice: usize,
    /// Text that is certain now.
    pub(crate) text: String,
    /// Tokens generated for this item, be their text in this piece, held back, or none. The token that ended the choice counts.
    pub(crate) generated: u32,
    /// These tokens, as far as the engine names them.
    pub(crate) ids: Vec<u32>,
    /// Those that belong to text that is certain now, when asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Set on a choice's last piece.
    pub(crate) finish: Option<FinishReason>,
    /// What ended it, on a choice's last piece, when the request named it.
    pub(crate) stop_reason: Option<StopReason>,
    /// Of the token that ended the choice, when asked for. It has no text.
    pub(crate) end_logprobs: Option<TokenLogprobs>,
    /// Of the prompt's tokens from the second on, on a choice's first piece, when asked for.
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    /// What the prompt cost, on a choice's first piece.
    pub(crate) prompt: Option<PromptReport>,
    /// The router's decision, when asked for, on a choice's first piece.
    pub(crate) explain: Option<Arc<str>>,
}

/// Why a choice ended, in OpenAI's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FinishReason {
    /// The model, a stop token or a stop string ended it.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

impl FinishReason {
    /// OpenAI's word.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What of the request's own ended a choice.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason {
    /// A stop token.
    Token(u32),
    /// A stop string.
    Text(String),
}

/// Turns tokens into pieces.
pub(crate) struct Assembler {
    choice: usize,
    vocabulary: Arc<Vocabulary>,
    detokenizer: Detokenizer,
    matcher: Matcher,
    include_stop: bool,
    min_tokens: u32,
    generated: u32,
    /// The text of one token: memory that is used again for the next.
    text: String,
    /// How much text is decoded, held back or not.
    decoded: Position,
    /// How many bytes of it are certain.
    certain: usize,
    /// Of tokens whose text is not certain yet.
    pending: VecDeque<TokenLogprobs>,
}

impl Assembler {
    /// For one choice of a request.
    pub(crate) fn new(choice: usize, vocabulary: &Arc<Vocabulary>, controls: &Controls) -> Self {
        Self {
            choice,
            vocabulary: vocabulary.clone(),
            detokenizer: Detokenizer::new(vocabulary.clone(), controls.skip_special),
            matcher: Matcher::new(controls.stop_strings.clone(), controls.include_stop),
            include_stop: controls.include_stop,
            min_tokens: controls.stop.min_tokens,
            generated: 0,
            text: String::new(),
            decoded: Position::default(),
            certain: 0,
            pending: VecDeque::new(),
        }
    }

    /// Takes one item. Whoever gets a piece with `finish` set pushes nothing more.
    pub(crate) fn push(&mut self, tokens: Tokens) -> Piece {
        let Tokens { ids, logprobs, finish, end, prompt_logprobs, prompt, explain } = tokens;
        let mut piece = Piece { choice: self.choice, prompt, explain, prompt_logprobs, ..Piece::default() };
        let mut logprobs = logprobs.into_iter();
        for id in ids {
            piece.generated += 1;
            piece.ids.push(id);
            self.generated += 1;
            self.pending.extend(logprobs.next().map(|of| TokenLogprobs::new(id, of, self.decoded)));
            self.text.clear();
            self.detokenizer.push(id, &mut self.text);
            if self.take(&mut piece.text) == Seen::Stop {
                self.stop_at_string(&mut piece);
                return piece;
            }
        }
        match finish {
            None => self.release(&mut piece),
            Some(finish) => self.end(finish, end, &mut piece),
        }
        piece
    }

    fn stop_at_string(&mut self, piece: &mut Piece) {
        piece.finish = Some(FinishReason::Stop);
        piece.stop_reason = self.matcher.found().map(|text| StopReason::Text(text.to_owned()));
        self.release(piece);
    }

    /// The engine ended the choice: nothing is held back any more.
    fn end(&mut self, finish: Finish, end: Option<EndToken>, piece: &mut Piece) {
        let mut rest = String::new();
        if let (Finish::StopToken(token), true) = (finish, self.include_stop) {
            rest.push_str(&String::from_utf8_lossy(self.vocabulary.bytes(token)));
        }
        self.text.clear();
        self.detokenizer.finish(&mut self.text);
        piece.finish = Some(match finish {
            Finish::Stop | Finish::StopToken(_) => FinishReason::Stop,
            Finish::Length => FinishReason::Length,
        });
        if piece.finish == Some(FinishReason::Stop) {
            piece.generated += 1;
            piece.ids.extend(end.as_ref().map(|end| end.id));
        }
        if self.take(&mut piece.text) == Seen::Stop {
            return self.stop_at_string(piece);
        }
        if let Finish::StopToken(token) = finish {
            piece.stop_reason = Some(StopReason::Token(token));
        }
        piece.end_logprobs = end.and_then(|end| Some(TokenLogprobs::new(end.id, end.logprobs?, self.decoded)));
        self.matcher.finish(&mut piece.text);
        piece.text.push_str(&rest);
        piece.logprobs.extend(self.pending.drain(..));
    }

    /// Takes the text of the last token.
    fn take(&mut self, out: &mut String) -> Seen {
        self.decoded.bytes += self.text.len();
        self.decoded.chars += self.text.chars().count();
        if self.generated <= self.min_tokens {
            // A stop string may not end the text yet, so it is not looked for.
            out.push_str(&self.text);
            return Seen::Nothing;
        }
        self.matcher.push(&self.text, out)
    }

    /// Adds the log-probabilities of tokens whose text has begun to come out.
    fn release(&mut self, piece: &mut Piece) {
        self.certain += piece.text.len();
        let ready = self.pending.iter().take_while(|of| of.at.bytes < self.certain).count();
        piece.logprobs.extend(self.pending.drain(..ready));
    }
}

/// The pieces of one choice, until it ends or fails. The engine's stream is dropped before the last piece is handed out.
pub(crate) fn pieces(stream: OutputStream, assembler: Assembler) -> BoxStream<'static, Result<Piece, Error>> {
    let step = |state: Option<(OutputStream, Assembler)>| async move {
        let (mut stream, mut assembler) = state?;
        Some(match stream.next().await {
            Some(Ok(Output::Tokens(tokens))) => {
                let piece = assembler.push(tokens);
                let state = piece.finish.is_none().then_some((stream, assembler));
                (Ok(piece), state)
            }
            Some(Ok(Output::Frame(..) | Output::Handoff(_))) => {
                (Err(Error::Failed("the engine sent an unexpected kind of output".into())), None)
            }
            Some(Err(error)) => (Err(error.into()), None),
            None => {
                (Err(engine::Error::Failed("the engine's stream ended without a finish reason".into()).into()), None)
            }
        })
    };
    stream::unfold(Some((stream, assembler)), step).boxed()
}

#[cfg(test)]
mod tests;
