//! Linear layers: `y = x · Wᵀ`, or added to `y`.
//!
//! Products come from the `gemm` crate, called so that a row's result depends only on that row. Weights are stored in
//! panels of [`PANEL`] outputs, `[panel][input][output]`, and each panel is multiplied with a tile of rows
//! separately; the choice of tiles and threads does not change a bit. Three paths of `gemm` that would change bits
//! are avoided:
//! - A single row takes a matrix-vector path: a tile has at least two rows, one of them padding if necessary.
//! - Long sums are divided according to the machine's caches: here they are divided first, at [`DEPTH`] or less.
//! - Small products with unit strides take another path: the strides of a panel are never that small.
//!
//! The result is one chain of multiply-adds per output and division of the inputs. A test asserts exactly that.

use crate::llama::loader::Matrix;
use gemm::Parallelism;
use rayon::prelude::*;

/// Outputs per panel: with 288 inputs a panel has 72 KiB, a fraction of an L2 cache, and is large enough that the
/// call costs little compared with the product of a single row.
const PANEL: usize = 64;

/// Longest uninterrupted sum. `gemm` never cuts sums of up to 512 terms, whatever the caches.
const DEPTH: usize = 512;

/// Rows per tile: small enough to keep all threads busy on narrow matrices, large enough to reuse a panel from cache.
const TILE: usize = 128;

/// A weight matrix in the panel layout. Replaces the [`Matrix`] that it was made from.
pub(super) struct Linear {
    outputs: usize,
    inputs: usize,
    panels: Vec<f32>,
}

/// Whether a product replaces the values in `y` or is added to them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Set,
    Add,
}

/// The output buffer. Tiles are disjoint.
#[derive(Clone, Copy)]
struct Target(*mut f32);
// SAFETY: a pointer into a buffer that the caller of `product` holds exclusively; each task writes its own tile only.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Linear {
    /// Converts a matrix to the panel layout.
    pub(super) fn new(matrix: Matrix) -> Self {
        let Matrix { rows: outputs, cols: inputs, data } = matrix;
        assert_eq!(data.len(), outputs * inputs, "matrix of {outputs} × {inputs}");
        let mut panels = vec![0.0; outputs.next_multiple_of(PANEL) * inputs];
        panels.par_chunks_mut(PANEL * inputs).enumerate().for_each(|(p, panel)| {
            let rows = data[p * PANEL * inputs..].chunks_exact(inputs).take(PANEL);
            for (output, row) in rows.enumerate() {
                for (input, value) in row.iter().enumerate() {
                    panel[input * PANEL + output] = *value;
                }
            }
        });
        Self { outputs, inputs, panels }
    }

    /// Copies row `output` of the matrix: an embedding, when the matrix is the embedding table.
    pub(super) fn row(&self, output: usize, into: &mut [f32]) {
        assert!(output < self.outputs && into.len() == self.inputs);
        let start = output / PANEL * PANEL * self.inputs + output % PANEL;
        for (to, from) in into.iter_mut().zip(self.panels[start..].iter().step_by(PANEL)) {
            *to = *from;
        }
    }

    /// `y = x · Wᵀ` for `rows` rows. Both buffers have room for at least two rows; for a single row the content of
    /// the second does not matter. Runs on the current thread pool.
    pub(super) fn apply(&self, rows: usize, x: &[f32], y: &mut [f32]) {
        self.product(rows, x, y, Mode::Set);
    }

    /// `y += x · Wᵀ`, otherwise like [`Self::apply`].
    pub(super) fn add(&self, rows: usize, x: &[f32], y: &mut [f32]) {
        self.product(rows, x, y, Mode::Add);
    }

    fn product(&self, rows: usize, x: &[f32], y: &mut [f32], mode: Mode) {
        if rows == 0 {
            return;
        }
        let rows = rows.max(2);
        assert!(x.len() >= rows * self.inputs && y.len() >= rows * self.outputs, "buffers of {rows} rows");
        let target = Target(y.as_mut_ptr());
        let panels = self.outputs.div_ceil(PANEL);
        // Divided evenly, so no tile has a single row.
        let tiles = rows.div_ceil(TILE);
        let cut = |tile: usize| rows * tile / tiles;
        // Panels are the inner loop: neighbouring tasks share the tile of rows.
        (0..tiles * panels).into_par_iter().for_each(|task| {
            let (tile, panel) = (task / panels, task % panels);
            self.tile(panel, cut(tile), cut(tile + 1), x, target, mode);
        });
    }

    /// Computes one panel of outputs for the rows `from .. to`, at least two.
    fn tile(&self, panel: usize, from: usize, to: usize, x: &[f32], target: Target, mode: Mode) {
        let Target(y) = target;
        let first = panel * PANEL;
        let width = PANEL.min(self.outputs - first);
        let weights = &self.panels[first * self.inputs..][..PANEL * self.inputs];
        let x = &x[from * self.inputs..to * self.inputs];
        debug_assert!(to - from >= 2);
        let cuts = self.inputs.div_ceil(DEPTH);
        let cut = |i: usize| self.inputs * i / cuts;
        for i in 0..cuts {
            let (start, end) = (cut(i), cut(i + 1));
            let read = i > 0 || mode == Mode::Add;
            // SAFETY: `weights` holds `inputs` columns of `PANEL`, of which the first `width` are used; `x` holds
            // `to - from` rows of `inputs`; the target has `to` rows of `outputs`, and
            // `first + width <= outputs`. No other task touches these rows of these columns.
            unsafe {
                gemm::gemm(
                    width,
                    to - from,
                    end - start,
                    y.add(from * self.outputs + first),
                    self.outputs as isize,
                    1,
                    read,
                    weights[start * PANEL..].as_ptr(),
                    PANEL as isize,
                    1,
                    x[start..].as_ptr(),
                    self.inputs as isize,
                    1,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    Parallelism::None,
                );
            }
        }
    }
}

