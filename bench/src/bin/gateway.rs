//! Gateways side by side in front of the same engines: CPU time per request and per chunk, added time to the first
//! token, memory. Blockyard's figures stand beside their goals, those of the others without.

use anyhow::{Context, Result};
use bench::gateway::figures::{What, figures, not_installed};
use bench::gateway::measure::{Bench, engines};
use bench::gateway::options::Options;
use bench::gateway::peers::Gateway;
use bench::gateway::scenario::Scenario;
use bench::options::target_directory;
use bench::report::circumstances;
use bench::suite;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The name of the measurement of memory; the others are [`Scenario`]s.
const MEMORY: &str = "memory";

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::from_args()?;
    let names = Gateway::ALL.map(Gateway::name);
    let only = suite::selected(&names, &options.only)?;
    let measured: Vec<&str> = Scenario::ALL.map(Scenario::name).into_iter().chain([MEMORY]).collect();
    let measured = suite::selected(&measured, &options.measure)?;
    let scenarios: Vec<Scenario> =
        Scenario::ALL.into_iter().filter(|scenario| measured.iter().any(|name| name == scenario.name())).collect();
    let folder = tempfile::tempdir()?;
    let blockyard = match &options.blockyard {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
        None => target_directory()?.join("dist/blockyard"),
    };
    let engines = engines();
    let bench = Bench { options: &options, blockyard: &blockyard, folder: folder.path(), engines: &engines };
    let _engines = bench.start_engines().await?;
    let (mut installed, mut missing) = (Vec::new(), BTreeMap::new());
    for gateway in Gateway::ALL.into_iter().filter(|gateway| only.contains(&gateway.name().to_owned())) {
        match gateway.program(&bench.setting(gateway)) {
            Some(program) => installed.push((gateway, program)),
            None => drop(missing.insert(gateway.name(), gateway.install(&options.environment))),
        }
    }
    let mut results = bench.matrix(&installed, &scenarios).await?;
    let is_measured =
        |(gateway, _): &&(Gateway, PathBuf)| *gateway != Gateway::Dynamo && measured.iter().any(|name| name == MEMORY);
    for (gateway, program) in installed.iter().filter(is_measured) {
        let memory = bench.memory(*gateway, program).await?;
        results.entry(gateway.name()).or_default().extend(memory);
    }
    for name in missing.keys() {
        results.insert(name, not_installed());
    }
    let mut circumstances = circumstances();
    circumstances["not_installed"] = json!(missing);
    let is_tokenized =
        results.get(Gateway::BlockyardTokenizer.name()).is_some_and(|all| all.contains_key(&What::CpuLong));
    let new_text_us = if is_tokenized { bench.new_text_us()? } else { None };
    let figures = figures(&results, &options, new_text_us);
    suite::print(&circumstances, &figures, &serde_json::Value::Null, options.json);
    if !options.json {
        for (name, install) in &missing {
            println!("not installed: {name}; {install}");
        }
    }
    Ok(())
}
