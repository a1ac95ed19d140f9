//! Connections that end before an answer has begun: which requests are sent again, and which may have been computed.

use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};

#[tokio::test]
async fn a_request_on_a_closed_connection_is_sent_again() {
    let engine = FakeEngine::start([Script::default(), Script::close(), Script::default()]).await.unwrap();
    let client = client(&engine.uri(), Protocol::Negotiated);
    assert_eq!(text(&client).await, text(&client).await);
    let used: Vec<_> = engine.requests().iter().map(|request| request.connection).collect();
    assert_eq!(used, [0, 0, 1]);
}

#[tokio::test]
async fn a_request_is_sent_again_only_once() {
    let engine = FakeEngine::start([Script::default(), Script::close(), Script::close()]).await.unwrap();
    let client = client(&engine.uri(), Protocol::Negotiated);
    text(&client).await;
    assert!(matches!(relay(&client).await, Err(RelayError::NoAnswer(_))));
    assert_eq!(engine.requests().len(), 3);
}

#[tokio::test]
async fn a_request_that_may_not_be_repeated_is_sent_once() {
    let engine = FakeEngine::start([Script::default(), Script::close(), Script::default()]).await.unwrap();
    let client = client(&engine.uri(), Protocol::Negotiated);
    text(&client).await;
    let path = PathAndQuery::from_static("/v1/files/id");
    let delete = || client.send(Method::DELETE, &path, HeaderMap::new(), Bytes::new());
    assert!(matches!(delete().await, Err(RelayError::NoAnswer(_))));
    assert!(delete().await.is_ok());
    let used: Vec<_> = engine.requests().iter().map(|request| request.connection).collect();
    assert_eq!(used, [0, 1, 2], "each on a connection of its own");
}

#[tokio::test]
async fn an_engine_that_ends_with_a_request_may_have_computed_it() {
    let scripts = [Script::default(), Script::default().after(Duration::from_hours(1))];
    let engine = FakeEngine::start(scripts).await.unwrap();
    let client = client(&engine.uri(), Protocol::Negotiated);
    text(&client).await;
    let asked = tokio::spawn(async move { relay(&client).await.err() });
    while engine.requests().len() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    engine.kill().await;
    let error = timeout(SOON, asked).await.unwrap().unwrap();
    assert!(matches!(error, Some(RelayError::NoAnswer(_))), "not only because nothing listens any more: {error:?}");
}

#[tokio::test]
async fn an_engine_that_got_a_part_of_a_request_has_computed_nothing() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.read_exact(&mut [0; 100]).await.unwrap();
    });
    // More than the buffers of both sockets take.
    let body = Bytes::from(vec![b' '; 32 << 20]);
    let client = client(&address, Protocol::Negotiated);
    let error = timeout(SOON, client.send(Method::POST, &PATH, HeaderMap::new(), body)).await.unwrap().unwrap_err();
    assert!(matches!(error, RelayError::Unreachable(_)), "{error}");
}

#[tokio::test]
async fn a_reset_stream_is_not_sent_again() {
    let engine = FakeEngine::start([Script::default(), Script::close()]).await.unwrap();
    let client = client(&engine.uri(), Protocol::Http2);
    text(&client).await;
    assert!(matches!(relay(&client).await, Err(RelayError::NoAnswer(_))));
    assert_eq!(engine.requests().len(), 2);
}

#[tokio::test]
async fn a_reset_connection_is_replaced() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let mut socket = BufReader::new(socket);
            // The body ends with the only brace.
            while socket.read_u8().await.unwrap() != b'}' {}
            socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
            // The next request has begun. What is left unread of it makes the close a reset.
            let _ = socket.read_u8().await;
        }
    });
    let client = client(&address, Protocol::Negotiated);
    for length in [1, 100_000, 1_000_000] {
        let body = Bytes::from("x".repeat(length) + "}");
        let response = timeout(SOON, client.send(Method::POST, &PATH, HeaderMap::new(), body)).await.unwrap();
        assert_eq!(response.unwrap().collect().await.unwrap().to_bytes(), "{}");
    }
}

#[tokio::test]
async fn a_new_connection_that_closes_is_an_error() {
    let engine = FakeEngine::start([Script::close()]).await.unwrap();
    assert!(matches!(relay(&client(&engine.uri(), Protocol::Negotiated)).await, Err(RelayError::NoAnswer(_))));
    assert_eq!(engine.requests().len(), 1);
}

/// What a server of HTTP/2 does with a request.
pub(super) enum Does {
    Answer,
    /// It answers with this block of headers; `true`: the response ends with them.
    Head(Vec<u8>, bool),
    /// It refuses the stream.
    Refuse,
    /// It closes the connection, on which the last stream that it has processed is the first one.
    Leave,
    /// It closes the connection for this reason, and says that it may have processed the stream.
    Abandon(u8),
}

