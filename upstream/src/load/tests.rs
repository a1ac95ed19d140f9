use super::*;
use std::time::Duration;

fn counts(load: &watch::Receiver<Load>) -> (u32, u64, u32) {
    let load = load.borrow();
    (load.waiting, load.waiting_tokens, load.running)
}

#[test]
fn a_request_waits_until_its_first_output_and_then_runs() {
    let counter = LoadCounter::new();
    let load = counter.watch();
    let one = counter.start(100, 4);
    let other = counter.start(50, 1);
    assert_eq!(counts(&load), (2, 150, 0));
    one.first_output(true);
    one.first_output(true);
    assert_eq!(counts(&load), (1, 50, 4));
    drop((one, other));
    assert_eq!(*load.borrow(), Load::default());
}

#[test]
fn only_the_first_output_of_a_stream_is_announced() {
    let counter = LoadCounter::new();
    let (stream, whole) = (counter.start(0, 1), counter.start(0, 1));
    let mut load = counter.watch();
    load.mark_unchanged();
    whole.first_output(false);
    assert_eq!((load.has_changed().unwrap(), counts(&load)), (false, (1, 0, 1)), "a report has it all the same");
    stream.first_output(true);
    assert!(load.has_changed().unwrap());
    load.mark_unchanged();
    drop(whole);
    assert!(load.has_changed().unwrap(), "its end is announced");
}

#[test]
fn what_a_server_reports_beyond_the_own_requests_is_of_others() {
    let counter = LoadCounter::new();
    let load = counter.watch();
    let report = |running, waiting| Some(Reported { running, waiting, ..Reported::default() });
    let ask = |report| {
        counter.asking();
        counter.reported(report);
    };
    let one = counter.start(100, 1);
    one.first_output(true);
    let other = counter.start(50, 1);
    ask(report(5, 3));
    assert_eq!(counts(&load), (3, 50, 5), "the own ones are one of each");
    ask(report(2, 0));
    assert_eq!(counts(&load), (1, 50, 1), "the server may compute a prompt that waits here");
    ask(report(0, 0));
    assert_eq!(counts(&load), (1, 50, 1), "never below the own");
    counter.asking();
    drop((other, counter.start(10, 1)));
    counter.reported(report(3, 0));
    assert_eq!(counts(&load), (0, 0, 1), "requests that have ended since are not of others");
    ask(report(9, 9));
    ask(None);
    assert_eq!(counts(&load), (0, 0, 1), "without a report the own count");
}

#[test]
fn the_cache_is_as_reported() {
    let (counter, cache) = (LoadCounter::new(), CacheUsage { active_blocks: 30, total_blocks: 100 });
    counter.reported(Some(Reported { cache, ..Reported::default() }));
    let load = counter.watch();
    assert_eq!((load.borrow().active_blocks, load.borrow().total_blocks), (30, 100));
}

#[tokio::test(start_paused = true)]
async fn the_size_of_the_batch_is_learned_while_requests_wait() {
    let counter = LoadCounter::new();
    let load = counter.watch();
    let with_cache = |running, waiting, active_blocks| {
        let cache = CacheUsage { active_blocks, total_blocks: 100 };
        counter.reported(Some(Reported { running, waiting, cache }));
        load.borrow().sequences_max
    };
    let report = |running, waiting| with_cache(running, waiting, 50);
    for (running, waiting) in [(200, 0), (200, 0), (200, 0), (10, 90), (90, 40), (100, 30), (99, 30), (100, 30)] {
        assert_eq!(report(running, waiting), 0, "{running} ran");
    }
    assert_eq!(report(100, 20), 100, "with three reports");
    assert_eq!([report(40, 0), report(99, 5)], [100; 2], "fewer run for a moment");
    assert_eq!(report(101, 0), 0, "there was a place left");
    for _ in 0..4 {
        assert_eq!(with_cache(60, 40, 95), 0, "they wait for blocks");
    }
    let thrice = |running| [1, 2, 3].map(|waiting| report(running, waiting));
    assert_eq!(thrice(128), [0, 0, 128]);
    tokio::time::advance(Duration::from_secs(61)).await;
    counter.refresh();
    assert_eq!(load.borrow().sequences_max, 0, "too old");
    assert_eq!(thrice(64), [0, 0, 64], "a smaller one is learned then");
    counter.reported(None);
    assert_eq!(load.borrow().sequences_max, 0);
}

/// A stream of `output` tokens, 10 ms each, after a prompt of `uncached` tokens, 1 ms each.
async fn stream(counter: &LoadCounter, uncached: u32, output: u32) {
    let counted = counter.start(u64::from(uncached), 1);
    tokio::time::advance(Duration::from_millis(u64::from(uncached))).await;
    counted.first_output(true);
    tokio::time::advance(Duration::from_millis(10) * (output - 1)).await;
    counted.streamed(&RelayReport {
        prompt_tokens: Some(uncached + 64),
        cached_tokens: Some(64),
        completion_tokens: Some(output),
        ..RelayReport::default()
    });
}

#[tokio::test(start_paused = true)]
async fn speeds_are_learned_from_streams() {
    let counter = LoadCounter::new();
    let load = counter.watch();
    stream(&counter, 500, 100).await;
    let near = |value: Option<f64>, expected: f64| value.is_some_and(|value| (value / expected - 1.0).abs() < 0.01);
    assert!(near(load.borrow().prefill_tokens_per_second, 1000.0), "{:?}", load.borrow());
    assert!(near(load.borrow().decode_step_seconds, 0.01), "{:?}", load.borrow());
    // A prompt that waited for another one does not count.
    let _waits = counter.start(100, 1);
    let behind = counter.start(100, 1);
    tokio::time::advance(Duration::from_mins(1)).await;
    behind.first_output(true);
    behind.streamed(&RelayReport { prompt_tokens: Some(100), cached_tokens: Some(0), ..RelayReport::default() });
    assert!(near(load.borrow().prefill_tokens_per_second, 1000.0));
}
