//! Settings of the HTTP API, as the configuration file names them, and the types of their values.

use crate::keys::{KEY_HEADERS, KeyHash};
use axum::http::HeaderName;
use axum::http::header::{AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION};
use axum::http::uri::Authority;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use std::path::PathBuf;
use units::{ByteSize, HumanDuration};

/// Settings of the HTTP API: the `[frontend]` section of the configuration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Maximum size of a request body. Default 16 MiB: four times a million tokens of text.
    pub max_body: ByteSize,
    /// Maximum size of all request bodies that are read or processed at the same time, without the first 64 KiB of
    /// each. Default 256 MiB: 16 of the largest. When it is short, bodies that arrive too slowly get 408 to make room;
    /// further requests get 429. A body takes up to four times its size while it is processed, but few are processed at
    /// the same time.
    pub max_inflight_bodies: ByteSize,
    /// Maximum number of choices (prompts times `n`) that run at the same time for one connection. Default 256: twice
    /// the largest request, and more than the 200 streams that a proxy multiplexes over a connection. Further requests
    /// get 429.
    pub max_choices_per_connection: usize,
    /// Maximum number of choices that run at the same time for one tenant. It does not limit requests without a tenant.
    /// Default 1024: the queue of one engine. Further requests get 429.
    pub max_choices_per_tenant: usize,
    /// The file of API keys, as `blockyard key` writes it. Default none: requests need no key. Changes of the file take
    /// effect within a second.
    pub api_keys_file: Option<PathBuf>,
    /// The hash of a key without limits. It is no key of the configuration and is never printed.
    #[serde(skip)]
    pub api_key: Option<KeyHash>,
    /// Whether `/metrics` needs a key too. Default false: scrapers often have none, and metrics have no text of
    /// requests. They have the names of tenants unless `tenant_metrics` is 0.
    pub metrics_need_key: bool,
    /// The file of the server's certificate and those that signed it, as PEM. Default none: the API speaks HTTP without
    /// TLS. Changes of the files take effect within a second, for new connections.
    pub tls_cert_file: Option<PathBuf>,
    /// The file of the certificate's key, as PEM, not encrypted.
    pub tls_key_file: Option<PathBuf>,
    /// The header in which a trusted proxy names the tenant of a request. Default none: all requests are of one tenant.
    /// A client that can set the header itself can claim any tenant, so set it only behind a proxy that replaces the
    /// header.
    pub tenant_header: Option<TenantHeader>,
    /// A file with the secret from which cache domains of tenants are derived, at least 16 bytes. Default none: tenants
    /// share no blocks either way, but a reader of the store can test whether a tenant has blocks of a known prompt.
    pub tenant_secret_file: Option<PathBuf>,
    /// Maximum number of tenants with metrics of their own; the others share the label `other`. 0: no metrics of
    /// tenants. Default 200: a thousand or two of series, and more than a dashboard shows.
    pub tenant_metrics: usize,
    /// Maximum number of open connections. Default 4096: more clients than one node serves, at about 20 KiB each. At
    /// most three eighths of the limit of open files beyond 80, since each request has a connection to a server too. At
    /// the maximum the connection that is idle for longest is closed; when none is idle, a few more are accepted for
    /// health checks and metrics only.
    pub max_connections: usize,
    /// Time within which the headers of a request must arrive. Default 10 s: they are one packet or a few.
    pub header_timeout: HumanDuration,
    /// Maximum size of a request's headers, at least 8 KiB. Default 64 KiB: proxies add a few KiB of cookies and
    /// traces.
    pub max_headers: ByteSize,
    /// Time after which a connection without a request is closed, and a WebSocket connection on which neither side
    /// sends. Default 75 s: longer than the 60 s for which load balancers keep theirs, so that they close first and no
    /// request meets a closed connection. Servers send a WebSocket ping every 20 s.
    pub idle_timeout: HumanDuration,
    /// Time for which a client may pause within a request's body. Default 30 s.
    pub body_timeout: HumanDuration,
    /// Minimum average rate, as a size per second, of a body that takes longer than `body_timeout`. Earlier bytes
    /// count for at most that time. Default 1000 B per second: a slow mobile line is ten times faster.
    pub min_body_rate: ByteSize,
    /// Time for which a client may stop reading its response. Default 30 s: the system buffers megabytes before that.
    pub write_timeout: HumanDuration,
    /// Maximum time from the arrival of a request to the end of its response; a response that takes longer is ended
    /// with an error. Default none: a stream ends at its limit of tokens, and how long that takes depends on the model
    /// and on the load. With it the shutdown timeout can be made longer than every request.
    pub max_request_time: Option<HumanDuration>,
    /// Time after SIGTERM for which new requests are still served while `/ready` gets 503. Default 5 s: load balancers
    /// check every few seconds. It is a part of `shutdown_timeout`. Ctrl-C skips it.
    pub shutdown_delay: HumanDuration,
    /// Names of this server that requests may have in `Host`, besides its addresses and `localhost`; `*` for any.
    /// Default none: on a loopback address no other is allowed, which keeps out web pages that rebind a name to it. On
    /// other addresses any name is allowed unless some are named here.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may use the API from a browser, like `https://chat.example.com`; `*` for any. Default
    /// none: requests of pages of other sites are refused.
    pub cors_origins: Vec<Origin>,
    /// Paths of upstreams that are relayed besides those below `/v1/` and the known ones: `/infill`, or `/api/*` for
    /// all below `/api/`. Default none: such paths may change a server for all clients.
    pub relay_paths: Vec<RelayPath>,
    /// Read the text of special tokens in messages, like `<|im_end|>`, as these tokens. Default false: such text is
    /// encoded as text, because with it a message could end its turn and write the next one. Completions always read it
    /// as tokens.
    pub parse_special_tokens: bool,
    /// Use the sampling defaults of the model's `generation_config.json` for absent fields, as vLLM and SGLang do.
    /// Default true. With false, OpenAI's defaults apply to every model.
    pub use_generation_config: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_body: ByteSize(16 << 20),
            max_inflight_bodies: ByteSize(256 << 20),
            max_choices_per_connection: 256,
            max_choices_per_tenant: 1024,
            api_keys_file: None,
            api_key: None,
            metrics_need_key: false,
            tls_cert_file: None,
            tls_key_file: None,
            tenant_header: None,
            tenant_secret_file: None,
            tenant_metrics: 200,
            max_connections: 4096,
            header_timeout: HumanDuration::secs(10),
            max_headers: ByteSize(64 << 10),
            idle_timeout: HumanDuration::secs(75),
            body_timeout: HumanDuration::secs(30),
            min_body_rate: ByteSize(1000),
            write_timeout: HumanDuration::secs(30),
            max_request_time: None,
            shutdown_delay: HumanDuration::secs(5),
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            relay_paths: Vec::new(),
            parse_special_tokens: false,
            use_generation_config: true,
        }
    }
}

