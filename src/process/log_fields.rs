//! The fields of a line of the text log.
//!
//! **A line of the log is one line, whatever it says.** Messages and fields have text of clients and servers, such as
//! names of models. Its control characters are escaped, so it neither begins a line that looks like one of this program
//! nor sends commands to the terminal of a reader.
//!
//! **An id or a name looks the same in each line**, whether its field was recorded as text or by its `Display`: without
//! quotes, so that one pattern finds all lines. Text with a space, a quote or a backslash has quotes. `suppressed` is
//! left out where it is 0.
//!
//! Not here: the JSON log, whose format escapes control characters.

use std::error::Error;
use std::fmt::{self, Debug, Write};
use tracing::field::{Field, Visit};
use tracing_subscriber::field::{MakeVisitor, VisitFmt, VisitOutput};
use tracing_subscriber::fmt::format::{DefaultVisitor, Writer};

/// The only field that may have several lines: it has no text from outside, and is read by people.
const BACKTRACE: &str = "backtrace";

/// The number of lines that were left out since the one before.
const SUPPRESSED: &str = "suppressed";

/// Writes fields as `tracing_subscriber` does by default, with escaped control characters.
pub struct EscapedFields;

/// Writes the fields of one line.
pub struct EscapedVisitor<'a>(DefaultVisitor<'a>);

impl<'a> MakeVisitor<Writer<'a>> for EscapedFields {
    type Visitor = EscapedVisitor<'a>;

    fn make_visitor(&self, writer: Writer<'a>) -> EscapedVisitor<'a> {
        EscapedVisitor(DefaultVisitor::new(writer, true))
    }
}

impl Visit for EscapedVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == BACKTRACE {
            self.0.record_debug(field, value);
        } else {
            self.0.record_debug(field, &Escaped(value));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" || is_one_word(value) {
            self.record_debug(field, &format_args!("{value}"));
        } else {
            // In quotes and escaped.
            self.record_debug(field, &value);
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if value > 0 || field.name() != SUPPRESSED {
            self.record_debug(field, &value);
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        let (mut text, mut next) = (value.to_string(), value.source());
        while let Some(cause) = next {
            text = format!("{text}: {cause}");
            next = cause.source();
        }
        self.record_debug(field, &format_args!("{text}"));
    }
}

impl VisitOutput<fmt::Result> for EscapedVisitor<'_> {
    fn finish(self) -> fmt::Result {
        self.0.finish()
    }
}

impl VisitFmt for EscapedVisitor<'_> {
    fn writer(&mut self) -> &mut dyn Write {
        self.0.writer()
    }
}

/// Whether a text needs no quotes to be separate from what follows.
fn is_one_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(|character: char| character.is_whitespace() || "\"'\\".contains(character))
}

/// Whether a character controls the terminal: control characters, and those that change the direction of text
/// (bidirectional formatting), with which a line can show other words than it has.
pub fn controls_terminal(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A value whose text has no characters that control the terminal.
struct Escaped<'a>(&'a dyn Debug);

impl Debug for Escaped<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(formatter), "{:?}", self.0)
    }
}

/// Escapes the characters that control the terminal.
struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(controls_terminal) {
            match part.chars().next_back().filter(|last| controls_terminal(*last)) {
                Some(last) => {
                    self.0.write_str(part.strip_suffix(last).unwrap_or_default())?;
                    write!(self.0, "{}", last.escape_default())?;
                }
                None => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Read};
    use std::sync::Mutex;

    #[test]
    fn a_name_has_no_quotes_however_it_is_recorded() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = tracing_subscriber::fmt().with_ansi(false).with_target(false).without_time();
        let log = log.fmt_fields(EscapedFields).with_writer(Mutex::new(writer)).finish();
        tracing::subscriber::with_default(log, || {
            tracing::info!(request_id = "a-1", worker = %"w3", error = "no room", suppressed = 0_u64, "one");
            tracing::info!(request_id = %"a-1", worker = Some("w3"), suppressed = 7_u64, read = 0_u64, "two");
        });
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let first = "INFO one request_id=a-1 worker=w3 error=\"no room\"";
        assert_eq!(lines, [first, "INFO two request_id=a-1 worker=w3 suppressed=7 read=0"]);
    }

    #[test]
    fn no_text_ends_a_line_or_controls_the_terminal() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = tracing_subscriber::fmt().with_ansi(false).with_target(false).without_time();
        let log = log.fmt_fields(EscapedFields).with_writer(Mutex::new(writer)).finish();
        let foreign = "org/ü\n2026 INFO forged\r\t\u{1b}[31m\u{9b}\u{202e}";
        tracing::subscriber::with_default(log, || {
            let _span = tracing::info_span!("request", name = %foreign).entered();
            tracing::info!(model = %foreign, list = ?[foreign], text = foreign, number = 7, "message {foreign}");
            let cause = io::Error::other(foreign);
            let error: &(dyn Error + 'static) = &io::Error::other(cause);
            tracing::info!(error, "failed");
        });
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert!(text.chars().all(|character| character == '\n' || !controls_terminal(character)), "{text:?}");
        let lines: Vec<&str> = text.lines().collect();
        let [line, failed] = &lines[..] else { panic!("{text:?}") };
        let escaped = r"org/ü\n2026 INFO forged\r\t\u{1b}[31m\u{9b}\u{202e}";
        for part in [
            format!("request{{name={escaped}}}: message {escaped} model={escaped} "),
            format!("list=[\"{escaped}\"] text=\"{escaped}\" number=7"),
        ] {
            assert!(line.contains(&part), "{line}");
        }
        assert!(failed.contains(&format!("error={escaped}")), "{failed}");
    }
}
