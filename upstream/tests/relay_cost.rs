//! What one relayed chunk costs. Allocations are asserted, because they do not depend on the machine; times are
//! printed:
//!
//! ```text
//! cargo test --release --test relay_cost -- --nocapture
//! ```

#[path = "../../tests/counting_allocator/mod.rs"]
mod counting_allocator;

use bytes::Bytes;
use counting_allocator::{allocations, count_this_thread};
use futures::{FutureExt, StreamExt};
use http::Response;
use http_body::{Body, Frame};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use upstream::relay::fake::Script;
use upstream::relay::stream::{Item, Relay, UsageInStream};

/// A body whose chunks are there already.
struct Chunks(VecDeque<Bytes>);

impl Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// Enough that the few allocations of a whole answer vanish in the average.
const EVENTS: usize = 1000;

/// Relays a body in chunks of these lengths. Returns time and allocations per event, those of the first and last events
/// included.
fn relayed(body: &Bytes, usage: UsageInStream, mut lengths: impl FnMut(&Bytes) -> usize) -> (Duration, f64) {
    let mut rest = body.clone();
    let mut chunks = VecDeque::with_capacity(2 * EVENTS);
    while !rest.is_empty() {
        let length = lengths(&rest);
        chunks.push_back(rest.split_to(length));
    }
    let response =
        Response::builder().header("content-type", "text/event-stream").body(Chunks(chunks)).expect("valid headers");
    let before = allocations();
    let start = Instant::now();
    let mut relay = Relay::new(response, usage);
    let mut events = 0;
    while let Some(item) = relay.next().now_or_never().expect("all chunks are there") {
        // Events that arrive together are one frame.
        if let Item::Frame(frame) = item.expect("the stream is whole") {
            events += memchr::memmem::find_iter(&frame, b"\n\n").count();
        }
    }
    let time = start.elapsed();
    assert!(events >= EVENTS);
    (time / events as u32, (allocations() - before) as f64 / events as f64)
}

fn event_length(rest: &Bytes) -> usize {
    memchr::memmem::find(rest, b"\n\n").expect("whole events") + 2
}

#[test]
fn a_chunk_costs_no_allocation_beyond_its_frame() {
    count_this_thread();
    let text = vec![" token"; EVENTS];
    let plain = Script::chat(&text, None).body();
    let null_usage = Script::chat(&text, None).with_null_usage().body();
    // A chunk is one event, eight events, or part of one. Only what is cut out or put together is a new allocation: the
    // bytes, and for joined events the counter of their references.
    let eight =
        |rest: &Bytes| (0..8).fold(0, |at, _| if at < rest.len() { at + event_length(&rest.slice(at..)) } else { at });
    let mut odd = false;
    let halves = move |rest: &Bytes| {
        odd = !odd;
        let length = event_length(rest);
        if odd { length / 2 } else { length }
    };
    let case =
        |name: &str, body: &Bytes, usage, lengths: &dyn Fn() -> Box<dyn FnMut(&Bytes) -> usize>, allowed: f64| {
            let rounds: Vec<_> = (0..10).map(|_| relayed(body, usage, lengths())).collect();
            let fastest = rounds.iter().map(|round| round.0).min().unwrap();
            let allocations = rounds[0].1;
            println!("{name}: {} bytes, {fastest:?}, {allocations:.3} allocations", body.len() / EVENTS);
            assert!(allocations <= allowed + 0.05, "{name}: {allocations}");
        };
    case("one event per chunk", &plain, UsageInStream::Keep, &|| Box::new(event_length), 0.0);
    case("eight events per chunk", &plain, UsageInStream::Keep, &|| Box::new(eight), 0.0);
    case("null usage, kept", &null_usage, UsageInStream::Keep, &|| Box::new(event_length), 0.0);
    case("null usage, stripped", &null_usage, UsageInStream::Strip, &|| Box::new(event_length), 1.0);
    case("two chunks per event", &plain, UsageInStream::Keep, &|| Box::new(halves), 2.0);
}
