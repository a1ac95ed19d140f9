//! Non-negative least squares for few unknowns, robust against outliers: iteratively reweighted, with Huber's weights.

/// One equation: the sum of `factors` × unknowns is `value`. `weight` multiplies its residual.
#[derive(Clone, Copy)]
pub(super) struct Equation<const N: usize> {
    pub(super) factors: [f64; N],
    pub(super) value: f64,
    pub(super) weight: f64,
}

/// Iterations of reweighting.
const ITERATIONS: usize = 12;
/// Residuals up to this many medians have full weight.
const HUBER_THRESHOLD: f64 = 2.5;

/// Solves the equations.
pub(super) fn solve<const N: usize>(rows: &[Equation<N>]) -> [f64; N] {
    let mut weights = vec![1.0; rows.len()];
    let mut solution = [0.0; N];
    for _ in 0..ITERATIONS {
        solution = non_negative_least_squares(rows, &weights);
        let residuals: Vec<f64> = rows.iter().map(|row| (row.weight * (row.of(&solution) - row.value)).abs()).collect();
        let mut sorted = residuals.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let far = HUBER_THRESHOLD * sorted.get(sorted.len() / 2).copied().unwrap_or(0.0).max(1e-12);
        for (weights, residuals) in weights.iter_mut().zip(residuals) {
            // Huber's weights: an outlier has the same influence on the solution as a residual at the threshold.
            *weights = (far / residuals).min(1.0);
        }
    }
    solution
}

impl<const N: usize> Equation<N> {
    fn of(&self, solution: &[f64; N]) -> f64 {
        self.factors.iter().zip(solution).map(|(factor, coefficient)| factor * coefficient).sum()
    }
}

/// Tries every subset of unknowns that are not zero: 31 for five unknowns.
fn non_negative_least_squares<const N: usize>(rows: &[Equation<N>], weights: &[f64]) -> [f64; N] {
    let mut scale = [0.0_f64; N];
    for row in rows {
        (0..N).for_each(|at| scale[at] += (row.weight * row.factors[at]).powi(2));
    }
    let scale = scale.map(|sum| if sum > 0.0 { sum.sqrt() } else { 1.0 });
    let (mut matrix, mut right, mut square) = ([[0.0; N]; N], [0.0; N], 0.0);
    for (row, weights) in rows.iter().zip(weights) {
        let weight = row.weight * row.weight * weights;
        let factors: [f64; N] = std::array::from_fn(|at| row.factors[at] / scale[at]);
        for at in 0..N {
            (0..N).for_each(|other| matrix[at][other] += weight * factors[at] * factors[other]);
            right[at] += weight * factors[at] * row.value;
        }
        square += weight * row.value * row.value;
    }
    let mut best = ([0.0; N], square);
    for subset in 1_u32..1 << N {
        let Some(solution) = solve_subset(&matrix, &right, subset) else { continue };
        if solution.iter().any(|coefficient| *coefficient < 0.0) {
            continue;
        }
        // Sum of squared residuals at a solution of the normal equations.
        let left: f64 =
            square - solution.iter().zip(&right).map(|(coefficient, right)| coefficient * right).sum::<f64>();
        if left < best.1 {
            best = (solution, left);
        }
    }
    std::array::from_fn(|at| best.0[at] / scale[at])
}

/// Solves the normal equations for the unknowns in the bit mask `subset`; the others are 0. `None` when they are
/// singular.
fn solve_subset<const N: usize>(matrix: &[[f64; N]; N], right: &[f64; N], subset: u32) -> Option<[f64; N]> {
    let chosen: Vec<usize> = (0..N).filter(|at| subset >> at & 1 == 1).collect();
    let mut rows: Vec<Vec<f64>> =
        chosen.iter().map(|at| chosen.iter().map(|other| matrix[*at][*other]).chain([right[*at]]).collect()).collect();
    let count = rows.len();
    for pivot in 0..count {
        let best = (pivot..count).max_by(|one, other| rows[*one][pivot].abs().total_cmp(&rows[*other][pivot].abs()))?;
        rows.swap(pivot, best);
        if rows[pivot][pivot].abs() < 1e-10 {
            return None;
        }
        for below in pivot + 1..count {
            let factor = rows[below][pivot] / rows[pivot][pivot];
            let (above, rest) = rows.split_at_mut(below);
            rest[0].iter_mut().zip(&above[pivot]).skip(pivot).for_each(|(value, by)| *value -= factor * by);
        }
    }
    let mut solution = [0.0; N];
    for at in (0..count).rev() {
        let known: f64 = (at + 1..count).map(|other| rows[at][other] * solution[chosen[other]]).sum();
        solution[chosen[at]] = (rows[at][count] - known) / rows[at][at];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn solution_resists_outliers_and_is_never_negative() {
        let row = |at: usize| {
            let (a, b) = ((at % 7) as f64, (at % 11) as f64);
            // One in ten is an outlier.
            let late = if at % 10 == 3 { 50.0 } else { 0.0 };
            Equation { factors: [a, b, 1.0], value: 3.0 * a + 0.5 * b + late, weight: 1.0 }
        };
        let rows: Vec<Equation<3>> = (0..400).map(row).collect();
        let [a, b, c] = solve(&rows);
        assert!((a - 3.0).abs() < 0.1 && (b - 0.5).abs() < 0.1 && (0.0..0.7).contains(&c), "{a} {b} {c}");
        // Unconstrained least squares would give -1 for the second.
        let rows: Vec<Equation<2>> = (1..50)
            .map(|at| Equation { factors: [f64::from(at), 1.0], value: f64::from(at) - 1.0, weight: 1.0 })
            .collect();
        let [a, b] = solve(&rows);
        assert!((0.9..1.0).contains(&a) && b == 0.0, "{a} {b}");
    }
}
