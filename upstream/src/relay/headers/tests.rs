use super::*;

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &str)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
    let mut headers = HeaderMap::new();
    for (name, value) in pairs.iter().map(pair) {
        headers.append(name, value);
    }
    headers
}

#[test]
fn trace_context_and_unknown_headers_pass() {
    let client = headers(&[
        ("traceparent", "00-1-2-01"),
        ("tracestate", "a=b"),
        ("x-request-id", "r"),
        ("user-agent", "u"),
        ("content-type", "application/json"),
        ("x-engine", "1"),
        ("x-engine", "2"),
    ]);
    assert_eq!(request(&client, None), client);
}

#[test]
fn headers_of_one_connection_stay_there() {
    let client = headers(&[
        ("connection", "close, X-One"),
        ("connection", "x-two"),
        ("x-one", "1"),
        ("x-two", "2"),
        ("x-three", "3"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("trailer", "x"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("proxy-authorization", "Basic x"),
        ("proxy-connection", "close"),
    ]);
    assert_eq!(request(&client, None), headers(&[("x-three", "3")]));
    assert_eq!(response(client, Body::Unchanged), headers(&[("x-three", "3")]));
}

#[test]
fn headers_for_the_gateway_end_there() {
    let client = headers(&[
        ("host", "gateway"),
        ("content-length", "7"),
        ("expect", "100-continue"),
        ("accept-encoding", "gzip"),
        ("authorization", "Bearer of-the-client"),
        ("x-api-key", "of-the-client"),
        ("api-key", "of-the-client"),
        ("x-blockyard-explain", "1"),
        ("X-Amzn-SageMaker-Adapter-Identifier", "another-model"),
        ("accept", "*/*"),
    ]);
    assert_eq!(request(&client, None), headers(&[("accept", "*/*")]));
    let key = bearer("of-the-engine").unwrap();
    assert!(key.is_sensitive());
    let expected = headers(&[("accept", "*/*"), ("authorization", "Bearer of-the-engine")]);
    assert_eq!(request(&client, Some(&key)), expected);
    assert_eq!(bearer("line\nend"), None);
}

#[test]
fn a_request_has_one_id() {
    for sent in [&["r"][..], &[], &["other"], &["r", "bad id"], &["bad id", "r"], &["r", "r"]] {
        let pairs: Vec<_> = sent.iter().map(|id| ("x-request-id", *id)).collect();
        let mut headers = headers(&pairs);
        set_request_id(&mut headers, "r");
        assert_eq!(headers.get_all(REQUEST_ID).iter().collect::<Vec<_>>(), ["r"], "{sent:?}");
    }
}

#[test]
fn headers_of_the_gateway_are_not_those_of_an_engine() {
    let engine = headers(&[("x-blockyard-explain", "{}"), ("x-blockyard-new", "1"), ("x-engine", "1")]);
    for body in [Body::Changed, Body::Unchanged] {
        assert_eq!(response(engine.clone(), body), headers(&[("x-engine", "1")]));
    }
}

#[test]
fn the_length_of_a_changed_body_is_removed() {
    let engine = headers(&[("content-length", "7"), ("content-type", "text/event-stream"), ("x-request-id", "r")]);
    assert_eq!(response(engine.clone(), Body::Unchanged), engine);
    let expected = headers(&[("content-type", "text/event-stream"), ("x-request-id", "r")]);
    assert_eq!(response(engine, Body::Changed), expected);
}
