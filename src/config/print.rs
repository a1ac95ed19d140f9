//! The outcome, key by key, with where each value came from.

use super::{Config, Origins};
use figment::Figment;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

impl Origins {
    /// Of all that a configuration says, as those who said it were merged.
    pub(super) fn new(config: &Config, merged: &Figment) -> Self {
        let of = |key: &str| merged.find_metadata(key).map(|metadata| metadata.name.to_string());
        Self(leaves(config).into_iter().filter_map(|(key, _)| of(&key).map(|origin| (key, origin))).collect())
    }

    /// Who set a key: `default`, a file, `environment NAME`, or a flag.
    pub fn of(&self, key: &str) -> &str {
        self.0.get(key).map_or("default", String::as_str)
    }

    /// These, but for some keys those that were told before.
    pub(crate) fn but<'a>(mut self, before: &Self, keys: impl IntoIterator<Item = &'a String>) -> Self {
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
    for (key, value) in leaves(config) {
        let (within, name) = key.rsplit_once('.').unwrap_or(("", &key));
        if within != section {
            section = within.into();
            lines.push((String::new(), String::new()));
            lines.push((format!("[{section}]"), String::new()));
        }
        lines.push(match value {
            Value::Null => (format!("# {name} ="), "unset".into()),
            value => (format!("{name} = {}", toml_value(&value)), origins.of(&key).into()),
        });
    }
    // One column for all comments, unless a long value would push it out of sight.
    let column = lines.iter().map(|(text, _)| text.chars().count()).filter(|width| *width <= 48).max().unwrap_or(0);
    let line = |(text, comment): &(String, String)| match comment.as_str() {
        "" => format!("{text}\n"),
        comment => format!("{text:column$}  # {comment}\n"),
    };
    lines.iter().map(line).collect()
}

/// As one JSON object: `{"router.policy": {"value": "kv", "origin": "default"}, …}`.
pub fn as_json(config: &Config, origins: &Origins) -> Value {
    let entry = |(key, value): (String, Value)| {
        let origin = if value.is_null() { "unset" } else { origins.of(&key) };
        (key, serde_json::json!({ "value": value, "origin": origin }))
    };
    Value::Object(leaves(config).into_iter().map(entry).collect())
}

/// All keys with their default as TOML; `None` where the default is nothing.
pub fn defaults() -> Vec<(String, Option<String>)> {
    let entry = |(key, value): (String, Value)| (key, (!value.is_null()).then(|| toml_value(&value)));
    leaves(&Config::with_cache("".as_ref())).into_iter().map(entry).collect()
}

/// The keys whose values differ.
pub fn changes(from: &Config, to: &Config) -> Vec<String> {
    let (from, to): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (leaves(from).into_iter().collect(), leaves(to).into_iter().collect());
    let keys: BTreeSet<&String> = from.keys().chain(to.keys()).collect();
    keys.into_iter().filter(|key| from.get(*key) != to.get(*key)).cloned().collect()
}

/// Every key that holds a value, those outside of sections first, as TOML wants it.
fn leaves(config: &Config) -> Vec<(String, Value)> {
    fn walk(prefix: &str, values: Map<String, Value>, found: &mut Vec<(String, Value)>) {
        let (sections, plain): (Vec<_>, Vec<_>) = values.into_iter().partition(|(_, value)| value.is_object());
        found.extend(plain.into_iter().map(|(key, value)| (format!("{prefix}{key}"), value)));
        for (key, value) in sections {
            if let Value::Object(values) = value {
                walk(&format!("{prefix}{key}."), values, found);
            }
        }
    }
    let mut found = Vec::new();
    if let Ok(Value::Object(values)) = serde_json::to_value(config) {
        walk("", values, &mut found);
    }
    found
}

fn toml_value(value: &Value) -> String {
    toml::Value::try_from(value).map_or_else(|_| value.to_string(), |value| value.to_string())
}
