//! Connections that switch to another protocol (RFC 9110, section 7.8).
//!
//! A handler answers with status 101 and puts an [`Upgrade`] among the extensions of its response: the rest of the
//! request. It runs on the task of the connection, so the connection and the request count as open until it ends, and a
//! client that does not read for too long ends it. Not here: what the rest does.

use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;

/// What is left of a request after a response with status 101. Dropping it ends the request. A clone stands for the
/// same, which one of them takes: extensions of responses can be cloned.
#[derive(Clone)]
pub(crate) struct Upgrade(Arc<Mutex<Option<BoxFuture<'static, ()>>>>);

impl Upgrade {
    pub(crate) fn new(rest: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::pin(rest)))))
    }

    /// The rest of the request, if it was not taken before.
    pub(super) fn take(&self) -> Option<BoxFuture<'static, ()>> {
        self.0.lock().take()
    }
}
