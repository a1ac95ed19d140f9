//! Least squares with no figure below zero, for a handful of figures, where some of what was measured is far off.

/// One equation: figures times these are the value. The larger the weight, the more it counts.
#[derive(Clone, Copy)]
pub(super) struct Row<const N: usize> {
    pub(super) factors: [f64; N],
    pub(super) value: f64,
    pub(super) weight: f64,
}

/// Rounds of looking who is far off.
const ROUNDS: usize = 12;
/// How far off, in medians, a row may be and still count in full.
const FAR: f64 = 2.5;

/// The figures.
pub(super) fn solve<const N: usize>(rows: &[Row<N>]) -> [f64; N] {
    let mut trust = vec![1.0; rows.len()];
    let mut figures = [0.0; N];
    for _ in 0..ROUNDS {
        figures = least_squares(rows, &trust);
        let off: Vec<f64> = rows.iter().map(|row| (row.weight * (row.of(&figures) - row.value)).abs()).collect();
        let mut sorted = off.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let far = FAR * sorted.get(sorted.len() / 2).copied().unwrap_or(0.0).max(1e-12);
        for (trust, off) in trust.iter_mut().zip(off) {
            // Twice as far off counts half as much: one that hung pulls no harder than one that was late.
            *trust = (far / off).min(1.0);
        }
    }
    figures
}

impl<const N: usize> Row<N> {
    fn of(&self, figures: &[f64; N]) -> f64 {
        self.factors.iter().zip(figures).map(|(factor, figure)| factor * figure).sum()
    }
}

/// Which figures are zero in the best answer is found by trying: with five of them there are 31 ways.
fn least_squares<const N: usize>(rows: &[Row<N>], trust: &[f64]) -> [f64; N] {
    let mut scale = [0.0_f64; N];
    for row in rows {
        (0..N).for_each(|at| scale[at] += (row.weight * row.factors[at]).powi(2));
    }
    let scale = scale.map(|sum| if sum > 0.0 { sum.sqrt() } else { 1.0 });
    let (mut matrix, mut right, mut square) = ([[0.0; N]; N], [0.0; N], 0.0);
    for (row, trust) in rows.iter().zip(trust) {
        let weight = row.weight * row.weight * trust;
        let factors: [f64; N] = std::array::from_fn(|at| row.factors[at] / scale[at]);
        for at in 0..N {
            (0..N).for_each(|other| matrix[at][other] += weight * factors[at] * factors[other]);
            right[at] += weight * factors[at] * row.value;
        }
        square += weight * row.value * row.value;
    }
    let mut best = ([0.0; N], square);
    for some in 1_u32..1 << N {
        let Some(figures) = normal(&matrix, &right, some) else { continue };
        if figures.iter().any(|figure| *figure < 0.0) {
            continue;
        }
        // The sum of squares at a solution of the normal equations.
        let left: f64 = square - figures.iter().zip(&right).map(|(figure, right)| figure * right).sum::<f64>();
        if left < best.1 {
            best = (figures, left);
        }
    }
    std::array::from_fn(|at| best.0[at] / scale[at])
}

/// Solves for some of the figures, the others being zero; `None` where they cannot be told from each other.
fn normal<const N: usize>(matrix: &[[f64; N]; N], right: &[f64; N], some: u32) -> Option<[f64; N]> {
    let chosen: Vec<usize> = (0..N).filter(|at| some >> at & 1 == 1).collect();
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
    let mut figures = [0.0; N];
    for at in (0..count).rev() {
        let known: f64 = (at + 1..count).map(|other| rows[at][other] * figures[chosen[other]]).sum();
        figures[chosen[at]] = (rows[at][count] - known) / rows[at][at];
    }
    Some(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_though_some_rows_are_far_off_and_none_is_below_zero() {
        let row = |at: usize| {
            let (a, b) = ((at % 7) as f64, (at % 11) as f64);
            // One in ten hung.
            let late = if at % 10 == 3 { 50.0 } else { 0.0 };
            Row { factors: [a, b, 1.0], value: 3.0 * a + 0.5 * b + late, weight: 1.0 }
        };
        let rows: Vec<Row<3>> = (0..400).map(row).collect();
        let [a, b, c] = solve(&rows);
        assert!((a - 3.0).abs() < 0.1 && (b - 0.5).abs() < 0.1 && (0.0..0.7).contains(&c), "{a} {b} {c}");
        // The best answer without the rule would be -1 for the second.
        let rows: Vec<Row<2>> =
            (1..50).map(|at| Row { factors: [f64::from(at), 1.0], value: f64::from(at) - 1.0, weight: 1.0 }).collect();
        let [a, b] = solve(&rows);
        assert!((0.9..1.0).contains(&a) && b == 0.0, "{a} {b}");
    }
}
