//! What routing reads of a relayed request.
//!
//! The tokens of a prompt without a local tokenizer are estimated from its JSON text. Prompts whose text begins alike
//! have estimates that begin alike, which is what the router needs to find a cached prefix. The estimate is of no use
//! against the KV events of an engine, whose tokens are real (`ModelCard::has_exact_blocks`). A prompt of token ids is
//! no estimate: it is what the engine computes.

use super::{CHOICES_MAX, Fields, Routing, TokenSource, scheduling};
use crate::output::BYTES_PER_TOKEN;
use memchr::memmem::Finder;
use memchr::memrchr;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, LazyLock};
use worker::engine::RequestAttributes;

/// Tokens of a file within a prompt, such as an image. Vision models make some hundreds to some thousands of one.
const FILE_TOKENS: usize = 1024;
/// What is between the media type and the bytes of a file in a `data:` URL (RFC 2397).
static FILE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b";base64,"));
/// Members whose value is the URL of a file. Of others, such as `text`, the model reads the value as it is.
const URLS: [&[u8]; 6] = [b"url", b"image_url", b"audio_url", b"video_url", b"file_data", b"image"];
/// Maximum length of the scheme, the media type and its parameters of a `data:` URL, with the quote before them.
const MAX_MEDIA_TYPE: usize = 128;

/// Fields that come before the prompt proper in what an engine renders. Requests of one application share them.
const BEFORE_PROMPT: [&str; 5] = ["system", "instructions", "tools", "functions", "documents"];
/// Fields with the prompt, of all endpoints.
const PROMPT: [&str; 11] =
    ["messages", "prompt", "input", "inputs", "input_ids", "token_ids", "query", "text_1", "text", "text_2", "texts"];
/// Those of them that may be one array of token ids.
const TOKEN_IDS: [&str; 4] = ["prompt", "input", "input_ids", "token_ids"];
/// Fields beside token ids with which blocks are not known by these alone: files (of vLLM in `features`), adapters, the
/// earlier part of a session.
const BESIDE_TOKEN_IDS: [&str; 6] =
    ["features", "image_data", "video_data", "audio_data", "lora_path", "session_params"];
/// Fields with the limit of output tokens.
const MAX_TOKENS: [&str; 3] = ["max_completion_tokens", "max_tokens", "max_output_tokens"];

impl Routing {
    /// Reads the fields of a body. What has an unexpected type counts as absent. `tokens`: those of the prompt, if they
    /// are known.
    pub(super) fn read(mut fields: Fields, tokens: Option<Vec<u32>>) -> Self {
        let fields = &mut fields;
        // First, so that no other field uses up the number of values that are read.
        let is_stream = fields.value("stream").ok().flatten().is_some_and(|stream| is_lax_true(&stream));
        let outputs = outputs(fields);
        let (tokens, source) = if let Some(tokens) = tokens {
            (tokens.into(), TokenSource::Local)
        } else if let Some(tokens) = token_ids(fields) {
            (tokens, TokenSource::Client)
        } else {
            (estimated_tokens(fields), TokenSource::Estimate)
        };
        let value = |fields: &mut Fields, name| fields.value(name).ok().flatten();
        let count = |fields: &mut Fields, name| value(fields, name).as_ref().and_then(lax_count);
        let options = value(fields, "stream_options");
        Self {
            tokens,
            source,
            tokenize_body: None,
            is_stream,
            wants_usage: options.is_some_and(|options| options.get("include_usage").is_some_and(is_lax_true)),
            choices: outputs.clamp(1, CHOICES_MAX) as u32,
            outputs: outputs as usize,
            max_tokens: MAX_TOKENS.iter().find_map(|name| count(fields, name)).map(|max| max as u32),
            deadline: scheduling::take_deadline(fields).ok().flatten(),
            attributes: RequestAttributes {
                priority: scheduling::take_priority(fields).unwrap_or_default(),
                ..RequestAttributes::default()
            },
            salts: salts(fields),
        }
    }
}

