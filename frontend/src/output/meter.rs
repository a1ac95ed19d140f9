//! Measures the choices of one request: metrics, and fields of the request's log line.

use super::choice::Piece;
use crate::http::Ticket;
use std::sync::Arc;
use tokio::time::Instant;

/// Measures the choices of one request. Dropped before a choice has ended, it counts that choice as cancelled, or as failed.
pub(crate) struct Meter {
    ticket: Arc<Ticket>,
    model: Arc<str>,
    choices: Vec<Progress>,
    first: bool,
    failed: bool,
}

/// How far one choice is.
#[derive(Clone, Default)]
struct Progress {
    /// When its latest token came.
    latest: Option<Instant>,
    generated: u32,
    ended: bool,
}

impl Meter {
    /// For a request of so many choices.
    pub(crate) fn new(ticket: Arc<Ticket>, model: Arc<str>, choices: usize) -> Self {
        Self { ticket, model, choices: vec![Progress::default(); choices], first: true, failed: false }
    }

    /// No choice that has not ended yet will.
    pub(crate) fn failed(&mut self) {
        self.failed = true;
    }

    /// A piece came.
    pub(crate) fn piece(&mut self, piece: &Piece) {
        self.tokens(piece);
        let Some(finish) = piece.finish else { return };
        self.choices[piece.choice].ended = true;
        self.finished(finish.name(), self.choices[piece.choice].generated);
        if piece.choice == 0 {
            self.ticket.details().finish_reason = Some(finish.name());
        }
    }

    fn finished(&self, reason: &str, generated: u32) {
        let metrics = &self.ticket.metrics;
        metrics.finished.with_label_values(&[&*self.model, reason]).inc();
        metrics.output_length.with_label_values(&[&*self.model]).observe(f64::from(generated));
    }

    fn tokens(&mut self, piece: &Piece) {
        let Ticket { metrics, arrived, .. } = &*self.ticket;
        let mut details = self.ticket.details();
        details.completion_tokens += piece.generated;
        if piece.generated == 0 {
            return;
        }
        let now = Instant::now();
        if std::mem::take(&mut self.first) {
            let took = now - *arrived;
            details.ttft_s = Some(took.as_secs_f64());
            metrics.first_token.with_label_values(&[&*self.model]).observe(took.as_secs_f64());
        }
        self.choices[piece.choice].generated += piece.generated;
        if let Some(before) = self.choices[piece.choice].latest.replace(now) {
            let each = (now - before).as_secs_f64() / f64::from(piece.generated);
            let gaps = metrics.inter_token.with_label_values(&[&*self.model]);
            (0..piece.generated).for_each(|_| gaps.observe(each));
        }
        metrics.generated_tokens.with_label_values(&[&*self.model]).inc_by(piece.generated.into());
    }

    /// This worker answers; with several choices, the one of the first.
    pub(crate) fn placed(&self, worker: &Arc<str>) {
        self.ticket.details().worker.get_or_insert_with(|| worker.clone());
    }

    /// So many prompt tokens of one prompt needed no computing, and so many of all prompts so far.
    pub(crate) fn cached(&self, tokens: u32, in_all: u32) {
        self.ticket.metrics.cached_tokens.with_label_values(&[&*self.model]).inc_by(tokens.into());
        self.ticket.details().cached_tokens = Some(in_all);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let reason = if self.failed { "error" } else { "cancelled" };
        for choice in self.choices.iter().filter(|choice| !choice.ended) {
            self.finished(reason, choice.generated);
        }
    }
}
