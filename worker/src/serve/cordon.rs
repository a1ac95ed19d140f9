//! Takes a worker out of service and back while its process runs.
//!
//! ```text
//!   registered ──cordon──▶ deregistered: no router sends requests, running ones finish ──uncordon──▶ registered
//!        └───────────────────────────── close (the worker drains for good) ───────────────────────▶ deregistered
//! ```
//!
//! Also says whether the worker is registered: another process may have superseded it.
//!
//! Not here: the cordon of a router, which concerns the requests of that router only (`router::Router::cordon`).

use crate::plane::{Load, Role};
use tokio::sync::watch;

/// Takes a worker out of service and back. Clones are of the same worker, and do not keep it alive.
#[derive(Clone, Debug)]
pub struct Cordon {
    desired: watch::Sender<DesiredState>,
    state: watch::Receiver<State>,
    load: watch::Receiver<Load>,
}

/// The end of a [`Cordon`] at the task that registers the worker: what the task is to do, and what it has done.
pub(super) struct RegistrationControl {
    desired: watch::Receiver<DesiredState>,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DesiredState {
    Registered,
    Cordoned,
    /// Deregistered until the worker ends.
    Closed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State {
    role: Role,
    registration: RegistrationState,
}

/// Whether routers see the worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RegistrationState {
    Registered,
    Deregistered,
    /// Another process has registered the worker; attempts to register it again are repeated.
    Superseded,
}

impl Cordon {
    /// The cordon of a worker that is registered with this role.
    pub(super) fn new(role: Role, load: watch::Receiver<Load>) -> (Self, RegistrationControl) {
        let registered = State { role, registration: RegistrationState::Registered };
        let (desired, state) = (watch::Sender::new(DesiredState::Registered), watch::Sender::new(registered));
        let control = RegistrationControl { desired: desired.subscribe(), state: state.clone() };
        (Self { desired, state: state.subscribe(), load }, control)
    }

    /// Deregisters the worker. Its running requests finish, and other workers can still read its blocks.
    pub fn cordon(&self) {
        self.replace(DesiredState::Cordoned);
    }

    /// Registers the worker again.
    pub fn uncordon(&self) {
        self.replace(DesiredState::Registered);
    }

    /// Deregisters the worker for good.
    pub(super) fn close(&self) {
        self.desired.send_replace(DesiredState::Closed);
    }

    fn replace(&self, by: DesiredState) {
        self.desired.send_if_modified(|desired| {
            let changes = *desired != by && *desired != DesiredState::Closed;
            if changes {
                *desired = by;
            }
            changes
        });
    }

    /// Whether the worker is to get no requests.
    pub fn is_cordoned(&self) -> bool {
        *self.desired.borrow() != DesiredState::Registered
    }

    /// Whether routers see the worker.
    pub fn is_registered(&self) -> bool {
        self.state.borrow().registration == RegistrationState::Registered
    }

    /// Whether the worker is not registered because another process serves it. It is registered again when that process
    /// has deregistered it or its lease has expired.
    pub fn is_superseded(&self) -> bool {
        self.state.borrow().registration == RegistrationState::Superseded
    }

    /// The role with which the worker was registered last.
    pub fn role(&self) -> Role {
        self.state.borrow().role
    }

    /// The load of the worker as of the last step of its engine.
    pub fn load(&self) -> Load {
        self.load.borrow().clone()
    }

    /// Resolves when the worker is deregistered and has no request. A request that a router sent before it knew of the
    /// cordon may still arrive.
    pub async fn drained(&self) {
        // Each ends with an error when the worker has ended, which has no requests either.
        let _ = self.state.clone().wait_for(|state| state.registration != RegistrationState::Registered).await;
        let _ = self.load.clone().wait_for(Load::is_idle).await;
    }
}

impl Drop for RegistrationControl {
    /// The task has ended, and with it the registration.
    fn drop(&mut self) {
        self.set(RegistrationState::Deregistered);
    }
}

impl RegistrationControl {
    /// Waits for a change, and returns whether the worker is to be registered.
    pub(super) async fn changed(&mut self) -> bool {
        if self.desired.changed().await.is_err() {
            // Every cordon is dropped, and with it the worker: the task is about to be stopped.
            std::future::pending::<()>().await;
        }
        *self.desired.borrow_and_update() == DesiredState::Registered
    }

    /// Whether the worker is deregistered until it is uncordoned.
    pub(super) fn is_cordoned(&self) -> bool {
        *self.desired.borrow() == DesiredState::Cordoned
    }

    pub(super) fn set(&self, registration: RegistrationState) {
        self.state.send_modify(|state| state.registration = registration);
    }

    pub(super) fn set_role(&self, role: Role) {
        self.state.send_modify(|state| state.role = role);
    }
}
