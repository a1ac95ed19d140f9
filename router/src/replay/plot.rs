//! The report of a replay as one HTML page: charts over the request rate, with a line per policy, and the table.
//!
//! The page needs no script and nothing from the network.

mod chart;

use super::Results;
use chart::{Chart, Scale};
use std::fmt::Write;

/// Time to first token, time between tokens and goodput over the offered rate, and a table of the same: beside the
/// charts on a wide screen, else below them.
pub fn html_report(results: &[Results], title: &str) -> String {
    let charts = [
        chart("Time to first token, mean", "seconds", Scale::Logarithmic, |it| it.ttft_mean_s),
        chart("Time to first token, p99", "seconds", Scale::Logarithmic, |it| it.ttft_p99_s),
        chart("Time between tokens, p50", "milliseconds", Scale::Logarithmic, |it| it.itl_p50_s * 1e3),
        chart("Time between tokens, p99", "milliseconds", Scale::Logarithmic, |it| it.itl_p99_s * 1e3),
        chart("Goodput: requests within the SLO", "requests per second", Scale::Linear, |it| it.goodput_rps),
    ];
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title>\n\
         <style>{STYLE}</style></head>\n<body><h1>{0}</h1>\n",
        escaped(title)
    );
    page += "<main><div>\n";
    for chart in charts {
        page += &chart.svg(results);
    }
    page += "</div>\n";
    page += &table(results);
    page += "</main></body></html>\n";
    page
}

const STYLE: &str = "body{font-family:sans-serif;margin:2em}svg{margin:0 1em 1em 0}table{border-collapse:collapse}\
    td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}\
    td:nth-child(3),th:nth-child(3){text-align:left}\
    @media(min-width:1500px){main{display:flex;align-items:flex-start}main>div{flex:1}table{position:sticky;top:1em}}";

fn chart(title: &'static str, unit: &'static str, scale: Scale, value: fn(&Results) -> f64) -> Chart {
    Chart { title, unit, scale, value }
}

fn table(results: &[Results]) -> String {
    const HEAD: [&str; 10] = [
        "load",
        "requests/s",
        "policy",
        "hits",
        "first token, mean",
        "p99",
        "between tokens, p50",
        "p99",
        "goodput",
        "SLO",
    ];
    let row = |tag: &str, cells: &[String]| {
        let cells = cells.iter().fold(String::new(), |mut row, cell| {
            // Writing into a string cannot fail.
            let _ = write!(row, "<{tag}>{}</{tag}>", escaped(cell));
            row
        });
        format!("<tr>{cells}</tr>\n")
    };
    let time = |value: f64, shown: String| if value.is_nan() { "-".to_owned() } else { shown };
    let cells = |it: &Results| {
        [
            it.load_factor.map_or(String::new(), |load| format!("{load:.2}")),
            format!("{:.2}", it.rate_rps),
            it.policy.clone(),
            format!("{:.1} %", it.hit_rate * 100.0),
            time(it.ttft_mean_s, format!("{:.3} s", it.ttft_mean_s)),
            time(it.ttft_p99_s, format!("{:.3} s", it.ttft_p99_s)),
            time(it.itl_p50_s, format!("{:.1} ms", it.itl_p50_s * 1e3)),
            time(it.itl_p99_s, format!("{:.1} ms", it.itl_p99_s * 1e3)),
            format!("{:.2}/s", it.goodput_rps),
            format!("{:.1} %", it.slo_attainment * 100.0),
        ]
    };
    let rows: String = results.iter().map(|it| row("td", &cells(it))).collect();
    format!("<table>\n{}{rows}</table>\n", row("th", &HEAD.map(str::to_owned)))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
