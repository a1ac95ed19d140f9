//! Tests of the configuration, by subject, and what they share.

mod errors;
mod ranges;
mod round_trip;
mod sources;
mod upstreams;

use super::*;
use std::io::Write;

fn set(assignment: &str) -> Flag {
    assignment.parse().unwrap()
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().prefix("blockyard").suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn environment(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let home = [("HOME", "/home/ada")];
    home.iter().chain(pairs).map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

fn load(sources: &Sources) -> Result<(Config, Origins), String> {
    Config::load(sources).map_err(|error| error.to_string())
}

fn error_of(sources: &Sources) -> String {
    load(sources).err().expect("the configuration is wrong")
}

/// The error of `serve` for a configuration file.
fn refused_to_serve(text: &str) -> String {
    let file = file(text);
    let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
    let errors = Config::load_to_serve(&sources).err().expect("the configuration is wrong").to_string();
    errors.replace(&file.path().display().to_string(), "FILE")
}
