//! Metrics of the planes on NATS.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// The metrics of one connection.
#[derive(Clone)]
pub struct Metrics {
    /// Whether the process is connected.
    pub(super) connected: IntGauge,
    pub(super) reconnects: IntCounter,
    events_lost: IntCounterVec,
    superseded: IntGauge,
    renewals: IntCounterVec,
    refused: IntCounterVec,
    log_reads: IntCounterVec,
}

/// Why an event was lost on this side.
#[derive(Clone, Copy)]
pub(super) enum Lost {
    /// The queue of events to publish was full.
    PublishQueue,
    /// A subscriber in this process was too slow.
    Subscriber,
    /// The process read its connection too slowly.
    ReceiveQueue,
    /// The event is larger than a message of the server.
    TooLarge,
}

/// Outcome of a renewal of a lease.
#[derive(Clone, Copy)]
pub(super) enum Renewal {
    /// The lease goes on.
    Renewed,
    /// The lease had expired, and the instance registered again.
    Registered,
    /// A later epoch has registered; the lease is over.
    Superseded,
    /// NATS did not answer; the renewal is repeated.
    Failed,
}

/// What was refused: because of another protocol number, because it cannot be decoded, or because its sender is not
/// authenticated.
#[derive(Clone, Copy)]
pub(super) enum Refused {
    /// The record of an instance.
    Instance,
    /// An event.
    Event,
    /// A request for a log, or its answer.
    Log,
    /// A request whose answer would not go to an inbox.
    Reply,
}

/// How a log of another process was read.
#[derive(Clone, Copy)]
pub(super) enum Transport {
    /// From the HTTP server of the process.
    Http,
    /// In messages of NATS.
    Nats,
}

impl Transport {
    const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Nats => "nats",
        }
    }
}

impl Metrics {
    /// Declares the metrics, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let vector = |name: &str, help: &str, label: &str| {
            let counter = IntCounterVec::new(Opts::new(format!("blockyard_nats_{name}"), help), &[label])?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let metrics = Self {
            connected: IntGauge::new("blockyard_nats_connected", "1 while connected to a NATS server, else 0.")?,
            reconnects: IntCounter::new("blockyard_nats_reconnects_total", "Connections after a loss of the first.")?,
            events_lost: vector("events_lost_total", "Events lost in this process, by the reason.", "reason")?,
            superseded: IntGauge::new(
                "blockyard_nats_superseded_workers",
                "Workers of this process that are not registered, because another process serves them.",
            )?,
            renewals: vector("lease_renewals_total", "Renewals of the leases of this process's workers.", "outcome")?,
            refused: vector("refused_total", "Messages that were not used because of what they contain.", "kind")?,
            log_reads: vector(
                "log_reads_total",
                "Snapshots and ranges of logs read from other processes, by transport.",
                "transport",
            )?,
        };
        // So that a process that has used one of them only shows it.
        for transport in [Transport::Http, Transport::Nats] {
            metrics.log_reads.with_label_values(&[transport.name()]);
        }
        registry.register(Box::new(metrics.connected.clone()))?;
        registry.register(Box::new(metrics.reconnects.clone()))?;
        registry.register(Box::new(metrics.superseded.clone()))?;
        Ok(metrics)
    }

    pub(super) fn lost(&self, reason: Lost, events: u64) {
        let reason = match reason {
            Lost::PublishQueue => "publish_queue",
            Lost::Subscriber => "subscriber",
            Lost::ReceiveQueue => "receive_queue",
            Lost::TooLarge => "too_large",
        };
        self.events_lost.with_label_values(&[reason]).inc_by(events);
    }

    pub(super) fn renewal(&self, outcome: Renewal) {
        let outcome = match outcome {
            Renewal::Renewed => "renewed",
            Renewal::Registered => "registered_again",
            Renewal::Superseded => "superseded",
            Renewal::Failed => "failed",
        };
        self.renewals.with_label_values(&[outcome]).inc();
    }

    pub(super) fn superseded(&self, workers: usize) {
        self.superseded.set(workers as i64);
    }

    pub(super) fn log_read(&self, transport: Transport) {
        self.log_reads.with_label_values(&[transport.name()]).inc();
    }

    pub(super) fn refused(&self, kind: Refused) {
        let kind = match kind {
            Refused::Instance => "instance",
            Refused::Event => "event",
            Refused::Log => "log",
            Refused::Reply => "reply",
        };
        self.refused.with_label_values(&[kind]).inc();
    }
}
