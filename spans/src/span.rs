//! A span: a guard with attributes, which ends when it is dropped.

use crate::context::Context;
use crate::id::{SpanId, TraceId};
use std::borrow::Cow;
use std::sync::Arc;
use tokio::time::Instant;

/// A part of the work for a request. Dropping it ends it, and queues it for export if its trace is recorded.
#[derive(Default)]
#[must_use = "dropping it ends the span"]
pub struct Span {
    context: Context,
    /// `None`: it is not recorded.
    recording: Option<Box<Recording>>,
}

struct Recording {
    parent: Option<SpanId>,
    name: Cow<'static, str>,
    kind: Kind,
    since: Instant,
    until: Option<Instant>,
    attributes: Vec<(&'static str, Value)>,
    events: Vec<(&'static str, Instant)>,
    error: Option<String>,
}

/// The role of a span, as OpenTelemetry numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Work within the process.
    Internal = 1,
    /// The handling of a request of another process.
    Server = 2,
    /// A request to another process.
    Client = 3,
}

/// The value of an attribute.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// A text.
    Text(String),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Several texts.
    Texts(Vec<String>),
}

/// A span that has ended.
#[derive(Clone, PartialEq, Debug)]
pub struct EndedSpan {
    /// The trace.
    pub trace: TraceId,
    /// The span itself.
    pub id: SpanId,
    /// The span that it is a part of; `None` for the first one of a trace.
    pub parent: Option<SpanId>,
    /// `tracestate` of the trace.
    pub tracestate: Option<Box<str>>,
    /// What was done.
    pub name: Cow<'static, str>,
    /// The role.
    pub kind: Kind,
    /// Start in nanoseconds since 1970.
    pub start: u64,
    /// End in nanoseconds since 1970.
    pub end: u64,
    /// Attributes, in the order in which they were set.
    pub attributes: Vec<(&'static str, Value)>,
    /// What happened in between.
    pub events: Vec<Event>,
    /// Why it failed.
    pub error: Option<String>,
}

/// Something that happened during a span.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// What happened.
    pub name: &'static str,
    /// When, in nanoseconds since 1970.
    pub time: u64,
}

/// Longest text of an attribute in bytes. Names of models and errors come from clients and servers.
const MAX_TEXT: usize = 512;

/// Events of one span. A sequence that is preempted more often says nothing new.
const MAX_EVENTS: usize = 32;

impl Span {
    pub(crate) fn unrecorded(context: Context) -> Self {
        Self { context, recording: None }
    }

    /// A span whose own ids are those of `context`.
    pub(crate) fn recorded(
        context: Context,
        parent: Option<SpanId>,
        name: &'static str,
        kind: Kind,
        since: Instant,
    ) -> Self {
        let is_admitted = context.trace().is_some_and(crate::context::Trace::admit);
        let (until, attributes, events, error) = (None, Vec::new(), Vec::new(), None);
        let recording = Recording { parent, name: name.into(), kind, since, until, attributes, events, error };
        Self { context, recording: is_admitted.then(|| Box::new(recording)) }
    }

    /// Where the parts of this work belong.
    pub fn context(&self) -> Context {
        self.context.clone()
    }

    /// The id of the trace, if it is recorded: for log lines.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.context.trace_id()
    }

    /// Whether it is recorded: what only its attributes need is not computed for others.
    pub fn is_recorded(&self) -> bool {
        self.recording.is_some()
    }

    /// Sets an attribute. To be set once.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(recording) = &mut self.recording {
            recording.attributes.push((key, value.into()));
        }
    }

    /// Sets an attribute that may be absent.
    pub fn set_some(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.set(key, value);
        }
    }

    /// Names the span otherwise.
    pub fn rename(&mut self, name: impl FnOnce() -> String) {
        if let Some(recording) = &mut self.recording {
            recording.name = name().into();
        }
    }

    /// Records that something happens now.
    pub fn event(&mut self, name: &'static str) {
        if let Some(recording) = self.recording.as_mut().filter(|recording| recording.events.len() < MAX_EVENTS) {
            recording.events.push((name, Instant::now()));
        }
    }

    /// Records that the work failed.
    pub fn fail(&mut self, why: &dyn std::fmt::Display) {
        if let Some(recording) = &mut self.recording {
            recording.error = Some(limited(&why.to_string()));
        }
    }

    /// Ends it at a time before now.
    pub fn end_at(mut self, until: Instant) {
        if let Some(recording) = &mut self.recording {
            recording.until = Some(until);
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(recording) = self.recording.take() else { return };
        let (Some(trace), Some((id, span))) = (self.context.trace(), self.context.ids()) else { return };
        let Recording { parent, name, kind, since, until, attributes, events, error } = *recording;
        let event = |(name, at)| Event { name, time: trace.unix_nanos(at) };
        let start = trace.unix_nanos(since);
        trace.tracer().queue(EndedSpan {
            trace: id,
            id: span,
            parent,
            tracestate: self.context.tracestate().map(Into::into),
            name,
            kind,
            start,
            end: trace.unix_nanos(until.unwrap_or_else(Instant::now)).max(start),
            attributes,
            events: events.into_iter().map(event).collect(),
            error,
        });
    }
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Span").field("context", &self.context).finish_non_exhaustive()
    }
}

/// The beginning of a text, within the limit.
fn limited(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(limited(text))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<&Arc<str>> for Value {
    fn from(text: &Arc<str>) -> Self {
        (&**text).into()
    }
}

impl From<Vec<String>> for Value {
    fn from(texts: Vec<String>) -> Self {
        Self::Texts(texts.iter().map(|text| limited(text)).collect())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Int(number.into())
    }
}

impl From<u16> for Value {
    fn from(number: u16) -> Self {
        Self::Int(number.into())
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        (number as u64).into()
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}
