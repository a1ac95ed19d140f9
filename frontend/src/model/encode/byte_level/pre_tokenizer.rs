//! The words of a text: the patterns of a pre-tokenizer, matched by lazy DFAs.
//!
//! Patterns of language models end with `|\s+(?!\S)|\s+`: of a run of white space before a word the last character
//! belongs to the word. A DFA has no look-ahead. So the run is matched by a second pattern `\s+`, which comes after all
//! others as before, and gives its last character back where a word follows.
//!
//! The time is linear in the text for patterns that match at every position, which those of language models do. The
//! states are walked here: the library's search takes a slow path at each byte at which a match may end, and in a word
//! that is every byte.

use super::Unsupported;
use parking_lot::Mutex;
use regex_automata::hybrid::LazyStateID;
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::NFA;
use regex_automata::{Anchored, Input};
use regex_syntax::ast::parse::Parser;
use regex_syntax::ast::{self, Ast};
use serde_json::Value;
use tokenizers::Tokenizer;

/// GPT-2's pattern, which `ByteLevel` has built in.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The end of a pattern that leaves the last space to the next word.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// Memory for the states of a DFA per thread at the same time. Texts in all scripts need about 1 MB; a DFA that is full
/// begins anew.
const DFA_BYTES: usize = 2 << 20;
/// Caches that are kept for the next texts, per pattern. More are needed while more threads tokenize.
const MAX_IDLE: usize = 64;

/// Maximum length of white space, and of text without a match. A text with more is left to the library: its engine
/// gives up after 1,000,000 steps, some for each such character, and takes the rest of the text for one word.
const MAX_RUN: usize = 1 << 14;

/// Finds words by one pattern after the other, each within the words of the one before.
pub(super) struct PreTokenizer {
    patterns: Vec<Pattern>,
}

pub(super) struct Pattern {
    dfa: DFA,
    /// Text between two matches is a word too.
    keeps_gaps: bool,
    /// The first bytes of matches.
    first: [bool; 256],
    idle: Mutex<Vec<Cache>>,
}

impl PreTokenizer {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, Unsupported> {
        let json = serde_json::to_value(tokenizer.get_pre_tokenizer()).map_err(|error| Unsupported::broken(&error))?;
        let one = std::slice::from_ref(&json);
        let steps = json["pretokenizers"].as_array().map_or(one, Vec::as_slice);
        let Some((last, splits)) = steps.split_last().filter(|(last, _)| last["type"] == "ByteLevel") else {
            let name = json["type"].as_str().unwrap_or("none");
            return Err(Unsupported::feature(format!("pre-tokenizer {name} without ByteLevel at its end")));
        };
        if last["add_prefix_space"] != false {
            return Err(Unsupported::feature("add_prefix_space"));
        }
        let mut patterns = splits.iter().map(Pattern::of_step).collect::<Result<Vec<_>, _>>()?;
        // The library's default is to use it.
        if last["use_regex"] != false {
            patterns.push(Pattern::new(GPT2, true)?);
        }
        Ok(Self { patterns })
    }

    /// Calls `word` for each word of a text. `None` if only the library has them, which leaves the words incomplete.
    pub(super) fn words(&self, text: &str, mut word: impl FnMut(&str)) -> Option<()> {
        match &self.patterns[..] {
            [] => word(text),
            [pattern] => pattern.matches(text, word)?,
            [first, rest @ ..] => {
                let mut words = Vec::new();
                first.matches(text, |word| words.push(word))?;
                for (number, pattern) in rest.iter().enumerate() {
                    if number + 1 == rest.len() {
                        return words.iter().try_for_each(|text| pattern.matches(text, &mut word));
                    }
                    let mut parts = Vec::new();
                    words.iter().try_for_each(|text| pattern.matches(text, |part| parts.push(part)))?;
                    words = parts;
                }
            }
        }
        Some(())
    }
}

impl Pattern {
    fn of_step(step: &Value) -> Result<Self, Unsupported> {
        let keeps_gaps = match (step["behavior"].as_str(), step["invert"] == true) {
            (Some("Isolated"), false) => true,
            // What is removed is what does not match.
            (Some("Removed"), true) => false,
            _ => return Err(Unsupported::feature(format!("pre-tokenizer {}", step["type"]))),
        };
        let pattern = step["pattern"]["Regex"].as_str();
        Self::new(pattern.ok_or_else(|| Unsupported::feature("a split at a string"))?, keeps_gaps)
    }

    fn new(pattern: &str, keeps_gaps: bool) -> Result<Self, Unsupported> {
        Self::within(pattern, keeps_gaps, DFA_BYTES)
    }

    /// A pattern with this memory for the states of a DFA.
    pub(super) fn within(pattern: &str, keeps_gaps: bool, dfa_bytes: usize) -> Result<Self, Unsupported> {
        let unsupported = || Unsupported::feature(format!("the pattern {pattern:?}"));
        let patterns = match pattern.strip_suffix(SPACES) {
            Some(first) => vec![first, r"\s+"],
            None => vec![pattern],
        };
        let ast = Parser::new().parse(patterns[0]).map_err(|_| unsupported())?;
        ast::visit(&ast, SameMeaning).map_err(|Differs| unsupported())?;
        // It refuses other look-aheads and back-references.
        let nfa = NFA::compiler().build_many(&patterns).map_err(|_| unsupported())?;
        if nfa.has_empty() || !nfa.look_set_any().is_empty() {
            return Err(unsupported());
        }
        let config = DFA::config().cache_capacity(dfa_bytes).skip_cache_capacity_check(true);
        let dfa = DFA::builder().configure(config).build_from_nfa(nfa).map_err(|_| unsupported())?;
        let mut found = Self { dfa, keeps_gaps, first: [true; 256], idle: Mutex::default() };
        found.first = found.first_bytes().ok_or_else(unsupported)?;
        Ok(found)
    }

