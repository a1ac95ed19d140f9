//! Parameters of placement for one model: policy, disaggregation and weights.
//!
//! Not here: where the values come from (`settings`).

use super::composition::Policy;
use serde::{Deserialize, Serialize};

/// Whether a prompt may be prefilled on another worker than the one that decodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Disaggregation {
    /// When the prefill would stall decode for longer than the KV transfer takes, and a prefill worker is not too busy.
    #[default]
    Auto,
    /// Whenever there is a prefill worker and a full block is not cached: for measurements.
    Always,
    /// Never: every prompt is prefilled on the worker that decodes.
    Never,
}

/// Parameters of placement for one model, with all defaults resolved.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tuning {
    pub(crate) policy: Policy,
    pub(crate) disaggregation: Disaggregation,
    /// Seconds of first token that a second between tokens is worth, as a mean over a request.
    pub(crate) decode_tokens: f64,
    /// Target of the time between tokens in seconds, if one is configured: workers that meet it are preferred.
    pub(crate) itl: Option<f64>,
}
