//! Prevents text of a client from becoming special tokens.
//!
//! Text of a special token in a conversation is replaced by a placeholder before the chat template renders it, so all
//! special tokens of the rendered prompt are the template's own. The placeholders become text again when the prompt is
//! encoded. A conversation without such text has the same tokens as without this module.
//!
//! Not here: `/v1/completions`, where the client writes the whole prompt.

use super::encode::{EncodeError, EncodeJob, Encoder};
use super::vocabulary::Vocabulary;
use crate::error::Error;
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use tokenizers::{AddedToken, OffsetReferential, OffsetType, Tokenizer};

/// Enclose the number of a literal. They are noncharacters, which ordinary text does not contain. A client that sends
/// them gets only the text of a literal.
const LITERAL: [char; 2] = ['\u{FDD2}', '\u{FDD3}'];
/// Enclose the id of a special token. If a client sends the first one beside text of a special token, it becomes
/// U+FFFD.
const SPECIAL: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Finds the text of a tokenizer's special tokens.
pub(crate) struct SpecialText {
    finder: Option<AhoCorasick>,
    vocabulary: Arc<Vocabulary>,
    renamed: OnceLock<Renamed>,
}

/// The texts that placeholders stand for, by number.
#[derive(Debug, Default)]
pub(crate) struct Literals(Vec<String>);

/// The tokenizer with its special tokens renamed to names that no text has, so that it encodes the old names as text.
struct Renamed {
    encoder: Encoder,
    /// The original id of each renamed token.
    ids: HashMap<u32, u32>,
}