/// The salts of the cache domain. SGLang's `extra_key` is one too, for a batch a list. The engine's adapter removes it.
fn salts(fields: &mut Fields) -> Vec<String> {
    let salt = fields.text("cache_salt").ok().flatten();
    let key = fields.raw("extra_key").filter(|key| key.bytes() != br#""""#);
    // The name of the field is part of the salt, so that equal values of the two fields differ.
    let key = key.map(|key| format!("extra_key={}", String::from_utf8_lossy(key.bytes())));
    salt.into_iter().chain(key).collect()
}

/// The number of outputs of a request: prompts times choices, at least one.
fn outputs(fields: &mut Fields) -> i64 {
    let within = |params: &Value| lax_count(params.get("n")?);
    // SGLang's `/generate` has them within the parameters of sampling, of which a batch may have a list. It refuses a
    // list whose items differ in `n`.
    let (within, parameters) = match fields.value("sampling_params") {
        Ok(Some(Value::Array(list))) => (list.iter().filter_map(within).max(), list.len() as i64),
        Ok(params) => (params.as_ref().and_then(within), 1),
        // More values than are read: it may be any number.
        Err(_) => (Some(u32::MAX.into()), 1),
    };
    let choices = fields.value("n").ok().flatten().as_ref().and_then(lax_count).max(within).unwrap_or(1);
    choices.saturating_mul(prompts(fields).max(parameters)).max(1)
}

/// The number of prompts. An array may be one prompt of token ids or of embeddings, or several prompts; several
/// conversations are an array of arrays. Other fields with a list, such as `image_data`, belong to these prompts.
fn prompts(fields: &Fields) -> i64 {
    /// How an array of several prompts begins, without white space.
    const SEVERAL: [(&str, &[&[u8]]); 5] = [
        ("messages", &[b"[["]),
        ("text", &[b"["]),
        ("input_ids", &[b"[["]),
        ("input_embeds", &[b"[[["]),
        // Of vLLM's `/generative_scoring`.
        ("items", &[b"[\"", b"[["]),
    ];
    let count = |name: &str, several: &[&[u8]]| {
        let Some(value) = fields.peek(name).filter(|value| !value.is_null()) else { return 0 };
        let value = value.bytes();
        let begins: Vec<u8> = value.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).take(3).collect();
        if !several.iter().any(|array| begins.starts_with(array)) {
            return 1;
        }
        serde_json::from_slice(value).map_or(1, |prompts: Vec<IgnoredAny>| prompts.len() as i64)
    };
    // vLLM computes both.
    let completion = count("prompt", &[b"[\"", b"[["]) + count("prompt_embeds", &[b"["]);
    SEVERAL.iter().map(|(name, several)| count(name, several)).fold(completion, i64::max)
}

/// Whether a value is true for pydantic, with which servers read requests.
fn is_lax_true(value: &Value) -> bool {
    match value {
        Value::Bool(is_true) => *is_true,
        Value::Number(number) => number.as_f64() == Some(1.0),
        Value::String(text) => ["1", "true", "t", "yes", "y", "on"].iter().any(|word| text.eq_ignore_ascii_case(word)),
        _ => false,
    }
}

/// A number of something, also in a string, as pydantic reads it; at most the largest number of 32 bits.
fn lax_count(value: &Value) -> Option<i64> {
    let number = match value {
        Value::Bool(one) => f64::from(u8::from(*one)),
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => text.trim().replace('_', "").parse().ok()?,
        _ => return None,
    };
    (number.fract() == 0.0 && number >= 0.0).then(|| number.min(u32::MAX.into()) as i64)
}

