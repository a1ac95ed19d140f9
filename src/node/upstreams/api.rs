//! The API of a server, as its description and the configuration say.

use super::CheckedUpstream;
use crate::config::{CacheSalt, UpstreamRole};
use upstream::relay::client::Client;
use upstream::{ApiDescription, SaltedEndpoints};
use worker::engine::EndpointKind;

/// Why a server without salts gets no requests of tenants.
pub(super) const NO_SALTS: &str = "requests may have tenants (frontend.tenant_header or frontend.api_keys_file), but \
    the server's /openapi.json has no field cache_salt, so tenants would share its cache; set cache_salt in \
    [[upstreams]]: \"on\" if the server has the field all the same, \"off\" if tenants may share the cache";

/// The API of a server.
pub(super) struct Api {
    /// The endpoints whose requests get salts.
    pub(super) salted: SaltedEndpoints,
    /// The only kind of endpoints that it has.
    pub(super) only: Option<EndpointKind>,
    /// Its streams are continued by other servers, and it continues those of others.
    pub(super) continues_streams: bool,
}

impl Api {
    /// The API of a server, or why the server cannot be used.
    pub(super) async fn of(upstream: &CheckedUpstream, client: &Client) -> Result<Self, &'static str> {
        let CheckedUpstream { upstream, api_key, has_tenants, .. } = upstream;
        let is_asked =
            upstream.cache_salt == CacheSalt::Auto || upstream.role == UpstreamRole::Auto || upstream.continue_streams;
        let described = if is_asked { ApiDescription::ask(client, api_key.as_ref()).await } else { None };
        let salted = match upstream.cache_salt {
            CacheSalt::On => SaltedEndpoints::All,
            CacheSalt::Off => SaltedEndpoints::None,
            CacheSalt::Auto => match described.as_ref().ok_or("/openapi.json did not answer")?.salted.clone() {
                SaltedEndpoints::None if *has_tenants => return Err(NO_SALTS),
                salted => salted,
            },
        };
        let lacks_token_ids = described.as_ref().is_some_and(|described| described.lacks_token_ids);
        if upstream.continue_streams && lacks_token_ids {
            tracing::warn!(
                upstream = upstream.shown_url(),
                "streams of the server are not continued: its /openapi.json has no field return_token_ids; update \
                 vLLM, or remove continue_streams from [[upstreams]]"
            );
        }
        let continues_streams = upstream.continue_streams && !lacks_token_ids;
        let only = match upstream.role {
            UpstreamRole::Auto => described.and_then(|described| described.only),
            UpstreamRole::Both => None,
            UpstreamRole::Generate => Some(EndpointKind::Generate),
            UpstreamRole::Pooling => Some(EndpointKind::Pooling),
        };
        Ok(Self { salted, only, continues_streams })
    }
}
