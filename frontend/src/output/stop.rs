//! Stop strings, matched across whatever pieces the text comes in. Text that may be the beginning of a stop string is held
//! back until it is known not to be. **Invariant**: what comes out does not depend on how the text was cut.

/// Looks for the stop string whose end comes first; of two that end together, the longer.
#[derive(Debug, Default)]
pub(crate) struct Matcher {
    strings: Vec<String>,
    include: bool,
    held: String,
    /// Which string was found.
    found: Option<usize>,
}

/// What a piece of text did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// No stop string is complete.
    Nothing,
    /// A stop string is complete: the text ends here.
    Stop,
}

impl Matcher {
    /// Stops at any of `strings`, which stays in the text with `include`.
    pub(crate) fn new(strings: Vec<String>, include: bool) -> Self {
        Self { strings, include, held: String::new(), found: None }
    }

    /// The stop string that ended the text.
    pub(crate) fn found(&self) -> Option<&str> {
        Some(self.strings[self.found?].as_str())
    }

    /// Takes a piece of text, and appends to `out` what can no longer be part of a stop string.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) -> Seen {
        if self.strings.is_empty() {
            out.push_str(text);
            return Seen::Nothing;
        }
        self.held.push_str(text);
        let strings = self.strings.iter().enumerate();
        let first = strings.filter_map(|(i, stop)| self.held.find(stop).map(|at| (at + stop.len(), at, i))).min();
        if let Some((end, start, which)) = first {
            self.found = Some(which);
            out.push_str(&self.held[..if self.include { end } else { start }]);
            self.held.clear();
            return Seen::Stop;
        }
        let safe = self.held.len() - self.strings.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        out.extend(self.held.drain(..safe));
        Seen::Nothing
    }

    /// The text has ended: nothing is held back any more.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

/// The length of the longest end of `text` with which `stop` begins, short of all of it.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|n| text.as_bytes().ends_with(&stop.as_bytes()[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests;
