//! Output of a benchmark: medians, a table, and the machine and commit of the run.

use crate::options::root;
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

/// The median; of an even number of values, the lower of the two middle ones.
///
/// # Panics
/// If `times` is empty.
pub fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[(sorted.len() - 1) / 2]
}

/// The machine, its load, and the commit, as JSON.
pub fn circumstances() -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory =
        memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    let load = std::fs::read_to_string("/proc/loadavg").ok();
    json!({
        "cpu": cpu.map_or("unknown", |(_, name)| name.trim()),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_gib": memory.map(|kib: u64| kib / (1 << 20)),
        "load": load.and_then(|load| load.split(' ').next()?.parse::<f64>().ok()),
        "commit": commit(),
    })
}

/// The same as one line of text.
pub fn describe(circumstances: &Value) -> String {
    let text = |key: &str| circumstances[key].as_str().unwrap_or("unknown").to_owned();
    let (cores, memory) = (&circumstances["cores"], &circumstances["memory_gib"]);
    let load = &circumstances["load"];
    format!("{} · {cores} cores · {memory} GiB · load {load} · commit {}", text("cpu"), text("commit"))
}

fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(root()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    if changed { commit + " with changes" } else { commit }
}

/// A table with a header. Columns are right-aligned, except the first.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..head.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).chain([head[column].chars().count()]).max())
        .map(Option::unwrap_or_default)
        .collect();
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let rule = widths.iter().map(|width| "─".repeat(*width)).collect::<Vec<_>>();
    let mut text = line(head.to_vec()) + &line(rule.iter().map(String::as_str).collect());
    for row in rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text
}

/// A duration with three significant digits: `812 µs`, `4.20 ms`, `3.86 s`.
pub fn short(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_a_measured_value() {
        let ms = Duration::from_millis;
        assert_eq!(median(&[ms(3), ms(1), ms(2)]), ms(2));
        assert_eq!(median(&[ms(4), ms(1), ms(2), ms(3)]), ms(2));
    }

    #[test]
    fn durations_have_three_significant_digits() {
        assert_eq!(short(Duration::from_micros(812)), "812 µs");
        assert_eq!(short(Duration::from_micros(4_204)), "4.20 ms");
        assert_eq!(short(Duration::from_millis(3_858)), "3.86 s");
    }

    #[test]
    fn columns_are_aligned() {
        let text = table(&["a", "bb"], &[vec!["long".into(), "1".into()]]);
        assert_eq!(text, "a     bb\n────  ──\nlong   1\n");
    }
}
