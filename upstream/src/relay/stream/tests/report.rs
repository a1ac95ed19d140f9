//! The usage and the id of an answer, and what the client gets of them.

use super::*;

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
