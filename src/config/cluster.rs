//! Frontends and workers in separate processes: how they reach NATS and each other.

use super::{Config, HumanDuration, Listen};
use router::Problem;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use transport::{ClientFiles, Identity, NamedFile, ServerFiles, TlsError};
use worker::plane::nats::{ClientCertificate, Credentials, Process, Settings, Tls};

/// Requests between frontends and workers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// Address and port at which a worker takes requests of frontends. Default `127.0.0.1:8100`: other machines cannot
    /// reach it.
    pub listen: Listen,
    /// URL at which frontends reach this worker, like `http://10.0.0.7:8100`, or `https://…` with `tls`. Ids of workers
    /// and of their stores are derived from it, so it should be the same after a restart. Default: the address of
    /// `cluster.listen`.
    pub advertise: Option<String>,
    /// A file with the secret that frontends and workers share, the same for all processes. Requests to workers are
    /// authenticated with it, and it is not sent. Workers sign with it what they register in NATS, and frontends use
    /// only workers that have. Further lines have secrets that are also accepted. The file is loaded again when it
    /// changes. Default none: workers take requests of every process that reaches them, and frontends use every worker
    /// that is registered.
    pub secret_file: Option<PathBuf>,
    /// TLS between frontends and workers, and between workers.
    pub tls: ClusterTls,
}

/// TLS of requests between processes. Files are in PEM format and loaded again when they change.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterTls {
    /// The certificate of this process, then those that signed it: as server of a worker, and shown to workers that
    /// require one. Default none: a worker takes requests without TLS.
    pub cert_file: Option<PathBuf>,
    /// The key of `cert_file`.
    pub key_file: Option<PathBuf>,
    /// The authorities that may sign the certificates of workers. Default none: no worker with TLS can be reached.
    pub ca_file: Option<PathBuf>,
    /// The authorities that may sign the certificates of those that send requests to this worker. Default none: a
    /// caller needs no certificate.
    pub client_ca_file: Option<PathBuf>,
}

/// The connection to NATS. All processes of a deployment have the same prefix, bucket and lease. Its files are read
/// again at each connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Nats {
    /// URLs of the servers of one cluster, `nats://host:4222` or `tls://host:4222`. One is enough to find the others.
    pub servers: Vec<String>,
    /// The first tokens of every subject.
    pub prefix: String,
    /// The JetStream key-value bucket of the workers.
    pub bucket: String,
    /// Replicas of the bucket if this process creates it: 1, or 3 in a cluster.
    pub replicas: usize,
    /// A worker that does not renew its record for this long has left.
    pub lease: HumanDuration,
    /// How long the start waits for a server.
    pub connect_timeout: HumanDuration,
    /// User, with `password_file`.
    pub user: Option<String>,
    /// A file with the password of `user`.
    pub password_file: Option<PathBuf>,
    /// A file with a token.
    pub token_file: Option<PathBuf>,
    /// A file with the seed of an nkey.
    pub nkey_file: Option<PathBuf>,
    /// A credentials file: the JWT of a user and the seed of its nkey.
    pub credentials_file: Option<PathBuf>,
    /// A PEM file with the certificate authorities of the servers. Default: those of the operating system.
    pub ca_file: Option<PathBuf>,
    /// A PEM file with the certificate of this process, for servers that verify clients.
    pub cert_file: Option<PathBuf>,
    /// A PEM file with the key of `cert_file`.
    pub key_file: Option<PathBuf>,
}

/// An orchestrator restarts a process that does not start.
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_hours(1);

/// A worker that died is noticed after this time at the latest.
const MAX_LEASE: Duration = Duration::from_mins(10);

impl Default for Cluster {
    fn default() -> Self {
        let listen = Listen { host: "127.0.0.1".into(), port: 8100 };
        Self { listen, advertise: None, secret_file: None, tls: ClusterTls::default() }
    }
}

impl Default for Nats {
    fn default() -> Self {
        let Settings { servers, prefix, bucket, replicas, lease, connect_timeout, .. } = Settings::default();
        Self {
            servers,
            prefix,
            bucket,
            replicas,
            lease: HumanDuration(lease),
            connect_timeout: HumanDuration(connect_timeout),
            user: None,
            password_file: None,
            token_file: None,
            nkey_file: None,
            credentials_file: None,
            ca_file: None,
            cert_file: None,
            key_file: None,
        }
    }
}

