//! Attempts to connect again after the connection to NATS was lost: the delay before each, the check of the files of
//! TLS, and why the last one failed.
//!
//! The events of the client library have only the kind of an error. The library keeps its text with each server, and
//! passes the servers to a callback before it tries them again. There each new cause is logged once.
//!
//! Not here: the first connection, which fails with its error ([`Connection::open`](super::Connection::open)).

use super::settings::{Credentials, Process, Settings, Tls};
use super::tls;
use async_nats::{ConnectOptions, Server};
use kvbm::splitmix::SplitMix64;
use parking_lot::Mutex;
use spans::LogLimit;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The attempts of one connection.
pub(super) struct Attempts {
    tls: Option<Tls>,
    credentials: Credentials,
    process: Process,
    state: Mutex<State>,
    /// Limits log lines about causes. Two causes that alternate count as new each time.
    causes: LogLimit,
    /// Limits log lines about connections that are lost. A server can accept and end one at once, again and again.
    losses: LogLimit,
}

#[derive(Default)]
struct State {
    /// A connection was made once.
    is_open: bool,
    /// Attempts since a connection has last lived for [`STABLE`].
    count: usize,
    /// When the last connection was made, until its end is noticed.
    connected_at: Option<Instant>,
    /// What the library knows of its servers is from before the last connection was lost.
    is_first_round: bool,
    /// The error that the server has reported on this connection.
    server_error: Option<String>,
    /// Why there is no connection, as far as it is known.
    cause: Option<String>,
    /// The cause that was logged last.
    logged: Option<String>,
    /// The loss of the last connection was logged.
    is_loss_logged: bool,
}

/// Longest delay between attempts: a fraction of a lease, so that leases are renewed soon after an outage.
const MAX_DELAY: Duration = Duration::from_secs(1);

/// A connection that has lived for this long was no failed attempt. A server whose credentials have expired accepts a
/// connection and ends it within milliseconds.
const STABLE: Duration = Duration::from_secs(5);

/// What to change if the server refuses a process without credentials.
const NO_CREDENTIALS: &str = "this process has no credentials: set nats.user and nats.password_file, nats.token_file, \
                              nats.nkey_file or nats.credentials_file";

/// What to change if the server answers to TLS with something else.
const NO_TLS: &str = "the server offers no TLS: turn it on there, or write nats:// in place of tls:// and unset \
                      nats.ca_file, nats.cert_file and nats.key_file";

/// Interval at which files of TLS that cannot be used are read again.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Log lines per minute: an outage has one to three causes, such as a connection that breaks, one that is refused, and
/// one that times out.
const CAUSES_PER_MINUTE: u32 = 10;

/// Log lines per minute: more losses than when the servers of a cluster of three are restarted one after the other.
const LOSSES_PER_MINUTE: u32 = 6;

impl Attempts {
    pub(super) fn new(settings: &Settings) -> Arc<Self> {
        let limit = |lines| LogLimit::new(lines, Duration::from_mins(1));
        Arc::new(Self {
            tls: settings.tls.clone(),
            credentials: settings.credentials.clone(),
            process: settings.process,
            state: Mutex::default(),
            causes: limit(CAUSES_PER_MINUTE),
            losses: limit(LOSSES_PER_MINUTE),
        })
    }

    /// Options whose attempts are these.
    pub(super) fn apply(self: &Arc<Self>, options: ConnectOptions) -> ConnectOptions {
        let (delays, rounds) = (Arc::clone(self), Arc::clone(self));
        options.reconnect_delay_callback(move |attempts| delays.delay(attempts)).reconnect_to_server_callback(
            move |servers, _| {
                let (attempts, failed) = (Arc::clone(&rounds), failures(&servers));
                async move {
                    attempts.begin_round(&failed).await;
                    // The library chooses the server.
                    None
                }
            },
        )
    }

    /// Checks the files of TLS. The error names the file.
    pub(super) async fn check_files(&self) -> Result<(), String> {
        tls::check(self.tls.as_ref()).await
    }

    /// A connection was made. Returns whether the loss of the one before was logged.
    pub(super) fn connected(&self) -> bool {
        let mut state = self.state.lock();
        (state.is_open, state.is_first_round) = (true, true);
        state.connected_at = Some(Instant::now());
        (state.server_error, state.cause) = (None, None);
        std::mem::take(&mut state.is_loss_logged)
    }

