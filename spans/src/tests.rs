//! Traces across processes, sampling and limits.

use crate::{CallerContext, Context, Kind, Sampling, Tracer, extract, inject};
use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;
use std::time::Duration;
use tokio::time::Instant;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
}

#[test]
fn one_trace_continues_in_another_process() {
    let (front, mut front_queue) = Tracer::new(Sampling::ratio(0.0));
    let (back, mut back_queue) = Tracer::new(Sampling::ratio(0.0));
    let client = headers(&[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]);
    let request = front.root("request", Kind::Server, extract(&client));
    let call = request.context().span("call", Kind::Client);
    let mut sent = HeaderMap::new();
    inject(&call.context(), &mut sent);
    assert_eq!(sent["tracestate"], "a=1,b=2");
    drop(back.root("handle", Kind::Server, extract(&sent)));
    drop((call, request));
    let (front, back) = (front_queue.take(9), back_queue.take(9));
    let [call, request] = &front[..] else { panic!("{front:?}") };
    assert_eq!(request.parent.map(|id| id.to_string()).as_deref(), Some("b7ad6b7169203331"));
    assert_eq!(request.trace.to_string(), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!((call.parent, back[0].parent), (Some(request.id), Some(call.id)));
    assert!([call, &back[0]].iter().all(|span| span.trace == request.trace));
}

#[test]
fn the_caller_decides_what_is_recorded_and_else_the_ratio() {
    let (tracer, mut queue) = Tracer::new(Sampling::ratio(1.0));
    let client = headers(&[("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")]);
    let span = tracer.root("request", Kind::Server, extract(&client));
    assert!(!span.is_recorded() && span.context().trace_id().is_none());
    let passed_on = span.context().span("call", Kind::Client).context().traceparent().unwrap();
    assert!(passed_on.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && passed_on.ends_with("-00"));
    drop(span);
    assert!(queue.is_empty());
    for (ratio, expected) in [(0.0, 0..=0), (0.25, 150..=350), (1.0, 1000..=1000)] {
        let (tracer, mut queue) = Tracer::new(Sampling::ratio(ratio));
        (0..1000).for_each(|_| drop(tracer.root("request", Kind::Server, None)));
        let recorded = queue.take(2000);
        assert!(expected.contains(&recorded.len()), "{ratio}: {}", recorded.len());
        assert!(recorded.iter().all(|span| span.parent.is_none()));
    }
    assert_eq!(queue.take(1), []);
}

#[test]
fn without_a_tracer_nothing_is_recorded_or_sent() {
    let span = Tracer::off().root("request", Kind::Server, extract(&headers(&[("traceparent", PARENT)])));
    let mut sent = headers(&[("traceparent", PARENT)]);
    inject(&span.context(), &mut sent);
    assert_eq!(sent["traceparent"], PARENT, "headers of the client pass");
    assert_eq!(span.context(), Context::default());
}

#[test]
fn spans_beyond_the_queue_or_the_limit_of_a_trace_are_dropped_and_counted() {
    let (tracer, mut queue) = Tracer::new(Sampling::ratio(1.0));
    let dropped = queue.dropped();
    let root = tracer.root("request", Kind::Server, None);
    (0..1100).for_each(|_| drop(root.context().span("part", Kind::Internal)));
    assert_eq!((queue.len(), dropped()), (999, 101));
    drop(root);
    (0..5000).for_each(|_| drop(tracer.root("request", Kind::Server, None)));
    assert_eq!((queue.len(), dropped()), (4096, 101 + 5000 - 3096));
    drop(queue.take(5000));
    drop(tracer.root("request", Kind::Server, None));
    assert_eq!(queue.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn times_attributes_events_and_errors_are_recorded() {
    let (tracer, mut queue) = Tracer::new(Sampling::ratio(1.0));
    let mut root = tracer.root("request", Kind::Server, None);
    let begun = Instant::now();
    tokio::time::advance(Duration::from_millis(30)).await;
    root.context().span_since("earlier", Kind::Internal, begun).end_at(begun + Duration::from_millis(10));
    root.event("halfway");
    root.set("text", "é".repeat(400));
    root.fail(&"broken");
    drop(root);
    let [earlier, root] = &queue.take(9)[..] else { panic!("two spans") };
    assert_eq!((earlier.start - root.start, earlier.end - earlier.start), (0, 10_000_000));
    assert_eq!((root.end - root.start, root.events[0].time - root.start), (30_000_000, 30_000_000));
    assert_eq!(root.error.as_deref(), Some("broken"));
    let crate::Value::Text(text) = &root.attributes[0].1 else { panic!("text") };
    assert_eq!(text.len(), 512, "long texts are cut");
}

#[test]
fn invalid_contexts_are_ignored() {
    let valid = |text: &str| CallerContext::parse(text).is_some();
    assert!(valid(PARENT) && valid("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"));
    for wrong in [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ] {
        assert!(!valid(wrong), "{wrong}");
    }
    assert!(extract(&headers(&[("traceparent", PARENT), ("traceparent", PARENT)])).is_none());
}

proptest! {
    #[test]
    fn arbitrary_headers_are_parsed_or_ignored(text in "\\PC*", digits in "[0-9a-f]{2}-[0-9a-f-]{40,60}") {
        let _ = (CallerContext::parse(&text), CallerContext::parse(&digits));
    }
}
