//! Finds the usage in JSON that arrives in parts: an answer that is no stream, or an event that is too long to be kept.
//!
//! ```text
//! {"usage":{"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}    OpenAI, Anthropic
//! {"meta_info":{"completion_tokens":7}}                                            SGLang's /generate
//! [{"meta_info":{"completion_tokens":7}},{"meta_info":{"completion_tokens":9}}]    the same for a batch
//! {"response":{"usage":{"output_tokens":7}}}                                       an event of Responses
//! {"usage":{"tokens":{"output_tokens":7},"cached_tokens":4}}                       Cohere's chat
//! {"done":true,"prompt_eval_count":9,"eval_count":7}                               the last line of Ollama's
//! ```
//!
//! **Only members at these places are read.** The same names elsewhere, such as in a part of the request that an answer
//! repeats, and the same words as text, are skipped. Only the latest name and the latest number are kept, so the length
//! of the answer does not matter.
//!
//! Not here: validation. Of JSON that is malformed, the usage may be missed.

use super::wire::{WireUsage, number};
use super::{Usage, response_id};
use memchr::{memchr2, memchr3};

/// Maximum length of a name or a number that is compared or read. The longest name of a usage has 27 bytes.
const WORD_MAX: usize = 64;
/// Maximum number of open brackets that are looked into: batch, answer, response, usage, details.
const LEVELS_MAX: usize = 5;

/// Finds the usage in JSON that arrives in parts.
#[derive(Debug)]
pub(in crate::relay) struct UsageScanner {
    state: State,
    /// What the open brackets are, from the outermost. Of these are `depth`.
    levels: [Level; LEVELS_MAX],
    depth: usize,
    /// The latest string or number.
    word: Word,
    /// The member whose value comes next, or is read.
    name: Word,
    /// A colon was read, but not the end of the value that follows it.
    is_value: bool,
    /// The object that is being read.
    reading: WireUsage,
    /// Those of the answer that is being read.
    usage: Option<Usage>,
    meta_info: Option<Usage>,
    /// Ollama's, which are members of the answer.
    eval_counts: Usage,
    index: Option<u64>,
    response_id: Option<u64>,
    /// The answer says that it has no output of its own to count: it is still computed in the background, or has ended
    /// before its output was whole.
    is_unfinished: bool,
    found: Found,
}

/// What was found in an answer.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::relay) struct Found {
    /// The usage; for a batch that of all its items.
    pub(in crate::relay) usage: Option<Usage>,
    /// The position of the item in its batch, if the usage is that of one item.
    pub(in crate::relay) item: Option<u64>,
    /// A hash of the id of the response.
    pub(in crate::relay) response_id: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Nothing but white space was read.
    Start,
    Between,
    String {
        is_escaped: bool,
    },
    /// A number or a literal.
    Scalar,
    /// Within an array or an object that is not looked into.
    Skipping(Skipped),
    /// The text is no JSON object or array.
    Unread,
}

/// An array or an object that is not looked into. Only brackets of its own kind are counted: in valid JSON those of the
/// other kind are closed before it is.
#[derive(Clone, Copy, Debug)]
struct Skipped {
    open: u8,
    close: u8,
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Level {
    Batch,
    Answer,
    /// The answer within an event.
    Response,
    Usage,
    MetaInfo,
    Details,
    /// Cohere's numbers of tokens.
    Tokens,
}

/// The beginning of a string or a number.
#[derive(Clone, Copy, Debug)]
struct Word {
    bytes: [u8; WORD_MAX],
    /// Of the whole string or number.
    length: usize,
}

impl UsageScanner {
    /// A scanner for an answer that is no stream.
    pub(in crate::relay) fn of_answer() -> Self {
        Self {
            state: State::Start,
            levels: [Level::Answer; LEVELS_MAX],
            depth: 0,
            word: Word::EMPTY,
            name: Word::EMPTY,
            is_value: false,
            reading: WireUsage::default(),
            usage: None,
            meta_info: None,
            eval_counts: Usage::default(),
            index: None,
            response_id: None,
            is_unfinished: false,
            found: Found::default(),
        }
    }

    /// A scanner for the bytes of events, of which what is no JSON object is skipped.
    pub(in crate::relay) fn of_events() -> Self {
        Self { state: State::Between, ..Self::of_answer() }
    }

