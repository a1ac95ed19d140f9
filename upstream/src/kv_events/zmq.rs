//! The transport: a ZMQ SUB connection to a publisher, and a DEALER connection to its replay socket for each replay.
//!
//! It is a ZMTP 3.0 client of our own ([`codec`]), because no crate passed the tests (November 2026):
//! - `zeromq` 0.7.0, test "huge frame": memory is reserved for the length that a peer claims, without a limit. 1 TiB
//!   aborts the process (with 6 GB of address space), and of 2 GiB 1.5 GB were buffered after 8 s. It also has no
//!   heartbeat, so a host that loses power is never noticed.
//! - `rzmq` 0.5.28 was not run: its licence (MPL-2.0) is not among those in `deny.toml`.
//! - `zmq`, `tmq` and `async-zmq` build or link libzmq, which needs cmake, which `deny.toml` bans.
//!
//! **Memory is bounded**: a message has a maximum size, a buffer grows with the bytes that arrived and not with the
//! claimed length, and there is no queue. A slow [`Sink`] stops the reading, so the kernel's buffers fill, the
//! publisher drops batches at its high-water mark, and the gap is replayed. The engine is never blocked.
//!
//! **A connection ends** with an error, garbage, or silence. The next one follows after a backoff, and subscribes
//! again. Dropping the future of [`run`] closes all.
//!
//! Not here: encryption and authentication (CURVE, PLAIN), which the publishers of vLLM and SGLang do not offer.

mod codec;
mod connection;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod reach;
mod source;

pub use reach::{ReachError, reach, reach_replay, replays_batches};
pub use source::{Endpoint, EndpointError, Source};

use super::follow::{Action, Follower};
use super::wire::{Batch, Message, Replayed, WireError};
use connection::{Connection, Failure};
use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;
use tokio::task::consume_budget;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

/// Receives what a publisher says. The methods are called in order and should take milliseconds at most.
pub trait Sink: Send {
    /// A connection to the publisher was made.
    fn connected(&mut self) {}
    /// The connection was lost, or none could be made. The view stays valid until the publisher is known to have
    /// ended or to be new.
    fn disconnected(&mut self) {}
    /// The engine has ended, or is a new process. It has no blocks of before.
    fn new_epoch(&mut self);
    /// Batches are lost: which blocks the engine has is not known any more.
    fn stale(&mut self);
    /// A batch cannot be decoded. [`stale`](Self::stale) follows.
    fn undecodable(&mut self, _: &WireError) {}
    /// The next batch.
    fn batch(&mut self, batch: Batch);
}

/// First delay before a new connection. It doubles up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// An engine starts in about a minute, and its first events should not wait much longer.
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// Limit for each answer of a replay, and for the connection to the replay socket.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of answers of one replay; the buffer of an engine has 10,000 batches unless configured otherwise.
const MAX_REPLAYED: usize = 1 << 20;
/// Interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Maximum number of heartbeats after which nothing arrives, not even an answer. They are counted, because a clock
/// would also run while this process is stopped.
const MAX_UNANSWERED: usize = 2;

