//! The one loader: gathers the layers, merges them, and reports all that is wrong, with its origin.

use super::file::File;
use super::{Config, Encryption, Error, Errors, Origins, Secret, suggest};
use figment::error::Kind;
use figment::value::{Dict, Map, Num, Value};
use figment::{Figment, Metadata, Profile, Provider};
use kvbm::crypt::KeySource;
use kvbm::object::Credentials;
use router::{Preset, Problem};
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
    pub fn load(sources: &Sources) -> Result<(Self, Origins), Errors> {
        Self::load_for(sources, Use::Tools)
    }

    /// The same, with all that `serve` asks for beyond: what is said of models and tenants must concern some that there
    /// are.
    pub fn load_to_serve(sources: &Sources) -> Result<(Self, Origins), Errors> {
        Self::load_for(sources, Use::Serve)
    }

    fn load_for(sources: &Sources, wanted: Use) -> Result<(Self, Origins), Errors> {
        // Without a cache folder the data folder has to be named; an empty path marks that it was not.
        let cache = sources.cache();
        let defaults = Self::with_cache(cache.as_deref().unwrap_or(Path::new("")));
        let (file, mut errors) = match sources.file.as_deref().map(File::read).transpose() {
            Ok(file) => (file, Vec::new()),
            // What the file says is unknown, and flags may complement it.
            Err(errors) => return Err(Errors(errors)),
        };
        let mut layers: Vec<Layer> = file.iter().map(Layer::file).collect();
        for (name, value) in &sources.environment {
            if let Some(key) = name.strip_prefix(PREFIX).filter(|key| !injected(key)) {
                let key = key.to_lowercase().replace("__", ".");
                layers.push(Layer::one(&format!("environment {name}"), &key, read(value)));
            }
        }
        let flags = sources.flags.iter().map(|Flag { name, key, value }| Layer::one(name, key, value.clone()));
        layers.extend(flags);
        let (mut config, merged) = extract(&defaults, layers, file, &mut errors)?;
        if cache.is_none() && config.data_dir == defaults.data_dir {
            errors.push(Error::NoCache);
        }
        let variables = sources.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        config.credentials = Credentials::from_environment(variables);
        if let Some(Encryption { keys: KeySource::Env(name) }) = &config.tiers.encryption {
            config.master_keys = sources.variable(name).map(|keys| Secret(keys.to_owned()));
        }
        let serving = if wanted == Use::Serve { config.problems_of_serving() } else { Vec::new() };
        errors.extend(config.problems().into_iter().chain(serving).map(|wrong| attribute(&merged, wrong)));
        if !errors.is_empty() {
            return Err(Errors(errors));
        }
        let origins = Origins::new(&config, &merged);
        Ok((config, origins))
    }
}

/// What a configuration is read for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Commands that look at a part of it.
    Tools,
    /// `serve`, and `serve --print-config`.
    Serve,
}

/// All layers over the defaults, and the file that one of them came from.
pub(super) struct Merged {
    figment: Figment,
    file: Option<File>,
}

impl Merged {
    fn of(defaults: &Config, layers: &[Layer], file: Option<File>) -> Self {
        let known = Layer::of("default", Value::serialize(defaults).expect("the defaults are plain"));
        let figment = layers.iter().fold(Figment::from(known).merge(Layer::preset(layers)), Figment::merge);
        Self { figment, file }
    }

    /// The value of a key, also of one within a list, and its origin, or that of what it would lie in. An origin in the
    /// file has the line.
    pub(super) fn told(&self, key: &str) -> (Option<Value>, String) {
        let steps: Vec<&str> = key.split('.').collect();
        let whole = self.figment.find_value(steps[0]).ok();
        let value_at = |len: usize| reach(whole.as_ref()?, &steps[1..len]);
        let origin_at = |len: usize| self.figment.get_metadata(value_at(len)?.tag()).map(|data| data.name.to_string());
        let origin = (1..=steps.len()).rev().find_map(origin_at).unwrap_or_else(|| "?".into());
        let file = self.file.as_ref().filter(|file| file.name() == origin);
        (value_at(steps.len()).cloned(), file.map_or(origin, |file| file.origin(key)))
    }
}

/// Reads the merged layers. What is wrong is noted, taken out, and the rest read again, until there is a configuration:
/// so all errors are found, not the first only.
fn extract(
    defaults: &Config,
    mut layers: Vec<Layer>,
    mut file: Option<File>,
    errors: &mut Vec<Error>,
) -> Result<(Config, Merged), Errors> {
    let mut removed: Vec<Vec<String>> = Vec::new();
    loop {
        let merged = Merged::of(defaults, &layers, file);
        let error = match merged.figment.extract::<Config>() {
            Ok(config) => return Ok((config, merged)),
            Err(error) => error,
        };
        // What misses something that was taken out has been reported already.
        let is_known = match &error.kind {
            Kind::MissingField(field) => removed.contains(&[&error.path[..], &[field.to_string()]].concat()),
            _ => removed.iter().any(|path| path.starts_with(&error.path)),
        };
        if !is_known {
            errors.push(explain(&merged, &error));
        }
        let lens = (1..=error.path.len()).rev();
        let taken = lens.map(|len| &error.path[..len]).find(|path| {
            let taken = layers.iter_mut().map(|layer| take_out(&mut layer.values, path));
            taken.fold(false, |any, taken| any | taken)
        });
        let Some(path) = taken else { return Err(Errors(std::mem::take(errors))) };
        removed.push(path.to_vec());
        file = merged.file;
    }
}