    /// Reads the next part.
    pub(in crate::relay) fn push(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let read = match &mut self.state {
                State::Start => self.start(part),
                State::Between => self.between(part[0]),
                State::String { is_escaped } => {
                    let (read, has_ended) = rest_of_string(part, is_escaped);
                    self.word.push(&part[..read - usize::from(has_ended)]);
                    if has_ended {
                        self.state = State::Between;
                        self.end_string();
                    }
                    read
                }
                State::Scalar => self.scalar(part),
                State::Skipping(skipped) => {
                    let read = skipped.skip(part);
                    if skipped.depth == 0 {
                        self.state = State::Between;
                    }
                    read
                }
                State::Unread => return,
            };
            part = &part[read..];
        }
    }

    /// What was found in the answers that have ended since this was called last.
    pub(in crate::relay) fn take(&mut self) -> Found {
        std::mem::take(&mut self.found)
    }

    /// What was found up to here, also in an answer that has not ended.
    pub(in crate::relay) fn so_far(&self) -> Found {
        let latest = self.usage.or(self.meta_info).or(self.eval_counts());
        let usage = match (self.found.usage, latest) {
            (Some(before), Some(latest)) => Some(before.plus_item(latest)),
            (before, latest) => before.or(latest),
        };
        Found { usage, item: None, response_id: self.response_id.or(self.found.response_id) }
    }

    fn start(&mut self, part: &[u8]) -> usize {
        let Some(at) = part.iter().position(|byte| !byte.is_ascii_whitespace()) else { return part.len() };
        self.state = if matches!(part[at], b'{' | b'[') { State::Between } else { State::Unread };
        at
    }

    fn between(&mut self, byte: u8) -> usize {
        match byte {
            b'"' => {
                self.word = Word::EMPTY;
                self.state = State::String { is_escaped: false };
            }
            b':' => (self.name, self.is_value) = (self.word, true),
            b',' => self.is_value = false,
            b'{' | b'[' => self.open(byte),
            b'}' | b']' => self.close(),
            byte if byte.is_ascii_whitespace() => {}
            _ => {
                self.word = Word::EMPTY;
                self.word.push(&[byte]);
                self.state = State::Scalar;
            }
        }
        1
    }

    fn end_string(&mut self) {
        let text = self.word.text();
        match (self.level().filter(|_| self.is_value), self.name.text()) {
            (Some(Level::Answer | Level::Response), b"id") if !text.is_empty() => {
                self.response_id = Some(response_id(text));
            }
            (Some(Level::Answer), b"status") => {
                let unfinished: [&[u8]; 5] = [b"queued", b"in_progress", b"cancelled", b"failed", b"incomplete"];
                self.is_unfinished = unfinished.contains(&text);
            }
            _ => {}
        }
    }

    fn scalar(&mut self, part: &[u8]) -> usize {
        let ends = |byte: &u8| byte.is_ascii_whitespace() || b",:\"{}[]".contains(byte);
        let length = part.iter().position(ends);
        self.word.push(&part[..length.unwrap_or(part.len())]);
        let Some(length) = length else { return part.len() };
        self.state = State::Between;
        let (name, value) = (self.name.text(), self.word.text());
        match self.level().filter(|_| self.is_value) {
            Some(Level::Usage | Level::MetaInfo | Level::Tokens) => self.reading.set(name, value),
            Some(Level::Details) if name == b"cached_tokens" => {
                self.reading.cached_tokens = number(value).or(self.reading.cached_tokens);
            }
            Some(Level::Answer) => match name {
                b"index" => self.index = number(value),
                b"prompt_eval_count" => self.eval_counts.prompt_tokens = number(value),
                b"eval_count" => self.eval_counts.completion_tokens = number(value),
                _ => {}
            },
            _ => {}
        }
        length
    }

    fn open(&mut self, bracket: u8) {
        let name: &[u8] = if self.is_value { self.name.text() } else { b"" };
        self.is_value = false;
        let level = match (self.level(), bracket, name) {
            (None, b'[', _) => Level::Batch,
            (None | Some(Level::Batch), b'{', _) => {
                (self.usage, self.meta_info, self.index) = (None, None, None);
                self.eval_counts = Usage::default();
                (self.response_id, self.is_unfinished) = (None, false);
                Level::Answer
            }
            (Some(Level::Answer), b'{', b"response") => Level::Response,
            (Some(Level::Answer | Level::Response), b'{', b"usage") => {
                self.reading = WireUsage::default();
                Level::Usage
            }
            (Some(Level::Answer), b'{', b"meta_info") => {
                self.reading = WireUsage::default();
                Level::MetaInfo
            }
            (Some(Level::Usage | Level::MetaInfo), b'{', b"prompt_tokens_details" | b"input_tokens_details") => {
                Level::Details
            }
            (Some(Level::Usage), b'{', b"tokens") => Level::Tokens,
            _ => {
                self.state = State::Skipping(Skipped::opened_by(bracket));
                return;
            }
        };
        self.levels[self.depth] = level;
        self.depth += 1;
    }

