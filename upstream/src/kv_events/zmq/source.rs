//! Where the events of an engine come from.

use std::fmt;
use std::str::FromStr;

/// The address of a socket, as engines write it: `tcp://host:port`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Endpoint(String);

/// An address that cannot be connected to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("endpoint {0:?}: expected tcp://host:port")]
pub struct EndpointError(String);

impl Endpoint {
    /// Host and port.
    pub(super) fn address(&self) -> &str {
        &self.0
    }
}

impl Endpoint {
    /// Reads the address of a socket on `host` (with brackets if it is an IPv6 address). A publisher that binds to all
    /// addresses names no host: `tcp://*:5557`.
    pub fn on_host(text: &str, host: &str) -> Result<Self, EndpointError> {
        let port = ["*", "0.0.0.0", "[::]"]
            .iter()
            .find_map(|all| text.strip_prefix("tcp://")?.strip_prefix(all)?.strip_prefix(':'));
        match port {
            Some(port) => format!("tcp://{host}:{port}").parse(),
            None => text.parse(),
        }
    }
}

impl Endpoint {
    /// The same socket at `address`, if it is on `host`.
    #[must_use]
    pub fn moved(&self, host: &str, address: &str) -> Self {
        match self.0.rsplit_once(':') {
            Some((of, port)) if of == host => Self(format!("{address}:{port}")),
            _ => self.clone(),
        }
    }
}

impl Endpoint {
    /// The socket of a data-parallel rank of the engine whose first rank has this one: vLLM and SGLang add the rank to
    /// the port (`offset_endpoint_port` of both). `None`: there is no such port.
    pub fn of_rank(&self, rank: u32) -> Option<Self> {
        let (host, port) = self.0.rsplit_once(':')?;
        let port = u16::try_from(port.parse::<u32>().ok()?.checked_add(rank)?).ok()?;
        Some(Self(format!("{host}:{port}")))
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let error = || EndpointError(text.into());
        let address = text.strip_prefix("tcp://").ok_or_else(error)?;
        match address.rsplit_once(':') {
            // `*` is the address of a publisher that binds, and names no host.
            Some((host, port)) if !host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port > 0) => {
                Ok(Self(address.into()))
            }
            _ => Err(error()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}", self.0)
    }
}

/// The publisher of one engine, or of one data-parallel rank of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// The publisher's PUB socket.
    pub live: Endpoint,
    /// The publisher's replay socket; without it a lost batch makes the view stale.
    pub replay: Option<Endpoint>,
    /// Prefix of the topics to receive; empty for all.
    pub topic: String,
}

impl Source {
    /// The publisher of a data-parallel rank of the engine whose first rank has this one. `None`: there is no such
    /// port.
    pub fn of_rank(&self, rank: u32) -> Option<Self> {
        let replay = match &self.replay {
            Some(replay) => Some(replay.of_rank(rank)?),
            None => None,
        };
        Some(Self { live: self.live.of_rank(rank)?, replay, topic: self.topic.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_at_the_port_of_the_first_one_plus_itself() {
        let first = Source { live: "tcp://[fd00::1]:5557".parse().unwrap(), replay: None, topic: "kv".into() };
        assert_eq!(first.of_rank(0), Some(first.clone()));
        assert_eq!(first.of_rank(3).unwrap().live.to_string(), "tcp://[fd00::1]:5560");
        let with_replay = Source { replay: Some("tcp://a:65535".parse().unwrap()), ..first };
        assert_eq!(with_replay.of_rank(1), None, "the last port");
        assert_eq!(with_replay.live.of_rank(u32::MAX), None);
    }
}
