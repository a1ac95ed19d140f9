//! The benchmarks of the router in one run: each figure beside its goal.
//!
//! This program links no crate of Blockyard. It runs the programs that measure the index, a routing decision, and the
//! replay of a recorded trace and of classes of traffic, and reads their JSON.

use anyhow::{Context, Result, bail, ensure};
use bench::figure::{Figure, Goal};
use bench::options::{root, target_directory, target_directory_of};
use bench::report::circumstances;
use bench::suite::{self, Program, number};
use bench::workloads::{Bound, Class, Suite};
use serde_json::{Map, Value};
use std::path::PathBuf;

const USAGE: &str = "\
Benchmarks of the router, each figure beside its goal. A full run takes an hour.

  --trace FILE      a trace in Mooncake's format (docs/replay.md says where to get one); without it the parts that
                    need one are skipped: index, replay, and the class trace of workloads
  --json            print JSON instead of a table
  --only NAME       index, decision, replay, workloads or copies only; may be repeated
  --runs N          runs per policy and load of the replays, each with its own seed (5)
  --repetitions N   repetitions of the comparison with other indexes (3)

For a part of the workloads, and of the copies ahead of demand:

  --class CLASS     a class of traffic, like chat or hot-prefix:32k@64 (@ and the number of workers, 16 by default), or
                    trace; may be repeated
  --load X,…        loads, as shares of the capacity (0.6,0.8,1,1.2)
  --bound WHICH     where a search that knows the future looks for the best assignment of requests: few (one seed of
                    four classes, at 80 and 100 % of the capacity: some minutes), all, none, or a class (few)
  --policy NAME,…   policies (all)";

const PARTS: [&str; 5] = ["index", "decision", "replay", "workloads", "copies"];
/// Parts that need a trace.
const OF_TRACE: [&str; 2] = ["index", "replay"];
/// Distinct blocks announced to an index whose memory limit allows a quarter of the smaller number.
const DISTINCT_BLOCKS: [&str; 2] = ["10000000", "100000000"];
/// The published index with a goal of its own: ours must apply at least 1.5 times as many operations per second in
/// churn.
const KV_INDEX: &str = "kv-index";
/// The goals for the p99 of a decision over 1,024 workers: what must hold, and what is aimed at.
const DECISION_P99_US: &[Goal] = &[Goal::Below(100.0), Goal::Below(60.0)];
const NO_GOAL: &[Goal] = &[Goal::None];
/// Fleet sizes, each with the goal for the p99 of a lookup during churn, in microseconds.
const LOOKUP_P99_US: [(u64, f64); 2] = [(128, 4.0), (1024, 8.0)];

struct Options {
    json: bool,
    trace: Option<String>,
    only: Vec<String>,
    runs: String,
    repetitions: String,
    classes: Vec<Class>,
    loads: String,
    policies: String,
    bound: Bound,
}

impl Options {
    fn from_args() -> Result<Self> {
        let mut options = Self {
            json: false,
            trace: None,
            only: Vec::new(),
            runs: "5".into(),
            repetitions: "3".into(),
            classes: Vec::new(),
            loads: "0.6,0.8,1,1.2".into(),
            policies: String::new(),
            bound: Bound::Few,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--json" => options.json = true,
                "--trace" => options.trace = Some(value()?),
                "--class" => options.classes.push(Class::parse(&value()?)),
                "--bound" => options.bound = Bound::parse(&value()?),
                "--load" => options.loads = value()?,
                "--policy" => options.policies = value()?,
                "--only" => options.only.push(value()?),
                "--runs" => options.runs = value()?,
                "--repetitions" => options.repetitions = value()?,
                "--help" | "-h" => {
                    println!("{USAGE}");
                    std::process::exit(0);
                }
                _ => bail!("unknown option {argument}\n\n{USAGE}"),
            }
        }
        if let Some(part) = options.only.iter().find(|part| OF_TRACE.contains(&part.as_str())) {
            ensure!(options.trace.is_some(), "--only {part}: needs --trace FILE");
        }
        Ok(options)
    }
}

