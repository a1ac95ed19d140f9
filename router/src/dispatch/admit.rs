//! Admits a placed request or queues it. A queued request gets one of: admit, reroute, reject.

use super::place::{Placement, place};
use crate::admission::{Permit, QueuedRequest, Resolution, Route, Ticket};
use crate::booking::Booking;
use crate::policy::explain;
use crate::state::Core;
use crate::telemetry::GaugeGuard;
use spans::Kind;
use std::sync::Arc;
use tokio::sync::oneshot;
use tokio::time::Instant;
use worker::engine::{Error, Request};

/// Places a request and admits it, or queues it until its worker has capacity. The later choices of a group were
/// admitted with its first and do not queue.
pub(crate) async fn admit(
    core: &Core,
    request: &Request,
    arrived: Instant,
) -> Result<(Box<Placement>, Arc<Permit>), Error> {
    let ticket = ticket(core, request, arrived);
    if let Some(group) = request.group.filter(|group| group.index() > 0) {
        let placement = place(core, request, true, &[], ticket.until())?;
        let permit = core.admission.join(group.id(), &queued_request(&ticket, &placement));
        return Ok((placement, permit));
    }
    let (placement, permit) = admit_or_queue(core, request, &ticket, arrived).await?;
    let permit = match request.group {
        Some(group) => core.admission.share(group.id(), permit),
        None => Arc::new(permit),
    };
    Ok((placement, permit))
}

fn ticket(core: &Core, request: &Request, arrived: Instant) -> Ticket {
    let (resolved, deadline) = (core.settings(), request.attributes.deadline);
    let settings = &resolved.settings;
    Ticket {
        model: request.model.clone(),
        tenant: request.attributes.tenant.clone(),
        priority: request.attributes.priority,
        deadline,
        target: settings.slo.ttft.filter(|_| deadline.is_none()).map(|target| arrived + target.0),
        queue_deadline: arrived + settings.admission.max_queue_time.0,
        tokens: request.tokens.len() as u64,
        choices: request.choices(),
    }
}

async fn admit_or_queue(
    core: &Core,
    request: &Request,
    ticket: &Ticket,
    arrived: Instant,
) -> Result<(Box<Placement>, Permit), Error> {
    let Admitted { placement, permit, is_late, waits } = place_and_admit(core, request, ticket)?;
    match waits {
        None => {
            leave(core, ticket, is_late, &placement);
            Ok((placement, permit))
        }
        // Boxed, because few requests wait.
        Some(waits) => {
            let queued = Queued { placement, permit, is_late, arrived };
            Box::pin(wait(core, request, ticket, queued, waits)).await
        }
    }
}

