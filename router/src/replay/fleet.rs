//! The router in a replay: the live one's index, views, books, costs and choice, on virtual time.

use super::Chooser;
use super::peers::Peer;
use super::plane::Message;
use super::trace::{self, Asked, BLOCK_TOKENS};
use crate::decide::{Ask, Scratch, decide};
use crate::feed::view::{Caught, Outcome, View};
use crate::fleet::{Fleet, Member};
use crate::index::Index;
use crate::load::Amount;
use crate::promise::{Promise, Promises};
use crate::replica::Others;
use crate::select::{Turn, mix};
use crate::settings::{Disaggregation, Settings, Tuning};
use crate::survey::{Overlaps, Survey};
use futures::future::BoxFuture;
use kvbm::{Epoch, Level, SequenceHash};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{self, ModelCard, OutputStream, Readiness, Request, Work};
use worker::plane::{Booked, Instance, Phase, RouterId, Source, StoreId, WorkerId};

/// The router, and what it believes.
pub(super) struct Routing {
    tuning: Tuning,
    seed: u64,
    peer: Option<Peer>,
    index: Index,
    promises: Arc<Promises>,
    fleet: Fleet,
    members: Vec<Arc<Member>>,
    scratch: Scratch,
    /// By worker, and at the end for the shared store.
    feeds: Vec<Feed>,
    /// Virtual time starts here. Only differences are ever looked at.
    start: Instant,
    others: Others,
    /// By request, while it is in flight.
    placed: Vec<Option<Placed>>,
}

/// Where a request is, and what was booked for it.
struct Placed {
    worker: usize,
    number: u64,
    _promise: Promise,
}

/// How far a source was followed.
struct Feed {
    source: Source,
    view: View,
}

const EPOCH: Epoch = Epoch(1);
const STORE: StoreId = StoreId(1);
const MODEL: &str = "replay";

/// Stands where a live worker's engine would be; nobody calls it.
struct Simulated;

impl engine::Engine for Simulated {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, engine::Error>> {
        Box::pin(std::future::ready(Err(engine::Error::Unavailable("simulated".to_owned()))))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::NotReady("simulated".to_owned())
    }
}

impl Routing {
    pub(super) fn new(chooser: &Chooser, workers: usize, requests: usize, seed: u64) -> Self {
        let (settings, peer) = match chooser {
            Chooser::Policy(policy) => (Settings { policy: policy.clone(), ..Settings::default() }, None),
            Chooser::Preset(preset) => (preset.settings(), None),
            Chooser::DynamoCost => (Settings::default(), Some(Peer::dynamo(workers))),
            Chooser::SmgCacheAware => (Settings::default(), Some(Peer::smg(workers))),
        };
        let card = Arc::new(ModelCard {
            id: MODEL.to_owned(),
            identity: MODEL.to_owned(),
            created: 0,
            context: usize::MAX,
            block_size: BLOCK_TOKENS as usize,
            vocabulary: 0,
            eos: Vec::new(),
            tokenizer: "".into(),
            chat_template: None,
            special_tokens: Vec::new(),
            random_weights: true,
        });
        let (index, fleet) = (Index::new(), Fleet::default());
        let members: Vec<Arc<Member>> = (0..workers as u64)
            .map(|id| {
                let (id, stores) = (WorkerId(id), vec![STORE]);
                let slot = index.join(id, &stores);
                let instance = Instance { id, epoch: EPOCH, phase: Phase::Both, model: card.clone(), stores };
                Arc::new(Member::new(Arc::new(instance), Arc::new(Simulated), slot, None))
            })
            .collect();
        fleet.join_all(members.iter().cloned());
        let sources = (0..workers as u64).map(|id| Source::Worker(WorkerId(id))).chain([Source::Store(STORE)]);
        let feed = |source| {
            let mut view = View::of_life(Some(EPOCH));
            view.snapshot(EPOCH, 0);
            Feed { source, view }
        };
        Self {
            tuning: Settings { disaggregation: Disaggregation::Never, ..settings }.tuning(),
            seed,
            peer,
            index,
            promises: Arc::default(),
            fleet,
            members,
            scratch: Scratch::default(),
            feeds: sources.map(feed).collect(),
            start: Instant::now(),
            others: Others::default(),
            placed: (0..requests).map(|_| None).collect(),
        }
    }

