//! An engine that computes nothing: OpenAI's API as vLLM serves it, a prefix cache of hashes, and KV events.
//!
//! Prompts have the tokens of [`Tokenizer`]. Every token of a stream is one event, one chunk of HTTP and one write, as
//! a step of an engine is.

use super::http::{Framing, Head};
use super::tokenizer::Tokenizer;
use super::zmq::{Publisher, Stored};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until};

/// Name of the model.
pub const MODEL: &str = "mock";
/// Tokens of a prompt and its answer.
const MAX_MODEL_LEN: usize = 1 << 20;
/// Tokens per block.
const BLOCK: usize = 16;
/// Maximum size of a request.
const MAX_REQUEST: usize = 16 << 20;
/// Blocks that the cache has. When it is full it is emptied, without events: no run gets there.
const MAX_BLOCKS: usize = 1 << 24;

/// One engine.
pub struct Engine {
    /// Shared by all engines: microseconds between two tokens.
    interval_us: Arc<AtomicU64>,
    tokenizer: Tokenizer,
    cache: Mutex<Cache>,
    publisher: Option<(u16, Publisher)>,
}

#[derive(Default)]
struct Cache {
    blocks: HashSet<u64>,
    batches: u64,
}

impl Engine {
    /// An engine that publishes its KV events at a port, if one is given.
    pub async fn new(interval_us: Arc<AtomicU64>, events: Option<u16>) -> Result<Self> {
        let publisher = match events {
            Some(port) => Some((port, Publisher::bind(port).await?)),
            None => None,
        };
        Ok(Self { interval_us, tokenizer: Tokenizer::default(), cache: Mutex::default(), publisher })
    }

