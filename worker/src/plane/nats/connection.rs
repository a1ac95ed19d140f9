//! The connection to NATS: options, checks of the server, and the state of the connection.

use super::ConnectError;
use super::attempts::{Attempts, error_text, is_without_tls};
use super::bucket::Bucket;
use super::credentials;
use super::lease_health::LeaseHealth;
use super::metrics::{Lost, Metrics, Refused};
use super::settings::Settings;
use super::subjects::Subjects;
use crate::plane::PlaneError;
use async_nats::jetstream::{Context, ContextBuilder};
use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, Message, ServerAddr, ServerError, Subject};
use parking_lot::Mutex;
use spans::LogLimit;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// A connection to NATS, shared by both planes of a process. It reconnects by itself for as long as it is kept.
pub struct Connection {
    pub(super) client: Client,
    pub(super) bucket: Bucket,
    pub(super) subjects: Subjects,
    pub(super) settings: Settings,
    pub(super) metrics: Metrics,
    /// Identifies this process among those that ever connected.
    pub(super) process: String,
    pub(super) leases: LeaseHealth,
    state: watch::Receiver<ConnectionState>,
    denied: Denied,
    attempts: Arc<Attempts>,
    /// Limits log lines about requests that are not answered.
    unanswered: LogLimit,
}

/// State of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ConnectionState {
    pub(super) connected: bool,
    /// Number of times that the connection was made.
    pub(super) generation: u64,
}

/// The last permission that the server denied; it answers nothing to the denied request itself.
type Denied = Arc<Mutex<Option<String>>>;

/// An answer of a NATS server or of another process takes milliseconds, and seconds while a cluster elects a leader.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection that is lost without a sign is noticed after three of these.
const PING_INTERVAL: Duration = Duration::from_secs(2);

/// Delay between attempts of [`Connection::open`], each of which tries all servers.
const OPEN_DELAY: Duration = Duration::from_millis(500);

/// Interval of log lines while [`Connection::open`] tries again.
const OPEN_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Messages received and not yet processed, per subscription. Tasks of this module process them at once, so this is
/// the burst that arrives while the process gets no CPU.
const RECEIVE_QUEUE: usize = 16_384;

/// The smallest `max_payload` that works: the largest event has 1024 blocks of 16 bytes.
const MIN_MESSAGE_BYTES: usize = 64 << 10;

/// Shortest time between two lines of the log about requests that are not answered: a client can send thousands a
/// second. The metric counts all of them.
const UNANSWERED_LOG_INTERVAL: Duration = Duration::from_mins(1);

/// A client that sends what it may not send gets an error for each message.
const SERVER_ERRORS_PER_MINUTE: u32 = 20;

impl Connection {
    /// Connects, checks the server, and opens the bucket of the instances or creates it. Tries for
    /// [`Settings::connect_timeout`].
    pub async fn open(settings: Settings, metrics: Metrics) -> Result<Arc<Self>, ConnectError> {
        settings.check()?;
        let subjects = Subjects::new(&settings.prefix, &settings.bucket);
        let servers = addresses(&settings)?;
        let (sender, mut state) = watch::channel(ConnectionState::default());
        let (denied, attempts) = (Denied::default(), Attempts::new(&settings));
        let options = with_callbacks(options(&settings, &subjects)?, sender, metrics.clone(), &denied, &attempts);
        let deadline = Instant::now() + settings.connect_timeout;
        let client = connect(&options, &servers, &settings, &attempts, deadline).await?;
        // Followers compare their view again after each connection, so the first must be counted before they start.
        let _ = state.wait_for(|state| state.generation > 0).await;
        check_server(&client, &settings)?;
        let jetstream: Context = ContextBuilder::new().timeout(ANSWER_TIMEOUT).build(client.clone());
        let bucket = Bucket::open(jetstream, &settings, subjects.clone(), deadline).await?;
        let inbox = client.new_inbox();
        let process = inbox.rsplit('.').next().unwrap_or_default().to_owned();
        let info = client.server_info();
        let prefix = &settings.prefix;
        tracing::info!(server = %info.server_name, version = %info.version, %prefix, "NATS connected");
        let unanswered = LogLimit::new(1, UNANSWERED_LOG_INTERVAL);
        let leases = LeaseHealth::new(settings.lease);
        Ok(Arc::new(Self {
            client,
            bucket,
            subjects,
            settings,
            metrics,
            process,
            leases,
            state,
            denied,
            attempts,
            unanswered,
        }))
    }

