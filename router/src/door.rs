//! The door: a request is placed, and goes in or waits for its worker; and whoever waits is called.

use crate::admission::{Asked, Call, Held, Lane, Permit};
use crate::core::Core;
use crate::explain;
use crate::load::Amount;
use crate::place::{Placement, place};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Error, Request};

/// Output tokens that a request is charged for unless it asks for fewer: most answers are shorter.
pub(crate) const OUTPUT_TOKENS: u64 = 256;

/// Places a request, and lets it wait until its worker takes it.
pub(crate) async fn admit(core: &Core, request: &Request) -> Result<(Placement, Permit), Error> {
    let (admission, class) = (&core.admission, request.terms.priority);
    let arrived = Instant::now();
    let mut placement = place(core, request, &[])?;
    let mut asked = asked(request, &placement);
    let (permit, waits) = admission.enter(&core.fleet, &core.rules().settings.admission, &asked)?;
    let Some((mut call, why)) = waits else { return Ok((placement, permit)) };
    let tired = arrived + Duration::from_secs_f64(core.rules().settings.admission.wait_seconds_max);
    loop {
        let until = asked.latest.map_or(tired, |latest| latest.min(tired));
        tokio::select! {
            biased;
            told = &mut call => match told {
                Ok(Call::Go) => break,
                Ok(Call::Again) => {
                    // Its own booking must not stand in its way.
                    drop(placement);
                    placement = place(core, request, &[])?;
                    asked = self::asked(request, &placement);
                    call = admission.again(&core.fleet, &core.rules().settings.admission, &permit, asked.clone());
                }
                Ok(Call::Displaced(retry_after)) => {
                    admission.count(class, "displaced");
                    return Err(Error::Overloaded { retry_after });
                }
                Err(_) => return Err(Error::Unavailable("the router has stopped".to_owned())),
            },
            () = tokio::time::sleep_until(until) => {
                let late = until < tired;
                let retry_after = admission.give_up(&core.rules().settings.admission, &permit, &asked, late);
                return Err(if late { Error::Late } else { Error::Overloaded { retry_after } });
            }
        }
    }
    let waited = arrived.elapsed();
    admission.waited(class, waited);
    placement.explanation = placement.explanation.map(|line| explain::waited(&line, waited, why));
    Ok((placement, permit))
}

/// Calls those whose turn it is, for as long as the router lives.
pub(crate) async fn keep(core: Arc<Core>) {
    loop {
        core.admission.poked().await;
        core.admission.round(&core.fleet, &core.rules().settings.admission);
    }
}

fn asked(request: &Request, placement: &Placement) -> Asked {
    let held =
        |amount: Amount| Held { tokens: amount.prefill_tokens, sequences: amount.sequences, blocks: amount.blocks };
    let detour = placement.prefill.as_ref();
    // What nobody has measured is no reason to refuse anybody.
    let measured = detour.map_or(&placement.decode, |detour| &detour.member).measured();
    let takes = if measured { Duration::from_secs_f64(placement.takes.clamp(0.0, 1e6)) } else { Duration::ZERO };
    let output = request.stop.max_tokens.map_or(OUTPUT_TOKENS, |most| OUTPUT_TOKENS.min(most.into()));
    let [decode, prefill] = [held(placement.amount), held(detour.map_or_else(Amount::default, |detour| detour.amount))];
    Asked {
        model: request.model.clone(),
        tenant: request.terms.tenant.clone(),
        priority: request.terms.priority,
        latest: request.terms.deadline.map(|deadline| deadline.checked_sub(takes).unwrap_or(deadline)),
        tokens: request.tokens.len() as u64,
        charge: decode.tokens + prefill.tokens + output,
        lane: Lane { decode: placement.decode.id(), prefill: detour.map(|detour| detour.member.id()) },
        held: [decode, prefill],
        placed: Instant::now(),
    }
}
