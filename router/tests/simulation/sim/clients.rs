//! The clients of a simulation: requests with shared prefixes, conversations, groups of choices, deadlines, and clients
//! that leave. Every token is compared with the undisturbed text as it arrives: that of the usual weights, or that of
//! the other ones, and never a part of each.

use super::cluster::Cluster;
use super::model::{self, MODEL, VOCABULARY, Variant};
use super::scenario::Kind;
use super::world::Rng;
use futures::StreamExt;
use kvbm::{Domain, Priority, Retention};
use router::Router;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use worker::engine::{
    Attempts, Engine, Error, Output, Readiness, Request, RequestAttributes, RequestGroup, Sampling, StopConditions,
    Work,
};

/// No request takes longer, whatever fails: a minute in the admission queue, and three attempts and two moves of up to
/// twenty seconds each for a process that does not answer, with as much again for loads and stalls.
const BOUND: Duration = Duration::from_mins(4);

/// Time for everything to work again once the last fault has ended: more than a lease and the longest open time of a
/// circuit breaker.
const RECOVERY: Duration = Duration::from_secs(15);

/// How a request ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Answered(Vec<u32>),
    Failed(Error),
    /// The client left.
    Cancelled,
    /// The router was killed, or there was none.
    NoRouter,
}

/// Prompts of one family begin alike.
const FAMILIES: u64 = 4;

/// All clients, until the last has its answer.
pub(super) async fn run(cluster: &Arc<Cluster>) {
    let mut rng = cluster.world.rng("clients", 0);
    let scenario = &cluster.scenario;
    let mut arrivals: Vec<_> =
        (0..scenario.requests).map(|_| rng.duration(&(Duration::ZERO..scenario.length))).collect();
    arrivals.sort_unstable();
    let start = Instant::now();
    let mut clients = Vec::new();
    for (number, at) in arrivals.into_iter().enumerate() {
        sleep_until(start + at).await;
        let (cluster, rng) = (cluster.clone(), cluster.world.rng("client", number as u64));
        clients.push(tokio::spawn(async move { converse(&cluster, number as u64, rng).await }));
    }
    for client in clients {
        if client.await.is_err() {
            cluster.world.violated(format_args!("a client panicked"));
        }
    }
}

/// One client: a request, and perhaps others that continue the conversation.
async fn converse(cluster: &Arc<Cluster>, number: u64, mut rng: Rng) {
    let domain = domain(rng.within(0..cluster.scenario.domains));
    let mut prompt = prompt(&mut rng);
    let turns = if rng.chance(0.3) { rng.within(2..4) } else { 1 };
    for turn in 0..turns {
        let (id, outputs) = (format!("q{number}.{turn}"), cluster.scenario.outputs.clone());
        let request = draw(&mut rng, &id, &prompt, &domain, outputs);
        let choices = if rng.chance(0.15) { rng.within(2..4) as u32 } else { 1 };
        let Ending::Answered(text) = ask_group(cluster, request, choices, &mut rng).await else { return };
        prompt.extend(text);
        let more = rng.within(1..60);
        prompt.extend((0..more).map(|_| rng.within(1..VOCABULARY) as u32));
        sleep(rng.millis(0..4_000)).await;
    }
}

fn domain(number: u64) -> Domain {
    match number {
        0 => Domain::shared(),
        _ => Domain::derived(b"secret", &format!("tenant {number}")),
    }
}

fn prompt(rng: &mut Rng) -> Vec<u32> {
    let family = rng.within(0..FAMILIES);
    let (common, own) = (rng.within(0..300), rng.within(1..120));
    let shared = (0..common).map(|at| (1 + (family * 7919 + at * 31) % (VOCABULARY - 1)) as u32);
    let mut tokens: Vec<u32> = shared.collect();
    tokens.extend((0..own).map(|_| rng.within(1..VOCABULARY) as u32));
    tokens
}

