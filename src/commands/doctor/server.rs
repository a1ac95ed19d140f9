//! Checks of one server, from its name to its models. Each needs the one before it.

use super::findings::{self, Findings};
use super::{Gateway, Probing, judge, kv, probe};
use crate::config::{HttpVersion, Resolve, Upstream};
use http::{HeaderValue, StatusCode};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use transport::CertificateExpiry;
use upstream::ask::{self, AnswerLimits, AskError, ServerAnswer};
use upstream::relay::client::Client;
use upstream::relay::error::RelayError;
use upstream::relay::headers::bearer;
use upstream::resolve::{NamedServers, system_lookup};
use upstream::{Authorities, DiscoverError, ListedModel, certificates, discover};
use worker::engine::UNKNOWN_CONTEXT;

/// Time for the resolution of a name. Resolvers give up after 5 s by default.
const DNS_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a TCP connection: more than the 2 s that `serve` waits, so that it can be said what is too slow.
const TCP_TIMEOUT: Duration = Duration::from_secs(3);
/// For a small answer, such as the version. SGLang lists all of its settings.
const ANSWER: AnswerLimits = AnswerLimits { bytes: 1 << 20, time: Duration::from_secs(5) };
/// Difference of two clocks from which on it is a warning. Expiry and `Retry-After` count in seconds.
const MAX_SKEW: Duration = Duration::from_secs(2);
/// Further answers whose date is read if that of the first one is behind. uvicorn, in which vLLM and SGLang run, writes
/// a date that it renews about once a second, and some seconds late when it is busy.
const MAX_STALE_DATES: usize = 2;
/// Time until the next such answer.
const STALE_DATE_PAUSE: Duration = Duration::from_secs(1);
/// Other programs by their `owned_by`, with the path and field of their version.
const OTHERS: [(&str, &str, &str, &str); 2] =
    [("llamacpp", "llama.cpp", "/props", "build_info"), ("library", "Ollama", "/api/version", "version")];
/// Models that are named in a result.
const NAMED_MODELS: usize = 5;

/// A server that answers.
pub(super) struct Server<'a> {
    pub(super) upstream: &'a Upstream,
    /// The host or the address, as endpoints name it.
    pub(super) host: String,
    pub(super) client: Client,
    pub(super) api_key: Option<HeaderValue>,
    pub(super) kind: Kind,
    pub(super) models: Vec<ListedModel>,
    pub(super) gateway: &'a Gateway,
}

/// The program that the server is, because each has its own flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Vllm,
    Sglang,
    Other,
}

/// The addresses of each server that the host of the URL stands for, as `serve` tells them apart.
pub(super) async fn resolve(upstream: &Upstream, findings: &mut Findings) -> Vec<Vec<IpAddr>> {
    let host = upstream.url.host().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let addresses = match timeout(DNS_TIMEOUT, system_lookup()(bare)).await {
        Ok(Ok(addresses)) => addresses,
        Ok(Err(error)) => {
            let fix = format!("correct the host of the URL, or make its name known: `getent hosts {host}` must answer");
            findings.problem("dns", format!("{host} does not resolve: {error}"), fix);
            return Vec::new();
        }
        Err(_) => {
            let fix = "check the name servers in /etc/resolv.conf";
            findings.problem("dns", format!("{host} was not resolved within {} s", DNS_TIMEOUT.as_secs()), fix);
            return Vec::new();
        }
    };
    let servers = match upstream.resolve {
        Resolve::All => NamedServers::default().update(&addresses).added,
        Resolve::One => vec![addresses],
    };
    let shown = |addresses: &Vec<IpAddr>| addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    let listed = servers.iter().map(shown).collect::<Vec<_>>().join("; ");
    let count = if servers.len() == 1 { String::new() } else { format!("{} servers: ", servers.len()) };
    findings.ok("dns", format!("{count}{listed}"));
    servers
}

