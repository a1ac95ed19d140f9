use super::*;
use crate::relay::fake::Script;
use crate::relay::transcript::Api;
use futures::channel::mpsc;
use futures::{FutureExt, StreamExt, stream};
use http_body::Frame;
use http_body_util::StreamBody;
use proptest::collection::vec;
use proptest::prelude::*;
use std::io;
use worker::engine::ErrorKind;

const USAGE: Usage = Usage { prompt_tokens: Some(7), completion_tokens: Some(2), cached_tokens: Some(4) };

type Chunks = Vec<io::Result<Bytes>>;

fn response<S>(
    content_type: &str,
    chunks: S,
) -> Response<StreamBody<impl Stream<Item = io::Result<Frame<Bytes>>> + Unpin>>
where
    S: Stream<Item = io::Result<Bytes>> + Unpin,
{
    let body = StreamBody::new(chunks.map(|chunk| chunk.map(Frame::data)));
    Response::builder().header(header::CONTENT_TYPE, content_type).body(body).unwrap()
}

/// What came of an answer: whether there was a head, all bytes, and the end or the error.
#[derive(Debug)]
struct Outcome {
    head: Option<Head>,
    bytes: Vec<u8>,
    end: Result<Report, RelayError>,
}

fn relayed(content_type: &str, usage: UsageInStream, chunks: Chunks) -> Outcome {
    let mut relay = Relay::new(response(content_type, stream::iter(chunks)), usage);
    let (mut head, mut bytes) = (None, Vec::new());
    loop {
        let end = match relay.next().now_or_never().unwrap().unwrap() {
            Ok(Item::Head(first)) => {
                assert!(head.is_none() && bytes.is_empty(), "one head before all frames");
                head = Some(first);
                continue;
            }
            Ok(Item::Frame(frame)) => {
                assert!(head.is_some() && !frame.is_empty());
                bytes.extend_from_slice(&frame);
                continue;
            }
            Ok(Item::End(report)) => Ok(report),
            Err(error) => Err(error),
        };
        assert!(relay.next().now_or_never().unwrap().is_none(), "nothing follows the end");
        return Outcome { head, bytes, end };
    }
}

fn streamed(usage: UsageInStream, body: impl Into<Bytes>) -> Outcome {
    relayed("text/event-stream", usage, vec![Ok(body.into())])
}

fn event(payload: &str) -> String {
    format!("data: {payload}\n\n")
}

fn broken() -> io::Result<Bytes> {
    Err(io::ErrorKind::ConnectionReset.into())
}

