//! Routing policies on classes of traffic: every class at every load, and where `kv` stands in each of these cells.
//!
//! The classes are those that `blockyard replay --workload` generates, and a recorded trace. Not here: how a policy is
//! simulated (`router/src/replay`).

use crate::figure::{Figure, Goal};
use crate::options::root;
use crate::report::table;
use crate::suite::{Program, number};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;

/// The policy under test.
const OURS: &str = "kv";
/// The policy under test without copies of prefixes ahead of demand, as `--prefetch both` names it.
const WITHOUT_COPIES: &str = "kv (no copies)";
/// Classes in which many requests share a prefix, replayed with and without these copies.
const COPIES_CLASSES: [&str; 4] = ["hot-prefix:16k@64", "hot-prefix:32k", "shifting-prefixes", "prefix-bursts"];
/// A copy may make the first tokens later by this share of their mean: the placement of later requests changes too.
const CLOSE_COPIES: f64 = 0.01;
/// The profile with the table of host memory as a comment, and the lines of that table.
const PROFILE: &str = "deploy/profiles/h100-8b.toml";
const HOST_TABLE: [&str; 4] = ["[host]", "capacity_bytes", "bytes_per_second", "latency_s"];
/// The offline search, which is no policy.
const CLAIRVOYANT: &str = "clairvoyant";
/// `kv` may be worse than the best by this share, in each of the times to first token and in goodput.
const CLOSE: f64 = 0.03;
/// The rule for the time between tokens: at most this much longer than that of any policy whose mean time to first
/// token is nearly the lowest.
const CLOSE_ITL: f64 = 0.05;
/// Nearly the lowest mean time to first token.
const NEARLY_LOWEST: f64 = 0.10;
/// Two results are equal when they differ by less: that is below what the table shows.
const EQUAL: f64 = 0.0005;
/// What [`Bound::Few`] replays: classes that differ in what a policy has to weigh, below and at capacity, with one
/// seed. The search begins with the assignment of one of these policies.
const FEW_CLASSES: [&str; 4] = ["no-reuse", "chat", "documents", "prefix-bursts"];
const FEW: [&str; 7] =
    ["--runs", "1", "--load-factor", "0.8,1", "--policy", "kv,least-loaded,lmetric,smg", "--clairvoyant"];

/// Requests and a fleet. Written as `hot-prefix:32k@64`: a workload of `blockyard replay`, or `trace`, and the number
/// of workers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Class {
    workload: String,
    workers: String,
}

/// Where an offline search that knows the future is run beside the policies. It takes a hundred times as long as they
/// do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Bound {
    /// In replays of its own, of a few classes: some minutes.
    Few,
    /// In all cells.
    All,
    /// In the cells of this class.
    Class(Class),
    /// Nowhere.
    None,
}

/// What is replayed, and how.
pub struct Suite {
    /// The program `blockyard`.
    pub program: PathBuf,
    /// A recorded trace; without it the class `trace` is skipped.
    pub trace: Option<String>,
    /// The classes; all if empty.
    pub classes: Vec<Class>,
    /// Loads as shares of the capacity, separated by commas.
    pub loads: String,
    /// Policies, separated by commas; all if empty.
    pub policies: String,
    /// Number of seeds.
    pub seeds: String,
    /// Where the offline search is run.
    pub bound: Bound,
    /// Print no tables.
    pub quiet: bool,
}

/// The results of all policies for one class and load.
#[derive(Clone, PartialEq, Debug)]
struct Cell {
    class: String,
    load: f64,
    rate: f64,
    rows: Vec<Row>,
    /// The best that the offline search has found.
    clairvoyant: Option<Row>,
}

/// The results of one policy. Times are in seconds.
#[derive(Clone, PartialEq, Debug)]
struct Row {
    policy: String,
    ttft_mean_s: f64,
    ttft_p99_s: f64,
    itl_p50_s: f64,
    /// Share of requests within the SLO.
    goodput: f64,
}

