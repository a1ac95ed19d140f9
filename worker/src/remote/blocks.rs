//! Blocks on their way to another process: each has an index, whether it was found, its header and its payload.
//!
//! The payload is written without a copy, and verified by the receiver, like that of any tier.

use bytes::{BufMut, Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use kvbm::{Fingerprint, Header, Loaded, SequenceHash};
use std::collections::VecDeque;
use std::task::{Context, Poll};

/// Why bytes are no blocks, or no request for blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the message has no valid blocks")]
pub(super) struct InvalidBlocks;

/// Bytes before a header: the index and whether the block was found.
pub(super) const PREFIX: usize = 5;

const FINGERPRINT_BYTES: usize = 32;
const HASH_BYTES: usize = 16;

/// Encodes a request for blocks.
pub(super) fn encode_request(fingerprint: Fingerprint, hashes: &[SequenceHash]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FINGERPRINT_BYTES + hashes.len() * HASH_BYTES);
    bytes.put_slice(fingerprint.as_bytes());
    for hash in hashes {
        bytes.put_slice(hash.as_bytes());
    }
    bytes.freeze()
}

pub(super) fn decode_request(bytes: &[u8]) -> Result<(Fingerprint, Vec<SequenceHash>), InvalidBlocks> {
    let (fingerprint, hashes) = bytes.split_first_chunk::<FINGERPRINT_BYTES>().ok_or(InvalidBlocks)?;
    let (hashes, rest) = hashes.as_chunks::<HASH_BYTES>();
    let hashes = hashes.iter().map(|hash| SequenceHash::from_bytes(*hash)).collect();
    if rest.is_empty() { Ok((Fingerprint::from_bytes(*fingerprint), hashes)) } else { Err(InvalidBlocks) }
}

/// The frames of a response: heads and payloads in turn.
pub(super) struct BlockFrames {
    loads: BoxStream<'static, Loaded>,
    ready: VecDeque<Bytes>,
}

impl BlockFrames {
    pub(super) fn new(loads: BoxStream<'static, Loaded>) -> Self {
        Self { loads, ready: VecDeque::new() }
    }

    /// The next frame; `None` after the last.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Poll::Ready(Some(frame));
            }
            let Some((index, loaded)) = std::task::ready!(self.loads.poll_next_unpin(context)) else {
                return Poll::Ready(None);
            };
            // The receiver computes a block that cannot be read.
            let block = loaded.ok().flatten();
            let mut head = BytesMut::with_capacity(PREFIX + Header::LEN);
            head.put_u32_le(index as u32);
            head.put_u8(block.is_some().into());
            if let Some(block) = &block {
                head.put_slice(&block.header.encode());
            }
            self.ready.push_back(head.freeze());
            self.ready.extend(block.map(|block| block.payload).filter(|payload| !payload.is_empty()));
        }
    }
}

/// Whether the block of an index was found. Precedes its header and payload.
pub(super) fn decode_prefix(prefix: [u8; PREFIX]) -> Result<(usize, bool), InvalidBlocks> {
    let [a, b, c, d, found] = prefix;
    match found {
        0 | 1 => Ok((u32::from_le_bytes([a, b, c, d]) as usize, found == 1)),
        _ => Err(InvalidBlocks),
    }
}

/// The header of a block that was found. `max_payload` bounds the memory of one.
pub(super) fn decode_header(header: &[u8; Header::LEN], max_payload: u64) -> Result<Header, InvalidBlocks> {
    Header::decode(header).ok().filter(|header| header.length <= max_payload).ok_or(InvalidBlocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::poll_fn;
    use kvbm::Block;
    use proptest::prelude::*;

    fn block(n: u8) -> Block {
        let fingerprint = Fingerprint::from_bytes([7; 32]);
        Block::new(SequenceHash::from_bytes([n; 16]), None, fingerprint, Bytes::from(vec![n; 3000 + usize::from(n)]))
    }

    #[tokio::test]
    async fn frames_are_heads_and_payloads_in_turn() {
        let loads: Vec<Loaded> = vec![(1, Ok(Some(block(1)))), (0, Ok(None)), (2, Ok(Some(block(2))))];
        let mut frames = BlockFrames::new(futures::stream::iter(loads).boxed());
        let mut sent = Vec::new();
        while let Some(frame) = poll_fn(|context| frames.poll_next(context)).await {
            sent.push(frame);
        }
        let heads: Vec<_> = [0, 2, 3].map(|at| decode_prefix(*sent[at].first_chunk().unwrap()).unwrap()).to_vec();
        assert_eq!(heads, [(1, true), (0, false), (2, true)]);
        assert_eq!((&sent[1], &sent[4], sent[2].len()), (&block(1).payload, &block(2).payload, PREFIX));
        let header = decode_header(sent[3][PREFIX..].first_chunk().unwrap(), 1 << 20).unwrap();
        assert_eq!(header, block(2).header);
    }

    #[test]
    fn requests_survive_encoding_and_a_large_payload_is_refused_before_it_arrives() {
        let (fingerprint, hashes) =
            (Fingerprint::from_bytes([3; 32]), vec![block(1).header.hash, block(2).header.hash]);
        let encoded = encode_request(fingerprint, &hashes);
        assert_eq!(decode_request(&encoded), Ok((fingerprint, hashes)));
        assert!(decode_request(&encoded[..40]).is_err() && decode_request(&encoded[..20]).is_err());
        assert!(decode_header(&block(1).header.encode(), 3001).is_ok());
        assert_eq!(decode_header(&block(1).header.encode(), 3000), Err(InvalidBlocks));
        assert_eq!(decode_prefix([0, 0, 0, 0, 2]), Err(InvalidBlocks));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 128..400)) {
            let _ = decode_header(bytes.first_chunk().unwrap(), 1 << 16);
            let _ = decode_request(&bytes);
        }
    }
}
