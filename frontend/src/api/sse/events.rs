//! The encoding of events. The events of one write are encoded into a buffer of their stream, and what all chunks of a
//! stream repeat is encoded once.

use crate::params::StreamUsage;
use async_openai::types::chat::CompletionUsage;
use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

/// Size of a stream's buffer in bytes: some chunks of a token. The transport has written a chunk before the next one
/// comes, so the buffer is used again and again; `BytesMut` keeps buffers from 1 KiB on.
const BUFFER_BYTES: usize = 1 << 10;

/// Events of one write, encoded.
pub(crate) struct Events(BytesMut);

impl Events {
    /// No events, and room for some.
    pub(super) fn new() -> Self {
        Self(BytesMut::with_capacity(BUFFER_BYTES))
    }

    /// Appends an event.
    pub(crate) fn push(&mut self, event: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        self.write(event);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Appends a chunk: the constant fields, the choices, and the fields that follow if they are not `None`.
    pub(crate) fn push_chunk(
        &mut self,
        head: &ChunkHead,
        choices: &[impl Serialize],
        usage: Option<UsageSlot>,
        prompt_token_ids: Option<&[u32]>,
    ) {
        self.0.extend_from_slice(&head.0);
        self.write(&choices);
        if let Some(usage) = usage {
            self.0.extend_from_slice(b",\"usage\":");
            self.write(&usage);
        }
        if let Some(ids) = prompt_token_ids {
            self.0.extend_from_slice(b",\"prompt_token_ids\":");
            self.write(&ids);
        }
        self.0.extend_from_slice(b"}\n\n");
    }

    /// Appends the chunk with the usage of the whole request and no choice.
    pub(crate) fn push_usage(&mut self, head: &ChunkHead, usage: CompletionUsage) {
        self.push_chunk(head, &[] as &[()], Some(UsageSlot(Some(usage))), None);
    }

    /// Appends the event that ends a stream.
    pub(super) fn push_done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Whether no event was appended since the last [`take`](Self::take).
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the encoded events.
    pub(super) fn take(&mut self) -> Bytes {
        self.0.split().freeze()
    }

    fn write(&mut self, value: &impl Serialize) {
        serde_json::to_writer((&mut self.0).writer(), value).expect("an event has string keys and goes to memory");
    }
}

/// The constant beginning of the chunks of a stream, encoded: everything before the choices.
pub(crate) struct ChunkHead(Vec<u8>);

impl ChunkHead {
    /// The beginning of chunks that have the `fields` of an object, and then `choices`.
    pub(crate) fn new(fields: &impl Serialize) -> Self {
        let mut head = b"data: ".to_vec();
        serde_json::to_writer(&mut head, fields).expect("the fields have string keys and go to memory");
        let brace = head.pop();
        debug_assert_eq!(brace, Some(b'}'), "the fields are an object");
        head.extend_from_slice(b",\"choices\":");
        Self(head)
    }
}

/// A chunk's `usage`: absent unless requested; then `null` until the last chunk, or the usage so far.
#[derive(Serialize)]
pub(crate) struct UsageSlot(Option<CompletionUsage>);

impl UsageSlot {
    /// The `usage` of a chunk with choices; `None`: the field is absent.
    pub(crate) fn of(which: StreamUsage, so_far: &CompletionUsage) -> Option<Self> {
        match which {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(Self(None)),
            StreamUsage::Each => Some(Self(Some(so_far.clone()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_chunk_has_its_fields_in_order() {
        let head = ChunkHead::new(&json!({ "id": "a\"b", "created": 7 }));
        let mut events = Events::new();
        events.push_chunk(&head, &[json!({ "index": 0 })], None, None);
        events.push_chunk(&head, &[] as &[u32], Some(UsageSlot(None)), Some(&[1, 2]));
        let expected = concat!(
            "data: {\"id\":\"a\\\"b\",\"created\":7,\"choices\":[{\"index\":0}]}\n\n",
            "data: {\"id\":\"a\\\"b\",\"created\":7,\"choices\":[],\"usage\":null,\"prompt_token_ids\":[1,2]}\n\n",
        );
        assert_eq!(events.take(), expected);
        assert!(events.is_empty());
    }

    #[test]
    fn a_buffer_is_used_again_once_its_bytes_are_written() {
        let mut events = Events::new();
        events.push(&"first");
        let address = events.take().as_ptr();
        let mut taken = Vec::new();
        for _ in 0..1_000 {
            events.push(&"next");
            taken.push(events.take().as_ptr());
        }
        assert!(taken.contains(&address), "the buffer begins again");
    }
}