impl SpecialText {
    /// A finder for a tokenizer's special tokens.
    pub(crate) fn new(tokenizer: &Tokenizer, vocabulary: Arc<Vocabulary>) -> Result<Self, Error> {
        let texts: Vec<String> = special_tokens(tokenizer).map(|(_, token)| token.content).collect();
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&texts);
        let finder = finder.map_err(|error| Error::Failed(format!("tokenizer.json: special tokens: {error}")))?;
        let finder = (!texts.is_empty()).then_some(finder);
        Ok(Self { finder, vocabulary, renamed: OnceLock::new() })
    }

    /// Replaces text of special tokens in all strings of a value, object keys included.
    pub(crate) fn extract_literals(&self, value: &mut Value, literals: &mut Literals) {
        match value {
            Value::String(text) => {
                if let Some(replaced) = self.replace(text, literals) {
                    *text = replaced;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.extract_literals(item, literals)),
            Value::Object(fields) => {
                let is_forged = |name: &String| self.finder.as_ref().is_some_and(|finder| finder.is_match(name));
                if fields.keys().any(is_forged) {
                    let renamed = std::mem::take(fields).into_iter();
                    *fields =
                        renamed.map(|(name, value)| (self.replace(&name, literals).unwrap_or(name), value)).collect();
                }
                fields.values_mut().for_each(|value| self.extract_literals(value, literals));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// The text with placeholders; `None` if it has no text of special tokens.
    fn replace(&self, text: &str, literals: &mut Literals) -> Option<String> {
        let finder = self.finder.as_ref()?;
        let mut replaced = String::new();
        let mut end = 0;
        for found in finder.find_iter(text) {
            replaced.push_str(&text[end..found.start()]);
            replaced.push_str(&literals.placeholder(&text[found.range()]));
            end = found.end();
        }
        (end > 0).then(|| replaced + &text[end..])
    }

    /// The tokens of a rendered prompt, with `literals` as text, if they are at most `limit`. With `add_special`, the
    /// tokenizer adds its tokens around the text.
    pub(crate) fn encode(
        &self,
        encoder: &Encoder,
        prompt: &str,
        literals: &Literals,
        add_special: bool,
        limit: usize,
        job: &EncodeJob,
    ) -> Result<Vec<u32>, EncodeError> {
        if literals.0.is_empty() {
            return encoder.encode(prompt, add_special, limit, job);
        }
        // The prompt has at least as many tokens as its text with special tokens.
        encoder.check(&literals.restore(prompt), limit)?;
        let renamed = self.renamed(encoder.tokenizer())?;
        let text = rename(encoder.tokenizer(), prompt, literals);
        let tokens = renamed.encoder.encode(&text, add_special, limit, job)?;
        Ok(tokens.into_iter().map(|id| renamed.ids.get(&id).copied().unwrap_or(id)).collect())
    }

    /// Made on first use, because it is a second copy of the vocabulary.
    fn renamed(&self, tokenizer: &Tokenizer) -> Result<&Renamed, EncodeError> {
        if let Some(renamed) = self.renamed.get() {
            return Ok(renamed);
        }
        let renamed = Renamed::new(tokenizer, &self.vocabulary)?;
        Ok(self.renamed.get_or_init(|| renamed))
    }
}

impl Literals {
    fn placeholder(&mut self, text: &str) -> String {
        let number = self.0.iter().position(|known| known == text).unwrap_or_else(|| {
            self.0.push(text.to_owned());
            self.0.len() - 1
        });
        format!("{}{number}{}", LITERAL[0], LITERAL[1])
    }

    /// A text with its placeholders replaced by their literals.
    pub(crate) fn restore(&self, text: &str) -> String {
        let mut restored = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(LITERAL[0]) {
            let (before, placeholder) = rest.split_at(at);
            restored.push_str(before);
            let number = placeholder[LITERAL[0].len_utf8()..].split_once(LITERAL[1]);
            let literal = number.and_then(|(number, after)| Some((self.0.get(number.parse::<usize>().ok()?)?, after)));
            rest = if let Some((literal, after)) = literal {
                restored.push_str(literal);
                after
            } else {
                restored.push(LITERAL[0]);
                &placeholder[LITERAL[0].len_utf8()..]
            };
        }
        restored + rest
    }
}

impl Renamed {
    fn new(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Result<Self, EncodeError> {
        let mut renamed = tokenizer.clone();
        renamed.set_encode_special_tokens(true);
        let mut ids = HashMap::new();
        for (id, token) in special_tokens(tokenizer) {
            let name = name(id);
            // Not marked special, because this tokenizer encodes special tokens as text.
            renamed.add_tokens([AddedToken { content: name.clone(), special: false, ..token }])?;
            ids.extend(renamed.token_to_id(&name).map(|new| (new, id)));
        }
        let encoder =
            Encoder::unbounded(renamed, vocabulary).map_err(|error| EncodeError::Failed(error.to_string()))?;
        Ok(Self { encoder, ids })
    }
}

fn special_tokens(tokenizer: &Tokenizer) -> impl Iterator<Item = (u32, AddedToken)> {
    let mut special: Vec<_> =
        tokenizer.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special).collect();
    special.sort_unstable_by_key(|(id, _)| *id);
    special.into_iter()
}

/// The name of a special token in the renamed tokenizer.
fn name(id: u32) -> String {
    format!("{}{id}{}", SPECIAL[0], SPECIAL[1])
}

/// The prompt for the renamed tokenizer: special tokens by their new names, literals as text.
fn rename(tokenizer: &Tokenizer, prompt: &str, literals: &Literals) -> String {
    let text = |text: &str| literals.restore(&text.replace(SPECIAL[0], "\u{FFFD}"));
    let split = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), prompt);
    let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    let mut renamed = String::with_capacity(prompt.len());
    let mut end = 0;
    for (_, range, tokens) in split.get_splits(OffsetReferential::Original, OffsetType::Byte) {
        let Some(id) = tokens.as_ref().and_then(|tokens| tokens.first()).map(|token| token.id) else { continue };
        let Some(token) = added.get(&id).filter(|token| token.special) else { continue };
        let found = &prompt[range.0..range.1];
        renamed.push_str(&text(&prompt[end..range.0]));
        // Space around the token may belong to it, and belongs to its new name too.
        let content = token.content.as_str();
        renamed.push_str(&if found.contains(content) { found.replacen(content, &name(id), 1) } else { name(id) });
        end = range.1;
    }
    renamed + &text(&prompt[end..])
}

#[cfg(test)]
mod tests;