/// The prompt, if it is one array of token ids, also as the only one of several. With further prompts in other fields,
/// it is for the engine to say which of them it reads.
fn token_ids(fields: &Fields) -> Option<Arc<[u32]>> {
    let mut prompts = PROMPT.iter().filter_map(|name| Some((name, fields.peek(name).filter(|raw| !raw.is_null())?)));
    let (name, prompt) = prompts.next()?;
    if prompts.next().is_some() || !TOKEN_IDS.contains(name) || !prompt.is_array() {
        return None;
    }
    if BESIDE_TOKEN_IDS.iter().any(|name| fields.peek(name).is_some_and(|raw| !raw.is_null())) {
        return None;
    }
    let prompt = prompt.bytes();
    let ids: Option<Vec<u32>> = serde_json::from_slice(prompt).ok();
    ids.or_else(|| serde_json::from_slice(prompt).ok().map(|[ids]: [Vec<u32>; 1]| ids)).map(Arc::from)
}

/// One number for each [`BYTES_PER_TOKEN`] bytes of the prompt's text, the bytes themselves.
fn estimated_tokens(fields: &mut Fields) -> Arc<[u32]> {
    let fields_of = |names: &'static [&'static str], is_prompt| names.iter().map(move |name| (name, is_prompt));
    let named = fields_of(&BEFORE_PROMPT, false).chain(fields_of(&PROMPT, true));
    let mut parts = named.filter_map(|(name, is_prompt)| Some((fields.raw(name)?, is_prompt)));
    let (Some(first), second) = (parts.next(), parts.next()) else { return Arc::default() };
    // Most prompts are one field without a file, which is not copied.
    if let ((prompt, true), None) = (&first, &second)
        && FILE.find(prompt.bytes()).is_none()
    {
        return tokens_of(prompt.bytes());
    }
    let mut text = Vec::new();
    for (raw, is_prompt) in [first].into_iter().chain(second).chain(parts) {
        if is_prompt {
            push_text(raw.bytes(), &mut text);
        } else {
            // Templates write the URLs in tools and documents as they are.
            text.extend_from_slice(raw.bytes());
        }
    }
    tokens_of(&text)
}

/// The bytes of a text as numbers. The last one is filled with zeros.
fn tokens_of(text: &[u8]) -> Arc<[u32]> {
    let (whole, rest) = text.as_chunks::<BYTES_PER_TOKEN>();
    let mut last = [0; BYTES_PER_TOKEN];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    whole.iter().copied().chain(last).map(u32::from_le_bytes).collect()
}

/// Adds JSON text, with [`FILE_TOKENS`] for each file in it, which are the same for the same file.
fn push_text(mut text: &[u8], to: &mut Vec<u8>) {
    const FILE_BYTES: usize = FILE_TOKENS * BYTES_PER_TOKEN;
    while let Some(at) = FILE.find(text) {
        let start = at + FILE.needle().len();
        let end = if begins_file(&text[..at]) { start + base64_bytes(&text[start..]) } else { start };
        let file = &text[start..end];
        to.extend_from_slice(&text[..start]);
        if file.len() > FILE_BYTES {
            let mut hasher = DefaultHasher::new();
            file.hash(&mut hasher);
            to.extend_from_slice(&hasher.finish().to_le_bytes().repeat(FILE_BYTES / size_of::<u64>()));
        } else {
            to.extend_from_slice(file);
        }
        text = &text[end..];
    }
    to.extend_from_slice(text);
}

/// Whether JSON text ends with the beginning of a `data:` URL, up to its media type, that is the URL of a file.
fn begins_file(text: &[u8]) -> bool {
    let from = text.len().saturating_sub(MAX_MEDIA_TYPE);
    let Some(quote) = memrchr(b'"', &text[from..]).map(|at| from + at) else { return false };
    let is_media_type = |text: &[u8]| text.contains(&b'/') && text.iter().all(u8::is_ascii_graphic);
    if !text[quote + 1..].strip_prefix(b"data:").is_some_and(is_media_type) {
        return false;
    }
    let name = text[..quote].trim_ascii_end().strip_suffix(b":").map(<[u8]>::trim_ascii_end);
    let Some(name) = name.and_then(|name| name.strip_suffix(b"\"")) else { return false };
    URLS.iter().any(|url| name.strip_suffix(*url).is_some_and(|before| before.ends_with(b"\"")))
}

