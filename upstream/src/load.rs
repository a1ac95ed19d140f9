//! The load of one engine, as its requests through this process make it.
//!
//! An engine's own figures are older and contain requests of other gateways. Not here: those.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::watch;
use worker::plane::Load;

/// Counts the requests that were sent to an engine and have not ended.
#[derive(Clone)]
pub(crate) struct LoadCounter {
    load: watch::Sender<Load>,
}

/// One request, until it is dropped.
#[must_use = "the request is counted until this is dropped"]
pub(crate) struct Counted {
    load: watch::Sender<Load>,
    tokens: u64,
    choices: u32,
    /// Whether it has output, so that its choices run. Else it waits, with its prompt.
    runs: AtomicBool,
}

impl LoadCounter {
    pub(crate) fn new() -> Self {
        Self { load: watch::Sender::default() }
    }

    /// The load, now and after each change.
    pub(crate) fn watch(&self) -> watch::Receiver<Load> {
        self.load.subscribe()
    }

    /// Counts a request with a prompt of `tokens` tokens as waiting.
    pub(crate) fn start(&self, tokens: u64, choices: u32) -> Arc<Counted> {
        self.load.send_modify(|load| {
            load.waiting += 1;
            load.waiting_tokens += tokens;
        });
        Arc::new(Counted { load: self.load.clone(), tokens, choices, runs: AtomicBool::new(false) })
    }
}

impl Counted {
    /// Records the first output.
    pub(crate) fn first_output(&self) {
        if !self.runs.swap(true, Ordering::Relaxed) {
            self.load.send_modify(|load| {
                load.waiting -= 1;
                load.waiting_tokens -= self.tokens;
                load.running += self.choices;
            });
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let runs = *self.runs.get_mut();
        self.load.send_modify(|load| {
            if runs {
                load.running -= self.choices;
            } else {
                load.waiting -= 1;
                load.waiting_tokens -= self.tokens;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_until_its_first_output_and_then_runs() {
        let counter = LoadCounter::new();
        let load = counter.watch();
        let one = counter.start(100, 4);
        let other = counter.start(50, 1);
        assert_eq!((load.borrow().waiting, load.borrow().waiting_tokens, load.borrow().running), (2, 150, 0));
        one.first_output();
        one.first_output();
        assert_eq!((load.borrow().waiting, load.borrow().waiting_tokens, load.borrow().running), (1, 50, 4));
        drop((one, other));
        assert_eq!(*load.borrow(), Load::default());
    }
}
