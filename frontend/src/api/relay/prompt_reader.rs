//! What routing reads of a body with a prompt, on the thread where that takes the least time.
//!
//! Of a long conversation only the last turn is tokenized, in less time than a blocking thread takes to wake up and to
//! load the text into the cache of its processor. So a prompt is tokenized on the async thread until the text that is
//! not known reaches a limit, and from there on a blocking thread.

use super::Routing;
use super::prompt::PromptFields;
use crate::error::Error;
use crate::limits::WorkPermit;
use crate::model::{EncodeJob, PromptText, TooMuchNewText};
use crate::params::Fields;
use crate::tokenizers::ModelTokenizers;
use std::sync::Arc;

/// Bytes of new text that are tokenized on the async thread: of a body that is not long either.
const MAX_INLINE_TEXT: usize = 8 << 10;
/// Objects and arrays of a body that is parsed and rendered on the async thread. Most are messages, each of which takes
/// a template some microseconds.
const MAX_INLINE_VALUES: usize = 64;

/// Reads the prompt of a request.
pub(super) struct PromptReader {
    pub(super) path: String,
    pub(super) fields: Fields,
    pub(super) tokenizers: Arc<ModelTokenizers>,
    /// The router knows the blocks of the model's servers by their tokens.
    pub(super) has_exact_blocks: bool,
    pub(super) job: EncodeJob,
}

/// A prompt that was read but for its tokens.
struct ReadPrompt {
    reader: PromptReader,
    prompt: Option<PromptFields>,
    /// The prompt as text, if the local tokenizer knows its tokens.
    text: Option<PromptText>,
}

impl PromptReader {
    /// Reads the prompt and, with a local tokenizer, tokenizes it.
    pub(super) async fn read(self, body: &[u8], permit: &WorkPermit) -> Result<Routing, Error> {
        let is_quick = permit.scans_inline() && has_few_values(body);
        if self.tokenizers.local.is_none() {
            let is_parsed = PromptFields::are_converted(&self.path);
            let read = move || Ok(self.parsed().routing(None));
            return if is_parsed && !is_quick { permit.run(read).await } else { permit.scan(read).await };
        }
        if !is_quick {
            return permit.run(move || Ok(self.parsed().finish())).await;
        }
        let read = self.parsed();
        match read.tokens(MAX_INLINE_TEXT) {
            Ok(tokens) => Ok(read.routing(tokens)),
            Err(TooMuchNewText) => permit.run(move || Ok(read.finish())).await,
        }
    }

    fn parsed(self) -> ReadPrompt {
        let Self { path, fields, tokenizers, .. } = &self;
        let prompt = PromptFields::peek(path, fields, tokenizers);
        let local = prompt.as_ref().zip(tokenizers.local.as_ref());
        let text = local.and_then(|(prompt, local)| prompt.text(fields, local));
        ReadPrompt { reader: self, prompt, text }
    }
}

impl ReadPrompt {
    /// The tokens of the local tokenizer, unless more than `max_new` bytes of the text would have to be tokenized.
    fn tokens(&self, max_new: usize) -> Result<Option<Vec<u32>>, TooMuchNewText> {
        let local = self.text.as_ref().zip(self.reader.tokenizers.local.as_ref());
        local.map_or(Ok(None), |(text, local)| local.tokens(text, max_new, &self.reader.job))
    }

    /// Tokenizes all of the text.
    fn finish(self) -> Routing {
        let tokens = self.tokens(usize::MAX).unwrap_or_default();
        self.routing(tokens)
    }

    fn routing(self, tokens: Option<Vec<u32>>) -> Routing {
        let PromptReader { fields, tokenizers, has_exact_blocks, .. } = self.reader;
        let is_asked = has_exact_blocks && tokens.is_none();
        let tokenize_body = self.prompt.filter(|_| is_asked).and_then(|prompt| prompt.tokenize_body(&tokenizers.id));
        Routing { tokenize_body, ..Routing::read(fields, tokens) }
    }
}

/// Whether a body has few objects and arrays. Those in texts count too.
fn has_few_values(body: &[u8]) -> bool {
    memchr::memchr2_iter(b'{', b'[', body).nth(MAX_INLINE_VALUES).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_up_to_the_limit() {
        let body = |values: usize| format!("[{}]", vec!["{}"; values].join(","));
        assert!(has_few_values(body(MAX_INLINE_VALUES - 1).as_bytes()));
        assert!(!has_few_values(body(MAX_INLINE_VALUES).as_bytes()));
    }
}
