//! What the API description of a server (`/openapi.json`) says: at which endpoints the server keeps the caches of salts
//! apart, whether it lacks a kind of endpoints, and whether it can be asked for token ids.
//!
//! vLLM and recent SGLang have a field `cache_salt`, but not at every endpoint. Most servers ignore fields that they do
//! not know, so an answer to a request with a salt would prove nothing.
//!
//! vLLM describes the endpoints that its model has: those that generate, or those of pooling models.

use crate::ask::{Page, page};
use crate::relay::client::Client;
use crate::salts::SaltedEndpoints;
use http::HeaderValue;
use memchr::memmem;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use worker::engine::EndpointKind;

/// The field of a salt.
const SALT: &str = "cache_salt";

/// The field that asks for the token ids of a response. vLLM has it.
const TOKEN_IDS: &str = "return_token_ids";

/// Endpoints that take salts if the description has the field anywhere, but does not resolve their requests: where a
/// server has the field, it has it here.
const MAIN_ENDPOINTS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Maximum number of paths that are kept, and of the bytes of each. A server has a few dozen short ones.
const MAX_PATHS: usize = 256;
const MAX_PATH_BYTES: usize = 128;

/// Maximum number of schemas within schemas, from an endpoint to the field: servers have three.
const MAX_DEPTH: usize = 16;

/// Maximum number of schemas that are looked at for all endpoints, because schemas may name each other in circles. vLLM
/// and SGLang need a few hundred.
const MAX_SCHEMAS: usize = 20_000;

/// What a server says of its API.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ApiDescription {
    /// The endpoints whose requests have the field `cache_salt`.
    pub salted: SaltedEndpoints,
    /// The only kind of endpoints that it describes. `None`: both, or neither.
    pub only: Option<EndpointKind>,
    /// It does not have the field `return_token_ids`. Of a server without a description this is not known.
    pub lacks_token_ids: bool,
}

impl ApiDescription {
    /// The description of a server; an empty one if it has none. `None`: it does not answer.
    pub async fn ask(client: &Client, api_key: Option<&HeaderValue>) -> Option<Self> {
        match page(client, api_key, "/openapi.json").await {
            Page::Body(description) => Some(Self::read(&description)),
            // Tenants must not share a cache because a description could not be read.
            Page::Absent | Page::TooLarge => Some(Self::default()),
            Page::Failed => None,
        }
    }

    fn read(description: &[u8]) -> Self {
        let has = |name: &str| memmem::find(description, format!("\"{name}\"").as_bytes()).is_some();
        let has_kind = |kind: EndpointKind| kind.paths().iter().any(|path| has(path));
        let only = match (has_kind(EndpointKind::Generate), has_kind(EndpointKind::Pooling)) {
            (true, false) => Some(EndpointKind::Generate),
            (false, true) => Some(EndpointKind::Pooling),
            (true, true) | (false, false) => None,
        };
        let salted = if has(SALT) { salted(description) } else { SaltedEndpoints::None };
        Self { salted, only, lacks_token_ids: !has(TOKEN_IDS) }
    }
}

/// The endpoints of a description that have the field. The rest of the description, which is large, is not kept.
fn salted(description: &[u8]) -> SaltedEndpoints {
    let document: Value = serde_json::from_slice(description).unwrap_or_default();
    let mut schemas = Schemas { document: &document, left: MAX_SCHEMAS };
    let main = MAIN_ENDPOINTS.into_iter().filter(|path| schemas.have_salt(path) != Some(false));
    let mut paths: BTreeSet<Box<str>> = main.map(Box::from).collect();
    for path in document["paths"].as_object().into_iter().flat_map(serde_json::Map::keys) {
        let is_kept = paths.len() < MAX_PATHS && path.len() <= MAX_PATH_BYTES;
        if is_kept && schemas.have_salt(path) == Some(true) {
            paths.insert(path.as_str().into());
        }
    }
    if paths.is_empty() { SaltedEndpoints::None } else { SaltedEndpoints::Described(Arc::new(paths)) }
}

