//! The wire format of KV events: ZMQ messages to typed events, for vLLM and SGLang.
//!
//! A message is `[topic][sequence number, 8 bytes big endian][payload]`. The payload is `MessagePack`: an array
//! `[timestamp, events, data-parallel rank]`. An event is a map with a `"type"`, or in older releases an array with the
//! type first. Unknown fields are skipped. An event of an unknown type or with a wrong value is skipped and counted,
//! as long as the `MessagePack` itself is intact.
//!
//! Events are decoded in one pass without a tree of values. The memory of a [`Batch`] is a small multiple of the
//! payload: 8 bytes per hash and 4 per token, which take at least one byte, and at most 17 times the payload if it
//! consists of empty events (measured in `tests/kv_events_memory.rs`).
//!
//! Source of the format: `vllm/distributed/kv_events.py` of vLLM 0.32 and `disaggregation/kv_events.py` of SGLang
//! 0.5.23; frames captured from vLLM are in `tests/fixtures/kv_events`.

mod event;
mod message;
mod reader;

pub use event::{EngineHash, Event, ExtraKey, GroupKind, Medium, Removed, Stored};
pub use message::{Message, Replayed};

use event::Fields;
use reader::{Head, Reader};

/// Why a message or an event is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// A message with another number of frames.
    #[error("a kv event message of {0} frames")]
    Frames(usize),
    /// A sequence number that is not a number of 8 bytes, or is the end marker where a batch is expected.
    #[error("a kv event message without a valid sequence number")]
    Sequence,
    /// The payload ends within a value, or a length exceeds the payload.
    #[error("a kv event payload that ends within a value")]
    Truncated,
    /// A value of an unexpected type or size.
    #[error("kv event field {0}: unexpected value")]
    Unexpected(&'static str),
}

/// The events of one engine step.
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    /// When the engine made the batch, in seconds since 1970.
    pub timestamp: f64,
    /// The events that were understood, in order.
    pub events: Vec<Event>,
    /// Data-parallel rank of the engine; `None` if it did not say.
    pub rank: Option<u32>,
    /// Number of events that were skipped: of an unknown type, or with a wrong value.
    pub skipped: u32,
}

impl Batch {
    /// Decodes the payload of a message. An error means that the payload is no batch at all.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader(payload);
        let Head::Array(fields @ 2..) = reader.head()? else { return Err(WireError::Unexpected("batch")) };
        let timestamp = match reader.head()? {
            Head::Float(seconds) => seconds,
            Head::Unsigned(seconds) => seconds as f64,
            _ => return Err(WireError::Unexpected("ts")),
        };
        let Head::Array(count) = reader.head()? else { return Err(WireError::Unexpected("events")) };
        let (mut events, mut skipped) = (Vec::new(), 0);
        for _ in 0..count {
            match decode_event(&mut reader)? {
                Some(event) => events.push(event),
                None => skipped += 1,
            }
        }
        let rank = match fields {
            2 => None,
            _ => match reader.head()? {
                Head::Nil => None,
                Head::Unsigned(rank) => Some(rank.try_into().map_err(|_| WireError::Unexpected("rank"))?),
                _ => return Err(WireError::Unexpected("rank")),
            },
        };
        for _ in 3..fields {
            reader.skip()?;
        }
        Ok(Self { timestamp, events, rank, skipped })
    }
}

/// Decodes one event; `None` if it was skipped. An error means that its end could not be found.
fn decode_event(reader: &mut Reader<'_>) -> Result<Option<Event>, WireError> {
    let start = *reader;
    let event = Fields::read(reader).and_then(Fields::into_event);
    if let Ok(Some(event)) = event {
        return Ok(Some(event));
    }
    *reader = start;
    reader.skip()?;
    Ok(None)
}

#[cfg(test)]
mod tests;
