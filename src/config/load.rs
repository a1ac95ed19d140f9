//! The loader: collects the layers, merges them, and reports all errors with their origins.

use super::file::File;
use super::{Config, Encryption, Error, Errors, Origins, OtelVariables, Secret, Tracing, Workers, suggest};
use figment::error::Kind;
use figment::value::{Dict, Map, Num, Value};
use figment::{Figment, Metadata, Profile, Provider};
use frontend::ApiKey;
use kvbm::crypt::KeySource;
use kvbm::object::Credentials;
use router::Problem;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Prefix of environment variables of the configuration. Two underscores in a name stand for a dot.
const PREFIX: &str = "BLOCKYARD_";

/// The variable with an API key of clients. It is no key of the configuration, and is never printed.
const API_KEY: &str = "BLOCKYARD_API_KEY";

/// The sources of values, weakest first.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `--config`.
    pub file: Option<PathBuf>,
    /// The process's environment, as `(name, value)`.
    pub environment: Vec<(String, String)>,
    /// Flags of the command line; later flags override earlier ones.
    pub flags: Vec<Flag>,
}

/// A value from the command line.
#[derive(Clone, Debug)]
pub struct Flag {
    name: String,
    key: String,
    value: Value,
    /// It is `--set`, which sets the keys that have no flag of their own.
    is_set: bool,
}

