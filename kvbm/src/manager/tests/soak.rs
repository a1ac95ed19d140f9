//! Random operations from several tasks, seeded.

use super::*;
use std::collections::HashSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_match_memory_after_random_operations() {
    for seed in 0..8_u64 {
        let inner = placed(Level::G3, 0, 0);
        let faults = Faults { error: 0.1, lost: 0.1, corrupt: 0.1, busy: 0.1, ..Faults::default() };
        let harness = Arc::new(Harness::new(24, 12, vec![Arc::new(Faulty::new(inner, seed, faults))]));
        let tasks = (0..3_u64).map(|task| {
            let harness = harness.clone();
            tokio::spawn(async move {
                for step in 0..40_u64 {
                    let random = blake3::hash(&[seed, task, step].map(u64::to_le_bytes).concat());
                    let random = random.as_bytes();
                    let length = usize::from(random[0]) % 12 + 1;
                    let held = harness.manager.lookup(&hashes(12));
                    let onboarded = harness.manager.onboard(&hashes(length), ms(1)).await;
                    harness.assert_sound(&onboarded.blocks);
                    let have = onboarded.blocks.len();
                    // The allocation may fail: other tasks hold blocks.
                    if have < length && harness.manager.available() >= length {
                        let slots = harness.manager.allocate(length - have).into_iter().flatten();
                        let full = slots.zip(have..length).map(|(slot, n)| {
                            harness.device.write(slot.slot(), &content(hash(n)));
                            slot.complete(hash(n), n.checked_sub(1).map(hash), BlockAttrs::default())
                        });
                        drop(harness.manager.register_all(full.collect()));
                    }
                    if random[1] < 60 {
                        harness.host.as_ref().unwrap().discard(fingerprint(), hash(usize::from(random[2]) % 12));
                    }
                    if random[3] < 40 {
                        drop(harness.manager.allocate(usize::from(random[4]) % 12));
                    }
                    drop((held, onboarded));
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        harness.manager.flush().await;
        let announced: HashSet<(Level, SequenceHash)> = harness.log.snapshot().blocks().collect();
        let held = |level| move |hash| (level, hash);
        let g1 = harness.manager.0.core.pool.hashes().into_iter().map(held(Level::G1));
        let g2 = harness.host.as_ref().unwrap().hashes().into_iter().map(held(Level::G2));
        assert_eq!(announced, g1.chain(g2).collect(), "seed {seed}");
    }
}
