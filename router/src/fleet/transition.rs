//! Log lines of workers that begin to fail, and of those that work again, when a circuit breaker changes. A worker
//! whose breaker changes again and again has a few of them in a minute.
//!
//! Not here: each failed request, which is logged where it is retried.

use spans::{FaultLog, LogLimit};
use std::fmt::Display;
use std::time::Duration;
use worker::engine::Engine;
use worker::plane::WorkerId;

/// A change of a circuit breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transition {
    /// It was closed and is not any more.
    Opened,
    /// It is closed again.
    Closed,
}

/// What has changed a circuit breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    Request,
    HealthCheck,
}

/// Lines of each kind per second: enough for the servers of a rack, few enough when a whole fleet cannot be reached.
const MAX_LINES_PER_SECOND: u32 = 50;

static OPENED: LogLimit = LogLimit::new(MAX_LINES_PER_SECOND, Duration::from_secs(1));
static CLOSED: LogLimit = LogLimit::new(MAX_LINES_PER_SECOND, Duration::from_secs(1));

impl Transition {
    /// Logs the change, without the span of a request: it is of the worker. `workers`: the limits of those that the
    /// line is about, which are models or ranks of one server.
    pub(crate) fn log(
        self,
        worker: WorkerId,
        engine: &dyn Engine,
        workers: &[&FaultLog],
        cause: Cause,
        error: &dyn Display,
    ) {
        // Each is asked: it remembers whether it is logged.
        let (limit, logged) = match self {
            Self::Opened => (&OPENED, workers.iter().filter(|worker| worker.failed().is_some()).count()),
            Self::Closed => (&CLOSED, workers.iter().filter(|worker| worker.ended()).count()),
        };
        if logged == 0 {
            return;
        }
        let Some(suppressed) = limit.admit() else { return };
        let workers = workers.len();
        let address = engine.address();
        let address = address.as_deref();
        match (self, cause) {
            (Self::Opened, Cause::Request) => tracing::warn!(
                parent: None,
                %worker, address, workers, %error, suppressed,
                "requests fail on the worker; it is passed over while others are available"
            ),
            (Self::Opened, Cause::HealthCheck) => tracing::warn!(
                parent: None,
                %worker, address, workers, %error, suppressed,
                "the health check of the worker fails; it is passed over while others are available"
            ),
            (Self::Closed, _) => {
                tracing::info!(parent: None, %worker, address, workers, suppressed, "the worker works again");
            }
        }
    }
}
