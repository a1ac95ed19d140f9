use super::*;
use bytes::Bytes;
use proptest::prelude::*;

const INT_HASHES: &str = include_str!("../../../tests/fixtures/kv_events/vllm-0.32.0-int-hashes.hex");
const BYTE_HASHES: &str = include_str!("../../../tests/fixtures/kv_events/vllm-0.32.0-byte-hashes.hex");
const INT_HASHES_TEXT: &str = include_str!("../../../tests/fixtures/kv_events/vllm-0.32.0-int-hashes.txt");
const GOLDEN: &str = include_str!("../../../tests/fixtures/kv_events/golden.hex");

fn hex(digits: &str) -> Bytes {
    let digit = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(digit).collect()
}

/// The messages of a file with one message per line, its frames in hex.
fn messages(file: &str) -> Vec<Message> {
    let message = |line: &str| Message::live(&line.split(' ').map(hex).collect::<Vec<_>>()).unwrap();
    file.lines().map(message).collect()
}

/// A text as Python prints it.
fn quoted(text: Option<&str>) -> String {
    text.map_or("None".into(), |text| format!("'{text}'"))
}

/// An event as Python prints what `msgpack` decodes.
fn python(event: &Event) -> String {
    let list = |blocks: &[EngineHash]| format!("{:?}", blocks.iter().map(|hash| hash.0).collect::<Vec<_>>());
    let medium = |medium: Medium| if medium == Medium::G1 { "'GPU'" } else { "?" };
    match event {
        Event::Cleared => "{'type': 'AllBlocksCleared'}".into(),
        Event::Removed(Removed { blocks, medium: at, group, ownership: None }) => format!(
            "{{'type': 'BlockRemoved', 'block_hashes': {}, 'medium': {}, 'group_idx': {}}}",
            list(blocks),
            medium(*at),
            group.unwrap()
        ),
        Event::Removed(_) => "?".into(),
        Event::Stored(stored) => {
            let mut keys = vec!["None".to_owned(); stored.blocks.len()];
            for (block, key) in &stored.extra_keys {
                keys[*block as usize] = match key {
                    ExtraKey::Text(text) => format!("[{}]", quoted(Some(text))),
                    ExtraKey::Content => "?".into(),
                };
            }
            let kind = if stored.group_kind == GroupKind::FullAttention { "'full_attention'" } else { "?" };
            format!(
                "{{'type': 'BlockStored', 'block_hashes': {}, 'parent_block_hash': {}, 'token_ids': {:?}, \
                 'block_size': {}, 'lora_id': {}, 'medium': {}, 'lora_name': {}, 'extra_keys': [{}], \
                 'group_idx': {}, 'kv_cache_spec_kind': {kind}}}",
                list(&stored.blocks),
                stored.parent.map_or("None".into(), |hash| hash.0.to_string()),
                stored.tokens,
                stored.block_size,
                if stored.has_lora_id { "?" } else { "None" },
                medium(stored.medium),
                quoted(stored.lora_name.as_deref()),
                keys.join(", "),
                stored.group.unwrap(),
            )
        }
    }
}

#[test]
fn captured_frames_decode_as_in_python() {
    let mut lines = Vec::new();
    for message in messages(INT_HASHES) {
        let Batch { timestamp, events, rank, skipped } = message.decode().unwrap();
        assert_eq!((rank, skipped), (Some(0), 0));
        lines.push(format!(
            "topic='kv@engine-0@tiny-llama' seq={} ts={timestamp} rest=[0] payload_bytes={} n_events={}",
            message.number,
            message.payload.len(),
            events.len()
        ));
        lines.extend(events.iter().map(|event| format!("    {}", python(event))));
    }
    let expected: Vec<_> = INT_HASHES_TEXT.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines, expected);
}

#[test]
fn byte_hashes_are_their_last_eight_bytes() {
    let batches: Vec<_> = messages(BYTE_HASHES).iter().map(|message| message.decode().unwrap()).collect();
    assert!(batches.iter().all(|batch| batch.skipped == 0));
    let Event::Stored(first) = &batches[0].events[0] else { panic!("not stored") };
    let Event::Stored(second) = &batches[1].events[0] else { panic!("not stored") };
    assert_eq!(first.blocks[0], EngineHash(0x46f2_5885_c2d8_f36d));
    assert_eq!(second.parent, first.blocks.last().copied());
}

