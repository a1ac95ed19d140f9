//! Follows a publisher of KV events and prints one line for each thing it says:
//!
//! ```text
//! cargo run --example follow_kv_events -- tcp://127.0.0.1:5557 tcp://127.0.0.1:5558 kv
//! ```
//!
//! The replay endpoint may be `-`. `tests/python/test_kv_events.py` runs it against libzmq.

use std::time::Duration;
use upstream::kv_events::{Batch, Event, Sink, Source, run};

struct Print {
    /// Waits after each batch, as a slow consumer does.
    delay: Duration,
}

impl Sink for Print {
    fn connected(&mut self) {
        println!("connected");
    }
    fn disconnected(&mut self) {
        println!("disconnected");
    }
    fn new_epoch(&mut self) {
        println!("new epoch");
    }
    fn stale(&mut self) {
        println!("stale");
    }
    fn batch(&mut self, batch: Batch) {
        let blocks = |event: &Event| match event {
            Event::Stored(stored) => stored.blocks.iter().map(|hash| hash.0.to_string()).collect::<Vec<_>>().join(","),
            Event::Removed(removed) => format!("-{}", removed.blocks.len()),
            Event::Cleared => "cleared".into(),
        };
        println!("batch {}", batch.events.iter().map(blocks).collect::<Vec<_>>().join(" "));
        std::thread::sleep(self.delay);
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [live, replay, topic, rest @ ..] = &arguments[..] else {
        return Err("usage: follow_kv_events LIVE REPLAY|- TOPIC [DELAY_MS]".into());
    };
    let replay = if replay == "-" { None } else { Some(replay.parse()?) };
    let source = Source { live: live.parse()?, replay, topic: topic.clone() };
    let delay = Duration::from_millis(rest.first().map_or(Ok(0), |delay| delay.parse())?);
    match run(source, Print { delay }).await {}
}
