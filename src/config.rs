//! The configuration: one tree, of which each crate owns its part, and one loader.
//!
//! ```text
//!   defaults  <  --config FILE  <  BLOCKYARD_SECTION__KEY  <  flags, --set section.key=value
//! ```
//! Only the loader reads the environment; what a value means is decided where its type is. What is unknown or impossible is
//! an error that names the key, the value, where it came from, and what would be right.

mod check;
mod error;
mod file;
mod load;
mod print;
mod suggest;
mod values;

pub use error::{Error, Errors};
pub use frontend::Span;
pub use load::{Flag, Sources};
pub use print::{as_json, as_toml, changes, defaults};
pub use values::{Budget, ByteSize, Invalid, Listen, Model, Threads, Workers};

use kvbm::crypt::KeySource;
use kvbm::object::{Credentials, Endpoint, Location};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use worker::engine::llama::Builtin;

/// Everything that can be chosen.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What is served: a Hugging Face folder, or `tiny`, `small`, `bench`. Default `small`: computes at once, on any machine,
    /// without a download.
    pub model: Model,
    /// Where the front door listens. Default `127.0.0.1:8000`: nobody else's machine reaches a server that asks for no key.
    pub listen: Listen,
    /// How many workers of which phase. Default `prefill:1,decode:2`.
    pub workers: Workers,
    /// Threads that compute, all workers together. Default `auto`: as many as run at the same time here.
    pub threads: Threads,
    /// Built-in models and the G3 log. Default `blockyard` in the user's cache folder.
    pub data_dir: PathBuf,
    /// What several nodes share: G4, a bucket's URL or a folder. Default none.
    pub shared: Option<Location>,
    /// How long requests may go on after the signal to stop, and blocks may still be written. Default 25 s:
    /// orchestrators kill after 30.
    pub drain: Span,
    /// How much each tier may take.
    pub tiers: Tiers,
    /// How the shared store is reached, where its URL does not say.
    pub shared_store: SharedStore,
    /// What the environment knows of clouds. It is no key: nobody writes it into a file, and it is never printed.
    #[serde(skip)]
    pub credentials: Credentials,
    /// The master keys that the environment holds, when `tiers.encryption.keys.env` names where. Never printed.
    #[serde(skip)]
    pub master_keys: Option<Secret>,
    /// How the native engine batches.
    pub engine: worker::engine::llama::Settings,
    /// How requests are placed.
    pub router: router::Settings,
    /// What the front door accepts.
    pub frontend: frontend::Settings,
    /// Looking at a running process, and having it read its configuration again.
    pub admin: Admin,
    /// What is logged.
    pub log: Log,
}

/// Looking at a running process, and having it read its configuration again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// Where that is answered. Default none: it asks for no key, so whoever wants it opens it, to whom they want.
    pub listen: Option<Listen>,
}

/// How much each tier may take. G4 takes what its store gives.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tiers {
    /// Device memory of each worker: the KV blocks that the engine computes on.
    pub g1: Budget,
    /// Host memory of each worker.
    pub g2: Budget,
    /// The SSD log of the process: each of its folders, unless it says otherwise.
    pub g3: Budget,
    /// What the SSD log leaves free on each of its disks: below it the log shrinks, down to a quarter of what it may take.
    /// Default `auto`: 1 GiB, and at most a twentieth of the disk. `off`: nothing.
    pub g3_min_free: Budget,
    /// Where the SSD log is; one folder per device. Default none: in the data folder.
    pub g3_paths: Vec<DiskPath>,
    /// A folder between G3 and G4 that the processes of a pod share. Default none.
    pub pod: Option<Pod>,
    /// What tenants are promised of each worker's memory and of the tiers below it. Default none: they share all of it.
    pub quotas: Vec<TenantQuota>,
    /// Whether blocks are encoded when they are written below G2; encoded blocks are read whatever it says. Default `off`: the
    /// native engine needs its processors for computing.
    pub codec: Coding,
    /// Whether blocks below G2 rest encrypted. Default: they do not, since nobody has given a key.
    pub encryption: Option<Encryption>,
}

/// A folder between G3 and G4 that the processes of a pod share: its flash.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// The folder, the same for all of them.
    pub path: PathBuf,
    /// How much may rest there; what was used longest ago goes beyond it. There is no default: it is shared with others.
    pub budget: ByteSize,
    /// What is older goes. Default: nothing is too old.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_max: Option<Span>,
}