#[test]
fn golden_bytes_decode() {
    let batch = Batch::decode(&hex(GOLDEN.trim())).unwrap();
    let stored = Stored { blocks: vec![EngineHash(1 << 63)], tokens: vec![1, 2], block_size: 2, ..Stored::default() };
    let removed = Removed { blocks: vec![EngineHash(5)], medium: Medium::G2, ..Removed::default() };
    let events = vec![Event::Stored(Box::new(stored)), Event::Removed(removed), Event::Cleared];
    assert_eq!(batch, Batch { timestamp: 1.5, events, rank: Some(0), skipped: 0 });
}

/// Encodes the parts of a batch: a minimal `MessagePack` encoder for these tests.
enum Value {
    Nil,
    Int(i64),
    Text(&'static str),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(&'static str, Value)>),
}
use Value::{Array, Int, Map, Nil, Text};

impl Value {
    fn encode(&self, to: &mut Vec<u8>) {
        match self {
            Nil => to.push(0xc0),
            Int(number) => to.extend([&[0xd3][..], &number.to_be_bytes()].concat()),
            Text(text) => to.extend([&[0xd9, text.len() as u8], text.as_bytes()].concat()),
            Self::Bytes(bytes) => to.extend([&[0xc4, bytes.len() as u8], &bytes[..]].concat()),
            Array(values) => {
                to.extend([0xdc, 0, values.len() as u8]);
                for value in values {
                    value.encode(to);
                }
            }
            Map(pairs) => {
                to.extend([0xde, 0, pairs.len() as u8]);
                for (name, value) in pairs {
                    Text(name).encode(to);
                    value.encode(to);
                }
            }
        }
    }
}

fn ints(numbers: &[i64]) -> Value {
    Array(numbers.iter().map(|number| Int(*number)).collect())
}

fn batch(events: Vec<Value>) -> Batch {
    let mut bytes = Vec::new();
    Array(vec![Int(1), Array(events), Nil]).encode(&mut bytes);
    Batch::decode(&bytes).unwrap()
}

fn stored(event: Value) -> Stored {
    match batch(vec![event]).events.pop() {
        Some(Event::Stored(stored)) => *stored,
        other => panic!("{other:?} instead of a stored event"),
    }
}

#[test]
fn arrays_and_maps_decode_alike() {
    let keys = || Array(vec![Nil, Array(vec![Text("salt"), Array(vec![Text("image"), Int(3)])])]);
    let array = vec![
        Text("BlockStored"),
        ints(&[1, 2]),
        Int(7),
        ints(&[3, 4]),
        Int(1),
        Int(5),
        Text("CPU"),
        Text("adapter"),
        keys(),
        Int(0),
        Text("mla_attention"),
        Int(128),
        Text("LOCAL"),
        Text("fs"),
        Text("session"),
        Text("a field of a later release"),
    ];
    let map = vec![
        ("session_id", Text("session")),
        ("ownership", Text("fs")),
        ("a_later_field", Map(vec![("nested", Array(vec![Nil, Map(vec![])]))])),
        ("kv_cache_spec_kind", Text("mla_attention")),
        ("group_idx", Int(0)),
        ("extra_keys", keys()),
        ("lora_name", Text("adapter")),
        ("medium", Text("CPU_PINNED")),
        ("lora_id", Int(5)),
        ("block_size", Int(1)),
        ("token_ids", ints(&[3, 4])),
        ("parent_block_hash", Int(7)),
        ("block_hashes", ints(&[1, 2])),
        ("type", Text("BlockStored")),
    ];
    let expected = Stored {
        blocks: vec![EngineHash(1), EngineHash(2)],
        parent: Some(EngineHash(7)),
        tokens: vec![3, 4],
        block_size: 1,
        medium: Medium::G2,
        has_lora_id: true,
        lora_name: Some("adapter".into()),
        extra_keys: vec![(1, ExtraKey::Text("salt".into())), (1, ExtraKey::Content)],
        group: Some(0),
        group_kind: GroupKind::FullAttention,
        ownership: Some("fs".into()),
        ..Stored::default()
    };
    assert_eq!(stored(Array(array)), expected);
    assert_eq!(stored(Map(map)), expected);
}

