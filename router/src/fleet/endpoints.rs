//! Which workers have the endpoint of a request. Servers of one model may have different ones.

use worker::engine::{EndpointKind, Request, Work};

/// The endpoints of the workers of a model.
#[derive(Default)]
pub(crate) struct Endpoints {
    /// Each kind of endpoint that is the only kind of some worker.
    only: Vec<EndpointKind>,
    /// Whether any worker may have all kinds.
    is_any_unlimited: bool,
}

impl Endpoints {
    /// Adds a worker. `only`: the single kind of endpoint that it has; `None` if it may have all.
    pub(super) fn add(&mut self, only: Option<EndpointKind>) {
        match only {
            Some(kind) if !self.only.contains(&kind) => self.only.push(kind),
            Some(_) => {}
            None => self.is_any_unlimited = true,
        }
    }

    /// The kind that a worker must have for a request. `None`: any worker may get it, because all have the endpoint, or
    /// because none has it and any of them can return that error.
    pub(super) fn required(&self, request: &Request) -> Option<EndpointKind> {
        let kind = kind(request).filter(|_| !self.only.is_empty())?;
        (self.is_any_unlimited || self.only.contains(&kind)).then_some(kind)
    }
}

/// Whether a worker has an endpoint of this `kind`. `only`: as in [`Endpoints::add`].
#[inline]
pub(super) fn has(only: Option<EndpointKind>, kind: Option<EndpointKind>) -> bool {
    only.zip(kind).is_none_or(|(only, kind)| only == kind)
}

/// The kind of endpoint of a request, if workers may lack it.
pub(super) fn kind(request: &Request) -> Option<EndpointKind> {
    match &request.work {
        Work::Relay(http) => http.kind(),
        Work::Generate | Work::Prefill | Work::Resume(_) => None,
    }
}
