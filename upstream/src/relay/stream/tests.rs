mod end;
mod report;

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
