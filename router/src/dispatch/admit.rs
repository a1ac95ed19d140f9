//! The door: a request is placed, and goes in or waits for its worker; and whoever waits is told what becomes of it.

use super::place::{Placement, place};
use crate::admission::{Asked, Bid, Lane, Permit, Told};
use crate::metrics::Counted;
use crate::policy::explain;
use crate::state::Core;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{Error, Pass, Request};

/// Places a request, and lets it wait until its worker takes it; unless it was let in with another.
pub(crate) async fn admit(core: &Core, request: &Request) -> Result<(Placement, Pass), Error> {
    if let Some(pass) = request.party.as_ref().and_then(|party| party.pass()) {
        return Ok((place(core, request, &[])?, pass));
    }
    let (placement, permit) = wait(core, request).await?;
    Ok((placement, Arc::new(permit)))
}

async fn wait(core: &Core, request: &Request) -> Result<(Placement, Permit), Error> {
    let (admission, rules, arrived) = (&core.admission, core.rules(), Instant::now());
    let limits = &rules.settings.admission;
    let bid = Bid {
        model: request.model.clone(),
        tenant: request.terms.tenant.clone(),
        priority: request.terms.priority,
        deadline: request.terms.deadline,
        tired: arrived + limits.max_queue_time.0,
        tokens: request.tokens.len() as u64,
        max_tokens: request.stop.max_tokens,
        answers: request.answers(),
    };
    let mut placement = place(core, request, &[])?;
    let (permit, waits) = admission.enter(&core.fleet, limits, &asked(&bid, &placement))?;
    let Some((mut call, why)) = waits else { return Ok((placement, permit)) };
    let _waiting = Counted::in_gauge(core.metrics.requests_waiting.with_label_values(&[&*request.model]));
    loop {
        match call.await {
            Ok(Told::Go) => break,
            Ok(Told::Again) => {
                // Its own booking must not stand in its way.
                drop(placement);
                placement = place(core, request, &[])?;
                call = admission.again(limits, &permit, asked(&bid, &placement));
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
