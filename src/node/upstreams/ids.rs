//! The ids of upstreams as workers, which are equal in all gateways of the same servers.

use std::net::IpAddr;
use worker::plane::WorkerId;

/// The id of a model of a server or a rank: the same after each start and in each gateway of the same server, so that
/// several frontends name it by one id in their reservations. 48 bits, which make two equal ids among a thousand
/// workers as likely as one in 500 million. The hash is FNV-1a.
pub(super) fn worker_id(url: &str, address: Option<IpAddr>, model: &str, rank: Option<u32>) -> WorkerId {
    let address = address.map(|address| address.to_string()).unwrap_or_default();
    let rank = rank.map(|rank| format!("\n{rank}")).unwrap_or_default();
    // No part contains a line break.
    let text = format!("{url}\n{address}\n{model}{rank}");
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    WorkerId((hash >> 48) ^ (hash & 0xffff_ffff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Upstream;

    #[test]
    fn an_id_is_of_the_url_however_it_is_written_the_address_the_model_and_the_rank() {
        let id = |url: &str, address: Option<&str>, model, rank| {
            let address = address.map(|address| address.parse().unwrap());
            worker_id(&Upstream::new(url.parse().unwrap()).canonical_url(), address, model, rank)
        };
        let one = id("http://vllm:8000", Some("10.0.0.1"), "org/m", None);
        // The id of a former version, so that it stays the same over an update.
        assert_eq!(one, WorkerId(0x5878_350c_9eb8));
        for same in ["http://vllm:8000/", "HTTP://VLLM:8000"] {
            assert_eq!(id(same, Some("10.0.0.1"), "org/m", None), one, "{same}");
        }
        assert_eq!(id("https://vllm/a/", None, "m", None), id("https://vllm:443/a", None, "m", None));
        let others = [
            id("http://vllm:8001", Some("10.0.0.1"), "org/m", None),
            id("https://vllm:8000", Some("10.0.0.1"), "org/m", None),
            id("http://vllm:8000/a", Some("10.0.0.1"), "org/m", None),
            id("http://vllm:8000", Some("10.0.0.2"), "org/m", None),
            id("http://vllm:8000", None, "org/m", None),
            id("http://vllm:8000", Some("10.0.0.1"), "org/n", None),
            id("http://vllm:8000", Some("10.0.0.1"), "org/m", Some(0)),
            id("http://vllm:8000", Some("10.0.0.1"), "org/m", Some(1)),
        ];
        for (at, other) in others.iter().enumerate() {
            assert!(*other != one && !others[..at].contains(other), "{at}");
            assert!(other.0 < 1 << 53, "JSON represents it exactly");
        }
    }
}
