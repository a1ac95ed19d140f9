//! Whether the sockets of a publisher answer, and belong together, for `blockyard doctor`.

use super::connection::{Connection, Failure};
use super::{Endpoint, Source};
use crate::kv_events::wire::{Message, Replayed};
use std::io;
use std::time::Duration;
use tokio::time::timeout;

/// Limit for the end of a replay. vLLM looks for requests every 0.1 s.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// In place of a batch's number: later than any batch, so that the answer is the end of the replay alone.
const AFTER_ALL: u64 = u64::MAX - 1;

/// Why a socket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// There is no TCP connection, or it broke off.
    #[error("no connection: {0}")]
    Connection(io::Error),
    /// No answer in time: a firewall, or a program that waits for another protocol.
    #[error("no answer in time")]
    Silent,
    /// Something answers that is no such socket.
    #[error("no ZMQ publisher: {0}")]
    Protocol(String),
}

/// Connects to the publisher, subscribes, and disconnects.
pub async fn reach(source: &Source) -> Result<(), ReachError> {
    Ok(Connection::subscriber(&source.live, source.topic.as_bytes()).await.map(drop)?)
}

/// Asks the replay socket for batches that do not exist, and waits for its answer that there are none.
pub async fn reach_replay(endpoint: &Endpoint) -> Result<(), ReachError> {
    let answered = async {
        let mut connection = Connection::replay(endpoint, AFTER_ALL).await?;
        loop {
            if let Some(frames) = connection.receive().await?
                && Replayed::read(&frames).map_err(Failure::Message)? == Replayed::End
            {
                return Ok::<_, Failure>(());
            }
        }
    };
    Ok(timeout(REPLAY_TIMEOUT, answered).await.map_err(|_| ReachError::Silent)??)
}

/// Waits for the next batch of a publisher, for as long as it takes, and then requests it at the replay socket. Returns
/// whether the socket has the same batch: that of another publisher has another one with this number, or none.
pub async fn replays_batches(source: &Source, replay: &Endpoint) -> Result<bool, ReachError> {
    let published = next_batch(source).await?;
    let asked = async {
        let mut connection = Connection::replay(replay, published.number).await?;
        loop {
            let Some(frames) = connection.receive().await? else { continue };
            match Replayed::read(&frames).map_err(Failure::Message)? {
                // A replay may begin earlier than requested.
                Replayed::Batch(batch) if batch.number < published.number => {}
                Replayed::Batch(batch) => return Ok(batch == published),
                Replayed::End => return Ok::<_, Failure>(false),
            }
        }
    };
    Ok(timeout(REPLAY_TIMEOUT, asked).await.map_err(|_| ReachError::Silent)??)
}

async fn next_batch(source: &Source) -> Result<Message, Failure> {
    let mut live = Connection::subscriber(&source.live, source.topic.as_bytes()).await?;
    loop {
        if let Some(frames) = live.receive().await? {
            return Ok(Message::live(&frames)?);
        }
    }
}

impl From<Failure> for ReachError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Io(error) => Self::Connection(error),
            Failure::Silent => Self::Silent,
            other => Self::Protocol(other.to_string()),
        }
    }
}