impl Sources {
    /// The environment of this process, a file and flags. Only this function reads the environment.
    pub fn of_process(file: Option<PathBuf>, flags: Vec<Flag>) -> Self {
        let text = |(name, value): (OsString, OsString)| {
            let is_text = name.to_str().is_some() && value.to_str().is_some();
            let [name, value] = [name, value].map(|text| text.to_string_lossy().into_owned());
            // `load` refuses a variable of the configuration that is no text. If it was ignored, a server whose file of
            // API keys it names would ask for no key.
            (is_text || name.starts_with(PREFIX)).then_some((name, value))
        };
        Self { file, environment: std::env::vars_os().filter_map(text).collect(), flags }
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.environment.iter().find(|(is, value)| is == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// The keys that the environment and the flags set, weakest first: origin, key and value.
    fn keys(&self, errors: &mut Vec<Error>) -> Vec<(String, String, Value)> {
        let mut keys = Vec::new();
        for (name, value) in &self.environment {
            let is_key = |key: &&str| name != API_KEY && !is_kubernetes_variable(key);
            let Some(key) = name.strip_prefix(PREFIX).filter(is_key) else { continue };
            let origin = format!("environment {name}");
            if [name, value].iter().any(|text| text.contains(char::REPLACEMENT_CHARACTER)) {
                errors.push(Error::Check(format!("{origin}: name and value must be UTF-8")));
            } else {
                keys.push((origin, key.to_lowercase().replace("__", "."), parse_value(value)));
            }
        }
        let flags = self.flags.iter().map(|Flag { name, key, value, .. }| (name.clone(), key.clone(), value.clone()));
        keys.extend(flags);
        keys
    }

    /// `$XDG_CACHE_HOME`, or `~/.cache`. The XDG specification says to ignore a relative path.
    fn cache(&self) -> Option<PathBuf> {
        let configured = self.variable("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        configured.or_else(|| Some(Path::new(self.variable("HOME")?).join(".cache")))
    }
}

impl Flag {
    /// A flag for one key: `--model DIR`. Its value is always text.
    pub fn own(name: &str, key: &str, value: &str) -> Self {
        Self { name: name.into(), key: key.into(), value: value.into(), is_set: false }
    }

    /// A flag that was repeated: all of its values.
    pub fn list(name: &str, key: &str, values: &[String]) -> Self {
        Self { name: name.into(), key: key.into(), value: values.to_vec().into(), is_set: false }
    }

    /// Whether this `--set` sets the key of a flag, or a part of its value.
    fn sets(&self, key: &str) -> bool {
        let steps: Vec<&str> = key.split('.').collect();
        let values = Layer::one(&self.name, &self.key, self.value.clone()).values;
        let is_within = self.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
        self.is_set && (is_within || value_at_path(&Value::from(values), &steps).is_some())
    }
}

/// The argument of `--set`: `key=value`.
impl FromStr for Flag {
    type Err = &'static str;

    fn from_str(assignment: &str) -> Result<Self, Self::Err> {
        let parts = assignment.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        let (key, value) =
            parts.filter(|(key, _)| !key.is_empty()).ok_or("expected KEY=VALUE, like router.policy=round-robin")?;
        Ok(Self { name: format!("--set {assignment}"), key: key.into(), value: parse_value(value), is_set: true })
    }
}

impl Config {
    /// Merges the sources into one configuration.
    pub fn load(sources: &Sources) -> Result<(Self, Origins), Errors> {
        Self::load_for(sources, Purpose::Tools)
    }

    /// The same, with the additional checks of `serve`: sections for models and tenants must refer to existing ones.
    pub fn load_to_serve(sources: &Sources) -> Result<(Self, Origins), Errors> {
        Self::load_for(sources, Purpose::Serve)
    }

    /// The same, with the additional checks of a command.
    pub fn load_for(sources: &Sources, purpose: Purpose) -> Result<(Self, Origins), Errors> {
        Self::load_from(File::read, sources, purpose)
    }

    /// The same, for a process that runs: the file must be a regular one, because a pipe can be read once only.
    pub fn load_again_for(sources: &Sources, purpose: Purpose) -> Result<(Self, Origins), Errors> {
        Self::load_from(File::read_again, sources, purpose)
    }

    fn load_from(
        read: fn(&Path) -> Result<File, Vec<Error>>,
        sources: &Sources,
        purpose: Purpose,
    ) -> Result<(Self, Origins), Errors> {
        // Without a cache folder `data_dir` must be set. The empty default path shows that it was not set.
        let cache = sources.cache();
        let mut defaults = Self::with_cache(cache.as_deref().unwrap_or(Path::new("")));
        if purpose == Purpose::Worker {
            defaults.workers = Workers::one();
        }
        let (file, mut errors) = match sources.file.as_deref().map(read).transpose() {
            Ok(file) => (file, Vec::new()),
            // The content of the file is unknown, so other errors could be consequences of this one.
            Err(errors) => return Err(Errors(errors)),
        };
        errors.extend(keys_set_twice(&sources.flags));
        // Variables of the platform, which other programs read too, stand below what is written for this one.
        let otel = Tracing::keys_of_environment(|name| sources.variable(name));
        let otel = otel.map(|(name, key, value)| Layer::one(&format!("environment {name}"), key, value.into()));
        let mut layers: Vec<Layer> = otel.chain(file.iter().map(Layer::file)).collect();
        for (origin, key, value) in sources.keys(&mut errors) {
            if key.split('.').any(str::is_empty) {
                let meant = suggest::without_empty_parts(&key).map(|known| format!("did you mean `{known}`?"));
                errors.push(Error::UnknownKey { origin, key, meant });
            } else {
                layers.push(Layer::one(&origin, &key, value));
            }
        }
        let (mut config, merged) = extract(&defaults, layers, file, &mut errors)?;
        if cache.is_none() && config.data_dir == defaults.data_dir {
            errors.push(Error::NoCache);
        }
        if let Some((_, key)) = sources.environment.iter().find(|(name, _)| name == API_KEY) {
            match ApiKey::chosen(key) {
                Ok(key) => config.frontend.api_key = Some(key.hash()),
                Err(problem) => errors.push(Error::Check(format!("environment {API_KEY}: {problem}; or unset it"))),
            }
        }
        let variables = sources.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        config.credentials = Credentials::from_environment(variables);
        if let Some(Encryption { keys: KeySource::Env(name) }) = &config.tiers.encryption {
            config.master_keys = sources.variable(name).map(|keys| Secret(keys.to_owned()));
        }
        config.tracing.variables = OtelVariables {
            headers: sources.variable("OTEL_EXPORTER_OTLP_HEADERS").map(|headers| Secret(headers.to_owned())),
            resource_attributes: sources.variable("OTEL_RESOURCE_ATTRIBUTES").map(str::to_owned),
        };
        let serving = match purpose {
            // The models are those of workers and upstreams, which come and go.
            Purpose::Tools | Purpose::Frontend => Vec::new(),
            Purpose::Serve => config.problems_of_serving(),
            Purpose::Worker => config.problems_of_worker(),
        };
        errors.extend(config.problems().into_iter().chain(serving).map(|wrong| with_origin(&merged, wrong)));
        if !errors.is_empty() {
            return Err(Errors(errors));
        }
        let origins = Origins::new(&config, &merged);
        Ok((config, origins))
    }
}

/// What a configuration is loaded for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Commands that use a part of the configuration.
    Tools,
    /// `serve`: all components in one process.
    Serve,
    /// `frontend`: the API and the router.
    Frontend,
    /// `worker`: the native engine and its tiers.
    Worker,
}

/// All layers merged over the defaults, and the configuration file.
pub(super) struct Merged {
    figment: Figment,
    file: Option<File>,
}

impl Merged {
    fn of(defaults: &Config, layers: &[Layer], file: Option<File>) -> Self {
        let known = Layer::of("default", Value::serialize(defaults).expect("the defaults are plain"));
        let figment = layers.iter().fold(Figment::from(known), Figment::merge);
        Self { figment, file }
    }

    /// The value of a key, also within a list, and its origin: that of the value, or of the nearest enclosing table. An
    /// origin in the file includes the line.
    pub(super) fn lookup(&self, key: &str) -> (Option<Value>, String) {
        let steps: Vec<&str> = key.split('.').collect();
        let whole = self.figment.find_value(steps[0]).ok();
        let value_at = |len: usize| value_at_path(whole.as_ref()?, &steps[1..len]);
        let origin_at = |len: usize| self.figment.get_metadata(value_at(len)?.tag()).map(|data| data.name.to_string());
        let origin = (1..=steps.len()).rev().find_map(origin_at).unwrap_or_else(|| "?".into());
        let file = self.file.as_ref().filter(|file| file.name() == origin);
        (value_at(steps.len()).cloned(), file.map_or(origin, |file| file.origin(key)))
    }
}

/// Deserializes the merged layers. Each invalid value is recorded and removed, and the remainder is deserialized again,
/// so that all errors are found, not only the first.
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
        // A field that is missing because its value was removed has been reported already.
        let is_known = match &error.kind {
            Kind::MissingField(field) => removed.contains(&[&error.path[..], &[field.to_string()]].concat()),
            _ => removed.iter().any(|path| path.starts_with(&error.path)),
        };
        if !is_known {
            errors.push(explain(&merged, &error));
        }
        let lens = (1..=error.path.len()).rev();
        let removed_path = lens.map(|len| &error.path[..len]).find(|path| {
            let hits = layers.iter_mut().map(|layer| remove_at(&mut layer.values, path));
            hits.fold(false, |any, hit| any | hit)
        });
        let Some(path) = removed_path else { return Err(Errors(std::mem::take(errors))) };
        removed.push(path.to_vec());
        file = merged.file;
    }
}

