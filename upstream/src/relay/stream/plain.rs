//! A body that is no stream: it passes unchanged, and its usage is read at its end.

use super::Usage;
use crate::relay::chunk::{META_INFO, USAGE};
use crate::relay::splice;
use bytes::Bytes;

/// Longer bodies are not read. 4 MiB hold the longest answers with their log probabilities; embeddings of a large batch
/// are longer, and their usage says only the length of the prompt.
const MAX_READ: usize = 4 << 20;

#[derive(Default, Debug)]
pub(super) struct Plain {
    /// The frames that were passed on. Most bodies have one.
    first: Bytes,
    others: Vec<Bytes>,
    bytes: usize,
}

impl Plain {
    pub(super) fn keep(&mut self, data: &Bytes) {
        self.bytes = self.bytes.saturating_add(data.len());
        if self.bytes > MAX_READ {
            (self.first, self.others) = (Bytes::new(), Vec::new());
        } else if self.first.is_empty() {
            self.first = data.clone();
        } else {
            self.others.push(data.clone());
        }
    }

    /// The usage of a whole body. The body is no longer kept.
    pub(super) fn usage(&mut self) -> Option<Usage> {
        let (mut body, others) = (std::mem::take(&mut self.first), std::mem::take(&mut self.others));
        if !others.is_empty() {
            let frames: Vec<Bytes> = [body].into_iter().chain(others).collect();
            body = frames.concat().into();
        }
        let body = &body[..];
        let usage = splice::find(body, &USAGE).or_else(|| splice::find(body, &META_INFO));
        Usage::read(&body[usage?])
    }
}