    /// The server reports an error, which may be why it ends the connection.
    pub(super) fn server_reported(&self, problem: &str) {
        // The server denies a request and keeps the connection.
        if !problem.to_ascii_lowercase().starts_with("permissions violation") {
            self.state.lock().server_error = Some(self.explain(problem));
        }
    }

    /// The connection was lost.
    pub(super) fn disconnected(&self) {
        let mut state = self.state.lock();
        state.end_connection();
        let server_error = state.server_error.take();
        // An attempt may have failed before this event came.
        if server_error.is_some() {
            state.cause.clone_from(&server_error);
        }
        if let Some(suppressed) = self.losses.admit() {
            state.is_loss_logged = true;
            drop(state);
            let without_nats = self.process.without_nats();
            tracing::warn!(
                problem = server_error,
                suppressed,
                "the connection to NATS is lost; until it is made again, {without_nats}"
            );
        }
    }

    /// Why there is no connection, as far as it is known.
    pub(super) fn cause(&self) -> Option<String> {
        self.state.lock().cause.clone()
    }

    /// Why the process has no current view, or publishes nothing.
    pub(super) fn problem(&self) -> String {
        let cause = self.cause().map(|cause| format!(" ({cause})")).unwrap_or_default();
        format!("not connected to NATS{cause}; {}", self.process.without_nats())
    }

    /// The text of an error, with the files that it may be about.
    pub(super) fn explain(&self, error: &str) -> String {
        let text = error.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        if is_without_tls(error) {
            return format!("{error}; {NO_TLS}");
        }
        let files = if has(&["certificate", "tls error", "fatal alert"]) {
            self.tls.as_ref().map(tls::files).unwrap_or_default()
        } else if has(&["authorization", "authentication", "credentials", "signing nonce"]) {
            let Some(file) = self.credentials.file() else { return format!("{error}; {NO_CREDENTIALS}") };
            vec![(self.credentials.key(), file)]
        } else {
            Vec::new()
        };
        if files.is_empty() {
            return error.to_owned();
        }
        let named = |(key, path): &(&str, &Path)| format!("{key} = \"{}\"", path.display());
        let files: Vec<String> = files.iter().map(named).collect();
        format!("{error}; check {}", files.join(", "))
    }

