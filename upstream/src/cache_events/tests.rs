use super::*;
use crate::kv_events::{EngineHash, Event, Removed, Stored};
use kvbm::Epoch;
use prometheus::Registry;

const MODEL: &str = "upstream org/m";
const ADAPTER: &str = "upstream sql";

/// A server with a model and an adapter, and blocks of two tokens.
struct Server {
    registry: Registry,
    cache: Arc<CacheEvents>,
    ranks: Vec<Rank>,
    /// Number of the events that were read, of the model and the adapter.
    read: [u64; 2],
}

impl Server {
    fn new(ranks: usize) -> Self {
        let model = |identity: &str, adapter: Option<&str>| ModelLog {
            identity: identity.into(),
            adapter: adapter.map(str::to_owned),
            log: Arc::new(EventLog::new(Epoch(1))),
        };
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let cache = Arc::new(CacheEvents::new("http://a".into(), Arc::default(), 2, ranks, Arc::default(), metrics));
        cache.set_model(model(MODEL, None));
        cache.set_model(model(ADAPTER, Some("sql")));
        let ranks = (0..ranks).map(|rank| Rank::new(Arc::clone(&cache), rank)).collect();
        Self { registry, cache, ranks, read: [0; 2] }
    }

    fn tell(&mut self, rank: usize, event: Event) {
        self.ranks[rank].batch(Batch { timestamp: 0.0, events: vec![event], rank: None, skipped: 0 });
    }

    /// New events of the model and of the adapter.
    fn news(&mut self) -> [Vec<BlockEvent>; 2] {
        [0, 1].map(|model| {
            let news = self.cache.models.read()[model].log.after(self.read[model], 100).unwrap();
            self.read[model] += news.len() as u64;
            news.into_iter().map(|numbered| numbered.event).collect()
        })
    }
}

/// The blocks of a prompt, as the router hashes them.
fn blocks(domain: &Domain, identity: &str, tokens: &[u32]) -> Vec<SequenceHash> {
    ChainKey::root(domain, identity, None).hashes(tokens, 2)
}

fn of_model(tokens: &[u32]) -> Vec<SequenceHash> {
    blocks(&Domain::shared(), MODEL, tokens)
}

/// A prompt whose blocks have the engine's hashes `first`, `first + 1` and so on.
fn prompt(first: u64, tokens: &[u32]) -> Stored {
    let blocks = (first..).map(EngineHash).take(tokens.len() / 2).collect();
    Stored { blocks, tokens: tokens.to_vec(), block_size: 2, ..Stored::default() }
}

fn stored(stored: Stored) -> Event {
    Event::Stored(Box::new(stored))
}

fn removed(medium: Medium, block: u64) -> Event {
    Event::Removed(Removed { blocks: vec![EngineHash(block)], medium, ..Removed::default() })
}

fn at(level: Level, parent: Option<SequenceHash>, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Stored { level, parent, blocks: blocks.to_vec() }
}

fn gone(level: Level, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Removed { level, blocks: blocks.to_vec() }
}

#[test]
fn blocks_have_the_hashes_that_the_router_computes() {
    let (mut server, own) = (Server::new(1), of_model(&[1, 2, 3, 4, 5, 6]));
    server.tell(0, stored(prompt(10, &[1, 2, 3, 4])));
    server.tell(0, stored(Stored { parent: Some(EngineHash(11)), ..prompt(12, &[5, 6]) }));
    server.tell(0, removed(Medium::G1, 12));
    let expected =
        vec![at(Level::G1, None, &own[..2]), at(Level::G1, Some(own[1]), &own[2..]), gone(Level::G1, &own[2..])];
    assert_eq!(server.news(), [expected, vec![]]);
}

#[test]
fn batches_that_cannot_be_decoded_are_a_problem_until_one_is() {
    let mut server = Server::new(2);
    for _ in 1..UNDECODABLE_BATCHES {
        server.ranks[1].undecodable(&WireError::Truncated);
    }
    assert_eq!(server.cache.problem(), None, "single ones are lost events");
    server.ranks[1].undecodable(&WireError::Truncated);
    let problem = server.cache.problem().unwrap();
    assert!(problem.starts_with("upstream http://a: its KV events cannot be decoded"), "{problem}");
    assert!(problem.ends_with(&WireError::Truncated.to_string()), "{problem}");
    server.tell(0, stored(prompt(10, &[1, 2])));
    assert!(server.cache.problem().is_some(), "the other rank");
    server.tell(1, stored(prompt(10, &[1, 2])));
    assert_eq!(server.cache.problem(), None);
    let metrics = prometheus::TextEncoder::new().encode_to_string(&server.registry.gather()).unwrap();
    assert!(metrics.contains("blockyard_upstream_kv_undecodable_batches_total 3\n"), "{metrics}");
}

