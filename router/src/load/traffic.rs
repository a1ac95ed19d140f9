//! Traffic totals, counted as requests pass.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Totals by model since the start of the router.
#[derive(Default)]
pub(crate) struct Traffic(Mutex<BTreeMap<Arc<str>, Arc<Totals>>>);

/// Totals of one model.
#[derive(Default)]
pub(crate) struct Totals {
    prompts: AtomicU64,
    prompt_tokens: AtomicU64,
    output_tokens: AtomicU64,
}

impl Traffic {
    /// The totals of a model.
    pub(crate) fn of(&self, model: &Arc<str>) -> Arc<Totals> {
        self.0.lock().entry(model.clone()).or_default().clone()
    }

    /// The totals of all models.
    pub(crate) fn all(&self) -> Vec<(Arc<str>, Arc<Totals>)> {
        let totals = self.0.lock();
        totals.iter().map(|(model, totals)| (model.clone(), totals.clone())).collect()
    }
}

impl Totals {
    /// Counts a prompt and its tokens to compute.
    pub(crate) fn prompt(&self, tokens: u64) {
        self.prompts.fetch_add(1, Ordering::Relaxed);
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Counts output tokens.
    pub(crate) fn output(&self, tokens: usize) {
        self.output_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Prompts, prompt tokens to compute, and output tokens so far.
    pub(crate) fn now(&self) -> [u64; 3] {
        [&self.prompts, &self.prompt_tokens, &self.output_tokens].map(|total| total.load(Ordering::Relaxed))
    }
}