fn main() -> Result<()> {
    let options = Options::from_args()?;
    let circumstances = circumstances();
    let (mut figures, mut details) = (Vec::new(), Map::new());
    for part in suite::selected(&PARTS, &options.only)? {
        let part_of = |result: Result<Vec<Figure>>| result.with_context(|| format!("{part} printed something else"));
        figures.extend(match (part.as_str(), &options.trace) {
            ("index", Some(trace)) => {
                let path = target_directory_of(&root().join("bench/index"))?.join("release/bench-index");
                let arguments = ["--trace", trace, "--repetitions", &options.repetitions];
                let (printed, _) = Program::new("index", path.clone(), &arguments).run()?;
                let mut figures = part_of(index(&printed))?;
                for blocks in DISTINCT_BLOCKS {
                    let (printed, _) = Program::new("index", path.clone(), &["--distinct", blocks]).run()?;
                    figures.push(memory_limit(&printed)?);
                }
                figures
            }
            ("replay", Some(trace)) => part_of(Replay::new(trace, &options.runs)?.figures())?,
            ("decision", _) => {
                let path = target_directory()?.join("release/examples/decide");
                let (printed, _) = Program::new("decision", path, &[]).run()?;
                part_of(decision(&printed))?
            }
            ("workloads" | "copies", _) => {
                let suite = workloads(&options)?;
                let (figures, cells) = if part == "copies" { suite.copies()? } else { suite.run()? };
                details.insert(part.clone(), cells);
                figures
            }
            _ => {
                eprintln!("{part}: skipped, because no trace is given");
                Vec::new()
            }
        });
    }
    suite::print(&circumstances, &figures, &details.into(), options.json);
    Ok(())
}

/// Policies on classes of traffic.
fn workloads(options: &Options) -> Result<Suite> {
    let Options { json, trace, classes, loads, policies, runs, bound, .. } = options;
    Ok(Suite {
        program: target_directory()?.join("release/blockyard"),
        trace: trace.clone(),
        classes: classes.clone(),
        loads: loads.clone(),
        policies: policies.clone(),
        seeds: runs.clone(),
        bound: bound.clone(),
        quiet: *json,
    })
}