/// `kv` beside the other policies in one cell: its results divided by the best of the others.
#[derive(Clone, PartialEq, Debug)]
struct Standing {
    ttft_mean: f64,
    ttft_p99: f64,
    goodput: f64,
    /// Divided by the shortest of the policies whose mean time to first token is nearly the lowest, and that policy;
    /// `None` if there is no such policy.
    itl_p50: Option<(f64, String)>,
    /// Mean and p99 of the time to first token, and goodput, divided by those of the offline search.
    clairvoyant: Option<[f64; 3]>,
}

impl Class {
    /// Parses `workload` or `workload@workers`.
    pub fn parse(text: &str) -> Self {
        let (workload, workers) = text.split_once('@').unwrap_or((text, "16"));
        Self { workload: workload.to_owned(), workers: workers.to_owned() }
    }

    /// All classes: hot prefixes on fleets of three sizes, the others on one.
    fn all() -> Vec<Self> {
        let hot = ["4k", "16k", "32k"]
            .into_iter()
            .flat_map(|length| ["16", "64", "256"].map(|workers| format!("hot-prefix:{length}@{workers}")));
        let others = ["shifting-prefixes", "decode-heavy", "documents", "chat", "prefix-bursts", "trace"];
        let names = ["agents", "no-reuse"].map(str::to_owned).into_iter().chain(hot).chain(others.map(str::to_owned));
        names.map(|name| Self::parse(&name)).collect()
    }

    fn name(&self) -> String {
        format!("{}@{}", self.workload, self.workers)
    }
}

impl Bound {
    /// Parses `few`, `all`, `none` or a class.
    pub fn parse(text: &str) -> Self {
        match text {
            "few" => Self::Few,
            "all" => Self::All,
            "none" => Self::None,
            class => Self::Class(Class::parse(class)),
        }
    }

    /// Whether it is searched beside all policies of a class.
    fn includes(&self, class: &Class) -> bool {
        match self {
            Self::All => true,
            Self::Class(one) => one == class,
            Self::Few | Self::None => false,
        }
    }
}

impl Suite {
    /// Replays all cells. Prints each class when it is finished, then the standing of `kv` in each cell, and beside the
    /// offline search. Returns the summary, and all cells as JSON.
    pub fn run(&self) -> Result<(Vec<Figure>, Value)> {
        let mut cells = Vec::new();
        let shared = [&["--runs", &*self.seeds, "--load-factor", &*self.loads][..], &self.policy()[..]].concat();
        for class in if self.classes.is_empty() { Class::all() } else { self.classes.clone() } {
            if class.workload == "trace" && self.trace.is_none() {
                eprintln!("{}: skipped, because no trace is given", class.name());
                continue;
            }
            let search = self.bound.includes(&class).then_some("--clairvoyant");
            let of_class = self.replay(&class, &[&shared[..], search.as_slice()].concat())?;
            self.print(&results_table(&of_class));
            cells.extend(of_class);
        }
        let standings: Vec<(&Cell, Standing)> =
            cells.iter().filter_map(|cell| Some((cell, cell.standing()?))).collect();
        self.print(&standings_table(&standings));
        let bounds = self.few()?;
        if !bounds.is_empty() {
            self.print(&bounds_table(&bounds));
        }
        let mut figures = figures(&standings);
        figures.extend(farthest_from_bound(cells.iter().chain(&bounds)));
        let as_json = |cells: &[Cell]| cells.iter().map(Cell::as_json).collect::<Vec<_>>();
        Ok((figures, json!({ "cells": as_json(&cells), "bound": as_json(&bounds) })))
    }

    /// The cells of [`Bound::Few`].
    fn few(&self) -> Result<Vec<Cell>> {
        let mut cells = Vec::new();
        for class in FEW_CLASSES.map(Class::parse) {
            if self.bound == Bound::Few && (self.classes.is_empty() || self.classes.contains(&class)) {
                cells.extend(self.replay(&class, &FEW)?);
            }
        }
        Ok(cells)
    }