    /// To be awaited before the servers are tried. Returns when the files of TLS can be used: the library must not open
    /// others.
    async fn begin_round(&self, failed: &[String]) {
        // At the start the caller checks the files, and has the error.
        if !self.report(failed) {
            return;
        }
        while let Err(problem) = self.check_files().await {
            self.failed(&problem);
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Reports what failed in the last round. Returns whether a connection was made once.
    fn report(&self, failed: &[String]) -> bool {
        let mut state = self.state.lock();
        let (is_open, is_former) = (state.is_open, std::mem::take(&mut state.is_first_round));
        drop(state);
        if is_open && !is_former && !failed.is_empty() {
            self.failed(&self.explain(&failed.join("; ")));
        }
        is_open
    }

    fn failed(&self, problem: &str) {
        let mut state = self.state.lock();
        state.cause = Some(problem.to_owned());
        if state.logged.as_deref() == Some(problem) {
            return;
        }
        state.logged = Some(problem.to_owned());
        drop(state);
        if let Some(suppressed) = self.causes.admit() {
            tracing::warn!(problem, suppressed, "cannot connect to NATS; trying again");
        }
    }

    /// The delay before an attempt; `first` is its number at the start of the process.
    fn delay(&self, first: usize) -> Duration {
        let mut state = self.state.lock();
        if !state.is_open {
            return delay(first);
        }
        state.end_connection();
        state.count = state.count.saturating_add(1);
        delay(state.count)
    }
}

impl State {
    /// The last connection has ended. After one that has lived, delays are short again, and causes are logged again.
    fn end_connection(&mut self) {
        if self.connected_at.take().is_some_and(|at| at.elapsed() >= STABLE) {
            (self.count, self.logged) = (0, None);
        }
    }
}

/// What the library knows of the servers to which the last attempt failed.
fn failures(servers: &[Server]) -> Vec<String> {
    let failed = servers.iter().filter(|server| server.failed_attempts > 0);
    let text = |server: &Server| {
        let (host, port) = (server.addr.host(), server.addr.port());
        server.last_error.as_ref().map(|error| format!("{host}:{port}: {}", error_text(error)))
    };
    failed.filter_map(text).collect()
}

/// Whether the server answered to TLS with text.
pub(super) fn is_without_tls(error: &str) -> bool {
    error.contains("InvalidContentType")
}

/// The text of an error of the library, which may say the same as its kind and again in the words of the server:
/// `authorization violation: nats: authorization violation`.
pub(super) fn error_text(error: &impl Display) -> String {
    let text = error.to_string();
    let mut parts: Vec<&str> = text.split(": ").filter(|part| *part != "nats").collect();
    parts.dedup_by(|part, before| part.eq_ignore_ascii_case(before));
    parts.join(": ")
}

/// Doubles from milliseconds, with jitter: after an outage all processes reconnect at once.
fn delay(attempts: usize) -> Duration {
    let delay = Duration::from_millis(1u64 << attempts.min(10)).min(MAX_DELAY);
    let seed = u64::from(std::process::id()) ^ attempts as u64;
    delay.mul_f64(0.5 + 0.5 * SplitMix64::new(seed).uniform())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest first delay.
    const SHORT: Duration = Duration::from_millis(3);

    #[test]
    fn delays_grow_up_to_a_limit() {
        assert!(delay(1) < SHORT);
        for attempts in [10, 64, usize::MAX] {
            assert!((MAX_DELAY / 2..=MAX_DELAY).contains(&delay(attempts)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn delays_grow_until_a_connection_has_lived() {
        let attempts = Attempts::new(&Settings::default());
        attempts.connected();
        for _ in 0..20 {
            attempts.delay(1);
            attempts.connected();
            attempts.disconnected();
        }
        assert!(attempts.delay(1) >= MAX_DELAY / 2, "no connection has lived");
        attempts.connected();
        tokio::time::advance(STABLE).await;
        assert!(attempts.delay(1) < SHORT);
    }

    #[test]
    fn an_error_names_the_files_that_it_may_be_about() {
        let tls = Some(Tls { ca_file: Some("/etc/ca.pem".into()), client: None });
        let credentials = Credentials::Token("/etc/token".into());
        let attempts = Attempts::new(&Settings { tls, credentials, ..Settings::default() });
        let anonymous = Attempts::new(&Settings::default());
        assert_eq!(anonymous.explain("authorization violation"), format!("authorization violation; {NO_CREDENTIALS}"));
        for (error, expected) in [
            ("invalid peer certificate: UnknownIssuer", "; check nats.ca_file = \"/etc/ca.pem\""),
            ("IO error: received corrupt message of type InvalidContentType", &*format!("; {NO_TLS}")),
            ("authorization violation", "; check nats.token_file = \"/etc/token\""),
            ("User Authentication Expired", "; check nats.token_file = \"/etc/token\""),
            ("IO error: Connection refused (os error 111)", ""),
        ] {
            assert_eq!(attempts.explain(error), format!("{error}{expected}"));
        }
    }

    #[test]
    fn an_error_says_each_thing_once() {
        for (error, expected) in [
            ("authorization violation: nats: authorization violation", "authorization violation"),
            ("nats: authorization violation", "authorization violation"),
            ("IO error: Connection refused (os error 111)", "IO error: Connection refused (os error 111)"),
        ] {
            assert_eq!(error_text(&error), expected);
        }
    }

    #[test]
    fn a_worker_claims_no_view_of_workers() {
        let problem = |process| Attempts::new(&Settings { process, ..Settings::default() }).problem();
        assert_eq!(problem(Process::Frontend), "not connected to NATS; the last view of workers and caches is used");
        assert_eq!(
            problem(Process::Worker),
            "not connected to NATS; requests of frontends that know this worker are served, and changes of its cache \
             are published later"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_cause_is_known_until_nats_is_back() {
        let attempts = Attempts::new(&Settings::default());
        attempts.connected();
        attempts.server_reported("Permissions Violation for Publish to \"a\"");
        attempts.disconnected();
        assert_eq!(attempts.cause(), None, "a denied request ends no connection");
        attempts.begin_round(&["b:4222: former".to_owned()]).await;
        assert_eq!(attempts.cause(), None, "it failed before the connection was lost");
        attempts.begin_round(&["a:4222: refused".to_owned()]).await;
        assert_eq!(attempts.cause().as_deref(), Some("a:4222: refused"));
        attempts.connected();
        assert_eq!(attempts.cause(), None);
        attempts.server_reported("maximum connections exceeded");
        attempts.disconnected();
        assert_eq!(attempts.cause().as_deref(), Some("maximum connections exceeded"));
    }
}
