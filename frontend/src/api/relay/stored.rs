//! Objects that servers store, as requests create and name them: responses, conversations, files and batches.
//!
//! Not here: where they are (`limits`), and that a request goes there (the router).

use super::contents::Contents;
use super::public_path::decoded;
use crate::limits::{Place, StoredObjects};
use crate::output::{Access, StoredObject};
use crate::params::{Fields, Raw};
use axum::http::Method;
use axum::http::request::Parts;
use std::sync::Arc;
use worker::engine::{below_collection, response_id};

/// The endpoint whose responses can be retrieved again, each at a path below it.
const RESPONSES: &str = "/v1/responses";

/// Fields of a request that creates an object, which name another object of the same server: its id, or an object with
/// it.
const REFERENCES: [&str; 3] = ["previous_response_id", "conversation", "input_file_id"];

/// Where the object is that a request names in its path or its body; `None`: it names none whose place is known.
pub(super) fn place(objects: &StoredObjects, tenant: &str, path: &str, contents: &Contents) -> Option<Place> {
    let below = below_collection(path)?;
    if let Some(id) = id_in(below) {
        return objects.place(tenant, id);
    }
    let Contents::Json(fields) = contents else { return None };
    REFERENCES.iter().find_map(|name| objects.place(tenant, referenced(fields, name)?))
}

/// The object that a request creates or names in its path; `None`: its endpoint has none.
pub(super) fn object(
    objects: &Arc<StoredObjects>,
    tenant: &Arc<str>,
    model: &Arc<str>,
    parts: &Parts,
) -> Option<StoredObject> {
    let path = parts.uri.path();
    let access = match id_in(below_collection(path)?) {
        None => Access::Create,
        Some(id) if parts.method == Method::GET => Access::Read(id),
        Some(id) => Access::Change(id),
    };
    Some(StoredObject {
        objects: Arc::clone(objects),
        tenant: Arc::clone(tenant),
        model: Arc::clone(model),
        is_response: path.starts_with(RESPONSES),
        access,
        server: None,
    })
}

/// The id in the rest of a path: its first part, decoded, as a body has it. Paths below that are those of the same
/// object.
fn id_in(below: &str) -> Option<u64> {
    let id = below.split('/').find(|part| !part.is_empty())?;
    Some(response_id(decoded(id)?.as_bytes()))
}

/// The id of the object that a field names.
fn referenced(fields: &Fields, name: &str) -> Option<u64> {
    let of = |raw: &Raw| Some(response_id(raw.bytes().strip_prefix(b"\"")?.strip_suffix(b"\"")?));
    of(fields.peek(name)?).or_else(|| of(fields.peek_object(name).ok()??.peek("id")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn a_request_names_an_object_in_its_path_or_its_body() {
        let objects = StoredObjects::default();
        let known = Place { model: "m".into(), server: 7 };
        objects.found("ann", response_id(b"id"), known.clone());
        objects.found("ann", response_id(b"resp:1"), known.clone());
        let named = |tenant: &str, path: &str, body: &'static str| {
            let fields = Fields::parse(&Bytes::from_static(body.as_bytes()));
            let contents = fields.map_or(Contents::Other, Contents::Json);
            place(&objects, tenant, path, &contents)
        };
        for (path, body) in [
            ("/v1/responses/id", ""),
            ("/v1/responses/id/cancel", "{}"),
            ("/v1/responses/resp%3A1", ""),
            ("/v1/responses/resp:1", ""),
            ("/v1/files/id/content", ""),
            ("/v1/conversations/id/items", r#"{"items":[]}"#),
            ("/v1/responses", r#"{"previous_response_id":"id","model":"m"}"#),
            ("/v1/responses", r#"{"conversation":"id"}"#),
            ("/v1/responses/", r#"{"previous_response_id":null,"conversation":{"id":"id"}}"#),
            ("/v1/batches", r#"{"input_file_id":"id"}"#),
        ] {
            assert_eq!(named("ann", path, body).as_ref(), Some(&known), "{path} {body}");
            assert_eq!(named("bob", path, body), None, "{path} {body}");
        }
        for (path, body) in [
            ("/v1/responses/other", r#"{"previous_response_id":"id"}"#),
            ("/v1/responses", r#"{"previous_response_id":7,"input":"id"}"#),
            ("/v1/responses", ""),
            ("/v1/responsesid", ""),
            ("/v1/chat/completions", r#"{"previous_response_id":"id"}"#),
        ] {
            assert_eq!(named("ann", path, body), None, "{path} {body}");
        }
    }
}
