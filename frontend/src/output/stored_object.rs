//! The object of a server that a relayed request creates or names: notes where it is, and what was counted of it.

use crate::limits::{Place, StoredObjects};
use std::sync::Arc;
use worker::engine::RelayReport;

/// An object that a server stores, and that clients can retrieve by its id.
pub(crate) struct StoredObject {
    pub(crate) objects: Arc<StoredObjects>,
    pub(crate) tenant: Arc<str>,
    /// The model of the request.
    pub(crate) model: Arc<str>,
    /// It is a response, whose tokens count.
    pub(crate) is_response: bool,
    pub(crate) access: Access,
    /// The server that answers. `None`: it is not known yet, or the object is noted already.
    pub(crate) server: Option<u64>,
}

/// How a request accesses a stored object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// It creates one, unless it only lists them.
    Create,
    /// It reads the one whose id has this hash.
    Read(u64),
    /// It changes that one, such as to cancel it, and computes nothing.
    Change(u64),
}

impl StoredObject {
    /// Notes the server that answers the request without an error.
    pub(crate) fn answered(&mut self, server: Option<u64>) {
        self.server = server;
        match self.access {
            Access::Read(id) => self.note(id),
            // A path below that no object has may be one of another kind, which all servers answer alike.
            Access::Change(_) => self.server = None,
            Access::Create => {}
        }
    }

    /// Notes where the object is, once the response has said its id.
    pub(crate) fn has_id(&mut self, id: impl FnOnce() -> Option<u64>) {
        if self.server.is_some()
            && let Some(id) = id()
        {
            self.note(id);
        }
    }

    fn note(&mut self, id: u64) {
        if let Some(server) = self.server.take() {
            self.objects.found(&self.tenant, id, Place { model: Arc::clone(&self.model), server });
        }
    }

    /// What a report says of tokens that were not counted before.
    pub(crate) fn uncounted(&self, report: RelayReport) -> RelayReport {
        if !self.is_response {
            return report;
        }
        let Self { objects, tenant, .. } = self;
        let (Access::Read(id) | Access::Change(id)) = self.access else {
            if let Some(id) = report.response_id {
                objects.created(tenant, id, report.completion_tokens.unwrap_or_default());
            }
            return report;
        };
        // A part of its stream may not have the id.
        let uncounted = |tokens| objects.retrieved(tenant, report.response_id.unwrap_or(id), tokens);
        // The prompt was counted with the request that created the response.
        let completion_tokens = report.completion_tokens.map(uncounted);
        RelayReport { prompt_tokens: None, cached_tokens: None, completion_tokens, ..report }
    }
}
