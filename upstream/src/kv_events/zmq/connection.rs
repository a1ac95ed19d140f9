//! A connection to one socket of a publisher.

use super::codec::{self, Decoder, Received, Violation};
use super::source::Endpoint;
use crate::kv_events::wire::WireError;
use bytes::Bytes;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Limit for connecting and the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit for sending. We send a few bytes, which fit into the kernel's buffer unless the peer does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes read at once. Batches take a few KiB.
const READ_LEN: usize = 64 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Message(#[from] WireError),
    #[error("the peer closed the connection")]
    Closed,
    #[error("no answer in time")]
    Silent,
    #[error("more answers than a publisher can have")]
    TooMany,
}

impl Failure {
    /// Whether nothing listens at the address.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }
}

pub(super) struct Connection {
    stream: TcpStream,
    decoder: Decoder,
}

impl Connection {
    /// A SUB that receives topics with a prefix.
    pub(super) async fn subscriber(endpoint: &Endpoint, topic: &[u8]) -> Result<Self, Failure> {
        let mut connection = Self::open(endpoint, "SUB").await?;
        connection.send(&codec::message(&[&[&[1], topic].concat()])).await?;
        Ok(connection)
    }

    /// A DEALER that has requested the batches from a number on.
    pub(super) async fn replay(endpoint: &Endpoint, from: u64) -> Result<Self, Failure> {
        let mut connection = Self::open(endpoint, "DEALER").await?;
        connection.send(&codec::message(&[b"", &from.to_be_bytes()])).await?;
        Ok(connection)
    }

    async fn open(endpoint: &Endpoint, socket_type: &str) -> Result<Self, Failure> {
        let opened = async {
            let stream = TcpStream::connect(endpoint.address()).await?;
            stream.set_nodelay(true)?;
            let mut connection = Self { stream, decoder: Decoder::default() };
            connection.send(&codec::greeting()).await?;
            connection.send(&codec::ready(socket_type)).await?;
            match connection.next().await? {
                Received::Ready => Ok(connection),
                _ => Err(Failure::Violation(Violation::Malformed)),
            }
        };
        timeout(HANDSHAKE_TIMEOUT, opened).await.map_err(|_| Failure::Silent)?
    }

    /// The frames of the next message, or `None` after a command. Cancel safe.
    pub(super) async fn receive(&mut self) -> Result<Option<Vec<Bytes>>, Failure> {
        match self.next().await? {
            Received::Message(frames) => return Ok(Some(frames)),
            Received::Ping(context) => self.try_send(&codec::pong(&context))?,
            Received::Ready | Received::Command => {}
        }
        Ok(None)
    }

    /// Sends a heartbeat. The answer is a command.
    pub(super) fn ping(&mut self) -> Result<(), Failure> {
        self.try_send(&codec::ping())
    }

    async fn next(&mut self) -> Result<Received, Failure> {
        loop {
            if let Some(received) = self.decoder.next()? {
                return Ok(received);
            }
            // The buffer grows by what arrives, up to twice the maximum message.
            self.decoder.buffer.reserve(READ_LEN);
            if self.stream.read_buf(&mut self.decoder.buffer).await? == 0 {
                return Err(Failure::Closed);
            }
        }
    }

    /// Sends a command if the kernel's buffer has space, so that no half of one is left behind by a cancellation.
    fn try_send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match self.stream.try_write(bytes) {
            Ok(written) if written == bytes.len() => Ok(()),
            // A peer that does not read will be silent too.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Err(Failure::Closed),
        }
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        timeout(SEND_TIMEOUT, self.stream.write_all(bytes)).await.map_err(|_| Failure::Silent)??;
        Ok(())
    }
}
