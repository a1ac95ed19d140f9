use super::synthetic::Shape;
use super::*;
use crate::block::{Level, SequenceHash};
use crate::disk::{self, DiskTier};
use crate::event::{Epoch, EventLog};
use crate::tests::fuzz;
use crate::tier::conformance::{self, Memory, Subject, chain, fingerprint, hashes};
use futures::StreamExt;
use prometheus::Registry;
use proptest::prelude::*;

const SHAPE: Shape = Shape { layers: 4, tokens: 16, channels: 1024 };

fn block(raw: impl Into<Bytes>) -> Block {
    let parent = Some(SequenceHash::from_bytes([1; 16]));
    Block::new(SequenceHash::from_bytes([2; 16]), parent, fingerprint(), raw.into())
}

fn metrics() -> Metrics {
    Metrics::new(&Registry::new()).unwrap()
}

/// Checks and decodes a block.
fn decoded(block: &Block) -> Result<Block, Corrupt> {
    block.check(block.header.hash, block.header.fingerprint)?;
    Coder::default().decode(block)
}

mod in_memory {
    use super::*;

    conformance::suite!(async || {
        let log = Arc::new(EventLog::new(Epoch(1)));
        // The suite's payloads are noise: with a minimum ratio of 0 they are encoded nevertheless.
        Subject::with_resources(
            with(Arc::new(Memory::new(log.clone(), None)), Some(Mode::Smaller), 0.0, metrics()),
            log,
            (),
        )
    });
}

mod on_disk {
    use super::*;

    conformance::suite!(async || {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let folder = tempfile::tempdir().unwrap();
        let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..Default::default() };
        let disk = DiskTier::open(folder.path(), settings, log.clone()).unwrap();
        Subject::with_resources(with(disk, Some(Mode::Smaller), 0.0, metrics()), log, folder)
    });
}

#[test]
fn the_ratio_is_near_the_entropy_bound() {
    let values = synthetic::kv(7, SHAPE);
    for (codec, raw, least) in
        [(Codec::Bf16, synthetic::bf16(&values), 1.4), (Codec::F32, synthetic::f32(&values), 1.15)]
    {
        let block = block(raw);
        let encoded = Coder::default().encode(&block, codec);
        let ratio = block.payload.len() as f64 / encoded.payload.len() as f64;
        let bound = entropy_bound(codec, &block.payload);
        assert!(ratio >= least && ratio >= 0.97 * bound, "{codec:?}: {ratio:.3} of {bound:.3}");
        assert_eq!(decoded(&encoded).unwrap().payload, block.payload);
    }
}

#[tokio::test]
async fn only_compressible_blocks_are_encoded_and_all_come_back() {
    let log = Arc::new(EventLog::new(Epoch(1)));
    let memory = Arc::new(Memory::new(log, None));
    let tier = encoded(memory.clone(), Mode::Smaller, metrics());
    let kv = block(synthetic::bf16(&synthetic::kv(7, SHAPE)));
    let noise = chain(1, 1).remove(0);
    let both = [kv.clone(), noise.clone()];
    conformance::store(&*tier, both.to_vec()).await;
    let stored: Vec<Block> =
        memory.load(fingerprint(), hashes(&both)).map(|(_, block)| block.unwrap().unwrap()).collect().await;
    assert_eq!((stored[0].header.codec, stored[1].header.codec), (Codec::Bf16, Codec::Raw));
    assert!(stored[0].clone().verify(kv.header.hash, fingerprint()).is_err(), "only raw blocks can be verified");
    let loaded = conformance::load(&*tier, fingerprint(), hashes(&both)).await;
    assert!(loaded.iter().zip(&both).all(|(loaded, block)| loaded.as_ref().unwrap().payload() == block.payload));
}

#[tokio::test]
async fn a_decoding_tier_reads_both_and_stores_raw() {
    let log = Arc::new(EventLog::new(Epoch(1)));
    let memory = Arc::new(Memory::new(log, None));
    let kv = block(synthetic::bf16(&synthetic::kv(7, SHAPE)));
    let raw = chain(1, 1).remove(0);
    conformance::store(&*encoded(memory.clone(), Mode::Smaller, metrics()), vec![kv.clone()]).await;
    let tier = super::decoded(memory.clone(), metrics());
    conformance::store(&*tier, vec![raw.clone()]).await;
    let both = [kv, raw];
    let loaded = conformance::load(&*tier, fingerprint(), hashes(&both)).await;
    assert!(loaded.iter().zip(&both).all(|(loaded, block)| loaded.as_ref().unwrap().payload() == block.payload));

    let plain = block(synthetic::bf16(&synthetic::kv(8, SHAPE)));
    let tier = super::decoded(Arc::new(Memory::new(Arc::new(EventLog::new(Epoch(1))), None)), metrics());
    conformance::store(&*tier, vec![plain.clone()]).await;
    let found = tier.load(fingerprint(), vec![plain.header.hash]).next().await.unwrap().1.unwrap().unwrap();
    assert_eq!(found.header.codec, Codec::Raw, "it stores blocks raw");
}

