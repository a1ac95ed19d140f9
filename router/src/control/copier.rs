//! Has workers copy shared prefixes ahead of demand, as decisions order it.
//!
//! Not here: which prefix is copied to which worker (`policy`), and the copy itself, which the worker makes.

use crate::booking::{CopyEnd, CopyOrder, PrefixCopies};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use prometheus::IntCounterVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use worker::engine::{PrefetchError, Prefetched};

/// After this time a worker does not answer: the native engine gives up a copy after 10 s.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Carries out orders, for as long as the router lives. Counts them in `copied`, by outcome.
pub(crate) async fn run(copies: Arc<PrefixCopies>, copied: IntCounterVec) {
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(outcome) = running.next() => copied.with_label_values(&[outcome]).inc(),
            order = copies.next() => {
                copied.with_label_values(&["started"]).inc();
                running.push(carry_out(order));
            }
        }
    }
}

/// Has a worker make a copy. Returns the outcome as a label.
async fn carry_out(order: CopyOrder) -> &'static str {
    let worker = order.to.clone();
    let prefetch = timeout(TIMEOUT, worker.engine.prefetch(order.copy.clone()));
    let answer = tokio::select! {
        biased;
        () = worker.lease_ended.cancelled() => return "cancelled",
        answer = prefetch => answer.unwrap_or(Err(PrefetchError::TimedOut)),
    };
    let (end, outcome) = match answer {
        Ok(Prefetched { blocks, bytes }) => {
            tracing::debug!(worker = %worker.id(), blocks, bytes, "shared prefix copied ahead of demand");
            (CopyEnd::Done, "complete")
        }
        Err(error) => {
            tracing::debug!(worker = %worker.id(), %error, "shared prefix not copied");
            let never = error == PrefetchError::Unsupported;
            (if never { CopyEnd::Unsupported } else { CopyEnd::Failed }, error.name())
        }
    };
    order.end(end);
    outcome
}