impl Settings {
    /// Whether requests need an API key.
    pub fn needs_key(&self) -> bool {
        self.api_keys_file.is_some() || self.api_key.is_some()
    }

    /// Whether requests may have tenants.
    pub fn has_tenants(&self) -> bool {
        self.tenant_header.is_some() || self.api_keys_file.is_some()
    }
}

/// The header in which a trusted proxy names the tenant of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TenantHeader(pub(crate) HeaderName);

impl TryFrom<String> for TenantHeader {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let wrong = |_| format!("expected the name of a header, like \"x-tenant\", but got {name:?}");
        let header = HeaderName::try_from(name.as_str()).map_err(wrong)?;
        // Tenants are in metrics and logs.
        if [AUTHORIZATION, PROXY_AUTHORIZATION, COOKIE].contains(&header) || KEY_HEADERS.contains(&header) {
            return Err(format!("{header} has secrets of clients; expected a header with the name of a tenant"));
        }
        Ok(Self(header))
    }
}

impl From<TenantHeader> for String {
    fn from(TenantHeader(name): TenantHeader) -> Self {
        name.as_str().to_owned()
    }
}

/// A path that is relayed, or with `/*` at its end all paths below it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelayPath(String);

/// First parts of paths that are answered without an upstream. No upstream is asked for what is below them either.
const OWN_PATHS: [&str; 7] = ["live", "ready", "health", "ping", "metrics", "version", "admin"];