fn draw(rng: &mut Rng, id: &str, prompt: &[u32], domain: &Domain, outputs: Range<u64>) -> Request {
    let priorities = [Priority::Low, Priority::Normal, Priority::Normal, Priority::High];
    let seconds = |seconds: u64| Duration::from_secs(seconds);
    let retention = Retention {
        ttl: rng.chance(0.2).then(|| seconds(rng.within(1..120))),
        pin: rng.chance(0.1).then(|| seconds(rng.within(1..60))),
        store: rng.chance(0.9),
        priority: rng.pick(&priorities).copied().unwrap_or_default(),
    };
    let attributes = RequestAttributes {
        tenant: format!("t{}", rng.within(0..3)).into(),
        session: rng.chance(0.3).then(|| id.into()),
        priority: rng.pick(&priorities).copied().unwrap_or_default(),
        deadline: rng.chance(0.2).then(|| Instant::now() + rng.millis(200..20_000)),
        retention,
        has_estimated_tokens: false,
        has_stop_strings: false,
        server: None,
        trace: spans::Context::none(),
        attempts: Attempts::default(),
    };
    let tokens = rng.within(outputs) as u32;
    Request {
        id: id.into(),
        model: MODEL.into(),
        tokens: prompt.into(),
        generated_tokens: 0,
        domain: domain.clone(),
        sampling: Sampling { seed: Some(rng.next()), ..Sampling::default() },
        stop: StopConditions { max_tokens: Some(tokens), ignore_eos: true, ..StopConditions::default() },
        work: Work::Generate,
        attributes,
        explain: rng.chance(0.1),
        group: None,
    }
}

/// Sends the choices of a request: the first alone, and the others once it has its first output.
async fn ask_group(cluster: &Arc<Cluster>, mut request: Request, choices: u32, rng: &mut Rng) -> Ending {
    let Some((router, dead)) = any_router(cluster, rng) else { return Ending::NoRouter };
    if choices == 1 {
        return ask(cluster, &router, &dead, request, rng.clone(), None).await;
    }
    let group = RequestGroup::new(choices);
    let base = request.clone();
    request.group = Some(group);
    let started = CancellationToken::new();
    let others = (1..choices).map(|index| {
        let mut other = base.clone();
        (other.id, other.group) = (format!("{}/{index}", base.id).into(), Some(group.choice(index)));
        other.sampling.seed = base.sampling.seed.map(|seed| seed.wrapping_add(index.into()));
        let (router, dead, started, rng) = (&router, &dead, started.clone(), cluster.world.rng(&base.id, index.into()));
        async move {
            started.cancelled().await;
            ask(cluster, router, dead, other, rng, None).await
        }
    });
    let others = futures::future::join_all(others);
    let first = ask(cluster, &router, &dead, request, rng.clone(), Some(started.clone()));
    let both = async {
        let first = first.await;
        // Without a first output the others are not sent.
        (first, started.is_cancelled())
    };
    let mut others = std::pin::pin!(others);
    let mut both = std::pin::pin!(both);
    tokio::select! {
        biased;
        (first, has_started) = &mut both => {
            if has_started {
                others.await;
            }
            first
        }
        _ = &mut others => both.await.0,
    }
}

/// A router that is ready.
fn any_router(cluster: &Cluster, rng: &mut Rng) -> Option<(Arc<Router>, CancellationToken)> {
    let routers = cluster.routers.lock();
    // A load balancer sends nothing to a router that is not ready.
    let ready: Vec<_> = routers.values().filter(|process| process.router.readiness() == Readiness::Ready).collect();
    rng.pick(&ready).map(|process| (process.router.clone(), process.dead.clone()))
}

/// Sends one request and compares its text. `started` is cancelled at its first output.
async fn ask(
    cluster: &Arc<Cluster>,
    router: &Arc<Router>,
    dead: &CancellationToken,
    request: Request,
    mut rng: Rng,
    started: Option<CancellationToken>,
) -> Ending {
    let world = &cluster.world;
    let id = request.id.clone();
    let leaves = rng.chance(0.12).then(|| rng.millis(0..4_000));
    let sent = Instant::now();
    world.log(format_args!(
        "{id} asks: {} tokens, deadline {:?}",
        request.tokens.len(),
        request.attributes.deadline.map(|at| at - sent)
    ));
    let answer = read(cluster, router, request, started);
    let ending = tokio::select! {
        biased;
        () = dead.cancelled() => Ending::NoRouter,
        () = sleep(leaves.unwrap_or_default()), if leaves.is_some() => Ending::Cancelled,
        ending = tokio::time::timeout(BOUND, answer) => ending.unwrap_or_else(|_| {
            world.violated(format_args!("{id} has not ended after {BOUND:?}"));
            Ending::Cancelled
        }),
    };
    match &ending {
        Ending::Answered(text) => world.log(format_args!("{id} is answered with {} tokens", text.len())),
        Ending::Failed(error) => {
            world.log(format_args!("{id} fails: {error}"));
            check_error(cluster, &id, error);
        }
        other => world.log(format_args!("{id} ends: {other:?}")),
    }
    ending
}

