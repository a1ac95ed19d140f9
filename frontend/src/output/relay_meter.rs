//! Measures a relayed response: metrics and fields of the log line.

use super::json_text::{JsonText, TextMember};
use super::stored_object::StoredObject;
use super::stream_text::StreamText;
use crate::http::RequestContext;
use crate::metrics::ModelMetrics;
use memchr::memchr_iter;
use prometheus::Histogram;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{RelayProgress, RelayReport, ResponseHead};

/// Bytes of text for one estimated token: the mean of English text under byte-pair encodings of 100,000 entries.
pub(crate) const BYTES_PER_TOKEN: usize = 4;

/// What the body of a response consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BodyKind {
    /// A stream of server-sent events.
    Events,
    /// JSON.
    Json,
    /// A stream of JSON texts, each in a line (NDJSON).
    Lines,
    /// Text of another kind.
    Text,
    /// Anything else.
    Other,
}

/// Which text of a response is output, if the engine does not report its tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OutputText {
    /// None: the endpoint generates no text.
    None,
    /// All of it; of JSON that of all strings.
    All,
    /// Of JSON that of the member `text`, unless it is missing or empty: transcriptions repeat it in other members,
    /// word by word. Their streams are read as others.
    Text,
}

/// Measures a relayed response. When it is dropped before [`finish`](Self::finish), the response counts as cancelled,
/// or as failed after [`mark_failed`](Self::mark_failed).
///
/// The times between tokens are those between the parts of the body of a stream, which have the tokens that arrived at
/// the same time. Where the engine does not report the tokens of the output, they are estimated from its text; of a
/// stream they are at least its events, which may have several tokens each (`--stream-interval` of vLLM). Of a response
/// that the client leaves, they are the larger of that and of what the engine has reported so far. So a client cannot
/// keep its output from being counted.
pub(crate) struct RelayMeter {
    context: Arc<RequestContext>,
    metrics: Arc<ModelMetrics>,
    output: OutputText,
    /// Where the object and its output are noted if clients can retrieve it again.
    stored: Option<StoredObject>,
    /// The engine's report counts up to this number of tokens each of prompt and output.
    max_tokens: u32,
    counted: Counted,
    /// What the engine reports before the end.
    progress: Option<Arc<RelayProgress>>,
    /// Times between the parts of the body of a stream; found once, because that takes longer than an observation.
    inter_token: Option<Histogram>,
    /// Arrival of the latest part of the body.
    latest: Option<Instant>,
    ended: bool,
    failed: bool,
}

/// What was counted of a body.
enum Counted {
    Nothing,
    /// An approximate number of events, and their text, unless it is not searched.
    Events(u32, Option<StreamText>),
    Json(JsonText, Option<TextMember>),
    /// A number of lines, the output in their known members, and the text of all members.
    Lines(u32, StreamText, JsonText),
    /// A number of bytes.
    Text(usize),
}

impl RelayMeter {
    /// A meter for a request to a model. The prompt's length is known at the end. `max_tokens`: more than the request
    /// can have, each of prompt and output. `stored`: `None` if the endpoint stores no objects.
    pub(crate) fn new(
        context: Arc<RequestContext>,
        model: &Arc<str>,
        output: OutputText,
        max_tokens: u32,
        stored: Option<StoredObject>,
    ) -> Self {
        let metrics = Arc::clone(context.record_model(model));
        Self {
            context,
            metrics,
            output,
            stored,
            max_tokens,
            counted: Counted::Nothing,
            progress: None,
            inter_token: None,
            latest: None,
            ended: false,
            failed: false,
        }
    }

