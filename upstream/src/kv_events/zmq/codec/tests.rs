use super::*;
use proptest::prelude::*;

fn decoder(bytes: &[u8]) -> Decoder {
    Decoder { buffer: BytesMut::from(bytes), greeted: true, ..Decoder::default() }
}

fn decode(bytes: &[u8]) -> Result<Vec<Received>, Violation> {
    let mut decoder = decoder(bytes);
    std::iter::from_fn(|| decoder.next().transpose()).collect()
}

#[test]
fn a_message_survives_one_byte_at_a_time() {
    let long = vec![7; 300];
    let bytes = [&greeting()[..], &ready("PUB"), &message(&[b"topic", b"", &long])].concat();
    let (mut decoder, mut received) = (Decoder::default(), Vec::new());
    for byte in bytes {
        decoder.buffer.extend_from_slice(&[byte]);
        received.extend(decoder.next().unwrap());
    }
    let frames = vec![Bytes::from_static(b"topic"), Bytes::new(), long.into()];
    assert_eq!(received, [Received::Ready, Received::Message(frames)]);
}

#[test]
fn garbage_greetings_are_refused_at_the_first_byte() {
    for garbage in [&b"HTTP/1.1 400 Bad Request"[..], b"\x16\x03\x01", b"\0"] {
        let mut decoder = Decoder { buffer: BytesMut::from(garbage), ..Decoder::default() };
        assert_eq!(decoder.next(), Err(Violation::Greeting));
    }
}

#[test]
fn other_mechanisms_are_refused() {
    let mut greeting = greeting();
    greeting[12..17].copy_from_slice(b"CURVE");
    let mut decoder = Decoder { buffer: BytesMut::from(&greeting[..]), ..Decoder::default() };
    assert_eq!(decoder.next(), Err(Violation::Mechanism));
}

#[test]
fn large_messages_are_refused_by_their_header() {
    for len in [MAX_MESSAGE as u64 + 1, 1 << 40, u64::MAX] {
        assert_eq!(decode(&[&[LONG][..], &len.to_be_bytes()].concat()), Err(Violation::TooLarge));
    }
    // The limit is for all frames together.
    let first = frame(MORE, &vec![0; MAX_MESSAGE / 2 + 1]);
    let second = [&[LONG][..], &(MAX_MESSAGE as u64 / 2).to_be_bytes()].concat();
    assert_eq!(decode(&[first, second].concat()), Err(Violation::TooLarge));
    assert_eq!(decode(&[&[LONG | COMMAND][..], &5000_u64.to_be_bytes()].concat()), Err(Violation::TooLarge));
}

#[test]
fn messages_of_too_many_frames_are_refused() {
    assert_eq!(decode(&frame(MORE, b"").repeat(MAX_FRAMES + 1)), Err(Violation::TooLarge));
}

#[test]
fn heartbeats_are_answered_with_their_context() {
    let received = decode(&frame(COMMAND, b"\x04PING\0\x05context")).unwrap();
    assert_eq!(received, [Received::Ping(Bytes::from_static(b"context"))]);
    assert_eq!(decode(&pong(b"context")).unwrap(), [Received::Command]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = decode(&bytes);
        let mut decoder = Decoder { buffer: BytesMut::from(&bytes[..]), ..Decoder::default() };
        let _ = decoder.next();
    }
}
