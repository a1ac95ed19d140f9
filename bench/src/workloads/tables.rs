//! Tables and figures of the benchmark of routing policies.

use super::cell::{Cell, Row, Standing};
use crate::figure::{Figure, Goal};
use crate::report::table;

/// All policies of the cells of one class.
pub(super) fn results_table(cells: &[Cell]) -> String {
    let row = |cell: &Cell, row: &Row| {
        vec![
            format!("{} {}", cell.class, row.policy),
            format!("{:.2}", cell.load),
            format!("{:.2}/s", cell.rate),
            format!("{:.3} s", row.ttft_mean_s),
            format!("{:.3} s", row.ttft_p99_s),
            format!("{:.1} ms", row.itl_p50_s * 1e3),
            format!("{:.1} %", row.goodput * 100.0),
        ]
    };
    let of_cell = |cell: &Cell| cell.rows.iter().chain(&cell.clairvoyant).map(|it| row(cell, it)).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = cells.iter().flat_map(of_cell).collect();
    table(&["policy", "load", "rate", "first token", "p99", "between tokens p50", "goodput"], &rows)
}

/// The standing of `kv` in each cell.
pub(super) fn standings_table(standings: &[(&Cell, Standing)]) -> String {
    let yes = |holds: bool| if holds { "yes" } else { "NO" }.to_owned();
    let or_none = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let row = |(cell, kv): &(&Cell, Standing)| {
        let (itl, policy) = kv
            .itl_p50
            .clone()
            .map_or((String::new(), String::new()), |(ratio, policy)| (format!("{ratio:.3}"), policy));
        vec![
            cell.class.clone(),
            format!("{:.2}", cell.load),
            format!("{:.3}", kv.ttft_mean),
            format!("{:.3}", kv.ttft_p99),
            format!("{:.3}", kv.goodput),
            itl,
            policy,
            yes(kv.is_close()),
            if kv.is_close() { String::new() } else { or_none(&kv.others_close) },
            if kv.is_best() { "yes".to_owned() } else { String::new() },
            yes(kv.is_steady()),
            kv.clairvoyant.map_or(String::new(), |ratios| ratios.map(|ratio| format!("{ratio:.2}")).join(" ")),
        ]
    };
    let rows: Vec<Vec<String>> = standings.iter().map(row).collect();
    let head = [
        "kv ÷ best other",
        "load",
        "first token",
        "p99",
        "goodput",
        "between tokens",
        "of",
        "within 3 %",
        "others within 3 %",
        "best",
        "steady",
        "÷ clairvoyant",
    ];
    table(&head, &rows)
}

/// `kv` with copies ahead of demand beside `kv` without in each cell.
pub(super) fn copies_table(compared: &[(&Cell, [f64; 3])]) -> String {
    let row = |(cell, ratios): &(&Cell, [f64; 3])| {
        let [first, p99, goodput] = ratios.map(|ratio| format!("{ratio:.3}"));
        vec![cell.class.clone(), format!("{:.2}", cell.load), first, p99, goodput]
    };
    let rows: Vec<Vec<String>> = compared.iter().map(row).collect();
    table(&["kv with copies ÷ without", "load", "first token", "p99", "goodput"], &rows)
}

/// `kv` beside the offline search in each cell.
pub(super) fn bounds_table(cells: &[Cell]) -> String {
    let row = |cell: &Cell| {
        let ratios = cell.standing()?.clairvoyant?;
        let [first, p99, goodput] = ratios.map(|ratio| format!("{ratio:.3}"));
        Some(vec![cell.class.clone(), format!("{:.2}", cell.load), first, p99, goodput])
    };
    let rows: Vec<Vec<String>> = cells.iter().filter_map(row).collect();
    table(&["kv ÷ clairvoyant", "load", "first token", "p99", "goodput"], &rows)
}

/// The largest mean first token of `kv` beside that of the offline search, if it was run.
pub(super) fn farthest_from_bound<'a>(cells: impl Iterator<Item = &'a Cell>) -> Option<Figure> {
    let ratios: Vec<f64> = cells.filter_map(|cell| Some(cell.standing()?.clairvoyant?[0])).collect();
    let largest = ratios.iter().copied().max_by(f64::total_cmp)?;
    let name = format!(
        "workloads, largest mean first token of kv ÷ what a search that knows the future finds, of {} cells",
        ratios.len()
    );
    Some(Figure::ratio(name, largest, Goal::None))
}

/// Shares of cells.
pub(super) fn figures(standings: &[(&Cell, Standing)]) -> Vec<Figure> {
    let share = |what: &str, holds: fn(&Standing) -> bool, goal: Goal| {
        let met = standings.iter().filter(|(_, kv)| holds(kv)).count();
        let name = format!("workloads, share of {} cells in which kv {what}", standings.len());
        Figure::ratio(name, met as f64 / standings.len().max(1) as f64, goal)
    };
    vec![
        share(
            "is within 3 % of the best or better in both first tokens and goodput",
            Standing::is_close,
            Goal::AtLeast(1.0),
        ),
        share("is within 3 % in all three, or no policy is", Standing::is_close_or_none_is, Goal::None),
        share("is best in all three", Standing::is_best, Goal::AtLeast(0.667)),
        share("has the best mean first token", Standing::has_best_mean, Goal::None),
        share("has the best p99 first token", Standing::has_best_p99, Goal::None),
        share("has the best goodput", Standing::has_best_goodput, Goal::None),
        share("meets the rule for the time between tokens", Standing::is_steady, Goal::AtLeast(1.0)),
    ]
}
