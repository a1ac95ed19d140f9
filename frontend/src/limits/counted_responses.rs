//! Which output of stored responses was counted.
//!
//! A client can retrieve a response of the Responses API by its id, and gets its usage each time. Its output counts
//! once: when it was created, or if it was computed in the background, when it is retrieved for the first time.
//!
//! An engine may give out an id twice, so every response that is created counts, also one with an id that was there
//! before. The engine's adapter keeps clients from choosing the id.

use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};

/// Maximum number of responses that are remembered, in about 3 MiB. A response is retrieved again within minutes. One
/// that was forgotten counts once more.
const RESPONSES_MAX: usize = 1 << 16;

/// Output of stored responses that was counted.
#[derive(Default)]
pub(crate) struct CountedResponses {
    /// Of tenant and id.
    hasher: RandomState,
    responses: Mutex<Responses>,
}

#[derive(Default)]
struct Responses {
    /// Tokens of the output that were counted.
    tokens: HashMap<u64, u32>,
    oldest_first: VecDeque<u64>,
}

impl CountedResponses {
    /// Notes that a response was created, and these tokens of its output were counted.
    pub(crate) fn created(&self, tenant: &str, id: u64, tokens: u32) {
        self.responses.lock().set(self.hasher.hash_one((tenant, id)), tokens);
    }

    /// Notes that a response with these tokens was retrieved. Returns those of them that were not counted before.
    pub(crate) fn retrieved(&self, tenant: &str, id: u64, tokens: u32) -> u32 {
        let key = self.hasher.hash_one((tenant, id));
        let mut responses = self.responses.lock();
        let counted = responses.tokens.get(&key).copied().unwrap_or_default();
        responses.set(key, tokens.max(counted));
        tokens.saturating_sub(counted)
    }
}

impl Responses {
    fn set(&mut self, key: u64, tokens: u32) {
        if self.tokens.insert(key, tokens).is_some() {
            return;
        }
        self.oldest_first.push_back(key);
        if self.oldest_first.len() > RESPONSES_MAX
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.tokens.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_response_counts_once_for_each_tenant() {
        let counted = CountedResponses::default();
        assert_eq!([400, 400].map(|tokens| counted.retrieved("ann", 1, tokens)), [400, 0]);
        assert_eq!(counted.retrieved("bob", 1, 400), 400);
        counted.created("ann", 2, 400);
        assert_eq!(counted.retrieved("ann", 2, 400), 0, "it counted when it was created");
        assert_eq!(counted.retrieved("ann", 3, 400), 400);
    }

    #[test]
    fn an_id_that_a_client_uses_again_counts_again() {
        let counted = CountedResponses::default();
        for _ in 0..2 {
            counted.created("ann", 1, 0);
            assert_eq!([400, 400].map(|tokens| counted.retrieved("ann", 1, tokens)), [400, 0]);
        }
        counted.created("ann", 1, 10);
        assert_eq!(counted.retrieved("ann", 1, 400), 390, "another response with this id has ended meanwhile");
    }

    #[test]
    fn the_oldest_responses_are_forgotten() {
        let counted = CountedResponses::default();
        (0..=RESPONSES_MAX as u64).for_each(|id| counted.created("", id, 9));
        assert_eq!(counted.responses.lock().tokens.len(), RESPONSES_MAX);
        assert_eq!([0, 1].map(|id| counted.retrieved("", RESPONSES_MAX as u64 * id, 9)), [9, 0]);
    }
}