    /// Replays classes with shared prefixes on workers with host memory that read each other's, with copies ahead of
    /// demand and without. Prints the table. Returns the summary, and all cells as JSON.
    pub fn copies(&self) -> Result<(Vec<Figure>, Value)> {
        let folder = tempfile::tempdir()?;
        let profile = folder.path().join("with-host.toml");
        std::fs::write(&profile, with_host_memory(&std::fs::read_to_string(root().join(PROFILE)).context(PROFILE)?)?)?;
        let profile = profile.display().to_string();
        let how = ["--runs", &self.seeds, "--load-factor", &self.loads, "--policy", OURS, "--prefetch", "both"];
        let how = [&how[..], &["--profile", &profile]].concat();
        let mut cells = Vec::new();
        for class in COPIES_CLASSES.map(Class::parse) {
            if self.classes.is_empty() || self.classes.contains(&class) {
                cells.extend(self.replay(&class, &how)?);
            }
        }
        let compared: Vec<_> = cells.iter().filter_map(|cell| Some((cell, cell.with_copies()?))).collect();
        self.print(&copies_table(&compared));
        let later = compared.iter().filter(|(_, [first, ..])| *first > 1.0 + CLOSE_COPIES).count();
        let name = format!(
            "copies ahead of demand, cells of {} in which the mean first token of kv is more than 1 % later",
            compared.len()
        );
        let figures = vec![Figure::of(name, later as f64, "", Goal::AtMost(0.0))];
        Ok((figures, json!(cells.iter().map(Cell::as_json).collect::<Vec<_>>())))
    }

    fn policy(&self) -> Vec<&str> {
        if self.policies.is_empty() { Vec::new() } else { vec!["--policy", self.policies.as_str()] }
    }

    fn print(&self, table: &str) {
        if !self.quiet {
            println!("{table}");
        }
    }

    /// The cells of a class. `how`: options of `blockyard replay`.
    fn replay(&self, class: &Class, how: &[&str]) -> Result<Vec<Cell>> {
        let mut arguments = vec!["replay"];
        match (&self.trace, class.workload.as_str()) {
            (Some(trace), "trace") => arguments.push(trace),
            (_, workload) => arguments.extend(["--workload", workload]),
        }
        arguments.extend(["--workers", &class.workers]);
        arguments.extend(how);
        let (printed, _) = Program::new("replay", self.program.clone(), &arguments).run()?;
        let report = printed.first().context("no report")?;
        cells_of(&class.name(), report).with_context(|| format!("{}: replay printed something else", class.name()))
    }
}

/// The cells of a report of `blockyard replay`.
fn cells_of(class: &str, report: &Value) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    for results in report["policies"].as_array().context("no policies")? {
        let (load, rate) = (number(&results["load_factor"])?, number(&results["rate_rps"])?);
        let row = Row {
            policy: results["policy"].as_str().context("no name of a policy")?.to_owned(),
            ttft_mean_s: number(&results["ttft_mean_s"])?,
            ttft_p99_s: number(&results["ttft_p99_s"])?,
            itl_p50_s: number(&results["itl_p50_s"])?,
            goodput: number(&results["slo_attainment"])?,
        };
        if cells.last().is_none_or(|cell| cell.load.to_bits() != load.to_bits()) {
            cells.push(Cell { class: class.to_owned(), load, rate, rows: Vec::new(), clairvoyant: None });
        }
        let cell = cells.last_mut().context("no cell")?;
        if row.policy == CLAIRVOYANT {
            cell.clairvoyant = Some(row);
        } else {
            cell.rows.push(row);
        }
    }
    Ok(cells)
}

