use super::*;
use Kind::{Done, Error, Output, Preamble};

fn read(data: &str) -> (Kind, bool) {
    let chunk = Chunk::read(data.as_bytes());
    (chunk.kind, chunk.finished)
}

/// A chat chunk with this choice.
fn chat(choice: &str) -> String {
    format!(r#"{{"id":"c","object":"chat.completion.chunk","model":"m","choices":[{{"index":0,{choice}}}]}}"#)
}

#[test]
fn output_is_told_from_roles_and_empty_deltas() {
    for (choice, expected) in [
        (r#""delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null"#, (Preamble, false)),
        (
            r#""delta":{"role":"assistant","content":null,"tool_calls":[],"x":{}},"finish_reason":null"#,
            (Preamble, false),
        ),
        (r#""delta":null"#, (Preamble, false)),
        (r#""delta":{"content":"a"},"finish_reason":null"#, (Output, false)),
        (r#""delta":{"r\u006fle":"assistant","content":"a"}"#, (Output, false)),
        (r#""delta":{"r\u006fle":"assistant"}"#, (Preamble, false)),
        (r#""delta":{"reasoning_content":"a"}"#, (Output, false)),
        (r#""delta":{"reasoning":"a","content":null}"#, (Output, false)),
        (r#""delta":{"tool_calls":[{"index":0}]}"#, (Output, false)),
        (r#""delta":{},"finish_reason":"stop""#, (Output, true)),
        (r#""text":"","finish_reason":null"#, (Preamble, false)),
        (r#""text":"a","finish_reason":null"#, (Output, false)),
        (r#""text":"","finish_reason":"length""#, (Output, true)),
    ] {
        assert_eq!(read(&chat(choice)), expected, "{choice}");
    }
    let two = r#"{"choices":[{"delta":{"role":"assistant"}},{"delta":{"content":"a"}}]}"#;
    assert_eq!(read(two), (Output, false));
}

#[test]
fn the_usage_chunk_has_no_choices() {
    let usage =
        r#"{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}"#;
    let chunk = Chunk::read(format!(r#"{{"id":"c","choices":[],"usage":{usage}}}"#).as_bytes());
    let expected = Usage { prompt_tokens: Some(7), completion_tokens: Some(2), cached_tokens: Some(4) };
    let of_usage = Chunk { kind: Kind::Usage, finished: true, usage: Some(expected), item: None, response_id: None };
    assert_eq!(chunk, of_usage);
    let chunk = Chunk::read(format!(r#"{{"choices":[{{"delta":{{"content":"a"}}}}],"usage":{usage}}}"#).as_bytes());
    assert_eq!((chunk.kind, chunk.usage), (Output, Some(expected)));
    assert_eq!(read(r#"{"choices":[],"usage":null,"prompt_filter_results":[{}]}"#), (Preamble, false));
    for unreadable in ["[]", "7", r#""none""#] {
        assert_eq!(read(&format!(r#"{{"choices":[],"usage":{unreadable}}}"#)), (Kind::Usage, true), "{unreadable}");
    }
}

#[test]
fn usage_is_read_in_all_shapes() {
    for (json, prompt, completion, cached) in [
        (r#"{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":null}"#, Some(7), Some(2), None),
        (r#"{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":null}}"#, Some(7), None, None),
        (
            r#"{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":3}}"#,
            Some(7),
            Some(2),
            Some(3),
        ),
        (
            r#"{"input_tokens":7,"output_tokens":2,"cache_read_input_tokens":3,"cache_creation_input_tokens":null}"#,
            Some(10),
            Some(2),
            Some(3),
        ),
        (r#"{"prompt_tokens":7,"completion_tokens":2,"cached_tokens":3}"#, Some(7), Some(2), Some(3)),
        (r#"{"prompt_tokens":-1,"completion_tokens":"2"}"#, None, None, None),
        (r#"{"prompt_tokens":7,"total_tokens":9}"#, Some(7), Some(2), None),
        (r#"{"prompt_tokens":7,"total_tokens":7}"#, Some(7), Some(0), None),
        (r#"{"prompt_tokens":7,"total_tokens":6}"#, Some(7), None, None),
        (r#"{"total_tokens":9}"#, None, None, None),
    ] {
        let usage = Usage { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached };
        assert_eq!(Usage::read(json.as_bytes()), Some(usage), "{json}");
    }
    assert_eq!(Usage::read(b"7"), None);
}

#[test]
fn the_events_of_coheres_chat_are_known() {
    for (event, expected) in [
        (r#"{"type":"message-start","id":"c","delta":{"message":{"role":"assistant"}}}"#, (Preamble, false)),
        (r#"{"type":"content-start","index":0,"delta":{"message":{"content":{"type":"text"}}}}"#, (Preamble, false)),
        (r#"{"type":"content-delta","index":0,"delta":{"message":{"content":{"text":"a"}}}}"#, (Output, false)),
        (r#"{"type":"content-end","index":0}"#, (Output, false)),
        (r#"{"type":"tool-call-start","delta":{}}"#, (Output, false)),
        (r#"{"type":"message-end","delta":{"finish_reason":"COMPLETE"}}"#, (Output, true)),
        (r#"{"type":"message-end","delta":{"error":"out of memory","finish_reason":"ERROR"}}"#, (Error, true)),
    ] {
        assert_eq!(read(event), expected, "{event}");
    }
    let billed = r#""billed_units":{"input_tokens":1,"output_tokens":1}"#;
    let usage = format!(r#"{{{billed},"tokens":{{"input_tokens":7.0,"output_tokens":2}},"cached_tokens":4.0}}"#);
    let expected = Usage { prompt_tokens: Some(7), completion_tokens: Some(2), cached_tokens: Some(4) };
    let end =
        |usage: &str| format!(r#"{{"type":"message-end","delta":{{"finish_reason":"COMPLETE","usage":{usage}}}}}"#);
    assert_eq!(Chunk::read(end(&usage).as_bytes()).usage, Some(expected));
    assert_eq!(Chunk::read(end("null").as_bytes()).usage, None);
    let mut scanner = UsageScanner::of_answer();
    scanner.push(format!(r#"{{"id":"c","message":{{"usage":{{"tokens":9}}}},"usage":{usage}}}"#).as_bytes());
    assert_eq!(scanner.take().usage, Some(expected), "of an answer that is no stream");
}

#[test]
fn later_usage_completes_earlier_usage() {
    let start = br#"{"type":"message_start","message":{"usage":{"input_tokens":7,"cache_read_input_tokens":0}}}"#;
    let mut usage = Chunk::read(start).usage.unwrap();
    usage.update(Chunk::read(br#"{"type":"message_delta","usage":{"output_tokens":2}}"#).usage.unwrap());
    assert_eq!(usage, Usage { prompt_tokens: Some(7), completion_tokens: Some(2), cached_tokens: Some(0) });
    // vLLM may know what was cached at the end only.
    let start = br#"{"type":"message_start","message":{"usage":{"input_tokens":40,"output_tokens":0}}}"#;
    let end = br#"{"type":"message_delta","usage":{"input_tokens":8,"output_tokens":2,"cache_read_input_tokens":32}}"#;
    let mut usage = Chunk::read(start).usage.unwrap();
    usage.update(Chunk::read(end).usage.unwrap());
    assert_eq!(usage, Usage { prompt_tokens: Some(40), completion_tokens: Some(2), cached_tokens: Some(32) });
}

#[test]
fn an_item_of_a_batch_has_its_own_usage() {
    for (index, expected) in [("", 0), (r#""index":3,"#, 3), (r#""index":null,"#, 0)] {
        let data = format!(r#"{{"text":"a",{index}"meta_info":{{"id":"r","prompt_tokens":7,"completion_tokens":2}}}}"#);
        let usage = Usage { prompt_tokens: Some(7), completion_tokens: Some(2), cached_tokens: None };
        let chunk = Chunk { kind: Output, finished: true, usage: Some(usage), item: Some(expected), response_id: None };
        assert_eq!(Chunk::read(data.as_bytes()), chunk, "{data}");
    }
}

#[test]
fn done_and_errors_are_recognized() {
    assert_eq!(read("[DONE]"), (Done, true));
    assert_eq!(read(" [DONE]\n"), (Done, true));
    assert_eq!(read(r#"{"error":{"message":"m","code":400}}"#), (Error, true));
    assert_eq!(read(r#"{"object":"error","message":"m"}"#), (Error, true));
    assert_eq!(read(r#"{"type":"error","error":{}}"#), (Error, true));
    assert_eq!(read(r#"{"type":"response.failed","response":{}}"#), (Error, true));
    assert_eq!(read(r#"{"error":null,"choices":[{"text":"a"}]}"#), (Output, false));
}

#[test]
fn events_of_other_apis_are_known() {
    assert_eq!(read(r#"{"type":"message_start","message":{}}"#), (Preamble, false));
    assert_eq!(read(r#"{"type":"content_block_delta","delta":{"text":"a"}}"#), (Output, false));
    assert_eq!(read(r#"{"type":"message_stop"}"#), (Output, true));
    assert_eq!(read(r#"{"type":"response.created","response":{}}"#), (Preamble, false));
    assert_eq!(read(r#"{"type":"response.output_text.delta","delta":"a"}"#), (Output, false));
    let details = r#"{"cached_tokens":4,"cached_tokens_per_turn":[9]}"#;
    let usage = format!(r#"{{"input_tokens":5,"input_tokens_details":{details},"output_tokens":1}}"#);
    let completed = format!(r#"{{"type":"response.completed","response":{{"usage":{usage}}}}}"#);
    let chunk = Chunk::read(completed.as_bytes());
    assert_eq!((chunk.kind, chunk.finished), (Output, true));
    let usage = Usage { prompt_tokens: Some(5), completion_tokens: Some(1), cached_tokens: Some(4) };
    assert_eq!(chunk.usage, Some(usage));
}

#[test]
fn unknown_chunks_count_as_output() {
    for data in [r#"{"a":1}"#, r#"{"choices":7}"#, r#"{"choices":[{"delta":5}]}"#, r#"{"type":7}"#] {
        assert_eq!(read(data), (Output, true), "{data}");
    }
    for data in ["", "ping", "7", r#"{"choices":[],"usage":{}"#, "{\"a\":\"\u{fffd}"] {
        assert_eq!(read(data), (Output, false), "{data}");
    }
}

#[test]
fn text_cannot_pass_for_a_member() {
    let text = r#"{"usage":{"prompt_tokens":1},"error":{},"finish_reason":"stop","choices":[]} [DONE]"#;
    let quoted = serde_json::to_string(text).unwrap();
    let data = chat(&format!(r#""delta":{{"content":{quoted}}},"finish_reason":null"#));
    let output = Chunk { kind: Output, finished: false, usage: None, item: None, response_id: None };
    assert_eq!(Chunk::read(data.as_bytes()), output);
    assert_eq!(Relevance::of(data.as_bytes()), Relevance::Output);
    let role = chat(r#""delta":{"role":"{\"content\":\"a\"}"},"x":{"finish_reason":"stop","text":"a"}"#);
    assert_eq!(read(&role), (Preamble, false));
}

#[test]
fn only_chunks_that_may_matter_are_read() {
    for (data, expected) in [
        (r#"{"choices":[{"delta":{"content":"a"}}]}"#, Relevance::Output),
        (r#"{"choices":[{"delta":{"content":"a"}}],"usage":null}"#, Relevance::NullUsage),
        (r#"{"choices":[{"delta":{"content":"usage"}}]}"#, Relevance::Read),
        (r#"{"choices":[],"usage":{}}"#, Relevance::Read),
        (r#"{"choices":[{"delta":{}}],"usage": null}"#, Relevance::Read),
        (r#"{"error":{}}"#, Relevance::Read),
        (r#"{"error":{},"usage":null}"#, Relevance::Read),
        ("[DONE]", Relevance::Read),
    ] {
        assert_eq!(Relevance::of(data.as_bytes()), expected, "{data}");
    }
}
