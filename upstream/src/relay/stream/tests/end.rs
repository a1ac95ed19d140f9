//! What ends a stream, and what is missing where it ends otherwise.

use super::*;

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
