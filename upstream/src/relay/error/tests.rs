use super::*;
use futures::stream;
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use std::convert::Infallible;

fn kind(status: u16, retry_after: Option<&str>) -> ErrorKind {
    let mut headers = HeaderMap::new();
    if let Some(value) = retry_after {
        headers.insert(header::RETRY_AFTER, value.parse().unwrap());
    }
    let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
    kind_of(StatusCode::from_u16(status).unwrap(), &headers, now)
}

fn busy(seconds: u64) -> ErrorKind {
    ErrorKind::Busy(Duration::from_secs(seconds))
}

#[test]
fn only_faults_count_against_the_engine() {
    for status in [400, 403, 404, 408, 413, 422, 499, 501, 302, 307] {
        assert_eq!(kind(status, Some("7")), ErrorKind::Request);
    }
    for status in [500, 502, 504, 599, 600] {
        assert_eq!(kind(status, Some("7")), ErrorKind::Fault);
    }
    assert_eq!((kind(429, None), kind(503, None)), (busy(1), busy(1)));
    assert_eq!(kind(401, Some("7")), busy(2), "the key is that of the gateway, and another server may accept its own");
}

#[test]
fn retry_after_is_seconds_or_a_date() {
    assert_eq!(kind(429, Some("7")), busy(7));
    assert_eq!(kind(503, Some(" 0 ")), busy(0));
    assert_eq!(kind(503, Some("Sun, 06 Nov 1994 08:49:47 GMT")), busy(10));
    assert_eq!(kind(503, Some("Sun, 06 Nov 1994 08:00:00 GMT")), busy(0));
    assert_eq!(kind(503, Some("99999999999")), busy(600));
    for unknown in ["soon", "-1", "1.5", ""] {
        assert_eq!(kind(503, Some(unknown)), busy(1));
    }
}

#[tokio::test]
async fn the_body_of_an_error_is_bounded() {
    let response = |length| Response::builder().status(422).body(Full::new(Bytes::from(vec![b'x'; length]))).unwrap();
    let answer = Answer::read(response(10)).await;
    assert_eq!((&answer.body[..], answer.cut), (&b"xxxxxxxxxx"[..], None));
    for (length, cut) in [(MAX_BODY, None), (MAX_BODY + 1, Some(Cut::TooLong))] {
        let answer = Answer::read(response(length)).await;
        assert_eq!((answer.body.len(), answer.cut), (MAX_BODY, cut));
    }
    let endless = stream::repeat_with(|| Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[b'x'; 1000]))));
    let answer = Answer::read(Response::builder().status(500).body(StreamBody::new(endless)).unwrap()).await;
    assert_eq!((answer.body.len(), answer.kind), (MAX_BODY, ErrorKind::Fault));
    assert_eq!(answer.cut, Some(Cut::TooLong));
}

#[tokio::test]
async fn a_body_of_an_error_that_breaks_off_is_not_whole() {
    let parts = stream::iter([Ok(Frame::data(Bytes::from_static(b"part"))), Err(std::io::ErrorKind::UnexpectedEof)]);
    let answer = Answer::read(Response::builder().status(400).body(StreamBody::new(parts)).unwrap()).await;
    assert_eq!((&answer.body[..], answer.cut), (&b"part"[..], Some(Cut::BrokenOff)));
}

#[tokio::test(start_paused = true)]
async fn an_error_whose_body_stops_is_still_one() {
    use futures::StreamExt;
    let body = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"part")))]).chain(stream::pending());
    let answer = Answer::read(Response::builder().status(503).body(StreamBody::new(body)).unwrap()).await;
    assert_eq!((&answer.body[..], answer.kind, answer.cut), (&b"part"[..], busy(1), Some(Cut::Slow)));
}

#[test]
fn an_error_in_a_stream_has_its_status_in_json() {
    for (data, status) in [
        (r#"{"error":{"message":"m","type":"BadRequestError","code":400}}"#, 400),
        (r#"{"object":"error","message":"m","code":"422"}"#, 422),
        (r#"{"error":{"code":"context_length_exceeded"}}"#, 500),
        (r#"{"error":{"code":200}}"#, 500),
        (r#"{"error":"text"}"#, 500),
        ("text", 500),
    ] {
        let answer = Answer::of_event(data.into());
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (status, data.as_bytes()));
    }
    assert_eq!(Answer::of_event(r#"{"error":{"code":503}}"#.into()).kind, busy(1));
}
