//! Non-negative least squares over a few features, with exponentially decaying weights.

/// Share of a feature's sum of squares that is added to it (ridge regression): features that do not vary independently
/// share what they explain, instead of large values with opposite signs.
const RIDGE: f64 = 1e-3;
/// Measurements after which the coefficients are computed again: an eighth of those so far, and at most this.
const MAX_NEW_MEASUREMENTS: u64 = 64;

/// Sums over the measurements so far, and the coefficients that follow. About the last `MEMORY` measurements count; by
/// default as many as a fleet of a few workers makes steps in a minute.
#[derive(Clone, Debug)]
pub(super) struct LeastSquares<const FEATURES: usize, const MEMORY: u64 = 4096> {
    /// Matrix and right side of the normal equations.
    normal: [[f64; FEATURES]; FEATURES],
    right: [f64; FEATURES],
    measurements: u64,
    /// Measurements since the coefficients were computed.
    new_measurements: u64,
    coefficients: Option<[f64; FEATURES]>,
}

impl<const FEATURES: usize, const MEMORY: u64> Default for LeastSquares<FEATURES, MEMORY> {
    fn default() -> Self {
        let (normal, right) = ([[0.0; FEATURES]; FEATURES], [0.0; FEATURES]);
        Self { normal, right, measurements: 0, new_measurements: 0, coefficients: None }
    }
}

impl<const FEATURES: usize, const MEMORY: u64> LeastSquares<FEATURES, MEMORY> {
    /// Weight that the sums keep at each measurement.
    const KEEP: f64 = 1.0 - 1.0 / MEMORY as f64;

    /// Adds a measurement. Features should be of similar size.
    pub(super) fn add(&mut self, features: [f64; FEATURES], value: f64) {
        for (row, feature) in features.into_iter().enumerate() {
            for (sum, other) in self.normal[row].iter_mut().zip(features) {
                *sum = *sum * Self::KEEP + feature * other;
            }
            self.right[row] = self.right[row] * Self::KEEP + feature * value;
        }
        self.measurements += 1;
        self.new_measurements += 1;
        if self.new_measurements >= MAX_NEW_MEASUREMENTS || self.new_measurements * 8 >= self.measurements {
            self.new_measurements = 0;
            self.coefficients = solve(&self.normal, &self.right);
        }
    }

    /// Number of measurements so far.
    pub(super) fn measurements(&self) -> u64 {
        self.measurements
    }

    /// The coefficients, none of them negative; `None` before any measurement.
    pub(super) fn coefficients(&self) -> Option<[f64; FEATURES]> {
        self.coefficients
    }
}

/// Of all sets of features whose solution has no negative coefficient, the one with the least error.
fn solve<const FEATURES: usize>(
    normal: &[[f64; FEATURES]; FEATURES],
    right: &[f64; FEATURES],
) -> Option<[f64; FEATURES]> {
    let mut best: Option<(f64, [f64; FEATURES])> = None;
    for subset in 1..1_u32 << FEATURES {
        let (mut matrix, mut values) = (*normal, *right);
        for (feature, row) in matrix.iter_mut().enumerate() {
            row[feature] *= 1.0 + RIDGE;
            if subset >> feature & 1 == 0 {
                // Removes the feature: its coefficient becomes 0.
                *row = std::array::from_fn(|column| f64::from(u8::from(column == feature)));
                values[feature] = 0.0;
            }
        }
        let Some(found) = eliminate(matrix, values).filter(|found| found.iter().all(|value| *value >= 0.0)) else {
            continue;
        };
        // The squared error without the constant sum of squares of the measurements.
        let error: f64 = (0..FEATURES)
            .map(|row| {
                let product: f64 = (0..FEATURES).map(|column| normal[row][column] * found[column]).sum();
                found[row] * (product - 2.0 * right[row])
            })
            .sum();
        if error.is_finite() && best.is_none_or(|(least, _)| error < least) {
            best = Some((error, found));
        }
    }
    best.map(|(_, found)| found)
}

/// Gaussian elimination with partial pivoting; `None` for a singular matrix.
fn eliminate<const FEATURES: usize>(
    mut matrix: [[f64; FEATURES]; FEATURES],
    mut values: [f64; FEATURES],
) -> Option<[f64; FEATURES]> {
    for at in 0..FEATURES {
        let pivot = (at..FEATURES).max_by(|a, b| matrix[*a][at].abs().total_cmp(&matrix[*b][at].abs()))?;
        if matrix[pivot][at].abs() < 1e-12 {
            return None;
        }
        matrix.swap(at, pivot);
        values.swap(at, pivot);
        let (pivot_row, pivot_value) = (matrix[at], values[at]);
        for row in at + 1..FEATURES {
            let factor = matrix[row][at] / pivot_row[at];
            for (cell, above) in matrix[row].iter_mut().zip(pivot_row) {
                *cell -= factor * above;
            }
            values[row] -= factor * pivot_value;
        }
    }
    let mut found = [0.0; FEATURES];
    for at in (0..FEATURES).rev() {
        let known: f64 = (at + 1..FEATURES).map(|column| matrix[at][column] * found[column]).sum();
        found[at] = (values[at] - known) / matrix[at][at];
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(points: impl Iterator<Item = [f64; 3]>, of: impl Fn([f64; 3]) -> f64) -> [f64; 3] {
        let mut fit = LeastSquares::<3>::default();
        points.for_each(|features| fit.add(features, of(features)));
        fit.coefficients().unwrap()
    }

    #[test]
    fn independent_features_get_their_coefficients() {
        let points = (0..500).map(|nth| [1.0, f64::from(nth % 17), f64::from(nth * 7919 % 200)]);
        let found = fitted(points, |[_, a, b]| 7.0 + 0.02 * a + 0.05 * b);
        let expected = [7.0, 0.02, 0.05];
        assert!(found.iter().zip(expected).all(|(found, value)| (found - value).abs() < 0.05), "{found:?}");
    }

    #[test]
    fn no_coefficient_is_negative_and_the_mean_is_kept() {
        let value = |[b, n, c]: [f64; 3], [x, y, z]: [f64; 3]| b * x + n * y + c * z;
        // Twice the sequences, half the time: nothing of this kind is learned.
        let points = [[1.0, 10.0, 10.0], [1.0, 20.0, 20.0]].into_iter().cycle().take(100);
        let found = fitted(points, |[_, n, _]| 400.0 / n);
        assert!(found.iter().all(|value| *value >= 0.0) && (value(found, [1.0, 15.0, 15.0]) - 30.0).abs() < 3.0);
        // A single point determines nothing but itself.
        let found = fitted(std::iter::repeat_n([1.0, 8.0, 8.0], 50), |_| 20.0);
        assert!((value(found, [1.0, 8.0, 8.0]) - 20.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn old_measurements_are_forgotten() {
        let mut fit = LeastSquares::<1, 64>::default();
        (0..1000).for_each(|_| fit.add([1.0], 5.0));
        (0..500).for_each(|_| fit.add([1.0], 2.0));
        assert!(fit.coefficients().is_some_and(|[mean]| (mean - 2.0).abs() < 0.02), "{:?}", fit.coefficients());
    }

    #[test]
    fn without_measurements_there_are_no_coefficients() {
        assert_eq!(LeastSquares::<3>::default().coefficients(), None);
    }
}
