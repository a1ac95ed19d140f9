//! The prompts of a completion: a string, strings, tokens, or arrays of tokens.

use crate::controls::{CHOICES_MAX, token_ids};
use crate::error::Error;
use crate::fields::{Fields, empty, mistyped, too_long};
use crate::model::Model;
use serde_json::Value;
use std::sync::Arc;

const EXPECTED: &str = "a string, an array of strings, an array of tokens or an array of such arrays";

/// Takes `prompt`, as tokens.
pub(super) fn take(fields: &mut Fields, model: &Model) -> Result<Vec<Arc<[u32]>>, Error> {
    let special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let encode = |text: &str| model.encode(text, special).map(Arc::from);
    let ids = |path: &str, items: &[Value]| token_ids(path, items, model.card.vocabulary).map(Arc::from);
    let items = match fields.value("prompt") {
        None => return Err(fields.missing("prompt")),
        Some(Value::String(text)) => return Ok(vec![encode(&text)?]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(mistyped("prompt", EXPECTED, &other)),
    };
    match items.first() {
        None => return Err(empty("prompt")),
        Some(Value::Number(_)) => return Ok(vec![ids("prompt", &items)?]),
        Some(_) if items.len() > CHOICES_MAX as usize => {
            return Err(too_long("prompt", CHOICES_MAX as usize, items.len()));
        }
        Some(_) => {}
    }
    let prompt = |(i, item): (usize, &Value)| match item {
        Value::String(text) => encode(text),
        Value::Array(items) => ids(&format!("prompt[{i}]"), items),
        other => Err(mistyped(&format!("prompt[{i}]"), "a string or an array of tokens", other)),
    };
    items.iter().enumerate().map(prompt).collect()
}
