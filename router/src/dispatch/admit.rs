//! The door: a request is placed, and goes in or waits for its worker; and whoever waits is told what becomes of it.

use super::place::{Placement, place};
use crate::admission::{Asked, Bid, Lane, Permit, Told};
use crate::metrics::Counted;
use crate::policy::explain;
use crate::state::Core;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{Error, Request};

/// Places a request and admits it, or queues it until its worker has capacity. The later choices of a group were admitted
/// with its first and do not queue.
pub(crate) async fn admit(core: &Core, request: &Request) -> Result<(Placement, Arc<Permit>), Error> {
    let arrived = Instant::now();
    let bid = bid(request, arrived + core.rules().settings.admission.max_queue_time.0);
    if let Some(group) = request.group.filter(|group| group.index() > 0) {
        let placement = place(core, request, &[])?;
        let permit = core.admission.join(group.id(), &asked(&bid, &placement));
        return Ok((placement, permit));
    }
    let (placement, permit) = wait(core, request, &bid, arrived).await?;
    let permit = match request.group {
        Some(group) => core.admission.share(group.id(), permit),
        None => Arc::new(permit),
    };
    Ok((placement, permit))
}

fn bid(request: &Request, tired: Instant) -> Bid {
    Bid {
        model: request.model.clone(),
        tenant: request.terms.tenant.clone(),
        priority: request.terms.priority,
        deadline: request.terms.deadline,
        tired,
        tokens: request.tokens.len() as u64,
        max_tokens: request.stop.max_tokens,
        answers: request.choices(),
    }
}

async fn wait(core: &Core, request: &Request, bid: &Bid, arrived: Instant) -> Result<(Placement, Permit), Error> {
    let (admission, rules) = (&core.admission, core.rules());
    let limits = &rules.settings.admission;
    let mut placement = place(core, request, &[])?;
    let (permit, waits) = admission.enter(&core.fleet, limits, &asked(bid, &placement))?;
    let Some((mut call, why)) = waits else { return Ok((placement, permit)) };
    let _waiting = Counted::in_gauge(core.metrics.requests_waiting.with_label_values(&[&*request.model]));
    loop {
        match call.await {
            Ok(Told::Go) => break,
            Ok(Told::Again) => {
                // Its own booking must not stand in its way.
                drop(placement);
                placement = place(core, request, &[])?;
                call = admission.again(limits, &permit, asked(bid, &placement));
            }
            Ok(Told::No(refusal)) => return Err(admission.refused(bid.priority, refusal)),
            Err(_) => return Err(Error::Unavailable("the router has stopped".to_owned())),
        }
    }
    let waited = arrived.elapsed();
    admission.waited(bid.priority, waited);
    placement.explanation = placement.explanation.map(|line| explain::waited(&line, waited, why));
    Ok((placement, permit))
}

/// Tells those who wait, for as long as the router lives.
pub(crate) async fn keep(core: Arc<Core>) {
    loop {
        core.admission.poked().await;
        core.admission.round(&core.fleet, &core.rules().settings.admission);
    }
}

fn asked(bid: &Bid, Placement { decode, amount, prefill, takes, .. }: &Placement) -> Asked {
    let lane = Lane { decode: decode.id(), prefill: prefill.as_ref().map(|detour| detour.member.id()) };
    let detour = prefill.as_ref().map(|detour| detour.amount).unwrap_or_default();
    bid.placed(lane, [*amount, detour], *takes, Instant::now())
}

#[cfg(test)]
mod tests {
    use crate::settings::Settings;
    use crate::tests::fake::{Yard, prompt, settle};
    use std::sync::Arc;
    use worker::plane::{Load, Phase};

    #[tokio::test(start_paused = true)]
    async fn waiting_requests_are_counted_by_model() {
        let yard = Arc::new(Yard::new(Settings::default()));
        let worker = yard.worker(1, Phase::Both).await;
        yard.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
        settle().await;
        let request = prompt(1, 100);
        let waiting = yard.router.core.metrics.requests_waiting.with_label_values(&[&*request.model]);
        let ask = |request| {
            let yard = yard.clone();
            tokio::spawn(async move { yard.answer(request).await })
        };
        let (first, second) = (ask(request), ask(prompt(2, 100)));
        settle().await;
        assert_eq!(waiting.get(), 2);
        first.abort();
        settle().await;
        assert_eq!(waiting.get(), 1, "a client that goes away waits no more");
        yard.report(&worker, Load::default());
        second.await.unwrap().unwrap();
        assert_eq!(waiting.get(), 0);
    }
}