impl Nats {
    /// The settings of the planes.
    pub fn settings(&self) -> Settings {
        let client = self.cert_file.clone().zip(self.key_file.clone());
        let client = client.map(|(cert_file, key_file)| ClientCertificate { cert_file, key_file });
        let has_tls = self.ca_file.is_some() || client.is_some();
        Settings {
            servers: self.servers.clone(),
            tls: has_tls.then(|| Tls { ca_file: self.ca_file.clone(), client }),
            credentials: self.credentials(),
            prefix: self.prefix.clone(),
            bucket: self.bucket.clone(),
            replicas: self.replicas,
            lease: self.lease.0,
            connect_timeout: self.connect_timeout.0,
            process: Process::default(),
        }
    }

    fn credentials(&self) -> Credentials {
        if let (Some(user), Some(password_file)) = (self.user.clone(), self.password_file.clone()) {
            return Credentials::UserPassword { user, password_file };
        }
        let token = self.token_file.clone().map(Credentials::Token);
        let nkey = self.nkey_file.clone().map(Credentials::Nkey);
        token.or(nkey).or_else(|| self.credentials_file.clone().map(Credentials::CredentialsFile)).unwrap_or_default()
    }

    /// All invalid values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some((key, problem)) = self.settings().problem() {
            problems.push(Problem::new(format!("nats.{key}"), problem));
        }
        // Without a scheme it is `nats://`. A variable that a script does not set gives an empty text.
        let is_nats = |url: &str| match url.split_once("://") {
            None => !url.is_empty(),
            Some((scheme, host)) => matches!(scheme, "nats" | "tls") && !host.is_empty(),
        };
        for nth in (0..self.servers.len()).filter(|nth| !is_nats(&self.servers[*nth])) {
            let problem = "expected nats://HOST:PORT or tls://HOST:PORT";
            problems.push(Problem::new(format!("nats.servers.{nth}"), problem));
        }
        let both = |(one, has_one): (&str, bool), (other, has_other): (&str, bool)| {
            (has_one != has_other).then(|| {
                let (set, missing) = if has_one { (one, other) } else { (other, one) };
                Problem::new(format!("nats.{set}"), format!("nats.{missing} is needed with it"))
            })
        };
        problems.extend(both(("user", self.user.is_some()), ("password_file", self.password_file.is_some())));
        problems.extend(both(("cert_file", self.cert_file.is_some()), ("key_file", self.key_file.is_some())));
        let ways = [
            ("user", self.user.is_some()),
            ("token_file", self.token_file.is_some()),
            ("nkey_file", self.nkey_file.is_some()),
            ("credentials_file", self.credentials_file.is_some()),
        ];
        let mut ways = ways.into_iter().filter_map(|(key, is_set)| is_set.then_some(key));
        if let (Some(first), Some(second)) = (ways.next(), ways.next()) {
            let problem = format!("nats.{first} is set too; expected one way to authenticate");
            problems.push(Problem::new(format!("nats.{second}"), problem));
        }
        problems.extend((self.lease.0 > MAX_LEASE).then(|| Problem::new("nats.lease", "expected at most \"10m\"")));
        let timeout = self.connect_timeout.0;
        if timeout.is_zero() || timeout > MAX_CONNECT_TIMEOUT {
            problems.push(Problem::new("nats.connect_timeout", "expected above 0 and at most \"1h\""));
        }
        problems
    }
}

