//! Connections to another process of the deployment: where it listens, and what the two show to each other.

use super::{FORMER_NO_SECRET, NO_SECRET, PROTOCOL, Secret};
use http::uri::{Authority, Scheme};
use http::{HeaderValue, Uri};
use spans::LogLimit;
use std::error::Error as StdError;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use transport::{ClientTls, Socket};

/// What a process shows to workers of other processes, and what it checks of them.
#[derive(Clone, Default)]
pub struct Credentials {
    /// The secret with which workers require that requests are authenticated, as it is at each request.
    pub secret: Option<Secret>,
    /// The authorities that sign the certificates of workers, and the certificate of this process. `None`: workers
    /// without TLS only.
    pub tls: Option<Arc<ClientTls>>,
}

/// A process, and how it is connected to.
pub(super) struct Endpoint {
    /// The URL as discovery or a request names it.
    url: String,
    target: Result<Target, String>,
    credentials: Credentials,
    /// Limits log lines about a secret that the process does not accept: each request fails.
    refusals: LogLimit,
}

/// Where a process listens.
#[derive(Clone)]
struct Target {
    scheme: Scheme,
    authority: Authority,
}

/// Time for TCP and TLS together: workers are near, and another one can be tried, or the blocks be computed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

impl From<Option<Secret>> for Credentials {
    fn from(secret: Option<Secret>) -> Self {
        Self { secret, tls: None }
    }
}

impl Endpoint {
    /// The process at a URL, `http://host:port` or `https://host:port`. A wrong URL fails at each request.
    pub(super) fn new(url: &str, credentials: Credentials) -> Self {
        Self { url: url.to_owned(), target: Target::parse(url), credentials, refusals: LogLimit::default() }
    }

    /// The URL of the process. `None` if it is wrong.
    pub(super) fn address(&self) -> Option<String> {
        let Target { scheme, authority } = self.target.as_ref().ok()?;
        Some(format!("{scheme}://{authority}"))
    }

    /// The URI of a path.
    pub(super) fn uri(&self, path: &str) -> Uri {
        let (scheme, authority) = match &self.target {
            Ok(Target { scheme, authority }) => (scheme.as_str(), authority.as_str()),
            Err(_) => ("http", "invalid"),
        };
        let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build();
        uri.expect("authority and path are valid")
    }

    /// The header that shows to this process, and to no other, that the sender knows the secret.
    pub(super) fn authorization(&self) -> Option<HeaderValue> {
        self.credentials.secret.as_ref().map(|secret| secret.header(&self.url))
    }

    /// Logs what to change if the text of a response with an error is about the secret.
    pub(super) fn log_refusal(&self, text: &str) {
        let Some(change) = refusal(text, self.credentials.secret.is_some()) else { return };
        if let Some(suppressed) = self.refusals.admit() {
            let address = self.address();
            tracing::warn!(address, suppressed, "a worker answers with status 401: {change}");
        }
    }

    /// A new connection for a protocol (ALPN).
    pub(super) async fn connect(&self, protocol: &[u8]) -> io::Result<Socket> {
        let Target { scheme, authority } = self.target.as_ref().map_err(|problem| io::Error::other(problem.clone()))?;
        let tls = match (&self.credentials.tls, scheme) {
            (Some(tls), scheme) if *scheme == Scheme::HTTPS => Some(tls),
            (None, scheme) if *scheme == Scheme::HTTPS => {
                let problem = "the worker has TLS; set cluster.tls.ca_file to the authority that signs its certificate";
                return Err(io::Error::other(format!("{scheme}://{authority}: {problem}")));
            }
            _ => None,
        };
        let connecting = async {
            let tcp = TcpStream::connect(authority.as_str()).await?;
            // Small frames must be sent at once, not wait for an acknowledgement (Nagle's algorithm).
            tcp.set_nodelay(true)?;
            match tls {
                Some(tls) => tls.connect(tcp, authority.host(), protocol).await,
                None => Ok(Socket::Left(tcp)),
            }
        };
        let named = |error: io::Error| {
            // The number of this error is needed, and it is not about the process there.
            let is_own = transport::is_out_of_files(&error);
            if is_own { error } else { io::Error::new(error.kind(), format!("{authority}: {error}")) }
        };
        let Ok(connected) = timeout(CONNECT_TIMEOUT, connecting).await else {
            let problem = format!("{authority}: not connected after {CONNECT_TIMEOUT:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
        };
        connected.map_err(named)
    }

    /// The text of an error of a connection, with its causes and what to change.
    pub(super) fn explain(&self, error: &(dyn StdError + 'static)) -> String {
        let (mut text, mut cause) = (error.to_string(), error.source());
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        self.credentials.tls.as_ref().and_then(|tls| tls.explain_alert(&text)).unwrap_or(text)
    }
}

/// What to change if the text of a response with an error is about the secret.
fn refusal(text: &str, has_secret: bool) -> Option<String> {
    match (text, has_secret) {
        (FORMER_NO_SECRET, true) => Some(format!(
            "its version is older than that of this process, which has protocol number {PROTOCOL}; start the worker \
             with the same version"
        )),
        (NO_SECRET, true) => Some(
            "it does not accept the first secret in cluster.secret_file of this process; write this secret to \
             cluster.secret_file of the worker, too"
                .to_owned(),
        ),
        (NO_SECRET | FORMER_NO_SECRET, false) => Some(
            "it requires a secret, and this process has none; set cluster.secret_file to the same file as at the \
             worker"
                .to_owned(),
        ),
        _ => None,
    }
}

impl Target {
    fn parse(url: &str) -> Result<Self, String> {
        // Processes have no users. The text has no password.
        if let Some((_, host)) = url.rsplit_once('@') {
            return Err(format!("address …@{host}: expected no user before the host"));
        }
        let uri: Uri = url.parse().map_err(|error| format!("address {url:?}: {error}"))?;
        match (uri.scheme(), uri.authority()) {
            (Some(scheme), Some(authority))
                if [Scheme::HTTP, Scheme::HTTPS].contains(scheme) && authority.port().is_some() =>
            {
                Ok(Self { scheme: scheme.clone(), authority: authority.clone() })
            }
            _ => Err(format!("address {url:?}: expected http://host:port or https://host:port")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_secret_is_explained_by_its_setting() {
        for has_secret in [true, false] {
            assert!(refusal(NO_SECRET, has_secret).is_some_and(|change| change.contains("cluster.secret_file")));
            assert_eq!(refusal("no worker with this id takes requests here", has_secret), None);
        }
        // A worker that requires the secret itself, which this version does not send.
        assert!(refusal(FORMER_NO_SECRET, true).is_some_and(|change| change.contains("version is older")));
        assert!(refusal(FORMER_NO_SECRET, false).is_some_and(|change| change.contains("cluster.secret_file")));
    }
}
