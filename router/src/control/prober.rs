//! Asks workers whether they work: those that are left alone, before a client's request is risked on them, and those that had
//! nothing to do for a while, so that a hung one is found before a client does.
//!
//! A probe is a request of one token. An engine that answers it computes; one that only looks alive does not.

use crate::fleet::{Member, Verdict};
use crate::state::Core;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};
use worker::engine::{Error, Request};

/// How often it is looked who is due: the shortest rest.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Without a request for so long, a worker is asked: two tokens a minute are nothing.
const IDLE: Duration = Duration::from_secs(30);
/// A worker that needs longer for one token serves nobody.
const PATIENCE: Duration = Duration::from_secs(10);
/// Probes out at a time: a large fleet that idles is asked in turn.
const AT_ONCE: usize = 16;

/// Probes whoever is due, for as long as the router lives.
pub(crate) async fn run(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut out = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = out.next() => {}
            _ = ticks.tick() => {
                let now = Instant::now();
                let roster = core.fleet.roster();
                let due = roster.members().filter(|member| member.wants_probe(IDLE, now));
                for member in due.take(AT_ONCE.saturating_sub(out.len())) {
                    member.probe(now);
                    out.push(probe(core.clone(), member.clone()));
                }
            }
        }
    }
}

async fn probe(core: Arc<Core>, member: Arc<Member>) {
    let answer = async {
        let mut stream = member.engine.generate(request(&member)).await?;
        stream.next().await.unwrap_or_else(|| Err(Error::Failed("the stream ended without an output".to_owned())))
    };
    let verdict = tokio::select! {
        biased;
        // Whoever has left needs no verdict.
        () = member.gone.cancelled() => return,
        answer = tokio::time::timeout(PATIENCE, answer) => match answer {
            Ok(Ok(_)) => Verdict::Well,
            Ok(Err(error)) => Verdict::of(&error),
            Err(_) => Verdict::Hung,
        },
    };
    let ill = matches!(verdict, Verdict::Fault | Verdict::Hung);
    if ill {
        tracing::warn!(worker = %member.id(), ?verdict, "health check of the worker failed");
    }
    core.metrics.health_checks.with_label_values(&[if ill { "failed" } else { "ok" }]).inc();
    member.probed(verdict);
    core.admission.notify();
}

fn request(member: &Member) -> Request {
    let card = &member.instance.model;
    // One token never fills a block: nothing is left behind in any cache.
    Request::greedy("probe", &card.id, &[card.eos.first().copied().unwrap_or(0)], 1)
}
