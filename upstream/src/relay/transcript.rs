//! The tokens and the text of a stream of vLLM, from which another server can continue it, and the chunks of that other
//! server as those of the stream.
//!
//! ```text
//!   settled tokens                   pending tokens
//!   ├────────────────────────────────┼──────────────┤
//!   all of their text is known       the client has them, and some of their text
//! ```
//!
//! The tokens are **settled** up to the last chunk that has one token and a text: then the detokenizer of the server
//! holds nothing back, such as the first half of a character. The other server gets the prompt and the settled tokens.
//! It generates the **pending** tokens again, which the client has already: they are compared with what it has, and
//! left out. If they differ, so would the text after them, and the stream fails.
//!
//! The server is asked for token ids. They are replaced by the `null` that it would write without, unless the client
//! asked for them too.
//!
//! Not here: which requests can be continued, and the request for the rest (`continuation`).

mod wire;

use super::chunk;
use super::error::{Answer, RelayError};
use super::sse::Event;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::ops::Range;
use wire::{Choice, Chunk, Edits, Head, NULL, chat_choice, edited, range_in, whole_usage};
use worker::engine::ErrorKind;

/// A stream that is followed.
#[derive(Debug)]
pub struct Transcript {
    api: Api,
    /// The client asked for the token ids too.
    keeps_ids: bool,
    /// The server continues the stream of another one.
    is_continued: bool,
    head: Option<Head>,
    /// Empty: not known yet.
    prompt: Vec<u32>,
    settled: Vec<u32>,
    /// Of the settled tokens, those that are in the prompt of this server.
    before: usize,
    /// Tokens after the settled ones that the client has.
    pending: Vec<u32>,
    /// How many of them this server has generated.
    replayed: usize,
    /// Text after that of the settled tokens that the client has.
    pending_text: String,
    /// How many bytes of it this server has sent.
    replayed_text: usize,
    state: State,
}

/// The API of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

/// A stream that broke off, as the server needs to know it that continues it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Broken {
    api: Api,
    keeps_ids: bool,
    head: Head,
    pending: Vec<u32>,
    pending_text: String,
    /// The tokens of the prompt. They travel with the request.
    #[serde(skip)]
    pub prompt: Vec<u32>,
    /// The settled tokens. They travel with the request.
    #[serde(skip)]
    pub generated: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Followed,
    /// It has ended: there is nothing to continue.
    Finished,
    /// It cannot be continued, for this reason.
    Lost(&'static str),
}

/// How an event passes.
#[derive(Debug)]
pub(super) enum Reading {
    Pass(Event),
    /// The client gets nothing of it.
    Drop,
    /// The stream breaks off before it.
    Fail(RelayError),
}

/// The same of an event that stays where it is.
enum Outcome {
    Unchanged,
    Replaced(Bytes),
    Dropped,
    Failed(RelayError),
}

/// What a chunk adds to what the client has.
struct Added {
    tokens: Vec<u32>,
    text: String,
    /// It generates nothing that the client has not got.
    is_known: bool,
}

/// Why a stream without token ids is not continued.
const NO_IDS: &str = "the server sends no token ids";
/// A server that is stopped ends its streams so. No client asks for it.
const ABORTED: &str = "the server has aborted the request";
/// Why a stream whose tokens differ is not continued.
const DIFFERS: &str = "it generates other tokens than the server before";

impl Transcript {
    /// The stream of a request that asks for token ids.
    pub fn new(api: Api, keeps_ids: bool) -> Self {
        Self {
            api,
            keeps_ids,
            is_continued: false,
            head: None,
            prompt: Vec::new(),
            settled: Vec::new(),
            before: 0,
            pending: Vec::new(),
            replayed: 0,
            pending_text: String::new(),
            replayed_text: 0,
            state: State::Followed,
        }
    }

    /// The stream of the server that continues `broken`.
    pub fn continuing(broken: Broken) -> Self {
        let Broken { api, keeps_ids, head, pending, pending_text, prompt, generated } = broken;
        Self {
            is_continued: true,
            head: Some(head),
            prompt,
            before: generated.len(),
            settled: generated,
            pending,
            pending_text,
            ..Self::new(api, keeps_ids)
        }
    }

