//! Captured messages of vLLM through decoding and the view.

use super::*;
use crate::kv_events::Message;
use bytes::Bytes;
use std::collections::BTreeSet;

const INT_HASHES: &str = include_str!("../../../../tests/fixtures/kv_events/vllm-0.32.0-int-hashes.hex");
const OLDEST: &str = include_str!("../../../../tests/fixtures/kv_events/vllm-0.9.0.hex");
const OLDEST_SGLANG: &str = include_str!("../../../../tests/fixtures/kv_events/sglang-0.5.7.hex");
const BYTE_HASHES: &str = include_str!("../../../../tests/fixtures/kv_events/vllm-0.32.0-byte-hashes.hex");

fn messages(file: &str) -> impl Iterator<Item = Message> + '_ {
    let hex = |digits: &str| -> Bytes {
        let digit = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex");
        (0..digits.len()).step_by(2).map(digit).collect()
    };
    let frames = move |line: &str| line.split(' ').map(hex).collect::<Vec<_>>();
    file.lines().map(move |line| Message::live(&frames(line)).expect("a message"))
}

/// Our blocks in device memory after each message.
fn cached_after_each_message(file: &str, block_size: u32) -> Vec<BTreeSet<u64>> {
    let (mut view, mut cached, mut changes) = (View::new(TestChain, block_size, 1000), BTreeSet::new(), Vec::new());
    let after = messages(file).map(|message| {
        for event in &message.decode().expect("a batch").events {
            view.apply(event, &mut changes);
        }
        for change in changes.drain(..) {
            match change {
                Change::Stored { medium, blocks, .. } => {
                    assert_eq!(medium, Medium::G1);
                    cached.extend(blocks);
                }
                Change::Removed { blocks, .. } => blocks.iter().for_each(|block| assert!(cached.remove(block))),
                Change::Cleared { .. } => cached.clear(),
            }
        }
        cached.clone()
    });
    let after = after.collect();
    assert_eq!(view.ignored(), Ignored::default());
    assert_eq!((view.len(), view.engine_block_size()), (cached.len(), Some(block_size)));
    after
}

/// Our hashes of the blocks of a prompt.
fn blocks(tokens: impl Iterator<Item = u32>, block_size: usize) -> BTreeSet<u64> {
    let tokens: Vec<u32> = tokens.collect();
    let mut key = TestChain.root(Root::default()).expect("every root is known");
    let child = |block: &[u32]| {
        key = TestChain.child(&key, block);
        TestChain.hash(&key)
    };
    tokens.chunks(block_size).map(child).collect()
}

#[test]
fn events_of_the_first_release_with_them_are_read() {
    let after = cached_after_each_message(OLDEST, 16);
    let expected = [100..132, 100..148, 100..132, 100..116].map(|tokens| blocks(tokens, 16));
    assert_eq!(after, expected);
}

#[test]
fn events_of_the_oldest_sglang_that_works_are_read() {
    let after = cached_after_each_message(OLDEST_SGLANG, 16);
    // A prompt of three pages, and one that shares the first two of them.
    let other = blocks((100..132).chain(200..216), 16);
    let both = &blocks(100..148, 16) | &other;
    assert_eq!(after, [blocks(100..148, 16), both, blocks(100..132, 16), blocks(100..116, 16)]);
}

#[test]
fn captured_messages_make_the_engines_cache() {
    let after = cached_after_each_message(INT_HASHES, 32);
    let sizes: Vec<_> = after.iter().map(BTreeSet::len).collect();
    // The prompt of 100 tokens, its continuation, the same with a salt, one with decoding, three long ones, a reset.
    assert_eq!(sizes, [3, 6, 9, 10, 11, 23, 35, 38, 3]);
    assert_eq!(after[8], after[0], "the same prompt again after the reset");
    // The prompt that the requests of the first two messages share.
    assert_eq!(after[0], blocks(100..196, 32));
}

#[test]
fn our_hashes_do_not_depend_on_the_engines() {
    assert_eq!(cached_after_each_message(BYTE_HASHES, 32), cached_after_each_message(INT_HASHES, 32));
}
