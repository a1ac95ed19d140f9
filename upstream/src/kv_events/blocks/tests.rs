mod captured;

use super::*;
use crate::kv_events::wire::EngineHash;
use proptest::prelude::*;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Chains by the standard hasher.
struct TestChain;

fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Chain for TestChain {
    type Key = u64;
    type Hash = u64;

    fn root(&self, root: Root<'_>) -> Option<u64> {
        (root.salt != Some("unknown")).then(|| hash_of((root.lora, root.salt)))
    }

    fn child(&self, parent: &u64, tokens: &[u32]) -> u64 {
        hash_of((parent, tokens))
    }

    fn hash(&self, key: &u64) -> u64 {
        !key
    }
}

fn view() -> View<TestChain> {
    View::new(TestChain, 2, 1000)
}

/// Our hashes of the blocks of two tokens after a root.
fn own(root: Root<'_>, tokens: &[u32]) -> Vec<u64> {
    let mut key = TestChain.root(root).unwrap();
    let child = |tokens: &[u32]| {
        key = TestChain.child(&key, tokens);
        TestChain.hash(&key)
    };
    tokens.chunks_exact(2).map(child).collect()
}

fn stored(blocks: &[u64], parent: Option<u64>, tokens: &[u32]) -> Stored {
    let blocks = blocks.iter().copied().map(EngineHash).collect();
    Stored { blocks, parent: parent.map(EngineHash), tokens: tokens.to_vec(), block_size: 2, ..Stored::default() }
}

fn removed(blocks: &[u64]) -> Removed {
    Removed { blocks: blocks.iter().copied().map(EngineHash).collect(), ..Removed::default() }
}

fn store(view: &mut View<TestChain>, stored: Stored) -> Vec<Change<u64>> {
    let mut changes = Vec::new();
    view.apply(&Event::Stored(Box::new(stored)), &mut changes);
    changes
}

fn remove(view: &mut View<TestChain>, removed: Removed) -> Vec<Change<u64>> {
    let mut changes = Vec::new();
    view.apply(&Event::Removed(removed), &mut changes);
    changes
}

fn at_g1(parent: Option<u64>, blocks: &[u64]) -> Change<u64> {
    Change::Stored { medium: Medium::G1, parent, blocks: blocks.to_vec() }
}

const PLAIN: Root<'static> = Root { lora: None, salt: None };

#[test]
fn a_chain_continues_from_its_parent() {
    let (mut view, own) = (view(), own(PLAIN, &[1, 2, 3, 4, 5, 6]));
    assert_eq!(store(&mut view, stored(&[10, 11], None, &[1, 2, 3, 4])), [at_g1(None, &own[..2])]);
    assert_eq!(store(&mut view, stored(&[12], Some(11), &[5, 6])), [at_g1(Some(own[1]), &own[2..])]);
    assert_eq!(view.engine_block_size(), Some(2));
}

#[test]
fn a_block_stored_twice_is_removed_twice() {
    let (mut view, own) = (view(), own(PLAIN, &[1, 2, 3, 4]));
    store(&mut view, stored(&[10], None, &[1, 2]));
    let both = store(&mut view, stored(&[10, 11], None, &[1, 2, 3, 4]));
    assert_eq!(both, [at_g1(Some(own[0]), &own[1..])], "only the second block is new");
    assert_eq!(remove(&mut view, removed(&[10])), []);
    let change = Change::Removed { medium: Medium::G1, blocks: vec![own[0]] };
    assert_eq!(remove(&mut view, removed(&[10])), [change]);
    assert_eq!(remove(&mut view, removed(&[10])), []);
    assert_eq!((view.len(), view.ignored().unknown_block), (1, 1));
}

#[test]
fn media_and_owners_are_counted_apart() {
    let (mut view, own) = (view(), own(PLAIN, &[1, 2]));
    let tier =
        |owner: &str| Stored { medium: Medium::G3, ownership: Some(owner.into()), ..stored(&[10], None, &[1, 2]) };
    store(&mut view, stored(&[10], None, &[1, 2]));
    let change = Change::Stored { medium: Medium::G3, parent: None, blocks: own.clone() };
    assert_eq!(store(&mut view, tier("a")), [change]);
    assert_eq!(store(&mut view, tier("b")), [], "already at the medium");
    let gone = |owner: &str| Removed { medium: Medium::G3, ownership: Some(owner.into()), ..removed(&[10]) };
    assert_eq!(remove(&mut view, gone("a")), []);
    assert_eq!(remove(&mut view, gone("a")), [], "its owner has removed it");
    assert_eq!(remove(&mut view, gone("b")), [Change::Removed { medium: Medium::G3, blocks: own }]);
    assert_eq!(view.len(), 1, "G1 still has it");
}