#[test]
fn short_arrays_of_old_releases_have_defaults() {
    let event = stored(Array(vec![Text("BlockStored"), ints(&[1]), Nil, ints(&[3]), Int(1)]));
    let expected = Stored { blocks: vec![EngineHash(1)], tokens: vec![3], block_size: 1, ..Stored::default() };
    assert_eq!(event, expected);
    let removed = batch(vec![Array(vec![Text("BlockRemoved"), ints(&[1])]), Array(vec![Text("AllBlocksCleared")])]);
    let expected = Removed { blocks: vec![EngineHash(1)], ..Removed::default() };
    assert_eq!(removed.events, [Event::Removed(expected), Event::Cleared]);
}

#[test]
fn sglang_events_decode() {
    let event = stored(Map(vec![
        ("type", Text("BlockStored")),
        ("block_hashes", ints(&[-2])),
        ("parent_block_hash", Int(i64::MIN)),
        // Pairs of a token and the next one.
        ("token_ids", Array(vec![ints(&[3, 4]), ints(&[4, 5])])),
        ("block_size", Int(2)),
        ("lora_id", Nil),
        ("medium", Text("EXTERNAL")),
        ("cache_salt", Text("salt")),
    ]));
    let expected = Stored {
        blocks: vec![EngineHash(u64::MAX - 1)],
        parent: Some(EngineHash(1 << 63)),
        tokens: vec![3, 4],
        block_size: 2,
        medium: Medium::Shared,
        cache_salt: Some("salt".into()),
        ..Stored::default()
    };
    assert_eq!(event, expected);
}

#[test]
fn media_of_both_engines_are_known() {
    let at = |medium: Value, locality: Value| {
        let hashes = ("block_hashes", ints(&[]));
        stored(Map(vec![("type", Text("BlockStored")), hashes, ("medium", medium), ("locality", locality)])).medium
    };
    let names = [
        ("GPU", Medium::G1),
        ("CPU", Medium::G2),
        ("CPU_PINNED", Medium::G2),
        ("DISK", Medium::G3),
        ("STORAGE", Medium::G3),
        ("EXTERNAL", Medium::Shared),
        ("TAPE", Medium::Unknown),
    ];
    for (name, medium) in names {
        assert_eq!(at(Text(name), Nil), medium, "{name}");
        assert_eq!(at(Text(name), Text("LOCAL")), medium, "{name}");
        assert_eq!(at(Text(name), Text("REMOTE")), Medium::Shared, "{name}");
    }
    assert_eq!(at(Nil, Nil), Medium::G1);
}

#[test]
fn token_ids_beyond_u32_are_foreign() {
    for foreign in [-1, 1 << 32] {
        let hashes = ("block_hashes", ints(&[1]));
        let event = stored(Map(vec![("type", Text("BlockStored")), hashes, ("token_ids", ints(&[1, foreign]))]));
        assert_eq!((event.tokens.len(), event.foreign_tokens), (0, true));
    }
}

#[test]
fn token_ids_may_be_encoded_in_any_way() {
    // 127, 128, 300 and 70,000, as short as they can be, as signed numbers, and 5 in eight bytes.
    let short = [&[0x7f][..], &[0xcc, 128], &[0xcd, 1, 44], &[0xce, 0, 1, 0x11, 0x70]];
    let long = [&[0xd0, 127][..], &[0xd1, 0, 128], &[0xd2, 0, 0, 1, 44], &[0xd3, 0, 0, 0, 0, 0, 1, 0x11, 0x70]];
    let five = [&[0xcf, 0, 0, 0, 0, 0, 0, 0, 5][..]];
    for encodings in [[&short[..], &long, &five], [&long, &short, &five], [&five, &short, &long]] {
        let mut bytes = Vec::new();
        Array(vec![Int(1), Array(vec![Map(vec![("type", Text("BlockStored")), ("block_hashes", ints(&[1]))])])])
            .encode(&mut bytes);
        // The map is the last value, so a field can be added to it.
        let fields = bytes.windows(3).rposition(|header| header == [0xde, 0, 2]).unwrap();
        bytes[fields + 2] = 3;
        Text("token_ids").encode(&mut bytes);
        bytes.extend([0xdc, 0, 9]);
        bytes.extend(encodings.concat().concat());
        let events = Batch::decode(&bytes).unwrap().events;
        let [Event::Stored(stored)] = &events[..] else { panic!("{events:?}") };
        let numbers = [127, 128, 300, 70_000];
        let expected: Vec<u32> =
            encodings.iter().flat_map(|one| if one.len() == 1 { vec![5] } else { numbers.to_vec() }).collect();
        assert_eq!(stored.tokens, expected);
    }
}

