//! The encoding of events, requests and answers: one byte with the protocol number, then postcard, then for some
//! answers further bytes.
//!
//! postcard writes a block hash as its 16 bytes, and small numbers as one byte. `MessagePack`, which this workspace
//! decodes elsewhere, takes 24 bytes for a hash that is an array of numbers. postcard carries no field names or types,
//! so every change of an encoded type needs another protocol number; a golden test fails when one changes.

use super::PROTOCOL;
use crate::plane::EventBody;
use kvbm::Epoch;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Why bytes cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum CodecError {
    #[error("protocol number {0}, this process has {PROTOCOL}")]
    Protocol(u8),
    #[error("the message is not valid")]
    Invalid,
}

/// An event without its source, which is in the subject.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct EventMessage {
    pub(super) epoch: Epoch,
    pub(super) body: EventBody,
}

/// A request to the processes that offer a log of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum LogRequest {
    /// Which epoch is offered? Every process that offers one answers.
    Epoch,
    /// The events after a number.
    Range { after: u64 },
    /// A snapshot as of now, and its first piece.
    OpenSnapshot,
    /// Another piece of an open snapshot.
    ReadSnapshot { snapshot: u64, offset: u64 },
}

/// The answer to a [`LogRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum LogAnswer {
    /// The latest epoch that this process offers.
    Epoch(Epoch),
    /// This process does not offer the log any more.
    Absent,
    /// This many encoded events follow.
    Range { events: u32 },
    /// The log does not have all events after the number any more.
    Truncated,
    /// A snapshot of this many encoded bytes is open. Its first piece follows.
    Snapshot { snapshot: u64, bytes: u64 },
    /// A piece of a snapshot follows.
    Piece,
    /// The snapshot is not open any more.
    Closed,
    /// Too many snapshots are open. The reader asks again later.
    Busy,
}

/// A request for the bytes of texts from an offset on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Piece {
    pub(super) offset: u64,
}

pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_extend(value, vec![PROTOCOL]).expect("encoding into memory does not fail")
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    match decode_head(bytes)? {
        (value, []) => Ok(value),
        _ => Err(CodecError::Invalid),
    }
}

/// Decodes the value at the beginning, and returns the bytes after it.
pub(super) fn decode_head<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), CodecError> {
    match bytes {
        [PROTOCOL, rest @ ..] => postcard::take_from_bytes(rest).map_err(|_| CodecError::Invalid),
        [other, ..] => Err(CodecError::Protocol(*other)),
        [] => Err(CodecError::Invalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::{Load, OnboardSpeed, ReservationUpdate, Role, WorkerId};
    use kvbm::{BlockEvent, CacheDigest, Level, SequenceHash};
    use proptest::prelude::*;

    fn hash(n: u8) -> SequenceHash {
        SequenceHash::from_bytes([n; 16])
    }

    fn bodies() -> Vec<EventBody> {
        let stored = BlockEvent::Stored { level: Level::G1, parent: Some(hash(1)), blocks: vec![hash(2), hash(255)] };
        let speed = OnboardSpeed { level: Level::G3, latency_seconds: 0.5, bytes_per_second: 2.0, queued_blocks: 3 };
        let load = Load { number: 300, running: 2, onboard: vec![speed], ..Load::default() };
        let placed = ReservationUpdate::Placed {
            number: 1,
            worker: WorkerId(2),
            prefill_tokens: 3,
            blocks: 4,
            context_tokens: 300,
            decodes: true,
            anchors: vec![5],
        };
        vec![
            EventBody::Block { number: 1, event: stored },
            EventBody::Block { number: 2, event: BlockEvent::Removed { level: Level::G4, blocks: vec![hash(3)] } },
            EventBody::Block { number: 3, event: BlockEvent::Cleared { level: Level::G2 } },
            EventBody::Digest { number: 4, digest: CacheDigest::default().with(Level::G1, 9) },
            EventBody::Load(load),
            EventBody::Reservations(vec![placed, ReservationUpdate::Released(6)]),
            EventBody::RoleRequest { worker: WorkerId(7), role: Role::Decode },
        ]
    }

    #[test]
    fn events_survive_encoding() {
        for body in bodies() {
            let message = EventMessage { epoch: Epoch(1 << 40), body };
            assert_eq!(decode(&encode(&message)), Ok(message));
        }
    }

    #[test]
    fn an_encoded_event_has_few_bytes_beside_its_hashes() {
        let blocks: Vec<_> = (0..100).map(hash).collect();
        let event = BlockEvent::Stored { level: Level::G1, parent: None, blocks };
        let encoded = encode(&EventMessage { epoch: Epoch(1 << 40), body: EventBody::Block { number: 9, event } });
        assert!((1600..1616).contains(&encoded.len()), "{} bytes", encoded.len());
    }

    /// If this fails, the format has changed: increase [`PROTOCOL`], so that other processes refuse the messages
    /// instead of misreading them.
    #[test]
    fn the_format_of_this_protocol_number_is_as_it_was() {
        let mut hasher = blake3::Hasher::new();
        for body in bodies() {
            hasher.update(&encode(&EventMessage { epoch: Epoch(7), body }));
        }
        let requests = [
            LogRequest::Epoch,
            LogRequest::Range { after: 1 },
            LogRequest::OpenSnapshot,
            LogRequest::ReadSnapshot { snapshot: 1, offset: 2 },
        ];
        let answers = [
            LogAnswer::Epoch(Epoch(1)),
            LogAnswer::Absent,
            LogAnswer::Range { events: 2 },
            LogAnswer::Truncated,
            LogAnswer::Snapshot { snapshot: 3, bytes: 4 },
            LogAnswer::Piece,
            LogAnswer::Closed,
            LogAnswer::Busy,
        ];
        hasher.update(&encode(&requests)).update(&encode(&answers)).update(&encode(&Piece { offset: 300 }));
        assert_eq!(hasher.finalize().to_hex()[..16], *"3d270cf80e5f9696");
    }

    #[test]
    fn another_protocol_number_is_refused() {
        let mut encoded = encode(&LogRequest::Epoch);
        encoded[0] = PROTOCOL + 1;
        assert_eq!(decode::<LogRequest>(&encoded), Err(CodecError::Protocol(PROTOCOL + 1)));
        assert_eq!(decode::<LogRequest>(&[]), Err(CodecError::Invalid));
        assert_eq!(decode::<LogRequest>(&[PROTOCOL, 0, 0]), Err(CodecError::Invalid), "trailing bytes");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<EventMessage>(&bytes);
            let _ = decode_head::<LogAnswer>(&bytes);
        }
    }
}