/// Checks one server at these addresses, of the upstream at this position of the configuration. Returns the
/// models that it lists; `None`: it does not say.
pub(super) async fn examine(
    upstream: &Upstream,
    addresses: Vec<IpAddr>,
    at: usize,
    probing: Probing,
    gateway: &Gateway,
    findings: &mut Findings,
) -> Option<Vec<String>> {
    let api_key = api_key(upstream, at, findings)?;
    let authorities = match upstream.authorities() {
        Ok(authorities) => authorities,
        Err(error) => {
            let path = upstream.ca_file.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
            let fix = format!("correct upstreams.{at}.ca_file: a file in PEM format that this user can read");
            findings.problem("ca_file", format!("{path}: {error}"), fix);
            return None;
        }
    };
    if !connects(upstream, &addresses, findings).await {
        return None;
    }
    let host = match addresses.first() {
        Some(IpAddr::V6(address)) => format!("[{address}]"),
        Some(IpAddr::V4(address)) => address.to_string(),
        None => upstream.url.host().unwrap_or_default().to_owned(),
    };
    let client = match Client::new(&upstream.url, &upstream.connection(addresses.clone(), authorities.as_ref())) {
        Ok(client) => client,
        Err(error) => {
            findings.problem("url", error.to_string(), format!("correct upstreams.{at}.url"));
            return None;
        }
    };
    let listed = discover(&client, api_key.as_ref()).await;
    let models = answered(upstream, at, listed, findings)?;
    let shown = certificates(&upstream.url, &addresses, authorities.as_ref().map(Authorities::roots)).await;
    if let Some(expiry) = shown.and_then(|shown| CertificateExpiry::of(&shown)) {
        findings::expiry("tls_certificate", &expiry, "renew the certificate of the server", findings);
    }
    let kind = version(&client, api_key.as_ref(), &models, findings).await;
    named(&models, findings);
    let server = Server { upstream, host, client, api_key, kind, models, gateway };
    kv::examine(&server, at, probing, findings).await;
    for (model, comparison) in probe::compare_tokenizers(&server).await {
        judge::tokenizer(&model, &comparison, findings);
    }
    Some(server.models.into_iter().map(|model| model.card.id).collect())
}

/// The key for the server; `None` if it cannot be read.
#[expect(clippy::option_option, reason = "whether there is a key, and whether it can be used")]
fn api_key(upstream: &Upstream, at: usize, findings: &mut Findings) -> Option<Option<HeaderValue>> {
    let fix = format!("correct upstreams.{at}.api_key_file: a file with the key alone that this user can read");
    match upstream.api_key() {
        Ok(None) => Some(None),
        Ok(Some(key)) => match bearer(&key) {
            Some(value) if !key.is_empty() => Some(Some(value)),
            _ => {
                findings.problem("api_key_file", "the key is empty, or has characters that no header may have", fix);
                None
            }
        },
        Err(error) => {
            let path = upstream.api_key_file.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
            findings.problem("api_key_file", format!("{path}: {error}"), fix);
            None
        }
    }
}

/// Opens a connection.
async fn connects(upstream: &Upstream, addresses: &[IpAddr], findings: &mut Findings) -> bool {
    let host = upstream.url.host().unwrap_or_default();
    let port = upstream.port();
    let addresses: Vec<SocketAddr> = addresses.iter().map(|address| SocketAddr::new(*address, port)).collect();
    let failure = match timeout(TCP_TIMEOUT, TcpStream::connect(&addresses[..])).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error),
        Err(_) => Some(io::ErrorKind::TimedOut.into()),
    };
    match failure {
        None => {
            findings.ok("tcp", format!("port {port} accepts connections"));
            true
        }
        Some(error) => {
            let fix = if error.kind() == io::ErrorKind::ConnectionRefused {
                format!("start the server, or correct the port: nothing listens on port {port} of {host}")
            } else {
                format!("start the machine, or allow port {port} in the firewall between")
            };
            findings.problem("tcp", format!("port {port}: {error}"), fix);
            false
        }
    }
}

