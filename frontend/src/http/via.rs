//! Loops: requests that come back to the gateway that has relayed them.
//!
//! A gateway that is an upstream of itself, or of one of its upstreams, would relay a request around until the client
//! leaves, and each retry would start further rounds. RFC 9110 (section 7.6.3) has the header `Via` for this: each
//! gateway adds its name to a request, and refuses one that has the name already.
//!
//! Not here: a limit on chains of gateways, which end.

use super::request_id;
use crate::error::Error;
use axum::http::header::VIA;
use axum::http::{HeaderMap, HeaderValue};

/// The entry of this gateway in `Via`.
#[derive(Debug)]
pub(crate) struct Via {
    /// Drawn when the process starts, because several gateways may have one address.
    name: String,
    /// The name with the protocol version that the header needs.
    entry: HeaderValue,
}

impl Default for Via {
    fn default() -> Self {
        let name = format!("blockyard-{}", request_id::generate());
        let entry = HeaderValue::try_from(format!("1.1 {name}")).expect("letters, digits, a hyphen and a space");
        Self { name, entry }
    }
}

impl Via {
    /// Adds the entry to a request that is to be relayed. [`Error::Loop`] if it was relayed here before.
    pub(crate) fn add(&self, headers: &mut HeaderMap) -> Result<(), Error> {
        let name = self.name.as_bytes();
        let has_name = |value: &HeaderValue| value.as_bytes().windows(name.len()).any(|part| part == name);
        if headers.get_all(VIA).iter().any(has_name) {
            return Err(Error::Loop);
        }
        headers.append(VIA, self.entry.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_passes_each_gateway_once() {
        let (one, other) = (Via::default(), Via::default());
        let mut headers = HeaderMap::new();
        headers.insert(VIA, HeaderValue::from_static("1.1 proxy.example.com"));
        one.add(&mut headers).unwrap();
        other.add(&mut headers).unwrap();
        assert_eq!(headers.get_all(VIA).iter().count(), 3, "a chain passes");
        assert_eq!(one.add(&mut headers), Err(Error::Loop));
        let joined = headers.get_all(VIA).iter().map(|value| value.to_str().unwrap()).collect::<Vec<_>>().join(", ");
        headers.insert(VIA, HeaderValue::try_from(joined).unwrap());
        assert_eq!(other.add(&mut headers), Err(Error::Loop), "a proxy may join the entries");
    }
}