/// Removes the entry at the end of a path, if it is an entry of a table. Returns whether it was there.
fn remove_at(entries: &mut Dict, path: &[String]) -> bool {
    let (first, rest) = path.split_first().expect("a path has a step");
    if rest.is_empty() {
        return entries.remove(first).is_some();
    }
    match entries.get_mut(first) {
        Some(value) => remove_in_value(value, rest),
        None => false,
    }
}

fn remove_in_value(value: &mut Value, path: &[String]) -> bool {
    match value {
        Value::Dict(_, entries) => remove_at(entries, path),
        Value::Array(_, list) => {
            let element = path[0].parse::<usize>().ok().and_then(|at| list.get_mut(at));
            element.is_some_and(|element| path.len() > 1 && remove_in_value(element, &path[1..]))
        }
        _ => false,
    }
}

/// Values from one source.
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

    /// A layer with one key, which has no empty part: figment would end the key there, and set another one or none.
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

/// The keys that a flag of their own and `--set` set both. Neither is stronger, so one of them would have no effect.
fn keys_set_twice(flags: &[Flag]) -> Vec<Error> {
    let own = flags.iter().filter(|own| !own.is_set && flags.iter().any(|flag| flag.sets(&own.key)));
    let problem = |Flag { name, key, .. }: &Flag| {
        Error::Check(format!(
            "{key}: `{name}` and `--set` both set it, and only one of them could apply; write the whole value in one \
             of them, and leave the other one out"
        ))
    };
    own.map(problem).collect()
}

/// Parses booleans, numbers, lists and quoted text; everything else is text.
fn parse_value(value: &str) -> Value {
    value.parse().unwrap_or_else(|never| match never {})
}

/// Whether Kubernetes set the variable: for a service called `blockyard` it sets `BLOCKYARD_SERVICE_HOST`,
/// `BLOCKYARD_PORT` and others in every pod. They are ignored.
fn is_kubernetes_variable(key: &str) -> bool {
    key.ends_with("SERVICE_HOST")
        || key.contains("SERVICE_PORT")
        || key == "PORT"
        || key.contains("PORT_")
        || key.ends_with("_PORT")
}