#[test]
fn the_head_waits_for_the_first_output() {
    let (sender, chunks) = mpsc::unbounded();
    let mut relay = Relay::new(response("text/event-stream; charset=utf-8", chunks), UsageInStream::Keep);
    let mut next = || relay.next().now_or_never().map(|item| item.unwrap().unwrap());
    let role = event(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#);
    let text = event(r#"{"choices":[{"delta":{"content":"a"}}]}"#);
    for held in [": ping\n\n", &role] {
        sender.unbounded_send(Ok(Bytes::from(held.to_owned()))).unwrap();
        assert!(next().is_none());
    }
    sender.unbounded_send(Ok(Bytes::from(text.clone()))).unwrap();
    assert!(matches!(next(), Some(Item::Head(Head { status: StatusCode::OK, .. }))));
    for expected in [": ping\n\n", &role, &text] {
        assert!(matches!(next(), Some(Item::Frame(frame)) if frame == expected));
    }
    assert!(next().is_none());
}

#[test]
fn a_whole_stream_passes_unchanged() {
    for script in
        [Script::chat(&["a", "b"], Some(USAGE)), Script::completion(&["a", "b"], Some(USAGE)).with_null_usage()]
    {
        let outcome = streamed(UsageInStream::Keep, script.body());
        assert_eq!(outcome.bytes, script.body());
        assert_eq!(outcome.end.unwrap(), Report { usage: Some(USAGE), ..Report::default() });
    }
}

#[test]
fn stripping_leaves_what_the_client_would_have_got() {
    let plain = Script::chat(&["a", "usage", "b"], None).body();
    let with_usage = Script::chat(&["a", "usage", "b"], Some(USAGE));
    for body in [with_usage.body(), with_usage.clone().with_null_usage().body()] {
        let outcome = streamed(UsageInStream::Strip, body);
        assert_eq!(String::from_utf8_lossy(&outcome.bytes), String::from_utf8_lossy(&plain));
        assert_eq!(outcome.end.unwrap().usage, Some(USAGE));
    }
}

#[test]
fn usage_is_stripped_wherever_it_stands() {
    let stripped = event(r#"{"choices":[{"text":"a"}] }"#);
    let with_member = [
        r#"{"usage": null, "choices":[{"text":"a"}] }"#,
        r#"{"choices":[{"text":"a"}] , "usage":{"prompt_tokens":1}}"#,
        r#"{"choices":[{"text":"a"}] ,"usage":null}"#,
    ];
    for payload in with_member {
        let body = [event(payload), event(payload), event("[DONE]")].concat();
        let outcome = streamed(UsageInStream::Strip, body);
        let text = String::from_utf8(outcome.bytes).unwrap().replace(r"{ ", "{");
        assert_eq!(text, [stripped.clone(), stripped.clone(), event("[DONE]")].concat(), "{payload}");
    }
    let crlf = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\r\n\r\ndata: [DONE]\r\n\r\n";
    let outcome = streamed(UsageInStream::Strip, crlf);
    assert_eq!(outcome.bytes, crlf.replace(r#","usage":null"#, "").as_bytes());
}

#[test]
fn what_else_the_usage_chunk_says_is_kept() {
    let fingerprint = r#""system_fingerprint":"f""#;
    let text = event(r#"{"choices":[{"text":"a","finish_reason":null}]}"#);
    let ends = |index| format!(r#"{{"choices":[{{"index":{index},"text":"b","finish_reason":"stop"}}]}}"#);
    let usage = event(&format!(r#"{{"choices":[],"usage":{{"prompt_tokens":1}},{fingerprint}}}"#));
    let (first, last, done) = (event(&ends(0)), event(&ends(1)), event("[DONE]"));
    let body = [text.clone(), first.clone(), last.clone(), usage.clone(), done.clone()].concat();
    let outcome = streamed(UsageInStream::Strip, body);
    let with_fingerprint = last.replace("}]}", &format!("}}],{fingerprint}}}"));
    assert_eq!(String::from_utf8_lossy(&outcome.bytes), [text.clone(), first, with_fingerprint, done.clone()].concat());
    // The first output may be the last, and the body may end after it.
    let outcome = streamed(UsageInStream::Strip, [last.clone(), usage].concat());
    assert!(outcome.bytes.ends_with(b",\"system_fingerprint\":\"f\"}\n\n"));
    assert_eq!(streamed(UsageInStream::Strip, last.clone()).bytes, last.as_bytes());
    let already = event(&format!(r#"{{"choices":[{{"text":"b","finish_reason":"stop"}}],{fingerprint}}}"#));
    let usage = event(r#"{"choices":[],"usage":{},"system_fingerprint":"g"}"#);
    let outcome = streamed(UsageInStream::Strip, [already.clone(), usage, done.clone()].concat());
    assert_eq!(outcome.bytes, (already + &done).as_bytes());
}

#[test]
fn an_error_of_the_engine_before_output_is_no_answer() {
    let role = event(r#"{"choices":[{"delta":{"role":"assistant"}}]}"#);
    let error = r#"{"error":{"message":"m","code":500}}"#;
    for body in [event(error), role + &event(error), format!("error: {error}\n\n")] {
        let outcome = streamed(UsageInStream::Keep, body);
        assert!(outcome.head.is_none());
        let Err(RelayError::Answered(answer)) = outcome.end else { panic!("{:?}", outcome.end) };
        assert_eq!((answer.kind, &answer.body[..]), (ErrorKind::Fault, error.as_bytes()));
    }
}

#[test]
fn an_error_of_the_client_passes_as_it_is() {
    let body = event(r#"{"error":{"message":"m","code":400}}"#) + &event("[DONE]");
    let outcome = streamed(UsageInStream::Strip, body.clone());
    assert_eq!(outcome.bytes, body.as_bytes());
    assert!(outcome.head.is_some());
    assert!(!outcome.end.unwrap().failed);
}

#[test]
fn an_error_after_output_passes_and_is_reported() {
    let body = event(r#"{"choices":[{"text":"a"}]}"#) + &event(r#"{"error":{"message":"m"}}"#) + &event("[DONE]");
    let outcome = streamed(UsageInStream::Keep, body.clone());
    assert_eq!(outcome.bytes, body.as_bytes());
    assert!(outcome.end.unwrap().failed);
}

#[test]
fn an_engine_that_dies_gives_an_error() {
    let body = Script::chat(&["a", "b"], None).body();
    let first = body.slice(..300);
    let outcome = relayed("text/event-stream", UsageInStream::Keep, vec![Ok(first), broken()]);
    assert!(outcome.head.is_none() && matches!(outcome.end, Err(RelayError::BrokenOff(_))));
    let most = body.slice(..body.len() - 100);
    let outcome = relayed("text/event-stream", UsageInStream::Keep, vec![Ok(most), broken()]);
    assert!(outcome.head.is_some() && matches!(outcome.end, Err(RelayError::BrokenOff(_))));
    let outcome = relayed("text/event-stream", UsageInStream::Keep, vec![Ok(body), broken()]);
    assert!(outcome.end.is_ok(), "all is there after [DONE]");
    let outcome = relayed("application/json", UsageInStream::Keep, vec![Ok("{".into()), broken()]);
    assert!(matches!(outcome.end, Err(RelayError::BrokenOff(_))));
}

#[test]
fn a_stream_needs_a_finish_reason_or_done() {
    let text = event(r#"{"choices":[{"text":"a","finish_reason":null}]}"#);
    let last = event(r#"{"choices":[{"text":"b","finish_reason":"stop"}]}"#);
    let usage = event(r#"{"choices":[],"usage":{"prompt_tokens":7}}"#);
    let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    for end in [&last, &(last.clone() + &usage), &event("[DONE]"), "data: [DONE]\n", stop] {
        let body = text.clone() + &text + end;
        let outcome = streamed(UsageInStream::Keep, body.clone());
        assert!(outcome.end.is_ok(), "{end}");
        assert_eq!(outcome.bytes, body.as_bytes());
    }
    for end in ["", &text, ": ping\n\n"] {
        let body = text.clone() + &text + end;
        let outcome = streamed(UsageInStream::Keep, body.clone());
        assert!(outcome.head.is_some());
        assert_eq!(outcome.bytes, body.as_bytes());
        assert!(matches!(outcome.end, Err(RelayError::Unfinished)), "{end}");
    }
    let outcome = streamed(UsageInStream::Keep, ": ping\n\n");
    assert!(outcome.head.is_none() && matches!(outcome.end, Err(RelayError::Unfinished)));
}

#[test]
fn done_without_its_empty_line_ends_a_stream() {
    let text = event(r#"{"choices":[{"text":"a","finish_reason":null}]}"#);
    for usage in [UsageInStream::Keep, UsageInStream::Strip] {
        for (done, breaks_off) in [
            ("data: [DONE]", false),
            ("data: [DONE]\n", false),
            ("data:[DONE]\r\n", false),
            ("data: [DONE]", true),
            ("data: [DONE]\n", true),
        ] {
            let body = text.clone() + &text + done;
            // However it is split.
            for at in body.len() - done.len()..body.len() {
                let halves = [&body[..at], &body[at..]].map(|half| Ok(half.to_owned().into()));
                let chunks = halves.into_iter().chain(breaks_off.then(broken)).collect();
                let outcome = relayed("text/event-stream", usage, chunks);
                assert_eq!(
                    (outcome.bytes, outcome.end.is_ok()),
                    (body.clone().into(), true),
                    "{done:?} {at} {breaks_off}"
                );
            }
        }
    }
    let outcome = relayed("text/event-stream", UsageInStream::Keep, vec![Ok((text + "data: [DON").into()), broken()]);
    assert!(matches!(outcome.end, Err(RelayError::BrokenOff(_))));
}

#[test]
fn done_without_its_empty_line_ends_a_stream_that_is_followed() {
    let chunk =
        r#"{"id":"1","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":null}]}"#;
    let body = event(chunk) + "data: [DONE]";
    let mut relay = Relay::new(response("text/event-stream", stream::iter([Ok(body.into())])), UsageInStream::Keep);
    assert!(relay.follow(Box::new(Transcript::new(Api::Completions, true))));
    let items: Vec<_> = relay.collect::<Vec<_>>().now_or_never().unwrap();
    let [Ok(Item::Head(_)), frames @ .., Ok(Item::End(_))] = &items[..] else { panic!("{items:?}") };
    let Some(Ok(Item::Frame(last))) = frames.last() else { panic!("{frames:?}") };
    assert!(last.ends_with(b"data: [DONE]"), "{last:?}");
}

#[test]
fn part_of_an_event_at_the_end_of_a_body_does_not_hide_the_error_that_follows() {
    let text = event(r#"{"choices":[{"text":"a","finish_reason":null}]}"#);
    let last = event(r#"{"choices":[{"text":"b","finish_reason":"stop"}]}"#);
    let part = r#"data: {"choices":[{"text":"c","finish_reason":"st"#;
    for usage in [UsageInStream::Keep, UsageInStream::Strip] {
        for (whole, part) in [(&text, part), (&text, "data: {\"cho"), (&text, "data: "), (&last, part)] {
            let outcome = streamed(usage, whole.clone() + part);
            assert_eq!(String::from_utf8_lossy(&outcome.bytes), *whole, "{part}");
            assert!(matches!(outcome.end, Err(RelayError::Unfinished)), "{part}");
        }
        // Only the line end is missing.
        let outcome = streamed(usage, text.clone() + last.trim_end());
        assert_eq!((outcome.bytes, outcome.end.is_ok()), ((text.clone() + last.trim_end()).into(), true));
    }
}

#[test]
fn a_response_ends_as_its_last_event_says() {
    let delta = event(r#"{"type":"response.output_text.delta","delta":"a"}"#);
    for (name, failed) in [("completed", false), ("incomplete", false), ("cancelled", false), ("failed", true)] {
        let last = event(&format!(r#"{{"type":"response.{name}","response":{{"status":"{name}"}}}}"#));
        let outcome = streamed(UsageInStream::Keep, delta.clone() + "event: x\n" + &last);
        assert_eq!(outcome.end.unwrap().failed, failed, "{name}");
    }
    let outcome = streamed(UsageInStream::Keep, delta);
    assert!(matches!(outcome.end, Err(RelayError::Unfinished)));
}

#[test]
fn an_answer_without_output_has_a_head_too() {
    let body = Script::chat(&[], Some(USAGE)).body();
    let outcome = streamed(UsageInStream::Keep, body.clone());
    assert_eq!((outcome.head.is_some(), &outcome.bytes[..]), (true, &body[..]));
    assert_eq!(outcome.end.unwrap().usage, Some(USAGE));
}

#[test]
fn what_is_held_is_bounded() {
    let ping = Bytes::from(format!(": {}\n\n", "x".repeat(1000)));
    let (sender, chunks) = mpsc::unbounded();
    let mut relay = Relay::new(response("text/event-stream", chunks), UsageInStream::Keep);
    let pings = MAX_HELD / ping.len() + 1;
    (0..pings).for_each(|_| sender.unbounded_send(Ok(ping.clone())).unwrap());
    assert!(matches!(relay.next().now_or_never(), Some(Some(Ok(Item::Head(_))))));
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_whole_at_done_and_its_body_ends_soon() {
    for has_more in [true, false] {
        let (sender, chunks) = mpsc::unbounded();
        let mut relay = Relay::new(response("text/event-stream", chunks), UsageInStream::Keep);
        let script = Script::chat(&["a"], Some(USAGE));
        sender.unbounded_send(Ok(script.body())).unwrap();
        assert!(matches!(relay.next().await, Some(Ok(Item::Head(_)))));
        let mut bytes = Vec::new();
        let report = loop {
            match relay.next().now_or_never().expect("no time passes").unwrap().unwrap() {
                Item::Frame(frame) => bytes.extend_from_slice(&frame),
                Item::End(report) => break report,
                Item::Head(_) => panic!("a second head"),
            }
        };
        assert_eq!((&bytes[..], report.usage), (&script.body()[..], Some(USAGE)));
        assert!(relay.next().now_or_never().is_none(), "the body has not ended");
        if has_more {
            sender.unbounded_send(Ok(": bye\n\n".into())).unwrap();
            assert!(matches!(relay.next().await, Some(Ok(Item::Frame(rest))) if rest == ": bye\n\n"));
            sender.unbounded_send(broken()).unwrap();
        }
        assert!(relay.next().await.is_none(), "the end was reported");
        assert!(sender.is_closed(), "the body is dropped");
    }
}

#[tokio::test(start_paused = true)]
async fn done_may_not_be_the_end_of_a_stream_that_is_not_known() {
    let (sender, chunks) = mpsc::unbounded();
    let mut relay = Relay::new(response("text/event-stream", chunks), UsageInStream::Keep).ending_anywhere();
    for text in ["data: [DONE]\n\n", "data: more\n\n"] {
        sender.unbounded_send(Ok(text.into())).unwrap();
        let is_text = |item: &Option<_>| matches!(item, Some(Ok(Item::Frame(frame))) if frame == text);
        while !is_text(&relay.next().await) {}
        assert!(tokio::time::timeout(10 * REST_TIMEOUT, relay.next()).await.is_err());
    }
}

#[test]
fn what_was_received_together_passes_together() {
    let (lines, text) = (Bytes::from("\n".repeat(1000)), event(r#"{"choices":[{"text":"a"}]}"#));
    for usage in [UsageInStream::Keep, UsageInStream::Strip] {
        let (sender, chunks) = mpsc::unbounded();
        let mut relay = Relay::new(response("text/event-stream", chunks), usage);
        let received = [lines.clone(), [&lines, text.as_bytes(), &lines].concat().into(), lines.clone()];
        for part in &received {
            sender.unbounded_send(Ok(part.clone())).unwrap();
        }
        assert!(matches!(relay.next().now_or_never(), Some(Some(Ok(Item::Head(_))))));
        let mut passed = Vec::new();
        while let Some(Some(Ok(Item::Frame(frame)))) = relay.next().now_or_never() {
            passed.push(frame);
        }
        assert_eq!(passed.concat(), received.concat());
        // The rest of what came with the first output is a frame of its own.
        assert_eq!(passed.len(), 4, "{usage:?}");
    }
}

#[test]
fn a_body_that_is_no_stream_passes_unchanged() {
    let usage = r#"{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}"#;
    let body = format!(r#"{{"choices":[{{"text":"\"usage\":{{}}"}}],"usage":{usage}}}"#);
    for parts in [1, 10, body.len()] {
        let chunks = body.as_bytes().chunks(body.len() / parts).map(|chunk| Ok(Bytes::copy_from_slice(chunk)));
        let outcome = relayed("application/json", UsageInStream::Strip, chunks.collect());
        assert_eq!(outcome.bytes, body.as_bytes());
        assert_eq!(outcome.end.unwrap(), Report { usage: Some(USAGE), ..Report::default() });
    }
    let outcome = relayed("application/json", UsageInStream::Strip, Vec::new());
    assert_eq!((outcome.head.is_some(), outcome.end.unwrap().usage), (true, None));
}

#[test]
fn the_usage_of_a_long_body_is_read() {
    let part = Bytes::from("A".repeat(1 << 20));
    let end = r#""}],"usage":{"prompt_tokens":7,"completion_tokens":2}}"#;
    let text = (0..8).map(|_| Ok(part.clone()));
    let chunks = [Ok(r#"{"data":[{"text":""#.into())].into_iter().chain(text).chain([Ok(end.into())]);
    let outcome = relayed("application/json", UsageInStream::Keep, chunks.collect());
    let usage = Usage { cached_tokens: None, ..USAGE };
    assert_eq!((outcome.bytes.len() > 8 << 20, outcome.end.unwrap().usage), (true, Some(usage)));
}

#[test]
fn sglangs_generate_has_its_usage_in_meta_info() {
    let body = r#"{"text":"\"meta_info\"","meta_info":{"id":"r","prompt_tokens":7,"completion_tokens":2}}"#;
    let outcome = relayed("application/json", UsageInStream::Keep, vec![Ok(body.into())]);
    let usage = Usage { cached_tokens: None, ..USAGE };
    assert_eq!((&outcome.bytes[..], outcome.end.unwrap().usage), (body.as_bytes(), Some(usage)));
    // Several prompts, or several choices, are an array. Which of their prompts are the same is not known.
    let outcome = relayed("application/json", UsageInStream::Keep, vec![Ok(format!("[{body},{body}]").into())]);
    let usage = Usage { prompt_tokens: None, completion_tokens: Some(4), cached_tokens: None };
    assert_eq!(outcome.end.unwrap().usage, Some(usage));
}

#[test]
fn the_usage_of_sglangs_streams_is_that_of_the_last_event_of_each_item() {
    let body = |items: &[(&str, u64)]| {
        let item = |(index, tokens): &(&str, u64)| {
            event(&format!(r#"{{"text":"a",{index}"meta_info":{{"prompt_tokens":7,"completion_tokens":{tokens}}}}}"#))
        };
        items.iter().map(item).collect::<String>() + &event("[DONE]")
    };
    let one = body(&[("", 1), ("", 300), ("", 700)]);
    let (first, second) = (r#""index":0,"#, r#""index":1,"#);
    let two = body(&[(first, 1), (second, 1), (first, 300), (second, 500), (first, 700)]);
    for (body, prompt_tokens, completion_tokens) in [(one, Some(7), 700), (two, None, 1200)] {
        let outcome = streamed(UsageInStream::Keep, body.clone());
        assert_eq!(outcome.bytes, body.as_bytes());
        let usage = Usage { prompt_tokens, completion_tokens: Some(completion_tokens), cached_tokens: None };
        assert_eq!(outcome.end.unwrap().usage, Some(usage));
    }
}

#[test]
fn the_usage_of_an_event_that_is_too_long_is_read() {
    let delta = event(r#"{"type":"response.output_text.delta","delta":"a"}"#);
    let repeated = format!(r#""instructions":"{}","tools":[{{"usage":{{}}}}]"#, "a".repeat(3 << 20));
    let response = format!(r#"{{{repeated},"usage":{{"input_tokens":7,"output_tokens":2}}}}"#);
    let last = event(&format!(r#"{{"type":"response.completed","response":{response}}}"#));
    let body = delta + "event: response.completed\n" + &last;
    let chunks = body.as_bytes().chunks(100_000).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
    let outcome = relayed("text/event-stream", UsageInStream::Keep, chunks);
    assert_eq!(outcome.bytes, body.as_bytes());
    let usage = Usage { cached_tokens: None, ..USAGE };
    assert_eq!(outcome.end.expect("the answer is whole").usage, Some(usage));
}

#[test]
fn the_id_of_a_response_is_the_same_in_a_stream_and_in_json() {
    let response = |id: &str, state: &str| format!(r#"{{"id":"{id}","tools":[{{"id":"x"}}],{state}}}"#);
    let usage = r#""status":"completed","usage":{"input_tokens":7,"output_tokens":2}"#;
    let json = |body: String| relayed("application/json", UsageInStream::Keep, vec![Ok(body.into())]).end.unwrap();
    let (first, other) = (json(response("resp_1", usage)), json(response("resp_2", usage)));
    assert!(first.response_id.is_some() && first.response_id != other.response_id);
    let stream = event(&format!(r#"{{"type":"response.completed","response":{}}}"#, response("resp_1", usage)));
    assert_eq!(streamed(UsageInStream::Keep, stream).end.unwrap(), first);
    let long = response("resp_1", &format!(r#""instructions":"{}",{usage}"#, "a".repeat(2 << 20)));
    let stream = event(&format!(r#"{{"type":"response.completed","response":{long}}}"#));
    assert_eq!(streamed(UsageInStream::Keep, stream).end.unwrap(), first);
    for state in ["queued", "in_progress", "cancelled", "failed", "incomplete"] {
        // What it repeats of the request is no output.
        let queued = json(response("resp_1", &format!(r#""usage":null,"status":"{state}""#)));
        let usage = Usage { completion_tokens: Some(0), ..Usage::default() };
        assert_eq!(queued, Report { usage: Some(usage), ..first });
    }
    assert_eq!(json(response(&"x".repeat(100), usage)).response_id, None, "it is too long");
}

#[test]
fn a_text_that_is_no_utf8_does_not_hide_the_end() {
    let [before, after] = [
        r#"data: {"type":"response.completed","response":{"id":"r","instructions":""#,
        "\",\"usage\":{\"input_tokens\":7,\"output_tokens\":2}}}\n\n",
    ];
    let body = [before.as_bytes(), b"\xff\xfe\xc3", after.as_bytes()].concat();
    let outcome = streamed(UsageInStream::Keep, body.clone());
    assert_eq!(outcome.bytes, body, "it passes as it is");
    assert_eq!(outcome.end.unwrap().usage, Some(Usage { cached_tokens: None, ..USAGE }));
}

#[test]
fn a_compressed_stream_passes_unread() {
    let mut response = response("text/event-stream", stream::iter([Ok(Bytes::from_static(b"\x1f\x8b\x08"))]));
    response.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    let items: Vec<_> =
        Relay::new(response, UsageInStream::Strip).map(Result::unwrap).collect().now_or_never().unwrap();
    assert!(matches!(&items[..], [Item::Head(_), Item::Frame(_), Item::End(_)]));
}

#[test]
fn a_body_without_a_type_is_what_it_begins_with() {
    let relayed_in = |parts: Vec<Bytes>| {
        let parts = [Bytes::new()].into_iter().chain(parts).map(Ok);
        let mut response = response("", stream::iter(parts.collect::<Vec<_>>()));
        response.headers_mut().insert(header::CONTENT_LENGTH, 7.into());
        let items = Relay::new(response, UsageInStream::Strip).map(Result::unwrap).collect::<Vec<_>>();
        let items = items.now_or_never().unwrap();
        let [Item::Head(head), .., Item::End(report)] = &items[..] else { panic!("{items:?}") };
        let content_type = head.headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap().to_owned());
        (content_type.unwrap_or_default(), head.headers.contains_key(header::CONTENT_LENGTH), report.usage)
    };
    let relayed = |body: Bytes| relayed_in(vec![body]);
    let json = r#" {"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    assert_eq!(relayed(json.into()), ("application/json".into(), true, Some(USAGE)));
    let script = Script::chat(&["a"], Some(USAGE));
    assert_eq!(relayed(script.body()), ("text/event-stream".into(), false, Some(USAGE)));
    let messages = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    assert_eq!(relayed(messages.into()), ("text/event-stream".into(), false, None));
    assert_eq!(relayed("words".into()), (String::new(), true, None));
    let events = ("text/event-stream".to_owned(), false, Some(USAGE));
    let body = script.body();
    for parts in [
        vec![body.slice(..1), body.slice(1..)],
        vec![": ping\n\n".into(), body.clone()],
        vec![[b"id: 1\n", &body[..]].concat().into()],
    ] {
        assert_eq!(relayed_in(parts), events);
    }
    let spaced = vec![" \n".into(), " ".into(), json.trim_ascii_start().into()];
    assert_eq!(relayed_in(spaced), ("application/json".into(), true, Some(USAGE)));
    for undecided in ["d", "event", " "] {
        assert_eq!(relayed(undecided.into()), (String::new(), true, None), "it ends before it says what it is");
    }
    assert_eq!(relayed_in(vec![" ".repeat(MAX_START).into(), json.into()]), (String::new(), true, Some(USAGE)));
    let empty = Relay::new(response("", stream::iter([])), UsageInStream::Keep).map(Result::unwrap);
    let items: Vec<_> = empty.collect().now_or_never().unwrap();
    assert!(matches!(&items[..], [Item::Head(_), Item::End(Report { usage: None, failed: false, .. })]), "{items:?}");
}

#[test]
fn what_an_answer_has_reported_is_known_before_its_end() {
    let meta_info = |tokens: u64| format!(r#""meta_info":{{"prompt_tokens":3,"completion_tokens":{tokens}}}"#);
    for (content_type, parts) in [
        ("text/event-stream", [1000, 2000].map(|tokens| event(&format!(r#"{{"text":"a",{}}}"#, meta_info(tokens))))),
        ("application/json", [format!("[{{{}}},{{{}", meta_info(1000), meta_info(1000)), r#","text":"a"#.to_owned()]),
    ] {
        let (sender, chunks) = mpsc::unbounded();
        let mut relay = Relay::new(response(content_type, chunks), UsageInStream::Keep);
        for part in parts {
            sender.unbounded_send(Ok(Bytes::from(part))).unwrap();
            while relay.next().now_or_never().is_some() {}
        }
        let usage = relay.so_far().usage.unwrap();
        assert_eq!(usage.completion_tokens, Some(2000), "{content_type}");
    }
}

#[test]
fn the_length_of_a_stream_is_not_sent() {
    for (content_type, usage, length) in [
        ("text/event-stream", UsageInStream::Keep, false),
        ("text/event-stream", UsageInStream::Strip, false),
        ("application/json", UsageInStream::Strip, true),
    ] {
        let mut response = response(content_type, stream::iter([Ok(Script::default().body())]));
        response.headers_mut().insert(header::CONTENT_LENGTH, 7.into());
        let Some(Some(Ok(Item::Head(head)))) = Relay::new(response, usage).next().now_or_never() else { panic!() };
        assert_eq!(head.headers.contains_key(header::CONTENT_LENGTH), length);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_split_gives_the_same_answer(
        texts in vec("[a-z\"\\\\é{}]{0,6}", 0..6),
        cuts in vec(any::<prop::sample::Index>(), 0..30),
        null_usage in any::<bool>(),
        strip in any::<bool>(),
    ) {
        let texts: Vec<_> = texts.iter().map(String::as_str).collect();
        let script = Script::chat(&texts, Some(USAGE));
        let body = if null_usage { script.with_null_usage() } else { script }.body();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(body.len())).chain([0, body.len()]).collect();
        cuts.sort_unstable();
        let chunks = cuts.windows(2).map(|cut| Ok(body.slice(cut[0]..cut[1]))).collect();
        let usage = if strip { UsageInStream::Strip } else { UsageInStream::Keep };
        let outcome = relayed("text/event-stream", usage, chunks);
        let expected = if strip { Script::chat(&texts, None).body() } else { body };
        prop_assert_eq!(&outcome.bytes[..], &expected[..]);
        prop_assert_eq!(outcome.end.unwrap(), Report { usage: Some(USAGE), ..Report::default() });
    }
}
