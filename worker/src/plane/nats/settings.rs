//! Settings of the connection to NATS.

use super::{ConnectError, credentials, tls};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How to reach NATS and what to use there. All processes of a deployment have the same prefix and bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// URLs of the servers of one cluster, `nats://host:4222` or `tls://host:4222`. One is enough to find the others.
    pub servers: Vec<String>,
    /// TLS beyond what the scheme of a URL says. `None`: TLS with the certificates of the system for `tls://`, else no
    /// TLS.
    pub tls: Option<Tls>,
    /// How the process authenticates.
    pub credentials: Credentials,
    /// The first tokens of every subject, so that deployments can share an account.
    pub prefix: String,
    /// The JetStream KV bucket of the instances.
    pub bucket: String,
    /// Replicas of the bucket if this process creates it: 1, or 3 in a cluster.
    pub replicas: usize,
    /// An instance that is not renewed for this long has left. Whole seconds, because NATS has no finer expiry. A third
    /// of it is the interval of renewals.
    pub lease: Duration,
    /// How long [`Connection::open`](super::Connection::open) tries to reach a server.
    pub connect_timeout: Duration,
    /// What the process does with the planes.
    pub process: Process,
}

/// What a process does with the planes, for its log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Process {
    /// It follows workers.
    #[default]
    Frontend,
    /// It registers workers and publishes their events.
    Worker,
}

impl Process {
    /// What holds while NATS cannot be reached.
    pub(super) fn without_nats(self) -> &'static str {
        match self {
            Self::Frontend => "the last view of workers and caches is used",
            Self::Worker => {
                "requests of frontends that know this worker are served, and changes of its cache are published later"
            }
        }
    }
}

/// TLS of the connection. The files are read at each connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tls {
    /// PEM file with the certificate authority of the servers; `None`: the certificates of the system.
    pub ca_file: Option<PathBuf>,
    /// PEM files with the certificate and the key of this process, for servers that verify clients.
    pub client: Option<ClientCertificate>,
}

/// PEM files of a client certificate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientCertificate {
    /// The certificate, followed by those that signed it.
    pub cert_file: PathBuf,
    /// Its key.
    pub key_file: PathBuf,
}

/// Authentication. Secrets are in files, so that none is in a configuration, a URL or a log. The files are read at each
/// connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Credentials {
    /// None, or the client certificate alone.
    #[default]
    Anonymous,
    /// A user and the file with its password.
    UserPassword {
        /// The user.
        user: String,
        /// File with the password; a newline at the end does not count.
        password_file: PathBuf,
    },
    /// The file with a token.
    Token(PathBuf),
    /// The file with the seed of an nkey, `SU…`.
    Nkey(PathBuf),
    /// A credentials file: the JWT of a user and the seed of its nkey.
    CredentialsFile(PathBuf),
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            servers: vec!["nats://127.0.0.1:4222".to_owned()],
            tls: None,
            credentials: Credentials::default(),
            prefix: "blockyard".to_owned(),
            bucket: "blockyard".to_owned(),
            replicas: 1,
            // Two renewals may be lost before an instance expires, and a death is noticed within seconds.
            lease: Duration::from_secs(6),
            connect_timeout: Duration::from_secs(30),
            process: Process::default(),
        }
    }
}

/// Two renewals and their answers must fit into a lease.
const MIN_LEASE: Duration = Duration::from_secs(2);

/// Replicas that JetStream supports.
const MAX_REPLICAS: usize = 5;

impl Settings {
    /// The first setting with a wrong value: its name, and what is expected.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        let word =
            |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || ['-', '_'].contains(&c));
        if self.servers.is_empty() {
            return Some(("servers", "no server is named; expected a URL such as nats://host:4222"));
        }
        if self.servers.iter().any(|server| server.contains('@')) {
            return Some(("servers", "a URL contains a user or a token; name them in the credentials instead"));
        }
        if !self.prefix.split('.').all(word) {
            return Some(("prefix", "expected letters, digits, '-' and '_', in tokens separated by '.'"));
        }
        if !word(&self.bucket) {
            return Some(("bucket", "expected letters, digits, '-' and '_'"));
        }
        if !(1..=MAX_REPLICAS).contains(&self.replicas) {
            return Some(("replicas", "expected 1 to 5"));
        }
        if self.lease < MIN_LEASE || self.lease.subsec_nanos() != 0 {
            return Some(("lease", "expected whole seconds, at least 2"));
        }
        None
    }

    /// Checks the files of credentials and of TLS, as a connection does. Blocks while it reads them.
    pub fn check_files(&self) -> Result<(), ConnectError> {
        credentials::check(&self.credentials)?;
        let checked = self.tls.as_ref().map_or(Ok(()), tls::check_files);
        checked.map_err(|error| ConnectError::TlsFile(error.to_string()))
    }

    pub(super) fn check(&self) -> Result<(), ConnectError> {
        let wrong = |(key, problem): (_, &str)| Err(ConnectError::Setting { key, problem: problem.to_owned() });
        self.problem().map_or(Ok(()), wrong)
    }

    /// Interval of renewals.
    pub(super) fn renewal_interval(&self) -> Duration {
        self.lease / 3
    }
}

impl Credentials {
    /// The setting that names the file.
    pub(super) fn key(&self) -> &'static str {
        match self {
            Self::Anonymous => "nats",
            Self::UserPassword { .. } => "nats.password_file",
            Self::Token(_) => "nats.token_file",
            Self::Nkey(_) => "nats.nkey_file",
            Self::CredentialsFile(_) => "nats.credentials_file",
        }
    }

    /// The file that has them.
    pub(super) fn file(&self) -> Option<&Path> {
        match self {
            Self::Anonymous => None,
            Self::UserPassword { password_file: file, .. }
            | Self::Token(file)
            | Self::Nkey(file)
            | Self::CredentialsFile(file) => Some(file),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Settings)) -> &'static str {
        let mut settings = Settings::default();
        change(&mut settings);
        match settings.check() {
            Err(ConnectError::Setting { key, .. }) => key,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn wrong_settings_are_refused_by_name() {
        assert!(Settings::default().check().is_ok());
        assert_eq!(refused(|settings| settings.servers.clear()), "servers");
        assert_eq!(refused(|settings| settings.servers = vec!["nats://user:secret@host".into()]), "servers");
        assert_eq!(refused(|settings| settings.prefix = "a..b".into()), "prefix");
        assert_eq!(refused(|settings| settings.prefix = "a.>".into()), "prefix");
        assert_eq!(refused(|settings| settings.bucket = "a.b".into()), "bucket");
        assert_eq!(refused(|settings| settings.replicas = 0), "replicas");
        assert_eq!(refused(|settings| settings.lease = Duration::from_millis(2500)), "lease");
        assert_eq!(refused(|settings| settings.lease = Duration::from_secs(1)), "lease");
    }
}