/// Our index compared with published ones: medians of the records of each index, fleet size and measurement.
fn index(printed: &[Value]) -> Result<Vec<Figure>> {
    let records = printed.first().and_then(Value::as_array).context("no records")?;
    let median = |index: &str, workers: u64, what: &str, figure: &str| {
        let same = |cell: &Value| cell["index"] == index && cell["workers"] == workers && cell["what"] == what;
        let of = records.iter().filter(|record| same(&record["cell"]));
        let mut values: Vec<f64> = of.filter_map(|record| record["result"][figure].as_f64()).collect();
        values.sort_unstable_by(f64::total_cmp);
        values.get(values.len().saturating_sub(1) / 2).copied()
    };
    let mut indexes: Vec<&str> = records.iter().filter_map(|record| record["cell"]["index"].as_str()).collect();
    indexes.sort_unstable();
    indexes.dedup();
    let mut figures = Vec::new();
    for (workers, lookup_us) in LOOKUP_P99_US {
        let ours = |what: &str, figure: &str| {
            median("blockyard", workers, what, figure).with_context(|| format!("no {figure} of {what}"))
        };
        let others = |what: &str, figure: &str| -> Vec<f64> {
            indexes
                .iter()
                .filter(|name| **name != "blockyard")
                .filter_map(|n| median(n, workers, what, figure))
                .collect()
        };
        let most = |values: Vec<f64>| values.into_iter().fold(f64::MIN_POSITIVE, f64::max);
        let least = |values: Vec<f64>| values.into_iter().fold(f64::INFINITY, f64::min);
        let mut add = |figure: Figure| figures.push(figure);
        let named = |what: &str| format!("index, {workers} workers: {what}");
        let churn = ours("apply2", "churn_mops")?;
        add(Figure::of(named("churn, 2 threads"), churn, "M ops/s", Goal::None));
        add(Figure::ratio(
            named("churn, 2 threads ÷ the best other index"),
            churn / most(others("apply2", "churn_mops")),
            Goal::AtLeast(1.0),
        ));
        for (what, cell, figure) in [
            ("churn, 1 thread", "apply1", "churn_mops"),
            ("filling, 1 thread", "apply1", "fill_mops"),
            ("filling, 2 threads", "apply2", "fill_mops"),
            ("churn, evicted one by one, 1 thread", "singles1", "churn_mops"),
            ("churn, evicted one by one, 2 threads", "singles2", "churn_mops"),
        ] {
            let ratio = ours(cell, figure)? / most(others(cell, figure));
            add(Figure::ratio(named(&format!("{what} ÷ the best other index")), ratio, Goal::AtLeast(1.0)));
        }
        let kv_index = median(KV_INDEX, workers, "apply2", "churn_mops");
        add(kv_index.map_or_else(
            || Figure::missing(named("churn, 2 threads ÷ kv-index"), "not run", Goal::AtLeast(1.5)),
            |peer| Figure::ratio(named("churn, 2 threads ÷ kv-index"), churn / peer, Goal::AtLeast(1.5)),
        ));
        for (what, cell) in [("without churn", "lookup"), ("in churn", "concurrent")] {
            for quantile in ["p50_us", "p99_us"] {
                let (time, name) = (ours(cell, quantile)?, &quantile[..3]);
                let goal =
                    if (cell, quantile) == ("concurrent", "p99_us") { Goal::AtMost(lookup_us) } else { Goal::None };
                add(Figure::of(named(&format!("lookup {what}, {name}")), time, "µs", goal));
                let ratio = time / least(others(cell, quantile));
                add(Figure::ratio(
                    named(&format!("lookup {what}, {name} ÷ the best other index")),
                    ratio,
                    Goal::AtMost(1.0),
                ));
            }
        }
        add(Figure::of(named("memory per entry"), ours("memory", "bytes_per_entry")?, "bytes", Goal::Below(40.0)));
        let ratio = ours("memory", "left_mib")? / ours("memory", "grown_mib")?;
        add(Figure::ratio(named("memory left after all removals ÷ maximum"), ratio, Goal::Below(0.05)));
        let wrong =
            ["check", "check_heads", "check_punched"].map(|what| Ok(ours(what, "over")? + ours(what, "under")?));
        let wrong = wrong.into_iter().sum::<Result<f64>>()?;
        add(Figure::of(named("wrong answers, chains with holes included"), wrong, "", Goal::AtMost(0.0)));
    }
    Ok(figures)
}

/// The most memory of the index during announcements of distinct blocks, relative to its memory limit.
fn memory_limit(printed: &[Value]) -> Result<Figure> {
    let result = printed.first().context("nothing measured")?;
    let named = format!("index, {} distinct blocks: most memory ÷ memory limit", result["distinct"]);
    let most = number(&result["index_bytes_most"])?.max(number(&result["resident_bytes_most"])?);
    Ok(Figure::ratio(named, most / number(&result["memory_limit_bytes"])?, Goal::AtMost(1.0)))
}

/// Routing decisions: one JSON object per fleet size.
fn decision(printed: &[Value]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let smallest = printed.first().context("nothing measured")?;
    for result in printed {
        let workers = &result["workers"];
        let named = |what: &str| format!("decision, 8,192 tokens, {workers} workers: {what}");
        let (p99_goals, count_goal) =
            if *workers == 1024 { (DECISION_P99_US, Goal::Below(1.0)) } else { (NO_GOAL, Goal::None) };
        for (what, key, goals) in [
            ("hashing, p50", "hash_p50_s", NO_GOAL),
            ("prompt seen before, p50", "decision_p50_s", NO_GOAL),
            ("prompt seen before, p99", "decision_p99_s", p99_goals),
            ("new prompt, p50", "new_prompt_p50_s", NO_GOAL),
            ("new prompt, p99", "new_prompt_p99_s", p99_goals),
        ] {
            let value = number(&result[key])? * 1e6;
            figures.extend(goals.iter().map(|goal| Figure::of(named(what), value, "µs", *goal)));
        }
        for (what, key, unit) in [("allocations", "allocations", ""), ("allocated", "bytes", "bytes")] {
            let more = number(&result[key])? - number(&smallest[key])?;
            figures.push(Figure::of(
                named(&format!("{what} more than with the fewest workers")),
                more,
                unit,
                count_goal,
            ));
        }
    }
    Ok(figures)
}

