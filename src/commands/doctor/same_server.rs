//! Whether two upstreams are the same server, by another name or address of it.
//!
//! The signal is a socket address that both have. Not here: a server with several addresses of its own, such as that of
//! the loopback interface and that of the network, which have nothing in common.

use super::Examined;
use super::findings::Findings;
use crate::config::Upstream;
use std::net::{IpAddr, SocketAddr};

/// Where a server is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Location {
    /// The position of its upstream in the configuration.
    at: usize,
    /// Whether its upstream stands for further servers.
    is_one_of_several: bool,
    /// As the checks of the server are titled.
    target: String,
    addresses: Vec<SocketAddr>,
    /// The path of its URL: a proxy may have several servers at one address.
    path: String,
}

impl Location {
    /// That of a server with these addresses, which may be one of several of the upstream at this position.
    pub(super) fn of(
        upstream: &Upstream,
        at: usize,
        is_one_of_several: bool,
        target: String,
        addresses: &[IpAddr],
    ) -> Self {
        let addresses = addresses.iter().map(|address| SocketAddr::new(*address, upstream.port())).collect();
        let path = upstream.url.path().trim_end_matches('/').to_owned();
        Self { at, is_one_of_several, target, addresses, path }
    }

    /// An address that both have, if they are of different upstreams.
    fn common_address(&self, other: &Self) -> Option<SocketAddr> {
        let is_comparable = self.at != other.at && self.path == other.path;
        self.addresses.iter().find(|address| is_comparable && other.addresses.contains(address)).copied()
    }
}

/// Adds a warning to each server that is one before it. The models tell apart the servers of a proxy that looks at the
/// name of the host.
pub(super) fn check(servers: &mut [Examined]) {
    for nth in 1..servers.len() {
        let (before, rest) = servers.split_at_mut(nth);
        let Some(this) = rest.first_mut() else { return };
        let Some(location) = &this.location else { continue };
        let same =
            before.iter().filter(|other| this.models.is_some() && other.models == this.models).find_map(|other| {
                let other = other.location.as_ref()?;
                Some((other, location.common_address(other)?))
            });
        if let Some((other, address)) = same {
            let mut findings = Findings::of(location.target.clone());
            warn(location, other, address, &mut findings);
            this.checks.extend(findings.into_checks());
        }
    }
}

fn warn(this: &Location, other: &Location, address: SocketAddr, findings: &mut Findings) {
    let Location { at, target, .. } = other;
    let detail = format!(
        "the same server as {target} (upstreams.{at}): both are {address}, so it counts as two servers and gets the \
         requests of two"
    );
    let fix = match (this.is_one_of_several, other.is_one_of_several) {
        (false, _) => format!("remove upstreams.{}", this.at),
        (true, false) => format!("remove upstreams.{at}"),
        (true, true) => format!("let upstreams.{} and upstreams.{at} have no address in common", this.at),
    };
    findings.warning("same_server", detail, fix);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Check;

    /// A server of the upstream at this position, with this model.
    fn server(at: usize, several: bool, url: &str, addresses: &[&str], model: Option<&str>) -> Examined {
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let location = Location::of(&Upstream::new(url.parse().unwrap()), at, several, url.to_owned(), &addresses);
        let models = model.map(|model| vec![model.to_owned()]);
        Examined { checks: Vec::new(), models, location: Some(location) }
    }

    /// The fixes of the second one of two servers.
    fn fixes(first: Examined, second: Examined) -> Vec<String> {
        let mut servers = [first, second];
        check(&mut servers);
        assert!(servers[0].checks.is_empty());
        servers[1].checks.iter().filter_map(|Check { fix, .. }| fix.clone()).collect()
    }

    #[test]
    fn upstreams_with_a_common_address_and_the_same_models_are_one() {
        let of = |at, url, addresses: &[&str]| server(at, false, url, addresses, Some("m"));
        let local = || of(0, "http://localhost:8000/", &["127.0.0.1", "::1"]);
        assert_eq!(fixes(local(), of(1, "http://127.0.0.1:8000/", &["127.0.0.1"])), ["remove upstreams.1"]);
        assert_eq!(fixes(local(), of(1, "http://[::1]:8000/", &["::1"])), ["remove upstreams.1"]);
        let https = of(0, "https://a.example/", &["10.0.0.1"]);
        assert_eq!(fixes(https, of(1, "https://b.example:443/", &["10.0.0.1"])), ["remove upstreams.1"]);
        for other in [
            of(1, "http://127.0.0.1:8001/", &["127.0.0.1"]),
            of(1, "http://127.0.0.1:8000/other/", &["127.0.0.1"]),
            of(1, "http://10.0.0.1:8000/", &["10.0.0.1"]),
            server(1, false, "http://127.0.0.1:8000/", &["127.0.0.1"], Some("of a proxy by the name of the host")),
            server(1, false, "http://127.0.0.1:8000/", &["127.0.0.1"], None),
        ] {
            assert!(fixes(local(), other).is_empty());
        }
    }

    #[test]
    fn an_upstream_that_stands_for_further_servers_is_kept() {
        let of = |at, several| server(at, several, "http://name:8000/", &["10.0.0.1"], Some("m"));
        assert_eq!(fixes(of(0, false), of(1, true)), ["remove upstreams.0"]);
        assert_eq!(fixes(of(0, true), of(1, false)), ["remove upstreams.1"]);
        assert_eq!(fixes(of(0, true), of(1, true)), ["let upstreams.1 and upstreams.0 have no address in common"]);
        assert!(fixes(of(0, true), of(0, true)).is_empty(), "servers of one name");
    }
}
