//! The benchmarks of the block manager in one run: each figure beside its goal.
//!
//! This program links no crate of Blockyard. It runs the measuring programs of `kvbm/examples` and `worker/examples`
//! one after the other and reads their JSON. Each of them alternates with its reference within its own run.

use anyhow::{Context, Result, bail};
use bench::figure::{Figure, Goal};
use bench::options::target_directory;
use bench::report::circumstances;
use bench::suite::{self, Program, number};
use serde_json::Value;
use std::path::{Path, PathBuf};

const USAGE: &str = "\
Benchmarks of the block manager, each figure beside its goal.

  --json            print JSON instead of a table
  --folder DIR      folder on the disk to measure (beside the built programs)
  --programs DIR    the measuring programs (the release examples of this checkout)
  --only NAME       run only this program; may be repeated";

/// Block sizes of the disk measurements, in bytes: of a small and of a large model.
const DISK_BLOCK_BYTES: [&str; 2] = ["73728", "2097152"];

struct Options {
    json: bool,
    folder: PathBuf,
    programs: PathBuf,
    only: Vec<String>,
}

impl Options {
    fn from_args() -> Result<Self> {
        let (mut json, mut folder, mut programs, mut only) = (false, None, None, Vec::new());
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--json" => json = true,
                "--folder" => folder = Some(PathBuf::from(value()?)),
                "--programs" => programs = Some(PathBuf::from(value()?)),
                "--only" => only.push(value()?),
                "--help" | "-h" => {
                    println!("{USAGE}");
                    std::process::exit(0);
                }
                _ => bail!("unknown option {argument}\n\n{USAGE}"),
            }
        }
        let programs = programs.map_or_else(|| Ok(target_directory()?.join("release/examples")), anyhow::Ok)?;
        let folder = folder.unwrap_or_else(|| programs.clone());
        Ok(Self { json, folder, programs, only })
    }
}

fn main() -> Result<()> {
    let options = Options::from_args()?;
    let all = programs(&options.programs, &options.folder.display().to_string());
    let mut names: Vec<&str> = all.iter().map(|(program, _)| program.name()).collect();
    names.dedup();
    let selected = suite::selected(&names, &options.only)?;
    let circumstances = circumstances();
    let mut figures = Vec::new();
    for (program, figures_of) in all.iter().filter(|(program, _)| selected.iter().any(|name| name == program.name())) {
        let (printed, _) = program.run()?;
        figures.extend(figures_of(&printed).with_context(|| format!("{} printed something else", program.name()))?);
    }
    suite::print(&circumstances, &figures, &Value::Null, options.json);
    Ok(())
}

/// Makes figures from the JSON values that a program printed.
type FiguresOf = fn(&[Value]) -> Result<Vec<Figure>>;

fn programs(path: &Path, folder: &str) -> Vec<(Program, FiguresOf)> {
    let program =
        |name, arguments: &[&str], figures_of: FiguresOf| (Program::new(name, path.join(name), arguments), figures_of);
    let disk = |block| program("disk_speed", &[folder, "--block-bytes", block, "--rounds", "5"], disk);
    let mut all = vec![program("host_speed", &[], host)];
    all.extend(DISK_BLOCK_BYTES.map(disk));
    all.push(program("disk_speed", &[folder, "--recover", "1000000", "--rounds", "3"], recovery));
    all.push(program("object_speed", &[], object));
    all.push(program("match_speed", &[], matching));
    all.push(program("transform_speed", &[], transforms));
    all.push(program("first_token", &[], first_token));
    all
}

fn host(printed: &[Value]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for size in printed {
        let kib = number(&size["block_bytes"])? / 1024.0;
        for (way, key) in [("G1→G2", "down_ratio"), ("G2→G1", "up_ratio")] {
            let what = format!("{way} ÷ memcpy, blocks of {kib} KiB");
            figures.push(Figure::ratio(what, number(&size[key])?, Goal::AtLeast(0.8)));
        }
    }
    Ok(figures)
}

fn disk(printed: &[Value]) -> Result<Vec<Figure>> {
    let [result] = printed else { bail!("one value was expected") };
    let kib = number(&result["block_bytes"])? / 1024.0;
    let mut figures = Vec::new();
    for (way, what) in [("write", "write"), ("rewrite", "write when full"), ("read", "read")] {
        let what = format!("G3 {what}, blocks of {kib} KiB");
        let references = result[way]["fio"].as_array().context("no references")?;
        figures.push(Figure::of(what.clone(), number(&result[way]["tier"])?, "GB/s", Goal::None));
        for reference in references {
            let what = format!("{what} ÷ {}", reference["reference"].as_str().context("no name")?);
            figures.push(Figure::ratio(what.clone(), number(&reference["ratio"])?, Goal::AtLeast(0.9)));
            // The spread of the reference against itself shows how precise the ratio is.
            for (which, at) in [("first", 0), ("third", 2)] {
                let noise = number(&reference["noise"][at])?;
                figures.push(Figure::ratio(
                    format!("{what}: noise of the reference, {which} quartile"),
                    noise,
                    Goal::None,
                ));
            }
        }
        if way != "read" {
            let what = format!("{what}: bytes written per byte stored");
            figures.push(Figure::of(what, number(&result[way]["written"])?, "", Goal::None));
        }
        if references.is_empty() {
            figures.push(Figure::missing(format!("{what} ÷ fio"), "no fio", Goal::AtLeast(0.9)));
        }
    }
    Ok(figures)
}