#[test]
fn an_unknown_parent_is_never_guessed() {
    let mut view = view();
    assert_eq!(store(&mut view, stored(&[11, 12], Some(10), &[3, 4, 5, 6])), []);
    assert_eq!(store(&mut view, stored(&[13], Some(12), &[7, 8])), []);
    assert_eq!((view.len(), view.ignored().unknown_parent), (0, 3));
}

#[test]
fn one_engine_hash_for_two_positions_is_a_conflict() {
    let mut view = view();
    store(&mut view, stored(&[10], None, &[1, 2]));
    assert_eq!(store(&mut view, stored(&[10], None, &[3, 4])), []);
    assert_eq!(store(&mut view, stored(&[10], Some(10), &[1, 2])), [], "its own parent");
    assert_eq!(view.ignored().conflict, 2);
}

#[test]
fn salts_and_adapters_share_nothing() {
    let mut view = view();
    let salted = |engine: u64, salt: &str| Stored {
        extra_keys: vec![(0, ExtraKey::Text(salt.into()))],
        ..stored(&[engine], None, &[1, 2])
    };
    let roots = [
        (Root { lora: None, salt: Some("a") }, salted(10, "a")),
        (Root { lora: None, salt: Some("b") }, salted(11, "b")),
        (Root { lora: Some("a"), salt: None }, Stored { lora_name: Some("a".into()), ..salted(12, "a") }),
        (Root { lora: Some("a"), salt: Some("b") }, Stored { lora_name: Some("a".into()), ..salted(13, "b") }),
        (Root { lora: None, salt: Some("c") }, Stored { cache_salt: Some("c".into()), ..stored(&[14], None, &[1, 2]) }),
        (PLAIN, stored(&[15], None, &[1, 2])),
    ];
    let mut seen = HashSet::new();
    for (root, stored) in roots {
        let own = own(root, &[1, 2]);
        assert_eq!(store(&mut view, stored), [at_g1(None, &own)], "{root:?}");
        assert!(seen.insert(own));
    }
}

#[test]
fn a_child_of_a_salted_block_is_salted() {
    let mut view = view();
    let keys = vec![(0, ExtraKey::Text("a".into()))];
    store(&mut view, Stored { extra_keys: keys, ..stored(&[10], None, &[1, 2]) });
    let own = own(Root { lora: None, salt: Some("a") }, &[1, 2, 3, 4]);
    assert_eq!(store(&mut view, stored(&[11], Some(10), &[3, 4])), [at_g1(Some(own[0]), &own[1..])]);
}

#[test]
fn blocks_with_other_content_are_excluded() {
    let (mut view, own) = (view(), own(PLAIN, &[1, 2]));
    let keys = vec![(1, ExtraKey::Content)];
    let image = Stored { extra_keys: keys, ..stored(&[10, 11, 12], None, &[1, 2, 3, 4, 5, 6]) };
    assert_eq!(store(&mut view, image), [at_g1(None, &own)], "the block before the image");
    let text = vec![(0, ExtraKey::Text("image".into()))];
    assert_eq!(store(&mut view, Stored { extra_keys: text, ..stored(&[13], Some(10), &[3, 4]) }), [], "an old release");
    assert_eq!(store(&mut view, stored(&[14], Some(11), &[7, 8])), []);
    assert_eq!((view.ignored().content, view.ignored().unknown_parent), (3, 1));
}

