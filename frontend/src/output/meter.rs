//! Measures the choices of one request: metrics and fields of the log line.

use super::choice::ChoiceDelta;
use crate::http::RequestContext;
use prometheus::{Histogram, IntCounter};
use std::sync::Arc;
use tokio::time::Instant;

/// Measures the choices of one request. When it is dropped, each choice that has not ended counts as cancelled, or as
/// failed after [`mark_failed`](Self::mark_failed).
pub(crate) struct Meter {
    context: Arc<RequestContext>,
    model: Arc<str>,
    /// The series of the model, which every token updates.
    inter_token: Histogram,
    generated_tokens: IntCounter,
    choices: Vec<Progress>,
    /// Tokens of all prompts, until they are counted at the first output.
    prompt_tokens: Option<usize>,
    /// The first token of the request has not arrived yet.
    first: bool,
    failed: bool,
}

/// Progress of one choice.
#[derive(Clone, Default)]
struct Progress {
    /// Arrival of its latest token.
    latest: Option<Instant>,
    generated: u32,
    ended: bool,
}

impl Meter {
    /// A meter for a request with this number of choices, and of tokens of all its prompts.
    pub(crate) fn new(context: Arc<RequestContext>, model: Arc<str>, choices: usize, prompt_tokens: usize) -> Self {
        let inter_token = context.metrics.inter_token.with_label_values(&[&*model]);
        let generated_tokens = context.metrics.generated_tokens.with_label_values(&[&*model]);
        let choices = vec![Progress::default(); choices];
        let prompt_tokens = Some(prompt_tokens);
        Self { context, model, inter_token, generated_tokens, choices, prompt_tokens, first: true, failed: false }
    }

    /// Marks the choices that have not ended as failed.
    pub(crate) fn mark_failed(&mut self) {
        self.failed = true;
    }

    /// Records a delta.
    pub(crate) fn record(&mut self, delta: &ChoiceDelta) {
        if let Some(tokens) = self.prompt_tokens.take() {
            self.context.record_prompt(&self.model, tokens);
        }
        self.record_tokens(delta);
        let Some(finish) = delta.finish else { return };
        self.choices[delta.choice].ended = true;
        self.count_finished(finish.name(), self.choices[delta.choice].generated);
        if delta.choice == 0 {
            self.context.log_fields().finish_reason = Some(finish.name());
        }
    }

    fn count_finished(&self, reason: &str, generated: u32) {
        let metrics = &self.context.metrics;
        metrics.finished.with_label_values(&[&*self.model, reason]).inc();
        metrics.output_length.with_label_values(&[&*self.model]).observe(f64::from(generated));
    }

    fn record_tokens(&mut self, delta: &ChoiceDelta) {
        let RequestContext { metrics, arrived, .. } = &*self.context;
        let mut log_fields = self.context.log_fields();
        log_fields.completion_tokens += delta.generated;
        if delta.generated == 0 {
            return;
        }
        let now = Instant::now();
        if std::mem::take(&mut self.first) {
            let took = now - *arrived;
            log_fields.ttft_s = Some(took.as_secs_f64());
            metrics.first_token.with_label_values(&[&*self.model]).observe(took.as_secs_f64());
        }
        self.choices[delta.choice].generated += delta.generated;
        if let Some(before) = self.choices[delta.choice].latest.replace(now) {
            let each = (now - before).as_secs_f64() / f64::from(delta.generated);
            (0..delta.generated).for_each(|_| self.inter_token.observe(each));
        }
        self.generated_tokens.inc_by(delta.generated.into());
    }

    /// Records the worker of the first choice that reports one.
    pub(crate) fn record_worker(&self, worker: &Arc<str>) {
        self.context.log_fields().worker.get_or_insert_with(|| worker.clone());
    }

    /// Records the cached tokens of one prompt, and of all prompts of the request so far.
    pub(crate) fn record_cached(&self, tokens: u32, total: u32) {
        self.context.metrics.cached_tokens.with_label_values(&[&*self.model]).inc_by(tokens.into());
        self.context.log_fields().cached_tokens = Some(total);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let reason = if self.failed { "error" } else { "cancelled" };
        for choice in self.choices.iter().filter(|choice| !choice.ended) {
            self.count_finished(reason, choice.generated);
        }
    }
}