/// The models, if the server has answered with them.
fn answered(
    upstream: &Upstream,
    at: usize,
    listed: Result<Vec<ListedModel>, DiscoverError>,
    findings: &mut Findings,
) -> Option<Vec<ListedModel>> {
    let is_tls = upstream.url.scheme_str() == Some("https");
    let error = match listed {
        Ok(models) => {
            if is_tls {
                findings.ok("tls", "the certificate is accepted");
            }
            findings.ok("http", "/v1/models answers");
            match &upstream.api_key_file {
                Some(_) => findings.ok("api_key", "the server accepts the request with the key"),
                None => findings.ok("api_key", "the server asks for no key"),
            }
            return Some(models);
        }
        Err(error) => error,
    };
    let detail = error.to_string();
    let models_fix =
        format!("correct upstreams.{at}.url: expected the root of a server with OpenAI's API, without /v1");
    match error {
        DiscoverError::Ask(AskError::Relay(RelayError::Unreachable(_) | RelayError::NoAnswer(_)))
            if is_tls && detail.contains("certificate") =>
        {
            let fix = format!(
                "let upstreams.{at}.ca_file name the file of the authority that signed the server's certificate, and \
                 let the URL have the name in it"
            );
            findings.problem("tls", detail, fix);
        }
        DiscoverError::Ask(AskError::Relay(RelayError::Unreachable(_) | RelayError::NoAnswer(_))) if is_tls => {
            findings.problem("tls", detail, "write http:// in the URL if the server has no TLS");
        }
        DiscoverError::Ask(AskError::Relay(_)) if upstream.http == HttpVersion::H2c => {
            let fix = format!(
                "remove upstreams.{at}.http unless the server speaks HTTP/2 without TLS: vLLM and SGLang speak \
                 HTTP/1.1; or correct the port"
            );
            findings.problem("http", detail, fix);
        }
        DiscoverError::Ask(AskError::Relay(_)) => {
            let fix = "write https:// in the URL if the server has TLS, or correct the port: no HTTP is spoken there";
            findings.problem("http", detail, fix);
        }
        DiscoverError::Ask(AskError::Late { .. }) => {
            findings.problem("http", detail, "look at the server's log: it accepts connections and does not answer");
        }
        DiscoverError::Status(StatusCode::UNAUTHORIZED) => {
            findings.ok("http", "the server answers");
            let fix = match &upstream.api_key_file {
                Some(file) => format!("write the key that the server was started with into {}", file.display()),
                None => format!("set upstreams.{at}.api_key_file to a file with the key of the server"),
            };
            let detail = match &upstream.api_key_file {
                Some(_) => "the server does not know the key (401)",
                None => "the server asks for a key (401)",
            };
            findings.problem("api_key", detail, fix);
        }
        DiscoverError::Status(StatusCode::FORBIDDEN) => {
            findings.ok("http", "the server answers");
            let fix = "use a key that may list models and send completions, or allow this machine at the proxy in \
                       front of the server";
            findings.problem("api_key", "access is denied: the key is known but not enough, or a proxy (403)", fix);
        }
        DiscoverError::Status(status) if status.is_server_error() => {
            findings.problem("http", detail, "wait until the server has loaded its model, or look at its log");
        }
        DiscoverError::Ask(AskError::TooLarge { .. })
        | DiscoverError::Status(_)
        | DiscoverError::Format(_)
        | DiscoverError::Empty => {
            findings.ok("http", "the server answers");
            findings.problem("models", detail, models_fix);
        }
    }
    None
}

/// Asks for program and version, and compares the clocks.
async fn version(
    client: &Client,
    api_key: Option<&HeaderValue>,
    models: &[ListedModel],
    findings: &mut Findings,
) -> Kind {
    let ask = async |path| {
        let before = SystemTime::now();
        Some((ask::get(client, api_key, path, ANSWER).await.ok()?, before))
    };
    let owner = models.iter().find_map(|model| model.owned_by.as_deref()).unwrap_or_default().to_owned();
    let asked = ask("/version").await;
    let answer = asked.as_ref().map(|(answer, _)| answer);
    let mut version = answer.and_then(version_in);
    let mut kind = if owner == "vllm" { Kind::Vllm } else { Kind::Other };
    if kind == Kind::Other {
        for path in ["/server_info", "/get_server_info"] {
            let info = ask(path).await.and_then(|(answer, _)| version_in(&answer));
            if info.is_some() || owner == "sglang" {
                (kind, version) = (Kind::Sglang, info.or(version));
                break;
            }
        }
    }
    let other = if kind == Kind::Other { OTHERS.iter().find(|(own, ..)| *own == owner) } else { None };
    let name = match (kind, other) {
        (Kind::Vllm, _) => "vLLM",
        (Kind::Sglang, _) => "SGLang",
        (Kind::Other, Some((_, name, ..))) => name,
        (Kind::Other, None) if owner.is_empty() => "a server that does not name itself",
        (Kind::Other, None) => &owner,
    };
    if let Some((_, _, path, field)) = other {
        version = ask(path).await.and_then(|(answer, _)| text_in(&answer, field));
    }
    let header = answer.and_then(|answer| answer.header("server")).map(|header| format!("Server: {header}"));
    let header = header.filter(|_| other.is_none());
    findings.ok("server", format!("{name} {}", version.or(header).unwrap_or_else(|| "of unknown version".to_owned())));
    let read = |(answer, before): (ServerAnswer, SystemTime)| Some(Skew::of(answer.date()?, before, SystemTime::now()));
    if let Some(mut skew) = asked.and_then(read) {
        for _ in 0..MAX_STALE_DATES {
            if skew.behind <= MAX_SKEW {
                break;
            }
            sleep(STALE_DATE_PAUSE).await;
            let Some(again) = ask("/version").await.and_then(read) else { break };
            skew = again;
        }
        skew.judge(findings);
    }
    kind
}

