//! The requests of a run: those of a recorded trace, or those that a workload generates.

use super::trace::Trace;
use super::workload::Workload;
use std::borrow::Cow;

/// Where the requests of a replay come from.
#[derive(Clone, PartialEq, Debug)]
pub enum Traffic {
    /// A trace. Its times are scaled to the request rate, and the seed varies them within their resolution.
    Recorded(Trace),
    /// Requests generated at the request rate. Each seed gives other requests.
    Generated {
        /// Class of the requests.
        workload: Workload,
        /// Number of requests.
        requests: usize,
    },
}

impl Traffic {
    /// The requests of a run at `rate` requests per second.
    pub fn at(&self, rate: f64, seed: u64) -> Cow<'_, Trace> {
        match self {
            Self::Recorded(trace) => Cow::Borrowed(trace),
            Self::Generated { workload, requests } => Cow::Owned(workload.generate(*requests, rate, seed)),
        }
    }

    /// Rate at which the requests were recorded, in requests per second.
    pub fn recorded_rate(&self) -> Option<f64> {
        match self {
            Self::Recorded(trace) => Some(trace.rate()),
            Self::Generated { .. } => None,
        }
    }
}
