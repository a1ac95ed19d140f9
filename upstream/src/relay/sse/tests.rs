use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

const MAX: usize = 64;

/// The events of a body in these chunks. Parts of long events are joined, also those of neighbours.
fn events(chunks: &[&[u8]]) -> Vec<Event> {
    let mut splitter = Splitter::new(MAX);
    let mut events: Vec<Event> = Vec::new();
    let mut add = |event: Event| match events.last_mut() {
        Some(last) if !last.whole && !event.whole => last.raw = [&last.raw[..], &event.raw].concat().into(),
        _ => events.push(event),
    };
    for chunk in chunks {
        splitter.push(Bytes::copy_from_slice(chunk));
        std::iter::from_fn(|| splitter.next()).for_each(&mut add);
    }
    splitter.finish().into_iter().for_each(add);
    events
}

fn texts(body: &str) -> Vec<String> {
    let text = |event: &Event| String::from_utf8(event.raw.to_vec()).unwrap();
    events(&[body.as_bytes()]).iter().map(text).collect()
}

#[test]
fn an_empty_line_of_any_kind_ends_an_event() {
    assert_eq!(texts("data: a\n\ndata: b\n\n"), ["data: a\n\n", "data: b\n\n"]);
    assert_eq!(texts("data: a\r\n\r\ndata: b\r\n\r\n"), ["data: a\r\n\r\n", "data: b\r\n\r\n"]);
    assert_eq!(texts("data: a\r\rdata: b\r\r"), ["data: a\r\r", "data: b\r\r"]);
    assert_eq!(texts("event: x\ndata: a\r\n\r\n\r\n"), ["event: x\ndata: a\r\n\r\n", "\r\n"]);
    assert_eq!(texts("data: a\r\n\rdata: b"), ["data: a\r\n\r", "data: b"]);
}

#[test]
fn the_payload_is_the_data_field() {
    for (raw, data) in [
        ("data: a\n\n", Some("a")),
        ("data:a\r\n\r\n", Some("a")),
        ("data:  a\r\r", Some(" a")),
        ("event: x\ndata: {}\nid: 1\n\n", Some("{}")),
        ("data: a\ndata: b\n\n", Some("a\nb")),
        ("data: a\r\ndata\r\ndata: b\r\n\r\n", Some("a\n\nb")),
        ("data\n\n", Some("")),
        (": data: a\n\n", None),
        ("database: a\n\n", None),
        ("\n", None),
    ] {
        let event = Event { raw: Bytes::copy_from_slice(raw.as_bytes()), whole: true };
        assert_eq!(event.data().as_deref(), data.map(str::as_bytes), "{raw:?}");
        let range = event.data_range().map(|range| &raw[range]);
        assert_eq!(range, data.filter(|data| !data.contains('\n')), "{raw:?}");
    }
}

#[test]
fn an_event_in_one_chunk_is_not_copied() {
    let body = Bytes::from_static(b"data: a\n\ndata: b\n\n");
    let mut splitter = Splitter::new(MAX);
    splitter.push(body.clone());
    assert_eq!(splitter.next().unwrap().raw.as_ptr(), body.as_ptr());
    assert_eq!(splitter.next().unwrap().raw.as_ptr(), body[9..].as_ptr());
    assert_eq!(splitter.next(), None);
}

#[test]
fn an_event_is_there_with_its_last_byte() {
    for end in ["\n\n", "\r\n\r\n", "\r\r"] {
        let mut splitter = Splitter::new(MAX);
        splitter.push(format!("data: a{end}").into());
        assert!(splitter.next().is_some(), "{end:?}");
    }
}

#[test]
fn a_long_event_passes_without_being_kept() {
    let long = vec![b'x'; MAX];
    let mut splitter = Splitter::new(MAX);
    splitter.push(Bytes::from(long.clone()));
    assert_eq!(splitter.next(), None, "it may still end within the bound");
    for _ in 0..100 {
        splitter.push(Bytes::from(long.clone()));
        let part = splitter.next().unwrap();
        assert!(!part.whole && part.data().is_none());
        assert!(splitter.partial.capacity() <= 4 * MAX);
    }
    splitter.push(Bytes::from_static(b"\n\ndata: a\n\n"));
    assert!(!splitter.next().unwrap().whole);
    assert_eq!(splitter.next().unwrap().data().as_deref(), Some(&b"a"[..]));
}

fn body() -> impl Strategy<Value = Vec<u8>> {
    let text = proptest::string::string_regex("[aé😀]{0,9}").unwrap();
    let token = prop_oneof![
        4 => proptest::sample::select(vec!["data: ", "data:", ": comment", "event: x"]).prop_map(str::to_owned),
        4 => text,
        4 => proptest::sample::select(vec!["\n", "\r\n", "\r", "\n\n", "\r\n\r\n", "\r\r"]).prop_map(str::to_owned),
        1 => (MAX - 9..MAX + 9).prop_map(|length| "x".repeat(length)),
    ];
    vec(token, 0..40).prop_map(|tokens| tokens.concat().into_bytes())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_split_gives_the_same_events(body in body(), cuts in vec(any::<prop::sample::Index>(), 0..12)) {
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(body.len() + 1)).chain([0, body.len()]).collect();
        cuts.sort_unstable();
        let chunks: Vec<_> = cuts.windows(2).map(|cut| &body[cut[0]..cut[1]]).collect();
        let bytes: Vec<_> = body.chunks(1).collect();
        let expected = events(&[&body]);
        prop_assert_eq!(&events(&chunks), &expected);
        prop_assert_eq!(&events(&bytes), &expected);
        let output = expected.iter().flat_map(|event| event.raw.to_vec()).collect::<Vec<_>>();
        prop_assert_eq!(output, body);
    }
}
