use super::*;
use crate::event::Epoch;
use crate::tier::conformance::{self, Subject, chain_of, hashes, load};

fn host(slots: u64, bytes: usize) -> (HostTier, Arc<EventLog>) {
    let log = Arc::new(EventLog::new(Epoch(1)));
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    let host = HostTier::new(slots * bytes as u64, bytes, conformance::fingerprint(), log.clone(), &metrics);
    (host.unwrap(), log)
}

#[test]
fn memory_that_the_system_refuses_is_an_error() {
    let (log, metrics) = (Arc::new(EventLog::new(Epoch(1))), Metrics::new(&prometheus::Registry::new()).unwrap());
    // One block: the first fits the address space but no machine, the second not even that.
    for bytes in [1 << 62, 1 << 63] {
        let host = HostTier::new(bytes, bytes as usize, conformance::fingerprint(), log.clone(), &metrics);
        assert_eq!(host.unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    }
}

fn subject(slots: u64) -> Subject {
    let (host, log) = host(slots, 4_000);
    Subject::new(host, log)
}

// All tests but `fingerprints_live_apart`: this tier belongs to one engine, see below.
conformance::suite!(@tests async || subject(300);
    stored_blocks_come_back_as_they_were
    load_answers_every_index_once
    holds_counts_the_prefix
    storing_again_is_ok_and_announced_once
    a_discarded_block_is_missing_until_stored_again
    events_agree_with_holds
    empty_requests_are_answered
    a_dropped_load_leaves_the_tier_as_it_was
    concurrent_requests_are_all_answered
    a_dropped_store_is_whole_or_absent
);

#[tokio::test]
async fn capacity_is_not_exceeded() {
    conformance::older_blocks_are_evicted_within_the_capacity(subject(60)).await;
}

#[tokio::test]
async fn blocks_of_another_engine_are_rejected() {
    let (host, _) = host(8, 4_000);
    let other = Fingerprint::from_bytes([7; 32]);
    let theirs = chain_of(other, 1, 2, 2_000);
    assert!(host.store(theirs.clone()).await.iter().all(Result::is_err));
    conformance::store(&host, conformance::chain(1, 2)).await;
    assert_eq!(host.holds(other, &hashes(&theirs)), 0);
    assert!(load(&host, other, hashes(&theirs)).await.iter().all(Option::is_none));
}

#[tokio::test]
async fn bytes_stay_while_they_are_read() {
    let (host, _) = host(4, 4_000);
    let first = conformance::chain(1, 1);
    conformance::store(&host, first.clone()).await;
    let reading = host.get(&hashes(&first))[0].take().unwrap();
    for seed in 2..9 {
        conformance::store(&host, conformance::chain(seed, 3)).await;
    }
    host.discard(conformance::fingerprint(), first[0].header.hash);
    conformance::store(&host, conformance::chain(10, 3)).await;
    assert!(reading.verify(first[0].header.hash, conformance::fingerprint()).is_ok());
    conformance::store(&host, conformance::chain(11, 4)).await;
}

#[tokio::test]
async fn a_tier_being_read_is_busy_and_one_without_slots_full() {
    let (host, _) = host(1, 4_000);
    let blocks = conformance::chain(1, 2);
    conformance::store(&host, blocks[..1].to_vec()).await;
    let reading = host.get(&hashes(&blocks[..1]));
    assert!(matches!(host.store(blocks[1..].to_vec()).await[0], Err(StoreError::Busy)));
    drop(reading);
    assert!(host.store(blocks[1..].to_vec()).await[0].is_ok());
    let (none, _) = self::host(0, 4_000);
    assert!(matches!(none.store(blocks).await[0], Err(StoreError::Full)));
}

#[test]
fn a_copied_chain_has_headers_and_is_one_event() {
    let (host, log) = host(3, 4_000);
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap().memory(Level::G1);
    let device = BlockPool::new(Level::G1, 2, Arc::new(EventLog::new(Epoch(1))), metrics, Clock::system());
    let names = [5, 6].map(|n| SequenceHash::from_bytes([n; 16]));
    let slots = device.allocate(2).unwrap().into_iter().zip([(names[0], None), (names[1], Some(names[0]))]);
    let full = slots.map(|(slot, (name, parent))| slot.complete(name, parent, BlockAttrs::default()));
    let blocks = device.register(full.collect());
    let fill = |slot: BlockId, bytes: &mut [u8], observe: &mut dyn FnMut(&[u8])| {
        bytes.fill(slot.0 as u8);
        bytes.chunks(1_500).for_each(observe);
    };
    assert_eq!(host.copy_from_device(&blocks, 0, fill).resident, names);
    for (block, found) in blocks.iter().zip(host.get(&names)) {
        let found = found.unwrap().verify(block.hash(), conformance::fingerprint()).unwrap();
        assert!(found.payload() == [block.slot().0 as u8; 4_000]);
    }
    assert_eq!(log.snapshot().number, 1);
}
