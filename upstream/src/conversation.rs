//! The beginning of a conversation in the body of a request, which all of its turns share.
//!
//! Requests of a conversation that names no session are recognised by it, so that they go to the same deployment.

use serde::Deserialize;
use serde_json::value::RawValue;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Messages that are looked at for the first one of the user. System prompts and examples come before it.
const MAX_MESSAGES: usize = 64;
/// Bytes of a prompt that is plain text.
const MAX_TEXT: usize = 1024;

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    /// Of the Responses API and of embeddings.
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Option<&'a RawValue>,
}

/// A hash of the messages up to the first one of the user, or of the beginning of another prompt. `None` for a body
/// without a prompt. It may differ between releases.
pub fn beginning(body: &[u8]) -> Option<u64> {
    let Body { messages, input, prompt } = serde_json::from_slice(body).ok()?;
    let prompt = messages.or(input).or(prompt)?.get();
    let mut hasher = DefaultHasher::new();
    match serde_json::from_str::<Vec<&RawValue>>(prompt) {
        Ok(messages) => {
            for message in messages.into_iter().take(MAX_MESSAGES) {
                message.get().hash(&mut hasher);
                let role = serde_json::from_str::<Message<'_>>(message.get()).ok().and_then(|message| message.role);
                if role.is_some_and(|role| role.get() == r#""user""#) {
                    break;
                }
            }
        }
        Err(_) => prompt.as_bytes()[..prompt.len().min(MAX_TEXT)].hash(&mut hasher),
    }
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(messages: &[(&str, &str)]) -> Option<u64> {
        let message = |(role, content): &(&str, &str)| serde_json::json!({ "role": role, "content": content });
        let body = serde_json::json!({ "model": "m", "messages": messages.iter().map(message).collect::<Vec<_>>() });
        beginning(body.to_string().as_bytes())
    }

    #[test]
    fn turns_of_a_conversation_begin_alike() {
        let first = chat(&[("system", "s"), ("user", "a")]);
        assert!(first.is_some());
        assert_eq!(first, chat(&[("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]));
        assert_ne!(first, chat(&[("system", "s"), ("user", "b")]), "another conversation");
        assert_ne!(first, chat(&[("system", "t"), ("user", "a")]));
    }

    #[test]
    fn other_prompts_begin_with_their_text() {
        let of = |body: &str| beginning(body.as_bytes());
        let long = "x".repeat(2000);
        assert_eq!(of(&format!(r#"{{"prompt":"{long}a"}}"#)), of(&format!(r#"{{"prompt":"{long}b"}}"#)));
        assert_ne!(of(r#"{"prompt":"a"}"#), of(r#"{"prompt":"b"}"#));
        assert_ne!(of(r#"{"input":[{"role":"user","content":"a"}]}"#), of(r#"{"input":"a"}"#));
        for without in ["", "[]", "{}", r#"{"model":"m"}"#, "--boundary"] {
            assert_eq!(of(without), None);
        }
    }
}