impl Cell {
    /// `None` if `kv` or every other policy was not replayed.
    fn standing(&self) -> Option<Standing> {
        let ours = self.rows.iter().find(|row| row.policy == OURS)?;
        let others = || self.rows.iter().filter(|row| row.policy != OURS);
        let least = |of: fn(&Row) -> f64| others().map(of).min_by(f64::total_cmp);
        let (ttft_mean, ttft_p99) = (least(|row| row.ttft_mean_s)?, least(|row| row.ttft_p99_s)?);
        let goodput = others().map(|row| row.goodput).max_by(f64::total_cmp)?;
        let nearly_lowest = ttft_mean.min(ours.ttft_mean_s) * (1.0 + NEARLY_LOWEST);
        let near = others().filter(|row| row.ttft_mean_s <= nearly_lowest);
        let steadiest = near.min_by(|a, b| a.itl_p50_s.total_cmp(&b.itl_p50_s));
        // Where no policy serves any request in time, all are equal.
        let of_goodput = |best: f64| if best > 0.0 { ours.goodput / best } else { 1.0 };
        let clairvoyant = self
            .clairvoyant
            .as_ref()
            .map(|row| [ours.ttft_mean_s / row.ttft_mean_s, ours.ttft_p99_s / row.ttft_p99_s, of_goodput(row.goodput)]);
        Some(Standing {
            ttft_mean: ours.ttft_mean_s / ttft_mean,
            ttft_p99: ours.ttft_p99_s / ttft_p99,
            goodput: of_goodput(goodput),
            clairvoyant,
            itl_p50: steadiest.map(|row| (ours.itl_p50_s / row.itl_p50_s, row.policy.clone())),
        })
    }

    /// Mean and p99 of the time to first token, and goodput, of `kv` with copies ahead of demand, divided by those
    /// without.
    fn with_copies(&self) -> Option<[f64; 3]> {
        let of = |policy: &str| self.rows.iter().find(|row| row.policy == policy);
        let (with, without) = (of(OURS)?, of(WITHOUT_COPIES)?);
        let goodput = if without.goodput > 0.0 { with.goodput / without.goodput } else { 1.0 };
        Some([with.ttft_mean_s / without.ttft_mean_s, with.ttft_p99_s / without.ttft_p99_s, goodput])
    }

    fn as_json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "policy": row.policy, "ttft_mean_s": row.ttft_mean_s, "ttft_p99_s": row.ttft_p99_s,
                "itl_p50_s": row.itl_p50_s, "goodput": row.goodput,
            })
        });
        let standing = self.standing().map(|kv| {
            json!({
                "ttft_mean": kv.ttft_mean, "ttft_p99": kv.ttft_p99, "goodput": kv.goodput,
                "itl_p50": kv.itl_p50.as_ref().map(|(ratio, _)| ratio),
                "clairvoyant": kv.clairvoyant, "close": kv.is_close(), "best": kv.is_best(), "steady": kv.is_steady(),
            })
        });
        let (class, load, rate) = (&self.class, self.load, self.rate);
        json!({ "class": class, "load": load, "rate_rps": rate, "kv": standing, "policies": rows.collect::<Vec<_>>() })
    }
}

impl Standing {
    /// Within 3 % of the best policy, or better, in all three measures.
    fn is_close(&self) -> bool {
        self.is_within(CLOSE)
    }

    /// The best policy in all three measures, or equal to it.
    fn is_best(&self) -> bool {
        self.is_within(EQUAL)
    }

    fn is_within(&self, share: f64) -> bool {
        self.ttft_mean <= 1.0 + share && self.ttft_p99 <= 1.0 + share && self.goodput >= 1.0 - share
    }

    /// Whether the rule for the time between tokens holds.
    fn is_steady(&self) -> bool {
        self.itl_p50.as_ref().is_none_or(|(ratio, _)| *ratio <= 1.0 + CLOSE_ITL)
    }
}

/// All policies of the cells of one class.
fn results_table(cells: &[Cell]) -> String {
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
fn standings_table(standings: &[(&Cell, Standing)]) -> String {
    let yes = |holds: bool| if holds { "yes" } else { "NO" }.to_owned();
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
        "best",
        "steady",
        "÷ clairvoyant",
    ];
    table(&head, &rows)
}

