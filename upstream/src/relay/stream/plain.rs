//! A body that is no stream: it passes unchanged, and its usage is read at its end.

use super::Usage;
use crate::relay::chunk::USAGE;
use crate::relay::splice;
use bytes::Bytes;

/// Longer bodies are not read. 4 MiB hold the longest answers with their log probabilities; embeddings of a large batch
/// are longer, and their usage says only the length of the prompt.
const MAX_READ: usize = 4 << 20;

#[derive(Default, Debug)]
pub(super) struct Plain {
    /// Slices of the frames that were passed on.
    frames: Vec<Bytes>,
    bytes: usize,
}

impl Plain {
    pub(super) fn keep(&mut self, data: &Bytes) {
        self.bytes = self.bytes.saturating_add(data.len());
        if self.bytes > MAX_READ {
            self.frames = Vec::new();
        } else {
            self.frames.push(data.clone());
        }
    }

    /// The usage of a whole body. The body is no longer kept.
    pub(super) fn usage(&mut self) -> Option<Usage> {
        let frames = std::mem::take(&mut self.frames);
        let joined;
        let body = match &frames[..] {
            [body] => body,
            frames => {
                joined = frames.concat();
                &joined[..]
            }
        };
        Usage::read(&body[splice::find(body, &USAGE)?])
    }
}
