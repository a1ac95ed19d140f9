//! What the router reports of its requests: metrics, and the trace file. Not here: log lines and spans, which are
//! written where the work is done.

mod metrics;
mod trace_file;

pub(crate) use metrics::{GaugeGuard, Metrics};
pub use trace_file::Line;
pub(crate) use trace_file::{Recorder, RequestTrace, UNIT_TOKENS};
