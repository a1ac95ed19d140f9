//! The frames around a batch: live messages of the publisher, and the answers of its replay socket.

use super::{Batch, WireError};
use bytes::Bytes;

/// In place of a sequence number: the end of a replay.
const END: u64 = u64::MAX;

/// A numbered batch that is not decoded yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Number of the batch: from 0 in each publisher process, without gaps.
    pub number: u64,
    /// The encoded batch.
    pub payload: Bytes,
}

/// One answer of the replay socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Replayed {
    /// A batch of the publisher's buffer.
    Batch(Message),
    /// All buffered batches were sent.
    End,
}

impl Message {
    /// Reads a message of the publisher: `[topic][number][payload]`.
    pub fn live(frames: &[Bytes]) -> Result<Self, WireError> {
        match frames {
            [_topic, number, payload] => match sequence_number(number)? {
                END => Err(WireError::Sequence),
                number => Ok(Self { number, payload: payload.clone() }),
            },
            _ => Err(WireError::Frames(frames.len())),
        }
    }

    /// Decodes the batch.
    pub fn decode(&self) -> Result<Batch, WireError> {
        Batch::decode(&self.payload)
    }
}

impl Replayed {
    /// Reads an answer: `[empty][topic][number][payload]`, or `[empty][number][payload]` in old releases. The end
    /// marker has the number -1.
    pub fn read(frames: &[Bytes]) -> Result<Self, WireError> {
        let (number, payload) = match frames {
            [_delimiter, number, payload] | [_delimiter, _, number, payload] => (sequence_number(number)?, payload),
            _ => return Err(WireError::Frames(frames.len())),
        };
        Ok(match number {
            END => Self::End,
            number => Self::Batch(Message { number, payload: payload.clone() }),
        })
    }
}

fn sequence_number(frame: &Bytes) -> Result<u64, WireError> {
    frame.as_ref().try_into().map(u64::from_be_bytes).map_err(|_| WireError::Sequence)
}
