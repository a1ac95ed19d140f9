use super::{EndpointKind, FIELDS, Field, Support, check, is_misspelling, missing};
use crate::params::fields::Fields;
use std::collections::HashSet;

fn cell(support: Support) -> &'static str {
    match support {
        Support::Supported => "done",
        Support::Rejected => "refused",
        Support::Ignored => "no effect",
    }
}

fn row(field: &Field) -> String {
    let Field { name, from, neutral, hint, .. } = field;
    let neutral = if *neutral == "null" { String::new() } else { format!("`{neutral}` passes") };
    let instead = if hint.is_empty() { String::new() } else { format!("use {hint}") };
    let notes = [neutral, instead].into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ");
    format!("| `{name}` | {from} | {} | {} | {notes} |", cell(field.chat), cell(field.completions))
}

#[test]
fn the_documented_table_matches_the_code() {
    let page = include_str!("../../../../docs/api.md");
    let (_, table) =
        page.split_once("| field | from | chat | completions | notes |\n| --- | --- | --- | --- | --- |\n").unwrap();
    let documented: Vec<&str> = table.lines().take_while(|line| line.starts_with("| ")).collect();
    let want: Vec<String> = FIELDS.iter().map(row).collect();
    assert_eq!(documented, want, "the table should read:\n{}", want.join("\n"));
}

#[test]
fn each_name_is_in_the_table_once() {
    let names: HashSet<&str> = FIELDS.iter().map(|field| field.name).collect();
    assert_eq!(names.len(), FIELDS.len());
}

#[test]
fn misspellings_by_one_character_are_found() {
    for (name, known) in [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("stops", "stop"),
        ("tempreature", "temperature"),
        ("top-p", "top_p"),
        ("maxTokens", "max_tokens"),
        ("Stream", "stream"),
        ("top_a", "top_p"),
    ] {
        assert!(is_misspelling(name, known), "{name} for {known}");
    }
    for (name, known) in [("stopped", "stop"), ("m", "n"), ("tmprature", "temperature"), ("", "stop"), ("pots", "stop")]
    {
        assert!(!is_misspelling(name, known), "{name} for {known}");
    }
}

fn checked(body: &str, endpoint: EndpointKind) -> Result<u64, String> {
    check(&mut Fields::parse(&body.to_owned().into()).unwrap(), endpoint).map_err(|error| error.to_string())
}

#[test]
fn unsupported_fields_are_rejected_unless_neutral() {
    for endpoint in [EndpointKind::Chat, EndpointKind::Completions] {
        let refused = FIELDS.iter().filter(|field| field.support(endpoint) == Support::Rejected);
        for Field { name, neutral, .. } in refused {
            let said = checked(&format!(r#"{{"{name}": 4711}}"#), endpoint).unwrap_err();
            assert!(said.starts_with(&format!("Unsupported parameter: '{name}' is not supported here.")), "{said}");
            for nothing in ["null", "false", "[]", "{}", "\"\"", neutral] {
                assert_eq!(checked(&format!(r#"{{"{name}": {nothing}}}"#), endpoint), Ok(0), "{name}: {nothing}");
            }
        }
    }
    assert!(checked(r#"{"length_penalty": 1.0}"#, EndpointKind::Chat).is_ok(), "a number is its value");
}

#[test]
fn a_misspelt_required_field_is_named_instead_of_the_missing_one() {
    let error = |body: &str| missing(&Fields::parse(&body.to_owned().into()).unwrap(), "messages").to_string();
    assert_eq!(error(r#"{"mesages": []}"#), "Unknown parameter: 'mesages'. Did you mean 'messages'?");
    assert_eq!(error(r#"{"vendor": 1}"#), "Missing required parameter: 'messages'.");
}

#[test]
fn unknown_fields_pass_and_are_counted() {
    assert_eq!(checked(r#"{"vendor": {"a": 1}, "x": 2, "service_tier": "flex"}"#, EndpointKind::Chat), Ok(2));
    let said = checked(r#"{"temprature": 1}"#, EndpointKind::Chat).unwrap_err();
    assert_eq!(said, "Unknown parameter: 'temprature'. Did you mean 'temperature'?");
    assert!(checked(r#"{"guided_jsno": {}}"#, EndpointKind::Completions).is_err(), "of a refused one too");
    assert_eq!(checked(r#"{"metadat": 1}"#, EndpointKind::Chat), Ok(1), "of one without effect it changes nothing");
}