#[test]
fn an_adapter_has_its_own_log() {
    let mut server = Server::new(1);
    let of = |adapter: &str, first| Stored { lora_name: Some(adapter.into()), ..prompt(first, &[1, 2]) };
    server.tell(0, stored(of("sql", 10)));
    server.tell(0, stored(of("loaded later", 20)));
    let own = blocks(&Domain::shared(), ADAPTER, &[1, 2]);
    assert_eq!(server.news(), [vec![], vec![at(Level::G1, None, &own)]]);
    assert_eq!(server.ranks[0].view.ignored().unknown_root, 1);
    let metrics = prometheus::TextEncoder::new().encode_to_string(&server.registry.gather()).unwrap();
    assert!(metrics.contains("blockyard_upstream_kv_blocks_ignored_total{reason=\"unknown_root\"} 1\n"), "{metrics}");
    server.tell(0, removed(Medium::G1, 10));
    assert_eq!(server.news(), [vec![], vec![gone(Level::G1, &own)]]);
}

#[test]
fn a_salt_that_was_sent_names_its_domain() {
    let mut server = Server::new(1);
    let tenant = Domain::derived(b"secret", "ann");
    let salted = |salt: &str, first| Stored { cache_salt: Some(salt.into()), ..prompt(first, &[1, 2]) };
    server.tell(0, stored(salted(&tenant.engine_salt().unwrap(), 10)));
    assert_eq!(server.news(), [vec![], vec![]], "not sent yet");
    assert_eq!(server.ranks[0].view.ignored().unknown_root, 1);
    let salt = server.cache.salts.of(&tenant).unwrap();
    server.tell(0, stored(salted(&salt, 10)));
    assert_eq!(server.news(), [vec![at(Level::G1, None, &blocks(&tenant, MODEL, &[1, 2]))], vec![]]);
}

#[test]
fn each_medium_has_its_level() {
    let (mut server, own) = (Server::new(1), of_model(&[1, 2]));
    let levels = [(Medium::G2, Level::G2), (Medium::G3, Level::G3), (Medium::Shared, Level::G4)];
    for (medium, level) in levels {
        server.tell(0, stored(Stored { medium, ..prompt(10, &[1, 2]) }));
        assert_eq!(server.news()[0], [at(level, None, &own)]);
    }
    server.tell(0, Event::Cleared);
    let cleared = levels.map(|(_, level)| BlockEvent::Cleared { level }).to_vec();
    assert_eq!(server.news(), [cleared.clone(), cleared], "of all models");
}

#[test]
fn a_block_is_cached_while_any_rank_has_it() {
    let (mut server, own) = (Server::new(2), of_model(&[1, 2, 3, 4]));
    server.tell(0, stored(prompt(10, &[1, 2, 3, 4])));
    server.tell(1, stored(prompt(10, &[1, 2])));
    server.news();
    server.tell(0, removed(Medium::G1, 10));
    assert_eq!(server.news()[0], []);
    server.tell(0, Event::Cleared);
    assert_eq!(server.news()[0], [gone(Level::G1, &own[1..])]);
    server.tell(1, Event::Cleared);
    assert_eq!(server.news()[0], [gone(Level::G1, &own[..1])]);
    assert!(server.cache.held.as_ref().unwrap().lock().is_empty());
}

#[test]
fn a_restart_and_lost_events_remove_all_blocks_of_a_rank() {
    let (mut server, own) = (Server::new(1), of_model(&[1, 2]));
    let lose: [fn(&mut Rank); 2] = [Sink::new_epoch, Sink::stale];
    for lose in lose {
        server.tell(0, stored(prompt(10, &[1, 2])));
        lose(&mut server.ranks[0]);
        assert_eq!(server.news()[0], [at(Level::G1, None, &own), BlockEvent::Cleared { level: Level::G1 }]);
        server.tell(0, removed(Medium::G1, 10));
        assert_eq!(server.news()[0], [], "it is not known any more");
    }
}
