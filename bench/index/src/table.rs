//! Medians of the records, as one table per fleet size.

use crate::options::{Options, What};
use serde_json::{Value, json};

/// A row: title, measurement, names of the values, number of decimals.
type Row = (&'static str, What, &'static [&'static str], usize);

const ROWS: [Row; 22] = [
    ("apply, fill, 1 thread, M block ops/s", What::Apply1, &["fill_mops"], 1),
    ("  the same, ns of CPU time per op", What::Apply1, &["fill_cpu_ns"], 1),
    ("apply, fill, 2 threads, M block ops/s", What::Apply2, &["fill_mops"], 1),
    ("  the same, ns of CPU time per op", What::Apply2, &["fill_cpu_ns"], 1),
    ("apply, churn, 1 thread, M block ops/s", What::Apply1, &["churn_mops"], 1),
    ("  the same, ns of CPU time per op", What::Apply1, &["churn_cpu_ns"], 1),
    ("apply, churn, 2 threads, M block ops/s", What::Apply2, &["churn_mops"], 1),
    ("  the same, ns of CPU time per op", What::Apply2, &["churn_cpu_ns"], 1),
    ("churn, evicted one by one, 1 thread, M ops/s", What::Singles1, &["churn_mops"], 1),
    ("  the same, ns of CPU time per op", What::Singles1, &["churn_cpu_ns"], 1),
    ("churn, evicted one by one, 2 threads, M ops/s", What::Singles2, &["churn_mops"], 1),
    ("  the same, ns of CPU time per op", What::Singles2, &["churn_cpu_ns"], 1),
    ("lookup at rest, p50 / p99 / p99.9 µs", What::Lookup, &["p50_us", "p99_us", "p999_us"], 1),
    ("lookup in churn, p50 / p99 / p99.9 µs", What::Concurrent, &["p50_us", "p99_us", "p999_us"], 1),
    ("lookups in churn, 1000/s", What::Concurrent, &["lookups_per_s"], 0),
    ("churn beside lookups, M block ops/s", What::Concurrent, &["churn_mops"], 1),
    ("bytes per entry", What::Memory, &["bytes_per_entry"], 0),
    ("bytes per entry, 8 of 9 evicted", What::Memory, &["sparse_bytes_per_entry"], 0),
    ("MiB grown / left when empty", What::Memory, &["grown_mib", "left_mib"], 0),
    ("wrong answers (over / under)", What::Check, &["over", "under"], 0),
    ("wrong, heads evicted / of holed", What::CheckHeads, &["over", "under", "holed"], 0),
    ("wrong, holes punched / of holed", What::CheckPunched, &["over", "under", "holed"], 0),
];

/// The tables.
pub(crate) fn of(records: &[Value], options: &Options) -> String {
    let mut text = String::new();
    for workers in &options.workers {
        let head: Vec<String> = [format!("{workers} workers")].into_iter().chain(options.indexes.clone()).collect();
        let rows = ROWS.iter().map(|row| {
            let cells = options.indexes.iter().map(|index| cell(records, *workers, index, row));
            [row.0.to_owned()].into_iter().chain(cells).collect()
        });
        text += &lay_out(&[head].into_iter().chain(rows).collect::<Vec<Vec<String>>>());
        text.push('\n');
    }
    text
}

fn cell(records: &[Value], workers: u32, index: &str, (_, what, names, decimals): &Row) -> String {
    let wanted = json!({ "index": index, "workers": workers, "what": what });
    let median = |name: &&str| {
        let of = |record: &Value| record["result"][*name].as_f64();
        let mut values: Vec<f64> = records.iter().filter(|record| record["cell"] == wanted).filter_map(of).collect();
        values.sort_unstable_by(f64::total_cmp);
        let scale = if *name == "lookups_per_s" { 1e-3 } else { 1.0 };
        values.get(values.len().saturating_sub(1) / 2).map_or("–".to_owned(), |value| {
            let value = value * scale;
            format!("{value:.decimals$}")
        })
    };
    names.iter().map(median).collect::<Vec<_>>().join(" / ")
}

/// Left-aligns the first column and right-aligns the others; adds a rule below the first row.
fn lay_out(rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |cells: &[String]| {
        let pad = |(column, cell): (usize, &String)| {
            let width = widths[column];
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        cells.iter().enumerate().map(pad).collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
    line(&rows[0]) + &line(&rule) + &rows[1..].iter().map(|row| line(row)).collect::<String>()
}
