//! The one loader: gathers the layers, merges them, and says what is wrong with whom.

use super::{Config, Encryption, Origins, Secret, defaults};
use figment::error::Kind;
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use kvbm::crypt::KeySource;
use kvbm::object::Credentials;
use router::Preset;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Every environment variable of ours begins with this; two underscores stand for a dot.
const PREFIX: &str = "BLOCKYARD_";

/// Where values may come from, weakest first.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `--config`.
    pub file: Option<PathBuf>,
    /// The process's environment, as `(name, value)`.
    pub environment: Vec<(String, String)>,
    /// The command line, later ones win.
    pub flags: Vec<Flag>,
}

/// A value from the command line.
#[derive(Clone, Debug)]
pub struct Flag {
    name: String,
    key: String,
    value: Value,
}

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not there or cannot be read.
    #[error("configuration file {}: {error}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not TOML.
    #[error("configuration file {}: {error}", .path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Where and why.
        error: Box<toml::de::Error>,
    },
    /// Nobody knows the key.
    #[error("unknown key `{key}` ({origin}){}", suggest(.meant.as_deref()))]
    UnknownKey {
        /// As it was written.
        key: String,
        /// Who said it.
        origin: String,
        /// The known key that looks most like it.
        meant: Option<String>,
    },
    /// The key is known, the value is not possible.
    #[error("{key} = {value} ({origin}): {problem}")]
    Value {
        /// The key.
        key: String,
        /// The value as it was written.
        value: String,
        /// Who said it.
        origin: String,
        /// What would be right.
        problem: String,
    },
    /// Values that do not go together, or are out of range; the text names the key.
    #[error("{0}")]
    Check(String),
    /// There is no folder to keep models and blocks in.
    #[error("neither HOME nor XDG_CACHE_HOME is set; say where models and blocks may be kept: --data-dir DIR")]
    NoCache,
}

impl Sources {
    /// The environment of this process, a file and flags. The only place in the program that reads the environment.
    pub fn of_process(file: Option<PathBuf>, flags: Vec<Flag>) -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self { file, environment: std::env::vars_os().filter_map(text).collect(), flags }
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.environment.iter().find(|(is, value)| is == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// `$XDG_CACHE_HOME`, or `~/.cache`; relative folders in the former are to be ignored, says its specification.
    fn cache(&self) -> Option<PathBuf> {
        let given = self.variable("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        given.or_else(|| Some(Path::new(self.variable("HOME")?).join(".cache")))
    }
}

impl Flag {
    /// A flag with a key of its own: `--model DIR`. Its value is text, whatever it looks like.
    pub fn own(name: &str, key: &str, value: &str) -> Self {
        Self { name: name.into(), key: key.into(), value: value.into() }
    }
}

/// What `--set` takes: `key=value`.
impl FromStr for Flag {
    type Err = &'static str;

    fn from_str(assignment: &str) -> Result<Self, Self::Err> {
        let parts = assignment.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        let (key, value) =
            parts.filter(|(key, _)| !key.is_empty()).ok_or("expected KEY=VALUE, like router.policy=round-robin")?;
        Ok(Self { name: format!("--set {assignment}"), key: key.into(), value: read(value) })
    }
}

impl Config {
    /// Merges the sources into one configuration.
    pub fn load(sources: &Sources) -> Result<(Self, Origins), Error> {
        // Without a cache folder, somebody must name the data folder; an empty path marks that nobody did.
        let cache = sources.cache();
        let defaults = Self::with_cache(cache.as_deref().unwrap_or(Path::new("")));
        let mut layers: Vec<Layer> = sources.file.as_deref().map(Layer::file).transpose()?.into_iter().collect();
        for (name, value) in &sources.environment {
            if let Some(key) = name.strip_prefix(PREFIX).filter(|key| !injected(key)) {
                let key = key.to_lowercase().replace("__", ".");
                layers.push(Layer::one(&format!("environment {name}"), &key, read(value)));
            }
        }
        let flags = sources.flags.iter().map(|Flag { name, key, value }| Layer::one(name, key, value.clone()));
        layers.extend(flags);
        let known = Layer::of("default", Value::serialize(&defaults).expect("the defaults are plain"));
        let merged = layers.iter().fold(Figment::from(known).merge(Layer::preset(&layers)), Figment::merge);
        let mut config: Self = merged.extract().map_err(|error| explain(&merged, &error))?;
        if cache.is_none() && config.data_dir == defaults.data_dir {
            return Err(Error::NoCache);
        }
        let variables = sources.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        config.credentials = Credentials::from_environment(variables);
        if let Some(Encryption { keys: KeySource::Env(name) }) = &config.tiers.encryption {
            config.master_keys = sources.variable(name).map(|keys| Secret(keys.to_owned()));
        }
        for (key, value) in config.counts() {
            if value == 0 {
                let (origin, problem) = (told(&merged, key).1, "expected at least 1".into());
                return Err(Error::Value { key: key.into(), value: "0".into(), origin, problem });
            }
        }
        config.router.check().map_err(|wrong| attribute(&merged, wrong))?;
        config.frontend.check().map_err(|wrong| attribute(&merged, wrong))?;
        let origins = Origins::new(&config, &merged);
        Ok((config, origins))
    }
}

/// Values from one place.
struct Layer {
    origin: String,
    values: Dict,
}

impl Layer {
    fn of(origin: &str, values: Value) -> Self {
        Self { origin: origin.into(), values: values.into_dict().unwrap_or_default() }
    }

    fn file(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::File { path: path.into(), error })?;
        let syntax = |error| Error::Syntax { path: path.into(), error: Box::new(error) };
        let table: toml::Table = toml::from_str(&text).map_err(syntax)?;
        let values = Value::serialize(table).expect("a table of TOML is plain");
        Ok(Self::of(&path.display().to_string(), values))
    }

    /// What the preset says that the strongest of the layers names. One that nobody knows is reported as a wrong value.
    fn preset(layers: &[Self]) -> Self {
        let named = |layer: &Self| Some(layer.values.get("router")?.as_dict()?.get("preset")?.as_str()?.to_owned());
        let name = layers.iter().rev().find_map(named);
        let preset = Preset::ALL.into_iter().find(|preset| Some(preset.name()) == name.as_deref()).unwrap_or_default();
        let values = Value::serialize(preset.settings()).expect("settings are plain");
        let mut values = values.into_dict().unwrap_or_default();
        values.retain(|key, _| {
            !["preset", "seed", "index_bytes", "record", "models", "planner", "admission"].contains(&key.as_str())
        });
        Self::one(&format!("preset {}", preset.name()), "router", Value::from(values))
    }

    fn one(origin: &str, key: &str, value: Value) -> Self {
        Self::of(origin, figment::util::nest(key, value))
    }
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> figment::error::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.values.clone())]))
    }
}

