//! The length of the output in a stream of server-sent events, or of JSON lines, which arrives in parts. Nothing is
//! allocated.
//!
//! Counted are the strings with output in the chunks of chat and completions, below `choices`, and in the events of the
//! Responses API and of Anthropic's messages, in and below `delta`. In lines also those of Ollama: in `response` and
//! `thinking`, and below `message`; events repeat the whole output in members of these names. Sound in base64 is no
//! output: the events and chunks of [`SOUND`], and `data` in OpenAI's chunks of chat. Not here: a text that each event
//! repeats from its beginning, as that of SGLang's `/generate`, whose events say their tokens.

use memchr::memchr3;

/// The members that are counted. `delta` is a string in the Responses API, and an object elsewhere.
const CHOICES: &[u8] = b"choices";
const DELTA: &[u8] = b"delta";
/// Those of events, and of lines.
const OF_EVENTS: &[&[u8]] = &[CHOICES, DELTA];
const OF_LINES: &[&[u8]] = &[CHOICES, DELTA, b"message", b"response", b"thinking"];
/// Those of them that may be strings.
const STRINGS: [&[u8]; 3] = [DELTA, b"response", b"thinking"];
/// Members with output below these.
const OUTPUT: [&[u8]; 8] =
    [b"arguments", b"content", b"name", b"partial_json", b"refusal", b"text", b"thinking", b"transcript"];
/// Names of the same member, of which some servers send both.
const REASONING: [&[u8]; 2] = [b"reasoning", b"reasoning_content"];
/// Members of an event, and ends of their values with which its output is sound: events of the Responses API
/// (`response.audio.delta`, `response.output_audio.delta`; their transcripts are text), and vLLM-Omni's chunks of chat.
const SOUND: [(&[u8], &[u8]); 2] = [(b"type", b"audio.delta"), (b"modality", b"audio")];
/// Length of the longest of all these names.
const NAME_MAX: usize = 17;

/// Counts the bytes of output.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says one thing of the byte or the line that is read")]
pub(super) struct StreamText {
    /// Of the lines that have ended.
    output: usize,
    /// Of this line.
    of_line: usize,
    /// This line has sound.
    is_sound: bool,
    /// Bytes of the end in [`SOUND`] with which the value of its member ends so far.
    matched: usize,
    /// By the names of [`REASONING`].
    reasoning: [usize; 2],
    at: At,
    escape: Escape,
    /// Number of open brackets.
    depth: usize,
    /// The latest name, or the beginning of it.
    name: [u8; NAME_MAX],
    /// Length of the name.
    length: usize,
    /// The value of this name comes next, or is read.
    is_value: bool,
    /// It is that of a member of an event or a line that is counted, or below it.
    has_output: bool,
    /// The stream consists of lines.
    is_of_lines: bool,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Default)]
enum At {
    #[default]
    Between,
    Name,
    /// A string, and what it counts for.
    Value(Counter),
}

#[derive(Clone, Copy)]
enum Counter {
    None,
    Output,
    Reasoning(usize),
    /// For nothing, but it may say that the line has sound. By the members of [`SOUND`].
    Sound(usize),
}

/// Where in an escape of a string the next byte is.
#[derive(Clone, Copy, Default)]
enum Escape {
    #[default]
    Outside,
    Begun,
    /// This number of hexadecimal digits is left.
    Hex(u8),
}

impl StreamText {
    /// Counts the output in JSON lines; the default counts that in events.
    pub(super) fn of_lines() -> Self {
        Self { is_of_lines: true, ..Self::default() }
    }

    /// Counts a part of the stream.
    pub(super) fn add(&mut self, mut part: &[u8]) {
        while let Some((byte, rest)) = part.split_first() {
            part = match self.at {
                At::Between => {
                    self.between(*byte);
                    rest
                }
                At::Name => {
                    self.name(*byte);
                    rest
                }
                At::Value(counter) => self.value(part, counter),
            };
        }
    }

    /// The bytes of the output so far.
    pub(super) fn bytes(&self) -> usize {
        let of_line = if self.is_sound { 0 } else { self.of_line };
        self.output.saturating_add(of_line).saturating_add(self.reasoning[0].max(self.reasoning[1]))
    }

    fn between(&mut self, byte: u8) {
        match byte {
            b'"' if self.is_value => (self.at, self.matched) = (At::Value(self.counter()), 0),
            b'"' => (self.at, self.length) = (At::Name, 0),
            b'{' | b'[' => (self.depth, self.is_value) = (self.depth + 1, false),
            b'}' | b']' => (self.depth, self.is_value) = (self.depth.saturating_sub(1), false),
            b':' => {
                self.is_value = true;
                if self.depth == 1 {
                    let counted = if self.is_of_lines { OF_LINES } else { OF_EVENTS };
                    self.has_output = counted.contains(&self.latest_name());
                }
            }
            b',' => self.is_value = false,
            b'\n' => self.end_line(),
            _ => {}
        }
    }

