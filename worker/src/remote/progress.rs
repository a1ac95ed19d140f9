//! The progress of a prefill on its way to another process: a sequence of [`Progress`] in postcard, each after its
//! length.

use crate::handoff::{Progress, ProgressStream};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::StreamExt;
use std::task::{Context, Poll};

/// Why bytes are no progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the message is no progress of a prefill")]
pub(super) struct InvalidProgress;

/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;
/// Largest message: the cached tokens of each tier, of which there are a few.
const MAX_MESSAGE_BYTES: usize = 1 << 10;

/// The frames of a response, one for each change.
pub(super) struct ProgressFrames(ProgressStream);

impl ProgressFrames {
    pub(super) fn new(progress: ProgressStream) -> Self {
        Self(progress)
    }

    /// The next frame; `None` after the last.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_next_unpin(context).map(|progress| progress.map(|progress| encode(&progress)))
    }
}

fn encode(progress: &Progress) -> Bytes {
    let message = postcard::to_allocvec(progress).expect("encoding into memory does not fail");
    let mut bytes = BytesMut::with_capacity(LENGTH_BYTES + message.len());
    bytes.put_u32_le(message.len() as u32);
    bytes.put_slice(&message);
    bytes.freeze()
}

/// Takes the next message from what has arrived; `None`: more bytes are needed.
pub(super) fn decode(arrived: &mut BytesMut) -> Result<Option<Progress>, InvalidProgress> {
    let Some(length) = arrived.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(InvalidProgress);
    }
    if arrived.len() < LENGTH_BYTES + length {
        return Ok(None);
    }
    arrived.advance(LENGTH_BYTES);
    match postcard::take_from_bytes(&arrived.split_to(length)) {
        Ok((progress, [])) => Ok(Some(progress)),
        _ => Err(InvalidProgress),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::Level;
    use proptest::prelude::*;

    #[test]
    fn progress_arrives_in_any_pieces() {
        let cached = vec![(Level::G1, 16), (Level::G4, 480)];
        let sent = [Progress::Computing { blocks: 300 }, Progress::Complete { cached }];
        let (mut arrived, mut received) = (BytesMut::new(), Vec::new());
        for byte in sent.iter().flat_map(encode) {
            arrived.put_u8(byte);
            received.extend(decode(&mut arrived).unwrap());
        }
        assert_eq!(received, sent);
        assert!(arrived.is_empty());
    }

    /// When this fails, an encoded type has changed: increase `PROTOCOL`, then adapt the bytes.
    #[test]
    fn the_encoding_of_this_protocol_number_does_not_change() {
        assert_eq!(super::super::PROTOCOL, 3);
        assert_eq!(encode(&Progress::Computing { blocks: 300 })[..], [3, 0, 0, 0, 0, 172, 2]);
        let complete = Progress::Complete { cached: vec![(Level::G2, 16)] };
        assert_eq!(encode(&complete)[..], [4, 0, 0, 0, 1, 1, 1, 16]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut arrived = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = decode(&mut arrived) {}
        }
    }
}