    /// Where a request goes; it is booked there. And what other routers are told of it.
    pub(super) fn place(&mut self, now_ns: u64, request: u32, asked: &Asked) -> (usize, Vec<Booked>) {
        let now = self.at(now_ns);
        let names: Vec<SequenceHash> = asked.blocks.iter().map(|block| trace::name(*block)).collect();
        let mut overlaps = Overlaps::only(BLOCK_TOKENS as usize, names, &self.index);
        overlaps.extend(&self.promises);
        let roster = self.fleet.roster();
        let Some(serving) = roster.serving(MODEL) else { return (0, Vec::new()) };
        let survey = Survey::new(serving, &overlaps, asked.input as usize, &[], now);
        let draw = mix(self.seed ^ self.fleet.choices());
        // A router does not know how long an answer will be.
        let ask = Ask { tokens: asked.input as usize, max_tokens: None, work: &Work::Generate };
        let Some(decision) = decide(&self.tuning, ask, survey, &mut self.scratch, Turn { draw, session: None }) else {
            return (0, Vec::new());
        };
        // Seats are in the order of their workers' ids, which count from 0.
        let row = match &mut self.peer {
            Some(peer) => {
                let held = |at: usize| decision.row(at as u32).held.run();
                decision.row(peer.choose(request, asked, held) as u32)
            }
            None => decision.chosen,
        };
        let (worker, member) = (row.at, row.member());
        self.fleet.choose(member);
        let number = member.books.book(row.amount(), now);
        member.books.sent(number, now);
        let promise = self.promises.make(member.slot, overlaps.names(0), BLOCK_TOKENS as usize, row.held.run());
        let Amount { prefill_tokens, blocks, .. } = row.amount();
        let (name, anchors) = (u64::from(request), promise.anchors().to_vec());
        let (id, decodes) = (member.id(), true);
        let placed = Booked::Placed { number: name, worker: id, prefill_tokens, blocks, decodes, anchors };
        self.placed[request as usize] = Some(Placed { worker, number, _promise: promise });
        (worker, vec![placed, Booked::Sent(name)])
    }

    /// The request has its first token.
    pub(super) fn started(&mut self, request: u32) {
        let Some(Placed { worker, number, .. }) = self.placed[request as usize] else { return };
        self.members[worker].books.started(number);
        if let Some(peer) = &mut self.peer {
            peer.started(worker, request);
        }
    }

    /// The request has ended.
    pub(super) fn finished(&mut self, now_ns: u64, request: u32, asked: &Asked) {
        let Some(Placed { worker, number, .. }) = self.placed[request as usize].take() else { return };
        self.members[worker].books.release(number, self.at(now_ns));
        if let Some(peer) = &mut self.peer {
            peer.finished(worker, asked);
        }
    }

    /// Another router tells what it booked.
    pub(super) fn hear(&mut self, now_ns: u64, from: usize, booked: Vec<Booked>) {
        let now = self.at(now_ns);
        self.others.hear(RouterId(from as u64), booked, &self.fleet, &self.promises, now);
    }

    /// A second has passed: who is silent has gone.
    pub(super) fn forget(&mut self, now_ns: u64) {
        let now = self.at(now_ns);
        self.others.forget(now);
    }

    /// A message arrives. Whether the source's snapshot is needed.
    pub(super) fn receive(&mut self, now_ns: u64, from: usize, message: Message) -> bool {
        let now = self.at(now_ns);
        let feed = &mut self.feeds[from];
        match message {
            Message::Load(load) => {
                let behind = feed.view.behind(EPOCH, load.number, now);
                self.members[from].books.report(load, now);
                behind
            }
            Message::Blocks(number, event) => match feed.view.event(EPOCH, number, event) {
                Outcome::Apply(event) => {
                    self.index.apply(feed.source, &event);
                    false
                }
                outcome => matches!(outcome, Outcome::Gap | Outcome::NewLife),
            },
        }
    }

    /// A snapshot of a source, taken now, arrives. Whether another is needed.
    pub(super) fn repair(&mut self, from: usize, number: u64, blocks: impl Iterator<Item = (Level, u32)>) -> bool {
        let feed = &mut self.feeds[from];
        let blocks: Vec<_> = blocks.map(|(level, block)| (level, trace::name(block))).collect();
        match feed.view.snapshot(EPOCH, number) {
            Caught::Outdated => true,
            caught => {
                self.index.replace(feed.source, &blocks);
                let (events, again) = match caught {
                    Caught::Gap(events) => (events, true),
                    Caught::Up(events) => (events, false),
                    Caught::Outdated => (Vec::new(), true),
                };
                for event in &events {
                    self.index.apply(feed.source, event);
                }
                again
            }
        }
    }

    fn at(&self, now_ns: u64) -> Instant {
        self.start + Duration::from_nanos(now_ns)
    }
}
