//! Edits are compared with the same edits of the decoded value.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value;

fn edited(body: &str, edit: impl FnOnce(&mut Splice)) -> String {
    let mut splice = Splice::scan(Bytes::copy_from_slice(body.as_bytes())).unwrap();
    edit(&mut splice);
    String::from_utf8(splice.finish().to_vec()).unwrap()
}

#[test]
fn an_unchanged_body_is_not_copied() {
    let body = Bytes::from_static(br#"{"model": "m", "stream_options": {"include_usage": true}}"#);
    let mut splice = Splice::scan(body.clone()).unwrap();
    splice.remove("cache_salt");
    splice.remove_prefix("blockyard");
    splice.set("model", r#""m""#);
    splice.set_in("stream_options", "include_usage", "true").unwrap();
    assert_eq!(splice.finish().as_ptr(), body.as_ptr());
}

#[test]
fn everything_else_keeps_its_bytes() {
    let body = "{ \"a\" : 1.000 ,\n \"model\":\"x\" , \"\\u00e9\" : [ 1e400 ] }\n";
    assert_eq!(
        edited(body, |splice| splice.set("model", r#""y""#)),
        "{ \"a\" : 1.000 ,\n \"model\":\"y\" , \"\\u00e9\" : [ 1e400 ] }\n"
    );
    assert_eq!(edited(body, |splice| splice.remove("a")), "{\n \"model\":\"x\" , \"\\u00e9\" : [ 1e400 ] }\n");
}

#[test]
fn an_escaped_name_is_the_same_name() {
    let body = r#"{"mod\u0065l":1,"blo\u0063kyard_x":2,"\ud800model":3,"m\/":4}"#;
    let edit = |splice: &mut Splice| {
        splice.set("model", "5");
        splice.remove_prefix("blockyard");
        splice.remove("m/");
    };
    assert_eq!(edited(body, edit), r#"{"mod\u0065l":5,"\ud800model":3}"#);
}

#[test]
fn set_leaves_one_occurrence_of_duplicates() {
    let body = r#"{"model":"a","n":1,"model":"b"}"#;
    assert_eq!(Splice::scan(body.into()).unwrap().get("model").unwrap(), r#""b""#);
    assert_eq!(edited(body, |splice| splice.set("model", r#""b""#)), r#"{"n":1,"model":"b"}"#);
    assert_eq!(edited(body, |splice| splice.remove("model")), r#"{"n":1}"#);
}

#[test]
fn stream_options_keeps_its_other_members() {
    for (before, after) in [
        (r"{}", r#"{"stream_options":{"include_usage":true}}"#),
        (r#"{"stream_options":null}"#, r#"{"stream_options":{"include_usage":true}}"#),
        (r#"{"stream_options":{ }}"#, r#"{"stream_options":{ "include_usage":true}}"#),
        (
            r#"{"stream_options":{"x":[1],"include_usage":false}}"#,
            r#"{"stream_options":{"x":[1],"include_usage":true}}"#,
        ),
    ] {
        assert_eq!(edited(before, |splice| splice.set_in("stream_options", "include_usage", "true").unwrap()), after);
    }
    let mut splice = Splice::scan(Bytes::from_static(br#"{"stream_options":[]}"#)).unwrap();
    let error = splice.set_in("stream_options", "include_usage", "true").unwrap_err();
    assert_eq!(error, SpliceError::NotAnObject { name: "stream_options".into() });
}

#[test]
fn edits_build_on_earlier_edits() {
    let edit = |splice: &mut Splice| {
        splice.set("a", "1");
        splice.set("a", "2");
        assert_eq!(splice.get("a").unwrap(), "2");
        splice.set_in("o", "x", "1").unwrap();
        splice.set_in("o", "y", "2").unwrap();
        splice.remove("b");
        assert_eq!((splice.get("b"), splice.range("b")), (None, None));
        splice.set("b", "4");
        splice.set("c", "5");
        splice.remove("c");
    };
    assert_eq!(edited(r#"{"b":0,"b":3}"#, edit), r#"{"a":2,"o":{"x":1,"y":2},"b":4}"#);
}

#[test]
fn invalid_structure_is_rejected_with_its_position() {
    for (body, at) in [
        ("", 0),
        ("[1]", 0),
        ("{", 1),
        ("{}x", 2),
        (r#"{"a":1,}"#, 7),
        (r#"{"a" 1}"#, 5),
        (r#"{"a":}"#, 5),
        (r#"{"a":1 2}"#, 7),
        (r#"{"a":[1}}"#, 7),
        (r#"{"a":{"b":[}"#, 11),
        (r#"{"a":"b}"#, 8),
        (r#"{"a":"b\"#, 8),
        (r#"{"a":"\"}"#, 9),
        ("\u{feff}{}", 0),
    ] {
        match Splice::scan(Bytes::copy_from_slice(body.as_bytes())) {
            Err(SpliceError::Syntax { at: found, .. }) => assert_eq!(found, at, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

#[test]
fn depth_and_members_are_bounded() {
    let nested = |depth: usize| format!(r#"{{"a":{}{}}}"#, "[".repeat(depth), "]".repeat(depth));
    assert!(Splice::scan(nested(MAX_DEPTH).into()).is_ok());
    assert_eq!(Splice::scan(nested(MAX_DEPTH + 1).into()).unwrap_err(), SpliceError::TooDeep { at: 5 + MAX_DEPTH });
    let members = |count: usize| format!("{{{}}}", vec![r#""a":1"#; count].join(","));
    assert!(Splice::scan(members(MAX_MEMBERS).into()).is_ok());
    assert!(matches!(Splice::scan(members(MAX_MEMBERS + 1).into()), Err(SpliceError::TooManyMembers { .. })));
}

/// JSON text of any value, with whitespace.
fn json() -> impl Strategy<Value = String> {
    let string = vec(character(), 0..8).prop_map(|characters| format!("\"{}\"", characters.concat()));
    let number = prop_oneof!["-?(0|[1-9][0-9]{0,15})", "-?[1-9]\\.[0-9]{1,9}([eE][+-]?[0-9]{1,2})?"];
    let leaf = prop_oneof!["null|true|false", number, string];
    leaf.prop_recursive(24, 64, 4, |inner| {
        let pair = (key(), space(), inner.clone(), space());
        let pair = pair.prop_map(|(key, a, value, b)| format!("{a}{key}{b}:{a}{value}{b}"));
        prop_oneof![
            (vec(inner, 0..4), space()).prop_map(|(values, space)| format!("[{space}{}{space}]", values.join(","))),
            vec(pair, 0..4).prop_map(|pairs| format!("{{{}}}", pairs.join(","))),
        ]
    })
}

/// A character of a string as JSON may write it.
fn character() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<char>().prop_map(|c| serde_json::to_string(&c).unwrap().trim_matches('"').replace('"', "\\\"")),
        proptest::sample::select(vec!["\\\"", "\\\\", "\\u0022", "{", "}", "[", ",", ":", "\\ud83d\\ude00", "\\/"])
            .prop_map(str::to_owned),
    ]
    .prop_filter("a lone backslash", |text| text != "\\")
}

/// A member's name: often one of those edited, with some of its characters escaped.
fn key() -> impl Strategy<Value = String> {
    let name =
        proptest::sample::select(vec!["model", "a", "blockyard_x", "blockyard", "stream_options", "modell", "é"]);
    (name, any::<u16>()).prop_map(|(name, escaped)| {
        let character = |(index, c): (usize, char)| match escaped >> index & 1 {
            1 if index < 3 => format!("\\u{:04x}", c as u32),
            _ => c.to_string(),
        };
        format!("\"{}\"", name.chars().enumerate().map(character).collect::<String>())
    })
}

fn space() -> impl Strategy<Value = String> {
    "[ \t\r\n]{0,2}"
}

fn object() -> impl Strategy<Value = String> {
    let pair = (key(), space(), json(), space());
    let pair = pair.prop_map(|(key, a, value, b)| format!("{a}{key}{b}:{a}{value}{b}"));
    (vec(pair, 0..8), space()).prop_map(|(pairs, space)| format!("{space}{{{space}{}}}{space}", pairs.join(",")))
}

fn decoded(text: &[u8]) -> serde_json::Map<String, Value> {
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn edits_equal_edits_of_the_decoded_value(text in object(), salt in json()) {
        let mut expected = decoded(text.as_bytes());
        expected.insert("model".into(), "other".into());
        expected.insert("cache_salt".into(), serde_json::from_str(&salt).unwrap());
        expected.remove("a");
        expected.retain(|name, _| !name.starts_with("blockyard"));
        let mut splice = Splice::scan(Bytes::from(text)).unwrap();
        splice.set("model", r#""other""#);
        splice.set("cache_salt", salt);
        splice.remove("a");
        splice.remove_prefix("blockyard");
        let options = expected.entry("stream_options").or_insert(Value::Null);
        let result = splice.set_in("stream_options", "include_usage", "true");
        match options {
            Value::Null => *options = serde_json::json!({"include_usage": true}),
            Value::Object(members) => _ = members.insert("include_usage".into(), true.into()),
            _ => prop_assert!(result.is_err()),
        }
        prop_assert_eq!(decoded(&splice.finish()), expected);
    }

    #[test]
    fn get_returns_the_decoded_members(text in object()) {
        let expected = decoded(text.as_bytes());
        let splice = Splice::scan(Bytes::from(text.clone())).unwrap();
        for name in ["model", "a", "stream_options", "absent"] {
            let found = splice.get(name).map(|json| serde_json::from_slice::<Value>(&json).unwrap());
            prop_assert_eq!(found.as_ref(), expected.get(name));
            prop_assert_eq!(splice.range(name).map(|range| text[range].to_owned().into()), splice.get(name));
        }
    }

    /// Any bytes: no panic, and what a JSON parser accepts as an object is accepted.
    #[test]
    fn damaged_bodies_do_not_panic(
        text in object(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let mut bytes = text.into_bytes();
        let at = at.index(bytes.len());
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        let valid = serde_json::from_slice::<serde_json::Map<String, Value>>(&bytes).is_ok();
        let splice = Splice::scan(Bytes::from(bytes));
        prop_assert!(splice.is_ok() || !valid);
        if let Ok(mut splice) = splice {
            splice.set("model", "1");
            splice.remove("a");
            let out = splice.finish();
            prop_assert!(!valid || serde_json::from_slice::<Value>(&out).is_ok());
        }
    }
}