    /// Records the head of the response, which comes with its first output.
    pub(crate) fn head(&mut self, head: &ResponseHead, kind: BodyKind) {
        self.progress.clone_from(&head.progress);
        if let Some(stored) = &mut self.stored {
            stored.answered(head.server);
        }
        // Only for a key the text is searched, which takes longer than all else here.
        let is_searched = self.output != OutputText::None && self.context.key().is_some();
        self.counted = match kind {
            BodyKind::Events => Counted::Events(0, is_searched.then(StreamText::default)),
            BodyKind::Json if is_searched => {
                let member = (self.output == OutputText::Text).then(TextMember::default);
                Counted::Json(JsonText::default(), member)
            }
            BodyKind::Lines if is_searched => Counted::Lines(0, StreamText::of_lines(), JsonText::default()),
            BodyKind::Text if is_searched => Counted::Text(0),
            BodyKind::Json | BodyKind::Lines | BodyKind::Text | BodyKind::Other => Counted::Nothing,
        };
        let RequestContext { metrics, arrived, .. } = &*self.context;
        let mut log_fields = self.context.log_fields();
        log_fields.worker.clone_from(&head.worker);
        if kind == BodyKind::Events {
            let took = arrived.elapsed().as_secs_f64();
            log_fields.ttft_s = Some(took);
            metrics.first_token.with_label_values(&[&*self.metrics.name]).observe(took);
            self.inter_token = Some(metrics.inter_token.with_label_values(&[&*self.metrics.name]));
        }
    }

    /// Records a part of the body.
    pub(crate) fn body(&mut self, part: &[u8]) {
        self.counted.add(part);
        if let (Some(stored), Some(progress)) = (&mut self.stored, &self.progress) {
            stored.has_id(|| progress.get().response_id);
        }
        let Some(inter_token) = &self.inter_token else { return };
        let now = Instant::now();
        if let Some(before) = self.latest.replace(now) {
            inter_token.observe((now - before).as_secs_f64());
        }
    }

    /// Records the end of the response.
    pub(crate) fn finish(&mut self, report: RelayReport) {
        self.ended = true;
        if let Some(stored) = &mut self.stored {
            stored.has_id(|| report.response_id);
        }
        let is_reported = report.completion_tokens.is_some();
        let report = self.uncounted(report, |counted| report.completion_tokens.unwrap_or(counted));
        let metrics = &self.metrics;
        if let Some(tokens) = report.prompt_tokens {
            self.context.record_prompt(&metrics.name, tokens as usize);
        }
        if let Some(tokens) = report.cached_tokens {
            metrics.cached_tokens.inc_by(tokens.into());
        }
        let completion_tokens = report.completion_tokens.unwrap_or_default();
        // A response without output, such as embeddings, has no length.
        if is_reported && completion_tokens > 0 {
            metrics.generated_tokens.inc_by(completion_tokens.into());
            metrics.output_length.observe(f64::from(completion_tokens));
        }
        if report.failed {
            self.count_finished("error");
        } else {
            metrics.relayed.inc();
        }
        let mut log_fields = self.context.log_fields();
        log_fields.cached_tokens = report.cached_tokens;
        log_fields.completion_tokens = completion_tokens;
    }

    /// What a report says of tokens that were not counted before. `completion_tokens`: those of the output, of what was
    /// counted of the body.
    fn uncounted(&self, report: RelayReport, completion_tokens: impl FnOnce(u32) -> u32) -> RelayReport {
        // A wrong number must not use up the limit of a key for days.
        let at_most = |tokens: u32| tokens.min(self.max_tokens);
        let report = RelayReport {
            prompt_tokens: report.prompt_tokens.map(at_most),
            cached_tokens: report.cached_tokens.map(at_most),
            completion_tokens: Some(at_most(completion_tokens(self.counted.tokens()))),
            ..report
        };
        self.stored.as_ref().map_or(report, |stored| stored.uncounted(report))
    }

    /// Counts a response that did not end as the engine would have ended it.
    fn count_finished(&self, reason: &str) {
        self.context.metrics.finished.with_label_values(&[&*self.metrics.name, reason]).inc();
    }

    /// Marks the response as failed.
    pub(crate) fn mark_failed(&mut self) {
        self.failed = true;
    }
}

impl Drop for RelayMeter {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let reason = if self.failed { "error" } else { "cancelled" };
        self.count_finished(reason);
        let so_far = self.progress.as_ref().map(|progress| progress.get()).unwrap_or_default();
        // Also a stored response is noted: the rest of its output counts when it is retrieved.
        let report = self.uncounted(so_far, |counted| so_far.completion_tokens.unwrap_or_default().max(counted));
        let mut log_fields = self.context.log_fields();
        log_fields.prompt_tokens = report.prompt_tokens.map(|tokens| tokens as usize);
        log_fields.cached_tokens = report.cached_tokens;
        log_fields.completion_tokens = report.completion_tokens.unwrap_or_default();
    }
}

