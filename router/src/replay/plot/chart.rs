//! One chart as SVG: a value over the offered request rate, with a line per policy.

use super::escaped;
use crate::replay::Results;
use std::fmt::Write;

pub(super) struct Chart {
    pub(super) title: &'static str,
    /// Unit of the value.
    pub(super) unit: &'static str,
    pub(super) scale: Scale,
    pub(super) value: fn(&Results) -> f64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// From 0.
    Linear,
    /// For times, which differ by orders of magnitude between policies.
    Logarithmic,
}

/// Number, name and points of a policy.
type Line<'a> = (usize, &'a str, Vec<(f64, f64)>);

/// The vertical axis.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

const SIZE: (f64, f64) = (640.0, 380.0);
/// Left, top, right, bottom. The right margin holds the legend.
const MARGIN: (f64, f64, f64, f64) = (70.0, 40.0, 150.0, 50.0);
/// Palettes that are distinguishable with colour vision deficiency: Okabe and Ito's, then dark ones of Tol's "muted".
/// Black is for [`OURS`].
const COLOURS: [&str; 13] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#882255", "#117733", "#332288",
    "#aa4499", "#661100", "#88ccee",
];
/// Neighbours in the legend differ in the stroke, too. The numbers of colours and of strokes have no common divisor, so
/// 39 policies are all different.
const DASHES: [&str; 3] = ["none", "7 3", "2 3"];
/// Painted last, so that no other line covers it.
const OURS: &str = "kv";
/// Smallest value of a logarithmic axis: a nanosecond.
const LOG_MIN: f64 = 1e-9;

