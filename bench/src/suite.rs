//! Measuring programs that a suite runs one after the other, and the table of their figures and goals.

use crate::figure::Figure;
use crate::report::{describe, table};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A measuring program with its arguments.
pub struct Program {
    name: &'static str,
    path: PathBuf,
    arguments: Vec<String>,
}

impl Program {
    /// A program that prints JSON with the flag `--json`, which is added to the arguments.
    pub fn new(name: &'static str, path: PathBuf, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().chain(&["--json"]).map(|&argument| argument.to_owned()).collect();
        Self { name, path, arguments }
    }

    /// The name of the program.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs the program: the JSON values that it printed, and its duration.
    pub fn run(&self) -> Result<(Vec<Value>, Duration)> {
        ensure!(self.path.exists(), "{} is not there: the make target builds it", self.path.display());
        eprintln!("{} {} …", self.name, self.arguments.join(" "));
        let started = Instant::now();
        let output = Command::new(&self.path).args(&self.arguments).stderr(Stdio::inherit()).output();
        let duration = started.elapsed();
        let output = output.with_context(|| format!("cannot run {}", self.path.display()))?;
        eprintln!("… {:.0} s", duration.as_secs_f64());
        ensure!(output.status.success(), "{} ended with {}", self.name, output.status);
        let printed = serde_json::Deserializer::from_slice(&output.stdout).into_iter().collect::<Result<Vec<_>, _>>();
        Ok((printed.with_context(|| format!("{} printed no JSON", self.name))?, duration))
    }
}

/// The names to run: those of `only`, or all if it is empty.
pub fn selected(names: &[&str], only: &[String]) -> Result<Vec<String>> {
    if let Some(unknown) = only.iter().find(|only| !names.contains(&only.as_str())) {
        bail!("there is no {unknown}; there are {}", names.join(", "));
    }
    let all = || names.iter().map(|&name| name.to_owned()).collect();
    Ok(if only.is_empty() { all() } else { only.to_vec() })
}

/// Prints the figures with the machine and the commit of the run. `details`: what a suite measured beside its figures,
/// printed only as JSON.
pub fn print(circumstances: &Value, figures: &[Figure], details: &Value, json: bool) {
    if json {
        let figures: Vec<Value> = figures.iter().map(Figure::as_json).collect();
        println!("{:#}", json!({ "circumstances": circumstances, "figures": figures, "details": details }));
    } else {
        println!("\n{}\n", describe(circumstances));
        let rows: Vec<Vec<String>> = figures.iter().map(|figure| figure.row().to_vec()).collect();
        print!("{}", table(&["figure", "measured", "goal", "met"], &rows));
    }
}

/// A number in the output of a program.
pub fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("a number is missing")
}