impl RelayPath {
    /// Whether a request's path is this one, or below it.
    pub(crate) fn contains(&self, path: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(folder) => path.starts_with(folder),
            None => path == self.0,
        }
    }
}

impl TryFrom<String> for RelayPath {
    type Error = String;

    fn try_from(path: String) -> Result<Self, String> {
        let is_plain = |part: &str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._~:@".contains(c);
            !part.is_empty() && part != "." && part != ".." && part.chars().all(is_allowed)
        };
        let named = path.strip_suffix("/*").unwrap_or(&path);
        let is_path = named.strip_prefix('/').is_some_and(|parts| parts.split('/').all(is_plain));
        if !is_path {
            return Err(format!(
                "expected a path like \"/infill\", or \"/api/*\" for all paths below /api/, without `%`, spaces and a \
                 query, but got {path:?}"
            ));
        }
        let first = named[1..].split('/').next().unwrap_or_default().to_ascii_lowercase();
        if first == "v1" {
            return Err(format!(
                "{path:?} is below /v1/, whose paths are relayed already, but for those that change a server"
            ));
        }
        if OWN_PATHS.contains(&first.as_str()) {
            return Err(format!("{path:?} is not relayed, because the gateway answers /{first} itself"));
        }
        Ok(Self(path))
    }
}

impl From<RelayPath> for String {
    fn from(RelayPath(path): RelayPath) -> Self {
        path
    }
}

/// An origin as browsers send it: `https://chat.example.com`, or `*` for any.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin(pub(crate) String);

impl Serialize for Origin {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Origin {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let authority = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        let sound = text == "*" || authority.is_some_and(|rest| rest.parse::<Authority>().is_ok());
        let problem = "expected an origin like \"https://chat.example.com\", without a path, or \"*\"";
        if sound { Ok(Self(text.to_ascii_lowercase())) } else { Err(D::Error::custom(problem)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Result<RelayPath, String> {
        text.to_owned().try_into()
    }

    #[test]
    fn a_header_with_secrets_names_no_tenants() {
        let of = |name: &str| TenantHeader::try_from(name.to_owned());
        assert_eq!(of("X-Tenant").map(String::from), Ok("x-tenant".to_owned()));
        assert!(of("x tenant").is_err_and(|problem| problem.contains("the name of a header")));
        for name in ["Authorization", "proxy-authorization", "cookie", "api-key", "X-Api-Key"] {
            assert!(of(name).is_err_and(|problem| problem.contains("has secrets of clients")), "{name}");
        }
    }

    #[test]
    fn a_relay_path_is_one_path_or_all_below_it() {
        let (one, all) = (path("/infill").unwrap(), path("/api/v2/*").unwrap());
        assert!(one.contains("/infill") && !one.contains("/infill/x") && !one.contains("/infills"));
        assert!(all.contains("/api/v2/chat") && !all.contains("/api/v2") && !all.contains("/api/v20"));
    }

    #[test]
    fn a_relay_path_that_cannot_be_used_is_refused() {
        for (text, problem) in [
            ("infill", "expected a path"),
            ("", "expected a path"),
            ("/", "expected a path"),
            ("/*", "expected a path"),
            ("//x", "expected a path"),
            ("/api/", "expected a path"),
            ("/api*", "expected a path"),
            ("/api/*/x", "expected a path"),
            ("/api/../sleep", "expected a path"),
            ("/api%2fx", "expected a path"),
            ("/x?y", "expected a path"),
            ("/v1/load_lora_adapter", "relayed already"),
            ("/V1/*", "relayed already"),
            ("/metrics", "the gateway answers /"),
            ("/Admin/*", "the gateway answers /"),
            ("/health/x", "the gateway answers /"),
        ] {
            let error = path(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        assert!(path("/health_generate").is_ok());
    }
}
