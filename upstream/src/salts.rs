//! Which cache domain a salt stands for, and which requests get one.
//!
//! Engines know a domain by its [`Domain::engine_salt`], and name this salt in their KV events. A salt does not tell
//! its domain, so the salts that this process has sent are remembered. Not here: salts of other gateways, whose blocks
//! are unknown to this one until it sends a request of the same domain.

use kvbm::Domain;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use worker::engine::{EndpointKind, HttpRequest, computes_tokens};

/// The endpoints of a server whose requests get a salt.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub enum SaltedEndpoints {
    /// No endpoint: the server has no field for a salt, or tenants may share its cache. A client's own `cache_salt`
    /// passes as it is.
    #[default]
    None,
    /// Every endpoint, if the body is a JSON object. Another body with a salt is not sent to an endpoint that may use a
    /// cache of prefixes.
    All,
    /// The endpoints with these paths, whose requests have the field. Others that may use a cache of prefixes get no
    /// request with a salt.
    Described(Arc<BTreeSet<Box<str>>>),
}

/// What a request with a salt needs before it is sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Salting {
    /// Nothing.
    Unsalted,
    /// The salt, if its body is a JSON object. Without one, nothing of it is in a cache.
    Salted,
    /// It must not be sent; the reason.
    Refused(String),
}

impl SaltedEndpoints {
    /// Whether `http` may be sent, if it has a salt.
    pub(crate) fn takes(&self, http: &HttpRequest) -> bool {
        let path = http.target.path();
        let has_field = match self {
            Self::None => return true,
            Self::All => true,
            Self::Described(paths) => paths.contains(path),
        };
        let has_no_cache = !computes_tokens(path) || EndpointKind::Pooling.paths().contains(&path);
        if http.upgrade.is_some() {
            // Prompts come over the connection.
            return false;
        }
        // Without a body there is no prompt.
        has_no_cache || http.body.trim_ascii().is_empty() || (is_object(http) && has_field)
    }

    /// What `http` needs, if it has a salt.
    pub(crate) fn salting(&self, http: &HttpRequest) -> Salting {
        if *self == Self::None {
            return Salting::Unsalted;
        }
        if self.takes(http) {
            return Salting::Salted;
        }
        let path = http.target.path();
        Salting::Refused(if let Some(protocol) = http.upgrade {
            format!(
                "what is sent over a connection of {protocol} gets no cache_salt, so tenants would share the server's \
                 cache; use an endpoint without it, or set cache_salt = \"off\" in [[upstreams]] if tenants may share \
                 the cache"
            )
        } else if is_object(http) {
            format!(
                "the server's /openapi.json has no field cache_salt for {path}, so tenants would share the server's \
                 cache; use another endpoint, or set cache_salt in [[upstreams]]: \"on\" if the server has the field \
                 all the same, \"off\" if tenants may share the cache"
            )
        } else {
            format!(
                "a body of {path} that is no JSON object, such as a form, gets no cache_salt, so tenants would share \
                 the server's cache; send a JSON object, or set cache_salt = \"off\" in [[upstreams]] if tenants may \
                 share the cache"
            )
        })
    }
}

fn is_object(http: &HttpRequest) -> bool {
    http.body.trim_ascii_start().first() == Some(&b'{')
}

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
    fn requests_with_a_salt_go_only_to_endpoints_that_take_it() {
        let http = |path: &'static str, body: &'static [u8]| HttpRequest {
            body: bytes::Bytes::from_static(body),
            ..HttpRequest::post(path)
        };
        let described = SaltedEndpoints::Described(Arc::new(BTreeSet::from([Box::from("/v1/chat/completions")])));
        let salted = |path: &'static str, body: &'static [u8]| match described.salting(&http(path, body)) {
            Salting::Salted => true,
            Salting::Refused(why) => {
                assert!(why.contains(path) && why.contains("[[upstreams]]"), "{why}");
                false
            }
            Salting::Unsalted => panic!("{path}"),
        };
        assert!(salted("/v1/chat/completions", b" {}"));
        assert!(!salted("/v1/chat/completions", b"\xef\xbb\xbf{}"), "no salt can be added to it");
        for path in ["/v1/messages", "/v1/Chat/Completions", "/v1/chat/completions/", "/invocations", "/v1/new"] {
            assert!(!salted(path, b"{}"), "{path}");
        }
        assert!(!salted("/v1/audio/transcriptions", b"--boundary"), "a form");
        for path in ["/v1/embeddings", "/score", "/tokenize", "/v1/messages/count_tokens"] {
            assert!(salted(path, b"{}"), "{path} uses no cache");
        }
        assert!(salted("/v1/responses/id/cancel", b""), "no prompt");
        assert_eq!(SaltedEndpoints::None.salting(&http("/v1/messages", b"{}")), Salting::Unsalted);
        let all = |path: &'static str, body: &'static [u8]| SaltedEndpoints::All.salting(&http(path, body));
        assert_eq!(all("/v1/messages", b"{}"), Salting::Salted);
        for body in [&b"--boundary"[..], b"\xef\xbb\xbf{}", b"RIFF"] {
            assert!(matches!(all("/v1/audio/transcriptions", body), Salting::Refused(_)), "it would get no salt");
        }
        assert_eq!(all("/v1/responses/id/cancel", b" \n"), Salting::Salted, "no prompt");
        let upgrade = HttpRequest { upgrade: Some("websocket"), ..http("/v1/realtime", &b""[..]) };
        assert!(matches!(SaltedEndpoints::All.salting(&upgrade), Salting::Refused(_)), "prompts follow");
        assert_eq!(SaltedEndpoints::None.salting(&upgrade), Salting::Unsalted);
    }

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
