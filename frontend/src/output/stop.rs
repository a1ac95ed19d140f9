//! Matches stop strings in text that arrives in pieces. Text that may begin a stop string is withheld until it cannot.
//!
//! **Invariant**: the output does not depend on how the text was split into pieces.

/// Finds the stop string that ends first; of two that end at the same position, the longer one.
#[derive(Debug, Default)]
pub(crate) struct Matcher {
    strings: Vec<String>,
    include: bool,
    withheld: String,
    /// Index of the string that was found.
    found: Option<usize>,
}

/// The state after a piece of text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StopState {
    /// No stop string is complete.
    Continue,
    /// A stop string is complete: the text ends here.
    Stop,
}

impl Matcher {
    /// A matcher for `strings`. With `include`, the stop string stays in the text.
    pub(crate) fn new(strings: Vec<String>, include: bool) -> Self {
        Self { strings, include, withheld: String::new(), found: None }
    }

    /// The stop string that ended the text.
    pub(crate) fn found(&self) -> Option<&str> {
        Some(self.strings[self.found?].as_str())
    }

    /// Adds a piece of text. Appends to `out` the text that can no longer be part of a stop string.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) -> StopState {
        if self.strings.is_empty() {
            out.push_str(text);
            return StopState::Continue;
        }
        self.withheld.push_str(text);
        let strings = self.strings.iter().enumerate();
        let first = strings.filter_map(|(i, stop)| self.withheld.find(stop).map(|at| (at + stop.len(), at, i))).min();
        if let Some((end, start, which)) = first {
            self.found = Some(which);
            out.push_str(&self.withheld[..if self.include { end } else { start }]);
            self.withheld.clear();
            return StopState::Stop;
        }
        let safe =
            self.withheld.len() - self.strings.iter().map(|stop| overlap(&self.withheld, stop)).max().unwrap_or(0);
        out.extend(self.withheld.drain(..safe));
        StopState::Continue
    }

    /// Ends the text and releases withheld text.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.withheld);
        self.withheld.clear();
    }
}

/// Length of the longest suffix of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|n| text.as_bytes().ends_with(&stop.as_bytes()[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests;