#[tokio::test]
async fn without_keys_an_encrypted_block_makes_room_for_a_readable_one_and_its_record_stays() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..Default::default() };
        DiskTier::open(folder.path(), settings, Arc::new(EventLog::new(Epoch(1)))).unwrap()
    };
    let plain = block(synthetic::bf16(&synthetic::kv(7, SHAPE)));
    let mut encrypted = plain.clone();
    encrypted.header.key = Some(crate::block::KeyId::from_bytes([3; 8]));
    encrypted.header = encrypted.header.for_payload(&encrypted.payload);
    let name = [plain.header.hash];
    let found = async |tier: &Arc<dyn Tier>| tier.load(fingerprint(), name.to_vec()).next().await.unwrap().1.unwrap();
    conformance::store(&*open(), vec![encrypted]).await;

    let registry = Registry::new();
    let disk = open();
    let tier = super::decoded(disk.clone(), Metrics::new(&registry).unwrap());
    let undecryptable = || {
        let family = registry.gather().into_iter().find(|family| family.name().ends_with("undecryptable_blocks_total"));
        family.map(|family| family.get_metric()[0].get_counter().get_value())
    };
    assert_eq!(undecryptable(), Some(0.0), "the series exists before the first block");
    assert_eq!(tier.holds(fingerprint(), &name), 1, "the index does not know that it is encrypted");
    assert!(found(&tier).await.is_none());
    assert_eq!((tier.holds(fingerprint(), &name), disk.usage().blocks), (0, 0));
    assert_eq!(undecryptable(), Some(1.0));
    disk.close().await;
    drop((tier, disk));

    let disk = open();
    assert_eq!(disk.holds(fingerprint(), &name), 1, "a process with the key would read it");
    let tier = super::decoded(disk.clone(), metrics());
    assert!(found(&tier).await.is_none());
    conformance::store(&*tier, vec![plain.clone()]).await;
    assert_eq!(found(&tier).await.unwrap().payload, plain.payload);
    disk.close().await;
    drop((tier, disk));

    let tier = super::decoded(open(), metrics());
    assert_eq!(found(&tier).await.unwrap().payload, plain.payload, "the newest record wins");
}

#[tokio::test]
async fn damage_before_encoding_is_detected_after_decoding() {
    let mut damaged = block(synthetic::bf16(&synthetic::kv(7, SHAPE)));
    let mut bytes = damaged.payload.to_vec();
    bytes[1000] ^= 4;
    damaged.payload = bytes.into();
    let encoded = Coder::default().encode(&damaged, Codec::Bf16);
    let decoded = decoded(&encoded).unwrap();
    assert_eq!(decoded.verify(damaged.header.hash, fingerprint()).unwrap_err(), Corrupt::Checksum);
}

#[test]
fn a_fast_device_gets_raw_blocks_and_a_slow_one_encoded_ones() {
    let kv = block(synthetic::bf16(&synthetic::kv(7, SHAPE)));
    let (fast, slow) = (Rates { offload: 20e9, onboard: 50e9 }, Rates { offload: 0.1e9, onboard: 0.1e9 });
    for (mode, device, want) in
        [(Mode::Faster, fast, Codec::Raw), (Mode::Faster, slow, Codec::Bf16), (Mode::Smaller, fast, Codec::Bf16)]
    {
        let encoding = Encoding {
            mode: Some(mode),
            min_ratio: MIN_RATIO,
            device: Arc::default(),
            codec: Throughput::default(),
            undecryptable: Undecryptable::new(Level::G3, metrics()),
            pool: BlockingPool::new(),
            coders: Mutex::default(),
            buffers: Arc::default(),
        };
        let second = std::time::Duration::from_secs(1);
        encoding.device.offload.record(device.offload as u64, second);
        encoding.device.onboard.record(device.onboard as u64, second);
        assert_eq!(encoding.encode(kv.clone()).header.codec, want, "{mode:?} {device:?}");
    }
}

#[test]
fn any_damage_of_an_encoded_block_is_detected() {
    let raw = synthetic::bf16(&synthetic::kv(3, Shape { layers: 1, tokens: 4, channels: 300 }));
    let block = block(raw);
    let encoded = Coder::default().encode(&block, Codec::Bf16);
    let mut coder = Coder::default();
    let outcome = |coder: &mut Coder, bad: Block| {
        assert!(bad.check(bad.header.hash, bad.header.fingerprint).is_err());
        // Without that check, the inner checksum detects it unless the decoded bytes are equal.
        if let Ok(found) = coder.decode(&bad) {
            let same = found.payload == block.payload;
            assert!(same || found.verify(block.header.hash, fingerprint()).is_err());
        }
    };
    for at in 0..encoded.payload.len() {
        let mut bytes = encoded.payload.to_vec();
        bytes[at] ^= 1 << (at % 8);
        outcome(&mut coder, Block { payload: bytes.into(), ..encoded.clone() });
        if at % 16 == 0 {
            outcome(&mut coder, Block { payload: encoded.payload.slice(..at), ..encoded.clone() });
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_survive(raw in proptest::collection::vec(any::<u8>(), 0..3000), times in 1usize..90) {
        let block = block(raw.repeat(times));
        let mut coder = Coder::default();
        for codec in [Codec::Raw, Codec::Bf16, Codec::F32] {
            let encoded = coder.encode(&block, codec);
            let back = decoded(&encoded).unwrap();
            prop_assert_eq!(back.header, block.header);
            prop_assert_eq!(&back.payload, &block.payload);
        }
    }

    #[test]
    fn any_bytes_are_safe_to_decode(
        length in prop_oneof![0u64..5000, any::<u64>()],
        payload in proptest::collection::vec(any::<u8>(), 0..3000),
        four in any::<bool>(),
    ) {
        let payload = [&length.to_le_bytes()[..], &payload].concat();
        let codec = if four { Codec::F32 } else { Codec::Bf16 };
        let header = Header { codec, ..block(Bytes::new()).header }.for_payload(&payload);
        let allowed = payload.len() * 2;
        // Made outside of the measurement, as a new coder allocates memory.
        let mut coder = Coder::default();
        let encoded = Block { header, payload: payload.into() };
        let decoded = fuzz::bounded(&encoded.payload.clone(), 3, |_| coder.decode(&encoded));
        if let Ok(found) = decoded {
            prop_assert!(found.payload.len() <= allowed);
            prop_assert!(found.verify(header.hash, fingerprint()).is_err());
        }
    }
}