/// The bits of a fixed product on this machine. Machines with a fused multiply-add agree.
pub(super) fn arithmetic() -> Vec<u8> {
    let pattern = |n: usize, step: usize| (0..n).map(|i| ((i * step) % 1009) as f32 / 1009.0 - 0.5).collect::<Vec<_>>();
    let (rows, inputs) = (2, DEPTH + DEPTH / 2);
    let probe = Linear { outputs: PANEL, inputs, panels: pattern(PANEL * inputs, 389) };
    let x = pattern(rows * inputs, 577);
    let mut y = vec![0.0; rows * PANEL];
    probe.tile(0, 0, rows, &x, Target(y.as_mut_ptr()), Mode::Set);
    y.iter().flat_map(|y| y.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn random(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        std::iter::repeat_with(next).take(n).collect()
    }

    /// The documented result: per division of the inputs one chain of multiply-adds in order, and the divisions added
    /// in order.
    fn chain(w: &[f32], x: &[f32], fused: bool) -> f32 {
        let cuts = w.len().div_ceil(DEPTH);
        let cut = |i: usize| w.len() * i / cuts;
        let sums = (0..cuts).map(|i| {
            let pairs = w[cut(i)..cut(i + 1)].iter().zip(&x[cut(i)..cut(i + 1)]);
            pairs.fold(0.0f32, |sum, (w, x)| if fused { w.mul_add(*x, sum) } else { w * x + sum })
        });
        sums.reduce(|a, b| a + b).unwrap()
    }

    fn is_fused() -> bool {
        #[cfg(target_arch = "x86_64")]
        return std::arch::is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        return cfg!(target_arch = "aarch64");
    }

    /// Every row of a product of `rows` rows on `threads` threads is its own chain, to the bit.
    fn check(outputs: usize, inputs: usize, rows: usize, threads: usize) {
        let weights = random(outputs * inputs, 1);
        let x = random(rows.max(2) * inputs, rows as u64);
        let linear = Linear::new(Matrix { rows: outputs, cols: inputs, data: weights.clone() });
        let mut y = vec![0.0; rows.max(2) * outputs];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| linear.apply(rows, &x, &mut y));
        // All outputs of a few rows and a few outputs of all rows cover every tile and every panel.
        for row in 0..rows {
            let step = if row == 0 || row + 1 == rows { 1 } else { (outputs / 5).max(1) };
            for output in (row % step..outputs).step_by(step) {
                let want = chain(&weights[output * inputs..][..inputs], &x[row * inputs..][..inputs], is_fused());
                let got = y[row * outputs + output];
                assert_eq!(got.to_bits(), want.to_bits(), "{rows} rows, row {row}, output {output}: {got} {want}");
            }
        }
    }

    #[test]
    fn a_row_is_its_own_chain_for_any_number_of_rows() {
        for rows in (1..70).chain([127, 128, 129, 255, 256, 257, 511, 512, 513, 600, 1023, 1024, 1025, 2047, 2048]) {
            check(96, 288, rows, 1 + rows % 4);
        }
    }

    #[test]
    fn real_shapes_on_one_two_and_four_threads() {
        for (outputs, inputs) in [(480, 288), (288, 288), (1536, 288), (288, 768), (768, 2048)] {
            for (rows, threads) in [(1, 1), (2, 4), (7, 2), (64, 2), (200, 4), (512, 1)] {
                check(outputs, inputs, rows, threads);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_shape(outputs in 1usize..200, inputs in 3usize..1600, rows in 1usize..300, threads in 1usize..5) {
            check(outputs, inputs, rows, threads);
        }

        #[test]
        fn a_row_can_be_read_back(outputs in 1usize..200, inputs in 1usize..50) {
            let data = random(outputs * inputs, 3);
            let linear = Linear::new(Matrix { rows: outputs, cols: inputs, data: data.clone() });
            let mut row = vec![0.0; inputs];
            for (output, want) in data.chunks_exact(inputs).enumerate() {
                linear.row(output, &mut row);
                prop_assert_eq!(&row[..], want);
            }
        }
    }

    /// Blocks computed with one instruction set are used with another: both give the same bits.
    #[test]
    fn arithmetic_is_the_chain_for_any_instruction_set() {
        let pattern = |i: usize, step: usize| ((i * step) % 1009) as f32 / 1009.0 - 0.5;
        let inputs = DEPTH + DEPTH / 2;
        let mut want = Vec::new();
        for (row, output) in (0..2).flat_map(|row| (0..PANEL).map(move |output| (row, output))) {
            let weights: Vec<f32> = (0..inputs).map(|input| pattern(input * PANEL + output, 389)).collect();
            let x: Vec<f32> = (0..inputs).map(|input| pattern(row * inputs + input, 577)).collect();
            want.extend(chain(&weights, &x, is_fused()).to_le_bytes());
        }
        assert_eq!(arithmetic(), want);
    }

    #[test]
    fn add_adds_to_the_output() {
        let linear = Linear::new(Matrix { rows: 5, cols: 3, data: random(15, 4) });
        let x = random(6, 5);
        let (mut sum, mut product) = (vec![2.0; 10], vec![0.0; 10]);
        linear.apply(2, &x, &mut product);
        linear.add(2, &x, &mut sum);
        assert!(sum.iter().zip(&product).all(|(sum, product)| sum.to_bits() == (2.0 + product).to_bits()));
    }
}