/// The number of bytes of base64 that a text begins with. In JSON a slash may have an escape.
fn base64_bytes(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'+' | b'/' | b'-' | b'_' | b'=' => at += 1,
            b'\\' if text.get(at + 1) == Some(&b'/') => at += 2,
            _ => break,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use worker::engine::Priority;

    fn read(body: &str) -> Routing {
        Routing::read(Fields::parse(&body.to_owned().into()).unwrap(), None)
    }

    #[test]
    fn conversations_that_begin_alike_have_estimates_that_do() {
        let first = read(r#"{"messages":[{"role":"user","content":"What is a block of the KV cache?"}]}"#).tokens;
        let second = read(
            r#"{"stream":true,"messages":[{"role":"user","content":"What is a block of the KV cache?"},
            {"role":"assistant","content":"Sixteen tokens."}],"tools":[]}"#,
        );
        assert!(second.is_stream);
        let tools = read(r#"{"tools":[{"x":1}],"messages":[{"role":"user","content":"What is a block"}]}"#).tokens;
        assert_eq!(first.len(), 16, "62 bytes of JSON");
        assert_ne!(first[..2], tools[..2], "tools come before the messages");
        let without_tools = read(
            r#"{"messages":[{"role":"user","content":"What is a block of the KV cache?"},
            {"role":"assistant","content":"Sixteen tokens."}]}"#,
        );
        assert_eq!(first[..15], without_tools.tokens[..15], "all but the end of the array");
    }

    #[test]
    fn the_texts_of_coheres_embeddings_count_as_a_prompt() {
        assert_eq!(read(r#"{"model":"m","texts":["one text","and more"]}"#).tokens.len(), 6, "23 bytes of JSON");
    }

    #[test]
    fn a_file_counts_as_some_tokens_and_is_recognised() {
        let image = |pixel: &str| {
            let url = format!("data:image/png;base64,{}", pixel.repeat(10_000));
            let content =
                serde_json::json!([{ "type": "image_url", "image_url": { "url": url } }, { "text": "What?" }]);
            read(&serde_json::json!({ "messages": [{ "role": "user", "content": content }] }).to_string()).tokens
        };
        let [one, other] = ["AAAA", "AAAB"].map(image);
        assert!((FILE_TOKENS..FILE_TOKENS + 40).contains(&one.len()), "{}", one.len());
        assert_eq!((one.len(), &one), (other.len(), &image("AAAA")));
        let differ = one.iter().zip(&*other).filter(|(one, other)| one != other).count();
        assert!(differ >= FILE_TOKENS / 2, "{differ}");
        assert_eq!(read(r#"{"input":"short;base64,AAAA and more text"}"#).tokens.len(), 9, "no file");
    }

    #[test]
    fn a_text_that_looks_like_a_file_counts_as_text() {
        let (word, pixels) = ("word ".repeat(10_000), "AAAA".repeat(10_000));
        for prompt in [
            serde_json::json!([{ "content": format!(";base64,{word}") }]),
            serde_json::json!([{ "content": format!("data:image/png;base64,{pixels}") }]),
            serde_json::json!([{ "content": format!("{{\"url\":\"data:image/png;base64,{pixels}") }]),
            serde_json::json!([{ "url": format!("data:;base64,{pixels}") }]),
            serde_json::json!([{ "url": format!("see data:image/png;base64,{pixels}") }]),
            serde_json::json!([{ "url": format!("data:image/png;base64,{word}") }]),
        ] {
            let tokens = read(&serde_json::json!({ "messages": prompt }).to_string()).tokens.len();
            assert!(tokens >= 10_000, "{tokens}");
        }
        let tools = serde_json::json!([{ "url": format!("data:image/png;base64,{pixels}") }]);
        assert!(read(&serde_json::json!({ "messages": [], "tools": tools }).to_string()).tokens.len() >= 10_000);
        let escaped = format!(r#"{{"messages":[{{"url" : "data:image\/png;x=y;base64,{}"}}]}}"#, r"A\/A=".repeat(9000));
        assert!((FILE_TOKENS..FILE_TOKENS + 40).contains(&read(&escaped).tokens.len()));
    }

    #[test]
    fn a_prompt_of_token_ids_is_taken_as_it_is() {
        for prompt in ["[5, 70000,4294967295]", "[[5,70000,4294967295]]"] {
            let body = format!(r#"{{"prompt":{prompt},"tools":[{{}}]}}"#);
            assert_eq!(read(&body).tokens[..], [5, 70_000, u32::MAX]);
        }
        for body in [
            r#"{"input_ids":[7,8],"image_data":null}"#,
            r#"{"token_ids":[7,8],"sampling_params":{}}"#,
            r#"{"input":[7,8]}"#,
        ] {
            let read = read(body);
            assert_eq!((&read.tokens[..], read.source), (&[7, 8][..], TokenSource::Client), "{body}");
        }
        for body in [r#"{"token_ids":[7,8],"features":{}}"#, r#"{"input_ids":[7,8],"lora_path":"a"}"#] {
            assert_eq!(read(body).source, TokenSource::Estimate, "{body}");
        }
        for both in [r#"{"prompt":[1],"messages":["some text"]}"#, r#"{"prompt":[1],"input_ids":[1,2,3,4,5,6]}"#] {
            assert!(read(both).tokens.len() > 3, "the engine may read either: {both}");
        }
        assert_eq!(read(&format!(r#"{{"inputs":"{}"}}"#, "x".repeat(398))).tokens.len(), 100);
        for prompt in ["[[1,2],[3]]", "[1,-2]", "[4294967296]", "[\"a\"]", "\"[1,2]\""] {
            let tokens = read(&format!(r#"{{"prompt":{prompt}}}"#)).tokens;
            assert_eq!(tokens.len(), prompt.len().div_ceil(4), "{prompt} is estimated");
        }
    }

    #[test]
    fn each_prompt_of_an_array_has_its_own_choices() {
        let choices = [
            (r#"{"prompt":["a","b"],"n":3}"#, 6),
            (r#"{"prompt":[[1,2],[3]]}"#, 2),
            (r#"{"prompt":[1,2]}"#, 1),
            (r#"{"prompt":[]}"#, 1),
            (r#"{"prompt":["a","b"],"n":4294967295}"#, CHOICES_MAX as u32),
            (r#"{"prompt":"a","n":18446744073709551616}"#, CHOICES_MAX as u32),
            (r#"{"messages":[{"content":"a"},{"content":"b"}]}"#, 1),
            (r#"{"text":"a","sampling_params":{"n":7}}"#, 7),
            (r#"{"messages":[[{"content":"a"}],[{"content":"b"}],[]],"n":2}"#, 6),
            (r#"{"text":["a","b"],"image_data":["c","d","e"],"sampling_params":{"n":2}}"#, 4),
            (r#"{"text":["a","b"],"sampling_params":[{"n":3},{"n":3}]}"#, 6),
            (r#"{"text":"a","sampling_params":[{"n":2},{},{}]}"#, 6),
            (r#"{"input_ids":[ [1],[2,3]],"stream":true}"#, 2),
            (r#"{"input_ids":[1,2]}"#, 1),
            (r#"{"input_embeds":[ [ [0.5]],[[1.5],[2.5]]]}"#, 2),
            (r#"{"input_embeds":[[0.5],[1.5]]}"#, 1),
            (r#"{"prompt":["a","b"],"prompt_embeds":["c","d","e"]}"#, 5),
            (r#"{"prompt_embeds":"c","prompt":null}"#, 1),
            (r#"{"query":"q","items":["a","b","c"]}"#, 3),
            (r#"{"query":[1],"items":[[1,2],[3]]}"#, 2),
            (r#"{"items":[{"role":"user","content":"of a conversation"}]}"#, 1),
        ];
        for (body, expected) in choices {
            assert_eq!(read(body).choices, expected, "{body}");
        }
        let batch = read(&serde_json::json!({ "text": vec!["a"; 1000] }).to_string());
        assert_eq!((batch.outputs, batch.choices), (1000, CHOICES_MAX as u32), "its report counts up to all of them");
        let parameters = vec!["{}"; 1 << 21].join(",");
        let huge = read(&format!(r#"{{"text":"a","sampling_params":[{parameters}],"stream":true}}"#));
        assert!(huge.outputs >= 1 << 21 && huge.is_stream, "more than is read counts as any number");
    }

    #[test]
    fn numbers_and_truth_are_read_as_servers_do() {
        for n in ["5", "5.0", r#""5""#, r#"" +5 ""#, r#""0_5""#, r#""5.0""#] {
            assert_eq!(read(&format!(r#"{{"prompt":"a","n":{n}}}"#)).choices, 5, "{n}");
        }
        for n in ["-1", "1.5", r#""NaN""#, "[5]", "true", "null"] {
            assert_eq!(read(&format!(r#"{{"prompt":"a","n":{n}}}"#)).choices, 1, "{n}");
        }
        let flags = |value: &str| {
            let read = read(&format!(r#"{{"stream":{value},"stream_options":{{"x":[],"include_usage":{value}}}}}"#));
            (read.is_stream, read.wants_usage)
        };
        for value in ["true", "1", "1.0", r#""True""#, r#""on""#, r#""Y""#, r#""1""#] {
            assert_eq!(flags(value), (true, true), "{value}");
        }
        for value in ["false", "0", "2", "null", r#""off""#, r#""no""#, "[true]"] {
            assert_eq!(flags(value), (false, false), "{value}");
        }
        for options in ["null", "{}", "[]", "true", r#"{"continuous_usage_stats":true}"#] {
            assert!(!read(&format!(r#"{{"stream_options":{options}}}"#)).wants_usage, "{options}");
        }
    }

    #[test]
    fn fields_of_unexpected_types_are_left_to_the_engine() {
        let odd = read(
            r#"{"prompt":7,"stream":"maybe","n":"many","max_tokens":[1],"priority":{},"cache_salt":1,
            "deadline_ms":"soon"}"#,
        );
        assert_eq!((odd.is_stream, odd.choices, odd.max_tokens, odd.deadline), (false, 1, None, None));
        assert_eq!(odd.attributes.priority, Priority::Normal);
        assert!(odd.salts.is_empty());
        let good = read(r#"{"input":"x","n":4,"max_output_tokens":9,"priority":-1,"cache_salt":"s"}"#);
        assert_eq!((good.choices, good.max_tokens, good.salts), (4, Some(9), vec!["s".to_owned()]));
        assert_eq!(good.attributes.priority, Priority::High);
    }

    #[test]
    fn an_extra_key_is_a_salt() {
        for (body, expected) in [
            (r#"{"extra_key":"s"}"#, &[r#"extra_key="s""#][..]),
            (r#"{"extra_key":["s","t"]}"#, &[r#"extra_key=["s","t"]"#]),
            (r#"{"extra_key":"s","cache_salt":"s"}"#, &["s", r#"extra_key="s""#]),
            (r#"{"extra_key":""}"#, &[]),
            (r#"{"extra_key":null}"#, &[]),
        ] {
            assert_eq!(read(body).salts, expected, "{body}");
        }
    }
}
