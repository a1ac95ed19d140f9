//! Everything at once, seeded.

use super::*;
use std::collections::HashSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_anything_the_log_says_what_the_memory_holds() {
    for seed in 0..8_u64 {
        let inner = at(Level::G3, 0, 0);
        let faults = Faults { error: 0.1, lost: 0.1, corrupt: 0.1, busy: 0.1, ..Faults::default() };
        let site = Arc::new(Site::new(24, 12, vec![Arc::new(Faulty::new(inner, seed, faults))]));
        let tasks = (0..3_u64).map(|task| {
            let site = site.clone();
            tokio::spawn(async move {
                for step in 0..40_u64 {
                    let dice = blake3::hash(&[seed, task, step].map(u64::to_le_bytes).concat());
                    let dice = dice.as_bytes();
                    let (length, held) = (usize::from(dice[0]) % 12 + 1, site.manager.matched(&names(12)));
                    let onboarded = site.manager.onboard(&names(length), ms(1)).await;
                    site.assert_sound(&onboarded.blocks);
                    let have = onboarded.blocks.len();
                    // Not enough room is fine: others hold it.
                    if have < length && site.manager.available() >= length {
                        let slots = site.manager.allocate(length - have).into_iter().flatten();
                        let full = slots.zip(have..length).map(|(slot, n)| {
                            site.device.write(slot.slot(), &content(name(n)));
                            slot.complete(name(n), n.checked_sub(1).map(name), Custody::default())
                        });
                        drop(site.manager.register_all(full.collect()));
                    }
                    if dice[1] < 60 {
                        site.host.as_ref().unwrap().discard(fingerprint(), name(usize::from(dice[2]) % 12));
                    }
                    if dice[3] < 40 {
                        drop(site.manager.allocate(usize::from(dice[4]) % 12));
                    }
                    drop((held, onboarded));
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        site.manager.flush().await;
        let announced: HashSet<(Level, SequenceHash)> = site.log.snapshot().blocks().collect();
        let held = |level| move |name| (level, name);
        let g1 = site.manager.0.core.pool.names().into_iter().map(held(Level::G1));
        let g2 = site.host.as_ref().unwrap().names().into_iter().map(held(Level::G2));
        assert_eq!(announced, g1.chain(g2).collect(), "seed {seed}");
    }
}
