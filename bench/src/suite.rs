//! Measuring programs, run one after the other: every figure that they print beside the goal that it is held against.

use crate::figure::Figure;
use crate::report::{describe, table};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A measuring program, and how it is called.
pub struct Program {
    name: &'static str,
    path: PathBuf,
    arguments: Vec<String>,
}

impl Program {
    /// A program that prints JSON when it is called with `--json` after its arguments.
    pub fn new(name: &'static str, path: PathBuf, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().chain(&["--json"]).map(|&argument| argument.to_owned()).collect();
        Self { name, path, arguments }
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs it. Every JSON value that it prints, and how long that took.
    pub fn run(&self) -> Result<(Vec<Value>, Duration)> {
        ensure!(self.path.exists(), "{} is not there: the verb of make builds it", self.path.display());
        eprintln!("{} {} …", self.name, self.arguments.join(" "));
        let began = Instant::now();
        let output = Command::new(&self.path).args(&self.arguments).stderr(Stdio::inherit()).output();
        let (output, took) = (output.with_context(|| format!("cannot run {}", self.path.display()))?, began.elapsed());
        eprintln!("… {:.0} s", took.as_secs_f64());
        ensure!(output.status.success(), "{} ended with {}", self.name, output.status);
        let printed = serde_json::Deserializer::from_slice(&output.stdout).into_iter().collect::<Result<Vec<_>, _>>();
        Ok((printed.with_context(|| format!("{} printed no JSON", self.name))?, took))
    }
}

/// Which of `names` are wanted: those asked for, or all.
pub fn wanted(names: &[&str], only: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = only.iter().find(|only| !names.contains(&only.as_str())) {
        bail!("there is no {unknown}; there are {}", names.join(", "));
    }
    let all = || names.iter().map(|&name| name.to_owned()).collect();
    Ok(if only.is_empty() { all() } else { only.to_vec() })
}

/// Prints figures, with the machine and the commit that they are of.
pub fn print(circumstances: &Value, figures: &[Figure], json: bool) {
    if json {
        let figures: Vec<Value> = figures.iter().map(Figure::as_json).collect();
        println!("{:#}", json!({ "circumstances": circumstances, "figures": figures }));
    } else {
        println!("\n{}\n", describe(circumstances));
        let rows: Vec<Vec<String>> = figures.iter().map(|figure| figure.row().to_vec()).collect();
        print!("{}", table(&["figure", "measured", "goal", "met"], &rows));
    }
}

/// A number that a program printed.
pub fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("a number is missing")
}