/// The schemas of a description.
struct Schemas<'a> {
    document: &'a Value,
    /// Number of schemas that are still looked at.
    left: usize,
}

impl<'a> Schemas<'a> {
    /// Whether requests for a path have the field. `None`: the description does not say.
    fn have_salt(&mut self, path: &str) -> Option<bool> {
        let body = &self.document["paths"][path]["post"]["requestBody"];
        let body = match body.get("$ref") {
            Some(reference) => self.target(reference)?,
            None => body,
        };
        self.has_salt(body.get("content")?.get("application/json")?.get("schema")?, MAX_DEPTH)
    }

    /// Whether objects of a schema have the field. `None`: the schema says nothing of fields, or cannot be resolved.
    fn has_salt(&mut self, schema: &'a Value, depth: usize) -> Option<bool> {
        self.left = self.left.checked_sub(1)?;
        let depth = depth.checked_sub(1)?;
        if let Some(reference) = schema.get("$ref") {
            let target = self.target(reference)?;
            return self.has_salt(target, depth);
        }
        let mut parts = self.all_of(schema, "allOf", depth);
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            parts.push(Some(properties.contains_key(SALT)));
        }
        for name in ["anyOf", "oneOf"] {
            let variants = self.all_of(schema, name, depth);
            // A request may be of any variant, so that all of them must have the field.
            let lacks_it = variants.contains(&Some(false)).then_some(false);
            let have_it = variants.iter().all(|variant| *variant == Some(true)).then_some(true);
            parts.extend((!variants.is_empty()).then(|| lacks_it.or(have_it)));
        }
        if parts.contains(&Some(true)) {
            return Some(true);
        }
        (!parts.is_empty() && !parts.contains(&None)).then_some(false)
    }

    /// What [`has_salt`](Self::has_salt) says of the schemas in the array `name`, except for `null`.
    fn all_of(&mut self, schema: &'a Value, name: &str, depth: usize) -> Vec<Option<bool>> {
        let schemas = schema.get(name).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut answers = Vec::new();
        for schema in schemas {
            answers.push(self.has_salt(schema, depth));
            if self.left == 0 {
                answers.push(None);
                break;
            }
            if schema.get("type").is_some_and(|kind| kind == "null") {
                answers.pop();
            }
        }
        answers
    }

    /// What a reference within the description names.
    fn target(&self, reference: &Value) -> Option<&'a Value> {
        self.document.pointer(reference.as_str()?.strip_prefix('#')?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The description of an endpoint whose requests have this schema.
    fn endpoint(schema: &Value) -> Value {
        json!({ "post": { "requestBody": { "content": { "application/json": { "schema": schema } } } } })
    }

    /// The endpoints of a description that have the field.
    fn salted(description: &Value) -> Vec<String> {
        match ApiDescription::read(description.to_string().as_bytes()).salted {
            SaltedEndpoints::None => Vec::new(),
            SaltedEndpoints::Described(paths) => paths.iter().cloned().map(String::from).collect(),
            SaltedEndpoints::All => panic!("no description says this"),
        }
    }

    #[test]
    fn a_description_says_which_endpoints_take_salts() {
        let with = json!({ "type": "object", "properties": { "cache_salt": {}, "model": {} } });
        let without = json!({ "type": "object", "properties": { "model": {} } });
        let named = |name: &str| json!({ "$ref": format!("#/components/schemas/{name}") });
        // As of SGLang: its messages have no field.
        let description = json!({
            "paths": {
                "/v1/chat/completions": endpoint(&named("Chat")),
                "/v1/completions": endpoint(&named("Completion")),
                "/v1/responses": endpoint(&json!({ "anyOf": [named("Chat"), { "type": "null" }] })),
                "/v1/messages": endpoint(&named("Messages")),
                "/generate": endpoint(&json!({ "allOf": [named("Messages"), named("Chat")] })),
                "/v1/either": endpoint(&json!({ "oneOf": [named("Messages"), named("Chat")] })),
                "/v1/raw": endpoint(&json!({ "type": "object" })),
                "/v1/absent": endpoint(&named("Absent")),
                "/v1/circle": endpoint(&named("Circle")),
                "/v1/referred": { "post": { "requestBody": { "$ref": "#/components/requestBodies/Chat" } } },
                "/v1/audio/transcriptions": { "post": { "requestBody": { "content": {
                    "multipart/form-data": { "schema": named("Chat") },
                } } } },
            },
            "components": {
                "schemas": {
                    "Chat": with, "Completion": with, "Messages": without,
                    "Circle": { "anyOf": [named("Circle"), named("Circle"), named("Chat")] },
                },
                "requestBodies": { "Chat": { "content": { "application/json": { "schema": named("Chat") } } } },
            },
        });
        let expected = ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/referred", "/v1/responses"];
        assert_eq!(salted(&description), expected);
    }

    #[test]
    fn chat_and_completions_take_salts_if_the_description_does_not_resolve_them() {
        assert_eq!(salted(&json!({ "components": { "cache_salt": {} } })), ["/v1/chat/completions", "/v1/completions"]);
        let other = endpoint(&json!({ "properties": { "model": {} } }));
        let completions = json!({
            "paths": { "/v1/chat/completions": other, "/v1/completions": { "post": {} } },
            "components": { "cache_salt": {} },
        });
        assert_eq!(salted(&completions), ["/v1/completions"]);
        let none = json!({
            "paths": { "/v1/chat/completions": other, "/v1/completions": other },
            "components": { "cache_salt": {} },
        });
        assert!(salted(&none).is_empty());
        assert!(salted(&json!({ "paths": {} })).is_empty());
    }

    #[test]
    fn a_description_without_the_field_lacks_token_ids() {
        let read = |field: &str| {
            let schema = json!({ "properties": { field: { "type": "boolean" } } });
            let paths = json!({ "paths": { "/v1/completions": endpoint(&schema) } });
            ApiDescription::read(paths.to_string().as_bytes()).lacks_token_ids
        };
        assert!(read("logprobs") && !read("return_token_ids"));
        assert!(!ApiDescription::default().lacks_token_ids, "it is not known");
    }

    #[test]
    fn the_paths_that_are_kept_are_bounded() {
        let with = endpoint(&json!({ "properties": { "cache_salt": {} } }));
        let mut paths = serde_json::Map::new();
        paths.insert(format!("/{}", "x".repeat(MAX_PATH_BYTES)), with.clone());
        paths.extend((0..2000).map(|n| (format!("/v1/{n}"), with.clone())));
        let kept = salted(&json!({ "paths": paths }));
        assert_eq!(kept.len(), MAX_PATHS);
        assert!(kept.iter().all(|path| path.len() <= MAX_PATH_BYTES));
    }

    #[test]
    fn a_description_says_which_endpoints_there_there_are() {
        let read = |paths: &[&str]| {
            let paths = paths.iter().map(|path| ((*path).to_owned(), json!({ "post": {} })));
            let paths = paths.collect::<serde_json::Map<_, _>>();
            ApiDescription::read(json!({ "openapi": "3.1.0", "paths": paths }).to_string().as_bytes()).only
        };
        assert_eq!(read(&["/health", "/v1/chat/completions", "/tokenize"]), Some(EndpointKind::Generate));
        assert_eq!(read(&["/health", "/v1/embeddings", "/tokenize"]), Some(EndpointKind::Pooling));
        assert_eq!(read(&["/v1/chat/completions/render", "/score"]), Some(EndpointKind::Pooling));
        assert_eq!(read(&["/v1/completions", "/v1/embeddings"]), None);
        assert_eq!(read(&["/v1/models"]), None);
    }
}
