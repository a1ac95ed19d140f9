//! The tokens of a word: its bytes, of which the pair with the lowest rank is merged, leftmost first, until no pair has
//! a merge.

use super::Unsupported;
use crate::model::vocabulary::byte_of_char;
use foldhash::fast::FixedState;
use serde::Deserialize;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use tokenizers::{ModelWrapper, Tokenizer};

/// Words up to this length are searched for their lowest pair, longer ones have a heap. Most are shorter.
const MAX_SCANNED: usize = 64;

/// Rank of a pair without a merge.
const NO_RANK: u32 = u32::MAX;

/// Vocabulary and merges. Their keys are those of the file, so a fixed hash is no weakness.
pub(super) struct Merges {
    /// The words that are encoded to one token, by their bytes.
    words: HashMap<Box<[u8]>, u32, FixedState>,
    pairs: HashMap<(u32, u32), Merge, FixedState>,
    /// The token of each byte.
    bytes: [u32; 256],
}

#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    token: u32,
}

/// What the library writes of a BPE model.
#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
    /// In the order of their ranks.
    merges: Vec<(String, String)>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    ignore_merges: bool,
}

impl Merges {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, Unsupported> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Err(Unsupported::feature("a model other than BPE"));
        };
        let json = serde_json::to_string(model).map_err(|error| Unsupported::broken(&error))?;
        let model: Model = serde_json::from_str(&json).map_err(|error| Unsupported::broken(&error))?;
        let is_set = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return Err(Unsupported::feature("dropout"));
        }
        if is_set(&model.continuing_subword_prefix) || is_set(&model.end_of_word_suffix) {
            return Err(Unsupported::feature("a prefix or suffix of subwords"));
        }
        Self::of(&model)
    }

    fn of(model: &Model) -> Result<Self, Unsupported> {
        let byte_of_char = byte_of_char();
        let mut bytes = [None; 256];
        for (char, byte) in &byte_of_char {
            bytes[usize::from(*byte)] = model.vocab.get(char.encode_utf8(&mut [0; 4])).copied();
        }
        let missing = bytes.iter().position(Option::is_none);
        if let Some(byte) = missing {
            return Err(Unsupported::feature(format!("a vocabulary without byte {byte}")));
        }
        let mut found = Self {
            words: HashMap::default(),
            pairs: HashMap::with_capacity_and_hasher(model.merges.len(), FixedState::default()),
            bytes: bytes.map(Option::unwrap_or_default),
        };
        for (rank, (left, right)) in (0..).zip(&model.merges) {
            let id = |token: &str| {
                let unknown = || Unsupported::Broken(format!("a merge has the unknown token {token:?}"));
                model.vocab.get(token).copied().ok_or_else(unknown)
            };
            let merge = Merge { rank, token: id(&format!("{left}{right}"))? };
            found.pairs.insert((id(left)?, id(right)?), merge);
        }
        let mut words = HashMap::with_capacity_and_hasher(model.vocab.len(), FixedState::default());
        let mut tokens = Vec::new();
        for (name, id) in &model.vocab {
            // Other names are no text of this encoding.
            let Some(bytes) = name.chars().map(|char| byte_of_char.get(&char).copied()).collect::<Option<Box<[u8]>>>()
            else {
                continue;
            };
            tokens.clear();
            if !model.ignore_merges {
                found.merge(&bytes, &mut tokens);
            }
            // Without `ignore_merges` some tokens are not what the merges make of their bytes.
            if model.ignore_merges || tokens[..] == [*id] {
                words.insert(bytes, *id);
            }
        }
        found.words = words;
        Ok(found)
    }

    /// Adds the tokens of a word.
    pub(super) fn encode(&self, word: &[u8], tokens: &mut Vec<u32>) {
        match self.words.get(word) {
            Some(token) => tokens.push(*token),
            None => self.merge(word, tokens),
        }
    }

    fn merge(&self, word: &[u8], tokens: &mut Vec<u32>) {
        if word.len() <= MAX_SCANNED {
            self.merge_short(word, tokens);
        } else {
            self.merge_long(word, tokens);
        }
    }

    fn pair(&self, left: u32, right: u32) -> Merge {
        self.pairs.get(&(left, right)).copied().unwrap_or(Merge { rank: NO_RANK, token: 0 })
    }

    fn merge_short(&self, word: &[u8], tokens: &mut Vec<u32>) {
        let mut symbols = [0; MAX_SCANNED];
        // The merge of each symbol with the next one.
        let mut merges = [Merge { rank: NO_RANK, token: 0 }; MAX_SCANNED];
        let mut len = word.len();
        for (symbol, byte) in symbols.iter_mut().zip(word) {
            *symbol = self.bytes[usize::from(*byte)];
        }
        for at in 1..len {
            merges[at - 1] = self.pair(symbols[at - 1], symbols[at]);
        }
        while len > 1 {
            let lowest = merges[..len - 1].iter().enumerate().min_by_key(|(_, merge)| merge.rank);
            let Some((at, merge)) = lowest.filter(|(_, merge)| merge.rank != NO_RANK) else { break };
            symbols[at] = merge.token;
            symbols.copy_within(at + 2..len, at + 1);
            merges.copy_within(at + 1..len, at);
            len -= 1;
            if at > 0 {
                merges[at - 1] = self.pair(symbols[at - 1], symbols[at]);
            }
            merges[at] =
                if at + 1 < len { self.pair(symbols[at], symbols[at + 1]) } else { Merge { rank: NO_RANK, token: 0 } };
        }
        tokens.extend(&symbols[..len]);
    }

    /// The same with a heap of pairs and a linked list of symbols: a word of a megabyte takes a second, not hours.
    fn merge_long(&self, word: &[u8], tokens: &mut Vec<u32>) {
        struct Symbol {
            token: u32,
            /// `len` of the word: none.
            next: usize,
            /// `usize::MAX`: none.
            before: usize,
            /// It was merged into the one before it.
            is_gone: bool,
        }
        let len = word.len();
        let mut symbols: Vec<Symbol> = (0..len)
            .map(|at| Symbol {
                token: self.bytes[usize::from(word[at])],
                next: at + 1,
                before: at.wrapping_sub(1),
                is_gone: false,
            })
            .collect();
        let mut heap = BinaryHeap::new();
        let push = |heap: &mut BinaryHeap<_>, symbols: &[Symbol], at: usize| {
            let next = symbols[at].next;
            if next < len {
                let pair = (symbols[at].token, symbols[next].token);
                let merge = self.pair(pair.0, pair.1);
                if merge.rank != NO_RANK {
                    heap.push(Reverse((merge.rank, at, merge.token, pair)));
                }
            }
        };
        for at in 0..len {
            push(&mut heap, &symbols, at);
        }
        while let Some(Reverse((_, at, token, pair))) = heap.pop() {
            let next = symbols[at].next;
            // The pair may have been merged otherwise.
            if symbols[at].is_gone || next >= len || (symbols[at].token, symbols[next].token) != pair {
                continue;
            }
            symbols[next].is_gone = true;
            symbols[at].token = token;
            symbols[at].next = symbols[next].next;
            let (behind, before) = (symbols[at].next, symbols[at].before);
            if behind < len {
                symbols[behind].before = at;
            }
            if before < len {
                push(&mut heap, &symbols, before);
            }
            push(&mut heap, &symbols, at);
        }
        tokens.extend(symbols.iter().filter(|symbol| !symbol.is_gone).map(|symbol| symbol.token));
    }
}
