use super::*;
use crate::tiny_tokenizer::{self, BOS, EOS, TURN};
use serde_json::json;

/// Concatenates parts of text, as templates with images do, and shows what it gets of tools and calls.
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }} {% if m.content is string %}\
    {{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\
    {% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|eos|>{% endfor %}\
    {% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | length }}{% endif %}\
    {% if enable_thinking is defined %}{{ enable_thinking }}{{ reasoning_effort }}{% endif %}{{ suffix }}\
    {% if add_generation_prompt %}<|turn|>{% endif %}";

fn local(template: &str) -> LocalTokenizer {
    LocalTokenizer::new(TokenizerText {
        tokenizer: &tiny_tokenizer::tokenizer(),
        chat_template: Some(template),
        special_tokens: &[("bos_token".to_owned(), "<|bos|>".to_owned())],
    })
    .unwrap()
}

#[expect(clippy::needless_pass_by_value, reason = "the callers write the values in place")]
fn tokens(local: &LocalTokenizer, fields: Value, format: ContentFormat) -> Option<Vec<u32>> {
    let prompt = local.prompt(fields.as_object().unwrap().clone(), format)?;
    local.tokens(&prompt, usize::MAX, &EncodeJob::default()).unwrap()
}

/// The text of these tokens.
fn text(local: &LocalTokenizer, tokens: Option<Vec<u32>>) -> String {
    local.encoder.tokenizer().decode(&tokens.unwrap(), false).unwrap()
}

#[test]
fn messages_are_those_that_vllm_gives_to_templates() {
    let messages = json!([
        { "role": "user", "content": "hi", "name": "bob", "x": 1 },
        { "role": "assistant", "content": null, "tool_calls": [{
            "function": { "name": "f", "arguments": "{\"b\":1,\"a\":2}" }, "type": "function", "id": "c1", "index": 0,
        }] },
        { "content": [{ "text": "12", "type": "text" }], "tool_call_id": "c1", "role": "tool" },
        { "role": "assistant", "content": "x", "reasoning": "r", "refusal": null, "tool_calls": [] },
    ]);
    let rendered = |format| {
        let rendered = messages::as_rendered(messages.as_array().unwrap().clone(), format).unwrap();
        rendered.iter().map(Value::to_string).collect::<Vec<_>>()
    };
    // Printed by vLLM 0.32.0 for these messages, with its two formats of contents.
    let call =
        r#""tool_calls":[{"id":"c1","function":{"arguments":{"b":1,"a":2},"name":"f"},"type":"function","index":0}]"#;
    let reasoning = r#""reasoning":"r","reasoning_content":"r""#;
    let tool = r#"{"role":"tool","content":"12","tool_call_id":"c1"}"#;
    assert_eq!(
        rendered(ContentFormat::Text),
        [
            r#"{"role":"user","content":"hi","name":"bob"}"#,
            &format!(r#"{{"role":"assistant","content":"",{call}}}"#),
            tool,
            &format!(r#"{{"role":"assistant","content":"x",{reasoning}}}"#),
        ]
    );
    assert_eq!(
        rendered(ContentFormat::Parts),
        [
            r#"{"role":"user","content":[{"type":"text","text":"hi"}],"name":"bob"}"#,
            &format!(r#"{{"role":"assistant","content":[],{call}}}"#),
            tool,
            &format!(r#"{{"role":"assistant","content":[{{"type":"text","text":"x"}}],{reasoning}}}"#),
        ]
    );
    let tools = json!([{ "function": { "parameters": { "z": 1 }, "name": "f" }, "type": "function" }]);
    assert_eq!(
        messages::tools_as_rendered(tools).unwrap().to_string(),
        r#"[{"type":"function","function":{"name":"f","description":null,"parameters":{"z":1}}}]"#
    );
}

#[test]
fn prompts_are_rendered_and_tokenized() {
    let local = local(TEMPLATE);
    let hello = tokens(&local, json!({ "prompt": "hello<|eos|>" }), ContentFormat::Text);
    assert_eq!(hello, Some(vec![BOS, 259, EOS]));
    assert_eq!(hello, tokens(&local, json!({ "prompt": ["hello<|eos|>"] }), ContentFormat::Text));
    let bare = json!({ "prompt": "hello", "add_special_tokens": false });
    assert_eq!(tokens(&local, bare, ContentFormat::Text), Some(vec![259]));

    let parts = json!([{ "type": "text", "text": "hello" }, { "type": "text", "text": "he" }]);
    let chat = json!({ "messages": [{ "role": "user", "content": parts }] });
    let prompt = |fields: &Value, format| text(&local, tokens(&local, fields.clone(), format));
    assert_eq!(prompt(&chat, ContentFormat::Text), "<|bos|><|turn|>user hello\nhe<|eos|><|turn|>");
    assert_eq!(prompt(&chat, ContentFormat::Parts), "<|bos|><|turn|>user hellohe<|eos|><|turn|>");
    assert_eq!(tokens(&local, chat, ContentFormat::Text).unwrap()[..2], [BOS, TURN], "one <|bos|>");

    let all = json!({ "messages": [{ "role": "user", "content": "he" }], "documents": [{}, {}],
        "chat_template_kwargs": { "suffix": "!" }, "reasoning_effort": "none", "add_generation_prompt": false });
    assert_eq!(prompt(&all, ContentFormat::Text), "<|bos|><|turn|>user he<|eos|>2Falsenone!");
}

#[test]
fn a_continued_message_ends_the_prompt() {
    let ask = |template: &str, content: &str| {
        let local = local(template);
        let fields = json!({ "messages": [{ "role": "assistant", "content": content }], "add_generation_prompt": false,
            "continue_final_message": true });
        tokens(&local, fields, ContentFormat::Text).map(|tokens| text(&local, Some(tokens)))
    };
    let trims = "{% for m in messages %}{{ m.content | trim }}<|eos|>{% endfor %}";
    assert_eq!(ask(TEMPLATE, "he ll "), Some("<|bos|><|turn|>assistant he ll ".to_owned()));
    assert_eq!(ask(trims, "he ll "), Some("he ll".to_owned()));
    assert_eq!(ask("nothing", "he"), None);
}

#[test]
fn the_tokenizer_of_gpt_oss_is_known_by_its_tokens() {
    let local = local(TEMPLATE);
    assert!(!local.is_of_gpt_oss());
    assert!(LocalTokenizer { added: vec!["<|call|>".to_owned(), "<|constrain|>".to_owned()], ..local }.is_of_gpt_oss());
}

#[test]
fn what_may_be_rendered_otherwise_has_no_tokens() {
    let local = local(TEMPLATE);
    let user = json!({ "role": "user", "content": "he" });
    let call = |call: Value| json!({ "messages": [{ "role": "assistant", "tool_calls": [call] }] });
    let message = |message: Value| json!({ "messages": [user, message] });
    for fields in [
        json!({ "prompt": ["a", "b"] }),
        json!({ "prompt": [1, 2] }),
        json!({ "prompt": "a", "add_special_tokens": "yes" }),
        json!({ "messages": "he" }),
        json!({ "messages": [user], "chat_template": "x" }),
        json!({ "messages": [user], "chat_template_kwargs": { "tokenize": true } }),
        json!({ "messages": [user], "chat_template_kwargs": [] }),
        json!({ "messages": [user], "continue_final_message": true }),
        json!({ "messages": [user], "tools": [{ "type": "function", "function": { "name": "f", "odd": 1 } }] }),
        json!({ "messages": [user], "tools": [{ "type": "web_search" }] }),
        message(json!({ "role": "developer", "content": "he" })),
        message(json!({ "role": "system", "content": "x-anthropic-billing-header: 1\nhe" })),
        message(json!({ "role": "assistant", "content": "he", "reasoning_content": "r" })),
        message(json!({ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] })),
        message(json!({ "role": "user", "content": [{ "type": "text", "text": "he", "cache_control": {} }] })),
        call(json!({ "type": "function", "function": { "name": "f" } })),
        call(json!({ "id": "c", "type": "function", "function": { "name": "f" }, "odd": 1 })),
        call(json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": " ".repeat(2 << 20) } })),
    ] {
        assert_eq!(tokens(&local, fields.clone(), ContentFormat::Text), None, "{fields:.200}");
    }
    let refuses = self::local("{{ raise_exception('no') }}");
    assert_eq!(tokens(&refuses, json!({ "messages": [user] }), ContentFormat::Text), None);
    let no_template = LocalTokenizer { template: None, ..local };
    assert_eq!(tokens(&no_template, json!({ "messages": [user] }), ContentFormat::Text), None);
}
