//! The result of a command on standard output, and its notes on standard error.

use std::fmt::Display;
use std::io::{self, Write};

use anyhow::Context;

/// Prints `text`. A reader that closed its end, as `head` does, has read what it wanted: that is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    match print_to_the_end(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
}

/// Writes a line to standard error: progress, or an error.
pub fn note(line: impl Display) {
    progress(format_args!("{line}\n"));
}

/// Writes to standard error, without a line break. A command goes on without a reader, and on a full disk: `eprint!`
/// would panic.
pub fn progress(text: impl Display) {
    // One write, so that lines of several threads are not mixed.
    let _ = io::stderr().write_all(text.to_string().as_bytes());
}

/// A number of things: `1 key`, `2 keys`.
pub fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Prints `text`. It is an error when not all of it could be written, also when the reader closed its end.
pub fn print_to_the_end(text: &str) -> io::Result<()> {
    let mut to = io::stdout();
    to.write_all(text.as_bytes())?;
    to.flush()
}