/// Replays of the recorded trace.
struct Replay<'a> {
    trace: &'a str,
    runs: &'a str,
    program: PathBuf,
}

impl<'a> Replay<'a> {
    fn new(trace: &'a str, runs: &'a str) -> Result<Self> {
        Ok(Self { trace, runs, program: target_directory()?.join("release/blockyard") })
    }

    /// Runs one replay: its report, and its duration in seconds.
    fn run(&self, arguments: &[&str]) -> Result<(Value, f64)> {
        let all = [&["replay", self.trace], arguments].concat();
        let (mut printed, took) = Program::new("replay", self.program.clone(), &all).run()?;
        Ok((printed.pop().context("no report")?, took.as_secs_f64()))
    }

    fn figures(&self) -> Result<Vec<Figure>> {
        let runs = self.runs;
        let (all, _) = self.run(&["--runs", runs])?;
        let capacity = number(&all["capacity_rps"])?;
        let policies = all["policies"].as_array().context("no policies")?;
        let kv_rows = || policies.iter().filter(|row| row["policy"] == "kv");
        let mut figures = vec![Figure::of("replay: capacity of 16 workers".into(), capacity, "req/s", Goal::None)];
        for own in kv_rows() {
            let load = number(&own["load_factor"])?;
            let others =
                || policies.iter().filter(|row| row["load_factor"] == own["load_factor"] && row["policy"] != "kv");
            for (what, key) in [("mean", "ttft_mean_s"), ("p99", "ttft_p99_s")] {
                let best = others().map(|row| number(&row[key])).try_fold(f64::INFINITY, |a, b| b.map(|b| a.min(b)))?;
                let named = format!("replay, load {load}: kv's {what} first token ÷ the best other policy");
                // At and above capacity the p99 contradicts the mean and the goodput (docs/routing.md).
                let goal = if what == "mean" || load < 1.0 { Goal::AtMost(1.02) } else { Goal::None };
                figures.push(Figure::ratio(named, number(&own[key])? / best, goal));
            }
            let key = "slo_attainment";
            let best = others().map(|row| number(&row[key])).try_fold(0.0, |a: f64, b| b.map(|b| a.max(b)))?;
            let named = format!("replay, load {load}: kv's requests in time ÷ the best other policy's");
            figures.push(Figure::ratio(named, number(&own[key])? / best, Goal::AtLeast(0.98)));
        }
        let rates: Vec<String> = kv_rows().map(|row| row["rate_rps"].to_string()).collect();
        let rates = rates.join(",");
        let kv_only = |more: &[&str]| self.run(&[&["--policy", "kv", "--runs", runs, "--rate", &rates], more].concat());
        let hits = |report: &Value, key: &str| -> Result<Vec<f64>> {
            report["policies"].as_array().context("no policies")?.iter().map(|row| number(&row[key])).collect()
        };
        let loads: Vec<f64> = kv_rows().map(|row| number(&row["load_factor"])).collect::<Result<_>>()?;
        let hit_rates = kv_rows().map(|row| number(&row["hit_rate"])).collect::<Result<Vec<f64>>>()?;
        let last_quarter = kv_rows().map(|row| number(&row["hit_rate_last_quarter"])).collect::<Result<Vec<f64>>>()?;
        let mut compare = |what: &str, values: Vec<f64>, goal: Goal, points: bool| {
            for (load, value) in loads.iter().zip(values) {
                let named = format!("replay, load {load}: {what}");
                figures.push(if points {
                    Figure::of(named, value * 100.0, "points", goal)
                } else {
                    Figure::ratio(named, value, goal)
                });
            }
        };
        let ratio = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a / b).collect::<Vec<f64>>();
        let difference = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<f64>>();
        let undelayed = hits(&kv_only(&["--event-delay", "0ms"])?.0, "hit_rate")?;
        compare(
            "hit rate ÷ that of an index without event delay",
            ratio(&hit_rates, &undelayed),
            Goal::AtLeast(0.98),
            false,
        );
        let eight = hits(&kv_only(&["--replicas", "8"])?.0, "hit_rate")?;
        compare("hit rate of 8 routers ÷ that of one", ratio(&eight, &hit_rates), Goal::AtLeast(0.95), false);
        let lossy = hits(&kv_only(&["--event-loss", "0.1"])?.0, "hit_rate")?;
        compare("hit rate lost with a tenth of all events", difference(&hit_rates, &lossy), Goal::Below(2.0), true);
        let slow_resync = hits(&kv_only(&["--event-loss", "0.1", "--resync-delay", "2s"])?.0, "hit_rate")?;
        compare("the same, when a resync takes 2 s", difference(&hit_rates, &slow_resync), Goal::Below(2.0), true);
        let no_resync = hits(&kv_only(&["--event-loss", "0.1", "--resync-delay", "100000s"])?.0, "hit_rate")?;
        compare("the same, without resyncs", difference(&hit_rates, &no_resync), Goal::None, true);
        let recovered =
            hits(&kv_only(&["--event-loss", "0.1", "--event-loss-until", "0.5"])?.0, "hit_rate_last_quarter")?;
        compare(
            "still lost in the last quarter, events lost in the first half",
            difference(&last_quarter, &recovered),
            Goal::Below(0.5),
            true,
        );
        for (workers, goal) in [("1024", Goal::AtLeast(100.0)), ("2048", Goal::AtLeast(100.0)), ("4096", Goal::None)] {
            let (fleet, seconds) = self.run(&["--workers", workers, "--rate", "1000", "--policy", "kv"])?;
            let simulated = number(&fleet["policies"][0]["makespan_s"])?;
            let named = format!("replay, {workers} workers at 1,000 req/s: times faster than real time");
            figures.push(Figure::ratio(named, simulated / seconds, goal));
        }
        Ok(figures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_goals_hold_for_prompts_seen_before_and_new_ones() {
        let result = |workers: u64| {
            json!({
                "workers": workers, "hash_p50_s": 4e-5, "decision_p50_s": 2e-5, "decision_p99_s": 5e-5,
                "new_prompt_p50_s": 7e-5, "new_prompt_p99_s": 8e-5, "allocations": 6.0, "bytes": 500.0,
            })
        };
        let figures = decision(&[result(16), result(1024)]).unwrap();
        let met: Vec<bool> = figures.iter().filter_map(Figure::met).collect();
        assert_eq!(met, [true, true, true, false, true, true], "100 and 60 µs, seen and new, then the allocations");
    }

    #[test]
    fn an_index_is_measured_with_blocks_removed_one_by_one() {
        let cells = ["apply1", "apply2", "singles1", "singles2", "lookup", "concurrent", "memory"];
        let checks = ["check", "check_heads", "check_punched"];
        let result = json!({
            "churn_mops": 2.0, "fill_mops": 2.0, "p50_us": 1.0, "p99_us": 2.0, "bytes_per_entry": 30.0,
            "grown_mib": 100.0, "left_mib": 1.0, "over": 0, "under": 0,
        });
        let record = |index: &str, workers: u64, what: &str| {
            let cell = json!({ "index": index, "workers": workers, "what": what });
            json!({ "cell": cell, "result": result })
        };
        let mut records = Vec::new();
        for workers in [128, 1024] {
            for what in cells.iter().chain(&checks) {
                records.extend(["blockyard", KV_INDEX].map(|index| record(index, workers, what)));
            }
        }
        let rows: Vec<_> = index(&[json!(records)]).unwrap().iter().map(Figure::row).collect();
        let singles = rows.iter().filter(|row| row[0].contains("evicted one by one"));
        assert_eq!(singles.map(|row| row[3].as_str()).collect::<Vec<_>>(), ["yes"; 4]);
    }
}