#[test]
fn only_the_attention_group_counts() {
    let mut view = view();
    let group = |index: u32, kind: GroupKind, engine: u64| Stored {
        group: Some(index),
        group_kind: kind,
        ..stored(&[engine], None, &[1, 2])
    };
    assert_eq!(store(&mut view, group(0, GroupKind::Other, 10)), []);
    assert_eq!(store(&mut view, group(1, GroupKind::FullAttention, 10)).len(), 1);
    assert_eq!(store(&mut view, group(2, GroupKind::FullAttention, 10)), []);
    assert_eq!(remove(&mut view, Removed { group: Some(0), ..removed(&[10]) }), []);
    assert_eq!(remove(&mut view, Removed { group: Some(1), ..removed(&[10]) }).len(), 1);
    assert_eq!(view.ignored().other_group, 3);
}

#[test]
fn placeholders_attach_by_hash() {
    let (mut view, own) = (view(), own(PLAIN, &[1, 2, 3, 4]));
    store(&mut view, stored(&[10, 11], None, &[1, 2, 3, 4]));
    let placeholder = Stored { medium: Medium::G2, block_size: 0, ..stored(&[10, 11, 12], None, &[]) };
    assert_eq!(store(&mut view, placeholder), [Change::Stored { medium: Medium::G2, parent: None, blocks: own }]);
    assert_eq!(view.ignored().unknown_block, 1);
}

#[test]
fn other_block_sizes_are_reported_and_ignored() {
    let mut view = view();
    assert_eq!(store(&mut view, Stored { block_size: 4, ..stored(&[10], None, &[1, 2, 3, 4]) }), []);
    assert_eq!(view.engine_block_size(), Some(4));
    assert_eq!(store(&mut view, stored(&[10], None, &[1, 2, 3])), []);
    assert_eq!((view.ignored().other_block_size, view.ignored().misaligned), (1, 1));
}

#[test]
fn unusable_adapters_and_media_are_counted() {
    let mut view = view();
    assert_eq!(store(&mut view, Stored { has_lora_id: true, ..stored(&[10], None, &[1, 2]) }), []);
    assert_eq!(store(&mut view, Stored { medium: Medium::Unknown, ..stored(&[10], None, &[1, 2]) }), []);
    assert_eq!(store(&mut view, Stored { foreign_tokens: true, ..stored(&[10], None, &[]) }), []);
    let Ignored { unnamed_adapter, unknown_medium, content, .. } = view.ignored();
    assert_eq!((unnamed_adapter, unknown_medium, content), (1, 1, 1));
    let words = "1 with images, sound or embeddings, 1 of an adapter without a name, 1 in a memory of an unknown kind";
    assert_eq!(view.ignored().in_words(), words);
    for owner in 0..10 {
        store(&mut view, Stored { ownership: Some(owner.to_string().into()), ..stored(&[10], None, &[1, 2]) });
    }
    assert_eq!(view.ignored().unknown_medium, 1 + 5, "one of six is the engine itself");
}

#[test]
fn a_full_view_ignores_new_blocks() {
    let mut view = View::new(TestChain, 2, 1);
    let own = own(PLAIN, &[1, 2]);
    assert_eq!(store(&mut view, stored(&[10, 11], None, &[1, 2, 3, 4])), [at_g1(None, &own)]);
    assert_eq!((view.len(), view.ignored().over_capacity), (1, 1));
    remove(&mut view, removed(&[10]));
    assert_eq!(store(&mut view, stored(&[12], None, &[5, 6])).len(), 1);
}

#[test]
fn a_cleared_engine_has_no_blocks_at_any_medium() {
    let mut view = view();
    store(&mut view, stored(&[10], None, &[1, 2]));
    store(&mut view, Stored { medium: Medium::G2, ..stored(&[10], None, &[1, 2]) });
    let mut changes = Vec::new();
    view.apply(&Event::Cleared, &mut changes);
    assert_eq!(changes, [Medium::G1, Medium::G2].map(|medium| Change::Cleared { medium }));
    assert!(view.is_empty());
}

#[test]
fn a_restarted_engine_may_have_another_block_size() {
    let mut view = view();
    store(&mut view, stored(&[10], None, &[1, 2]));
    let mut changes = Vec::new();
    view.restart(&mut changes);
    assert_eq!(changes, [Change::Cleared { medium: Medium::G1 }]);
    assert_eq!((view.len(), view.engine_block_size()), (0, None));
}

