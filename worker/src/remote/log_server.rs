//! The logs that this process offers, for readers in other processes: a snapshot or a range is one response.
//!
//! A response is written by a task of its own, a frame at a time, so the reader sets the pace. The task ends when the
//! reader has gone, or has not read everything in time: the response then lacks its last message. The blocks of a
//! snapshot are freed as they are sent.
//!
//! Not here: which requests are admitted (the request server).

use super::logs::{self, LogRequest, Message, Part};
use crate::plane::{Event, Events, Lease, Offers, PlaneError, RANGE_MAX, RangeAnswer, Source, Topic};
use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvbm::{Epoch, EventLog, Snapshot};
use std::iter::once;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

/// The logs that are offered, and the responses that are written.
pub(super) struct LogServer {
    offers: Arc<Offers>,
    permits: Arc<Semaphore>,
}

/// Why a log is not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotRead {
    /// This process does not offer it.
    Absent,
    /// Too many responses are written.
    Busy,
}

/// Offers logs at another plane, and serves them while their leases live.
pub(super) struct ServedEvents {
    offers: Arc<Offers>,
    inner: Arc<dyn Events>,
}

/// Responses written at a time. Each may have a snapshot of hundreds of megabytes in memory.
const MAX_RESPONSES: usize = 8;

/// Time that a request waits for others to end. A hundred frontends that start at the same time read their snapshots
/// one after the other; the reader gives up later, and asks again.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Time of a response, twice as long as a router waits for a log. A reader that does not read takes the place of others
/// until then.
const MAX_TIME: Duration = Duration::from_secs(20);

/// Bytes of a frame; the last message of one may exceed it. As many as the window of a stream has.
const FRAME_BYTES: usize = 64 << 10;

impl LogServer {
    pub(super) fn new() -> Self {
        Self { offers: Arc::default(), permits: Arc::new(Semaphore::new(MAX_RESPONSES)) }
    }

    /// A plane that offers logs at `inner`, and lets other processes read them here.
    pub(super) fn events(&self, inner: Arc<dyn Events>) -> ServedEvents {
        ServedEvents { offers: Arc::clone(&self.offers), inner }
    }

    /// The frames of a response.
    pub(super) async fn read(&self, request: LogRequest) -> Result<mpsc::Receiver<Bytes>, NotRead> {
        let LogRequest { source, epoch, part } = request;
        let log = self.offers.of_epoch(source, epoch).ok().flatten().ok_or(NotRead::Absent)?;
        let permit = timeout(MAX_WAIT, Arc::clone(&self.permits).acquire_owned()).await;
        let permit = permit.map_err(|_| NotRead::Busy)?.expect("the semaphore is never closed");
        // One is ready while another is sent.
        let (sender, frames) = mpsc::channel(1);
        tokio::spawn(timeout(MAX_TIME, write(log, part, sender, permit)));
        Ok(frames)
    }
}

/// Writes a response, and releases the permit at its end.
async fn write(log: Arc<EventLog>, part: Part, frames: mpsc::Sender<Bytes>, _permit: OwnedSemaphorePermit) {
    match part {
        Part::Snapshot => {
            let Snapshot { epoch, number, runs } = log.snapshot_in_background().await;
            let runs = runs.into_iter().flat_map(logs::split).map(Message::Run);
            send(&frames, once(Message::Snapshot { epoch, number }).chain(runs)).await;
        }
        Part::Events { after } => match log.after(after, RANGE_MAX) {
            Ok(events) => send(&frames, events.into_iter().map(Message::Event)).await,
            Err(_) => send(&frames, once(Message::Truncated)).await,
        },
    }
}

/// Sends messages and the last one, or as many as the reader takes.
async fn send(frames: &mpsc::Sender<Bytes>, messages: impl Iterator<Item = Message>) {
    let mut frame = BytesMut::new();
    for message in messages.chain(once(Message::End)) {
        logs::encode(&message, &mut frame);
        if (frame.len() >= FRAME_BYTES || message == Message::End) && frames.send(frame.split().freeze()).await.is_err()
        {
            return;
        }
    }
}

