//! What the block manager must show, in one run: every figure beside the goal that it is held against.
//!
//! It links nothing of the block manager's: it runs the measuring programs of `kvbm/examples` and `worker/examples`, one after
//! the other, each of which compares with its reference in turns within its own run, and judges what they print.

use anyhow::{Context, Result, bail};
use bench::figure::{Figure, Goal};
use bench::options::target_directory;
use bench::report::circumstances;
use bench::suite::{self, Program, number};
use serde_json::Value;
use std::path::{Path, PathBuf};

const USAGE: &str = "\
What the block manager must show, each figure beside its goal.

  --json            print JSON instead of a table
  --folder DIR      where the disk is measured (beside the built programs)
  --programs DIR    the measuring programs (the release examples of this checkout)
  --only NAME       one of them only; may be repeated";

/// Bytes of blocks that the disk is measured with: small and large models.
const DISK_BLOCKS: [&str; 2] = ["73728", "2097152"];

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
    let wanted = suite::wanted(&names, &options.only)?;
    let circumstances = circumstances();
    let mut figures = Vec::new();
    for (program, judge) in all.iter().filter(|(program, _)| wanted.iter().any(|name| name == program.name())) {
        let (printed, _) = program.run()?;
        figures.extend(judge(&printed).with_context(|| format!("{} printed something else", program.name()))?);
    }
    suite::print(&circumstances, &figures, options.json);
    Ok(())
}

/// Makes figures of what a program printed.
type Judge = fn(&[Value]) -> Result<Vec<Figure>>;

fn programs(path: &Path, folder: &str) -> Vec<(Program, Judge)> {
    let program = |name, arguments: &[&str], judge: Judge| (Program::new(name, path.join(name), arguments), judge);
    let disk = |block| program("disk_speed", &[folder, "--block-bytes", block, "--rounds", "5"], disk);
    let mut all = vec![program("host_speed", &[], host)];
    all.extend(DISK_BLOCKS.map(disk));
    all.push(program("disk_speed", &[folder, "--recover", "1000000", "--rounds", "3"], recovery));
    all.push(program("object_speed", &[], object));
    all.push(program("match_speed", &[], matching));
    all.push(program("forms", &[], forms));
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
    let [told] = printed else { bail!("one value was expected") };
    let kib = number(&told["block_bytes"])? / 1024.0;
    let mut figures = Vec::new();
    for (way, what) in [("write", "write"), ("rewrite", "write when full"), ("read", "read")] {
        let what = format!("G3 {what}, blocks of {kib} KiB");
        let references = told[way]["fio"].as_array().context("no references")?;
        figures.push(Figure::of(what.clone(), number(&told[way]["tier"])?, "GB/s", Goal::Shown));
        for reference in references {
            let what = format!("{what} ÷ {}", reference["reference"].as_str().context("no name")?);
            figures.push(Figure::ratio(what.clone(), number(&reference["ratio"])?, Goal::AtLeast(0.9)));
            // What that ratio is worth.
            for (which, at) in [("first", 0), ("third", 2)] {
                let noise = number(&reference["noise"][at])?;
                figures.push(Figure::ratio(format!("{what}: it beside itself, {which} quartile"), noise, Goal::Shown));
            }
        }
        if way != "read" {
            let what = format!("{what}: bytes written for each that is stored");
            figures.push(Figure::of(what, number(&told[way]["written"])?, "", Goal::Shown));
        }
        if references.is_empty() {
            figures.push(Figure::missing(format!("{what} ÷ fio"), "no fio", Goal::AtLeast(0.9)));
        }
    }
    Ok(figures)
}

fn recovery(printed: &[Value]) -> Result<Vec<Figure>> {
    let [told] = printed else { bail!("one value was expected") };
    let cached = if told["cold"] == true { "" } else { ", from the page cache" };
    let what = format!("G3: {} blocks back after a restart{cached}", told["blocks"]);
    Ok(vec![Figure::of(what, number(&told["seconds"])?, "s", Goal::Below(2.0))])
}