impl Chart {
    pub(super) fn svg(&self, results: &[Results]) -> String {
        let (left, top, right, bottom) = MARGIN;
        let (width, height) = (SIZE.0 - left - right, SIZE.1 - top - bottom);
        let x_axis = Axis::of(Scale::Linear, results.iter().map(|it| it.rate_rps));
        // NaN: no request was served.
        let y_axis = Axis::of(self.scale, results.iter().map(self.value).filter(|value| !value.is_nan()));
        let x = |rate: f64| left + width * x_axis.at(rate);
        let y = |value: f64| top + height * (1.0 - y_axis.at(value));
        let mut svg = String::new();
        // Writing into a string cannot fail.
        let mut line = |text: std::fmt::Arguments<'_>| {
            let _ = writeln!(svg, "{text}");
        };
        let (full_width, full_height) = SIZE;
        line(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full_width} {full_height}\" \
             width=\"{full_width}\" height=\"{full_height}\" font-family=\"sans-serif\" font-size=\"13\">"
        ));
        line(format_args!(r#"<text x="{left}" y="24" font-size="15">{}</text>"#, self.title));
        for tick in &x_axis.ticks {
            let (at, from, to) = (x(*tick), top, top + height);
            line(format_args!(r##"<line x1="{at:.1}" y1="{from}" x2="{at:.1}" y2="{to}" stroke="#e4e4e4"/>"##));
            line(format_args!(r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{tick}</text>"#, to + 18.0));
        }
        for tick in &y_axis.ticks {
            let (at, to) = (y(*tick), left + width);
            line(format_args!(r##"<line x1="{left}" y1="{at:.1}" x2="{to}" y2="{at:.1}" stroke="#e4e4e4"/>"##));
            line(format_args!(r#"<text x="{}" y="{:.1}" text-anchor="end">{tick}</text>"#, left - 8.0, at + 4.0));
        }
        let (middle, foot) = (left + width / 2.0, SIZE.1 - 10.0);
        line(format_args!(r#"<text x="{middle}" y="{foot}" text-anchor="middle">requests offered per second</text>"#));
        let middle = top + height / 2.0;
        line(format_args!(
            r#"<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{}</text>"#,
            self.unit
        ));
        for (nth, name, points) in self.lines(results) {
            let (colour, dash, stroke) = appearance(nth, name);
            let path: Vec<String> = points.iter().map(|it| format!("{:.1},{:.1}", x(it.0), y(it.1))).collect();
            let path = path.join(" ");
            line(format_args!(
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{stroke}\" \
                 stroke-dasharray=\"{dash}\"/>"
            ));
            for (rate, value) in &points {
                line(format_args!(r#"<circle cx="{:.1}" cy="{:.1}" r="3" fill="{colour}"/>"#, x(*rate), y(*value)));
            }
            let (key, row) = (SIZE.0 - right + 12.0, top + 8.0 + 17.0 * nth as f64);
            line(format_args!(
                "<line x1=\"{key}\" y1=\"{row}\" x2=\"{}\" y2=\"{row}\" stroke=\"{colour}\" stroke-width=\"{stroke}\" \
                 stroke-dasharray=\"{dash}\"/>",
                key + 22.0
            ));
            line(format_args!(r#"<text x="{}" y="{}">{}</text>"#, key + 28.0, row + 4.0, escaped(name)));
        }
        line(format_args!("</svg>"));
        svg
    }

    /// The number, name and points of each policy: numbers in the order of first occurrence, [`OURS`] last.
    fn lines<'a>(&self, results: &'a [Results]) -> Vec<Line<'a>> {
        let mut lines: Vec<Line<'_>> = Vec::new();
        for result in results {
            let at = lines.iter().position(|(_, name, _)| *name == result.policy).unwrap_or_else(|| {
                lines.push((lines.len(), &result.policy, Vec::new()));
                lines.len() - 1
            });
            let value = (self.value)(result);
            if !value.is_nan() {
                lines[at].2.push((result.rate_rps, value));
            }
        }
        for (.., points) in &mut lines {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        lines.sort_by_key(|(_, name, _)| *name == OURS);
        lines
    }
}

/// Colour, dashes and width of the line of a policy.
fn appearance(nth: usize, name: &str) -> (&'static str, &'static str, u32) {
    if name == OURS { ("#000000", "none", 3) } else { (COLOURS[nth % COLOURS.len()], DASHES[nth % DASHES.len()], 2) }
}

impl Axis {
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, LOG_MIN), |(low, high), it| (low.min(it), high.max(it)));
        match scale {
            Scale::Linear => {
                let step = tick_step(high);
                let count = (high / step).ceil();
                let ticks = (0..=count as u64).map(|nth| rounded(nth as f64 * step)).collect();
                Self { scale, low: 0.0, high: count * step, ticks }
            }
            Scale::Logarithmic => {
                let low = low.max(LOG_MIN).min(high);
                let powers = low.log10().floor() as i32..=high.log10().floor() as i32;
                let ticks: Vec<f64> = powers
                    .flat_map(|power| [1.0, 2.0, 5.0].map(|digit| rounded(digit * 10_f64.powi(power))))
                    .filter(|tick| (low * 0.999..=high * 1.001).contains(tick))
                    .collect();
                // A little space, also where all values are alike.
                Self { scale, low: low / 1.1, high: high * 1.1, ticks }
            }
        }
    }

    /// The position of a value, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value / self.high,
            Scale::Logarithmic => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        }
    }
}

/// A round distance that gives about six ticks up to `max`.
fn tick_step(max: f64) -> f64 {
    let rough = max / 6.0;
    let power = 10_f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].into_iter().find(|round| round * power >= rough);
    round.unwrap_or(10.0) * power
}

/// So that a label is 0.3 and not 0.30000000000000004.
fn rounded(value: f64) -> f64 {
    (value * 1e9).round() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::PolicyUnderTest;
    use std::collections::HashSet;

    #[test]
    fn every_policy_has_a_line_of_its_own() {
        let policies = PolicyUnderTest::all();
        let both =
            policies.iter().flat_map(|policy| [policy.name().to_owned(), format!("{} (no copies)", policy.name())]);
        let names: Vec<String> = both.collect();
        let lines: HashSet<_> = names.iter().enumerate().map(|(nth, name)| appearance(nth, name)).collect();
        assert_eq!(lines.len(), names.len(), "{names:?}");
        assert_eq!(HashSet::from(COLOURS).len(), COLOURS.len());
    }
}