impl Counted {
    fn add(&mut self, part: &[u8]) {
        match self {
            Self::Nothing => {}
            // An event ends with an empty line.
            Self::Events(events, text) => {
                let ends = |at: &usize| matches!(part[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]);
                let more = memchr_iter(b'\n', part).filter(ends).count();
                *events = events.saturating_add(more.max(1) as u32);
                if let Some(text) = text {
                    text.add(part);
                }
            }
            Self::Json(text, member) => {
                text.add(part);
                if let Some(member) = member {
                    member.add(part);
                }
            }
            Self::Lines(lines, text, all) => {
                *lines = lines.saturating_add(memchr_iter(b'\n', part).count() as u32);
                text.add(part);
                all.add(part);
            }
            Self::Text(bytes) => *bytes = bytes.saturating_add(part.len()),
        }
    }

    /// About the number of tokens.
    fn tokens(&self) -> u32 {
        let of_text = |bytes: usize| u32::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX);
        match self {
            Self::Nothing => 0,
            Self::Events(events, text) => text.as_ref().map_or(0, |text| of_text(text.bytes())).max(*events),
            Self::Json(text, member) => {
                let of_member = member.as_ref().map(TextMember::bytes).filter(|bytes| *bytes > 0);
                of_text(of_member.unwrap_or_else(|| text.bytes()))
            }
            Self::Lines(lines, text, all) => match text.bytes() {
                // Lines of another form.
                0 => of_text(all.bytes()),
                bytes => of_text(bytes).max(*lines),
            },
            Self::Text(bytes) => of_text(*bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_transcription_counts_once() {
        for (json, expected) in [
            (
                r#"{"a":["text",{"text":"no"}],"text":"eight\"by\n","words":[{"word":"eight","text":"x"}],"b":"text"}"#,
                9,
            ),
            (r#"{"segments":[{"text":"a"}],"words":["bc"],"text":""}"#, 24),
        ] {
            for cut in 0..json.len() {
                let mut counted = Counted::Json(JsonText::default(), Some(TextMember::default()));
                counted.add(&json.as_bytes()[..cut]);
                counted.add(&json.as_bytes()[cut..]);
                assert_eq!(counted.tokens() as usize, usize::div_ceil(expected, BYTES_PER_TOKEN), "{json} at {cut}");
            }
        }
    }

    #[test]
    fn lines_have_the_tokens_of_their_output() {
        let counted = |line: &str, times: usize| {
            let mut counted = Counted::Lines(0, StreamText::of_lines(), JsonText::default());
            counted.add(line.repeat(times).as_bytes());
            counted.tokens()
        };
        let message = |text: &str| {
            format!("{{\"model\":\"m:latest\",\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}}}}\n")
        };
        assert_eq!(counted(&message("tok"), 100), 100, "at least as many as lines");
        assert_eq!(counted(&message(&"word ".repeat(8)), 2), 20, "a line may have several tokens");
        assert_eq!(counted("{\"model\":\"m:latest\",\"response\":\"a word\",\"done\":false}\n", 4), 6);
        assert_eq!(counted("{\"generated\":\"abc\"}\n", 2), 6, "lines of another form have all strings");
    }

    #[test]
    fn a_stream_has_the_tokens_of_its_events() {
        let mut counted = Counted::Events(0, None);
        for part in ["data: {}\n\ndata: {}\n\n", "data: {", "}\n\n"] {
            counted.add(part.as_bytes());
        }
        assert_eq!(counted.tokens(), 4, "a part has at least one");
        let mut counted = Counted::Events(0, Some(StreamText::default()));
        counted.add("event: a\ndata: {}\n\nevent: b\r\ndata: {}\r\n\r\n".repeat(10).as_bytes());
        assert_eq!(counted.tokens(), 20, "however many lines an event has");
        let chunk = |text: &str| format!("data: {{\"choices\":[{{\"text\":\"{text}\"}}]}}\n\n");
        counted.add(chunk(&"x".repeat(100)).as_bytes());
        assert_eq!(counted.tokens(), 25, "an event may have several tokens");
        assert_eq!(Counted::Text(9).tokens(), 3);
    }
}