fn object(printed: &[Value]) -> Result<Vec<Figure>> {
    let [told] = printed else { bail!("one value was expected") };
    let what = "G4 read ÷ the raw client's best, one S3 server".to_owned();
    Ok(vec![Figure::ratio(what, number(&told["ratio"])?, Goal::AtLeast(0.9))])
}

fn matching(printed: &[Value]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for case in printed {
        let named = case["case"].as_str().context("no case")?;
        let what = format!("match {} of {} blocks, {named}", case["blocks"], case["resident"]);
        figures.push(Figure::of(format!("{what}: p50"), number(&case["p50_us"])?, "µs", Goal::Shown));
        figures.push(Figure::of(format!("{what}: p99"), number(&case["p99_us"])?, "µs", Goal::Below(50.0)));
    }
    Ok(figures)
}

fn forms(printed: &[Value]) -> Result<Vec<Figure>> {
    let [told] = printed else { bail!("one value was expected") };
    let mut figures = Vec::new();
    for codec in told["codec"].as_array().context("no codecs")? {
        let what = codec["what"].as_str().context("no name")?;
        // The goals are for what engines keep; f32 is what the native one happens to compute with.
        let goal = |goal| if what.ends_with("bf16") { goal } else { Goal::Shown };
        let mut add = |name: &str, key: &str, unit, least| {
            number(&codec[key]).map(|value| {
                figures.push(Figure::of(format!("codec, {what}: {name}"), value, unit, goal(Goal::AtLeast(least))));
            })
        };
        add("ratio", "ratio", "", 1.40)?;
        add("of the order-0 bound", "of_bound", "", 0.97)?;
        add("decoding, one core", "decode_gbps", "GB/s", 2.0)?;
    }
    for (way, goal) in [("onboard", Goal::AtLeast(0.85)), ("store", Goal::Shown)] {
        let [plain, secret] = ["raw", "encrypted"].map(|form| number(&told["tiers"][way][form]["gbps"]));
        figures.push(Figure::ratio(format!("{way} encrypted ÷ plain, disk tier"), secret? / plain?, goal));
    }
    Ok(figures)
}

fn first_token(printed: &[Value]) -> Result<Vec<Figure>> {
    let [told] = printed else { bail!("one value was expected") };
    let miss = &told["miss"];
    let what = format!("first token, a miss of {} tokens: with tiers ÷ without", miss["tokens"]);
    let mut figures = vec![Figure::ratio(what, number(&miss["ratio"])?, Goal::Below(1.01))];
    for step in told["sweep"].as_array().context("no sweep")? {
        let tier = match step["times_of_computing"].as_f64() {
            Some(times) => format!("a tier that takes {times} × computing"),
            None => "a tier that never answers".into(),
        };
        let [took, miss] = ["first_seconds", "first_miss_seconds"].map(|key| number(&step[key]));
        figures.push(Figure::ratio(
            format!("first token, {tier} ÷ a miss"),
            number(&step["ratio"])?,
            Goal::AtMost(1.05),
        ));
        let more = (took? - miss?) * 1e3;
        figures.push(Figure::of(format!("first token, {tier}, not known yet: beyond a miss"), more, "ms", Goal::Shown));
    }
    let beside = told["beside"].as_array().context("nothing was generated beside")?;
    let gap = |row: &Value| number(&row["gap_p90_seconds"]);
    let computed = gap(beside.first().context("no row")?)?;
    for row in &beside[1..] {
        let tier = match row["beside"].as_f64() {
            Some(times) => format!("one from a tier that takes {times} × computing"),
            None => "one whose tier never answers".into(),
        };
        let what = format!("p90 between the tokens of another request beside {tier} ÷ beside one that is computed");
        figures.push(Figure::ratio(what, gap(row)? / computed, Goal::AtMost(1.1)));
    }
    Ok(figures)
}
