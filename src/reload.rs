//! Reloads the configuration while requests are served: when its file changes, on SIGHUP, or through the admin API.
//!
//! The whole configuration is checked before any part takes effect; an invalid one changes nothing, and neither does
//! one that a restart would refuse. The keys of the process's [`Section`]s take effect at once. Other changed keys are
//! reported, and take effect after a restart. Running streams are not affected.

mod sections;

pub use sections::{Change, Engines, Routing, Section, Servers};

use crate::config::{Config, Log, Origins, Purpose, Sources, as_json, changes};
use crate::node::{Refused, ReloadState, restart_preflight};
use parking_lot::{Mutex, MutexGuard};
use prometheus::{IntCounterVec, Opts, Registry};
use sections::LogFilter;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The running configuration and the means to reload it.
pub struct Reload {
    sources: Sources,
    purpose: Purpose,
    /// In the order in which they take effect.
    sections: Vec<Box<dyn Section>>,
    outcomes: IntCounterVec,
    /// What `/ready` reads. It has no lock that a reload holds.
    shown: Arc<ReloadState>,
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
    /// The configuration is invalid, or a restart would refuse it; nothing changed.
    Rejected,
}

struct State {
    running: Config,
    origins: Origins,
    last: Option<Report>,
    /// The stamp of the file when it was last read, whatever the trigger was.
    read: FileStamp,
}

/// Modification time and length of the file of the configuration, to detect changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileStamp(Option<(SystemTime, u64)>);

impl FileStamp {
    /// That of the file now. Take it before the file is read: a change in between is a change since then.
    pub fn of(sources: &Sources) -> Self {
        Self(sources.file.as_deref().and_then(|path| {
            let file = std::fs::metadata(path).ok()?;
            Some((file.modified().ok()?, file.len()))
        }))
    }
}