fn recovery(printed: &[Value]) -> Result<Vec<Figure>> {
    let [result] = printed else { bail!("one value was expected") };
    let cached = if result["cold"] == true { "" } else { ", from the page cache" };
    let what = format!("G3: recovery of {} blocks{cached}", result["blocks"]);
    Ok(vec![Figure::of(what, number(&result["seconds"])?, "s", Goal::Below(2.0))])
}

fn object(printed: &[Value]) -> Result<Vec<Figure>> {
    let [result] = printed else { bail!("one value was expected") };
    let what = "G4 read ÷ the raw client's best, one S3 server".to_owned();
    Ok(vec![Figure::ratio(what, number(&result["ratio"])?, Goal::AtLeast(0.9))])
}

fn matching(printed: &[Value]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for case in printed {
        let named = case["case"].as_str().context("no case")?;
        let what = format!("match {} of {} blocks, {named}", case["blocks"], case["resident"]);
        figures.push(Figure::of(format!("{what}: p50"), number(&case["p50_us"])?, "µs", Goal::None));
        figures.push(Figure::of(format!("{what}: p99"), number(&case["p99_us"])?, "µs", Goal::Below(50.0)));
    }
    Ok(figures)
}

fn transforms(printed: &[Value]) -> Result<Vec<Figure>> {
    let [result] = printed else { bail!("one value was expected") };
    let mut figures = Vec::new();
    for codec in result["codec"].as_array().context("no codecs")? {
        let what = codec["what"].as_str().context("no name")?;
        // The goals are for bf16, which serving engines use. f32 is the format of the native engine.
        let goal = |goal| if what.ends_with("bf16") { goal } else { Goal::None };
        let mut add = |name: &str, key: &str, unit, least| {
            number(&codec[key]).map(|value| {
                figures.push(Figure::of(format!("codec, {what}: {name}"), value, unit, goal(Goal::AtLeast(least))));
            })
        };
        add("ratio", "ratio", "", 1.40)?;
        add("of the order-0 bound", "of_bound", "", 0.97)?;
        add("decoding, one core", "decode_gbps", "GB/s", 2.0)?;
    }
    for (way, goal) in [("onboard", Goal::AtLeast(0.85)), ("store", Goal::None)] {
        let [plain, encrypted] = ["raw", "encrypted"].map(|form| number(&result["tiers"][way][form]["gbps"]));
        figures.push(Figure::ratio(format!("{way} encrypted ÷ plain, disk tier"), encrypted? / plain?, goal));
    }
    Ok(figures)
}

fn first_token(printed: &[Value]) -> Result<Vec<Figure>> {
    let [result] = printed else { bail!("one value was expected") };
    let miss = &result["miss"];
    let what = format!("first token, a miss of {} tokens: with tiers ÷ without", miss["tokens"]);
    let mut figures = vec![Figure::ratio(what, number(&miss["ratio"])?, Goal::Below(1.01))];
    for step in result["sweep"].as_array().context("no sweep")? {
        let tier = match step["times_of_computing"].as_f64() {
            Some(times) => format!("a tier that takes {times} × computing"),
            None => "a tier that never answers".into(),
        };
        let [first, miss] = ["first_seconds", "first_miss_seconds"].map(|key| number(&step[key]));
        figures.push(Figure::ratio(
            format!("first token, {tier} ÷ a miss"),
            number(&step["ratio"])?,
            Goal::AtMost(1.05),
        ));
        let longer_ms = (first? - miss?) * 1e3;
        figures.push(Figure::of(
            format!("first token, {tier}, throughput not measured yet: longer than a miss"),
            longer_ms,
            "ms",
            Goal::None,
        ));
    }
    let beside = result["beside"].as_array().context("no token gaps of concurrent requests")?;
    let gap = |row: &Value| number(&row["gap_p90_seconds"]);
    let computed = gap(beside.first().context("no row")?)?;
    for row in &beside[1..] {
        let tier = match row["beside"].as_f64() {
            Some(times) => format!("onboarding from a tier that takes {times} × computing"),
            None => "onboarding from a tier that never answers".into(),
        };
        let what = format!("p90 token gap of another request during {tier} ÷ during a prefill");
        figures.push(Figure::ratio(what, gap(row)? / computed, Goal::AtMost(1.1)));
    }
    Ok(figures)
}
