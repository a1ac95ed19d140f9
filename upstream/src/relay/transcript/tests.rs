use super::*;
use crate::relay::fake::{Greedy, Script};
use crate::relay::sse::Splitter;
use serde_json::{Value, json};

/// "Hello é you": of the second word the first half comes without a text.
fn model(name: &'static str, tokens_per_chunk: usize) -> Greedy {
    let output = vec![(10, "Hel"), (11, "lo"), (12, ""), (13, " é"), (14, " y"), (15, "ou")];
    Greedy { name, prompt: vec![1, 2, 3], output, tokens_per_chunk }
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn events(script: &Script) -> Vec<Event> {
    let mut splitter = Splitter::new(1 << 20);
    splitter.push(script.body());
    std::iter::from_fn(|| splitter.next()).collect()
}

/// What the client gets of these events, or the error.
fn passed(transcript: &mut Transcript, events: impl IntoIterator<Item = Event>) -> Result<Vec<u8>, RelayError> {
    let mut bytes = Vec::new();
    for event in events {
        match transcript.read(event) {
            Reading::Pass(event) => bytes.extend_from_slice(&event.raw),
            Reading::Drop => {}
            Reading::Fail(error) => return Err(error),
        }
    }
    Ok(bytes)
}

fn event(payload: &Value) -> Event {
    Event { raw: format!("data: {payload}\n\n").into(), whole: true }
}

fn api(path: &str) -> Api {
    if path == CHAT { Api::Chat } else { Api::Completions }
}

/// The stream of a client that asks for `fields`, from one server up to `cut`, and from another one after it: what the
/// client gets, and the tokens in the prompt of the other server.
fn continued_after(cut: usize, path: &str, fields: &Value, per_chunk: [usize; 2]) -> (Vec<u8>, Vec<u32>) {
    let keeps_ids = fields["return_token_ids"] == true;
    let mut asked = fields.clone();
    asked["return_token_ids"] = true.into();
    let mut transcript = Transcript::new(api(path), keeps_ids);
    let sent = events(&model("one", per_chunk[0]).stream(path, &asked));
    let mut bytes = passed(&mut transcript, sent.into_iter().take(cut)).unwrap();
    let broken = transcript.broken().unwrap();
    // As it travels.
    let (prompt, generated) = (broken.prompt.clone(), broken.generated.clone());
    let mut broken: Broken = serde_json::from_slice(&serde_json::to_vec(&broken).unwrap()).unwrap();
    (broken.prompt, broken.generated) = (prompt.clone(), generated.clone());
    let rest = [prompt, generated].concat();
    asked["prompt"] = json!(rest);
    let mut transcript = Transcript::continuing(broken);
    let sent = events(&model("another", per_chunk[1]).stream(COMPLETIONS, &asked));
    bytes.extend(passed(&mut transcript, sent).unwrap());
    (bytes, rest)
}

#[test]
fn a_stream_that_another_server_continues_is_that_of_one() {
    for path in [CHAT, COMPLETIONS] {
        for fields in [json!({}), json!({ "stream_options": { "include_usage": true } })] {
            for per_chunk in [[1, 1], [1, 4], [2, 1], [4, 4]] {
                let expected = model("one", per_chunk[0]).stream(path, &fields).body();
                let chunks = 6_usize.div_ceil(per_chunk[0]) + usize::from(path == CHAT);
                for cut in 1..chunks {
                    let (bytes, _) = continued_after(cut, path, &fields, per_chunk);
                    // The other server may cut its chunks elsewhere.
                    if per_chunk[0] == per_chunk[1] {
                        assert_eq!(String::from_utf8(bytes), String::from_utf8(expected.to_vec()), "{path} {cut}");
                    } else {
                        assert_eq!(text(&bytes), text(&expected), "{path} {cut} {per_chunk:?}");
                    }
                }
            }
        }
    }
}

/// The text of a stream, whose chunks are all of one response.
fn text(body: &[u8]) -> String {
    let body = std::str::from_utf8(body).unwrap();
    let payloads = body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks: Vec<Value> = payloads.map(|data| serde_json::from_str(data).unwrap()).collect();
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["created"] == chunks[0]["created"]));
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    choices.filter_map(|choice| choice["text"].as_str().or(choice["delta"]["content"].as_str())).collect()
}

#[test]
fn token_ids_reach_a_client_that_asked_for_them_once() {
    let fields = json!({ "return_token_ids": true });
    for path in [CHAT, COMPLETIONS] {
        let expected = model("one", 1).stream(path, &fields).body();
        for cut in 1..6 {
            let (bytes, _) = continued_after(cut, path, &fields, [1, 1]);
            assert_eq!(String::from_utf8(bytes), String::from_utf8(expected.to_vec()), "{path} {cut}");
        }
    }
}

#[test]
fn the_prompt_of_the_other_server_ends_where_all_text_was_sent() {
    let prompt = |cut, per_chunk| continued_after(cut, COMPLETIONS, &json!({}), [per_chunk, 1]).1;
    assert_eq!(prompt(2, 1), [1, 2, 3, 10, 11]);
    assert_eq!(prompt(3, 1), [1, 2, 3, 10, 11], "half a character was held back");
    assert_eq!(prompt(4, 1), [1, 2, 3, 10, 11, 12, 13]);
    assert_eq!(prompt(2, 2), [1, 2, 3], "of two tokens the last one may have been held back");
}

