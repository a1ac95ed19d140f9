//! A greedy model with one output, streamed byte for byte as vLLM 0.32 streams it.

use super::{Recorded, Script};
use serde_json::Value;

/// A model that answers every prompt alike. A prompt of token ids may have the first tokens of the output at its end,
/// which the answer then continues.
#[derive(Clone, Debug)]
pub struct Greedy {
    /// Makes the ids of the responses different from those of other servers.
    pub name: &'static str,
    /// The tokens of every prompt that is text.
    pub prompt: Vec<u32>,
    /// The tokens of the output, each with the text that the detokenizer sends for it.
    pub output: Vec<(u32, &'static str)>,
    /// Tokens in a chunk.
    pub tokens_per_chunk: usize,
}

impl Greedy {
    /// The answer to a request.
    pub fn answer(&self, request: &Recorded) -> Script {
        let body = serde_json::from_slice(&request.body).expect("the body is JSON");
        self.stream(request.uri.path(), &body)
    }

    /// The answer to a request with this body at the endpoint of chat or of completions.
    pub fn stream(&self, path: &str, body: &Value) -> Script {
        let is_chat = path.starts_with("/v1/chat");
        let ids = |ids: &[u32]| match body["return_token_ids"] {
            Value::Bool(true) => serde_json::to_string(ids).expect("numbers are JSON"),
            _ => "null".to_owned(),
        };
        let prompt: Option<Vec<u32>> = serde_json::from_value(body["prompt"].clone()).ok();
        let prompt = prompt.unwrap_or_else(|| self.prompt.clone());
        let done = prompt.strip_prefix(&self.prompt[..]).expect("the prompt of this model").len();
        let output: Vec<u32> = self.output.iter().map(|(id, _)| *id).collect();
        assert_eq!(prompt[self.prompt.len()..], output[..done], "no other tokens than those of this model");
        let limit = ["max_completion_tokens", "max_tokens"].into_iter().find_map(|name| body[name].as_u64());
        let left = limit.map_or(self.output.len() - done, |limit| limit as usize).min(self.output.len() - done);
        let last = done + left;
        let mut payloads = Vec::new();
        if is_chat {
            let role = r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}"#;
            let prompt_ids = format!(r#","prompt_token_ids":{},"prompt_text":null"#, ids(&prompt));
            payloads.push(self.chunk(is_chat, role, &prompt_ids));
        }
        for (at, tokens) in self.output[done..last].chunks(self.tokens_per_chunk).enumerate() {
            let text: String = tokens.iter().map(|(_, text)| *text).collect();
            let text = serde_json::to_string(&text).expect("a string is JSON");
            let tokens: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
            let is_last = (at + 1) * self.tokens_per_chunk >= left;
            let finish = match (is_last, last == self.output.len()) {
                (false, _) => "null",
                (true, true) => r#""stop""#,
                (true, false) => r#""length""#,
            };
            let prompt_ids = if at == 0 { ids(&prompt) } else { "null".to_owned() };
            let choice = if is_chat {
                let stop = if is_last { r#","stop_reason":null"# } else { "" };
                let start = format!(r#""index":0,"delta":{{"content":{text}}},"logprobs":null"#);
                format!(r#"{{{start},"finish_reason":{finish}{stop},"token_ids":{}}}"#, ids(&tokens))
            } else {
                let start = format!(r#""index":0,"text":{text},"logprobs":null,"finish_reason":{finish}"#);
                let ids = ids(&tokens);
                format!(r#"{{{start},"stop_reason":null,"prompt_token_ids":{prompt_ids},"token_ids":{ids}}}"#)
            };
            payloads.push(self.chunk(is_chat, &choice, ""));
        }
        if body["stream_options"]["include_usage"] == true {
            let (prompt, total) = (prompt.len(), prompt.len() + left);
            let usage = format!(r#""prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{left}"#);
            payloads.push(self.chunk(is_chat, "", &format!(r#","usage":{{{usage}}}"#)));
        }
        payloads.push("[DONE]".to_owned());
        Script::events(payloads.into_iter().map(|payload| format!("data: {payload}\n\n")))
    }

    fn chunk(&self, is_chat: bool, choices: &str, more: &str) -> String {
        let (prefix, object) =
            if is_chat { ("chatcmpl", "chat.completion.chunk") } else { ("cmpl", "text_completion") };
        let created = 1_760_000_000 + self.name.len();
        let start = format!(r#""id":"{prefix}-{}","object":"{object}","created":{created}"#, self.name);
        format!(r#"{{{start},"model":"org/m","choices":[{choices}]{more}}}"#)
    }
}
