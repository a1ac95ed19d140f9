use super::*;
use crate::engine::HttpRequest;
use proptest::prelude::*;

fn request() -> Request {
    Request {
        domain: Domain::derived(b"secret", "tenant").salted("salt"),
        sampling: Sampling {
            temperature: 0.5,
            top_k: Some(40),
            seed: Some(7),
            logit_bias: vec![(3, -1.5)],
            logprobs: Some(2),
            ..Sampling::default()
        },
        stop: StopConditions { max_tokens: Some(9), min_tokens: 1, stop_tokens: vec![300], ignore_eos: true },
        work: Work::Resume(Handoff(Bytes::from_static(b"blocks"))),
        attributes: RequestAttributes {
            tenant: "tenant".into(),
            session: Some("talk".into()),
            priority: Priority::High,
            retention: Retention { ttl: Some(Duration::from_mins(1)), store: false, ..Retention::default() },
            ..RequestAttributes::default()
        },
        ..Request::greedy("r1", "tiny", &[1, 2, 70_000], 9)
    }
}

fn tokens() -> Tokens {
    let logprobs = Logprobs { chosen: -0.5, rank: 1, top: vec![(5, -0.5), (6, -2.0)] };
    Tokens {
        ids: vec![5, 70_000],
        logprobs: vec![logprobs.clone(); 2],
        finish: Some(FinishReason::StopToken(2)),
        end: Some(EndToken { id: 2, logprobs: Some(logprobs.clone()) }),
        prompt_logprobs: vec![logprobs],
        prompt: Some(PromptReport {
            cached: vec![(Level::G1, 16), (Level::Peer, 32)],
            computed: 5,
            handed_over: 3,
            queued: Duration::from_millis(4),
            worker: None,
        }),
        explain: None,
    }
}

fn errors() -> Vec<Error> {
    vec![
        Error::UnknownModel("m".to_owned()),
        Error::PromptTooLong { prompt: 9, context: 8 },
        Error::Invalid { field: "prompt", problem: "has no tokens".to_owned() },
        Error::Overloaded { retry_after: Duration::from_secs(3) },
        Error::DeadlineExceeded,
        Error::Unread(Duration::from_secs(30)),
        Error::Unavailable("a".to_owned()),
        Error::Failed("b".to_owned()),
    ]
}

#[test]
fn requests_survive_encoding() {
    let (request, now) = (request(), Instant::now());
    let decoded = decode_request(&encode_request(&request, now).unwrap(), now).unwrap();
    // Request has no equality; its parts have.
    assert_eq!(format!("{decoded:?}"), format!("{request:?}"));
    assert!(decoded.domain == request.domain && decoded.domain.id() == request.domain.id());
}

#[tokio::test(start_paused = true)]
async fn a_deadline_is_sent_as_the_time_that_is_left() {
    let sent = Instant::now();
    let mut request = request();
    request.attributes.deadline = Some(sent + Duration::from_secs(5));
    let encoded = encode_request(&request, sent + Duration::from_secs(2)).unwrap();
    // The clock of the other machine shows any time.
    let there = sent + Duration::from_secs(1000);
    let decoded = decode_request(&encoded, there).unwrap();
    assert_eq!(decoded.attributes.deadline, Some(there + Duration::from_secs(3)));
    let late = encode_request(&request, sent + Duration::from_secs(9)).unwrap();
    assert_eq!(decode_request(&late, there).unwrap().attributes.deadline, Some(there));
}

#[test]
fn outputs_arrive_in_any_pieces() {
    let mut encoded = BytesMut::new();
    encode_output(Ok(Output::Tokens(tokens())), &mut encoded);
    encode_output(Ok(Output::Handoff(Handoff(Bytes::from_static(b"there")))), &mut encoded);
    encode_output(Ok(Output::Prefilled), &mut encoded);
    encode_output(Err(Error::DeadlineExceeded), &mut encoded);
    let (mut arrived, mut outputs) = (BytesMut::new(), Vec::new());
    for byte in encoded {
        arrived.put_u8(byte);
        outputs.extend(decode_output(&mut arrived).unwrap());
    }
    assert!(arrived.is_empty());
    let [Ok(Output::Tokens(first)), Ok(Output::Handoff(handoff)), Ok(Output::Prefilled), Err(Error::DeadlineExceeded)] =
        &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!((first, &handoff.0[..]), (&tokens(), &b"there"[..]));
}

#[test]
fn errors_survive_encoding() {
    for error in errors() {
        assert_eq!(decode_error(&encode_error(&error)), Ok(error));
    }
    let unknown = Error::Invalid { field: "other", problem: "p".to_owned() };
    let expected = Error::Invalid { field: "request", problem: "other: p".to_owned() };
    assert_eq!(decode_error(&encode_error(&unknown)), Ok(expected));
}

#[test]
fn relayed_requests_are_not_sent() {
    let relayed = Request { work: Work::Relay(Arc::new(HttpRequest::post("/"))), ..request() };
    assert_eq!(encode_request(&relayed, Instant::now()), Err(NotSent));
}

#[test]
fn an_output_that_is_too_large_is_refused_before_it_arrives() {
    let mut arrived = BytesMut::from(&u32::MAX.to_le_bytes()[..]);
    assert!(decode_output(&mut arrived).is_err());
}

/// When this fails, an encoded type has changed: increase `PROTOCOL`, then adapt the hash.
#[test]
fn the_encoding_of_this_protocol_number_does_not_change() {
    assert_eq!(super::super::PROTOCOL, 3);
    let mut encoded = BytesMut::from(&encode_request(&request(), Instant::now()).unwrap()[..]);
    encode_output(Ok(Output::Tokens(tokens())), &mut encoded);
    encode_output(Ok(Output::Prefilled), &mut encoded);
    for error in errors() {
        encoded.extend_from_slice(&encode_error(&error));
    }
    assert_eq!(blake3::hash(&encoded).to_hex()[..16], *"476ee1cf98f9c335");
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_refused_or_decoded(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode_request(&bytes, Instant::now());
        let _ = decode_error(&bytes);
        let mut arrived = BytesMut::from(&bytes[..]);
        while let Ok(Some(_)) = decode_output(&mut arrived) {}
    }

    #[test]
    fn a_changed_request_is_refused_or_decoded(at in 0_usize..200, byte: u8) {
        let mut encoded = encode_request(&request(), Instant::now()).unwrap().to_vec();
        let at = at % encoded.len();
        encoded[at] = byte;
        let _ = decode_request(&encoded, Instant::now());
    }
}