    pub(super) fn state(&self) -> watch::Receiver<ConnectionState> {
        self.state.clone()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state.borrow().connected
    }

    /// Why the planes are not up to date, and what holds meanwhile. `None` while the process is connected.
    pub fn problem(&self) -> Option<String> {
        (!self.is_connected()).then(|| self.attempts.problem())
    }

    /// Which leases are not renewed although the process is connected, and what to check.
    pub fn lease_problems(&self) -> Vec<String> {
        if self.is_connected() { self.leases.problems(Instant::now()) } else { Vec::new() }
    }

    /// The subject for the answer to a request. `None`: the request names no inbox for it, or one outside of those of
    /// the deployment. Every responder asks here, and answers nothing otherwise.
    pub(super) fn reply_to(&self, request: &Message) -> Option<Subject> {
        let reply = request.reply.as_ref()?;
        if self.subjects.is_in_inbox(reply) {
            return Some(reply.clone());
        }
        self.metrics.refused(Refused::Reply);
        if let Some(suppressed) = self.unanswered.admit() {
            // Quoted, because a client chooses the subjects.
            let (subject, reply, inbox) = (&*request.subject, &**reply, self.subjects.inbox());
            let problem = "a request for an answer outside of the inboxes is not answered; which client sends it?";
            tracing::warn!(subject = ?subject, reply = ?reply, inbox, suppressed, "{problem}");
        }
        None
    }

    /// Why the bucket could not be read or written for a registration.
    pub(super) fn registration_error(&self, error: String) -> PlaneError {
        let is_denied = self.denied.lock().as_ref().is_some_and(|denied| self.subjects.names_record(denied));
        let error = self.explain(error);
        if is_denied { PlaneError::Denied(error) } else { PlaneError::Unavailable(error) }
    }

    /// The text of an error, with the permission that the server denied last, which may be its cause.
    pub(super) fn explain(&self, error: String) -> String {
        match &*self.denied.lock() {
            Some(denied) => format!("{error} (last denied by the server: {denied})"),
            None => error,
        }
    }
}

/// Waits until a time, or for ever.
pub(super) async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn addresses(settings: &Settings) -> Result<Vec<ServerAddr>, ConnectError> {
    let parse = |server: &String| {
        let address = server.parse::<ServerAddr>();
        let problem =
            |error: std::io::Error| format!("{server:?}: {error}; expected nats://HOST:PORT or tls://HOST:PORT");
        address.map_err(|error| ConnectError::Setting { key: "servers", problem: problem(error) })
    };
    settings.servers.iter().map(parse).collect()
}

fn options(settings: &Settings, subjects: &Subjects) -> Result<ConnectOptions, ConnectError> {
    let mut options = credentials::options(&settings.credentials)?
        .name(concat!("blockyard ", env!("CARGO_PKG_VERSION")))
        .custom_inbox_prefix(subjects.inbox())
        .ping_interval(PING_INTERVAL)
        .subscription_capacity(RECEIVE_QUEUE)
        .request_timeout(Some(ANSWER_TIMEOUT));
    // The library reads the files at each connection; `Attempts` checks them before.
    if let Some(tls) = &settings.tls {
        options = options.require_tls(true);
        if let Some(file) = &tls.ca_file {
            options = options.add_root_certificates(file.clone());
        }
        if let Some(client) = &tls.client {
            options = options.add_client_certificate(client.cert_file.clone(), client.key_file.clone());
        }
    }
    Ok(options)
}

