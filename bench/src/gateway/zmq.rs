//! A publisher of KV events as vLLM has one: ZMTP 3.0 with the NULL mechanism, and stored blocks in `MessagePack`.
//!
//! It sends every subscriber what is published from then on. Not here: removals, because the engines forget nothing
//! during a run, and a replay socket.

use anyhow::Result;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;

/// Messages that a slow subscriber may be behind. Then it loses the oldest, as with ZMQ.
const QUEUED: usize = 1 << 14;
/// Bytes that a subscriber may send before its subscription: greeting, READY, the subscription.
const MAX_HANDSHAKE: usize = 1 << 12;

/// Announced blocks: a run of one chain.
pub struct Stored<'a> {
    /// Hashes of the blocks.
    pub hashes: &'a [u64],
    /// Hash of the block before them.
    pub parent: Option<u64>,
    /// Their tokens.
    pub tokens: &'a [u32],
    /// Tokens per block.
    pub block_size: u32,
}

/// The publisher of one engine.
#[derive(Clone)]
pub struct Publisher {
    messages: broadcast::Sender<Arc<[u8]>>,
}

impl Publisher {
    /// Serves subscribers of a port of the loopback interface.
    pub async fn bind(port: u16) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        let messages = broadcast::Sender::new(QUEUED);
        let publisher = Self { messages: messages.clone() };
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                // Its end is the subscriber's.
                tokio::spawn(serve(socket, messages.subscribe()));
            }
        });
        Ok(publisher)
    }

    /// Publishes batch `number`, which has one event.
    pub fn publish(&self, number: u64, stored: &Stored<'_>) {
        let mut message = Vec::new();
        frame(&mut message, 1, b"");
        frame(&mut message, 1, &number.to_be_bytes());
        frame(&mut message, 0, &batch(stored));
        // Without a subscriber nothing is to be sent.
        let _ = self.messages.send(message.into());
    }
}

async fn serve(mut socket: TcpStream, mut messages: broadcast::Receiver<Arc<[u8]>>) -> Result<()> {
    socket.set_nodelay(true)?;
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9], greeting[10]) = (0xff, 1, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let mut ready = greeting.to_vec();
    frame(&mut ready, 4, b"\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    socket.write_all(&ready).await?;
    // A subscription is a frame without flags that begins with 1, after the greeting and READY.
    let mut received = Vec::new();
    while !is_subscribed(&received) {
        anyhow::ensure!(received.len() < MAX_HANDSHAKE && socket.read_buf(&mut received).await? > 0, "no subscriber");
    }
    loop {
        match messages.recv().await {
            Ok(message) => socket.write_all(&message).await?,
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return Ok(()),
        }
    }
}

fn is_subscribed(received: &[u8]) -> bool {
    let mut frames = received.get(64..).unwrap_or_default();
    while let [flags, length, rest @ ..] = frames {
        let Some((body, after)) = rest.split_at_checked(usize::from(*length)) else { return false };
        if *flags == 0 && body.first() == Some(&1) {
            return true;
        }
        frames = after;
    }
    false
}

/// Appends a frame. `flags`: 1 more frames follow, 4 a command.
fn frame(to: &mut Vec<u8>, flags: u8, body: &[u8]) {
    if let Ok(length) = u8::try_from(body.len()) {
        to.extend([flags, length]);
    } else {
        to.push(flags | 2);
        to.extend((body.len() as u64).to_be_bytes());
    }
    to.extend(body);
}

/// `[timestamp, [event]]` of `MessagePack`.
fn batch(stored: &Stored<'_>) -> Vec<u8> {
    let mut to = vec![0x92, 0xcb];
    to.extend(0.0_f64.to_be_bytes());
    to.extend([0x91, 0x85]);
    text(&mut to, "type");
    text(&mut to, "BlockStored");
    text(&mut to, "block_hashes");
    array(&mut to, stored.hashes.len());
    stored.hashes.iter().for_each(|hash| number(&mut to, *hash));
    text(&mut to, "parent_block_hash");
    match stored.parent {
        Some(hash) => number(&mut to, hash),
        None => to.push(0xc0),
    }
    text(&mut to, "token_ids");
    array(&mut to, stored.tokens.len());
    for token in stored.tokens {
        to.push(0xce);
        to.extend(token.to_be_bytes());
    }
    text(&mut to, "block_size");
    number(&mut to, u64::from(stored.block_size));
    to
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.push(0xa0 | text.len() as u8);
    to.extend(text.as_bytes());
}

fn array(to: &mut Vec<u8>, length: usize) {
    to.push(0xdd);
    to.extend((length as u32).to_be_bytes());
}

fn number(to: &mut Vec<u8>, number: u64) {
    to.push(0xcf);
    to.extend(number.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscription_follows_greeting_and_ready() {
        let mut received = vec![0; 64];
        frame(&mut received, 4, b"\x05READY");
        assert!(!is_subscribed(&received));
        frame(&mut received, 0, b"\x01");
        assert!(is_subscribed(&received));
        assert!(!is_subscribed(&received[..received.len() - 1]));
    }

    #[test]
    fn a_batch_has_the_bytes_of_vllm() {
        let stored = Stored { hashes: &[7], parent: None, tokens: &[1, 2], block_size: 2 };
        let bytes = batch(&stored);
        // Array of two, a float, an array of one map with five fields.
        assert_eq!(bytes[..2], [0x92, 0xcb]);
        assert_eq!(bytes[10..17], [0x91, 0x85, 0xa4, b't', b'y', b'p', b'e']);
        assert_eq!(bytes[bytes.len() - 9..], [0xcf, 0, 0, 0, 0, 0, 0, 0, 2]);
    }
}
