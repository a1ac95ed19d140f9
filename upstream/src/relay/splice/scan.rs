//! A cursor over JSON text that finds where values end.

use super::{MAX_DEPTH, SpliceError};
use std::ops::Range;

pub(super) struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Skips whitespace, then takes `byte` if it is next.
    pub(super) fn accept(&mut self, byte: u8) -> bool {
        let next = self.peek() == Some(byte);
        self.at += usize::from(next);
        next
    }

    pub(super) fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), SpliceError> {
        if self.accept(byte) { Ok(()) } else { Err(self.error(expected)) }
    }

    /// Nothing but whitespace may follow.
    pub(super) fn end(&mut self) -> Result<(), SpliceError> {
        if self.peek().is_none() { Ok(()) } else { Err(self.error("the end")) }
    }

    /// Takes a string and returns what is between its quotes.
    pub(super) fn string(&mut self, expected: &'static str) -> Result<Range<usize>, SpliceError> {
        self.expect(b'"', expected)?;
        let start = self.at;
        self.rest_of_string()?;
        Ok(start..self.at - 1)
    }

    /// Takes a value of any kind.
    pub(super) fn value(&mut self) -> Result<Range<usize>, SpliceError> {
        let first = self.peek();
        let start = self.at;
        match first {
            Some(b'"') => {
                self.at += 1;
                self.rest_of_string()?;
            }
            Some(b'{' | b'[') => self.nested()?,
            _ => {
                // A number or a literal. Python's parser accepts `NaN` and `-Infinity`, so the words are left to the
                // engine.
                let scalar = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
                self.at += self.text[start..].iter().take_while(|byte| scalar(byte)).count();
                if self.at == start {
                    return Err(self.error("a value"));
                }
            }
        }
        Ok(start..self.at)
    }

    /// Takes an array or an object by matching brackets. The kinds of the open brackets are a stack of bits.
    fn nested(&mut self) -> Result<(), SpliceError> {
        let mut objects = [0_u64; MAX_DEPTH / 64];
        let mut depth = 0;
        while let Some(&byte) = self.text.get(self.at) {
            match byte {
                b'"' => {
                    self.at += 1;
                    self.rest_of_string()?;
                    continue;
                }
                b'{' | b'[' => {
                    if depth == MAX_DEPTH {
                        return Err(SpliceError::TooDeep { at: self.at });
                    }
                    let bit = 1 << (depth % 64);
                    let word = &mut objects[depth / 64];
                    *word = if byte == b'{' { *word | bit } else { *word & !bit };
                    depth += 1;
                }
                b'}' | b']' => {
                    // Entered at a bracket, left at depth 0: the depth here is never 0.
                    depth -= 1;
                    let object = objects[depth / 64] >> (depth % 64) & 1 == 1;
                    if object != (byte == b'}') {
                        return Err(self.error("the other closing bracket"));
                    }
                    if depth == 0 {
                        self.at += 1;
                        return Ok(());
                    }
                }
                _ => {}
            }
            self.at += 1;
        }
        Err(self.error("a closing bracket"))
    }

    /// Takes a string after its opening quote.
    fn rest_of_string(&mut self) -> Result<(), SpliceError> {
        loop {
            let Some(next) = memchr::memchr2(b'"', b'\\', &self.text[self.at..]) else {
                self.at = self.text.len();
                return Err(self.error("a closing quote"));
            };
            self.at += next;
            if self.text[self.at] == b'"' {
                self.at += 1;
                return Ok(());
            }
            // The escaped byte may be a quote. If the text ends here, the next search starts at the end and fails.
            self.at = (self.at + 2).min(self.text.len());
        }
    }

    fn peek(&mut self) -> Option<u8> {
        let space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        while let Some(byte) = self.text.get(self.at) {
            if !space(byte) {
                return Some(*byte);
            }
            self.at += 1;
        }
        None
    }

    fn error(&self, expected: &'static str) -> SpliceError {
        SpliceError::Syntax { at: self.at, expected }
    }
}

/// Whether `written`, a JSON string without its quotes, is `name`.
pub(super) fn names(written: &[u8], name: &str) -> bool {
    after(written, name).is_some_and(<[u8]>::is_empty)
}

/// Whether `written`, a JSON string without its quotes, starts with `prefix`.
pub(super) fn name_starts_with(written: &[u8], prefix: &str) -> bool {
    after(written, prefix).is_some()
}

/// What follows `prefix`, which is ASCII, in `written`.
fn after<'a>(mut written: &'a [u8], prefix: &str) -> Option<&'a [u8]> {
    for expected in prefix.bytes() {
        let (byte, rest) = decoded(written)?;
        if byte != expected {
            return None;
        }
        written = rest;
    }
    Some(written)
}

/// The first character of a JSON string and the rest. `None` at the end, and for an escape that is no ASCII character.
fn decoded(written: &[u8]) -> Option<(u8, &[u8])> {
    let (&byte, rest) = written.split_first()?;
    if byte != b'\\' {
        return Some((byte, rest));
    }
    let (&escape, rest) = rest.split_first()?;
    let byte = match escape {
        b'b' => 8,
        b'f' => 12,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'u' => {
            let (digits, rest) = rest.split_at_checked(4)?;
            let value = |value: u32, digit: &u8| Some(value * 16 + char::from(*digit).to_digit(16)?);
            let unit = digits.iter().try_fold(0, value)?;
            return Some((u8::try_from(unit).ok().filter(u8::is_ascii)?, rest));
        }
        other => other,
    };
    Some((byte, rest))
}
