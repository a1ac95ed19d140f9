//! What one model's requests are placed by: policy, disaggregation and weights.
//!
//! Not here: where the values come from, which is the business of the settings.

use super::composition::Policy;
use serde::{Deserialize, Serialize};

/// Whether a prompt may be prefilled on another worker than the one that decodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Disaggregation {
    /// When the prefill would hold up decode for longer than the hand-over takes, and a prefill worker is not too busy.
    #[default]
    Auto,
    /// Whenever a prefill worker is there and a full block is not cached: for measurements.
    Always,
    /// Never: a prompt is prefilled where it is decoded.
    Never,
}

/// What one model's requests are placed by, nothing left open.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tuning {
    pub(crate) policy: Policy,
    pub(crate) disaggregation: Disaggregation,
    pub(crate) decode_interference_weight: f64,
    pub(crate) prefix_affinity: f64,
}