/// Takes out what stands at the end of a path, if that is an entry of a table.
fn take_out(entries: &mut Dict, path: &[String]) -> bool {
    let (first, rest) = path.split_first().expect("a path has a step");
    if rest.is_empty() {
        return entries.remove(first).is_some();
    }
    match entries.get_mut(first) {
        Some(value) => take_out_of(value, rest),
        None => false,
    }
}

fn take_out_of(value: &mut Value, path: &[String]) -> bool {
    match value {
        Value::Dict(_, entries) => take_out(entries, path),
        Value::Array(_, list) => {
            let element = path[0].parse::<usize>().ok().and_then(|at| list.get_mut(at));
            element.is_some_and(|element| path.len() > 1 && take_out_of(element, &path[1..]))
        }
        _ => false,
    }
}

/// Values from one place.
struct Layer {
    origin: String,
    values: Dict,
}

impl Layer {
    fn of(origin: &str, values: Value) -> Self {
        let mut values = values.into_dict().unwrap_or_default();
        // `tiers.g4 = "s3://bucket"` is short for `tiers.g4.url = "s3://bucket"`.
        if let Some(Value::Dict(_, tiers)) = values.get_mut("tiers")
            && let Some(url @ Value::String(..)) = tiers.get_mut("g4")
        {
            *url = Value::from(Dict::from([("url".to_owned(), url.clone())]));
        }
        Self { origin: origin.into(), values }
    }

    fn file(file: &File) -> Self {
        Self::of(&file.name(), Value::serialize(&file.table).expect("a table of TOML is plain"))
    }

    /// What the preset says that the strongest of the layers names. One that nobody knows is reported as a wrong value.
    fn preset(layers: &[Self]) -> Self {
        let named = |layer: &Self| Some(layer.values.get("router")?.as_dict()?.get("preset")?.as_str()?.to_owned());
        let name = layers.iter().rev().find_map(named);
        let preset = Preset::ALL.into_iter().find(|preset| Some(preset.name()) == name.as_deref()).unwrap_or_default();
        let values = Value::serialize(preset.settings()).expect("settings are plain");
        let mut values = values.into_dict().unwrap_or_default();
        values.retain(|key, _| {
            !["preset", "seed", "index_memory", "trace_file", "models", "planner", "admission"].contains(&key.as_str())
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

/// Kubernetes sets `NAME_SERVICE_HOST`, `NAME_PORT` and the like in every pod beside a service called NAME; a service
/// called `blockyard` must not keep the program from starting.
fn injected(key: &str) -> bool {
    key.ends_with("SERVICE_HOST")
        || key.contains("SERVICE_PORT")
        || key == "PORT"
        || key.contains("PORT_")
        || key.ends_with("_PORT")
}

/// Turns what serde says into what helps.
fn explain(merged: &Merged, error: &figment::Error) -> Error {
    let path = error.path.join(".");
    if let Kind::UnknownField(field, siblings) = &error.kind {
        let key = if path.is_empty() { field.clone() } else { path };
        let meant = suggest::meant(&key, siblings);
        return Error::UnknownKey { origin: merged.told(&key).1, key, meant };
    }
    let (value, origin) = merged.told(&path);
    let value = value.map_or_else(|| "?".into(), |value| shown(&value));
    let problem = match &error.kind {
        Kind::Message(problem) => problem.clone(),
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) | Kind::InvalidLength(_, expected) => {
            format!("expected {expected}")
        }
        Kind::UnknownVariant(_, known) => format!("expected one of {}", quoted(known)),
        Kind::MissingField(field) => format!("`{field}` is required here"),
        other => other.to_string(),
    };
    Error::Value { origin, key: path, value, problem }
}

/// Says of a value that was checked what it is and where it came from.
fn attribute(merged: &Merged, Problem { key, problem }: Problem) -> Error {
    match merged.told(&key) {
        (Some(value), origin) => Error::Value { value: shown(&value), origin, key, problem },
        (None, _) => Error::Check(format!("{key}: {problem}")),
    }
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
    // JSON has no words for these.
    if let Value::Num(_, Num::F64(number)) = value
        && !number.is_finite()
    {
        return number.to_string().to_lowercase();
    }
    serde_json::to_string(value).unwrap_or_else(|_| "?".into())
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}
