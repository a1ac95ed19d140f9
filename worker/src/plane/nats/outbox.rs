//! What the process sends for its events, in order: a queue that never waits. When it is full, the oldest events are
//! lost, and never a subscription.

use super::metrics::{Lost, Metrics};
use crate::plane::{Event, Source, Topic};
use kvbm::Epoch;
use parking_lot::Mutex;
use std::collections::VecDeque;
use tokio::sync::{Notify, oneshot};

/// A command to the task that sends.
pub(super) enum Command {
    Publish(Event),
    /// Receive the events of a topic.
    Subscribe(Topic),
    /// Answer requests for a log of a source, or stop if it is not offered any more.
    Serve(Source, Epoch),
    /// Confirm that all commands before this one were sent.
    Confirm(oneshot::Sender<()>),
}

/// The queue of commands.
pub(super) struct Outbox {
    queue: Mutex<Queue>,
    added: Notify,
    metrics: Metrics,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    events: usize,
}

/// Maximum number of events kept while NATS cannot be reached or is slow: the capacity of an event log, beyond which a
/// snapshot is cheaper.
const CAPACITY: usize = 4096;

impl Outbox {
    pub(super) fn new(metrics: Metrics) -> Self {
        Self { queue: Mutex::default(), added: Notify::new(), metrics }
    }

    pub(super) fn push(&self, command: Command) {
        let mut queue = self.queue.lock();
        if matches!(command, Command::Publish(_)) {
            if queue.events == CAPACITY {
                let is_event = |command: &Command| matches!(command, Command::Publish(_));
                // The oldest event is the first command, or stands behind the few that are not events.
                let oldest = queue.commands.iter().position(is_event);
                oldest.and_then(|oldest| queue.commands.remove(oldest));
                self.metrics.lost(Lost::PublishQueue, 1);
            } else {
                queue.events += 1;
            }
        }
        queue.commands.push_back(command);
        drop(queue);
        self.added.notify_one();
    }

    /// The next command. For one task.
    pub(super) async fn next(&self) -> Command {
        loop {
            if let Some(command) = self.pop() {
                return command;
            }
            self.added.notified().await;
        }
    }

    fn pop(&self) -> Option<Command> {
        let mut queue = self.queue.lock();
        let command = queue.commands.pop_front()?;
        queue.events -= usize::from(matches!(command, Command::Publish(_)));
        Some(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::{EventBody, Load, WorkerId};
    use prometheus::Registry;

    fn event(number: u64) -> Command {
        let body = EventBody::Load(Load { number, ..Load::default() });
        Command::Publish(Event { source: Source::Worker(WorkerId(1)), epoch: Epoch(1), body })
    }

    #[test]
    fn a_full_queue_loses_its_oldest_events_only() {
        let registry = Registry::new();
        let outbox = Outbox::new(Metrics::new(&registry).unwrap());
        outbox.push(Command::Subscribe(Topic::Cache));
        (1..=CAPACITY as u64 + 3).for_each(|number| outbox.push(event(number)));
        assert!(matches!(outbox.pop(), Some(Command::Subscribe(Topic::Cache))));
        for expected in 4..=CAPACITY as u64 + 3 {
            let Some(Command::Publish(Event { body: EventBody::Load(load), .. })) = outbox.pop() else { panic!() };
            assert_eq!(load.number, expected);
        }
        assert!(outbox.pop().is_none());
        let lost = registry.gather().into_iter().find(|family| family.name() == "blockyard_nats_events_lost_total");
        assert_eq!(lost.unwrap().get_metric()[0].get_counter().get_value() as u64, 3);
    }
}