    fn close(&mut self) {
        self.is_value = false;
        let Some(closed) = self.level() else { return };
        self.depth -= 1;
        match closed {
            Level::Usage => self.usage = Some(std::mem::take(&mut self.reading).into()),
            Level::MetaInfo => self.meta_info = Some(std::mem::take(&mut self.reading).into()),
            Level::Answer => self.end_answer(),
            Level::Batch | Level::Response | Level::Details | Level::Tokens => {}
        }
    }

    fn end_answer(&mut self) {
        let meta_info = self.meta_info.take().map(|usage| (usage, Some(self.index.take().unwrap_or_default())));
        let unfinished = self.is_unfinished.then(|| (Usage { completion_tokens: Some(0), ..Usage::default() }, None));
        let eval_counts = self.eval_counts().map(|usage| (usage, None));
        self.eval_counts = Usage::default();
        let reported = self.usage.take().map(|usage| (usage, None)).or(meta_info).or(eval_counts).or(unfinished);
        self.found.response_id = self.response_id;
        let Some((usage, item)) = reported else { return };
        (self.found.usage, self.found.item) = match self.found.usage.filter(|_| self.level() == Some(Level::Batch)) {
            Some(before) => (Some(before.plus_item(usage)), None),
            None => (Some(usage), item),
        };
    }

    /// Ollama's counts, if the answer has one. It leaves out a count of 0.
    fn eval_counts(&self) -> Option<Usage> {
        let Usage { prompt_tokens, completion_tokens, .. } = self.eval_counts;
        let usage = Usage { completion_tokens: completion_tokens.or(Some(0)), ..self.eval_counts };
        prompt_tokens.or(completion_tokens).map(|_| usage)
    }

    /// What the innermost open bracket is.
    fn level(&self) -> Option<Level> {
        self.depth.checked_sub(1).map(|at| self.levels[at])
    }
}

impl Skipped {
    fn opened_by(bracket: u8) -> Self {
        let close = if bracket == b'{' { b'}' } else { b']' };
        Self { open: bracket, close, depth: 1, is_in_string: false, is_escaped: false }
    }

    /// The number of bytes that are read, up to the closing bracket.
    fn skip(&mut self, part: &[u8]) -> usize {
        let mut at = 0;
        while at < part.len() {
            if self.is_in_string {
                let (read, has_ended) = rest_of_string(&part[at..], &mut self.is_escaped);
                self.is_in_string = !has_ended;
                at += read;
                continue;
            }
            let Some(next) = memchr3(b'"', self.open, self.close, &part[at..]) else { return part.len() };
            at += next + 1;
            match part[at - 1] {
                b'"' => self.is_in_string = true,
                byte if byte == self.open => self.depth += 1,
                _ => self.depth -= 1,
            }
            if self.depth == 0 {
                return at;
            }
        }
        at
    }
}

impl Word {
    const EMPTY: Self = Self { bytes: [0; WORD_MAX], length: 0 };

    fn push(&mut self, part: &[u8]) {
        if let Some(free) = self.bytes.get_mut(self.length..) {
            let kept = part.len().min(free.len());
            free[..kept].copy_from_slice(&part[..kept]);
        }
        self.length = self.length.saturating_add(part.len());
    }

    /// As written. Empty if it is too long.
    fn text(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// The number of bytes of a string, up to its closing quote or all, and whether that quote is among them. `is_escaped`:
/// a backslash precedes the next byte.
fn rest_of_string(part: &[u8], is_escaped: &mut bool) -> (usize, bool) {
    let mut at = usize::from(std::mem::take(is_escaped));
    while let Some(next) = memchr2(b'"', b'\\', &part[at..]) {
        at += next;
        if part[at] == b'"' {
            return (at + 1, true);
        }
        at += 2;
        if at > part.len() {
            *is_escaped = true;
            break;
        }
    }
    (part.len(), false)
}

#[cfg(test)]
mod tests;
