//! The prompts of a completion: a string, strings, tokens, or arrays of tokens.
//!
//! Prompts are read one by one from the body's text: a million token ids as JSON values would take a hundred megabytes.

use crate::error::Error;
use crate::model::{EncodeJob, ServedModel};
use crate::params::{CHOICES_MAX, Fields, Raw, empty, integer, known_fields, mistyped_as, too_long};
use std::sync::Arc;

const EXPECTED: &str = "a string, an array of strings, an array of tokens or an array of such arrays";

/// Takes `prompt` and returns each prompt as tokens.
pub(super) fn take(fields: &mut Fields, model: &ServedModel, job: &EncodeJob) -> Result<Vec<Arc<[u32]>>, Error> {
    let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let Some(prompt) = fields.raw("prompt") else { return Err(known_fields::missing(fields, "prompt")) };
    let reader = Reader { model, special, job };
    if prompt.is_string() {
        return Ok(vec![reader.text("prompt", &prompt)?]);
    }
    if !prompt.is_array() {
        return Err(mistyped_as("prompt", EXPECTED, prompt.kind()));
    }
    let (mut count, mut numbers) = (0, false);
    prompt.elements(|element| {
        numbers |= count == 0 && element.is_number();
        count += 1;
        Ok(())
    })?;
    if count == 0 {
        return Err(empty("prompt"));
    }
    if numbers {
        return Ok(vec![reader.tokens("prompt", &prompt)?]);
    }
    if count > CHOICES_MAX as usize {
        return Err(too_long("prompt", CHOICES_MAX as usize, count));
    }
    let mut prompts = Vec::with_capacity(count);
    prompt.elements(|element| {
        let path = format!("prompt[{}]", prompts.len());
        prompts.push(if element.is_string() {
            reader.text(&path, &element)?
        } else if element.is_array() {
            reader.tokens(&path, &element)?
        } else {
            return Err(mistyped_as(&path, "a string or an array of tokens", element.kind()));
        });
        Ok(())
    })?;
    Ok(prompts)
}

/// Reads one prompt.
struct Reader<'a> {
    model: &'a ServedModel,
    special: bool,
    job: &'a EncodeJob,
}

impl Reader<'_> {
    fn text(&self, path: &str, prompt: &Raw) -> Result<Arc<[u32]>, Error> {
        self.model.encode("prompt", &prompt.text(path)?, self.special, self.job).map(Arc::from)
    }

    /// An array of token ids of the vocabulary.
    fn tokens(&self, path: &str, prompt: &Raw) -> Result<Arc<[u32]>, Error> {
        let last = i64::try_from(self.model.card.vocabulary).unwrap_or(i64::MAX) - 1;
        let mut ids = Vec::new();
        prompt.elements(|element| {
            let path = || format!("{path}[{}]", ids.len());
            let id = match element.small() {
                Some(id) if id <= last => id,
                _ if element.is_number() => {
                    let path = path();
                    integer(&path, &element.number(&path)?, 0..=last)?
                }
                _ => return Err(mistyped_as(&path(), "an integer", element.kind())),
            };
            ids.push(id as u32);
            Ok(())
        })?;
        Ok(ids.into())
    }
}
