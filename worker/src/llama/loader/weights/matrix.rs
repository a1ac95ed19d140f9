//! A matrix of weights.

use std::fmt;

/// A matrix of a linear layer: `y = x · Wᵀ`.
#[derive(Clone, PartialEq)]
pub(crate) struct Matrix {
    /// Outputs.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) cols: usize,
    /// Row-major, `[out][in]`.
    pub(crate) data: Vec<f32>,
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Matrix({} × {})", self.rows, self.cols)
    }
}
