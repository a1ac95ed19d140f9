//! The log lines about servers that were registered: one for all with equal facts that are found within a second,
//! because a fleet of hundreds starts at once. Which servers they are, `GET /admin/workers` and `blockyard doctor` say.
//!
//! Not here: what is wrong with a server. Each problem has a line of its own.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;

/// Servers that a line names: enough to find a table of the configuration that differs from the others.
const NAMED: usize = 3;

/// Models that a line names. A server may have hundreds of adapters.
const NAMED_MODELS: usize = 5;

/// What was found of a server. A line says what has a value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Facts {
    /// The program.
    pub(super) program: Option<&'static str>,
    /// Its version.
    pub(super) version: Option<String>,
    /// The ids of all of its models.
    pub(super) models: Vec<String>,
    /// The longest context of its models, in tokens.
    pub(super) context: Option<usize>,
    /// Tokens per block.
    pub(super) block_size: u32,
    /// How the router knows its cache.
    pub(super) cache: CacheSource,
}

/// How the router knows the cache of a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum CacheSource {
    /// From its KV events.
    Events {
        /// The number of its publishers, one for each data-parallel rank.
        publishers: usize,
    },
    /// It is estimated, because the server publishes no KV events.
    Estimate {
        /// What to change, if the log has not said it of this server yet.
        remedy: Option<&'static str>,
    },
}

/// Servers that the log does not name yet, by what was found of them.
#[derive(Default)]
pub(super) struct RegistrationLog(Mutex<BTreeMap<Facts, Servers>>);

/// Servers of one line.
#[derive(PartialEq, Eq, Default, Debug)]
struct Servers {
    count: usize,
    /// The first ones.
    named: Vec<String>,
}

impl RegistrationLog {
    /// Adds a server. Returns whether it is the first one since the last line, so that the next one is due.
    pub(super) fn add(&self, server: String, facts: Facts) -> bool {
        let mut groups = self.0.lock();
        let is_first = groups.is_empty();
        let group = groups.entry(facts).or_default();
        group.count += 1;
        if group.named.len() < NAMED {
            group.named.push(server);
        }
        is_first
    }

    /// Logs the servers that were added.
    pub(super) fn log(&self) {
        for (facts, Servers { count, named }) in std::mem::take(&mut *self.0.lock()) {
            let Facts { program, version, models, context, block_size, cache } = facts;
            let (version, models) = (version.as_deref(), NamedModels(&models));
            let publishers = match cache {
                CacheSource::Events { publishers } => Some(publishers),
                CacheSource::Estimate { .. } => None,
            };
            if let ([upstream], 1) = (&named[..], count) {
                tracing::info!(
                    upstream, program, version, %models, context, block_size, publishers,
                    "upstream registered; {cache}"
                );
            } else {
                tracing::info!(
                    upstreams = count, first = ?named, program, version, %models, context, block_size, publishers,
                    "upstreams registered; {cache}"
                );
            }
        }
    }

    /// For each line, the number of its servers, and how many of them it names.
    #[cfg(test)]
    pub(super) fn counts(&self) -> Vec<(usize, usize)> {
        self.0.lock().values().map(|servers| (servers.count, servers.named.len())).collect()
    }
}

impl fmt::Display for CacheSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Events { .. } => f.write_str("routing follows the KV events"),
            Self::Estimate { remedy } => {
                f.write_str(
                    "routing is approximate: without KV events a cache is estimated from the prompts of its server",
                )?;
                remedy.map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
            }
        }
    }
}

/// The models of a line.
struct NamedModels<'a>(&'a [String]);

impl fmt::Display for NamedModels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (named, others) = self.0.split_at(self.0.len().min(NAMED_MODELS));
        f.write_str(&named.join(", "))?;
        if others.is_empty() { Ok(()) } else { write!(f, " and {} more", others.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(remedy: &'static str) -> Facts {
        Facts {
            program: Some("vLLM"),
            version: Some("0.32.0".to_owned()),
            models: vec!["org/m".to_owned()],
            context: Some(4096),
            block_size: 16,
            cache: CacheSource::Estimate { remedy: Some(remedy) },
        }
    }

    #[test]
    fn servers_with_equal_facts_are_one_line() {
        let log = RegistrationLog::default();
        let added: Vec<bool> = (0..1000).map(|nth| log.add(format!("http://s{nth}/"), facts("start vLLM"))).collect();
        assert_eq!(added.iter().filter(|is_first| **is_first).count(), 1);
        assert!(!log.add("http://other/".to_owned(), facts("start SGLang")));
        assert_eq!(log.counts(), [(1, 1), (1000, NAMED)]);
        log.log();
        assert_eq!(log.counts(), []);
        assert!(log.add("http://late/".to_owned(), facts("start vLLM")));
    }

    #[test]
    fn a_line_names_some_models_and_what_to_change() {
        let models: Vec<String> = (0..7).map(|nth| format!("m{nth}")).collect();
        assert_eq!(NamedModels(&models).to_string(), "m0, m1, m2, m3, m4 and 2 more");
        assert_eq!(NamedModels(&models[..1]).to_string(), "m0");
        assert!(facts("start vLLM with x").cache.to_string().ends_with("its server; start vLLM with x"));
    }
}