fn with_callbacks(
    options: ConnectOptions,
    state: watch::Sender<ConnectionState>,
    metrics: Metrics,
    denied: &Denied,
    attempts: &Arc<Attempts>,
) -> ConnectOptions {
    let (denied, attempts) = (Arc::clone(denied), Arc::clone(attempts));
    let errors = LogLimit::new(SERVER_ERRORS_PER_MINUTE, Duration::from_mins(1));
    attempts.apply(options).event_callback(move |event| {
        match event {
            Event::Connected => {
                let first = state.borrow().generation == 0;
                let is_loss_logged = attempts.connected();
                state.send_modify(|state| {
                    state.connected = true;
                    state.generation += 1;
                });
                metrics.connected.set(1);
                // An old denial does not explain a new error.
                *denied.lock() = None;
                if !first {
                    metrics.reconnects.inc();
                }
                if is_loss_logged {
                    tracing::info!("NATS connected again");
                }
            }
            Event::Disconnected => {
                attempts.disconnected();
                state.send_modify(|state| state.connected = false);
                metrics.connected.set(0);
            }
            Event::SlowConsumer(_) => metrics.lost(Lost::ReceiveQueue, 1),
            Event::ServerError(error) => {
                let problem = match &error {
                    ServerError::Other(problem) => problem.clone(),
                    error => error_text(error),
                };
                if let Some(suppressed) = errors.admit() {
                    tracing::warn!(problem, suppressed, "NATS server reports an error");
                }
                attempts.server_reported(&problem);
                if let ServerError::Other(problem) = error {
                    *denied.lock() = Some(problem);
                }
            }
            Event::ClientError(problem) => tracing::debug!(%problem, "NATS connection attempt failed"),
            Event::Closed | Event::Draining | Event::LameDuckMode => {}
        }
        std::future::ready(())
    })
}

async fn connect(
    options: &ConnectOptions,
    servers: &[ServerAddr],
    settings: &Settings,
    attempts: &Attempts,
    deadline: Instant,
) -> Result<Client, ConnectError> {
    let names = || settings.servers.join(", ");
    let mut next_line = Instant::now();
    loop {
        attempts.check_files().await.map_err(ConnectError::TlsFile)?;
        let error = match options.clone().connect(servers).await {
            Ok(client) => return Ok(client),
            Err(error) => error,
        };
        let text = error_text(&error);
        let problem = attempts.explain(&text);
        let is_refused = matches!(
            error.kind(),
            ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication | ConnectErrorKind::Tls
        );
        if is_refused || is_without_tls(&text) {
            return Err(ConnectError::Refused { servers: names(), problem });
        }
        let now = Instant::now();
        if now + OPEN_DELAY >= deadline {
            return Err(ConnectError::Unreachable { servers: names(), problem });
        }
        if now >= next_line {
            next_line = now + OPEN_LOG_INTERVAL;
            let left = deadline.saturating_duration_since(now).as_secs_f64().ceil();
            tracing::warn!(
                servers = names(),
                problem,
                "cannot connect to NATS; trying again for up to {left}s (nats.connect_timeout)"
            );
        }
        tokio::time::sleep(OPEN_DELAY).await;
    }
}

fn check_server(client: &Client, settings: &Settings) -> Result<(), ConnectError> {
    let info = client.server_info();
    // The host that the server knows of itself is often 0.0.0.0.
    let mut server = settings.servers.join(", ");
    if !info.server_name.is_empty() {
        server = format!("{server} (server {})", info.server_name);
    }
    if !has_key_expiry(&info.version) {
        return Err(ConnectError::OldServer { server, version: info.version });
    }
    if info.max_payload < MIN_MESSAGE_BYTES {
        return Err(ConnectError::SmallMessages { server, limit: info.max_payload, needed: MIN_MESSAGE_BYTES });
    }
    Ok(())
}

/// Whether a server of this version expires single keys: 2.11 and later.
fn has_key_expiry(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (2, 11)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_before_2_11_are_too_old() {
        for (version, new_enough) in [
            ("2.9.10", false),
            ("2.10.29", false),
            ("2.11.0", true),
            ("2.15.1", true),
            ("3.0.0-RC.1", true),
            ("", false),
        ] {
            assert_eq!(has_key_expiry(version), new_enough, "{version}");
        }
    }
}