    /// Serves connections for ever.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) -> Result<()> {
        loop {
            let (socket, _) = listener.accept().await?;
            socket.set_nodelay(true)?;
            let engine = Arc::clone(&self);
            // Its end, with or without an error, is that of the connection.
            tokio::spawn(async move { engine.connection(socket).await });
        }
    }

    async fn connection(&self, mut socket: TcpStream) -> Result<()> {
        let mut buffer = Vec::with_capacity(16 << 10);
        loop {
            let head = loop {
                match Head::read(&buffer)? {
                    Some(head) => break head,
                    None if socket.read_buf(&mut buffer).await? == 0 => return Ok(()),
                    None => {}
                }
            };
            let length = match head.framing {
                Framing::Length(length) => length,
                Framing::None => 0,
                Framing::Chunked(_) => anyhow::bail!("a request without a length"),
            };
            ensure!(length <= MAX_REQUEST, "a request of {length} bytes");
            while buffer.len() < head.length + length {
                ensure!(socket.read_buf(&mut buffer).await? > 0, "the request broke off");
            }
            let path = head.first_line.get(1).context("no path")?;
            self.answer(&mut socket, path, &buffer[head.length..head.length + length]).await?;
            buffer.drain(..head.length + length);
        }
    }

    async fn answer(&self, socket: &mut TcpStream, target: &str, body: &[u8]) -> Result<()> {
        let path = target.split('?').next().unwrap_or_default();
        let answer = match path {
            "/v1/chat/completions" | "/v1/completions" => return self.generate(socket, path, body).await,
            "/tokenize" => {
                let tokens = self.tokens(&serde_json::from_slice(body)?);
                json!({ "count": tokens.len(), "max_model_len": MAX_MODEL_LEN, "tokens": tokens })
            }
            "/v1/models" => {
                let model =
                    json!({ "id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN });
                json!({ "object": "list", "data": [model] })
            }
            "/kv_event_sources" => match &self.publisher {
                Some((port, _)) => {
                    json!({ "0": { "enable_kv_cache_events": true, "endpoint": format!("tcp://127.0.0.1:{port}") } })
                }
                None => json!({}),
            },
            "/metrics" => {
                let text = format!("vllm:cache_config_info{{block_size=\"{BLOCK}\"}} 1.0\n");
                return whole(socket, 200, "text/plain", &text).await;
            }
            "/interval" => {
                let interval = target.split_once("us=").and_then(|(_, us)| us.parse().ok());
                self.interval_us.store(interval.context("no us=")?, Ordering::Relaxed);
                json!({})
            }
            "/health" => json!({}),
            "/version" => json!({ "version": "0.32.0" }),
            _ => return whole(socket, 404, "application/json", "{}").await,
        };
        whole(socket, 200, "application/json", &answer.to_string()).await
    }

    async fn generate(&self, socket: &mut TcpStream, path: &str, body: &[u8]) -> Result<()> {
        let request: Value = serde_json::from_slice(body)?;
        let prompt = self.tokens(&request);
        let cached = self.cached(&prompt);
        let count = ["max_tokens", "max_completion_tokens"].iter().find_map(|key| request[key].as_u64()).unwrap_or(16);
        let usage = json!({
            "prompt_tokens": prompt.len(), "completion_tokens": count, "total_tokens": prompt.len() as u64 + count,
            "prompt_tokens_details": { "cached_tokens": cached },
        });
        let interval = Duration::from_micros(self.interval_us.load(Ordering::Relaxed));
        let is_chat = path == "/v1/chat/completions";
        if request["stream"] != true {
            sleep(interval * count as u32).await;
            let text = " token".repeat(count as usize);
            let choice = if is_chat {
                json!({ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": "length" })
            } else {
                json!({ "index": 0, "text": text, "finish_reason": "length" })
            };
            let object = if is_chat { "chat.completion" } else { "text_completion" };
            let answer = json!({
                "id": "mock-1", "object": object, "created": 1_700_000_000, "model": MODEL, "choices": [choice],
                "usage": usage,
            });
            return whole(socket, 200, "application/json", &answer.to_string()).await;
        }
        let object = if is_chat { "chat.completion.chunk" } else { "text_completion" };
        let chunk = |choices: &Value, usage: Option<&Value>| {
            let mut chunk = json!({
                "id": "mock-1", "object": object, "created": 1_700_000_000, "model": MODEL, "choices": choices,
            });
            if let Some(usage) = usage {
                chunk["usage"] = usage.clone();
            }
            event(&chunk.to_string())
        };
        let choice = |text: &str, finish: Option<&str>| {
            if is_chat {
                json!([{ "index": 0, "delta": { "content": text }, "logprobs": null, "finish_reason": finish }])
            } else {
                json!([{ "index": 0, "text": text, "logprobs": null, "finish_reason": finish }])
            }
        };
        socket
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            .await?;
        let token = chunk(&choice(" token", None), None);
        let mut next = Instant::now() + interval;
        for _ in 0..count {
            if interval.is_zero() {
                yield_now().await;
            } else {
                sleep_until(next).await;
                // A late token is not caught up with, so that none come in a burst.
                next = (next + interval).max(Instant::now());
            }
            socket.write_all(&token).await?;
        }
        let mut last = chunk(&choice("", Some("length")), None);
        if request["stream_options"]["include_usage"] == true {
            last.extend(chunk(&json!([]), Some(&usage)));
        }
        last.extend(event("[DONE]"));
        last.extend(b"0\r\n\r\n");
        Ok(socket.write_all(&last).await?)
    }

    fn tokens(&self, request: &Value) -> Vec<u32> {
        self.tokenizer.encode(&prompt(request))
    }

    /// The cached tokens of a prompt, whose other blocks are stored and announced.
    fn cached(&self, prompt: &[u32]) -> usize {
        let mut hash = 0;
        let hashes: Vec<u64> = prompt
            .chunks_exact(BLOCK)
            .map(|block| {
                let mut hasher = DefaultHasher::new();
                (hash, block).hash(&mut hasher);
                hash = hasher.finish();
                hash
            })
            .collect();
        let cache = &mut *self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let known = hashes.iter().take_while(|hash| cache.blocks.contains(hash)).count();
        if known < hashes.len() {
            if cache.blocks.len() > MAX_BLOCKS {
                cache.blocks.clear();
            }
            cache.blocks.extend(&hashes[known..]);
            if let Some((_, publisher)) = &self.publisher {
                let parent = known.checked_sub(1).map(|last| hashes[last]);
                let tokens = &prompt[known * BLOCK..hashes.len() * BLOCK];
                let stored = Stored { hashes: &hashes[known..], parent, tokens, block_size: BLOCK as u32 };
                publisher.publish(cache.batches, &stored);
                cache.batches += 1;
            }
        }
        // The last token is computed in any case.
        known.min(prompt.len().saturating_sub(1) / BLOCK) * BLOCK
    }
}

/// The prompt, or the texts of the messages one after the other, as the chat template of the tokenizer has them.
fn prompt(request: &Value) -> String {
    let content = |message: &Value| match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"),
        _ => String::new(),
    };
    match request["messages"].as_array() {
        Some(messages) => messages.iter().map(content).collect(),
        None => request["prompt"].as_str().unwrap_or_default().to_owned(),
    }
}

/// An event of a stream as one chunk of HTTP.
fn event(data: &str) -> Vec<u8> {
    let event = format!("data: {data}\n\n");
    format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
}

async fn whole(socket: &mut TcpStream, status: u16, kind: &str, body: &str) -> Result<()> {
    let reason = if status == 200 { "OK" } else { "Not Found" };
    let length = body.len();
    let answer =
        format!("HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}");
    Ok(socket.write_all(answer.as_bytes()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_repeated_prompt_is_cached_up_to_its_last_token() {
        let engine = Engine::new(Arc::default(), None).await.unwrap();
        let prompt: Vec<u32> = (0..40).collect();
        assert_eq!([0; 2].map(|_| engine.cached(&prompt)), [0, 32]);
        assert_eq!(engine.cached(&prompt[..32]), 16, "the last token is computed");
    }

    #[test]
    fn a_prompt_is_the_text_of_its_messages() {
        let parts = json!([{ "type": "text", "text": "b" }, { "type": "text", "text": "c" }]);
        let request = json!({ "messages": [{ "content": "a" }, { "content": parts }, { "content": null }] });
        assert_eq!(prompt(&request), "ab\nc");
        assert_eq!(prompt(&json!({ "prompt": "d" })), "d");
    }

    /// A client of vLLM takes an answer without `count` for that of another program.
    #[tokio::test]
    async fn tokens_are_answered_with_their_number() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/tokenize", listener.local_addr().unwrap());
        tokio::spawn(Arc::new(Engine::new(Arc::default(), None).await.unwrap()).serve(listener));
        let ask = move || ureq::post(url).send(r#"{"prompt":"A block"}"#).unwrap().body_mut().read_to_string();
        let answer: Value = serde_json::from_str(&tokio::task::spawn_blocking(ask).await.unwrap().unwrap()).unwrap();
        assert_eq!((&answer["count"], answer["tokens"].as_array().unwrap().len()), (&json!(2), 2));
    }
}
