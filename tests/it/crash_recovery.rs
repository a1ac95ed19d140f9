//! A restart after SIGKILL finds the blocks that the SSD tier reported, and gives the same answers.

use super::process::Process;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_restarts_with_its_blocks_and_same_answers() {
    let data = tempfile::tempdir().unwrap();
    let prompt = |kind: u32| -> Vec<u32> { (0..640).map(|n| 10 + (kind * 31 + n * 7) % 500).collect() };
    // Without G2, cached blocks after the restart can only come from the SSD.
    let sizes = ["--set", "tiers.g1=32MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=64MiB"];
    let first = Process::start(data.path(), &sizes, &[]).await;
    let mut answers = Vec::new();
    for kind in 0..5 {
        let (answer, cold) = first.client.complete(&prompt(kind)).await.unwrap();
        assert_eq!(cold, 0);
        answers.push(answer);
    }
    let stored = async {
        while first.client.metric("blockyard_tier_blocks", "g3").await < 5.0 * 640.0 / 16.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(5), stored).await.expect("all blocks are stored in G3");
    drop(first);
    let second = Process::start(data.path(), &sizes, &[]).await;
    for (kind, answer) in (0..).zip(answers) {
        let (again, _) = second.client.complete(&prompt(kind)).await.unwrap();
        assert_eq!(again, answer, "text and log-probabilities");
    }
    // Not all need be hits: on a busy machine, blocks that load too slowly are recomputed.
    assert!(second.client.metric("blockyard_tier_hit_blocks_total", "g3").await > 0.0);
}
