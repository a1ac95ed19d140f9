//! Logs on their way to another process: which part of which log a request names, and the messages of a response in
//! postcard, each after its length.
//!
//! The last message says that it is the last. So a response that breaks off is noticed, and neither side needs to know
//! its length before.

use crate::plane::{RouterId, Source, StoreId, WorkerId};
use bytes::{Buf, BufMut, BytesMut};
use kvbm::{Epoch, Numbered, Run};
use serde::{Deserialize, Serialize};

/// The content type of these messages. Its version changes with every change of an encoded type; a golden test fails
/// when one changes. A reader that knows another one reads the log over NATS, where the number of the protocol counts.
pub(super) const CONTENT_TYPE: &str = "application/vnd.blockyard.log; version=1";

/// What a request reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LogRequest {
    pub(super) source: Source,
    pub(super) epoch: Epoch,
    pub(super) part: Part,
}

/// A part of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    /// All blocks.
    Snapshot,
    /// The events after a number.
    Events { after: u64 },
}

/// A message of a response.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// The first of a snapshot.
    Snapshot { epoch: Epoch, number: u64 },
    /// Blocks of a snapshot.
    Run(Run),
    /// An event of a range.
    Event(Numbered),
    /// The log does not have all events after the number any more.
    Truncated,
    /// The last.
    End,
}

/// Why bytes are no message of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the message of a log is not valid")]
pub(super) struct InvalidMessage;

/// Blocks of a run in one message: 64 KiB. Longer runs are sent as several.
const MAX_RUN_BLOCKS: usize = 4096;

/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;

/// Largest message: twice that of a run. An event has at most 1,024 blocks.
const MAX_MESSAGE_BYTES: usize = 128 << 10;

impl LogRequest {
    /// The path of the request.
    pub(super) fn path(&self) -> String {
        let (kind, id) = match self.source {
            Source::Worker(WorkerId(id)) => ("worker", id),
            Source::Store(StoreId(id)) => ("store", id),
            Source::Router(RouterId(id)) => ("router", id),
        };
        let log = format!("/logs/{kind}/{id}/{}", self.epoch.0);
        match self.part {
            Part::Snapshot => format!("{log}/snapshot"),
            Part::Events { after } => format!("{log}/events/{after}"),
        }
    }

    /// What the rest of a path after `/logs/` names.
    pub(super) fn parse(rest: &str) -> Option<Self> {
        let mut parts = rest.split('/');
        let kind = parts.next()?;
        let mut number = || parts.next()?.parse().ok();
        let (id, epoch) = (number()?, Epoch(number()?));
        let source = match kind {
            "worker" => Source::Worker(WorkerId(id)),
            "store" => Source::Store(StoreId(id)),
            "router" => Source::Router(RouterId(id)),
            _ => return None,
        };
        let part = match (parts.next()?, parts.next(), parts.next()) {
            ("snapshot", None, None) => Part::Snapshot,
            ("events", Some(after), None) => Part::Events { after: after.parse().ok()? },
            _ => return None,
        };
        Some(Self { source, epoch, part })
    }
}

/// A run as runs that fit into messages: each is the child of the one before it.
pub(super) fn split(Run { level, parent, blocks }: Run) -> impl Iterator<Item = Run> {
    let mut sent = 0;
    std::iter::from_fn(move || {
        let piece = blocks[sent..].chunks(MAX_RUN_BLOCKS).next()?.to_vec();
        let parent = if sent == 0 { parent } else { Some(blocks[sent - 1]) };
        sent += piece.len();
        Some(Run { level, parent, blocks: piece })
    })
}

/// Appends a message with its length.
pub(super) fn encode(message: &Message, into: &mut BytesMut) {
    let encoded = postcard::to_allocvec(message).expect("encoding into memory does not fail");
    into.reserve(LENGTH_BYTES + encoded.len());
    into.put_u32_le(encoded.len() as u32);
    into.put_slice(&encoded);
}