impl Events for ServedEvents {
    fn publish(&self, event: Event) {
        self.inner.publish(event);
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        self.inner.subscribe(topic)
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        // Before it is offered there: a reader may come as soon as it is.
        let key = self.offers.add(source, Arc::clone(&log));
        let (lease, offers) = (self.inner.offer(source, log), Arc::clone(&self.offers));
        Lease::new(move || {
            drop(lease);
            offers.withdraw(source, key);
        })
    }

    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer> {
        self.inner.range(source, epoch, after)
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        self.inner.snapshot(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::WorkerId;
    use crate::plane::local::LocalEvents;
    use kvbm::{BlockEvent, Level, SequenceHash};

    const SOURCE: Source = Source::Worker(WorkerId(7));
    const SNAPSHOT: LogRequest = LogRequest { source: SOURCE, epoch: Epoch(1), part: Part::Snapshot };

    /// A server that offers a log whose snapshot has several frames. It is made on the thread of the test: few blocks,
    /// at many levels.
    fn server() -> (LogServer, Lease) {
        let (server, log) = (LogServer::new(), EventLog::new(Epoch(1)));
        for level in [Level::G1, Level::G2, Level::G3, Level::G4] {
            let blocks = (0..4000_u128).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
            log.announce(BlockEvent::Stored { level, parent: None, blocks });
        }
        let lease = server.events(Arc::new(LocalEvents::default())).offer(SOURCE, Arc::new(log));
        (server, lease)
    }

    /// All messages of a response.
    async fn messages(mut frames: mpsc::Receiver<Bytes>) -> Vec<Message> {
        let (mut arrived, mut messages) = (BytesMut::new(), Vec::new());
        while let Some(frame) = frames.recv().await {
            assert!(frame.len() < 2 * FRAME_BYTES);
            arrived.extend_from_slice(&frame);
            while let Some(message) = logs::decode(&mut arrived).unwrap() {
                messages.push(message);
            }
        }
        messages
    }

    #[tokio::test]
    async fn a_response_ends_with_the_last_message() {
        let (server, lease) = server();
        let snapshot = messages(server.read(SNAPSHOT).await.unwrap()).await;
        assert_eq!(snapshot.first(), Some(&Message::Snapshot { epoch: Epoch(1), number: 16 }));
        assert_eq!(snapshot.last(), Some(&Message::End));
        let blocks = |message: &Message| if let Message::Run(run) = message { run.blocks.len() } else { 0 };
        assert_eq!(snapshot.iter().map(blocks).sum::<usize>(), 16_000);
        let range = LogRequest { part: Part::Events { after: 14 }, ..SNAPSHOT };
        let range = messages(server.read(range).await.unwrap()).await;
        let numbers = |message: &Message| if let Message::Event(event) = message { Some(event.number) } else { None };
        assert_eq!(range.iter().map(numbers).collect::<Vec<_>>(), [Some(15), Some(16), None]);
        let absent = [
            LogRequest { epoch: Epoch(2), ..SNAPSHOT },
            LogRequest { source: Source::Worker(WorkerId(8)), ..SNAPSHOT },
        ];
        for request in absent {
            assert_eq!(server.read(request).await.err(), Some(NotRead::Absent));
        }
        drop(lease);
        assert_eq!(server.read(SNAPSHOT).await.err(), Some(NotRead::Absent), "it is not offered any more");
    }

    #[tokio::test(start_paused = true)]
    async fn further_readers_wait_and_are_then_refused() {
        let (server, _lease) = server();
        let mut reading = Vec::new();
        for _ in 0..MAX_RESPONSES {
            reading.push(server.read(SNAPSHOT).await.unwrap());
        }
        assert_eq!(server.read(SNAPSHOT).await.err(), Some(NotRead::Busy));
        // A reader that goes away makes room, and so does one that has read everything.
        reading.pop();
        reading.push(server.read(SNAPSHOT).await.unwrap());
        assert_eq!(messages(reading.pop().unwrap()).await.last(), Some(&Message::End));
        assert!(server.read(SNAPSHOT).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn readers_that_do_not_read_lose_their_place_after_a_time() {
        let (server, _lease) = server();
        let mut reading = Vec::new();
        for _ in 0..MAX_RESPONSES {
            reading.push(server.read(SNAPSHOT).await.unwrap());
        }
        tokio::time::sleep(MAX_TIME).await;
        let frames = server.read(SNAPSHOT).await.unwrap();
        assert_eq!(messages(frames).await.last(), Some(&Message::End));
        for frames in reading {
            assert_ne!(messages(frames).await.last(), Some(&Message::End), "the reader notices");
        }
    }
}
