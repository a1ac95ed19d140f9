use super::*;
use proptest::prelude::*;

/// What is found in an answer that arrives in these parts.
fn found<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Option<Usage> {
    let mut scanner = UsageScanner::of_answer();
    parts.into_iter().for_each(|part| scanner.push(part));
    scanner.take().usage
}

fn usage(answer: &str) -> Option<Usage> {
    found([answer.as_bytes()])
}

#[expect(clippy::unnecessary_wraps, reason = "it is compared with what was found, which may be nothing")]
fn tokens(prompt: Option<u64>, completion: Option<u64>, cached: Option<u64>) -> Option<Usage> {
    Some(Usage { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached })
}

#[test]
fn the_usage_is_found_however_the_answer_is_cut() {
    let details = r#"{"a":[1,{"cached_tokens":99}],"cached_tokens":4}"#;
    let chat = format!(r#"{{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{details}}}"#);
    let spaced = format!("{{ \"input_tokens\" : 7 , \"input_tokens_details\" :\t{details},\"output_tokens\":2 }}");
    let meta_info = format!(r#"{{"id":"r","b":{{}},"completion_tokens":2,"c":[],{}"#, &chat[1..]);
    let message = r#"{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":4}"#;
    for answer in [
        format!(r#"{{"type":"message","content":[{{"type":"text","text":"a"}}],"usage":{message}}}"#),
        r#"{"text":"a","meta_info":{"prompt_tokens":7,"completion_tokens":2,"cached_tokens":4,"a":[]}}"#.to_owned(),
        format!(r#"{{"choices":[{{"text":"\"usage\":{{}} \\"}}],"usage":{chat}}}"#),
        format!("\n {{ \"usage\" : {spaced} , \"id\":\"x\" }} "),
        format!(r#"{{"text":"\"meta_info\"","meta_info":{meta_info}}}"#),
    ] {
        let expected = tokens(Some(7), Some(2), Some(4));
        let bytes = answer.as_bytes();
        assert_eq!(found([bytes]), expected, "{answer}");
        assert_eq!(found(bytes.chunks(1)), expected, "{answer}");
        for cut in 0..bytes.len() {
            assert_eq!(found([&bytes[..cut], &bytes[cut..]]), expected, "{answer} cut at {cut}");
        }
    }
}

#[test]
fn only_the_usage_of_the_answer_itself_counts() {
    let planted = r#"{"parameters":{"usage":{"input_tokens":0,"output_tokens":0}}}"#;
    let tools = vec![planted; 40].join(",");
    let real = r#""usage":{"input_tokens":3,"output_tokens":4000}"#;
    let expected = tokens(Some(3), Some(4000), None);
    for answer in [
        format!(r#"{{"tools":[{tools}],"metadata":{{"usage":{{"output_tokens":1}}}},{real}}}"#),
        format!(r#"{{{real},"tools":[{tools}],"metadata":{{"usage":{{"output_tokens":1}}}}}}"#),
        format!(r#"{{"a":"usage","b":{{"output_tokens":1}},{real},"usage_of":{{"output_tokens":1}}}}"#),
        format!(r#"{{"a":["usage",{{"output_tokens":1}}],"b":"usage\":{{\"output_tokens\":1}}",{real}}}"#),
        format!(r#"{{"usage":{{"output_tokens":1}},"response":"usage",{real}}}"#),
        format!(r#"{{"meta_info":{{"completion_tokens":1}},{real},"output":[[{{}}],{{"x":[]}}]}}"#),
    ] {
        assert_eq!(usage(&answer), expected, "{answer}");
    }
    for answer in [
        r#"{"x":{"usage":{"output_tokens":1}}}"#,
        r#"[["usage",{"output_tokens":1}]]"#,
        r#"[[{"usage":{"output_tokens":1}}]]"#,
        r#"{"usage":null,"x":{"output_tokens":1}}"#,
        r#"{"usage":[{"output_tokens":1}]}"#,
        r#"{"usage":{"output_tokens":1}"#,
        r#"x{"usage":{"output_tokens":1}}"#,
        r#""usage""#,
        "",
    ] {
        assert_eq!(usage(answer), None, "{answer}");
    }
    assert_eq!(usage(r#"{"usage":{"type":"duration","seconds":9}}"#), tokens(None, None, None));
    assert_eq!(usage(r#"{"usage":{"prompt_tokens":"8","completion_tokens":-1}}"#), tokens(None, None, None));
}

#[test]
fn the_output_of_a_batch_is_that_of_all_items() {
    let item = |tokens: u64| {
        format!(r#"{{"text":"a]","output_ids":[1,2],"meta_info":{{"prompt_tokens":3,"completion_tokens":{tokens}}}}}"#)
    };
    let batch = [700, 1, 20].map(item).join(" , ");
    assert_eq!(usage(&format!("[{batch}]")), tokens(None, Some(721), None));
    assert_eq!(usage(&format!("[{}]", item(5))), tokens(Some(3), Some(5), None));
    assert_eq!(usage(&format!("[{{}},{},7]", item(5))), tokens(Some(3), Some(5), None));
}

#[test]
fn the_counts_of_ollama_are_in_its_last_line() {
    let line = r#"{"message":{"role":"assistant","content":"a","eval_count":99},"x":[{"eval_count":9}],"done":false}"#;
    let last = r#"{"response":"","done":true,"context":[1],"prompt_eval_count":9,"eval_count":100,"eval_duration":5}"#;
    let lines = format!("{line}\n{line}\n{last}\n");
    for cut in 0..lines.len() {
        let (before, after) = lines.as_bytes().split_at(cut);
        assert_eq!(found([before, after]), tokens(Some(9), Some(100), None), "cut at {cut}");
    }
    assert_eq!(usage(line), None);
    assert_eq!(usage(r#"{"embeddings":[[0.5]],"prompt_eval_count":8}"#), tokens(Some(8), Some(0), None));
    assert_eq!(usage(r#"{"usage":{"prompt_tokens":8},"eval_count":9}"#), tokens(Some(8), None, None));
}

#[test]
fn the_length_of_an_answer_does_not_matter() {
    let mut scanner = UsageScanner::of_answer();
    scanner.push(br#"{"data":[{"embedding":""#);
    (0..80).for_each(|_| scanner.push(&b"A".repeat(1 << 16)));
    scanner.push(br#""}],"numbers":["#);
    (0..80).for_each(|_| scanner.push(&b"0.125,".repeat(1 << 13)));
    scanner.push(br#"1],"usage":{"prompt_tokens":8,"completion_tokens":9}}"#);
    assert_eq!(scanner.take().usage, tokens(Some(8), Some(9), None));
}

#[test]
fn events_that_follow_each_other_are_read_one_by_one() {
    let mut scanner = UsageScanner::of_events();
    scanner.push(b"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{");
    scanner.push(b"\"input_tokens\":3,\"output_tokens\":4},\"x\":{\"usage\":{\"output_tokens\":1}}}}\n");
    assert_eq!(scanner.take().usage, tokens(Some(3), Some(4), None));
    assert_eq!(scanner.take().usage, None, "it was taken");
    scanner.push(b"\ndata: {\"index\":2,\"meta_info\":{\"completion_tokens\":5}}\n\n");
    let found = scanner.take();
    assert_eq!((found.usage, found.item), (tokens(None, Some(5), None), Some(2)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any bytes: no panic, and the same result however they are cut.
    #[test]
    fn damaged_answers_do_not_panic(
        pieces in proptest::collection::vec(proptest::sample::select(vec![
            "{", "}", "[", "]", ":", ",", "\"", "\\", " ", "7", "x", "\"usage\"", "\"meta_info\"", "\"response\"",
            "\"index\"", "\"completion_tokens\"", "\"prompt_tokens_details\"", "\"cached_tokens\"",
            "\"eval_count\"",
        ]), 0..60),
        cut in any::<prop::sample::Index>(),
    ) {
        let text = pieces.concat();
        let cut = cut.index(text.len() + 1);
        let (before, after) = text.as_bytes().split_at(cut);
        prop_assert_eq!(usage(&text), found([before, after]));
    }
}
