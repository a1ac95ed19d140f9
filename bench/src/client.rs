//! A client that times a streamed completion, from sending the request to reading the first token.

use crate::metrics::Scrape;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};
use ureq::Agent;

/// The limit of one request: longer than any prompt of a benchmark takes.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(10);

/// A client of one server.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    url: String,
}

/// One completion: its time and its token counts.
#[derive(Clone, Debug)]
pub struct Answer {
    /// From sending the request to the first token's text.
    pub first_token: Duration,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens that came from a cache.
    pub cached_tokens: u64,
    /// The text.
    pub text: String,
    /// The router's explanation of its decision, if the response has one.
    pub explain: Option<Value>,
}

impl Client {
    /// A client of the server at `http://host:port`.
    pub fn new(url: &str) -> Self {
        let config = Agent::config_builder().timeout_global(Some(REQUEST_TIMEOUT)).http_status_as_error(false).build();
        Self { agent: config.into(), url: url.to_owned() }
    }

    /// Sends a GET: status and body.
    pub fn get(&self, path: &str) -> Result<(u16, String)> {
        let mut response = self.agent.get(format!("{}{path}", self.url)).call()?;
        Ok((response.status().as_u16(), response.body_mut().read_to_string()?))
    }

    /// The id of the served model.
    pub fn model(&self) -> Result<String> {
        let (_, body) = self.get("/v1/models")?;
        let models: Value = serde_json::from_str(&body)?;
        models["data"][0]["id"].as_str().map(str::to_owned).with_context(|| format!("no model in {body}"))
    }

    /// All metrics now.
    pub fn metrics(&self) -> Result<Scrape> {
        Ok(Scrape::parse(&self.get("/metrics")?.1))
    }

    /// Streams a greedy completion of exactly `max_tokens` tokens.
    pub fn complete(&self, model: &str, prompt: &[u32], max_tokens: u32) -> Result<Answer> {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true},
        });
        let body = body.to_string();
        let sent = Instant::now();
        let request = self.agent.post(format!("{}/v1/completions", self.url));
        let request = request.header("content-type", "application/json").header("x-blockyard-explain", "1");
        let mut response = request.send(&body)?;
        if response.status() != 200 {
            bail!("{}: {}", response.status(), response.body_mut().read_to_string()?);
        }
        let explain = response.headers().get("x-blockyard-explain").and_then(|value| value.to_str().ok());
        let explain = explain.and_then(|line| serde_json::from_str(line).ok());
        read(sent, response.into_body().into_reader(), explain)
    }
}

/// Reads the stream of one completion.
fn read(sent: Instant, stream: impl std::io::Read, explain: Option<Value>) -> Result<Answer> {
    let mut first_token = None;
    let mut usage = Value::Null;
    let mut text = String::new();
    for line in BufReader::new(stream).lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
        if data == "[DONE]" {
            break;
        }
        let arrived = sent.elapsed();
        let event: Value = serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?;
        ensure!(event["error"].is_null(), "the stream failed: {data}");
        if let Some(choice) = event["choices"].get(0) {
            first_token.get_or_insert(arrived);
            text.push_str(choice["text"].as_str().unwrap_or_default());
        }
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    Ok(Answer {
        first_token: first_token.context("the stream had no token")?,
        prompt_tokens: usage["prompt_tokens"].as_u64().context("the stream had no usage")?,
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().context("no cached_tokens in usage")?,
        text,
        explain,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\
                        x-blockyard-explain: {\"worker\":1}\r\n\r\n";
    const EVENTS: [&str; 3] = [
        "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n\
         data: [DONE]\n\n",
    ];
    const PAUSE: Duration = Duration::from_millis(300);

    /// Answers one request, with a pause after each event.
    fn serve(listener: &TcpListener) {
        let (mut socket, _) = listener.accept().expect("a client");
        let mut request = [0; 4096];
        let _ = socket.read(&mut request).expect("a request");
        socket.write_all(HEAD.as_bytes()).expect("the client reads");
        for event in EVENTS {
            let chunk = format!("{:x}\r\n{event}\r\n", event.len());
            socket.write_all(chunk.as_bytes()).expect("the client reads");
            thread::sleep(PAUSE);
        }
        socket.write_all(b"0\r\n\r\n").expect("the client reads");
    }

    #[test]
    fn the_first_token_is_timed_before_the_stream_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = Client::new(&format!("http://{}", listener.local_addr().expect("an address")));
        let server = thread::spawn(move || serve(&listener));
        let answer = client.complete("tiny", &[1, 2, 3], 2).expect("an answer");
        server.join().expect("the server served");
        assert_eq!((answer.prompt_tokens, answer.cached_tokens, answer.text.as_str()), (3, 2, "ab"));
        assert_eq!(answer.explain, Some(json!({"worker": 1})));
        // Holds on any machine: a client that reads the whole stream first waits for all pauses.
        assert!(answer.first_token < 2 * PAUSE);
    }
}