/// The profile with its table of host memory, whose lines are comments in the file.
fn with_host_memory(profile: &str) -> Result<String> {
    let mut found = 0;
    let line = |line: &str| {
        let uncommented = line.strip_prefix("# ").filter(|rest| HOST_TABLE.iter().any(|start| rest.starts_with(start)));
        found += usize::from(uncommented.is_some());
        uncommented.unwrap_or(line).to_owned() + "\n"
    };
    let text = profile.lines().map(line).collect();
    ensure!(found == HOST_TABLE.len(), "{PROFILE} has another table [host] than this benchmark expects");
    Ok(text)
}

/// `kv` with copies ahead of demand beside `kv` without in each cell.
fn copies_table(compared: &[(&Cell, [f64; 3])]) -> String {
    let row = |(cell, ratios): &(&Cell, [f64; 3])| {
        let [first, p99, goodput] = ratios.map(|ratio| format!("{ratio:.3}"));
        vec![cell.class.clone(), format!("{:.2}", cell.load), first, p99, goodput]
    };
    let rows: Vec<Vec<String>> = compared.iter().map(row).collect();
    table(&["kv with copies ÷ without", "load", "first token", "p99", "goodput"], &rows)
}

/// `kv` beside the offline search in each cell.
fn bounds_table(cells: &[Cell]) -> String {
    let row = |cell: &Cell| {
        let ratios = cell.standing()?.clairvoyant?;
        let [first, p99, goodput] = ratios.map(|ratio| format!("{ratio:.3}"));
        Some(vec![cell.class.clone(), format!("{:.2}", cell.load), first, p99, goodput])
    };
    let rows: Vec<Vec<String>> = cells.iter().filter_map(row).collect();
    table(&["kv ÷ clairvoyant", "load", "first token", "p99", "goodput"], &rows)
}

/// The largest mean first token of `kv` beside that of the offline search, if it was run.
fn farthest_from_bound<'a>(cells: impl Iterator<Item = &'a Cell>) -> Option<Figure> {
    let ratios: Vec<f64> = cells.filter_map(|cell| Some(cell.standing()?.clairvoyant?[0])).collect();
    let largest = ratios.iter().copied().max_by(f64::total_cmp)?;
    let name = format!(
        "workloads, largest mean first token of kv ÷ what a search that knows the future finds, of {} cells",
        ratios.len()
    );
    Some(Figure::ratio(name, largest, Goal::None))
}