    /// What another server needs to continue the stream, or why none can.
    pub fn broken(&self) -> Result<Broken, &'static str> {
        match (self.state, &self.head) {
            (State::Lost(why), _) => Err(why),
            (State::Finished, _) => Err("all of its text was sent"),
            (State::Followed, Some(head)) if !self.prompt.is_empty() => Ok(Broken {
                api: self.api,
                keeps_ids: self.keeps_ids,
                head: head.clone(),
                pending: self.pending.clone(),
                pending_text: self.pending_text.clone(),
                prompt: self.prompt.clone(),
                generated: self.settled.clone(),
            }),
            (State::Followed, _) => Err(NO_IDS),
        }
    }

    /// The server sends no token ids, although it was asked for them.
    pub fn lacks_ids(&self) -> bool {
        self.state == State::Lost(NO_IDS)
    }

    /// Another server may continue the stream after the events that were read.
    pub(super) fn is_followed(&self) -> bool {
        self.state == State::Followed
    }

    pub(super) fn read(&mut self, event: Event) -> Reading {
        match self.outcome(&event) {
            Outcome::Unchanged => Reading::Pass(event),
            Outcome::Replaced(raw) => Reading::Pass(Event { raw, whole: true }),
            Outcome::Dropped => Reading::Drop,
            Outcome::Failed(error) => Reading::Fail(error),
        }
    }

    fn outcome(&mut self, event: &Event) -> Outcome {
        let Some(range) = event.data_range() else {
            // A comment has no payload.
            let is_comment = event.whole && event.data().is_none();
            return if is_comment { Outcome::Unchanged } else { self.unknown("an event has another form") };
        };
        let data = &event.raw[range.clone()];
        if data.trim_ascii() == b"[DONE]" {
            self.state = State::Finished;
            return Outcome::Unchanged;
        }
        match serde_json::from_slice::<Chunk<'_>>(data) {
            Ok(chunk) => self.chunk(&event.raw, range, &chunk),
            Err(_) if chunk::Chunk::read(data).kind == chunk::Kind::Error => self.error(data),
            Err(_) => self.unknown("an event is no chunk"),
        }
    }

    /// An error of the server. Another one can continue what it has broken off.
    fn error(&self, data: &[u8]) -> Outcome {
        let answer = Answer::of_event(Bytes::copy_from_slice(data));
        let breaks_off = self.is_continued || (self.is_followed() && answer.kind != ErrorKind::Request);
        if breaks_off { Outcome::Failed(RelayError::Answered(Box::new(answer))) } else { Outcome::Unchanged }
    }

    /// What cannot be read passes, but for that of a server which continues: it would not be of the stream.
    fn unknown(&mut self, why: &'static str) -> Outcome {
        if self.is_continued {
            return Outcome::Failed(RelayError::BrokenOff(why.to_owned()));
        }
        self.lose(why);
        Outcome::Unchanged
    }

    fn lose(&mut self, why: &'static str) {
        if self.state == State::Followed {
            self.state = State::Lost(why);
            // Nothing of it is needed any more.
            (self.prompt, self.settled, self.pending) = (Vec::new(), Vec::new(), Vec::new());
            self.pending_text = String::new();
        }
    }

    /// `range`: of the payload in `raw`.
    fn chunk(&mut self, raw: &[u8], range: Range<usize>, chunk: &Chunk<'_>) -> Outcome {
        let data = &raw[range.clone()];
        let choice = match &chunk.choices[..] {
            [] => return self.without_choice(raw, range, chunk),
            [choice] if choice.index == 0 => choice,
            _ => return self.unknown("it has several choices"),
        };
        let is_aborted = choice.finish_reason.is_some_and(|reason| reason.get() == r#""abort""#);
        if is_aborted && (self.is_continued || self.is_followed()) {
            return Outcome::Failed(RelayError::BrokenOff(ABORTED.to_owned()));
        }
        let added = match self.follow(chunk, choice) {
            Ok(added) => added,
            Err(why) if self.is_continued => return Outcome::Failed(RelayError::BrokenOff(why.to_owned())),
            Err(why) => {
                self.lose(why);
                None
            }
        };
        if !self.is_continued {
            return self.of_first_server(raw, range, chunk, choice);
        }
        // It was followed, or the stream would have failed.
        let Some(added) = added else { return Outcome::Unchanged };
        if added.is_known && choice.finish_reason.is_none() {
            return Outcome::Dropped;
        }
        let text = serde_json::to_string(&added.text).expect("a string is JSON");
        let ids = if self.keeps_ids { serde_json::to_string(&added.tokens) } else { Ok(NULL.to_owned()) };
        let ids = ids.expect("numbers are JSON");
        if let (Api::Chat, Some(head)) = (self.api, &self.head) {
            let usage = chunk.usage.and_then(|usage| whole_usage(usage, self.before));
            let choice = chat_choice(choice, &text, &ids);
            let json = head.chat_chunk(&choice, usage.as_deref(), chunk.system_fingerprint);
            return Outcome::Replaced(edited(raw, range.start, vec![(0..data.len(), json)]));
        }
        let mut edits = self.edits_of_head(data, chunk);
        let parts = [(choice.text, text), (choice.token_ids, ids), (choice.prompt_token_ids, NULL.to_owned())];
        edits.extend(parts.into_iter().filter_map(|(part, json)| Some((range_in(data, part?), json))));
        Outcome::Replaced(edited(raw, range.start, edits))
    }

    /// The chunk with the usage.
    fn without_choice(&self, raw: &[u8], range: Range<usize>, chunk: &Chunk<'_>) -> Outcome {
        let data = &raw[range.clone()];
        match (self.is_continued, self.api, &self.head) {
            (true, Api::Chat, Some(head)) => {
                let usage = chunk.usage.and_then(|usage| whole_usage(usage, self.before));
                let json = head.chat_chunk("", usage.as_deref(), chunk.system_fingerprint);
                Outcome::Replaced(edited(raw, range.start, vec![(0..data.len(), json)]))
            }
            (true, ..) => Outcome::Replaced(edited(raw, range.start, self.edits_of_head(data, chunk))),
            (false, ..) => Outcome::Unchanged,
        }
    }

    /// What makes a chunk one of the stream, apart from its choices.
    fn edits_of_head(&self, data: &[u8], chunk: &Chunk<'_>) -> Edits {
        let mut edits = self.head.as_ref().map(|head| head.edits(data, chunk)).unwrap_or_default();
        let usage = chunk.usage.and_then(|usage| Some((range_in(data, usage), whole_usage(usage, self.before)?)));
        edits.extend(usage);
        edits
    }

    /// A chunk without what the client has not asked for.
    fn of_first_server(&self, raw: &[u8], range: Range<usize>, chunk: &Chunk<'_>, choice: &Choice<'_>) -> Outcome {
        if self.keeps_ids {
            return Outcome::Unchanged;
        }
        if choice.is_of_ids_only() {
            return Outcome::Dropped;
        }
        let data = &raw[range.clone()];
        let ids = [chunk.prompt_token_ids, choice.prompt_token_ids, choice.token_ids];
        let edits: Edits = ids.into_iter().flatten().map(|ids| (range_in(data, ids), NULL.to_owned())).collect();
        if edits.is_empty() { Outcome::Unchanged } else { Outcome::Replaced(edited(raw, range.start, edits)) }
    }

    /// Adds a chunk to the tokens and the text. `None`: the stream is not followed any more.
    fn follow(&mut self, chunk: &Chunk<'_>, choice: &Choice<'_>) -> Result<Option<Added>, &'static str> {
        if !self.is_followed() {
            return if self.is_continued { Err("a chunk comes after the end") } else { Ok(None) };
        }
        if choice.logprobs.is_some() {
            return Err("it has log-probabilities");
        }
        let text = choice.text().map_err(|()| "the server parses reasoning or tool calls")?;
        let text: String = text.and_then(|text| serde_json::from_str(text.get()).ok()).unwrap_or_default();
        let tokens = choice.token_ids.map_or_else(|| Some(Vec::new()), read_ids).ok_or(NO_IDS)?;
        // Text that was held back may come with the end.
        if tokens.is_empty() && !text.is_empty() && choice.finish_reason.is_none() {
            return Err(NO_IDS);
        }
        if !self.is_continued {
            self.head = self.head.take().or_else(|| Head::of(chunk));
            if let Some(ids) = chunk.prompt_token_ids.or(choice.prompt_token_ids) {
                self.prompt = read_ids(ids).ok_or(NO_IDS)?;
            }
        }
        let added = self.add(&tokens, &text)?;
        if choice.finish_reason.is_some() {
            self.state = State::Finished;
        }
        Ok(Some(added))
    }

    fn add(&mut self, tokens: &[u32], text: &str) -> Result<Added, &'static str> {
        let known = &self.pending[self.replayed..];
        let (again, new) = tokens.split_at(tokens.len().min(known.len()));
        if !known.starts_with(again) {
            return Err(DIFFERS);
        }
        let known_text = &self.pending_text[self.replayed_text..];
        let new_text = match (text.strip_prefix(known_text), known_text.starts_with(text)) {
            (Some(rest), _) => rest,
            (None, true) => "",
            (None, false) => return Err(DIFFERS),
        };
        let added = Added {
            tokens: new.to_vec(),
            text: new_text.to_owned(),
            is_known: self.is_continued && new.is_empty() && new_text.is_empty(),
        };
        self.pending.extend_from_slice(&added.tokens);
        self.replayed += tokens.len();
        self.pending_text.push_str(&added.text);
        self.replayed_text += text.len();
        if tokens.len() == 1 && !text.is_empty() {
            self.settled.extend(self.pending.drain(..std::mem::take(&mut self.replayed)));
            drop(self.pending_text.drain(..std::mem::take(&mut self.replayed_text)));
        }
        Ok(added)
    }
}

fn read_ids(ids: &RawValue) -> Option<Vec<u32>> {
    serde_json::from_str(ids.get()).ok()
}

#[cfg(test)]
mod tests;
