//! What the caller of a request may use: its models and its tenant, as its API key says.

use crate::error::Error;
use crate::http::RequestContext;
use crate::keys::Key;
use crate::model::find_card;
use crate::params::{Fields, Raw, scheduling};
use crate::state::AppState;
use axum::http::HeaderMap;
use std::sync::Arc;
use worker::engine::{Conversation, ModelCard};

/// Fields by which servers use an adapter in place of the model: SGLang's, and those of others.
const ADAPTERS: [&str; 4] = ["lora_path", "lora_id", "lora", "adapter_id"];

/// The object in which TGI and servers like it have these fields.
const PARAMETERS: &str = "parameters";

/// The served models that the caller may use.
pub(super) fn models(state: &AppState, context: &RequestContext) -> Vec<Arc<ModelCard>> {
    let mut cards = state.engine.models();
    cards.retain(|card| context.key().is_none_or(|key| key.allows(&card.id)));
    cards
}

/// The model that a body names. An empty name is the same as none, as for vLLM. For a key that may use some models
/// only, the body must name the model so that every server reads the same name: of several fields `model` some servers
/// read the first one, and some read `Model` too. Adapters in further fields must be models of the key.
pub(super) fn named_model(context: &RequestContext, fields: &mut Fields) -> Result<Option<String>, Error> {
    let named = |text: Option<String>| text.filter(|name| !name.is_empty());
    let Some(key) = context.key().filter(|key| key.has_models()) else { return fields.text("model").map(named) };
    if fields.is_ambiguous("model") {
        return Err(Error::ModelNotNamed);
    }
    check_adapters(key, fields)?;
    if fields.is_ambiguous(PARAMETERS) {
        return Err(Error::AdapterNotAllowed(PARAMETERS.into()));
    }
    if let Some(parameters) = fields.peek_object(PARAMETERS)? {
        check_adapters(key, &parameters)?;
    }
    fields.text("model").map(named).map_err(|_| Error::ModelNotNamed)
}

/// Checks that the adapters in the fields of an object are models of the key.
fn check_adapters(key: &Key, fields: &Fields) -> Result<(), Error> {
    let is_allowed = |raw: &Raw| adapters(raw).is_some_and(|names| names.iter().flatten().all(|name| key.allows(name)));
    for field in ADAPTERS {
        if fields.is_ambiguous(field) || !fields.peek(field).is_none_or(is_allowed) {
            return Err(Error::AdapterNotAllowed(fields.path(field)));
        }
    }
    Ok(())
}

/// The adapters that a field names: one, or one for each prompt. `None` if it has a value of another type.
fn adapters(raw: &Raw) -> Option<Vec<Option<String>>> {
    let one: Result<Option<String>, _> = serde_json::from_slice(raw.bytes());
    one.map(|name| vec![name]).or_else(|_| serde_json::from_slice(raw.bytes())).ok()
}

/// The card of a model. For one that the caller may not use the error is the same whether it is served or not.
pub(super) fn model(state: &AppState, context: &RequestContext, id: &str) -> Result<Arc<ModelCard>, Error> {
    let Some(key) = context.key() else { return find_card(&*state.engine, id) };
    if !key.allows(id) {
        return Err(Error::ModelNotAllowed(id.into()));
    }
    find_card(&*state.engine, id).map_err(|error| match error {
        Error::UnknownModel { model, mut known } => {
            known.retain(|id| key.allows(id));
            Error::UnknownModel { model, known }
        }
        other => other,
    })
}

/// The model of a request that names none, which vLLM takes for one for its own model: the only relayed one, without
/// counting its adapters, its further names and aliases. `None` if there are others, or the key may use some models
/// only.
pub(super) fn only_model(state: &AppState, context: &RequestContext) -> Option<Arc<ModelCard>> {
    if context.key().is_some_and(|key| key.has_models()) {
        return None;
    }
    let conversation = Conversation { request: &context.id, tenant: "", session: None, served_by: None, body: &[] };
    let is_alias = |card: &Arc<ModelCard>| state.engine.resolve(&card.id, &conversation).is_some();
    let cards = state.engine.models();
    let own = || cards.iter().filter(|card| card.parent.is_none() && !is_alias(card));
    let only = own().find(|card| card.name_of.is_none()).or_else(|| own().next())?;
    (only.is_relayed && own().all(|card| card.first_name() == only.first_name())).then(|| Arc::clone(only))
}

/// The tenant: that of the key, else the one that a trusted proxy names; empty if there is none.
pub(super) fn tenant(state: &AppState, context: &RequestContext, headers: &HeaderMap) -> Result<Arc<str>, Error> {
    let tenant = match context.key().and_then(|key| key.tenant.clone()) {
        Some(tenant) => tenant,
        None => scheduling::tenant(headers, state.settings.tenant_header.as_ref())?,
    };
    context.set_tenant(&tenant);
    Ok(tenant)
}
