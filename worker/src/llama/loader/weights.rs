//! The weights of a model in memory: f32, one allocation per matrix, with projections of the same input fused.

mod checkpoint;
mod layer;
mod load;
mod matrix;
mod tensors;

pub(crate) use checkpoint::Checkpoint;
pub(crate) use layer::Layer;
pub(crate) use matrix::Matrix;
pub(crate) use tensors::tensors;

/// All weights of a model.
pub(crate) struct Weights {
    /// `[vocabulary][hidden]`.
    pub(crate) embed: Matrix,
    /// First to last.
    pub(crate) layers: Vec<Layer>,
    /// Gain of the last norm, `[hidden]`.
    pub(crate) norm: Vec<f32>,
    /// `[vocabulary][hidden]`; `None`: tied, use `embed`.
    pub(crate) head: Option<Matrix>,
    /// Hash of the weights as they were stored.
    pub(crate) identity: [u8; 32],
}
