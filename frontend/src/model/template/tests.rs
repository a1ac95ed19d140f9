use super::{Conversation, Template};
use crate::error::Error;
use serde_json::json;

fn render(source: &str, conversation: Conversation) -> Result<String, Error> {
    Template::new(source, &[("bos_token".into(), "<s>".into())]).unwrap().render(conversation)
}

fn hello() -> Conversation {
    Conversation {
        messages: vec![json!({ "role": "user", "content": " hello " })],
        add_generation_prompt: true,
        ..Conversation::default()
    }
}

#[test]
fn a_usual_template_renders_as_jinja_does() {
    let source = "{{ bos_token }}\n{% for message in messages %}\n    {% if message.role == 'user' %}\n\
        U:{{ message['content'].strip() }}{{ '\\n' }}\n    {% endif %}\n{% endfor %}\n\
        {% if add_generation_prompt %}A:{% endif %}";
    // As Hugging Face sets Jinja up: a block's line leaves neither its newline nor its indent.
    assert_eq!(render(source, hello()).unwrap(), "<s>\nU:hello\n\nA:");
}

#[test]
fn json_has_pythons_format_and_the_clients_order() {
    let tools = json!([{ "type": "function", "function": { "name": "f", "b": [1, 2.5, true, null], "a": "<é&'>" } }]);
    let conversation = Conversation { tools: Some(tools), ..hello() };
    assert_eq!(
        render("{{ tools | tojson }}", conversation).unwrap(),
        r#"[{"type": "function", "function": {"name": "f", "b": [1, 2.5, true, null], "a": "<é&'>"}}]"#
    );
    let conversation = Conversation { tools: Some(json!({ "b": [1], "a": {} })), ..hello() };
    assert_eq!(
        render("{{ tools | tojson(indent=2) }}", conversation).unwrap(),
        "{\n  \"b\": [\n    1\n  ],\n  \"a\": {}\n}"
    );
}

#[test]
fn an_exception_of_the_template_is_the_error_message() {
    let refused = render("{{ raise_exception('roles must alternate') }}", hello()).unwrap_err();
    assert!(refused.to_string().ends_with("roles must alternate"), "{refused}");
    assert_eq!(refused.status(), 400);
}

#[test]
fn a_broken_template_is_refused_with_its_line() {
    let problem = Template::new("{{ a }}\n{% if %}", &[]).err().unwrap();
    assert!(problem.starts_with("has a chat template that does not compile: "), "{problem}");
    assert!(problem.contains("chat template:2"), "{problem}");
}

#[test]
fn tools_that_the_template_ignores_are_refused() {
    let tools = || Conversation { tools: Some(json!([{ "type": "function" }])), ..hello() };
    let refused = render("{{ messages }}", tools()).unwrap_err();
    assert_eq!(refused.status(), 400);
    assert!(refused.to_string().contains("ignores 'tools'"), "{refused}");
    assert!(render("{{ messages }}{{ tools | length }}", tools()).is_ok());
    assert!(render("{% if tools %}t{% else %}{{ raise_exception('none') }}{% endif %}", tools()).is_ok());
    assert!(render("{{ messages }}", hello()).is_ok());
}

#[test]
fn absent_tools_and_documents_are_none() {
    assert_eq!(render("{{ tools is none }} {{ documents is none }}", hello()).unwrap(), "True True");
}

#[test]
fn the_last_message_can_be_continued() {
    let conversation = Conversation {
        messages: vec![
            json!({ "role": "user", "content": "so" }),
            json!({ "role": "assistant", "content": "so far " }),
        ],
        continue_final_message: true,
        ..Conversation::default()
    };
    let source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}";
    assert_eq!(render(source, conversation).unwrap(), "[so][so far");
}

#[test]
fn variables_of_the_client_reach_the_template() {
    let mut conversation = hello();
    conversation.variables.insert("enable_thinking".into(), false.into());
    assert_eq!(render("{% if enable_thinking is false %}quick{% endif %}", conversation).unwrap(), "quick");
}

#[test]
fn a_template_that_loops_fails_the_request() {
    let range = "range(99999)";
    for (body, limit) in [("{% set a = 1 %}", "100000000 instructions"), ("{{ text }}", "256 MiB")] {
        let source = format!("{{% for i in {range} %}}{{% for j in {range} %}}{body}{{% endfor %}}{{% endfor %}}");
        let mut conversation = hello();
        conversation.variables.insert("text".into(), "x".repeat(1 << 20).into());
        let refused = render(&source, conversation).unwrap_err();
        assert_eq!(refused.status(), 400);
        assert!(refused.to_string().starts_with("The chat template was stopped: "), "{refused}");
        assert!(refused.to_string().contains(limit), "{refused}");
    }
}

#[test]
fn long_conversations_with_many_tools_are_within_the_limit() {
    // For each call of a tool it looks at all later messages, as the template of gpt-oss does.
    let source = "{% macro kind(p) %}{% if p.type == 'object' %}{% for k, v in p.properties.items() %}{{ k }}: \
        {{ kind(v) }}{% endfor %}{% else %}{{ p.type }}{% endif %}{% endmacro %}{% for tool in tools %}\
        {{ tool.function.name }}{{ kind(tool.function.parameters) }}{% endfor %}{% for m in messages %}\
        {% if m.tool_calls is defined %}{% set later = namespace(found=false) %}{% for n in messages[loop.index:] %}\
        {% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.found = true %}{% endif %}{% endfor %}\
        {{ m.tool_calls | tojson }}{% endif %}{{ later.found }}{{ m.content }}{% endfor %}";
    let message = json!({ "role": "assistant", "content": "c", "tool_calls": [{ "name": "f", "arguments": {} }] });
    let properties = (0..20).map(|i| (format!("p{i}"), json!({ "type": "string" }))).collect::<serde_json::Map<_, _>>();
    let parameters = json!({ "type": "object", "properties": properties });
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": parameters } });
    let conversation =
        Conversation { messages: vec![message; 2000], tools: Some(vec![tool; 200].into()), ..Conversation::default() };
    render(source, conversation).unwrap();
}