/// Interval at which the file is checked: cheap, and short enough for an operator who waits for the change.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Reload {
    /// Reload for a process that runs `config`, which was loaded from `sources` for `purpose` when their file had the
    /// stamp `read`. The start of a process may take minutes, and the file may have changed since. `sections` are the
    /// keys that take effect while it runs, beside `log.filter`. `shown` is what `/ready` says of the last reload.
    pub fn new(
        (sources, purpose): (Sources, Purpose),
        (config, origins, read): (Config, Origins, FileStamp),
        mut sections: Vec<Box<dyn Section>>,
        set_log_filter: SetLogFilter,
        registry: &Registry,
        shown: Arc<ReloadState>,
    ) -> Result<Arc<Self>, prometheus::Error> {
        let help = "Reloads of the configuration, by outcome: applied, unchanged or rejected.";
        let outcomes = IntCounterVec::new(Opts::new("blockyard_config_reloads_total", help), &["outcome"])?;
        registry.register(Box::new(outcomes.clone()))?;
        // An alert computes the increase, and an increase from no series is not seen.
        for outcome in [Outcome::Applied, Outcome::Unchanged, Outcome::Rejected] {
            outcomes.with_label_values(&[outcome.name()]);
        }
        let state = Mutex::new(State { running: config, origins, last: None, read });
        sections.push(Box::new(LogFilter(set_log_filter)));
        Ok(Arc::new(Self { sources, purpose, sections, outcomes, shown, state }))
    }

    /// Reloads the configuration now.
    pub fn now(&self, trigger: &'static str) -> Report {
        let mut state = self.lock();
        // Before the file is read: a change during that time is read by the watch.
        state.read = FileStamp::of(&self.sources);
        let (outcome, applied, needs_restart, error) = match self.attempt(&mut state) {
            Ok((applied, rest)) if applied.is_empty() => (Outcome::Unchanged, applied, rest, None),
            Ok((applied, rest)) => (Outcome::Applied, applied, rest, None),
            Err(error) => (Outcome::Rejected, vec![], vec![], Some(error)),
        };
        let attempted_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        match &error {
            Some(error) => {
                tracing::error!(trigger, error, "configuration rejected; the running configuration stays in effect");
            }
            None if !applied.is_empty() => {
                tracing::info!(trigger, applied = applied.join(" "), "configuration reloaded");
            }
            None if needs_restart.is_empty() => tracing::info!(trigger, "configuration unchanged"),
            None => {}
        }
        if !needs_restart.is_empty() {
            tracing::warn!(
                trigger,
                keys = needs_restart.join(" "),
                "the configuration was changed in keys that take effect after a restart of this process; until then \
                 their former values stay in effect"
            );
        }
        let report = Report { outcome, trigger, attempted_at, applied, needs_restart, error };
        self.outcomes.with_label_values(&[report.outcome.name()]).inc();
        self.shown.record(report.outcome == Outcome::Rejected);
        state.last = Some(report.clone());
        report
    }

    /// Reloads the configuration whenever its file has changed since it was last read. Returns at once if there is no
    /// file.
    pub async fn watch(self: Arc<Self>) {
        if self.sources.file.is_none() {
            return;
        }
        let mut previous = FileStamp::of(&self.sources);
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let now = FileStamp::of(&self.sources);
            // Unchanged for one interval: a file that is still being written is not read.
            if now == previous && now != self.lock().read {
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

    /// Changes `log.filter` until the next reload, which sets it to the value of the configuration again.
    pub fn set_log_filter(&self, filter: &str) -> Result<(), String> {
        let mut state = self.lock();
        let wanted =
            Config { log: Log { filter: filter.to_owned(), ..state.running.log.clone() }, ..state.running.clone() };
        for section in self.sections.iter().filter(|section| section.has(LogFilter::KEY)) {
            if let Some(change) = section.check(&wanted)? {
                // Before the change or after it: either filter may suppress the line.
                let log =
                    || tracing::info!(filter, before = state.running.log.filter, "the admin API sets the log filter");
                let is_logged = tracing::enabled!(tracing::Level::INFO);
                if is_logged {
                    log();
                }
                change()?;
                if !is_logged {
                    log();
                }
            }
        }
        state.running = wanted;
        state.origins.set(LogFilter::KEY, "admin API");
        Ok(())
    }

    /// Applies all changes or none. Returns the keys that took effect, and those that need a restart.
    fn attempt(&self, state: &mut State) -> Result<(Vec<String>, Vec<String>), String> {
        let loaded = Config::load_again_for(&self.sources, self.purpose);
        let (read, origins) = loaded.map_err(|error| error.to_string())?;
        let mut checked = Vec::new();
        for section in &self.sections {
            checked.extend(section.check(&read)?.map(|change| (&**section, change)));
        }
        let is_live = |key: &String| checked.iter().any(|(section, _)| section.has(key));
        let (applied, rest): (_, Vec<String>) = changes(&state.running, &read).into_iter().partition(is_live);
        if !rest.is_empty() {
            restart_preflight(&read, &state.running, self.purpose).map_err(|refused| restart_refused(&refused))?;
        }
        let mut changed: Vec<&dyn Section> = Vec::new();
        for (section, change) in checked {
            if let Err(error) = change() {
                // No component may run with a configuration that was rejected.
                return Err(roll_back(&changed, &state.running, error));
            }
            changed.push(section);
        }
        for section in changed {
            section.copy(&read, &mut state.running);
        }
        // Keys that need a restart keep the origin of the running value.
        state.origins = origins.keeping(&state.origins, &rest);
        Ok((applied, rest))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is assigned only after everything has succeeded, so it is valid even after a panic.
        self.state.lock()
    }
}

/// Why a restart would refuse a configuration, in one line.
fn restart_refused(refused: &Refused) -> String {
    let reasons: Vec<String> = refused.reasons().map(|(problem, fix)| format!("{problem}; {fix}")).collect();
    format!("a restart would refuse it: {}", reasons.join("; "))
}

/// Makes the values of `running` take effect again, the last change first. Returns the error of the reload, with those
/// of this.
fn roll_back(changed: &[&dyn Section], running: &Config, error: String) -> String {
    let restored = changed.iter().rev().filter_map(|section| match section.check(running) {
        Ok(Some(change)) => change().err(),
        Ok(None) => None,
        Err(error) => Some(error),
    });
    restored.fold(error, |error, back| format!("{error}; restoring the previous configuration failed: {back}"))
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

#[cfg(test)]
mod tests;
