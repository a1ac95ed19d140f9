//! Reading the configuration again while requests are served: when its file changes, on SIGHUP, or when asked.
//!
//! What is read is checked as a whole before any of it takes effect, and what is wrong changes nothing. How requests are
//! placed (`[router]`) and what is logged (`log.filter`) take effect at once; whatever else differs is named, and waits for
//! a restart. Streams that run are not touched.

use crate::config::{Config, Origins, Sources, as_json, changes};
use prometheus::{IntCounterVec, Opts, Registry};
use router::Router;
use serde::Serialize;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Reads the configuration again.
pub struct Reload {
    sources: Sources,
    router: Arc<Router>,
    relog: Relog,
    outcomes: IntCounterVec,
    state: Mutex<State>,
}

/// Checks what is to be logged, and, when told to, does it.
pub type Relog = Box<dyn Fn(&str, Apply) -> Result<(), String> + Send + Sync>;

/// Whether a change is only tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Apply {
    /// Say what would be wrong.
    Try,
    /// Do it.
    Do,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Result: `applied`, `unchanged` or `rejected`.
    pub outcome: Outcome,
    /// Trigger: `file`, `SIGHUP` or `admin`.
    pub trigger: &'static str,
    /// When it was attempted, in seconds since 1970.
    pub attempted_at: u64,
    /// Keys that took effect.
    pub applied: Vec<String>,
    /// Keys that differ from the running configuration and take effect after a restart.
    pub needs_restart: Vec<String>,
    /// Error, with key and value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Result of a reload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// At least one key took effect.
    Applied,
    /// No key that can take effect differs.
    Unchanged,
    /// The configuration is invalid; nothing changed.
    Rejected,
}

struct State {
    running: Config,
    origins: Origins,
    last: Option<Report>,
}

/// What tells that a file may have changed: when it was written, and how long it is.
type Stamp = Option<(SystemTime, u64)>;

/// One question to the file system a second is nothing, and nobody waits longer than he takes to look up.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Reload {
    /// For a process that runs `config`, which was read from `sources`.
    pub fn new(
        sources: Sources,
        (config, origins): (Config, Origins),
        router: Arc<Router>,
        relog: Relog,
        registry: &Registry,
    ) -> Result<Arc<Self>, prometheus::Error> {
        let help = "Reloads of the configuration, by outcome: applied, unchanged or rejected.";
        let outcomes = IntCounterVec::new(Opts::new("blockyard_config_reloads_total", help), &["outcome"])?;
        registry.register(Box::new(outcomes.clone()))?;
        let state = Mutex::new(State { running: config, origins, last: None });
        Ok(Arc::new(Self { sources, router, relog, outcomes, state }))
    }

    /// Reads the configuration again, now.
    pub fn now(&self, trigger: &'static str) -> Report {
        let mut state = self.lock();
        let (outcome, applied, needs_restart, error) = match self.attempt(&mut state) {
            Ok((applied, rest)) if applied.is_empty() => (Outcome::Unchanged, applied, rest, None),
            Ok((applied, rest)) => (Outcome::Applied, applied, rest, None),
            Err(error) => (Outcome::Rejected, vec![], vec![], Some(error)),
        };
        let attempted_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if let Some(error) = &error {
            tracing::error!(trigger, error, "configuration rejected; the running configuration stays in effect");
        } else {
            tracing::info!(trigger, applied = applied.join(" "), "configuration reloaded");
        }
        if !needs_restart.is_empty() {
            tracing::warn!(keys = needs_restart.join(" "), "these keys take effect after a restart");
        }
        let report = Report { outcome, trigger, attempted_at, applied, needs_restart, error };
        self.outcomes.with_label_values(&[report.outcome.name()]).inc();
        state.last = Some(report.clone());
        report
    }

    /// Follows the file, if there is one, for as long as it is polled.
    pub async fn watch(self: Arc<Self>) {
        let Some(path) = self.sources.file.clone() else { return };
        let mut read = stamp(&path);
        let mut seen = read;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = stamp(&path);
            // Once it has kept still for a while: what somebody is writing is not read half-way.
            if now == seen && now != read {
                read = now;
                self.now("file");
            }
            seen = now;
        }
    }

    /// What runs, key by key with its origin, and what came of the last reading.
    pub fn as_json(&self) -> serde_json::Value {
        let state = self.lock();
        serde_json::json!({ "config": as_json(&state.running, &state.origins), "reload": state.last })
    }

    /// All or nothing. Answers with the keys that took effect, and those that did not.
    fn attempt(&self, state: &mut State) -> Result<(Vec<String>, Vec<String>), String> {
        let (read, origins) = Config::load_to_serve(&self.sources).map_err(|error| error.to_string())?;
        (self.relog)(&read.log.filter, Apply::Try)?;
        let differs = changes(&state.running, &read);
        let live = |key: &String| key.starts_with("router.") || key == "log.filter";
        let (applied, rest): (_, Vec<String>) = differs.into_iter().partition(live);
        self.router.update_settings(read.router.clone()).map_err(|error| error.to_string())?;
        if let Err(error) = (self.relog)(&read.log.filter, Apply::Do) {
            // Nothing of it is to hold; what ran until now was right.
            let back = self.router.update_settings(state.running.router.clone());
            return Err(back.err().map_or_else(
                || error.clone(),
                |back| format!("{error}; restoring the previous configuration failed: {back}"),
            ));
        }
        state.running.router = read.router;
        state.running.log.filter = read.log.filter;
        // What waits for a restart still runs as somebody else said.
        state.origins = origins.but(&state.origins, &rest);
        Ok((applied, rest))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // It is changed only once everything has gone well.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Unchanged => "unchanged",
            Self::Rejected => "rejected",
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let file = std::fs::metadata(path).ok()?;
    Some((file.modified().ok()?, file.len()))
}

#[cfg(test)]
mod tests;
