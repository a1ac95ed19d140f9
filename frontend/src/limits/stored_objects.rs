//! Objects that servers store: which server has each, and which output of stored responses was counted.
//!
//! **Only the server that has created an object has it**: a response, a conversation, a file, a batch. Requests that
//! name its id go there. Objects are remembered by tenant and id, so an id says nothing to another tenant.
//!
//! A client can retrieve a response of the Responses API by its id, and gets its usage each time. Its output counts
//! once: when it was created, or if it was computed in the background, when it is retrieved for the first time.
//!
//! An engine may give out an id twice, so every response that is created counts, also one with an id that was there
//! before. The engine's adapter keeps clients from choosing the id.

use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Maximum number of objects that are remembered, in about 10 MiB. A response is retrieved again within minutes. One
/// that was forgotten counts once more, and requests for it go to any server.
const OBJECTS_MAX: usize = 1 << 16;

/// Objects that servers store.
#[derive(Default)]
pub(crate) struct StoredObjects {
    /// Of tenant and id.
    hasher: RandomState,
    objects: Mutex<Objects>,
}

/// Where an object is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// The model of the request that has created it.
    pub(crate) model: Arc<str>,
    /// The server.
    pub(crate) server: u64,
}

#[derive(Default)]
struct Objects {
    by_id: HashMap<u64, Object>,
    oldest_first: VecDeque<u64>,
}

#[derive(Default)]
struct Object {
    /// Tokens of the output that were counted.
    tokens: u32,
    place: Option<Place>,
}

impl StoredObjects {
    /// Notes that a response was created, and these tokens of its output were counted.
    pub(crate) fn created(&self, tenant: &str, id: u64, tokens: u32) {
        self.objects.lock().object(self.key(tenant, id)).tokens = tokens;
    }

    /// Notes that a response with these tokens was retrieved. Returns those of them that were not counted before.
    pub(crate) fn retrieved(&self, tenant: &str, id: u64, tokens: u32) -> u32 {
        let mut objects = self.objects.lock();
        let object = objects.object(self.key(tenant, id));
        let counted = object.tokens;
        object.tokens = tokens.max(counted);
        tokens.saturating_sub(counted)
    }

    /// Notes where an object is.
    pub(crate) fn found(&self, tenant: &str, id: u64, place: Place) {
        self.objects.lock().object(self.key(tenant, id)).place = Some(place);
    }

    /// Where an object is; `None` if that is not known.
    pub(crate) fn place(&self, tenant: &str, id: u64) -> Option<Place> {
        self.objects.lock().by_id.get(&self.key(tenant, id))?.place.clone()
    }

    fn key(&self, tenant: &str, id: u64) -> u64 {
        self.hasher.hash_one((tenant, id))
    }
}

impl Objects {
    /// The object with this key, which is added if it is new.
    fn object(&mut self, key: u64) -> &mut Object {
        if !self.by_id.contains_key(&key) {
            self.oldest_first.push_back(key);
            if self.oldest_first.len() > OBJECTS_MAX
                && let Some(oldest) = self.oldest_first.pop_front()
            {
                self.by_id.remove(&oldest);
            }
        }
        self.by_id.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_response_counts_once_for_each_tenant() {
        let counted = StoredObjects::default();
        assert_eq!([400, 400].map(|tokens| counted.retrieved("ann", 1, tokens)), [400, 0]);
        assert_eq!(counted.retrieved("bob", 1, 400), 400);
        counted.created("ann", 2, 400);
        assert_eq!(counted.retrieved("ann", 2, 400), 0, "it counted when it was created");
        assert_eq!(counted.retrieved("ann", 3, 400), 400);
    }

    #[test]
    fn an_id_that_a_client_uses_again_counts_again() {
        let counted = StoredObjects::default();
        for _ in 0..2 {
            counted.created("ann", 1, 0);
            assert_eq!([400, 400].map(|tokens| counted.retrieved("ann", 1, tokens)), [400, 0]);
        }
        counted.created("ann", 1, 10);
        assert_eq!(counted.retrieved("ann", 1, 400), 390, "another response with this id has ended meanwhile");
    }

    #[test]
    fn the_place_of_an_object_is_known_to_its_tenant() {
        let objects = StoredObjects::default();
        let place = |server| Place { model: "m".into(), server };
        objects.found("ann", 1, place(7));
        objects.created("ann", 1, 400);
        assert_eq!(objects.place("ann", 1), Some(place(7)));
        assert_eq!((objects.place("bob", 1), objects.place("ann", 2)), (None, None));
        objects.found("ann", 1, place(8));
        assert_eq!(objects.place("ann", 1), Some(place(8)));
        assert_eq!(objects.retrieved("ann", 1, 400), 0, "what was counted stays");
    }

    #[test]
    fn the_oldest_objects_are_forgotten() {
        let objects = StoredObjects::default();
        (0..=OBJECTS_MAX as u64).for_each(|id| objects.created("", id, 9));
        assert_eq!(objects.objects.lock().by_id.len(), OBJECTS_MAX);
        assert_eq!([0, 1].map(|id| objects.retrieved("", OBJECTS_MAX as u64 * id, 9)), [9, 0]);
    }
}
