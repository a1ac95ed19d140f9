//! The servers behind a name: one for each of its addresses.
//!
//! A name with several addresses, such as that of a headless service of Kubernetes, stands for as many servers. A name
//! with at most one address of each family (IPv4, IPv6) stands for one server, which has both addresses. Where there
//! are more, only the family with more addresses counts, because a server may have one of each.
//!
//! Not here: when a name is resolved again, and what happens to the servers.

use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

/// Resolves a host name to its addresses.
pub type Lookup = Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<IpAddr>>> + Send + Sync>;

/// Resolves names as all programs of this machine do.
pub fn system_lookup() -> Lookup {
    Arc::new(|host| {
        Box::pin(async move {
            // The port is not used.
            let addresses = tokio::net::lookup_host((host, 0)).await?;
            Ok(addresses.map(|address| address.ip()).collect())
        })
    })
}

/// The servers of one name, as its answers make them.
#[derive(Default, Debug)]
pub struct NamedServers {
    /// By their first address: the number of answers in a row that lacked it.
    missing: BTreeMap<IpAddr, u32>,
}

/// What an answer changes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ServerChanges {
    /// New servers, each with its addresses. The first address identifies the server.
    pub added: Vec<Vec<IpAddr>>,
    /// The first addresses of servers that are gone.
    pub removed: Vec<IpAddr>,
}

/// Answers in a row that must lack an address until its server counts as gone. Some resolvers return a part of many
/// addresses, each time another one.
const MISSING_MAX: u32 = 3;
/// Maximum number of servers of one name. A fleet of more has more than one gateway and more than one name.
const MAX_SERVERS: usize = 1024;

impl NamedServers {
    /// Applies an answer. An empty one changes nothing, as if there were no answer.
    pub fn update(&mut self, answer: &[IpAddr]) -> ServerChanges {
        let mut changes = ServerChanges::default();
        let servers = servers_of(answer);
        if servers.is_empty() {
            return changes;
        }
        self.missing.values_mut().for_each(|missing| *missing += 1);
        for server in servers {
            if self.missing.insert(server[0], 0).is_none() {
                changes.added.push(server);
            }
        }
        self.missing.retain(|first, missing| {
            if *missing >= MISSING_MAX {
                changes.removed.push(*first);
            }
            *missing < MISSING_MAX
        });
        changes
    }

    /// Number of servers.
    pub fn len(&self) -> usize {
        self.missing.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
    }
}

/// The addresses of each server.
fn servers_of(answer: &[IpAddr]) -> Vec<Vec<IpAddr>> {
    let mut sorted = answer.to_vec();
    // IPv4 first.
    sorted.sort_unstable();
    sorted.dedup();
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = sorted.into_iter().partition(IpAddr::is_ipv4);
    if v4.len() <= 1 && v6.len() <= 1 {
        let server: Vec<IpAddr> = v4.into_iter().chain(v6).collect();
        return if server.is_empty() { Vec::new() } else { vec![server] };
    }
    let more = if v4.len() >= v6.len() { v4 } else { v6 };
    more.into_iter().take(MAX_SERVERS).map(|address| vec![address]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn update(servers: &mut NamedServers, answer: &[&str]) -> (usize, Vec<IpAddr>) {
        let changes = servers.update(&addresses(answer));
        (changes.added.len(), changes.removed)
    }

    #[test]
    fn each_address_of_the_larger_family_is_a_server() {
        let of = |texts: &[&str]| servers_of(&addresses(texts));
        assert_eq!(of(&["10.0.0.2", "10.0.0.1", "10.0.0.2"]), [addresses(&["10.0.0.1"]), addresses(&["10.0.0.2"])]);
        assert_eq!(of(&["fd00::1", "10.0.0.1", "fd00::2"]), [addresses(&["fd00::1"]), addresses(&["fd00::2"])]);
        assert_eq!(of(&["::1", "127.0.0.1"]), [addresses(&["127.0.0.1", "::1"])], "one server of both families");
        let many: Vec<IpAddr> = (0..2000).map(|n: u32| IpAddr::V4(n.into())).collect();
        assert_eq!(servers_of(&many).len(), MAX_SERVERS);
    }

    #[test]
    fn a_server_is_gone_after_three_answers_without_it() {
        let mut servers = NamedServers::default();
        assert_eq!(update(&mut servers, &["10.0.0.1"]), (1, vec![]));
        assert_eq!(update(&mut servers, &["10.0.0.1", "10.0.0.2"]), (1, vec![]), "the first stays what it was");
        for _ in 0..2 {
            assert_eq!(update(&mut servers, &["10.0.0.2"]), (0, vec![]));
        }
        assert_eq!(update(&mut servers, &["10.0.0.1"]), (0, vec![]), "back in time");
        for _ in 0..5 {
            assert_eq!(update(&mut servers, &[]), (0, vec![]), "no answer");
        }
        assert_eq!(servers.len(), 2);
        assert_eq!(update(&mut servers, &["10.0.0.3", "10.0.0.1"]), (1, vec![]));
        assert_eq!(update(&mut servers, &["10.0.0.3", "10.0.0.1"]), (0, addresses(&["10.0.0.2"])));
        assert_eq!(update(&mut servers, &["10.0.0.2", "10.0.0.1"]), (1, vec![]), "back as a new one");
    }
}