#[test]
fn events_that_are_not_understood_are_skipped() {
    let removed = || Map(vec![("block_hashes", ints(&[1])), ("type", Text("BlockRemoved"))]);
    let batch = batch(vec![
        Map(vec![("type", Text("BlockMoved")), ("block_hashes", ints(&[1]))]),
        Array(vec![Text("BlockMoved"), Map(vec![("a", Nil)])]),
        Map(vec![("type", Text("BlockStored")), ("block_hashes", Text("none"))]),
        Map(vec![("type", Text("BlockRemoved"))]),
        Map(vec![("type", Text("BlockRemoved")), ("block_hashes", Array(vec![Value::Bytes(vec![1; 7])]))]),
        Map(vec![]),
        Array(vec![]),
        Int(4),
        removed(),
    ]);
    let expected = Removed { blocks: vec![EngineHash(1)], ..Removed::default() };
    assert_eq!((batch.events, batch.skipped), (vec![Event::Removed(expected)], 8));
}

#[test]
fn an_absent_rank_and_later_elements_are_accepted() {
    assert_eq!(Batch::decode(&hex("920190")).unwrap().rank, None);
    assert_eq!(Batch::decode(&hex("93019003")).unwrap().rank, Some(3));
    assert_eq!(Batch::decode(&hex("95019003c081a16101")).unwrap().rank, Some(3));
}

#[test]
fn broken_payloads_are_errors() {
    assert_eq!(Batch::decode(&[]), Err(WireError::Truncated));
    assert_eq!(Batch::decode(&hex("9101")), Err(WireError::Unexpected("batch")));
    assert_eq!(Batch::decode(&hex("80")), Err(WireError::Unexpected("batch")));
    assert_eq!(Batch::decode(&hex("9201dd7fffffff")), Err(WireError::Truncated), "2^31 events in no bytes");
    let payload = &messages(INT_HASHES)[0].payload;
    for len in 0..payload.len() {
        assert!(Batch::decode(&payload[..len]).is_err(), "{len}");
    }
}

#[test]
fn deep_nesting_needs_no_stack() {
    let mut payload = hex("92019181a161").to_vec();
    payload.extend(std::iter::repeat_n(0x91, 1 << 20));
    payload.push(0xc0);
    assert_eq!(Batch::decode(&payload).unwrap().skipped, 1);
}

#[test]
fn messages_are_told_from_answers_by_their_frames() {
    let frames = |frames: &[&'static [u8]]| frames.iter().map(|frame| Bytes::from_static(frame)).collect::<Vec<_>>();
    let (one, end) = (b"\0\0\0\0\0\0\0\x01", b"\xff\xff\xff\xff\xff\xff\xff\xff");
    let message = Message { number: 1, payload: Bytes::from_static(b"p") };
    assert_eq!(Message::live(&frames(&[b"topic", one, b"p"])), Ok(message.clone()));
    assert_eq!(Replayed::read(&frames(&[b"", b"topic", one, b"p"])), Ok(Replayed::Batch(message.clone())));
    assert_eq!(Replayed::read(&frames(&[b"", one, b"p"])), Ok(Replayed::Batch(message)));
    assert_eq!(Replayed::read(&frames(&[b"", b"", end, b""])), Ok(Replayed::End));
    assert_eq!(Replayed::read(&frames(&[b"", end, b""])), Ok(Replayed::End));
    assert_eq!(Message::live(&frames(&[b"", end, b""])), Err(WireError::Sequence));
    assert_eq!(Message::live(&frames(&[b"", b"1", b"p"])), Err(WireError::Sequence));
    assert_eq!(Message::live(&frames(&[b"p"])), Err(WireError::Frames(1)));
}

fn payloads() -> Vec<Bytes> {
    let captured = [INT_HASHES, BYTE_HASHES].into_iter().flat_map(messages).map(|message| message.payload);
    captured.chain([hex(GOLDEN.trim())]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Batch::decode(&bytes);
        let _ = Batch::decode(&[&[0x93, 1, 0x91][..], &bytes].concat());
    }

    /// Bytes of captured frames are overwritten, inserted or removed.
    #[test]
    fn mutated_frames_never_panic(
        which in 0..payloads().len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..8),
    ) {
        let mut bytes = payloads()[which].to_vec();
        for (at, byte, kind) in changes {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => { bytes.remove(at); }
            }
        }
        let _ = Batch::decode(&bytes);
    }
}
