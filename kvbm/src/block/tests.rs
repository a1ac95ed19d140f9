//! Tests of the header's encoding and of verification.

use super::*;
use crate::tests::fuzz;
use bytes::Bytes;
use proptest::prelude::*;

fn block() -> Block {
    let hash = SequenceHash::from_bytes([3; 16]);
    let parent = Some(SequenceHash::from_bytes([2; 16]));
    Block::new(hash, parent, Fingerprint::from_bytes([9; 32]), Bytes::from(vec![5; 300])).with_attrs(attrs())
}

fn attrs() -> BlockAttrs {
    let date = |seconds| Some(Date::from_unix(seconds));
    let retention =
        BlockRetention { expires: date(0xF0F1_F2F3), pinned: date(7), store: false, priority: Priority::High };
    BlockAttrs { domain: DomainId::from_bytes([6; 16]), retention }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_headers_round_trip_or_are_rejected(
        bytes in prop_oneof![fuzz::arbitrary(), fuzz::changed(block().header.encode().to_vec())],
    ) {
        let Some(bytes) = bytes.first_chunk() else { return Ok(()) };
        if let Ok(header) = fuzz::bounded(bytes, 1, |_| Header::decode(bytes)) {
            assert!(header.length <= Header::MAX_LENGTH);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }
}

#[test]
fn verify_accepts_only_unencoded_unencrypted_payloads() {
    let Block { header, payload } = block();
    let codecs = [(Codec::Bf16, None), (Codec::F32, None), (Codec::Raw, Some(KeyId::from_bytes([7; 8])))];
    for (codec, key) in codecs {
        let header = Header { codec, key, ..header }.for_payload(&payload);
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        let stored = Block { header, payload: payload.clone() };
        assert_eq!(stored.check(header.hash, header.fingerprint), Ok(()));
        assert_eq!(stored.verify(header.hash, header.fingerprint).unwrap_err(), Corrupt::Transform);
    }
}

#[test]
fn any_flipped_bit_of_header_or_payload_is_detected() {
    let good = block();
    let hash = good.header.hash;
    let fingerprint = good.header.fingerprint;
    let stored = [&good.header.encode()[..], &good.payload].concat();
    for bit in 0..stored.len() * 8 {
        let mut bad = stored.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let head: [u8; Header::LEN] = bad[..Header::LEN].try_into().unwrap();
        let verified = Header::decode(&head).and_then(|header| {
            Block { header, payload: Bytes::copy_from_slice(&bad[Header::LEN..]) }.verify(hash, fingerprint)
        });
        assert!(verified.is_err(), "flipped bit {bit} is not detected");
    }
}

#[test]
fn with_retention_keeps_the_checksum_valid() {
    for length in [0, 1, 300, 70_000] {
        let payload = Bytes::from(vec![5; length]);
        let block = Block::new(SequenceHash::from_bytes([3; 16]), None, Fingerprint::from_bytes([9; 32]), payload);
        let changed = block.header.with_retention(attrs().retention);
        assert_eq!(changed, Header { retention: attrs().retention, ..block.header }.for_payload(&block.payload));
        assert_eq!(changed.with_retention(BlockRetention::default()), block.header);
    }
}

#[test]
fn a_header_with_a_known_checksum_is_that_of_the_payload() {
    for length in [0, 1, 300, 70_000] {
        let (hash, parent) = (SequenceHash::from_bytes([3; 16]), Some(SequenceHash::from_bytes([2; 16])));
        let (fingerprint, payload) = (Fingerprint::from_bytes([9; 32]), vec![5; length]);
        let header = Header::new(hash, parent, fingerprint, attrs(), &payload);
        let known = (length, header.payload_checksum());
        assert_eq!(Header::of_known_payload(hash, parent, fingerprint, attrs(), known), header);
        let without_parent = Header::new(hash, None, fingerprint, BlockAttrs::default(), &payload);
        assert_eq!(without_parent.payload_checksum(), header.payload_checksum());
    }
}

#[test]
fn a_header_of_another_version_is_rejected() {
    let mut older = block().header.encode();
    older[7] = b'1';
    assert_eq!(Header::decode(&older), Err(Corrupt::Header));
}

#[test]
fn verify_accepts_the_stored_block_and_rejects_any_other() {
    let good = block();
    let hash = good.header.hash;
    let fingerprint = good.header.fingerprint;
    assert_eq!(Header::decode(&good.header.encode()), Ok(good.header));
    assert_eq!(good.header.attrs(), attrs());
    assert!(good.clone().verify(hash, fingerprint).is_ok());
    let other = SequenceHash::from_bytes([4; 16]);
    assert_eq!(good.clone().verify(other, fingerprint).unwrap_err(), Corrupt::OtherBlock);
    let foreign = Fingerprint::from_bytes([8; 32]);
    assert_eq!(good.clone().verify(hash, foreign).unwrap_err(), Corrupt::OtherFingerprint);
    let short = Block { payload: good.payload.slice(1..), ..good };
    assert_eq!(short.verify(hash, fingerprint).unwrap_err(), Corrupt::Length);
}
