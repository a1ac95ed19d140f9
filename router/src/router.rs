//! The router itself: composition of its parts, and the `Engine` that others see.

use crate::fleet::{Fleet, Member};
use crate::settings::Settings;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use worker::engine::{self, Engine, ModelCard, OutputStream, Readiness, Request};
use worker::plane::{Discovery, Events, Membership};

/// Workers tried for one request before its client hears of it: two may die at once, a third time is the request's fault.
const TRIES: usize = 3;

/// Many engines behaving as one.
pub struct Router {
    core: Arc<Core>,
    tasks: TaskTracker,
    _life: DropGuard,
}

struct Core {
    fleet: Fleet,
    /// Set when a part of the router died: it serves no more, and says so.
    dead: OnceLock<String>,
}

/// The router could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value in `[router]` is impossible.
    #[error("{0}")]
    Settings(String),
    /// A metric could not be registered.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl Router {
    /// A router over whoever `discovery` shows, kept up to date by `events`. Spawns its tasks on the current tokio
    /// runtime; they end when the router is dropped.
    pub fn new(
        discovery: Arc<dyn Discovery>,
        _events: Arc<dyn Events>,
        settings: Settings,
        _registry: &prometheus::Registry,
    ) -> Result<Arc<Self>, Error> {
        settings.check().map_err(Error::Settings)?;
        let core = Arc::new(Core { fleet: Fleet::default(), dead: OnceLock::new() });
        let cancel = CancellationToken::new();
        let tasks = TaskTracker::new();
        let feed = {
            let core = core.clone();
            async move {
                let mut changes = discovery.watch();
                while let Some(change) = changes.next().await {
                    match change {
                        Membership::Joined(instance, engine) => {
                            core.fleet.join(Arc::new(Member::new(instance, engine)));
                        }
                        Membership::Left(id, epoch) => {
                            if core.fleet.roster().get(id).is_some_and(|member| member.instance.epoch == epoch) {
                                core.fleet.leave(id);
                            }
                        }
                    }
                }
            }
        };
        let watched = {
            let (core, cancel) = (core.clone(), cancel.clone());
            async move {
                // Whatever way the feed ends by itself, the router is blind from then on.
                let outcome = cancel.run_until_cancelled(AssertUnwindSafe(feed).catch_unwind()).await;
                if let Some(outcome) = outcome {
                    let why = if outcome.is_ok() { "a plane ended" } else { "the feed panicked" };
                    tracing::error!(why, "router is dead");
                    let _ = core.dead.set(why.to_owned());
                }
            }
        };
        tasks.spawn(watched);
        tasks.close();
        Ok(Arc::new(Self { core, tasks, _life: cancel.drop_guard() }))
    }

    /// Ends the router's tasks and waits for them.
    pub async fn stop(self: Arc<Self>) {
        let tasks = self.tasks.clone();
        drop(self);
        tasks.wait().await;
    }
}

impl Engine for Router {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, engine::Error>> {
        Box::pin(self.core.generate(request))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.core.fleet.roster().cards()
    }

    fn readiness(&self) -> Readiness {
        if let Some(why) = self.core.dead.get() {
            return Readiness::NotReady(format!("router failed: {why}"));
        }
        match self.core.fleet.roster().members().any(|member| member.decodes()) {
            true => Readiness::Ready,
            false => Readiness::NotReady("no worker that decodes has joined".to_owned()),
        }
    }
}

impl Core {
    async fn generate(&self, request: Request) -> Result<OutputStream, engine::Error> {
        if let Some(why) = self.dead.get() {
            return Err(engine::Error::Unavailable(format!("router failed: {why}")));
        }
        let mut tried = Vec::new();
        let mut last = None;
        while tried.len() < TRIES {
            let roster = self.fleet.roster();
            let serving = roster.serving(&request.model);
            if serving.is_empty() {
                return Err(engine::Error::UnknownModel(request.model.to_string()));
            }
            let fresh = serving.iter().filter(|member| !tried.contains(&member.id()));
            let Some(member) =
                fresh.min_by_key(|member| (!member.decodes(), member.chosen.load(Ordering::Relaxed), member.id()))
            else {
                break;
            };
            self.fleet.choose(member);
            tried.push(member.id());
            match member.engine.generate(request.clone()).await {
                Err(
                    error @ (engine::Error::Overloaded { .. }
                    | engine::Error::Unavailable(_)
                    | engine::Error::Failed(_)),
                ) => last = Some(error),
                answer => return answer,
            }
        }
        Err(last.unwrap_or_else(|| engine::Error::Unavailable("no worker is left to try".to_owned())))
    }
}