#[test]
fn another_text_is_not_appended() {
    let mut transcript = Transcript::new(Api::Completions, false);
    let asked = json!({ "return_token_ids": true });
    passed(&mut transcript, events(&model("one", 2).stream(COMPLETIONS, &asked)).into_iter().take(2)).unwrap();
    let broken = transcript.broken().unwrap();
    for output in [vec![(10, "Hel"), (99, "ium")], vec![(10, "Hel"), (11, "p!"), (12, ""), (13, " é")]] {
        let another = Greedy { output, ..model("another", 1) };
        let mut transcript = Transcript::continuing(broken.clone());
        let answer = passed(&mut transcript, events(&another.stream(COMPLETIONS, &asked)));
        assert!(matches!(answer, Err(RelayError::BrokenOff(why)) if why == DIFFERS));
    }
}

/// A chunk of chat with one token.
fn chat(delta: &Value, finish: Option<&str>) -> Event {
    let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish, "token_ids": [7] });
    event(&json!({ "id": "a", "created": 1, "model": "m", "choices": [choice], "prompt_token_ids": [1] }))
}

#[test]
fn the_output_of_a_parser_is_not_continued() {
    let text = json!({ "content": "a" });
    let deltas =
        [json!({ "reasoning": "r" }), json!({ "reasoning_content": "r" }), json!({ "tool_calls": [{}] }), json!({})];
    for delta in deltas {
        let mut transcript = Transcript::new(Api::Chat, false);
        passed(&mut transcript, [chat(&text, None)]).unwrap();
        assert!(transcript.broken().is_ok());
        let bytes =
            String::from_utf8(passed(&mut transcript, [chat(&delta, None), chat(&text, None)]).unwrap()).unwrap();
        assert!(transcript.broken().is_err_and(|why| why.contains("parses")), "{delta}");
        assert!(!bytes.contains("[7]"), "ids are removed all the same: {bytes}");
        assert!(!bytes.contains(r#""delta":{}"#), "it is sent for its token ids only");
    }
}

#[test]
fn a_server_without_token_ids_is_noticed() {
    let mut transcript = Transcript::new(Api::Completions, false);
    let choice = json!({ "index": 0, "text": "a", "finish_reason": null });
    let chunk = event(&json!({ "id": "a", "created": 1, "model": "m", "choices": [choice] }));
    assert_eq!(passed(&mut transcript, [chunk.clone()]).unwrap(), chunk.raw);
    assert!(transcript.lacks_ids() && transcript.broken().is_err());
}

#[test]
fn a_server_that_fails_or_stops_breaks_its_stream_off() {
    let text = json!({ "content": "a" });
    let error = |code: u16| event(&json!({ "error": { "message": "no", "type": "x", "code": code } }));
    let after_text = |last: Event| {
        let mut transcript = Transcript::new(Api::Chat, false);
        let outcome = passed(&mut transcript, [chat(&text, None), last]).map(drop);
        (outcome, transcript.broken().map(|broken| broken.generated))
    };
    let (outcome, broken) = after_text(error(500));
    assert!(matches!(outcome, Err(RelayError::Answered(answer)) if answer.kind == ErrorKind::Fault));
    assert_eq!(broken, Ok(vec![7]));
    let (outcome, broken) = after_text(chat(&json!({ "content": "" }), Some("abort")));
    assert!(matches!(outcome, Err(RelayError::BrokenOff(why)) if why == ABORTED));
    assert_eq!(broken, Ok(vec![7]));
    let (outcome, broken) = after_text(error(400));
    assert!(outcome.is_ok() && broken.is_ok(), "the error of a request passes");
    let (outcome, broken) = after_text(chat(&json!({ "content": "" }), Some("stop")));
    assert!(outcome.is_ok() && broken.is_err(), "all of it was sent");
}

#[test]
fn what_is_no_chunk_passes_and_ends_the_transcript() {
    for payload in [json!([1]), json!({ "choices": [{ "index": 1, "text": "a" }] }), json!({ "choices": 3 })] {
        let mut transcript = Transcript::new(Api::Completions, false);
        let event = event(&payload);
        assert_eq!(passed(&mut transcript, [event.clone()]).unwrap(), event.raw);
        assert!(transcript.broken().is_err_and(|why| why != NO_IDS), "{payload}");
    }
    let mut transcript = Transcript::new(Api::Completions, false);
    let comment = Event { raw: ": ping\n\n".into(), whole: true };
    assert_eq!(passed(&mut transcript, [comment.clone()]).unwrap(), comment.raw);
    assert!(transcript.is_followed());
}

#[test]
fn the_usage_is_that_of_the_whole_stream() {
    let details = json!({ "cached_tokens": 9 });
    let usage =
        json!({ "prompt_tokens": 10, "total_tokens": 15, "completion_tokens": 5, "prompt_tokens_details": details });
    let usage: Box<RawValue> = serde_json::from_str(&usage.to_string()).unwrap();
    let whole: Value = serde_json::from_str(&whole_usage(&usage, 4).unwrap()).unwrap();
    let details = json!({ "cached_tokens": 6 });
    let expected =
        json!({ "prompt_tokens": 6, "total_tokens": 15, "completion_tokens": 9, "prompt_tokens_details": details });
    assert_eq!(whole, expected);
}

#[test]
fn a_wrong_number_in_the_usage_of_a_server_does_not_overflow() {
    let usage = format!(r#"{{"prompt_tokens":9,"completion_tokens":{}}}"#, u64::MAX);
    let whole = whole_usage(serde_json::from_str(&usage).unwrap(), 3).unwrap();
    assert_eq!(whole, usage.replace(":9,", ":6,"));
}