/// Takes the next message from what has arrived; `None`: more bytes are needed.
pub(super) fn decode(arrived: &mut BytesMut) -> Result<Option<Message>, InvalidMessage> {
    let Some(length) = arrived.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(InvalidMessage);
    }
    if arrived.len() < LENGTH_BYTES + length {
        return Ok(None);
    }
    arrived.advance(LENGTH_BYTES);
    match postcard::take_from_bytes(&arrived.split_to(length)) {
        // An empty run would take more memory than bytes.
        Ok((Message::Run(run), _)) if run.blocks.is_empty() => Err(InvalidMessage),
        Ok((message, [])) => Ok(Some(message)),
        _ => Err(InvalidMessage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::{BlockEvent, Level, SequenceHash};
    use proptest::prelude::*;

    fn hash(n: usize) -> SequenceHash {
        SequenceHash::from_bytes((n as u128).to_le_bytes())
    }

    fn run(blocks: usize) -> Run {
        Run { level: Level::G2, parent: Some(hash(usize::MAX)), blocks: (0..blocks).map(hash).collect() }
    }

    fn messages() -> Vec<Message> {
        let event = BlockEvent::Removed { level: Level::G1, blocks: vec![hash(1), hash(2)] };
        vec![
            Message::Snapshot { epoch: Epoch(1 << 40), number: 300 },
            Message::Run(run(3)),
            Message::Event(Numbered { number: 7, event }),
            Message::Truncated,
            Message::End,
        ]
    }

    #[test]
    fn a_path_names_one_part_of_one_log() {
        for source in [Source::Worker(WorkerId(7)), Source::Store(StoreId(u64::MAX)), Source::Router(RouterId(0))] {
            for part in [Part::Snapshot, Part::Events { after: 12 }] {
                let request = LogRequest { source, epoch: Epoch(5), part };
                assert_eq!(LogRequest::parse(request.path().strip_prefix("/logs/").unwrap()), Some(request));
            }
        }
        for other in ["", "worker", "worker/7/5", "worker/7/5/events", "worker/7/5/snapshot/1", "worker/x/5/snapshot"] {
            assert_eq!(LogRequest::parse(other), None, "{other}");
        }
        for other in ["other/7/5/snapshot", "worker/7/5/blocks", "worker/7/5/events/1/2", "worker/7/-5/snapshot"] {
            assert_eq!(LogRequest::parse(other), None, "{other}");
        }
    }

    #[test]
    fn messages_arrive_in_any_pieces() {
        let (mut encoded, mut arrived, mut received) = (BytesMut::new(), BytesMut::new(), Vec::new());
        for message in &messages() {
            encode(message, &mut encoded);
        }
        for byte in encoded {
            arrived.put_u8(byte);
            received.extend(decode(&mut arrived).unwrap());
        }
        assert_eq!(received, messages());
        assert!(arrived.is_empty());
    }

    #[test]
    fn a_long_run_is_sent_as_a_chain_of_runs() {
        for blocks in [1, MAX_RUN_BLOCKS, MAX_RUN_BLOCKS + 1, 3 * MAX_RUN_BLOCKS] {
            let whole = run(blocks);
            let pieces: Vec<_> = split(whole.clone()).collect();
            assert_eq!(pieces.len(), blocks.div_ceil(MAX_RUN_BLOCKS));
            let mut parent = whole.parent;
            for piece in &pieces {
                assert_eq!((piece.level, piece.parent), (whole.level, parent));
                parent = piece.blocks.last().copied();
                let mut encoded = BytesMut::new();
                encode(&Message::Run(piece.clone()), &mut encoded);
                assert!(encoded.len() < MAX_MESSAGE_BYTES);
            }
            assert_eq!(pieces.into_iter().flat_map(|piece| piece.blocks).collect::<Vec<_>>(), whole.blocks);
        }
    }

    #[test]
    fn a_run_without_blocks_and_a_large_message_are_refused() {
        let mut encoded = BytesMut::new();
        encode(&Message::Run(run(0)), &mut encoded);
        assert_eq!(decode(&mut encoded), Err(InvalidMessage));
        let length = (MAX_MESSAGE_BYTES + 1) as u32;
        assert_eq!(decode(&mut BytesMut::from(&length.to_le_bytes()[..])), Err(InvalidMessage));
    }

    /// When this fails, an encoded type has changed: increase the version in `CONTENT_TYPE`, then adapt the number of
    /// the protocol of the planes, which has the same types, and the bytes.
    #[test]
    fn the_encoding_of_this_version_does_not_change() {
        assert!(CONTENT_TYPE.ends_with("version=1"));
        let mut encoded = BytesMut::new();
        encode(&Message::Snapshot { epoch: Epoch(5), number: 300 }, &mut encoded);
        encode(&Message::Truncated, &mut encoded);
        encode(&Message::End, &mut encoded);
        assert_eq!(encoded[..], [4, 0, 0, 0, 0, 5, 172, 2, 1, 0, 0, 0, 3, 1, 0, 0, 0, 4]);
        let mut encoded = BytesMut::new();
        encode(&Message::Run(Run { level: Level::G2, parent: None, blocks: vec![hash(9)] }), &mut encoded);
        let expected = [&[20, 0, 0, 0, 1, 1, 0, 1][..], &hash(9).as_bytes()[..]].concat();
        assert_eq!(encoded[..], expected[..]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut arrived = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = decode(&mut arrived) {}
        }
    }
}
