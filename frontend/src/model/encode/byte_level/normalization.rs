//! The normalizer of a tokenizer, which is the library's, and the added tokens that are searched behind it.

use super::Unsupported;
use aho_corasick::AhoCorasick;
use std::borrow::Cow;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, Tokenizer};

/// Normalizes the text between added tokens.
pub(super) struct Normalization {
    /// `None`: the text stays as it is.
    normalizer: Option<NormalizerWrapper>,
    /// It changes no text of [`is_inert`] characters.
    is_nfc: bool,
    /// Added tokens that are searched in normalized text; `None` without such tokens.
    added: Option<AhoCorasick>,
}

impl Normalization {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, Unsupported> {
        let json = serde_json::to_value(tokenizer.get_normalizer()).map_err(|error| Unsupported::broken(&error))?;
        let is_nothing = json.is_null() || json["normalizers"].as_array().is_some_and(Vec::is_empty);
        let normalizer = tokenizer.get_normalizer().filter(|_| !is_nothing).cloned();
        let mut found = Self { normalizer, is_nfc: json["type"] == "NFC", added: None };
        let added = tokenizer.get_added_tokens_decoder().into_values().filter(|token| token.normalized);
        let texts: Option<Vec<String>> = added.map(|token| Some(found.apply(&token.content)?.into_owned())).collect();
        let texts = texts.ok_or_else(|| Unsupported::feature("an added token that cannot be normalized"))?;
        if !texts.is_empty() {
            found.added = Some(AhoCorasick::new(texts).map_err(|error| Unsupported::broken(&error))?);
        }
        Ok(found)
    }

    /// The normalized text; `None` if it has an added token, or the normalizer fails.
    pub(super) fn apply<'a>(&self, text: &'a str) -> Option<Cow<'a, str>> {
        let normalized = match &self.normalizer {
            None => Cow::Borrowed(text),
            Some(_) if self.is_nfc && text.chars().all(is_inert) => Cow::Borrowed(text),
            Some(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                normalizer.normalize(&mut normalized).ok()?;
                Cow::Owned(normalized.get().to_owned())
            }
        };
        self.added.as_ref().is_none_or(|added| !added.is_match(&*normalized)).then_some(normalized)
    }
}

/// Whether NFC changes no text of such characters: they are starters, are their own composition, and compose with no
/// character before them (Unicode Standard Annex 15, section 9). Not all such characters: those of most texts.
pub(super) fn is_inert(c: char) -> bool {
    matches!(c,
        '\0'..='\u{2FF}' | '\u{391}'..='\u{3A1}' | '\u{3A3}'..='\u{3CE}' // Latin, Greek
        | '\u{400}'..='\u{482}' // Cyrillic
        | '\u{5D0}'..='\u{5EA}' | '\u{620}'..='\u{64A}' // Hebrew, Arabic
        | '\u{2010}'..='\u{2027}' | '\u{2030}'..='\u{205E}' | '\u{20A0}'..='\u{20C0}' // punctuation, currencies
        | '\u{2190}'..='\u{2328}' | '\u{2460}'..='\u{2ADB}' // arrows, mathematics, boxes, symbols
        | '\u{3000}'..='\u{3029}' | '\u{3041}'..='\u{3096}' | '\u{30A0}'..='\u{30FF}' // kana
        | '\u{4E00}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7A3}' // Han, Hangul
        | '\u{FF01}'..='\u{FFEE}' | '\u{FFFD}' | '\u{1F300}'..='\u{1F64F}' | '\u{1F680}'..='\u{1F6D7}'
        | '\u{1F900}'..='\u{1F9FF}')
}
