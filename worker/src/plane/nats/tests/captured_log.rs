//! The log lines of a test.

use parking_lot::Mutex;
use std::fmt::{Debug, Write};
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Metadata, Subscriber};

/// Lines of the level info and above that this thread has logged since this was made.
pub(super) struct CapturedLog {
    lines: Arc<Mutex<Vec<String>>>,
    _subscriber: DefaultGuard,
}

struct Capture(Arc<Mutex<Vec<String>>>);

#[derive(Default)]
struct Line(String);

impl CapturedLog {
    pub(super) fn start() -> Self {
        let lines = Arc::default();
        let subscriber = tracing::subscriber::set_default(Capture(Arc::clone(&lines)));
        Self { lines, _subscriber: subscriber }
    }

    /// Whether a line contains a text.
    pub(super) fn has(&self, text: &str) -> bool {
        self.lines.lock().iter().any(|line| line.contains(text))
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.lines.lock().clone()
    }
}

impl Subscriber for Capture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.0.lock().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}
