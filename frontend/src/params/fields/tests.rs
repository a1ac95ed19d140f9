use super::*;
use proptest::prelude::*;

fn fields(body: &str) -> Result<Fields, Error> {
    Fields::parse(&Bytes::copy_from_slice(body.as_bytes()))
}

fn code<T: std::fmt::Debug>(refused: Result<T, Error>) -> &'static str {
    match refused {
        Err(Error::Invalid { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_field_that_is_not_taken_is_not_parsed() {
    // Two million values of which none is parsed: the budget is untouched, and the field's name is known.
    let body = format!(
        r#"{{"model":"m","x":[{}0],"y":{}1{}}}"#,
        "{\"\":0},".repeat(1_000_000),
        "[".repeat(5000),
        "]".repeat(5000)
    );
    let mut fields = fields(&body).unwrap();
    assert_eq!(fields.text("model").unwrap().as_deref(), Some("m"));
    assert_eq!(fields.remaining().collect::<Vec<_>>(), ["x", "y"]);
    assert!(matches!(fields.value("y"), Err(Error::Malformed(_))), "nested too deeply");
    assert_eq!(code(fields.array("x")), "too_many_values");
}

#[test]
fn values_of_all_fields_count_together() {
    let half = format!("[{}0]", "0,".repeat(80_000));
    let mut fields = fields(&format!(r#"{{"a":{half},"b":{half},"n":1}}"#)).unwrap();
    assert_eq!(fields.array("a").unwrap().unwrap().len(), 80_001);
    assert_eq!(code(fields.array("b")), "too_many_values");
}

#[test]
fn json_inside_a_string_counts_too() {
    let body = fields("{}").unwrap();
    assert_eq!(body.embedded("arguments", "{not json").unwrap(), None);
    let bomb = format!(r#"{{"a":[{}0]}}"#, "0,".repeat(200_000));
    assert_eq!(code(body.embedded("arguments", &bomb)), "too_many_values");
}

#[test]
fn the_last_of_fields_with_one_name_counts() {
    let mut fields = fields(r#"{"n":1,"m":null,"n":2}"#).unwrap();
    assert_eq!(fields.integer("n", 0..=9).unwrap(), Some(2));
    assert_eq!(fields.integer("n", 0..=9).unwrap(), None);
    assert_eq!(fields.integer("m", 0..=9).unwrap(), None);
    assert_eq!(fields.first_remaining_path(), None);
}

#[test]
fn a_body_with_too_many_fields_is_refused() {
    let many = (0..=MAX_FIELDS).map(|i| format!("\"f{i}\":0,")).collect::<Vec<_>>().concat();
    assert!(matches!(fields(&format!("{{{many}\"model\":\"m\"}}")), Err(Error::Malformed(_))));
}

fn any_json() -> impl Strategy<Value = Value> {
    let text = "[a\"\\\\\\[\\]{},: \u{e9}\u{1F600}\n]{0,6}";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e9..1e9).prop_map(Value::from),
        text.prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((text, inner), 0..5).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn a_body_split_into_fields_has_the_parsed_values(body in any_json(), pretty: bool) {
        let text = if pretty { serde_json::to_string_pretty(&body) } else { serde_json::to_string(&body) }.unwrap();
        // Parsed again: a decimal need not come back as it was.
        let Value::Object(map) = serde_json::from_str(&text).unwrap() else {
            prop_assert!(matches!(fields(&text), Err(Error::Malformed(_))));
            return Ok(());
        };
        let mut split = fields(&text).unwrap();
        for (name, value) in map {
            if let Value::Array(items) = &value {
                let mut found = Vec::new();
                split.raw(&name).unwrap().elements(|element| {
                    found.push(split_value(&element));
                    Ok(())
                }).unwrap();
                prop_assert_eq!(&found, items);
            } else {
                prop_assert_eq!(split.value(&name).unwrap().unwrap_or_default(), value);
            }
        }
        prop_assert_eq!(split.first_remaining_path(), None);
    }
}

fn split_value(raw: &Raw) -> Value {
    raw.value(&Budget::default()).map_err(|refused| refused.at("")).unwrap()
}
