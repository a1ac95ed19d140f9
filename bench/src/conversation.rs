//! Conversations that share a system prompt, and the lower bound of prompt tokens that a fleet must compute for them.
//!
//! The assistant's replies are part of the script, so that each policy gets exactly the same prompts.

use crate::prompt::Source;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// Dimensions of the conversations; lengths in tokens.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of conversations.
    pub conversations: usize,
    /// Turns of each conversation.
    pub turns: usize,
    /// Length of the shared system prompt.
    pub system: usize,
    /// Length of the user message of a turn.
    pub user: usize,
    /// Length of the assistant message of each earlier turn.
    pub reply: usize,
    /// The longest think time of a user.
    pub max_think_time: Duration,
}

/// The next prompt of a conversation, and the think time before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Time between the answer before and this prompt. Without think times the conversations would run in step, and
    /// round-robin would by accident send each conversation to the same worker.
    pub think_time: Duration,
    /// Token ids of the whole conversation so far.
    pub prompt: Vec<u32>,
}

/// The turns of each conversation. Each prompt starts with the prompt before it.
pub fn script(shape: Shape, source: &mut Source) -> Vec<Vec<Turn>> {
    let system = source.tokens(shape.system);
    let conversation = |source: &mut Source| {
        let mut prompt = system.clone();
        let mut turns = Vec::with_capacity(shape.turns);
        for turn in 0..shape.turns {
            if turn > 0 {
                prompt.extend(source.tokens(shape.reply));
            }
            prompt.extend(source.tokens(shape.user));
            turns.push(Turn { think_time: source.up_to(shape.max_think_time), prompt: prompt.clone() });
        }
        turns
    };
    (0..shape.conversations).map(|_| conversation(source)).collect()
}

/// The fewest prompt tokens that must be computed for these prompts when blocks of `block` tokens can be reused: every
/// distinct block once, and for each prompt its partial last block, or its last token if all its blocks are cached.
pub fn lower_bound<'a>(prompts: impl IntoIterator<Item = &'a Vec<u32>>, block: usize) -> u64 {
    let mut cached = HashSet::new();
    let mut computed = 0;
    for prompt in prompts {
        let mut chain = DefaultHasher::new();
        let blocks = prompt.chunks_exact(block);
        let tail = blocks.remainder().len();
        let mut fresh = 0;
        for tokens in blocks {
            tokens.hash(&mut chain);
            fresh += if cached.insert(chain.finish()) { block } else { 0 };
        }
        computed += (fresh + tail).max(1) as u64;
    }
    computed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_is_computed_once_and_each_tail_every_time() {
        let (a, b): (Vec<u32>, Vec<u32>) = ((0..32).collect(), (0..40).collect());
        assert_eq!(lower_bound([&a], 16), 32);
        assert_eq!(lower_bound([&a, &b], 16), 32 + 8);
        assert_eq!(lower_bound([&a, &a], 16), 32 + 1, "the last token of a cached prompt");
        assert_eq!(lower_bound([&b, &b], 16), 40 + 8);
    }

    #[test]
    fn a_block_after_another_prefix_is_another_block() {
        let (a, b) = ([vec![1; 16], vec![2; 16]].concat(), [vec![3; 16], vec![2; 16]].concat());
        assert_eq!(lower_bound([&a, &b], 16), 64);
    }

    #[test]
    fn every_prompt_starts_with_the_prompt_before_it() {
        let shape = Shape {
            conversations: 2,
            turns: 3,
            system: 20,
            user: 5,
            reply: 4,
            max_think_time: Duration::from_millis(9),
        };
        let script = script(shape, &mut Source::new(1));
        assert_eq!(script[0][0].prompt[..20], script[1][0].prompt[..20]);
        assert_ne!(script[0][0].prompt[20..], script[1][0].prompt[20..]);
        for turns in script {
            assert_eq!(turns.iter().map(|turn| turn.prompt.len()).collect::<Vec<_>>(), [25, 34, 43]);
            assert!(turns.windows(2).all(|pair| pair[1].prompt.starts_with(&pair[0].prompt)));
        }
    }
}
