//! The result of a command on standard output.

use std::io::{self, Write};

use anyhow::Context;

/// Prints `text`. A reader that closed its end, as `head` does, has read what it wanted: that is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    match print_to_the_end(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
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
