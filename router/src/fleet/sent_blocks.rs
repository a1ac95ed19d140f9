//! What this router sent to a worker, as far as the worker may still have it: all that is known of one whose events say
//! nothing. Pure.
//!
//! A guess, kept modest: no more blocks than the worker has, the least recently sent given up first and of one prompt its end
//! first, none for longer than [`KEPT`]. What other routers sent there is not in it, and neither are answers.

use kvbm::SequenceHash;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use tokio::time::Instant;

/// Blocks, by when they were sent last.
#[derive(Default)]
pub(crate) struct Sent {
    /// Which entry of the queue is a block's latest.
    latest: HashMap<SequenceHash, u64>,
    /// Oldest first, with entries that a later one of the same block has overtaken.
    queue: VecDeque<(u64, Instant, SequenceHash)>,
    entries: u64,
}

/// A prefix that nobody came back to for so long is gone on a busy worker, and hardly missed on an idle one.
pub(crate) const KEPT: Duration = Duration::from_mins(10);

/// Blocks that a worker is taken to have while it does not say: of 16 tokens, what a small GPU has room for.
pub(crate) const BLOCKS: usize = 16_384;

impl Sent {
    /// A prompt was computed. Answers with the blocks that had to go for it, when there is room for `room`.
    pub(crate) fn note(&mut self, prompt: &[SequenceHash], room: usize, now: Instant) -> Vec<SequenceHash> {
        for name in prompt.iter().rev() {
            self.entries += 1;
            self.latest.insert(*name, self.entries);
            self.queue.push_back((self.entries, now, *name));
        }
        let mut gone = Vec::new();
        while self.latest.len() > room
            && let Some((entry, _, name)) = self.queue.pop_front()
        {
            self.give_up(entry, name, &mut gone);
        }
        // At least half of the queue is in force afterwards, so this costs a constant per entry.
        if self.queue.len() > 2 * self.latest.len() {
            let latest = &self.latest;
            self.queue.retain(|(entry, _, name)| latest.get(name) == Some(entry));
        }
        gone
    }

    /// Gives up what was sent too long ago, and answers with it.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<SequenceHash> {
        let mut gone = Vec::new();
        while let Some((entry, at, name)) = self.queue.front().copied()
            && now.saturating_duration_since(at) >= KEPT
        {
            self.queue.pop_front();
            self.give_up(entry, name, &mut gone);
        }
        gone
    }

    /// All blocks, in no order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = SequenceHash> {
        self.latest.keys().copied()
    }

    fn give_up(&mut self, entry: u64, name: SequenceHash, gone: &mut Vec<SequenceHash>) {
        if self.latest.get(&name) == Some(&entry) {
            self.latest.remove(&name);
            gone.push(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(bytes: std::ops::Range<u8>) -> Vec<SequenceHash> {
        bytes.map(|byte| SequenceHash::from_bytes([byte; 16])).collect()
    }

    fn held(sent: &Sent) -> Vec<SequenceHash> {
        let mut held: Vec<_> = sent.blocks().collect();
        held.sort();
        held
    }

    #[test]
    fn the_least_recently_sent_goes_first_and_of_it_the_end() {
        let (mut sent, now) = (Sent::default(), Instant::now());
        assert!(sent.note(&names(0..4), 6, now).is_empty());
        assert!(sent.note(&names(10..12), 6, now).is_empty());
        assert_eq!(sent.note(&names(20..22), 6, now), [names(3..4), names(2..3)].concat());
        sent.note(&names(0..2), 6, now);
        assert_eq!(sent.note(&names(30..31), 6, now), names(11..12), "what was sent again stays");
        assert_eq!(held(&sent), [names(0..2), names(10..11), names(20..22), names(30..31)].concat());
    }

    #[test]
    fn what_was_sent_too_long_ago_expires() {
        let (mut sent, now) = (Sent::default(), Instant::now());
        sent.note(&names(0..4), 100, now);
        sent.note(&names(0..2), 100, now + KEPT / 2);
        assert!(sent.expire(now + KEPT / 2).is_empty());
        assert_eq!(sent.expire(now + KEPT), [names(3..4), names(2..3)].concat());
        assert_eq!(held(&sent), names(0..2));
    }

    #[test]
    fn a_hot_prompt_does_not_grow_the_queue() {
        let (mut sent, now) = (Sent::default(), Instant::now());
        sent.note(&names(50..51), 100, now);
        (0..1000).for_each(|_| drop(sent.note(&names(0..10), 100, now)));
        assert!(sent.queue.len() <= 2 * sent.latest.len(), "{}", sent.queue.len());
    }
}