/// Follows one publisher and reconnects for ever; ends when it is dropped.
pub async fn run(source: Source, mut sink: impl Sink) -> Infallible {
    let mut follower = Follower::new(source.replay.is_some());
    let mut backoff = MIN_BACKOFF;
    loop {
        match Connection::subscriber(&source.live, source.topic.as_bytes()).await {
            Ok(live) => {
                sink.connected();
                let mut session = Session {
                    source: &source,
                    follower: &mut follower,
                    sink: &mut sink,
                    replay: None,
                    received: false,
                };
                let failure = session.follow(live).await;
                tracing::info!(publisher = %source.live, error = %failure, "kv event connection lost");
                // A peer that accepts connections but sends no batch does not reset the backoff.
                if session.received {
                    backoff = MIN_BACKOFF;
                }
            }
            Err(error) => {
                tracing::debug!(publisher = %source.live, %error, "no kv event connection");
                if error.is_refused() && follower.refused().contains(&Action::NewEpoch) {
                    sink.new_epoch();
                }
            }
        }
        sink.disconnected();
        sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// One live connection, with the replay under way.
struct Session<'a, S> {
    source: &'a Source,
    follower: &'a mut Follower,
    sink: &'a mut S,
    replay: Option<Replay>,
    /// Whether a live batch arrived.
    received: bool,
}

/// A replay: first a connection is made, then it answers.
struct Replay {
    /// Kept here and not in the future of one answer, because live batches interrupt that future.
    connecting: Pin<Box<dyn Future<Output = Result<Connection, Failure>> + Send>>,
    connection: Option<Connection>,
    answers: usize,
    deadline: Instant,
}

impl<S: Sink> Session<'_, S> {
    async fn follow(&mut self, mut live: Connection) -> Failure {
        let actions = self.follower.connected();
        self.carry_out(actions);
        let (mut heartbeat, mut unanswered) = (Instant::now() + HEARTBEAT, 0);
        loop {
            // Messages that are in the buffer already would not yield to other tasks.
            consume_budget().await;
            // Every branch may be cancelled: what was received stays in the connection.
            let actions = tokio::select! {
                frames = live.receive() => {
                    unanswered = 0;
                    let frames = match frames {
                        Ok(Some(frames)) => frames,
                        Ok(None) => continue,
                        Err(failure) => return failure,
                    };
                    match Message::live(&frames) {
                        Ok(message) => {
                            self.received = true;
                            self.follower.live(message)
                        }
                        Err(error) => return Failure::Message(error),
                    }
                }
                answer = next_answer(&mut self.replay) => match answer {
                    Ok(answer) => {
                        if answer == Replayed::End {
                            self.replay = None;
                        }
                        self.follower.replayed(answer)
                    }
                    Err(error) => {
                        tracing::warn!(publisher = %self.source.live, %error, "replay of kv events failed");
                        self.replay = None;
                        self.follower.replay_failed()
                    }
                },
                () = sleep_until(heartbeat) => {
                    if unanswered == MAX_UNANSWERED {
                        return Failure::Silent;
                    }
                    if let Err(failure) = live.ping() {
                        return failure;
                    }
                    unanswered += 1;
                    heartbeat = Instant::now() + HEARTBEAT;
                    continue;
                }
            };
            self.carry_out(actions);
        }
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Apply(message) => self.apply(&message),
                Action::Replay { from } => self.replay = self.source.replay.clone().map(|at| Replay::new(at, from)),
                Action::NewEpoch => self.sink.new_epoch(),
                Action::Stale => self.sink.stale(),
            }
        }
    }

    fn apply(&mut self, message: &Message) {
        match message.decode() {
            Ok(batch) => self.sink.batch(batch),
            Err(error) => {
                let number = message.number;
                // The sink limits its log lines: all batches may be like this.
                tracing::debug!(publisher = %self.source.live, number, %error, "kv event batch not decoded");
                self.sink.undecodable(&error);
                self.sink.stale();
            }
        }
    }
}

impl Replay {
    fn new(endpoint: Endpoint, from: u64) -> Self {
        let connecting = Box::pin(async move { Connection::replay(&endpoint, from).await });
        Self { connecting, connection: None, answers: 0, deadline: Instant::now() + REPLAY_TIMEOUT }
    }

    /// The next answer. Cancel safe.
    async fn receive(&mut self) -> Result<Replayed, Failure> {
        loop {
            let connection = match &mut self.connection {
                Some(connection) => connection,
                none => none.insert(self.connecting.as_mut().await?),
            };
            if let Some(frames) = connection.receive().await? {
                return Replayed::read(&frames).map_err(Failure::Message);
            }
        }
    }
}

/// The next answer of the replay under way; waits for ever if there is none. Cancel safe.
async fn next_answer(replay: &mut Option<Replay>) -> Result<Replayed, Failure> {
    let Some(replay) = replay else { return std::future::pending().await };
    let answer = timeout_at(replay.deadline, replay.receive()).await.map_err(|_| Failure::Silent)??;
    replay.answers += 1;
    if replay.answers > MAX_REPLAYED {
        return Err(Failure::TooMany);
    }
    replay.deadline = Instant::now() + REPLAY_TIMEOUT;
    Ok(answer)
}

#[cfg(test)]
mod tests;
