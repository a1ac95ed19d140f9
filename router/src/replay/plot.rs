//! Plot of goodput over the request rate, as SVG.

use super::Results;
use std::collections::BTreeMap;
use std::fmt::Write;

const SIZE: (f64, f64) = (820.0, 460.0);
/// Left, top, right, bottom. The right margin holds the legend.
const MARGIN: (f64, f64, f64, f64) = (70.0, 40.0, 190.0, 60.0);
/// Okabe and Ito's palette, distinguishable with colour vision deficiency.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];

/// Draws requests per second within the SLO over requests per second offered, with a line per policy.
pub fn goodput_svg(results: &[Results], title: &str) -> String {
    let max = |of: fn(&Results) -> f64| results.iter().map(of).fold(1e-9, f64::max);
    let (x_tick, y_tick) = (tick_step(max(|f| f.rate_rps)), tick_step(max(|f| f.goodput_rps)));
    let (x_max, y_max) = (round_up(max(|f| f.rate_rps), x_tick), round_up(max(|f| f.goodput_rps), y_tick));
    let (left, top, right, bottom) = MARGIN;
    let (width, height) = (SIZE.0 - left - right, SIZE.1 - top - bottom);
    let x = |rate: f64| left + width * rate / x_max;
    let y = |rate: f64| top + height * (1.0 - rate / y_max);
    let mut svg = String::new();
    // Writing into a string cannot fail.
    let mut line = |text: std::fmt::Arguments<'_>| {
        let _ = writeln!(svg, "{text}");
    };
    line(format_args!(
        concat!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" "#,
            r#"font-family="sans-serif" font-size="13">"#
        ),
        SIZE.0, SIZE.1
    ));
    line(format_args!(r#"<rect width="100%" height="100%" fill="white"/>"#));
    line(format_args!(r#"<text x="{left}" y="24" font-size="16">{}</text>"#, escaped(title)));
    for tick in ticks(x_max, x_tick) {
        let at = x(tick);
        line(format_args!(r##"<line x1="{at:.1}" y1="{top}" x2="{at:.1}" y2="{:.1}" stroke="#e4e4e4"/>"##, y(0.0)));
        line(format_args!(r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{tick}</text>"#, y(0.0) + 20.0));
    }
    for tick in ticks(y_max, y_tick) {
        let at = y(tick);
        line(format_args!(r##"<line x1="{left}" y1="{at:.1}" x2="{:.1}" y2="{at:.1}" stroke="#e4e4e4"/>"##, x(x_max)));
        line(format_args!(r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{tick}</text>"#, left - 8.0, at + 4.0));
    }
    let (middle, foot) = (left + width / 2.0, SIZE.1 - 14.0);
    line(format_args!(
        r#"<text x="{middle:.1}" y="{foot:.1}" text-anchor="middle">requests offered per second</text>"#
    ));
    let middle = top + height / 2.0;
    line(format_args!(
        concat!(
            r#"<text transform="translate(18 {:.1}) rotate(-90)" text-anchor="middle">"#,
            "requests within the SLO per second</text>"
        ),
        middle
    ));
    for (at, (name, mut points)) in by_policy(results).into_iter().enumerate() {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let colour = COLOURS[at % COLOURS.len()];
        let path: Vec<String> = points.iter().map(|(rate, good)| format!("{:.1},{:.1}", x(*rate), y(*good))).collect();
        line(format_args!(r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#, path.join(" ")));
        for (rate, good) in &points {
            line(format_args!(r#"<circle cx="{:.1}" cy="{:.1}" r="3.5" fill="{colour}"/>"#, x(*rate), y(*good)));
        }
        let (key, row) = (SIZE.0 - right + 16.0, top + 12.0 + 20.0 * at as f64);
        line(format_args!(r#"<rect x="{key:.1}" y="{:.1}" width="14" height="4" fill="{colour}"/>"#, row - 6.0));
        line(format_args!(r#"<text x="{:.1}" y="{row:.1}">{}</text>"#, key + 22.0, escaped(name)));
    }
    line(format_args!("</svg>"));
    svg
}

/// Points by policy. Policies are in order of first occurrence.
fn by_policy(results: &[Results]) -> Vec<(&str, Vec<(f64, f64)>)> {
    let mut order = BTreeMap::new();
    let mut lines: Vec<(&str, Vec<(f64, f64)>)> = Vec::new();
    for result in results {
        let at = *order.entry(result.policy.as_str()).or_insert_with(|| {
            lines.push((&result.policy, Vec::new()));
            lines.len() - 1
        });
        lines[at].1.push((result.rate_rps, result.goodput_rps));
    }
    lines
}

/// A round distance that gives about six ticks up to `max`.
fn tick_step(max: f64) -> f64 {
    let rough = max / 6.0;
    let power = 10_f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].into_iter().find(|round| round * power >= rough);
    round.unwrap_or(10.0) * power
}

fn round_up(max: f64, tick_step: f64) -> f64 {
    (max / tick_step).ceil() * tick_step
}

fn ticks(max: f64, tick_step: f64) -> impl Iterator<Item = f64> {
    // Rounded, so that a label is 0.3 and not 0.30000000000000004.
    let digits = 1e6;
    (0..=(max / tick_step).round() as u64).map(move |at| (at as f64 * tick_step * digits).round() / digits)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