fn version_in(answer: &ServerAnswer) -> Option<String> {
    text_in(answer, "version")
}

fn text_in(answer: &ServerAnswer, field: &str) -> Option<String> {
    let body = answer.status.is_success().then_some(&answer.body)?;
    serde_json::from_slice::<serde_json::Value>(body).ok()?[field].as_str().map(str::to_owned)
}

/// How far the clock of a server is from that of this machine. One of both is 0.
struct Skew {
    behind: Duration,
    ahead: Duration,
}

impl Skew {
    /// Compares the time in an answer, in whole seconds, with the time in which it was asked and answered.
    fn of(date: SystemTime, asked: SystemTime, answered: SystemTime) -> Self {
        let last = date + Duration::from_secs(1);
        let behind = asked.duration_since(last).unwrap_or_default();
        Self { behind, ahead: date.duration_since(answered).unwrap_or_default() }
    }

    fn judge(&self, findings: &mut Findings) {
        let skew = self.behind.max(self.ahead);
        if skew > MAX_SKEW {
            let way = if self.behind > self.ahead { "behind" } else { "ahead of" };
            let detail = format!("the server's clock is {:.0} s {way} this machine's", skew.as_secs_f64());
            findings.warning("clock", detail, "synchronise both machines with NTP: `timedatectl set-ntp true`");
        } else {
            findings.ok("clock", format!("within {} s of this machine's", MAX_SKEW.as_secs()));
        }
    }
}

fn named(models: &[ListedModel], findings: &mut Findings) {
    let model = |model: &ListedModel| match model.card.context {
        UNKNOWN_CONTEXT => format!("{} (context unknown)", model.card.id),
        context => format!("{} ({context} tokens)", model.card.id),
    };
    let mut names: Vec<String> = models.iter().take(NAMED_MODELS).map(model).collect();
    if models.len() > NAMED_MODELS {
        names.push(format!("and {} more", models.len() - NAMED_MODELS));
    }
    findings.ok("models", names.join(", "));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Status;
    use std::time::UNIX_EPOCH;

    #[test]
    fn a_clock_is_compared_in_whole_seconds() {
        let at = |seconds: f64| UNIX_EPOCH + Duration::from_secs_f64(1000.0 + seconds);
        let status = |date: f64, asked: f64, answered: f64| {
            let mut findings = Findings::of("x");
            Skew::of(at(date), at(asked), at(answered)).judge(&mut findings);
            let check = findings.into_checks().remove(0);
            (check.status, check.detail)
        };
        assert_eq!(status(0.0, 0.9, 0.9).0, Status::Ok);
        assert_eq!(status(0.0, 2.9, 3.0).0, Status::Ok, "2 s, since the date may be 0.99 s more");
        assert_eq!(status(0.0, 5.0, 5.0), (Status::Warning, "the server's clock is 4 s behind this machine's".into()));
        assert_eq!(
            status(9.0, 5.0, 6.0),
            (Status::Warning, "the server's clock is 3 s ahead of this machine's".into())
        );
    }
}
