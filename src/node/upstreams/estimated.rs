//! The log line about servers that publish no KV events: one for all that are found within a second, because a fleet of
//! hundreds starts at once. Which servers they are, `blockyard_router_index_source` and `blockyard doctor` say.

use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Servers that a line names: enough to find a table of the configuration that differs from the others.
const NAMED: usize = 3;

/// Servers that the log does not name yet, by what would have them followed.
#[derive(Default)]
pub(super) struct Estimated(Mutex<BTreeMap<&'static str, Servers>>);

/// Servers of one line.
#[derive(PartialEq, Eq, Default, Debug)]
struct Servers {
    count: usize,
    /// The first ones.
    named: Vec<String>,
}

impl Estimated {
    /// Adds a server. Returns whether it is the first one since the last line, so that the next one is due.
    pub(super) fn add(&self, server: String, remedy: &'static str) -> bool {
        let mut groups = self.0.lock();
        let is_first = groups.is_empty();
        let group = groups.entry(remedy).or_default();
        group.count += 1;
        if group.named.len() < NAMED {
            group.named.push(server);
        }
        is_first
    }

    /// Logs the servers that were added.
    pub(super) fn log(&self) {
        let groups = std::mem::take(&mut *self.0.lock());
        for (remedy, Servers { count, named }) in groups {
            tracing::info!(
                servers = count,
                first = ?named,
                "routing is approximate: the cache of each of these servers is estimated from the prompts sent to it, \
                 without its KV events; {remedy}"
            );
        }
    }

    /// The number of servers that were added, and how many of them the line names.
    #[cfg(test)]
    pub(super) fn counts(&self) -> Vec<(usize, usize)> {
        self.0.lock().values().map(|servers| (servers.count, servers.named.len())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_with_the_same_cause_are_one_line() {
        let estimated = Estimated::default();
        let added: Vec<bool> = (0..1000).map(|nth| estimated.add(format!("http://s{nth}/"), "start vLLM")).collect();
        assert_eq!(added.iter().filter(|is_first| **is_first).count(), 1);
        assert!(!estimated.add("http://other/".to_owned(), "start SGLang"));
        assert_eq!(estimated.counts(), [(1, 1), (1000, NAMED)]);
        estimated.log();
        assert_eq!(estimated.counts(), []);
        assert!(estimated.add("http://late/".to_owned(), "start vLLM"));
    }
}
