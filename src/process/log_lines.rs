//! The lines of the text log: time, level, the spans around the line, and its fields.
//!
//! A line that has the id of its request as a field of its own is written without its spans, which have the same id.
//!
//! Not here: how fields are written (`log_fields`), and the JSON log, which has no spans.

use std::fmt;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope};

/// The field of lines and spans that names a request.
const REQUEST_ID: &str = "request_id";

/// Writes lines as `tracing_subscriber` does by default, without targets, and each request's id once.
pub struct TextLines;

impl<S, N> FormatEvent<S, N> for TextLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let [dim, bold, plain] = if to.has_ansi_escapes() { ["\x1b[2m", "\x1b[1m", "\x1b[0m"] } else { [""; 3] };
        let colour = if to.has_ansi_escapes() { colour(*event.metadata().level()) } else { "" };
        to.write_str(dim)?;
        SystemTime.format_time(&mut to)?;
        write!(to, "{plain} {colour}{:>5}{plain} ", event.metadata().level().as_str())?;
        if event.metadata().fields().field(REQUEST_ID).is_none() {
            let spans = context.event_scope().into_iter().flat_map(Scope::from_root);
            let mut has_spans = false;
            for span in spans {
                has_spans = true;
                write!(to, "{bold}{}{plain}", span.name())?;
                let extensions = span.extensions();
                if let Some(fields) = extensions.get::<FormattedFields<N>>().filter(|fields| !fields.is_empty()) {
                    write!(to, "{bold}{{{plain}{fields}{bold}}}{plain}")?;
                }
                write!(to, "{dim}:{plain}")?;
            }
            if has_spans {
                to.write_char(' ')?;
            }
        }
        context.format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}

/// The terminal's sequence for the colour of a level.
fn colour(level: Level) -> &'static str {
    match level {
        Level::TRACE => "\x1b[35m",
        Level::DEBUG => "\x1b[34m",
        Level::INFO => "\x1b[32m",
        Level::WARN => "\x1b[33m",
        Level::ERROR => "\x1b[31m",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::log_fields::EscapedFields;
    use std::sync::Arc;

    #[test]
    fn each_line_has_the_id_of_its_request_once() {
        let written = tempfile::NamedTempFile::new().unwrap();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(written.reopen().unwrap()));
        let log = log.fmt_fields(EscapedFields).event_format(TextLines).finish();
        tracing::subscriber::with_default(log, || {
            tracing::warn!("none");
            let _span = tracing::info_span!("request", request_id = %"a-1", endpoint = "/v1/models").entered();
            tracing::info!(request_id = "a-1", status = 400, "rejected");
            let _inner = tracing::info_span!("inner").entered();
            tracing::error!("panic");
        });
        let text = std::fs::read_to_string(written.path()).unwrap();
        let lines: Vec<&str> = text.lines().filter_map(|line| line.split_once(' ')).map(|(_, line)| line).collect();
        assert_eq!(
            lines,
            [
                " WARN none",
                " INFO rejected request_id=a-1 status=400",
                "ERROR request{request_id=a-1 endpoint=/v1/models}:inner: panic",
            ]
        );
    }

    #[test]
    fn a_terminal_gets_colours() {
        let written = tempfile::NamedTempFile::new().unwrap();
        let log = tracing_subscriber::fmt().with_ansi(true).with_writer(Arc::new(written.reopen().unwrap()));
        let log = log.fmt_fields(EscapedFields).event_format(TextLines).finish();
        tracing::subscriber::with_default(log, || tracing::warn!("hot"));
        let text = std::fs::read_to_string(written.path()).unwrap();
        assert!(text.starts_with("\x1b[2m") && text.ends_with("\x1b[0m \x1b[33m WARN\x1b[0m hot\n"), "{text:?}");
    }
}