    /// The bytes that a match may begin with.
    fn first_bytes(&self) -> Option<[bool; 256]> {
        let mut cache = self.dfa.create_cache();
        let start = start_state(&self.dfa, &mut cache).ok()?;
        let mut first = [false; 256];
        for (byte, is_first) in (0..=u8::MAX).zip(&mut first) {
            *is_first = !self.dfa.next_state(&mut cache, start, byte).ok()?.is_dead();
        }
        Some(first)
    }

    /// Calls `word` for each match, and for the text between them if that is kept.
    pub(super) fn matches<'a>(&self, text: &'a str, mut word: impl FnMut(&'a str)) -> Option<()> {
        let cache = self.idle.lock().pop().unwrap_or_else(|| self.dfa.create_cache());
        let mut search = Search::new(&self.dfa, cache).ok()?;
        let bytes = text.as_bytes();
        let (mut end, mut at) = (0, 0);
        while at < bytes.len() {
            let found = if self.first[usize::from(bytes[at])] { search.at(bytes, at).ok()? } else { None };
            let Some(found) = found else {
                at += 1;
                while !text.is_char_boundary(at) {
                    at += 1;
                }
                if at - end > MAX_RUN {
                    return None;
                }
                continue;
            };
            if self.keeps_gaps && end < at {
                word(&text[end..at]);
            }
            end = found.end;
            let is_space = found.pattern == 1;
            if is_space && end - at > MAX_RUN {
                return None;
            }
            if is_space && end < bytes.len() {
                let last = text[at..end].chars().next_back().map_or(0, char::len_utf8);
                // A single space is a word of its own, as after no other word.
                end -= if end - at > last { last } else { 0 };
            }
            word(&text[at..end]);
            at = end;
        }
        if self.keeps_gaps && end < bytes.len() {
            word(&text[end..]);
        }
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(search.cache);
        }
        Some(())
    }
}

/// A match, without its beginning.
struct Match {
    end: usize,
    /// Number of its pattern.
    pattern: usize,
}

/// Finds the matches at positions of a text.
struct Search<'a> {
    dfa: &'a DFA,
    cache: Cache,
    /// The state before a match, the same at every position, because the patterns do not look around.
    start: LazyStateID,
    /// How often the cache had been cleared when `start` was found. States do not outlive that.
    cleared: usize,
}

/// A DFA has no memory for its next state.
struct GaveUp;

impl<'a> Search<'a> {
    fn new(dfa: &'a DFA, mut cache: Cache) -> Result<Self, GaveUp> {
        let start = start_state(dfa, &mut cache)?;
        let cleared = cache.clear_count();
        Ok(Self { dfa, cache, start, cleared })
    }

    /// The match that begins at a position, if there is one.
    fn at(&mut self, text: &[u8], at: usize) -> Result<Option<Match>, GaveUp> {
        let Self { dfa, cache, start, cleared } = self;
        if cache.clear_count() != *cleared {
            *start = start_state(dfa, cache)?;
            *cleared = cache.clear_count();
        }
        let mut state = *start;
        let mut last = None;
        for (end, byte) in (at..).zip(&text[at..]) {
            state = dfa.next_state(cache, state, *byte).map_err(|_| GaveUp)?;
            if state.is_tagged() {
                // A state is one byte ahead of the match that ends there.
                if state.is_match() {
                    last = Some((end, state));
                } else if state.is_dead() {
                    break;
                }
            }
        }
        if !state.is_dead() {
            state = dfa.next_eoi_state(cache, state).map_err(|_| GaveUp)?;
            if state.is_match() {
                last = Some((text.len(), state));
            }
        }
        let Some((end, state)) = last else { return Ok(None) };
        if cache.clear_count() == *cleared {
            return Ok(Some(Match { end, pattern: dfa.match_pattern(cache, state, 0).as_usize() }));
        }
        // The state of the match may be gone.
        let input = Input::new(text).range(at..).anchored(Anchored::Yes);
        let found = dfa.try_search_fwd(cache, &input).map_err(|_| GaveUp)?;
        Ok(found.map(|found| Match { end: found.offset(), pattern: found.pattern().as_usize() }))
    }
}

fn start_state(dfa: &DFA, cache: &mut Cache) -> Result<LazyStateID, GaveUp> {
    dfa.start_state_forward(cache, &Input::new("").anchored(Anchored::Yes)).map_err(|_| GaveUp)
}

/// Whether a pattern means the same here as in the library, whose engine knows more syntax.
struct SameMeaning;

/// It does not.
struct Differs;

impl ast::Visitor for SameMeaning {
    type Output = ();
    type Err = Differs;

    fn finish(self) -> Result<(), Differs> {
        Ok(())
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Differs> {
        match ast {
            // `a++` is a possessive repetition there, and a repeated one here.
            Ast::Repetition(repetition) if matches!(*repetition.ast, Ast::Repetition(_)) => Err(Differs),
            // Flags for the rest of the pattern, of which the end is matched without them.
            Ast::Flags(_) => Err(Differs),
            _ => Ok(()),
        }
    }
}