/// Turns an error of serde into one that names key, value, origin and what is expected.
fn explain(merged: &Merged, error: &figment::Error) -> Error {
    let path = error.path.join(".");
    if let Kind::UnknownField(field, siblings) = &error.kind {
        let key = if path.is_empty() { field.clone() } else { path };
        let origin = merged.lookup(&key).1;
        let variable = suggest::with_underscores(&key).filter(|_| origin.starts_with("environment "));
        let meant = variable.map(|known| {
            let name = known.replace('.', "__").to_uppercase();
            format!("write two underscores for a dot: {PREFIX}{name}")
        });
        let meant = meant.or_else(|| suggest::suggestion(&key, siblings));
        return Error::UnknownKey { origin, key, meant };
    }
    let (value, origin) = merged.lookup(&path);
    let value = value.map_or_else(|| "?".into(), |value| value_text(&value));
    let problem = match &error.kind {
        Kind::Message(problem) => problem.clone(),
        Kind::InvalidType(_, expected) if expected == "a sequence" => match array_entry(&path, &value) {
            Some(entry) => format!("expected an array, like [{entry}]"),
            None => "expected an array".to_owned(),
        },
        Kind::InvalidType(_, expected) if expected.starts_with("enum ") => match words(merged, &path) {
            Some(words) => format!("expected one of {}", quoted(&words)),
            None => format!("expected {}", type_name(expected)),
        },
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) | Kind::InvalidLength(_, expected) => {
            format!("expected {}", type_name(expected))
        }
        Kind::UnknownVariant(_, known) => format!("expected one of {}", quoted(known)),
        Kind::MissingField(field) => format!("`{field}` is required here"),
        other => other.to_string(),
    };
    Error::Value { origin, key: path, value, problem }
}

/// The words that a key takes, in the place of which a value of another type was written: serde names them in its error
/// of a wrong word. `None`: the key is in an array, or takes more than words.
fn words(merged: &Merged, path: &str) -> Option<Vec<&'static str>> {
    // Its words are keys of tables.
    if path == "tiers.encryption.keys" {
        return None;
    }
    let wrong = Layer::one("?", path, Value::from("?"));
    match merged.figment.clone().merge(wrong).extract::<Config>().err()? {
        figment::Error { kind: Kind::UnknownVariant(_, words), path: at, .. } if at.join(".") == path => {
            Some(words.to_vec())
        }
        _ => None,
    }
}

/// An entry of the array that a key needs: of a text that was written in its place, the text.
fn array_entry<'a>(key: &str, value: &'a str) -> Option<&'a str> {
    match key {
        "upstreams" => Some("\"http://10.0.0.1:8000\""),
        "tiers.g3_paths" => Some("{path = \"/mnt/a/kv\", capacity = \"400GiB\"}"),
        "tiers.quotas" => Some("{tenant = \"ann\", g3_guaranteed = \"50GiB\"}"),
        _ => Some(value).filter(|value| value.starts_with('"')),
    }
}

/// What serde expects, without the names of Rust's types.
fn type_name(expected: &str) -> &str {
    match expected {
        "f32" | "f64" => "a number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "a nonzero u32" => "a whole number, 1 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "bool" | "a boolean" => "`true` or `false`",
        "a string" => "a text",
        "path string" => "a path",
        "a sequence" => "an array",
        "a map" => "a table, like {KEY = VALUE}",
        table if table.starts_with("struct ") => "a table, like {KEY = VALUE}",
        choice if choice.starts_with("enum ") => "one of the values that docs/configuration.md lists",
        other => other,
    }
}

/// Adds value and origin to a problem found by a check.
fn with_origin(merged: &Merged, Problem { key, problem }: Problem) -> Error {
    match merged.lookup(&key) {
        (Some(value), origin) => Error::Value { value: value_text(&value), origin, key, problem },
        (None, _) => Error::Check(format!("{key}: {problem}")),
    }
}

/// The value at a path. A name may contain dots, for example the name of a model.
fn value_at_path<'a>(value: &'a Value, steps: &[&str]) -> Option<&'a Value> {
    match value {
        _ if steps.is_empty() => Some(value),
        Value::Array(_, list) => value_at_path(list.get(steps[0].parse::<usize>().ok()?)?, &steps[1..]),
        Value::Dict(_, entries) => {
            (1..=steps.len()).find_map(|len| value_at_path(entries.get(&steps[..len].join("."))?, &steps[len..]))
        }
        _ => None,
    }
}

fn value_text(value: &Value) -> String {
    // JSON cannot represent infinity and NaN.
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