impl Cluster {
    /// All invalid values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.advertise.as_ref().is_some_and(|url| !is_worker_url(url)) {
            let problem = "expected http://HOST:PORT or https://HOST:PORT, as frontends reach this process";
            problems.push(Problem::new("cluster.advertise", problem));
        } else if self.advertise.as_deref().and_then(host_of).is_some_and(|host| is_unspecified(&host)) {
            let problem = "it stands for all addresses of a machine, so a frontend would connect to its own; \
                           expected the name or the address of this machine";
            problems.push(Problem::new("cluster.advertise", problem));
        }
        let ClusterTls { cert_file, key_file, client_ca_file, .. } = &self.tls;
        let needs = |key: &str, missing: &str| Problem::new(key, format!("{missing} is needed with it"));
        match (cert_file, key_file) {
            (Some(_), None) => problems.push(needs("cluster.tls.cert_file", "cluster.tls.key_file")),
            (None, Some(_)) => problems.push(needs("cluster.tls.key_file", "cluster.tls.cert_file")),
            (None, None) if client_ca_file.is_some() => {
                problems.push(needs("cluster.tls.client_ca_file", "cluster.tls.cert_file"));
            }
            _ => {}
        }
        problems
    }

    /// `http` or `https`: how this process is reached as a worker.
    pub fn scheme(&self) -> &'static str {
        if self.tls.cert_file.is_some() { "https" } else { "http" }
    }
}

impl ClusterTls {
    /// The certificate of this process.
    fn identity(&self) -> Result<Option<Identity>, TlsError> {
        Identity::of(("cluster.tls.cert_file", self.cert_file.clone()), ("cluster.tls.key_file", self.key_file.clone()))
    }

    /// The files of a worker; `None` without TLS.
    pub fn server(&self) -> Result<Option<ServerFiles>, TlsError> {
        let clients = self.client_ca_file.clone().map(|path| NamedFile { key: "cluster.tls.client_ca_file", path });
        Ok(self.identity()?.map(|identity| ServerFiles { identity, clients }))
    }

    /// The files of a process that connects to workers; `None` if it can reach workers without TLS only.
    pub fn client(&self) -> Result<Option<ClientFiles>, TlsError> {
        let Some(path) = self.ca_file.clone() else { return Ok(None) };
        let authorities = NamedFile { key: "cluster.tls.ca_file", path };
        Ok(Some(ClientFiles { authorities, identity: self.identity()? }))
    }
}

/// Whether a URL has the form `http://host:port` or `https://host:port`.
fn is_worker_url(url: &str) -> bool {
    let Ok(uri) = url.parse::<http::Uri>() else { return false };
    let has_port = uri.authority().is_some_and(|authority| authority.port().is_some());
    matches!(uri.scheme_str(), Some("http" | "https"))
        && has_port
        && uri.query().is_none()
        && url.matches('/').count() == 2
}

impl Config {
    /// Additional checks of `blockyard worker`.
    pub(super) fn problems_of_worker(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !self.upstreams.is_empty() {
            let problem = "`blockyard worker` serves a model; the servers of `upstreams` are those of a gateway: \
                           `blockyard serve`, or `blockyard frontend` in a deployment of several processes";
            problems.push(Problem::new("upstreams", problem));
        }
        problems.extend(self.problem_of_g1());
        if self.admin.listen.as_ref().is_some_and(|admin| admin.port != 0 && *admin == self.cluster.listen) {
            problems.push(Problem::new("admin.listen", "the API of the workers listens there; expected another port"));
        }
        let scheme = self.cluster.scheme();
        let advertised = self.cluster.advertise.as_deref().and_then(|url| url.split_once("://"));
        if advertised.is_some_and(|(other, _)| other != scheme) {
            let problem = if scheme == "http" {
                "the worker has no TLS; expected http://HOST:PORT (for https://, set cluster.tls.cert_file and \
                 cluster.tls.key_file)"
            } else {
                "the worker has TLS (cluster.tls.cert_file); expected https://HOST:PORT"
            };
            problems.push(Problem::new("cluster.advertise", problem));
        }
        if self.cluster.advertise.is_none() && is_unspecified(&self.cluster.listen.host) {
            let problem = format!(
                "frontends cannot connect to {}, and cluster.advertise is not set; set --advertise \
                 {scheme}://HOST:PORT, where HOST is the name or the address of this machine",
                self.cluster.listen.host
            );
            problems.push(Problem::new("cluster.listen", problem));
        }
        problems
    }
}

/// The host of a URL, an address of IPv6 without its brackets.
fn host_of(url: &str) -> Option<String> {
    let host = url.parse::<http::Uri>().ok()?.host()?.to_owned();
    Some(host.trim_matches(['[', ']']).to_owned())
}

/// Whether a host stands for all addresses of the machine.
fn is_unspecified(host: &str) -> bool {
    host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_unspecified())
}
