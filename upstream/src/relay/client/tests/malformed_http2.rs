//! Answers of HTTP/2 that are not valid, and those that the client does not take.

use super::closed::{Does, http2_server};
use super::*;

/// A block of headers with this status and a field of so many bytes.
fn block(status: &str, field: usize) -> Vec<u8> {
    // The status and the field are literals (RFC 7541, section 6.2.2): 8 is the index of `:status`.
    let mut block = [&[8, 3], status.as_bytes()].concat();
    if field > 0 {
        block.extend([0, 1, b'x', 127]);
        let mut rest = field - 127;
        while rest >= 128 {
            block.push(128 | u8::try_from(rest % 128).unwrap());
            rest /= 128;
        }
        block.push(u8::try_from(rest).unwrap());
        block.resize(block.len() + field, b'y');
    }
    block
}

/// The status that a request with this body gets of a server that answers with this head.
async fn answered(head: Vec<u8>, is_end: bool, body: &'static str) -> Result<StatusCode, RelayError> {
    let (client, _) = http2_server([Does::Head(head, is_end)]).await;
    let answer = timeout(SOON, client.send(Method::POST, &PATH, HeaderMap::new(), body.into())).await;
    Ok(answer.expect("an outcome at once")?.status())
}

#[tokio::test]
async fn a_head_of_http2_may_be_as_long_as_one_of_http1() {
    assert_eq!(answered(block("200", 60 << 10), true, "{}").await.unwrap(), 200);
    // Less and more than what ends the connection.
    for length in [70 << 10, 300 << 10] {
        let error = answered(block("200", length), true, "{}").await.unwrap_err();
        assert!(matches!(&error, RelayError::Malformed(why) if why.contains("64 KiB")), "{length}: {error:?}");
    }
}

#[tokio::test]
async fn an_answer_of_http2_that_switches_protocols_is_malformed() {
    // The server answers when it has got the head of the request, which is all of it if there is no body.
    for body in ["", "{}"] {
        let error = answered(block("101", 0), true, body).await.unwrap_err();
        assert!(matches!(error, RelayError::Malformed(_)), "{error:?}");
    }
}
