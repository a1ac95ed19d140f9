//! The metrics of one model. Each is looked up at its first use, because that takes longer than an observation, and
//! every request has several. One that is never used is not exported.

use super::Metrics;
use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::proto::MetricFamily;
use prometheus::{HistogramVec, IntCounterVec};
use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// The metrics of requests to a model.
pub(crate) struct ModelMetrics {
    /// The model.
    pub(crate) name: Arc<str>,
    pub(crate) duration: Labelled<HistogramVec>,
    pub(crate) prompt_tokens: Labelled<IntCounterVec>,
    pub(crate) cached_tokens: Labelled<IntCounterVec>,
    pub(crate) generated_tokens: Labelled<IntCounterVec>,
    pub(crate) prompt_length: Labelled<HistogramVec>,
    pub(crate) output_length: Labelled<HistogramVec>,
    /// Choices that ended as the engine has ended them.
    pub(crate) relayed: Labelled<IntCounterVec>,
}

/// One metric of a family.
pub(crate) struct Labelled<F: Family> {
    family: F,
    labels: Vec<Arc<str>>,
    found: OnceLock<F::Metric>,
}

/// Metrics that differ in their labels.
pub(crate) trait Family {
    type Metric;

    fn labelled(&self, labels: &[Arc<str>]) -> Self::Metric;
}

impl<B: MetricVecBuilder> Family for MetricVec<B> {
    type Metric = B::M;

    fn labelled(&self, labels: &[Arc<str>]) -> B::M {
        self.with_label_values(labels)
    }
}

impl<F: Family> Deref for Labelled<F> {
    type Target = F::Metric;

    fn deref(&self) -> &F::Metric {
        self.found.get_or_init(|| self.family.labelled(&self.labels))
    }
}

impl ModelMetrics {
    pub(super) fn new(all: &Metrics, model: &Arc<str>) -> Self {
        let of_model = [Arc::clone(model)];
        let relayed = [Arc::clone(model), "relayed".into()];
        Self {
            name: Arc::clone(model),
            duration: labelled(&all.duration, &of_model),
            prompt_tokens: labelled(&all.prompt_tokens, &of_model),
            cached_tokens: labelled(&all.cached_tokens, &of_model),
            generated_tokens: labelled(&all.generated_tokens, &of_model),
            prompt_length: labelled(&all.prompt_length, &of_model),
            output_length: labelled(&all.output_length, &of_model),
            relayed: labelled(&all.finished, &relayed),
        }
    }
}

fn labelled<F: Family + Clone>(family: &F, labels: &[Arc<str>]) -> Labelled<F> {
    Labelled { family: family.clone(), labels: labels.to_vec(), found: OnceLock::new() }
}

/// Removes the series of a family that have one of these models, whatever their other labels are.
pub(super) fn remove_series<B: MetricVecBuilder>(family: &MetricVec<B>, models: &HashSet<Arc<str>>) {
    for metric in family.collect().iter().flat_map(MetricFamily::get_metric) {
        let labels: HashMap<&str, &str> = metric.get_label().iter().map(|one| (one.name(), one.value())).collect();
        if labels.get("model").is_some_and(|model| models.contains(*model)) {
            // It has just been listed, so an error means only that it is gone already.
            let _ = family.remove(&labels);
        }
    }
}