/// Resolves when something is decided about a queued request; and why it is queued.
type Waits = (oneshot::Receiver<Resolution>, &'static str);

/// A placed request that is admitted, or that waits.
struct Admitted {
    placement: Box<Placement>,
    permit: Permit,
    is_late: bool,
    waits: Option<Waits>,
}

/// A request in the queue.
struct Queued {
    placement: Box<Placement>,
    permit: Permit,
    is_late: bool,
    arrived: Instant,
}

fn place_and_admit(core: &Core, request: &Request, ticket: &Ticket) -> Result<Admitted, Error> {
    let (placement, queued) = place_to_queue(core, request, ticket, true)?;
    let resolved = core.settings();
    let (limits, itl) = (&resolved.settings.admission, resolved.settings.slo.itl.map(|itl| itl.0));
    let (permit, waits) = core.admission.admit_or_queue(&core.fleet, limits, itl, &queued)?;
    Ok(Admitted { placement, permit, is_late: queued.is_late, waits })
}

/// Waits until a queued request may be sent.
async fn wait(
    core: &Core,
    request: &Request,
    ticket: &Ticket,
    Queued { mut placement, permit, mut is_late, arrived }: Queued,
    (mut resolution, why): Waits,
) -> Result<(Box<Placement>, Permit), Error> {
    let (admission, resolved) = (&core.admission, core.settings());
    let limits = &resolved.settings.admission;
    let mut span = request.attributes.trace.span("admission queue", Kind::Internal);
    span.set("blockyard.queue.reason", why);
    let _waiting = GaugeGuard::new(core.metrics.admission_queue_requests.with_label_values(&[&*request.model]));
    loop {
        match resolution.await {
            Ok(Resolution::Admit) => break,
            Ok(Resolution::Reroute) => {
                // Its own reservation must not count against the new placement.
                drop(placement);
                let queued;
                (placement, queued) = place_to_queue(core, request, ticket, false)?;
                is_late = queued.is_late;
                resolution = admission.requeue(limits, &permit, queued);
            }
            Ok(Resolution::Reject(rejection)) => {
                let error = admission.rejected(ticket.priority, rejection);
                span.fail(&error);
                return Err(error);
            }
            Err(_) => return Err(Error::Unavailable("the router has stopped".to_owned())),
        }
    }
    leave(core, ticket, is_late, &placement);
    let waited = arrived.elapsed();
    admission.waited(ticket.priority, waited);
    placement.explanation = placement.explanation.take().map(|line| explain::waited(&line, waited, why, is_late));
    Ok((placement, permit))
}

/// The request leaves admission for its worker.
fn leave(core: &Core, ticket: &Ticket, is_late: bool, placement: &Placement) {
    if is_late {
        placement.bookings().for_each(Booking::resume);
        core.admission.sent_late(ticket.priority);
    }
}

/// Places a request that may wait. A late one reserves nothing until it is admitted.
fn place_to_queue(
    core: &Core,
    request: &Request,
    ticket: &Ticket,
    is_new: bool,
) -> Result<(Box<Placement>, QueuedRequest), Error> {
    let placement = place(core, request, is_new, &[], ticket.until())?;
    let queued = queued_request(ticket, &placement);
    if queued.is_late {
        placement.bookings().for_each(Booking::suspend);
    }
    Ok((placement, queued))
}

/// Resolves queued requests, for as long as the router lives.
pub(crate) async fn run(core: Arc<Core>) {
    loop {
        core.admission.notified().await;
        let resolved = core.settings();
        let (limits, itl) = (&resolved.settings.admission, resolved.settings.slo.itl.map(|itl| itl.0));
        core.admission.dispatch_ready(&core.fleet, limits, itl);
    }
}

fn queued_request(
    ticket: &Ticket,
    Placement { placed, decode, amount, prefill, output_tokens, min_service_seconds, .. }: &Placement,
) -> QueuedRequest {
    let route = Route { decode: decode.id(), prefill: prefill.as_ref().map(|remote| remote.member.id()) };
    let remote = prefill.as_ref().map(|remote| remote.amount).unwrap_or_default();
    ticket.placed(route, [*amount, remote], *output_tokens, *min_service_seconds, *placed)
}

#[cfg(test)]
mod tests {
    use crate::state::Settings;
    use crate::tests::harness::{Harness, prompt, settle};
    use std::sync::Arc;
    use worker::plane::{Load, Role};

    #[tokio::test(start_paused = true)]
    async fn waiting_requests_are_counted_by_model() {
        let harness = Arc::new(Harness::new(Settings::default()));
        let worker = harness.worker(1, Role::Both).await;
        harness.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
        settle().await;
        let request = prompt(1, 100);
        let waiting = harness.router.core.metrics.admission_queue_requests.with_label_values(&[&*request.model]);
        let ask = |request| {
            let harness = harness.clone();
            tokio::spawn(async move { harness.answer(request).await })
        };
        let first = ask(request);
        let second = ask(prompt(2, 100));
        settle().await;
        assert_eq!(waiting.get(), 2);
        first.abort();
        settle().await;
        assert_eq!(waiting.get(), 1, "a cancelled request does not wait");
        harness.report(&worker, Load::default());
        assert_eq!(harness.metric("blockyard_router_requests_total"), 0, "no worker has got a request");
        second.await.unwrap().unwrap();
        assert_eq!(waiting.get(), 0);
        assert_eq!(harness.metric("blockyard_router_requests_total"), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_do_not_wait_for_paused_ones() {
        let harness = Arc::new(Harness::new(Settings::default()));
        let worker = harness.worker(1, Role::Both).await;
        let full = Load { running: 64, sequences_max: 16, ..Load::default() };
        harness.report(&worker, full.clone());
        settle().await;
        let request = prompt(1, 100);
        let waiting = harness.router.core.metrics.admission_queue_requests.with_label_values(&[&*request.model]);
        let asked = tokio::spawn({
            let harness = harness.clone();
            async move { harness.answer(request).await }
        });
        settle().await;
        assert_eq!(waiting.get(), 1);
        harness.report(&worker, Load { running: 0, paused: 64, ..full });
        asked.await.unwrap().unwrap();
    }
}
