//! Routing policies on classes of traffic: every class at every load, and where `kv` stands in each of these cells.
//!
//! The classes are those that `blockyard replay --workload` generates, and a recorded trace. Not here: how a policy is
//! simulated (`router/src/replay`).

mod cell;
mod tables;

use crate::figure::{Figure, Goal};
use crate::options::root;
use crate::suite::Program;
use anyhow::{Context, Result, ensure};
use cell::{Cell, OURS, Standing, cells_of};
use serde_json::{Value, json};
use std::path::PathBuf;
use tables::{bounds_table, copies_table, farthest_from_bound, figures, results_table, standings_table};

/// Classes in which many requests share a prefix, replayed with and without these copies.
const COPIES_CLASSES: [&str; 4] = ["hot-prefix:16k@64", "hot-prefix:32k", "shifting-prefixes", "prefix-bursts"];
/// A copy may make the first tokens later by this share of their mean: the placement of later requests changes too.
const CLOSE_COPIES: f64 = 0.01;
/// The profile with the table of host memory as a comment, and the lines of that table.
const PROFILE: &str = "deploy/profiles/h100-8b.toml";
const HOST_TABLE: [&str; 4] = ["[host]", "capacity_bytes", "bytes_per_second", "latency_s"];
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

#[cfg(test)]
mod tests {
    use super::cell::WITHOUT_COPIES;
    use super::cell::tests::row;
    use super::*;

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