    fn name(&mut self, byte: u8) {
        match (byte, self.escape) {
            // No name that is known has an escape.
            (_, Escape::Begun | Escape::Hex(_)) => (self.escape, self.length) = (Escape::Outside, NAME_MAX + 1),
            (b'"', _) => self.at = At::Between,
            (b'\\', _) => self.escape = Escape::Begun,
            (b'\n', _) => self.end_line(),
            (byte, _) => {
                if let Some(place) = self.name.get_mut(self.length) {
                    *place = byte;
                }
                self.length = self.length.saturating_add(1);
            }
        }
    }

    /// Reads on in a string, up to its end or an escape. Returns the rest of `part`, which is not empty.
    fn value<'a>(&mut self, part: &'a [u8], counter: Counter) -> &'a [u8] {
        match self.escape {
            Escape::Outside => {}
            Escape::Begun if part[0] == b'u' => {
                // Of most characters in UTF-8; two such escapes are one of four bytes.
                self.count(counter, 2);
                self.escape = Escape::Hex(4);
                return &part[1..];
            }
            Escape::Begun => {
                self.count(counter, 1);
                self.escape = Escape::Outside;
                return &part[1..];
            }
            Escape::Hex(left) => {
                self.escape = if left > 1 { Escape::Hex(left - 1) } else { Escape::Outside };
                return &part[1..];
            }
        }
        let end = memchr3(b'"', b'\\', b'\n', part).unwrap_or(part.len());
        self.count(counter, end);
        if let Counter::Sound(of) = counter {
            self.match_end(SOUND[of].1, &part[..end]);
        }
        let Some(byte) = part.get(end) else { return &[] };
        match byte {
            b'"' => {
                self.at = At::Between;
                if let Counter::Sound(of) = counter {
                    self.is_sound |= self.matched == SOUND[of].1.len();
                }
            }
            b'\\' => self.escape = Escape::Begun,
            _ => self.end_line(),
        }
        &part[end + 1..]
    }

    /// What a string counts for that is the value of the latest name.
    fn counter(&self) -> Counter {
        let name = self.latest_name();
        if self.depth == 1
            && let Some(of) = SOUND.iter().position(|(member, _)| *member == name)
        {
            Counter::Sound(of)
        } else if !self.has_output {
            Counter::None
        } else if self.depth == 1 {
            if STRINGS.contains(&name) { Counter::Output } else { Counter::None }
        } else if let Some(of) = REASONING.iter().position(|known| *known == name) {
            Counter::Reasoning(of)
        } else if OUTPUT.contains(&name) {
            Counter::Output
        } else {
            Counter::None
        }
    }

    /// Reads on in a string that may end with `end`, which has its first byte nowhere else but as its last.
    fn match_end(&mut self, end: &[u8], text: &[u8]) {
        for byte in text {
            let is_next = end.get(self.matched) == Some(byte);
            self.matched = if is_next { self.matched + 1 } else { usize::from(end.first() == Some(byte)) };
        }
    }

    fn count(&mut self, counter: Counter, bytes: usize) {
        let counted = match counter {
            Counter::None | Counter::Sound(_) => return,
            Counter::Output => &mut self.of_line,
            Counter::Reasoning(of) => &mut self.reasoning[of],
        };
        *counted = counted.saturating_add(bytes);
    }

    fn latest_name(&self) -> &[u8] {
        self.name.get(..self.length).unwrap_or_default()
    }

    /// An event is in one line. So what follows one that is no JSON is read again.
    fn end_line(&mut self) {
        let Self { reasoning, is_of_lines, .. } = *self;
        let of_line = if self.is_sound { 0 } else { self.of_line };
        let output = self.output.saturating_add(of_line);
        *self = Self { output, reasoning, is_of_lines, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(stream: &str) -> usize {
        let mut whole = StreamText::default();
        whole.add(stream.as_bytes());
        for cut in 0..stream.len() {
            let mut cut_text = StreamText::default();
            cut_text.add(&stream.as_bytes()[..cut]);
            cut_text.add(&stream.as_bytes()[cut..]);
            assert_eq!(cut_text.bytes(), whole.bytes(), "{stream} cut at {cut}");
        }
        whole.bytes()
    }

    #[test]
    fn the_output_of_every_api_is_counted() {
        for (stream, expected) in [
            (r#"data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"hello"}}]}"#, 5),
            (r#"data: {"choices":[{"text":"hello ","index":0},{"index":1,"text":"you"}],"model":"content"}"#, 9),
            (r#"data: {"choices":[{"delta":{"reasoning":"abc","reasoning_content":"abc","content":null}}]}"#, 3),
            (r#"data: {"choices":[{"delta":{"tool_calls":[{"id":"call","type":"function"}]}}]}"#, 0),
            (r#"data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"{\"a\""}}]}}]}"#, 5),
            (r#"data:{"delta":"hello","type":"response.output_text.delta","item_id":"text","logprobs":[]}"#, 5),
            (r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hello"}}"#, 5),
            (r#"data: {"delta":{"type":"input_json_delta","partial_json":"{\"a\":"}}"#, 5),
        ] {
            assert_eq!(bytes(stream), expected, "{stream}");
        }
    }

    #[test]
    fn sound_in_base64_is_not_counted() {
        for (event, expected) in [
            (r#"{"type":"response.audio.delta","sequence_number":1,"delta":"UklGRg=="}"#, 0),
            (r#"{"delta":"UklGRg==","sequence_number":1,"type":"response.output_audio.delta"}"#, 0),
            (r#"{"delta":"hello","sequence_number":1,"type":"response.audio.transcript.delta"}"#, 5),
            (r#"{"delta":"hello","sequence_number":1,"type":"response.output_audio_transcript.delta"}"#, 5),
            (r#"{"choices":[{"delta":{"audio":{"id":"x","data":"UklGRg==","transcript":"hello"}}}]}"#, 5),
            (r#"{"choices":[{"delta":{"content":"UklGRg=="}}],"model":"m","modality":"audio"}"#, 0),
            (r#"{"choices":[{"delta":{"content":"hello"}}],"model":"m","modality":"text"}"#, 5),
            (r#"{"choices":[{"delta":{"content":"hello","type":"response.audio.delta"}}]}"#, 5),
        ] {
            let stream = format!("event: x\ndata: {event}\n\n").repeat(2);
            assert_eq!(bytes(&stream), 2 * expected, "{event}");
        }
    }

    #[test]
    fn what_is_no_output_is_not_counted() {
        for stream in [
            r#"data: {"text":"the whole text so far","meta_info":{"completion_tokens":5}}"#,
            r#"data: {"type":"response.output_text.done","text":"hello","item_id":"x"}"#,
            r#"data: {"type":"response.completed","response":{"output":[{"content":[{"text":"hello"}]}]}}"#,
            r#"data: {"choices":[{"logprobs":{"content":[{"token":"hello","top_logprobs":[{"token":"x"}]}]}}]}"#,
            r#"data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":"stop"}],"text":"hello"}"#,
            r#"data: {"ch\u006fices":[{"text":"hello"}],"a_name_longer_than_all":{"text":"hello"}}"#,
            "event: delta\n: \"delta\":\"a comment\"\ndata: [DONE]\n\n",
        ] {
            assert_eq!(bytes(stream), 0, "{stream}");
        }
    }

    #[test]
    fn the_output_of_ollama_is_counted_in_lines_only() {
        for (line, expected) in [
            (r#"{"model":"m","message":{"role":"assistant","content":"hello","thinking":"so"},"done":false}"#, 7),
            (r#"{"model":"m","created_at":"2026","response":"hello","thinking":"so","done":false}"#, 7),
            (r#"{"message":{"content":"","tool_calls":[{"function":{"name":"f","arguments":{}}}]}}"#, 1),
            (r#"{"choices":[{"text":"hello"}]}"#, 5),
            (r#"{"done":true,"done_reason":"stop"}"#, 0),
        ] {
            let mut text = StreamText::of_lines();
            text.add(format!("{line}\n{line}\n").as_bytes());
            assert_eq!(text.bytes(), 2 * expected, "{line}");
        }
        let created = r#"data: {"type":"response.created","response":{"instructions":"hello","content":"hello"}}"#;
        let start = r#"data: {"type":"message_start","message":{"content":"hello"},"thinking":"so"}"#;
        assert_eq!([bytes(created), bytes(start)], [0, 0]);
    }

    #[test]
    fn escapes_count_as_what_they_stand_for() {
        assert_eq!(bytes(r#"data: {"delta":"\n\"\\\u00e9\ud83d\ude82x"}"#), 1 + 1 + 1 + 2 + 4 + 1);
    }

    #[test]
    fn an_event_that_is_no_json_does_not_hide_the_next() {
        let broken = "data: {\"choices\":[{\"text\":\"ab\n\ndata: {\"choices\":[{\"text\":\"cde\"}]}\r\n\r\n";
        assert_eq!(bytes(broken), 5);
    }
}
