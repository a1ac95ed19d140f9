//! Reloads the configuration while requests are served: when its file changes, on SIGHUP, or through the admin API.
//!
//! The whole configuration is checked before any part takes effect; an invalid one changes nothing. `[router]`,
//! `log.filter`, and the servers and aliases of a gateway take effect at once. Other changed keys are reported, and
//! take effect after a restart. Running streams are not affected.

use crate::config::{Config, Origins, Sources, as_json, changes};
use crate::node::{CheckedUpstream, Upstreams};
use parking_lot::{Mutex, MutexGuard};
use prometheus::{IntCounterVec, Opts, Registry};
use router::Router;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The running configuration and the means to reload it.
pub struct Reload {
    sources: Sources,
    router: Arc<Router>,
    /// The servers behind this process, if it is a gateway.
    upstreams: Option<Arc<Upstreams>>,
    set_log_filter: SetLogFilter,
    outcomes: IntCounterVec,
    state: Mutex<State>,
}

/// Checks a log filter, or checks and sets it.
pub type SetLogFilter = Box<dyn Fn(&str, Apply) -> Result<(), String> + Send + Sync>;

/// Whether a change is only checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Apply {
    /// Check only.
    Check,
    /// Check and apply.
    Apply,
}

/// The result of a reload.
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

/// Modification time and length of a file, to detect changes.
type FileStamp = Option<(SystemTime, u64)>;

/// Interval at which the file is checked: cheap, and short enough for an operator who waits for the change.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Reload {
    /// Reload for a process that runs `config`, which was loaded from `sources`.
    pub fn new(
        sources: Sources,
        (config, origins): (Config, Origins),
        (router, upstreams): (Arc<Router>, Option<Arc<Upstreams>>),
        set_log_filter: SetLogFilter,
        registry: &Registry,
    ) -> Result<Arc<Self>, prometheus::Error> {
        let help = "Reloads of the configuration, by outcome: applied, unchanged or rejected.";
        let outcomes = IntCounterVec::new(Opts::new("blockyard_config_reloads_total", help), &["outcome"])?;
        registry.register(Box::new(outcomes.clone()))?;
        let state = Mutex::new(State { running: config, origins, last: None });
        Ok(Arc::new(Self { sources, router, upstreams, set_log_filter, outcomes, state }))
    }

    /// Reloads the configuration now.
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

    /// Reloads the configuration whenever its file changes. Returns at once if there is no file.
    pub async fn watch(self: Arc<Self>) {
        let Some(path) = self.sources.file.clone() else { return };
        let mut loaded = file_stamp(&path);
        let mut previous = loaded;
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let now = file_stamp(&path);
            // Unchanged for one interval: a file that is still being written is not read.
            if now == previous && now != loaded {
                loaded = now;
                self.now("file");
            }
            previous = now;
        }
    }

    /// The running configuration, each key with its origin, and the result of the last reload.
    pub fn as_json(&self) -> serde_json::Value {
        let state = self.lock();
        serde_json::json!({ "config": as_json(&state.running, &state.origins), "reload": state.last })
    }

    /// Applies all changes or none. Returns the keys that took effect, and those that need a restart.
    fn attempt(&self, state: &mut State) -> Result<(Vec<String>, Vec<String>), String> {
        let (read, origins) = Config::load_to_serve(&self.sources).map_err(|error| error.to_string())?;
        (self.set_log_filter)(&read.log.filter, Apply::Check)?;
        let has_tenants = state.running.frontend.has_tenants();
        let servers = self.checked_upstreams(&read, has_tenants)?;
        let differs = changes(&state.running, &read);
        let live = |key: &String| {
            key.starts_with("router.")
                || key == "log.filter"
                || ((key == "upstreams" || key.starts_with("aliases.")) && servers.is_some())
        };
        let (applied, rest): (_, Vec<String>) = differs.into_iter().partition(live);
        self.router.update_settings(read.router.clone()).map_err(|error| error.to_string())?;
        if let Err(error) = (self.set_log_filter)(&read.log.filter, Apply::Apply) {
            // Roll back: the router must not run with a configuration that was rejected.
            let back = self.router.update_settings(state.running.router.clone());
            return Err(back.err().map_or_else(
                || error.clone(),
                |back| format!("{error}; restoring the previous configuration failed: {back}"),
            ));
        }
        if let Some((upstreams, servers)) = self.upstreams.as_ref().zip(servers) {
            upstreams.apply(servers);
            upstreams.set_aliases(read.aliases.clone());
            (state.running.upstreams, state.running.aliases) = (read.upstreams, read.aliases);
        }
        state.running.router = read.router;
        state.running.log.filter = read.log.filter;
        // Keys that need a restart keep the origin of the running value.
        state.origins = origins.but(&state.origins, &rest);
        Ok((applied, rest))
    }

    /// The servers of a configuration, if they can take effect: a process does not become a gateway while it runs, nor
    /// cease to be one.
    fn checked_upstreams(&self, read: &Config, has_tenants: bool) -> Result<Option<Vec<CheckedUpstream>>, String> {
        if self.upstreams.is_none() || read.upstreams.is_empty() {
            return Ok(None);
        }
        // With its causes in one line.
        Upstreams::check(&read.upstreams, has_tenants).map(Some).map_err(|error| format!("{error:#}"))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is assigned only after everything has succeeded, so it is valid even after a panic.
        self.state.lock()
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

fn file_stamp(path: &Path) -> FileStamp {
    let file = std::fs::metadata(path).ok()?;
    Some((file.modified().ok()?, file.len()))
}

#[cfg(test)]
mod tests;