/// The type of the frame with which a request, or its response, begins.
const HEADERS: u8 = 1;

/// A server that does these one after the other, and the numbers of the connections that requests came on.
pub(super) async fn http2_server(script: impl IntoIterator<Item = Does>) -> (Client, Arc<Mutex<Vec<usize>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let mut script = script.into_iter().collect::<Vec<_>>().into_iter();
    let requests: Arc<Mutex<Vec<usize>>> = Arc::default();
    let seen = Arc::clone(&requests);
    tokio::spawn(async move {
        let mut left = Vec::new();
        for connection in 0.. {
            let (mut socket, _) = listener.accept().await.unwrap();
            socket.read_exact(&mut [0; 24]).await.unwrap();
            // Frames have a length, a type, flags and the number of a stream. This is SETTINGS without any.
            socket.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
            let mut head = [0; 9];
            while socket.read_exact(&mut head).await.is_ok() {
                let [_, high, low, kind, _, stream @ ..] = head;
                socket.read_exact(&mut vec![0; usize::from(high) << 8 | usize::from(low)]).await.unwrap();
                if kind != HEADERS {
                    continue;
                }
                seen.lock().push(connection);
                let next = script.next().unwrap();
                let is_abandoned = matches!(next, Does::Abandon(_));
                let frame = match next {
                    // HEADERS of a whole response with the status 200.
                    Does::Answer => head_frames(&[0x88], true, stream),
                    Does::Head(block, is_end) => head_frames(&block, is_end, stream),
                    // RST_STREAM with REFUSED_STREAM.
                    Does::Refuse => [&[0, 0, 4, 3, 0][..], &stream, &[0, 0, 0, 7]].concat(),
                    // GOAWAY with NO_ERROR, of stream 0.
                    Does::Leave => vec![0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
                    // GOAWAY, whose last stream is this one.
                    Does::Abandon(reason) => [&[0, 0, 8, 7, 0, 0, 0, 0, 0][..], &stream, &[0, 0, 0, reason]].concat(),
                };
                socket.write_all(&frame).await.unwrap();
                if is_abandoned {
                    socket.shutdown().await.unwrap();
                }
                if frame[3] == 7 {
                    break;
                }
            }
            // Closing it would be another failure.
            left.push(socket);
        }
    });
    (client(&address, Protocol::Http2), requests)
}

/// The frames of a block of headers: the client takes frames of up to 16 KiB.
fn head_frames(block: &[u8], is_end: bool, stream: [u8; 4]) -> Vec<u8> {
    let parts: Vec<_> = block.chunks(16 << 10).collect();
    let frame = |(number, part): (usize, &&[u8])| {
        // HEADERS, then CONTINUATION. The flags say that the response or its head ends.
        let kind = if number == 0 { HEADERS } else { 9 };
        let flags = u8::from(is_end && number == 0) | if number + 1 == parts.len() { 4 } else { 0 };
        let [_, _, _, _, _, _, high, low] = part.len().to_be_bytes();
        [&[0, high, low, kind, flags][..], &stream, part].concat()
    };
    parts.iter().enumerate().flat_map(frame).collect()
}

#[tokio::test]
async fn a_request_that_was_not_processed_is_sent_again() {
    let path = PathAndQuery::from_static("/v1/files/id");
    for (refusal, used) in [(Does::Refuse, [0, 0, 0]), (Does::Leave, [0, 0, 1])] {
        let (client, requests) = http2_server([Does::Answer, refusal, Does::Answer]).await;
        for _ in 0..2 {
            let sent = client.send(Method::DELETE, &path, HeaderMap::new(), Bytes::new());
            assert_eq!(timeout(SOON, sent).await.unwrap().unwrap().status(), 200);
        }
        assert_eq!(*requests.lock(), used, "also one that may not be repeated in other cases");
    }
}

#[tokio::test]
async fn a_request_that_may_have_been_processed_is_not_refused() {
    let path = PathAndQuery::from_static("/v1/files/id");
    // NO_ERROR and INTERNAL_ERROR.
    for reason in [0, 2] {
        let (client, requests) = http2_server([Does::Abandon(reason)]).await;
        let sent = client.send(Method::DELETE, &path, HeaderMap::new(), Bytes::new());
        let error = timeout(SOON, sent).await.unwrap().err().unwrap();
        assert!(matches!(error, RelayError::NoAnswer(_)), "{error:?}");
        assert_eq!(*requests.lock(), [0], "it is not sent again");
    }
}

#[tokio::test]
async fn a_request_that_is_refused_again_was_not_processed() {
    let (client, requests) = http2_server([Does::Refuse, Does::Refuse]).await;
    let error = timeout(SOON, relay(&client)).await.unwrap().err().unwrap();
    assert!(matches!(error, RelayError::Refused(_)), "{error}");
    assert_eq!(*requests.lock(), [0, 0]);
}