async fn read(cluster: &Cluster, router: &Arc<Router>, request: Request, started: Option<CancellationToken>) -> Ending {
    let (world, id, limit) = (&cluster.world, request.id.clone(), request.stop.max_tokens.unwrap_or_default() as usize);
    let seed = request.sampling.seed.unwrap_or_default();
    let undisturbed = |variant| model::undisturbed(variant, &request.tokens, request.domain.id(), seed, limit);
    let mut expected = Vec::from(Variant::OF_EACH_TEXT.map(undisturbed));
    let (mut text, mut reports) = (Vec::new(), 0);
    let mut stream = match router.generate(request).await {
        Ok(stream) => stream,
        Err(error) => return Ending::Failed(error),
    };
    while let Some(item) = stream.next().await {
        let tokens = match item {
            Ok(Output::Tokens(tokens)) => tokens,
            Ok(other) => {
                world.violated(format_args!("{id} gets {other:?}"));
                return Ending::Cancelled;
            }
            Err(error) => return Ending::Failed(error),
        };
        started.iter().for_each(CancellationToken::cancel);
        reports += u32::from(tokens.prompt.is_some());
        text.extend(tokens.ids);
        expected.retain(|expected| expected.starts_with(&text));
        if expected.is_empty() {
            world.violated(format_args!("{id} gets another text: token {} differs", text.len()));
            return Ending::Cancelled;
        }
        if tokens.finish.is_some() {
            if text.len() < limit {
                world.violated(format_args!("{id} ends after {} of {limit} tokens", text.len()));
            }
            if reports != 1 {
                world.violated(format_args!("{id} has {reports} reports of its prompt"));
            }
            return Ending::Answered(text);
        }
        world.log(format_args!("{id} has {} tokens", text.len()));
    }
    world.violated(format_args!("{id}: the stream ends without a finish"));
    Ending::Cancelled
}

/// Which errors are allowed.
fn check_error(cluster: &Cluster, id: &str, error: &Error) {
    let is_allowed = match error {
        // Back-pressure is an answer, and so is a deadline that cannot be met.
        Error::Overloaded { .. } | Error::DeadlineExceeded => true,
        // Without any worker there is no model.
        Error::Unavailable(_) | Error::Failed(_) | Error::UnknownModel(_) => cluster.scenario.kind == Kind::Chaos,
        Error::PromptTooLong { .. }
        | Error::Invalid { .. }
        | Error::Unread(_)
        | Error::NoAnswer(_)
        | Error::Unresponsive(_)
        | Error::OutOfFiles
        | Error::Relayed(_) => false,
    };
    if !is_allowed {
        cluster.world.violated(format_args!("{id} fails: {error}"));
    }
}

/// Requests after all faults have ended, one for each router: all are answered.
pub(super) async fn ask_again(cluster: &Arc<Cluster>) {
    // Routers and workers that have just started know each other by then, and breakers are closed.
    sleep(RECOVERY).await;
    let routers: Vec<_> = {
        let routers = cluster.routers.lock();
        routers.iter().map(|(number, process)| (*number, process.router.clone())).collect()
    };
    for (number, router) in routers {
        let mut rng = cluster.world.rng("again", number);
        let prompt = prompt(&mut rng);
        let mut request = draw(&mut rng, &format!("again{number}"), &prompt, &Domain::shared(), 1..60);
        request.attributes.deadline = None;
        let ending = tokio::time::timeout(BOUND, read(cluster, &router, request, None)).await;
        match ending {
            Ok(Ending::Answered(text)) => cluster.world.log(format_args!("again{number}: {} tokens", text.len())),
            other => cluster.world.violated(format_args!("after all faults, r{number} does not answer: {other:?}")),
        }
    }
}
