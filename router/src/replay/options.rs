//! What is simulated: the fleet, and how its workers are chosen.

use super::baselines::Peer;
use super::profile::Profile;
use super::results::Slo;
use crate::policy::Policy;
use crate::state::Settings;
use std::num::NonZero;
use std::time::Duration;
use worker::plane::Role;

/// How the worker of a request is chosen.
#[derive(Clone, PartialEq, Debug)]
pub enum PolicyUnderTest {
    /// A policy of this router, for every model. All other settings are [`Options::settings`].
    Policy(Policy),
    /// This router with its own settings, and their name in output.
    Settings(String, Box<Settings>),
    /// A policy of another router.
    Peer(Peer),
}

/// The simulated fleet, and the delivery of events and reports to the router.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Speed and memory of each worker.
    pub profile: Profile,
    /// Role of each worker.
    pub workers: Vec<Role>,
    /// Number of routers that share the requests. Routers exchange their reservations.
    pub replicas: usize,
    /// Delay of block events, load reports and messages between routers.
    pub event_delay: Duration,
    /// Share of block events that are lost, from 0 to 1.
    pub event_loss: f64,
    /// Share of the requests, from 0 to 1, after which no event is lost.
    pub event_loss_until: f64,
    /// Delay of a snapshot that a router requests after it has missed events.
    pub resync_delay: Duration,
    /// Limits that a request must meet to count as goodput.
    pub slo: Slo,
    /// Whether requests pass the admission queue.
    pub admission: AdmissionMode,
    /// Order of the queue of each worker.
    pub queue_order: QueueOrder,
    /// Whether the planner changes workers between prefill and decode.
    pub rebalance: bool,
    /// Settings of the router, already validated.
    pub settings: Settings,
}

/// Order in which a worker takes requests from its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum QueueOrder {
    /// First come, first served.
    #[default]
    Fcfs,
    /// k-LPM (arXiv 2502.04677): of each `k` requests the first is the oldest, and the others are those with the
    /// longest cached prefix. 1 is `Fcfs`.
    KLpm(NonZero<u32>),
}

/// Whether requests pass the router's admission queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AdmissionMode {
    /// Every request is sent to its worker at once, whatever the load.
    #[default]
    Off,
    /// A request is queued while its worker is overloaded.
    Queue,
    /// As `Queue`; also rejects a request whose first token would come later than the SLO's time to first token.
    Deadline,
}

impl AdmissionMode {
    /// Name in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Queue => "queue",
            Self::Deadline => "deadline",
        }
    }
}

impl PolicyUnderTest {
    /// All policies of this router, then those of other routers.
    pub fn all() -> Vec<Self> {
        Policy::ALL.into_iter().map(Self::Policy).chain(Peer::ALL.map(Self::Peer)).collect()
    }

    /// Name in output.
    pub fn name(&self) -> &str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Settings(name, _) => name,
            Self::Peer(peer) => peer.name(),
        }
    }
}