#[test]
fn a_chain_with_an_unknown_salt_is_ignored() {
    let mut view = view();
    let salted = Stored { cache_salt: Some("unknown".into()), ..stored(&[10], None, &[1, 2]) };
    assert_eq!(store(&mut view, salted), []);
    assert_eq!(store(&mut view, stored(&[11], Some(10), &[3, 4])), []);
    assert_eq!((view.ignored().unknown_root, view.ignored().unknown_parent), (1, 1));
}

/// A step of the model: a small tree, in which block `n` has the parent `n / 2`.
#[derive(Clone, Debug)]
enum Step {
    Store { first: u64, len: usize, medium: bool, placeholder: bool },
    Remove { block: u64, medium: bool },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let store = (1..40u64, 1..4usize, any::<bool>(), prop::bool::weighted(0.2));
    prop_oneof![
        6 => store.prop_map(|(first, len, medium, placeholder)| Step::Store { first, len, medium, placeholder }),
        5 => (1..80u64, any::<bool>()).prop_map(|(block, medium)| Step::Remove { block, medium }),
        1 => Just(Step::Clear),
    ]
}

/// Our hash of block `n` of the model: its path of tokens from the root.
fn path(n: u64) -> u64 {
    let mut tokens = Vec::new();
    let mut block = n;
    while block > 0 {
        tokens.splice(0..0, [block as u32, 0]);
        block /= 2;
    }
    *own(PLAIN, &tokens).last().unwrap()
}

fn medium(second: bool) -> Medium {
    if second { Medium::G2 } else { Medium::G1 }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The changes add up to the set that a list of all references gives.
    #[test]
    fn changes_agree_with_a_list_of_references(steps in prop::collection::vec(step(), 1..150)) {
        let mut view = view();
        let mut references: Vec<(u64, Medium)> = Vec::new();
        let mut announced: HashSet<(u64, Medium)> = HashSet::new();
        for step in steps {
            let mut changes = Vec::new();
            match step {
                Step::Store { first, len, medium: second, placeholder } => {
                    let blocks: Vec<u64> = (0..len).map(|at| first << at).collect();
                    let tokens: Vec<u32> = blocks.iter().flat_map(|block| [*block as u32, 0]).collect();
                    let parent = (first > 1).then_some(first / 2);
                    let known = |n: u64| references.iter().any(|(block, _)| *block == n);
                    let tokens = if placeholder { Vec::new() } else { tokens };
                    let event = Stored { medium: medium(second), ..stored(&blocks, parent, &tokens) };
                    let taken: Vec<u64> = match parent {
                        _ if placeholder => blocks.into_iter().filter(|block| known(*block)).collect(),
                        Some(parent) if !known(parent) => Vec::new(),
                        _ => blocks,
                    };
                    references.extend(taken.iter().map(|block| (*block, medium(second))));
                    view.apply(&Event::Stored(Box::new(event)), &mut changes);
                }
                Step::Remove { block, medium: second } => {
                    let reference = (block, medium(second));
                    if let Some(at) = references.iter().position(|known| *known == reference) {
                        references.swap_remove(at);
                    }
                    let event = Removed { medium: medium(second), ..removed(&[block]) };
                    view.apply(&Event::Removed(event), &mut changes);
                }
                Step::Clear => {
                    references.clear();
                    view.apply(&Event::Cleared, &mut changes);
                }
            }
            for change in changes {
                match change {
                    Change::Stored { medium, parent, blocks } => {
                        let first = references.iter().find(|(block, _)| path(*block) == blocks[0]).unwrap().0;
                        prop_assert_eq!(parent, (first > 1).then(|| path(first / 2)));
                        for (at, block) in blocks.into_iter().enumerate() {
                            prop_assert_eq!(block, path(first << at), "a run is one chain");
                            prop_assert!(announced.insert((block, medium)), "stored once");
                        }
                    }
                    Change::Removed { medium, blocks } => for block in blocks {
                        prop_assert!(announced.remove(&(block, medium)), "only what was stored");
                    },
                    Change::Cleared { medium } => announced.retain(|(_, at)| *at != medium),
                }
            }
            let expected: HashSet<_> = references.iter().map(|(block, medium)| (path(*block), *medium)).collect();
            prop_assert_eq!(&announced, &expected);
            let known: HashSet<u64> = references.iter().map(|(block, _)| *block).collect();
            prop_assert_eq!(view.len(), known.len());
        }
    }
}
