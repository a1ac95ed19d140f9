//! The effective configuration, each key with its value and origin.

use super::load::Merged;
use super::{Config, Origins};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

impl Origins {
    /// The origins of all values of a configuration.
    pub(super) fn new(config: &Config, merged: &Merged) -> Self {
        let of = |key: &str| match merged.lookup(key) {
            (Some(_), origin) => Some(origin),
            (None, _) => None,
        };
        Self(leaves(config).into_iter().filter_map(|leaf| of(&leaf.key()).map(|origin| (leaf.key(), origin))).collect())
    }

    /// The source that set a key: `default`, a file, `environment NAME`, or a flag.
    pub fn of(&self, key: &str) -> &str {
        self.0.get(key).map_or("default", String::as_str)
    }

    /// The keys that a source other than the defaults set.
    pub(super) fn keys_set(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, origin)| *origin != "default").map(|(key, _)| key.as_str())
    }

    /// Sets the source of a key.
    pub(crate) fn set(&mut self, key: &str, origin: &str) {
        self.0.insert(key.to_owned(), origin.to_owned());
    }

    /// These origins, but those of `before` for `keys`.
    pub(crate) fn keeping<'a>(mut self, before: &Self, keys: impl IntoIterator<Item = &'a String>) -> Self {
        for key in keys {
            self.0.remove(key);
            self.0.extend(before.0.get_key_value(key).map(|(key, origin)| (key.clone(), origin.clone())));
        }
        self
    }
}

/// As TOML that can be used as a configuration file, each value with its origin beside it.
pub fn as_toml(config: &Config, origins: &Origins) -> String {
    let mut lines: Vec<(String, String)> = Vec::new();
    let mut section = String::new();
    for leaf in leaves(config) {
        let within = leaf.sections.iter().map(|name| toml_key(name)).collect::<Vec<_>>().join(".");
        if within != section {
            section = within;
            lines.push((String::new(), String::new()));
            lines.push((format!("[{section}]"), String::new()));
        }
        let name = toml_key(&leaf.name);
        lines.push(match &leaf.value {
            Value::Null => (format!("# {name} ="), "unset".into()),
            value => (format!("{name} = {}", toml_value(value)), origins.of(&leaf.key()).into()),
        });
    }
    // One column for all comments. Lines longer than 48 characters do not move it.
    let column = lines.iter().map(|(text, _)| text.chars().count()).filter(|width| *width <= 48).max().unwrap_or(0);
    let line = |(text, comment): &(String, String)| match comment.as_str() {
        "" => format!("{text}\n"),
        comment => format!("{text:column$}  # {comment}\n"),
    };
    lines.iter().map(line).collect()
}

/// As one JSON object: `{"router.policy": {"value": "kv", "origin": "default"}, …}`.
pub fn as_json(config: &Config, origins: &Origins) -> Value {
    let entry = |leaf: Leaf| {
        let origin = if leaf.value.is_null() { "unset" } else { origins.of(&leaf.key()) };
        (leaf.key(), serde_json::json!({ "value": leaf.value, "origin": origin }))
    };
    Value::Object(leaves(config).into_iter().map(entry).collect())
}

/// All keys with their defaults as TOML; `None` for keys that are unset by default.
pub fn defaults() -> Vec<(String, Option<String>)> {
    let entry = |leaf: Leaf| (leaf.key(), (!leaf.value.is_null()).then(|| toml_value(&leaf.value)));
    leaves(&Config::with_cache("".as_ref())).into_iter().map(entry).collect()
}

/// The keys whose values differ.
pub fn changes(from: &Config, to: &Config) -> Vec<String> {
    let values = |config| leaves(config).into_iter().map(|leaf| (leaf.key(), leaf.value));
    let (from, to): (BTreeMap<_, _>, BTreeMap<_, _>) = (values(from).collect(), values(to).collect());
    let keys: BTreeSet<&String> = from.keys().chain(to.keys()).collect();
    keys.into_iter().filter(|key| from.get(*key) != to.get(*key)).cloned().collect()
}

/// A key that holds a value.
struct Leaf {
    /// The enclosing sections, outermost first.
    sections: Vec<String>,
    name: String,
    value: Value,
}

impl Leaf {
    fn key(&self) -> String {
        self.sections.iter().chain([&self.name]).map(String::as_str).collect::<Vec<_>>().join(".")
    }
}

/// Every key that holds a value. Keys outside of sections come first, as TOML requires.
fn leaves(config: &Config) -> Vec<Leaf> {
    fn walk(sections: &[String], values: Map<String, Value>, found: &mut Vec<Leaf>) {
        let (inner, plain): (Vec<_>, Vec<_>) = values.into_iter().partition(|(_, value)| value.is_object());
        found.extend(plain.into_iter().map(|(name, value)| Leaf { sections: sections.into(), name, value }));
        for (name, value) in inner {
            if let Value::Object(values) = value {
                walk(&[sections, &[name]].concat(), values, found);
            }
        }
    }
    let mut found = Vec::new();
    if let Ok(Value::Object(values)) = serde_json::to_value(config) {
        walk(&[], values, &mut found);
    }
    found
}

/// A name as a TOML key, quoted where necessary, for example the name of a model with a dot.
fn toml_key(name: &str) -> String {
    let bare = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
    if !name.is_empty() && name.chars().all(bare) { name.into() } else { toml_value(&Value::from(name)) }
}

fn toml_value(value: &Value) -> String {
    toml::Value::try_from(value).map_or_else(|_| value.to_string(), |value| value.to_string())
}