/// What one tenant is promised of each worker's memory and of the tiers that all share, and what it may take at most.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantQuota {
    /// As it stands in the header that `frontend.tenant_header` names; empty for requests without it.
    pub tenant: String,
    /// Of G1, not given up for others. Default none.
    #[serde(default)]
    pub g1: ByteSize,
    /// Of G1, at most. Default: all that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g1_max: Option<ByteSize>,
    /// Of G2, not given up for others. Default none.
    #[serde(default)]
    pub g2: ByteSize,
    /// Of G2, at most. Default: all that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g2_max: Option<ByteSize>,
    /// Of G3, not given up for others. Default none.
    #[serde(default)]
    pub g3: ByteSize,
    /// Of G3, at most, in whole segments. Default: all that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g3_max: Option<ByteSize>,
    /// Of the pod's folder, not given up for others. Default none.
    #[serde(default)]
    pub pod: ByteSize,
    /// Of the pod's folder, at most. Default: all that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_max: Option<ByteSize>,
    /// Of the shared store's budget, not given up for others. Default none.
    #[serde(default)]
    pub g4: ByteSize,
    /// Of the shared store, at most. Default: all that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g4_max: Option<ByteSize>,
    /// Its part of what the tiers below memory can move, beside others who move blocks at the same time. Default 1.
    #[serde(default = "TenantQuota::one")]
    pub weight: f64,
}

impl TenantQuota {
    /// A tenant that is promised nothing.
    pub fn of(tenant: impl Into<String>) -> Self {
        let ((g1, g2, g3, pod, g4), none) = (Default::default(), None);
        Self {
            tenant: tenant.into(),
            g1,
            g1_max: none,
            g2,
            g2_max: none,
            g3,
            g3_max: none,
            pod,
            pod_max: none,
            g4,
            g4_max: none,
            weight: Self::one(),
        }
    }

    const fn one() -> f64 {
        1.0
    }
}

/// Whether blocks rest encoded, which loses nothing of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coding {
    /// As the engine wrote them.
    #[default]
    Off,
    /// Where it makes onboarding faster, by what was measured of the device and of the codec.
    Faster,
    /// Where it makes them smaller.
    Smaller,
}

/// Blocks rest encrypted, each cache domain's under a data key of its own.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Encryption {
    /// Where the master keys are, which wrap the data keys: `{ file = "…" }`, `{ env = "NAME" }` or `{ command = ["…"] }`.
    pub keys: KeySource,
}

/// A value that is not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub(crate) String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// A folder of the SSD log.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPath {
    /// The folder.
    pub path: PathBuf,
    /// How much may rest there. Default `auto`: what `tiers.g3` says.
    #[serde(default)]
    pub capacity: Budget,
}

/// How the shared store is reached, where its URL does not say.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharedStore {
    /// The server, when it is not the cloud's own. Default none.
    pub endpoint: Option<Endpoint>,
    /// Where an S3 bucket is. Default: `AWS_REGION`, or what S3 itself takes, `us-east-1`.
    pub region: Option<String>,
    /// After which one request has failed. Default 10 s: 4 MiB in that time is slower than any recomputing.
    pub request_timeout: Span,
    /// How much may rest there, what is about to be deleted included: `serve` writes nothing beyond it, and removes what was used
    /// longest ago so that an eighth of it stays free. Default: as much as there is.
    pub budget: Option<ByteSize>,
    /// What is older goes. Default: nothing is too old.
    pub age_max: Option<Span>,
    /// How often that is looked at, by about one of all the processes that have such a bound. Default 1 h: all manifests are
    /// read each time.
    pub collect_every: Span,
    /// From naming what goes to deleting it. Default 10 min: running processes know of it after seconds, and one that was
    /// suspended for minutes finds what it was about to read.
    pub gc_grace: Span,
}

/// What is logged, on standard error.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Directives as `tracing` knows them. Default `info`.
    pub filter: String,
    /// For people or for machines. Default `text`.
    pub format: LogFormat,
}

/// How a line of the log looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Where each value of a configuration came from.
pub struct Origins(BTreeMap<String, String>);

impl Config {
    /// What holds when nothing is said, with the data folder in `cache` (the user's cache folder).
    pub fn with_cache(cache: &std::path::Path) -> Self {
        Self {
            model: Model::BuiltIn(Builtin::Small),
            listen: Listen { host: "127.0.0.1".into(), port: 8000 },
            workers: Workers::default(),
            threads: Threads::Auto,
            data_dir: cache.join("blockyard"),
            shared: None,
            drain: Span(Duration::from_secs(25)),
            tiers: Tiers::default(),
            shared_store: SharedStore::default(),
            credentials: Credentials::default(),
            master_keys: None,
            engine: worker::engine::llama::Settings::default(),
            router: router::Settings::default(),
            frontend: frontend::Settings::default(),
            admin: Admin::default(),
            log: Log::default(),
        }
    }

    /// Folders in which other processes store blocks too: the shared store and the folder of a pod.
    pub fn shared_folders(&self) -> impl Iterator<Item = &Path> {
        let store = match &self.shared {
            Some(Location::Folder(folder)) => Some(folder.as_path()),
            _ => None,
        };
        self.tiers.pod.iter().map(|pod| pod.path.as_path()).chain(store)
    }
}

impl Default for SharedStore {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: None,
            request_timeout: Span(Duration::from_secs(10)),
            budget: None,
            age_max: None,
            collect_every: Span(Duration::from_hours(1)),
            gc_grace: Span(kvbm::object::gc::Policy::default().grace),
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { filter: "info".into(), format: LogFormat::Text }
    }
}

#[cfg(test)]
mod tests;
