use super::*;
use crate::hash::splitmix64;
use crate::load::OutputEnd;

const REQUEST: Demand = Demand {
    prefill_tokens: 100,
    timed_tokens: 0,
    prefill_micros: 0,
    prompts: 1,
    blocks: 10,
    sequences: 1,
    context_tokens: 150,
};

fn report(waiting_tokens: u64) -> Load {
    Load { waiting_tokens, ..Load::default() }
}

#[tokio::test(start_paused = true)]
async fn a_booking_and_the_report_of_it_count_once() {
    let load = WorkerLoad::default();
    let number = load.book(REQUEST, None, ExpectedOutput::default(), Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
    load.sent(number, Instant::now());
    load.report(report(0), Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 100, "the report is as old as the request");
    load.report(report(100), Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 100, "the report may contain it, so it counts once");
    tokio::time::advance(IN_REPORT_AFTER).await;
    load.report(Load { running: 2, active_blocks: 25, ..report(80) }, Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 80);
    load.release(number, 0, Instant::now());
    let stats = load.stats(Instant::now());
    assert_eq!((stats.sequences, stats.active_blocks), (1, 15), "it has ended since the report");
    load.report(Load { running: 1, active_blocks: 15, ..report(0) }, Instant::now());
    assert_eq!(load.stats(Instant::now()).sequences, 1, "the next report contains its end");
}

#[tokio::test(start_paused = true)]
async fn reservations_of_others_count_beside_the_reports_of_a_server() {
    // The router counts its own requests to a server; what others have sent, the server says a second later or never.
    let own = Load { running: 1, ..report(0) };
    for (load, sequences, waiting_tokens) in [(WorkerLoad::of_server(), 2, 100), (WorkerLoad::default(), 1, 0)] {
        let number = load.book(REQUEST, None, ExpectedOutput::default(), Instant::now());
        let other = load.book_remote(REQUEST, Instant::now());
        load.sent(number, Instant::now());
        load.sent(other, Instant::now());
        load.started(number, Instant::now());
        tokio::time::advance(IN_REPORT_AFTER).await;
        load.report(own.clone(), Instant::now());
        let stats = load.stats(Instant::now());
        assert_eq!((stats.sequences, stats.waiting_tokens), (sequences, waiting_tokens));
        // The server's metrics have it, and one more.
        load.report(Load { running: 3, ..report(0) }, Instant::now());
        assert_eq!(load.stats(Instant::now()).sequences, 3, "nothing counts twice");
        load.release(other, 0, Instant::now());
        load.report(own.clone(), Instant::now());
        assert_eq!(load.stats(Instant::now()).sequences, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_of_other_routers_have_outputs_as_long_as_those_of_the_model() {
    let (load, model) = (WorkerLoad::default(), Arc::new(ModelStats::default()));
    load.set_model_stats(&model, None);
    (0..600).for_each(|_| model.output_ended(&"a".into(), 4000, OutputEnd::Complete));
    load.book_remote(REQUEST, Instant::now());
    load.report(Load { running: 1, decode_step_seconds: Some(0.01), ..report(0) }, Instant::now());
    let rest = load.stats(Instant::now()).rest_tokens.or(0.0);
    assert!((3000.0..5000.0).contains(&rest), "{rest}");
}

/// A worker of a memory of 1,000 blocks, of a model with conversations that use 60 blocks every 10 seconds.
async fn lost_share(conversations: u64) -> f64 {
    let (load, model) = (WorkerLoad::default(), Arc::new(ModelStats::default()));
    load.set_model_stats(&model, None);
    load.set_block_tokens(16);
    load.set_cache(1_000, false);
    let request = Demand { context_tokens: 60 * 16, ..REQUEST };
    for _ in 0..30 {
        for conversation in 0..conversations {
            let now = Instant::now();
            model.shared_prefix(60, 16, |at| splitmix64(conversation << 32 | at as u64), true, now.into());
            load.release(load.book(request, None, ExpectedOutput::default(), now), 0, now);
        }
        tokio::time::advance(Duration::from_secs(10)).await;
    }
    load.report(report(0), Instant::now());
    load.stats(Instant::now()).lost_share.or(9.0)
}

#[tokio::test(start_paused = true)]
async fn a_worker_loses_blocks_if_conversations_use_more_than_its_memory() {
    let (fit, too_many) = (lost_share(8).await, lost_share(32).await);
    assert!(fit < 0.1 && too_many > 0.5, "{fit} {too_many}");
}

#[tokio::test(start_paused = true)]
async fn workers_on_one_device_have_one_pace() {
    let model = Arc::new(ModelStats::default());
    let loads = [Some(DeviceId(1)), Some(DeviceId(1)), Some(DeviceId(2)), None].map(|device| {
        let load = WorkerLoad::default();
        load.set_model_stats(&model, device);
        load
    });
    let step = |load: &WorkerLoad, seconds| {
        load.book(REQUEST, None, ExpectedOutput::default(), Instant::now());
        load.report(Load { running: 1, decode_step_seconds: Some(seconds), ..report(0) }, Instant::now());
    };
    (0..200).for_each(|nth| step(&loads[2], 0.01 + f64::from(nth) * 1e-9));
    (0..50).for_each(|nth| step(&loads[0], 0.03 + f64::from(nth) * 1e-9));
    for load in &loads {
        load.report(report(0), Instant::now());
    }
    let paces = loads.map(|load| load.stats(Instant::now()).step_pace);
    assert!(paces[0].or(0.0) > 1.2 && paces[0] == paces[1], "{paces:?}");
    assert!(paces[2].or(9.0) < 1.1 && paces[3].get().is_none(), "{paces:?}");
}

#[tokio::test(start_paused = true)]
async fn reading_keeps_the_version_and_started_requests_are_local() {
    let (load, now) = (WorkerLoad::default(), Instant::now());
    let number = load.book_remote(REQUEST, now);
    let version = load.version();
    assert_eq!((load.remote(), load.latest(now)), (REQUEST, None));
    assert_eq!(load.version(), version);
    load.started(number, Instant::now());
    assert_eq!(load.remote(), Demand::default());
}

#[tokio::test(start_paused = true)]
async fn an_unsent_booking_counts_beside_any_report() {
    let load = WorkerLoad::default();
    let computed = Demand { prefill_tokens: 0, prompts: 0, ..REQUEST };
    let number = load.book(computed, None, ExpectedOutput::default(), Instant::now());
    tokio::time::advance(Duration::from_secs(1)).await;
    load.report(report(0), Instant::now());
    assert_eq!(load.stats(Instant::now()).active_blocks, 10);
    load.revise(number, 100);
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
}

#[tokio::test(start_paused = true)]
async fn a_started_request_is_in_the_next_report() {
    let load = WorkerLoad::default();
    // The message that it was sent was lost, and so is that of its end.
    let number = load.book_remote(REQUEST, Instant::now());
    load.started(number, Instant::now());
    tokio::time::advance(IN_REPORT_AFTER).await;
    load.report(Load { running: 1, active_blocks: 10, ..report(0) }, Instant::now());
    let stats = load.stats(Instant::now());
    assert_eq!((stats.sequences, stats.active_blocks), (1, 10), "it counts once");
    load.report(report(0), Instant::now());
    let stats = load.stats(Instant::now());
    assert_eq!((stats.sequences, stats.active_blocks), (0, 0), "it has ended");
}

#[tokio::test(start_paused = true)]
async fn choices_of_one_response_and_the_report_of_them_count_once() {
    let load = WorkerLoad::of_server();
    let choice = REQUEST.without_prompt();
    let choices = [REQUEST, choice, choice].map(|demand| load.book(demand, None, <_>::default(), Instant::now()));
    load.sent(choices[0], Instant::now());
    tokio::time::advance(IN_REPORT_AFTER).await;
    for number in choices {
        load.started(number, Instant::now());
    }
    load.report(Load { running: 3, active_blocks: 30, ..report(0) }, Instant::now());
    let stats = load.stats(Instant::now());
    assert_eq!((stats.sequences, stats.active_blocks), (3, 30), "the report contains the choices");
    for number in choices {
        load.release(number, 0, Instant::now());
    }
    assert_eq!(load.stats(Instant::now()).sequences, 0, "all have ended since the report");
}

#[tokio::test(start_paused = true)]
async fn a_stale_report_leaves_the_bookings_to_count() {
    let load = WorkerLoad::default();
    load.report(report(0), Instant::now());
    let number = load.book(REQUEST, None, ExpectedOutput::default(), Instant::now());
    load.sent(number, Instant::now());
    tokio::time::advance(Duration::from_secs(1)).await;
    load.report(report(0), Instant::now());
    tokio::time::advance(STALE_AFTER + Duration::from_millis(1)).await;
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
    assert!(!load.is_silent(Instant::now()));
    tokio::time::advance(SILENT_AFTER).await;
    assert!(load.is_silent(Instant::now()));
}

#[tokio::test(start_paused = true)]
async fn the_first_token_frees_the_prefill_and_the_release_the_rest() {
    let load = WorkerLoad::default();
    let number = load.book(REQUEST, None, ExpectedOutput::default(), Instant::now());
    load.started(number, Instant::now());
    let stats = load.stats(Instant::now());
    assert_eq!((stats.waiting_tokens, stats.active_blocks, stats.sequences), (0, 10, 1));
    tokio::time::advance(Duration::from_secs(2)).await;
    load.release(number, 0, Instant::now());
    let stats = load.stats(Instant::now());
    assert_eq!((stats.active_blocks, stats.sequences), (0, 0));
    assert_eq!(stats.speeds.mean_duration.get(), Some(2.0));
}

#[tokio::test(start_paused = true)]
async fn cached_tokens_in_a_report_are_not_waiting() {
    let load = WorkerLoad::default();
    let number = load.book(REQUEST, Some(5000), ExpectedOutput::default(), Instant::now());
    load.sent(number, Instant::now());
    tokio::time::advance(IN_REPORT_AFTER).await;
    // The engine has not looked for cached blocks yet.
    load.report(Load { waiting: 1, ..report(5100) }, Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
    load.report(Load { running: 1, ..report(60) }, Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 60, "a part of it is computed");
    load.report(Load { waiting: 2, ..report(8100) }, Instant::now());
    assert_eq!(load.stats(Instant::now()).waiting_tokens, 8100, "one is not of this router");
}

#[tokio::test(start_paused = true)]
async fn what_a_handover_leaves_of_its_transfer_is_learned() {
    let load = WorkerLoad::default();
    let speeds = || load.stats(Instant::now()).speeds;
    assert_eq!((speeds().handoff_overhead.get(), speeds().handoff_transfer.get()), (None, None));
    // A tenth of each transfer comes after the prefill, and 20 ms.
    (0..40)
        .map(|nth| 0.1 * f64::from(1 + nth % 4))
        .for_each(|transfer| load.handed_off(transfer, 0.02 + 0.1 * transfer));
    let (overhead, transfer) = (speeds().handoff_overhead.or(9.0), speeds().handoff_transfer.or(9.0));
    assert!((overhead - 0.02).abs() < 0.002 && (transfer - 0.1).abs() < 0.01, "{overhead} {transfer}");
}