/// Shares of cells.
fn figures(standings: &[(&Cell, Standing)]) -> Vec<Figure> {
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
        share("is best in all three", Standing::is_best, Goal::AtLeast(0.667)),
        share("has the best mean first token", |kv| kv.ttft_mean <= 1.0 + EQUAL, Goal::None),
        share("has the best p99 first token", |kv| kv.ttft_p99 <= 1.0 + EQUAL, Goal::None),
        share("has the best goodput", |kv| kv.goodput >= 1.0 - EQUAL, Goal::None),
        share("meets the rule for the time between tokens", Standing::is_steady, Goal::AtLeast(1.0)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &str, ttft_mean_s: f64, itl_p50_s: f64, goodput: f64) -> Row {
        Row { policy: policy.into(), ttft_mean_s, ttft_p99_s: 10.0 * ttft_mean_s, itl_p50_s, goodput }
    }

    fn standing(rows: &[Row]) -> Standing {
        Cell { class: "chat@16".into(), load: 1.0, rate: 9.0, rows: rows.to_vec(), clairvoyant: None }
            .standing()
            .unwrap()
    }

    #[test]
    fn kv_is_compared_with_the_best_of_each_measure() {
        let kv =
            standing(&[row("kv", 1.02, 0.01, 0.9), row("random", 2.0, 0.01, 0.92), row("session", 1.0, 0.02, 0.5)]);
        assert!((kv.ttft_mean - 1.02).abs() < 1e-9 && (kv.goodput - 0.9 / 0.92).abs() < 1e-9, "{kv:?}");
        assert!(kv.is_close() && !kv.is_best(), "{kv:?}");
        assert!(standing(&[row("kv", 1.0, 0.01, 0.0), row("random", 1.0, 0.01, 0.0)]).is_best());
        assert!(!standing(&[row("kv", 1.04, 0.01, 0.9), row("random", 1.0, 0.01, 0.9)]).is_close());
    }

    #[test]
    fn time_between_tokens_is_compared_with_policies_of_nearly_the_lowest_first_token() {
        let kv = |others: &[Row]| standing(&[&[row("kv", 1.0, 0.012, 0.9)], others].concat());
        assert!(kv(&[row("random", 1.2, 0.01, 0.9)]).itl_p50.is_none());
        let near = kv(&[row("random", 1.05, 0.01, 0.9), row("session", 1.0, 0.012, 0.9)]);
        assert!(near.itl_p50 == Some((0.012 / 0.01, "random".into())) && !near.is_steady(), "{near:?}");
    }

    #[test]
    fn cells_are_read_from_a_report() {
        let results = |policy: &str, load: f64| {
            json!({
                "policy": policy, "load_factor": load, "rate_rps": 10.0 * load, "ttft_mean_s": 0.5, "ttft_p99_s": 2.0,
                "itl_p50_s": 0.01, "slo_attainment": 0.9,
            })
        };
        let all =
            [("kv", 0.6), ("random", 0.6), ("clairvoyant", 0.6), ("kv", 1.2)].map(|(name, load)| results(name, load));
        let cells = cells_of("chat@16", &json!({ "policies": all })).unwrap();
        assert_eq!(cells[0].standing().unwrap().clairvoyant, Some([1.0; 3]));
        assert_eq!(cells.iter().map(|cell| (cell.load, cell.rows.len())).collect::<Vec<_>>(), [(0.6, 2), (1.2, 1)]);
        assert!(cells[1].standing().is_none() && cells_of("chat@16", &json!({})).is_err());
        assert!(bounds_table(&cells).contains("1.000") && !bounds_table(&cells).contains("1.20"), "of the first only");
        assert!(farthest_from_bound(cells.iter()).is_some() && farthest_from_bound(cells[1..].iter()).is_none());
    }

    #[test]
    fn copies_are_compared_with_the_same_policy_without() {
        let rows = vec![row(OURS, 0.9, 0.01, 0.9), row(WITHOUT_COPIES, 1.0, 0.01, 0.0)];
        let mut cell = Cell { class: "chat@16".into(), load: 1.0, rate: 9.0, rows, clairvoyant: None };
        assert_eq!(cell.with_copies(), Some([0.9, 0.9, 1.0]));
        assert!(copies_table(&[(&cell, [0.9, 0.9, 1.0])]).contains("0.900"));
        cell.rows.pop();
        assert_eq!(cell.with_copies(), None);
    }

    #[test]
    fn the_profile_has_a_table_of_host_memory() {
        let profile = with_host_memory(&std::fs::read_to_string(root().join(PROFILE)).unwrap()).unwrap();
        assert!(profile.contains("\n[host]\ncapacity_bytes = "), "{profile}");
        assert!(with_host_memory("# [host]\n").is_err());
    }

    #[test]
    fn the_search_runs_where_it_is_asked_for() {
        let chat = Class::parse("chat");
        let includes = ["few", "all", "none", "chat", "chat@64"].map(|bound| Bound::parse(bound).includes(&chat));
        assert_eq!(includes, [false, true, false, true, false]);
    }

    #[test]
    fn a_class_has_a_number_of_workers() {
        assert_eq!(Class::parse("chat").name(), "chat@16");
        assert_eq!(Class::parse("hot-prefix:32k@64").name(), "hot-prefix:32k@64");
        assert_eq!(Class::all().len(), 17);
    }
}
