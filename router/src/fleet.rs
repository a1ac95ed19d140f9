//! Who is there, by model: a roster that readers take whole and the feed replaces.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use tokio_util::sync::CancellationToken;
use worker::engine::{Engine, ModelCard};
use worker::plane::{Instance, Phase, WorkerId};

/// A worker, for one epoch.
pub(crate) struct Member {
    /// What it says of itself.
    pub(crate) instance: Arc<Instance>,
    /// What it serves with.
    pub(crate) engine: Arc<dyn Engine>,
    /// When it was last chosen, in choices; 0 is never.
    pub(crate) chosen: AtomicU64,
    /// Cancelled when its lease has ended.
    pub(crate) gone: CancellationToken,
}

impl Member {
    pub(crate) fn new(instance: Arc<Instance>, engine: Arc<dyn Engine>) -> Self {
        Self { instance, engine, chosen: AtomicU64::new(0), gone: CancellationToken::new() }
    }

    pub(crate) fn id(&self) -> WorkerId {
        self.instance.id
    }

    /// Whether it is there to decode. Prefill workers can, and do when nobody else is left.
    pub(crate) fn decodes(&self) -> bool {
        self.instance.phase != Phase::Prefill
    }
}

/// All members at one time.
#[derive(Default)]
pub(crate) struct Roster {
    members: BTreeMap<WorkerId, Arc<Member>>,
    models: BTreeMap<String, Vec<Arc<Member>>>,
}

impl Roster {
    /// Who serves a model.
    pub(crate) fn serving(&self, model: &str) -> &[Arc<Member>] {
        self.models.get(model).map_or(&[], Vec::as_slice)
    }

    /// One card per model.
    pub(crate) fn cards(&self) -> Vec<Arc<ModelCard>> {
        self.models.values().filter_map(|members| Some(members.first()?.instance.model.clone())).collect()
    }

    /// Everybody.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.values()
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Arc<Member>> {
        self.members.get(&id)
    }

    fn of(members: BTreeMap<WorkerId, Arc<Member>>) -> Self {
        let mut models = BTreeMap::<String, Vec<Arc<Member>>>::new();
        for member in members.values() {
            models.entry(member.instance.model.id.clone()).or_default().push(member.clone());
        }
        Self { members, models }
    }
}

/// The roster, and the count of choices made over it.
#[derive(Default)]
pub(crate) struct Fleet {
    roster: RwLock<Arc<Roster>>,
    choices: AtomicU64,
}

impl Fleet {
    /// Everybody who is there now.
    pub(crate) fn roster(&self) -> Arc<Roster> {
        self.roster.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a member, or replaces the one of its name.
    pub(crate) fn join(&self, member: Arc<Member>) {
        self.change(|members| members.insert(member.id(), member));
    }

    /// Takes a member out, and tells those who wait for it.
    pub(crate) fn leave(&self, id: WorkerId) {
        self.change(|members| members.remove(&id));
    }

    /// Notes that a member was chosen.
    pub(crate) fn choose(&self, member: &Member) -> u64 {
        let now = self.choices.fetch_add(1, Ordering::Relaxed) + 1;
        member.chosen.store(now, Ordering::Relaxed);
        now
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<WorkerId, Arc<Member>>) -> Option<Arc<Member>>) {
        let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
        let mut members = roster.members.clone();
        if let Some(before) = change(&mut members) {
            before.gone.cancel();
        }
        *roster = Arc::new(Roster::of(members));
    }
}
