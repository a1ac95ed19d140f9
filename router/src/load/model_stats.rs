//! What is learned of a model from all of its workers and requests: the durations of decode steps and of prompts,
//! the lengths of outputs, the demand for prefixes, and when blocks are asked for again.

use super::block_reuse::BlockReuse;
use super::itl_target::ItlTarget;
use super::load_changes::LoadChanges;
use super::output_lengths::{ExpectedOutput, OutputEnd, OutputLengths};
use super::pace::Pace;
use super::prefill_time::{PrefillGroup, PrefillTime, PrefillTimeFit};
use super::prefix_demand::{PrefixDemand, SharedPrefix};
use super::step_time::{StepTime, StepTimeFit};
use super::timestamp::Timestamp;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use worker::plane::DeviceId;

/// Measurements of one model, shared by the lists of its workers over time.
#[derive(Debug, Default)]
pub(crate) struct ModelStats {
    steps: Mutex<StepTimeFit>,
    prefills: Mutex<PrefillTimeFit>,
    outputs: Mutex<OutputLengths>,
    prefixes: Mutex<PrefixDemand>,
    reuse: Mutex<BlockReuse>,
    /// By device, as long as it has a worker.
    paces: Mutex<BTreeMap<DeviceId, Weak<Mutex<Pace>>>>,
    /// Of the load of its workers.
    changes: Arc<LoadChanges>,
    /// Choices of its workers so far.
    choices: AtomicU64,
}

impl ModelStats {
    /// The number of a choice of one of its workers, from 1 on.
    pub(super) fn next_choice(&self) -> u64 {
        self.choices.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records a decode step. Returns its duration relative to the expected one.
    pub(super) fn step_measured(&self, sequences: f64, context_tokens: f64, seconds: f64) -> f64 {
        let mut steps = self.steps.lock();
        steps.add(sequences, context_tokens, seconds);
        seconds / steps.step_time().unwrap_or_default().seconds(sequences, context_tokens)
    }

    /// Records the time of prompts. Returns it relative to the expected one, if there is one.
    pub(super) fn prefill_measured(&self, group: &PrefillGroup) -> Option<f64> {
        self.prefills.lock().add(group)
    }

    /// The pace of a device, which all of its workers share; a new one if the device is unknown.
    pub(super) fn pace_of(&self, device: Option<DeviceId>) -> Arc<Mutex<Pace>> {
        let Some(device) = device else { return Arc::default() };
        let mut paces = self.paces.lock();
        if let Some(pace) = paces.get(&device).and_then(Weak::upgrade) {
            return pace;
        }
        paces.retain(|_, pace| pace.strong_count() > 0);
        let pace = Arc::default();
        paces.insert(device, Arc::downgrade(&pace));
        pace
    }

    /// In which groups of its workers the load has changed.
    pub(super) fn changes(&self) -> &Arc<LoadChanges> {
        &self.changes
    }

    /// Duration of a decode step on an average worker.
    pub(crate) fn step_time(&self) -> StepTime {
        self.steps.lock().step_time().unwrap_or_default()
    }

    /// Duration of computing a prompt on an average worker; `None` until enough prompts were measured.
    pub(crate) fn prefill_time(&self) -> Option<PrefillTime> {
        self.prefills.lock().prefill_time()
    }

    /// A target of the time between tokens, with what predicts that time; `None` until decode steps were measured.
    pub(crate) fn itl_target(&self, seconds: f64) -> Option<ItlTarget> {
        let step = self.steps.lock().step_time()?;
        let prompt_seconds = self.prefills.lock().mean_compute();
        let output_tokens = self.outputs.lock().all().mean(f64::INFINITY);
        Some(ItlTarget::new(seconds, step, prompt_seconds, output_tokens))
    }

    /// Expected output of a request of a tenant, and the mean of all requests.
    pub(crate) fn expect_output(&self, tenant: &str, max_tokens: Option<u32>) -> (ExpectedOutput, f64) {
        let outputs = self.outputs.lock();
        (ExpectedOutput::new(outputs.of(tenant).clone(), max_tokens), outputs.all().mean(f64::INFINITY))
    }

    /// Expected output of a request of which nothing but the model is known, as of one that another router has placed.
    pub(crate) fn expect_any_output(&self) -> ExpectedOutput {
        ExpectedOutput::new(self.outputs.lock().all().clone(), None)
    }

    /// Quantiles of the output lengths of the model, by share of the outputs; `None` before the first output.
    pub(crate) fn output_quantiles<const N: usize>(&self, shares: [f64; N]) -> Option<[f64; N]> {
        let is_learned = self.outputs.lock().is_learned();
        is_learned.then(|| shares.map(|share| self.expect_any_output().quantile(share)))
    }

    /// The prefix of a prompt that is worth most to have on another worker, if any is shared. Counts the demand for its
    /// prefixes and the uses of its blocks if the prompt `is_new`.
    pub(crate) fn shared_prefix(
        &self,
        blocks: usize,
        block_size: usize,
        hash: impl Fn(usize) -> u64,
        is_new: bool,
        now: Timestamp,
    ) -> Option<SharedPrefix> {
        let mut prefixes = self.prefixes.lock();
        let shared = prefixes.shared(blocks, block_size, &hash, is_new, now);
        if is_new {
            let visible = prefixes.own_share();
            drop(prefixes);
            self.reuse.lock().used((0..blocks).map(hash), visible, now);
        }
        shared
    }

    /// Share of a used block that is lost on a worker that keeps the blocks of the last `seconds` uses.
    pub(super) fn lost_share(&self, seconds: f64) -> f64 {
        self.reuse.lock().lost_share().at(seconds)
    }

    /// Counts a prompt that another router has placed.
    pub(crate) fn prompt_placed_elsewhere(&self, now: Timestamp) {
        self.prefixes.lock().prompt_placed_elsewhere(now);
    }

    /// Records the output of a request that has ended: its length, or what was generated of it.
    pub(crate) fn output_ended(&self, tenant: &Arc<str>, tokens: u64, end: OutputEnd) {
        self.outputs.lock().record(tenant, tokens, end);
    }
}
