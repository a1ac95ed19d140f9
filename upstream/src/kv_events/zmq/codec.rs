//! ZMTP 3.0 with the NULL mechanism, as far as a SUB and a DEALER that connect need it: greeting, READY, frames, and
//! the heartbeat commands of ZMTP 3.1. Source: rfc.zeromq.org, specifications 23 and 37.
//!
//! We announce version 3.0, so subscriptions are messages, which peers of every version understand. libzmq answers
//! heartbeats whichever version a peer announces.

use bytes::{Buf, Bytes, BytesMut};

/// Maximum size of a message in bytes, all frames together. A batch of 100,000 tokens takes about 0.6 MB.
pub(super) const MAX_MESSAGE: usize = 16 << 20;
/// Maximum number of frames of a message; an answer to a replay has four.
pub(super) const MAX_FRAMES: usize = 8;
/// Maximum size of a command; READY has two properties.
const MAX_COMMAND: usize = 4096;

const GREETING_LEN: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a peer is not understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Violation {
    #[error("the peer does not speak ZMTP 3")]
    Greeting,
    #[error("the peer requires another security mechanism than NULL")]
    Mechanism,
    #[error("a message is larger than {MAX_MESSAGE} bytes or has more than {MAX_FRAMES} frames")]
    TooLarge,
    #[error("a malformed frame or command")]
    Malformed,
    #[error("the peer reports an error")]
    Refused,
}

/// What a peer sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Received {
    Ready,
    /// A heartbeat with its context, which the answer repeats.
    Ping(Bytes),
    /// A command without a meaning for us.
    Command,
    Message(Vec<Bytes>),
}

/// Decodes the bytes of one connection.
#[derive(Default)]
pub(super) struct Decoder {
    /// Bytes that were received and not decoded yet.
    pub(super) buffer: BytesMut,
    greeted: bool,
    /// Frames of a message whose last frame is missing.
    frames: Vec<Bytes>,
    frames_len: usize,
}

impl Decoder {
    /// The next thing in the buffer, or `None` if more bytes are needed.
    pub(super) fn next(&mut self) -> Result<Option<Received>, Violation> {
        if !self.greeted {
            if !self.greeting()? {
                return Ok(None);
            }
            self.greeted = true;
        }
        while let Some((flags, body)) = self.frame()? {
            if flags & COMMAND != 0 {
                return command(body).map(Some);
            }
            self.frames_len += body.len();
            self.frames.push(body);
            if flags & MORE == 0 {
                self.frames_len = 0;
                return Ok(Some(Received::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    /// Reads the peer's greeting; `false` if it is not complete. Wrong bytes are refused as soon as they arrive.
    fn greeting(&mut self) -> Result<bool, Violation> {
        let bytes = &self.buffer[..self.buffer.len().min(GREETING_LEN)];
        let expect = |at: usize, valid: &dyn Fn(u8) -> bool| bytes.get(at).is_none_or(|byte| valid(*byte));
        if !expect(0, &|byte| byte == 0xff) || !expect(9, &|byte| byte == 0x7f) || !expect(10, &|byte| byte >= 3) {
            return Err(Violation::Greeting);
        }
        let Some(mechanism) = bytes.get(12..GREETING_LEN).map(|rest| &rest[..20]) else { return Ok(false) };
        if !mechanism.starts_with(b"NULL\0") {
            return Err(Violation::Mechanism);
        }
        self.buffer.advance(GREETING_LEN);
        Ok(true)
    }

    /// The flags and the body of the next frame.
    fn frame(&mut self) -> Result<Option<(u8, Bytes)>, Violation> {
        let Some(&flags) = self.buffer.first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & COMMAND != 0 && flags & MORE != 0 {
            return Err(Violation::Malformed);
        }
        let (header, len) = if flags & LONG == 0 {
            let Some(&len) = self.buffer.get(1) else { return Ok(None) };
            (2, u64::from(len))
        } else {
            let Some(len) = self.buffer.get(1..).and_then(<[u8]>::first_chunk) else { return Ok(None) };
            (9, u64::from_be_bytes(*len))
        };
        let max = if flags & COMMAND == 0 { MAX_MESSAGE - self.frames_len } else { MAX_COMMAND };
        let too_many = flags & COMMAND == 0 && self.frames.len() == MAX_FRAMES;
        let len = usize::try_from(len).ok().filter(|len| *len <= max && !too_many).ok_or(Violation::TooLarge)?;
        if self.buffer.len() - header < len {
            return Ok(None);
        }
        self.buffer.advance(header);
        Ok(Some((flags, self.buffer.split_to(len).freeze())))
    }
}

fn command(mut body: Bytes) -> Result<Received, Violation> {
    let len = body.first().map(|len| usize::from(*len)).filter(|len| *len < body.len()).ok_or(Violation::Malformed)?;
    body.advance(1);
    let name = body.split_to(len);
    match name.as_ref() {
        b"READY" => Ok(Received::Ready),
        b"ERROR" => Err(Violation::Refused),
        // A time to live of two bytes comes before the context, of at most 16 bytes.
        b"PING" if matches!(body.len(), 2..=18) => Ok(Received::Ping(body.split_off(2))),
        b"PING" => Err(Violation::Malformed),
        _ => Ok(Received::Command),
    }
}

/// Our greeting: version 3.0, NULL, as a client.
pub(super) fn greeting() -> [u8; GREETING_LEN] {
    let mut greeting = [0; GREETING_LEN];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// READY with the type of our socket.
pub(super) fn ready(socket_type: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend_from_slice(&(socket_type.len() as u32).to_be_bytes());
    body.extend_from_slice(socket_type.as_bytes());
    frame(COMMAND, &body)
}

/// A heartbeat without a context, and without a time after which the peer should give up.
pub(super) fn ping() -> Vec<u8> {
    frame(COMMAND, b"\x04PING\0\0")
}

/// The answer to a heartbeat.
pub(super) fn pong(context: &[u8]) -> Vec<u8> {
    frame(COMMAND, &[b"\x04PONG", context].concat())
}

/// A message of these frames.
pub(super) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let last = frames.len().saturating_sub(1);
    frames.iter().enumerate().flat_map(|(at, body)| frame(if at < last { MORE } else { 0 }, body)).collect()
}

fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = match u8::try_from(body.len()) {
        Ok(len) => vec![flags, len],
        Err(_) => [&[flags | LONG][..], &(body.len() as u64).to_be_bytes()].concat(),
    };
    frame.extend_from_slice(body);
    frame
}

#[cfg(test)]
mod tests;