/// Reads booleans, numbers, lists and quoted text as such, and everything else as text.
fn read(value: &str) -> Value {
    value.parse().unwrap_or_else(|never| match never {})
}

/// Kubernetes sets `NAME_SERVICE_HOST`, `NAME_PORT` and the like in every pod beside a service called NAME; a service called
/// `blockyard` must not keep the program from starting.
fn injected(key: &str) -> bool {
    key.ends_with("SERVICE_HOST")
        || key.contains("SERVICE_PORT")
        || key == "PORT"
        || key.contains("PORT_")
        || key.ends_with("_PORT")
}

/// Turns what serde says into what helps.
fn explain(merged: &Figment, error: &figment::Error) -> Error {
    let path = error.path.join(".");
    if let Kind::UnknownField(field, _) = &error.kind {
        let key = if path.is_empty() { field.clone() } else { path };
        let meant = nearest(&key);
        return Error::UnknownKey { origin: told(merged, &key).1, key, meant };
    }
    let (value, origin) = told(merged, &path);
    let value = value.map_or_else(|| "?".into(), |value| shown(&value));
    let problem = match &error.kind {
        Kind::Message(problem) => problem.clone(),
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) | Kind::InvalidLength(_, expected) => {
            format!("expected {expected}")
        }
        Kind::UnknownVariant(_, known) => format!("expected one of {}", quoted(known)),
        other => other.to_string(),
    };
    Error::Value { origin, key: path, value, problem }
}

/// Says of a value that was checked, `key: problem`, what it is and who said it.
fn attribute(merged: &Figment, wrong: String) -> Error {
    let named = wrong.split_once(": ").map(|(key, problem)| (key, problem, told(merged, key)));
    match named {
        Some((key, problem, (Some(value), origin))) => {
            Error::Value { key: key.into(), value: shown(&value), origin, problem: problem.into() }
        }
        _ => Error::Check(wrong),
    }
}

/// The value of a key, also of one within a list, and who said it, or what it would lie in.
pub(super) fn told(merged: &Figment, key: &str) -> (Option<Value>, String) {
    let steps: Vec<&str> = key.split('.').collect();
    let whole = merged.find_value(steps[0]).ok();
    let value_at = |len: usize| reach(whole.as_ref()?, &steps[1..len]);
    let origin_at = |len: usize| merged.get_metadata(value_at(len)?.tag()).map(|data| data.name.to_string());
    let origin = (1..=steps.len()).rev().find_map(origin_at).unwrap_or_else(|| "?".into());
    (value_at(steps.len()).cloned(), origin)
}

/// The value that some steps lead to. A name may have dots in it, as those of models do.
fn reach<'a>(value: &'a Value, steps: &[&str]) -> Option<&'a Value> {
    match value {
        _ if steps.is_empty() => Some(value),
        Value::Array(_, list) => reach(list.get(steps[0].parse::<usize>().ok()?)?, &steps[1..]),
        Value::Dict(_, entries) => {
            (1..=steps.len()).find_map(|len| reach(entries.get(&steps[..len].join("."))?, &steps[len..]))
        }
        _ => None,
    }
}

fn shown(value: &Value) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "?".into())
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

fn suggest(meant: Option<&str>) -> String {
    let see = "`blockyard serve --print-config` lists all keys";
    meant.map_or_else(|| format!("; {see}"), |key| format!("; did you mean `{key}`? {see}"))
}

/// The known key that a typing error may have been meant for: one of the same last word, else the one a few letters away.
fn nearest(key: &str) -> Option<String> {
    let last = |key: &str| key.rsplit('.').next().map(str::to_owned);
    let distance = |candidate: &String| {
        let whole = edits(key, candidate);
        if last(key) == last(candidate) { whole.min(1) } else { whole }
    };
    let (found, candidate) = defaults().into_iter().map(|(candidate, _)| (distance(&candidate), candidate)).min()?;
    (found * 3 <= key.len().max(3)).then_some(candidate)
}

/// Levenshtein's distance.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}
