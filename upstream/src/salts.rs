//! Which cache domain a salt stands for.
//!
//! Engines know a domain by its [`Domain::engine_salt`], and name this salt in their KV events. A salt does not tell
//! its domain, so the salts that this process has sent are remembered. Not here: salts of other gateways, whose blocks
//! are unknown to this one until it sends a request of the same domain.

use kvbm::Domain;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The salts that were sent last.
pub struct Salts {
    recent: Mutex<Recent>,
    max: usize,
}

#[derive(Default)]
struct Recent {
    /// The domain of a salt, and the number of the request that had it last.
    domains: HashMap<Arc<str>, (Domain, u64)>,
    /// The salts by these numbers.
    order: BTreeMap<u64, Arc<str>>,
    requests: u64,
}

/// Maximum number of salts; beyond it the least recently sent one is forgotten. Each takes about 250 bytes, so all take
/// 16 MiB. A tenant has one, and one for each of its own salts.
const MAX_SALTS: usize = 1 << 16;

impl Default for Salts {
    fn default() -> Self {
        Self::at_most(MAX_SALTS)
    }
}

impl Salts {
    fn at_most(max: usize) -> Self {
        Self { recent: Mutex::default(), max }
    }

    /// The salt for a request of `domain`, which is remembered. `None` for the shared domain, which has no salt.
    pub fn of(&self, domain: &Domain) -> Option<String> {
        let salt = domain.engine_salt()?;
        let recent = &mut *self.recent.lock();
        recent.requests += 1;
        let name = match recent.domains.get_mut(salt.as_str()) {
            Some((_, last)) => recent.order.remove(&std::mem::replace(last, recent.requests)),
            None => None,
        };
        let name = name.unwrap_or_else(|| {
            let name: Arc<str> = salt.as_str().into();
            recent.domains.insert(Arc::clone(&name), (domain.clone(), recent.requests));
            name
        });
        recent.order.insert(recent.requests, name);
        if recent.order.len() > self.max
            && let Some((_, oldest)) = recent.order.pop_first()
        {
            recent.domains.remove(&oldest);
        }
        Some(salt)
    }

    /// The domain that a salt was sent for.
    pub fn domain(&self, salt: &str) -> Option<Domain> {
        self.recent.lock().domains.get(salt).map(|(domain, _)| domain.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_sent_salt_is_forgotten() {
        let (salts, tenants) = (Salts::at_most(2), ["a", "b", "c"].map(|name| Domain::derived(b"s", name)));
        let [a, b, c] = &tenants;
        let sent = [a, b, a, c].map(|domain| salts.of(domain).expect("a salt"));
        assert_eq!(sent[0], sent[2]);
        assert_eq!(salts.domain(&sent[0]).as_ref(), Some(a));
        assert_eq!(salts.domain(&sent[1]), None);
        assert_eq!(salts.domain(&sent[3]).as_ref(), Some(c));
        assert_eq!((salts.of(&Domain::shared()), salts.domain("other")), (None, None));
    }
}
