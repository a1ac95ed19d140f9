//! The configuration: one tree, in which each crate owns its section, and one loader.
//!
//! ```text
//!   defaults  <  OTEL_…  <  --config FILE  <  BLOCKYARD_SECTION__KEY  <  flags, --set section.key=value
//! ```
//! Only the loader reads the environment. Each value is parsed by its type. An unknown key or an impossible value is an
//! error that names the key, the value, its origin, and what would be right.

mod alias;
mod check;
mod cluster;
mod error;
mod file;
mod http_url;
mod load;
mod print;
mod suggest;
mod traces;
mod upstream;
mod values;

pub use check::check_log_filter;
pub use cluster::{Cluster, ClusterTls, Nats};
pub use error::{Error, Errors};
pub use load::{Flag, Purpose, Sources};
pub use print::{as_json, as_toml, changes, defaults};
pub use traces::{GRPC_PORT_FIX, OtelVariables, Tracing};
pub use units::{ByteSize, HumanDuration};
pub use values::{Budget, Invalid, Listen, Model, Threads, Workers};

use kvbm::crypt::KeySource;
use kvbm::object::{Credentials, Endpoint, StoreLocation};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;
use worker::llama::Builtin;

/// The whole configuration.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model: a Hugging Face folder, or `tiny`, `small`, `bench`. Default `small`: it answers at once on any
    /// machine, without a download.
    pub model: Model,
    /// Servers with OpenAI's API that this process is the gateway of. Default none: the native engine serves `model`.
    /// With upstreams no model is loaded, and `model`, `workers`, `tiers` and `engine` have no effect. A frontend
    /// routes to them beside workers.
    pub upstreams: Vec<Upstream>,
    /// Further names of models: each stands for one model of the upstreams, or for several by weight; in a frontend
    /// also for models of workers. Default none.
    pub aliases: BTreeMap<String, Alias>,
    /// Folders with the tokenizer and the chat template of models of upstreams, by model. Default none: the servers are
    /// asked for the tokens of prompts.
    pub tokenizers: BTreeMap<String, PathBuf>,
    /// Address and port of the API. Default `127.0.0.1:8000`: other machines cannot reach a server that asks for no
    /// key.
    pub listen: Listen,
    /// How many workers of which role. Default `prefill:1,decode:2`.
    pub workers: Workers,
    /// Compute threads of all workers together. Default `auto`: as many as the machine runs at the same time.
    pub threads: Threads,
    /// Folder of the built-in models and the G3 log. Default `blockyard` in the user's cache folder.
    pub data_dir: PathBuf,
    /// Time from the signal to stop until the process ends: requests finish and blocks are written. Default: 25 s,
    /// because orchestrators kill a process after 30 s; more if `frontend.max_request_time` allows longer requests.
    pub shutdown_timeout: Option<HumanDuration>,
    /// The KV cache tiers.
    pub tiers: Tiers,
    /// Cloud credentials from the environment. They are no key of the configuration and are never printed.
    #[serde(skip)]
    pub credentials: Credentials,
    /// The master keys from the environment, when `tiers.encryption.keys.env` names a variable. Never printed.
    #[serde(skip)]
    pub master_keys: Option<Secret>,
    /// Batching of the native engine.
    pub engine: worker::llama::Settings,
    /// Placement of requests on workers.
    pub router: router::Settings,
    /// Limits of the HTTP API.
    pub frontend: frontend::Settings,
    /// The admin API.
    pub admin: Admin,
    /// Requests between frontends and workers in separate processes.
    pub cluster: Cluster,
    /// The connection to NATS of frontends and workers in separate processes.
    pub nats: Nats,
    /// The log.
    pub log: Log,
    /// Export of spans of requests.
    pub tracing: Tracing,
}

/// A server with OpenAI's API: a URL, or a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Upstream {
    /// The URL of the server, without `/v1`.
    pub url: http::Uri,
    /// Whether a host name stands for one server or for several. Default `all`.
    pub resolve: Resolve,
    /// A file that contains the API key for the server. Default none: it asks for no key.
    pub api_key_file: Option<PathBuf>,
    /// A file with the certificates of the authorities that may sign the server's. Default none: those of the operating
    /// system.
    pub ca_file: Option<PathBuf>,
    /// Whether the server's KV events are followed. Default `auto`.
    pub kv_events: KvEvents,
    /// Whether the server keeps tenants apart. Default `auto`.
    pub cache_salt: CacheSalt,
    /// Which endpoints the server has. Default `auto`.
    pub role: UpstreamRole,
    /// Tokens per KV block. Default: what the server says, else 16.
    pub block_size: Option<NonZero<u32>>,
    /// The version of HTTP. Default `auto`.
    pub http: HttpVersion,
    /// Maximum number of requests that run on the server at the same time through this process. Default 4096.
    pub max_requests: Option<NonZero<u32>>,
    /// Whether greedy streams of the server, a vLLM, are continued on another server if it fails. Default `false`: the
    /// server sends the ids of all tokens then, and each chunk is read.
    pub continue_streams: bool,
}

/// The version of HTTP that a server speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HttpVersion {
    /// HTTP/2 if TLS negotiates it, else HTTP/1.1.
    #[default]
    Auto,
    /// HTTP/2 without TLS, by prior knowledge.
    H2c,
}

/// Whether a server gets a `cache_salt`, so that requests of different tenants share no blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheSalt {
    /// If its API description has the field. A server without it is not used where requests have tenants.
    #[default]
    Auto,
    /// It knows the field, although its API description does not say so.
    On,
    /// It gets none: tenants share its cache.
    Off,
}

/// Which endpoints a server has, where servers of one model have different ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpstreamRole {
    /// Those in its API description; all if it has none.
    #[default]
    Auto,
    /// All, whatever its API description says.
    Both,
    /// Those that generate text, such as chat and completions, and not those of pooling models.
    Generate,
    /// Those of pooling models, such as embeddings, score and rerank, and not those that generate text.
    Pooling,
}

/// What a further name of a model stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Alias {
    /// The models, at least one with a weight above zero.
    pub deployments: Vec<Deployment>,
}

/// A model that gets a share of the requests for an alias.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deployment {
    /// The model, as a server lists it.
    pub model: String,
    /// Its share, relative to the other weights. Default 1. 0: it gets no requests.
    #[serde(default = "Deployment::default_weight")]
    pub weight: u32,
}

impl Deployment {
    const fn default_weight() -> u32 {
        1
    }
}

/// Which servers a host name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolve {
    /// Each address is a server. The default: only so is it known which server behind a name has
    /// which blocks. A name with one address is one server either way.
    #[default]
    All,
    /// All addresses lead to the same server, or to a load balancer.
    One,
}

/// Whether the KV events of a server are followed, and where it publishes them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum KvEvents {
    /// They are not: the cache is estimated from the prompts that are sent to the server.
    Off,
    /// Where the server says, if it publishes any.
    #[default]
    Auto,
    /// At the sockets of these publishers: that of the server, or those of its data-parallel ranks in their order. Then
    /// requests name their rank.
    At(Vec<KvSockets>),
}

/// The sockets of a publisher of KV events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvSockets {
    /// Sends the events.
    pub live: ::upstream::kv_events::Endpoint,
    /// Sends lost events again. Default none: then lost events make the cache of the server unknown.
    pub replay: Option<::upstream::kv_events::Endpoint>,
}

/// The admin API: it shows the state of a running process and reloads its configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// Address and port of the admin API. Default none, because it asks for no key.
    pub listen: Option<Listen>,
}

/// The KV cache tiers: how much each may take, and where it is.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tiers {
    /// Device memory of each worker: the KV blocks that the engine computes on.
    pub g1: Budget,
    /// Host memory of each worker.
    pub g2: Budget,
    /// The SSD log of the process: size in each of its folders that has no `capacity` of its own.
    pub g3: Budget,
    /// Free space that the SSD log leaves on each of its disks. With less free space it shrinks, down to a quarter of
    /// its size. Default `auto`: 1 GiB, at most a twentieth of the disk. `off`: none.
    pub g3_min_free: Budget,
    /// Folders of the SSD log, one per device. Default none: `g3` in the data folder.
    pub g3_paths: Vec<DiskPath>,
    /// Shared flash: a folder between G3 and G4 that several processes share. Default none.
    pub g3_5: Option<SharedFlash>,
    /// Guaranteed and maximum share of each tenant in each tier. Default none: tenants share all of it.
    pub quotas: Vec<TenantQuota>,
    /// Lossless compression of blocks that are written below G2. Compressed blocks can always be read. Default `off`:
    /// the native engine needs the processors for computing.
    pub compression: Compression,
    /// Encryption of blocks below G2. Default none: there is no default key.
    pub encryption: Option<Encryption>,
    /// The object store that several nodes share.
    pub g4: G4,
}

/// Shared flash: a folder between G3 and G4 that several processes share.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedFlash {
    /// The folder, the same for all processes.
    pub path: PathBuf,
    /// Maximum size. The least recently used blocks are removed first. There is no default, because others use the disk
    /// too.
    pub capacity: ByteSize,
    /// Time after the last use after which a block is removed. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_age: Option<HumanDuration>,
}

/// The guaranteed size and the limit of one tenant in each tier. G1 and G2: in each worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantQuota {
    /// The tenant, as in the header that `frontend.tenant_header` names; empty for requests without it.
    pub tenant: String,
    /// Size in G1 that is not given to other tenants. Default 0.
    #[serde(default)]
    pub g1_guaranteed: ByteSize,
    /// Maximum size in G1. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g1_limit: Option<ByteSize>,
    /// Size in G2 that is not given to other tenants. Default 0.
    #[serde(default)]
    pub g2_guaranteed: ByteSize,
    /// Maximum size in G2. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g2_limit: Option<ByteSize>,
    /// Size in G3 that is not given to other tenants. Default 0.
    #[serde(default)]
    pub g3_guaranteed: ByteSize,
    /// Maximum size in G3, in whole segments. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g3_limit: Option<ByteSize>,
    /// Size in G3.5 that is not given to other tenants. Default 0.
    #[serde(default)]
    pub g3_5_guaranteed: ByteSize,
    /// Maximum size in G3.5. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g3_5_limit: Option<ByteSize>,
    /// Size of `tiers.g4.capacity` that is not given to other tenants. Default 0.
    #[serde(default)]
    pub g4_guaranteed: ByteSize,
    /// Maximum size in G4. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub g4_limit: Option<ByteSize>,
    /// Share of the bandwidth of the tiers below memory, relative to other tenants that move blocks at the same time.
    /// Default 1.
    #[serde(default = "TenantQuota::one")]
    pub weight: f64,
}

impl TenantQuota {
    /// A tenant without guarantees and limits.
    pub fn of(tenant: impl Into<String>) -> Self {
        Self {
            tenant: tenant.into(),
            g1_guaranteed: ByteSize(0),
            g1_limit: None,
            g2_guaranteed: ByteSize(0),
            g2_limit: None,
            g3_guaranteed: ByteSize(0),
            g3_limit: None,
            g3_5_guaranteed: ByteSize(0),
            g3_5_limit: None,
            g4_guaranteed: ByteSize(0),
            g4_limit: None,
            weight: Self::one(),
        }
    }

    const fn one() -> f64 {
        1.0
    }
}

/// Lossless compression of blocks below G2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Blocks are stored as the engine wrote them.
    #[default]
    Off,
    /// Blocks are compressed where that makes onboarding faster, as measured on the device and the codec.
    Auto,
    /// Blocks are compressed wherever that makes them smaller.
    Always,
}

/// Blocks below G2 are encrypted, each cache domain's with its own data key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Encryption {
    /// Source of the master keys, which wrap the data keys: `{ file = "…" }`, `{ env = "NAME" }` or `{ command = ["…"]
    /// }`.
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
    /// Size of the log in this folder. Default `auto`: as `tiers.g3`.
    #[serde(default)]
    pub capacity: Budget,
}

/// G4: the object store, or the folder, that several nodes share.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct G4 {
    /// The store: `s3://bucket/prefix`, `az://…`, `gs://…`, or a folder. Default none: there is no G4.
    pub url: Option<StoreLocation>,
    /// The server, when it is not the cloud's own. Default none.
    pub endpoint: Option<Endpoint>,
    /// Region of an S3 bucket. Default: `AWS_REGION`, or S3's own default, `us-east-1`.
    pub region: Option<String>,
    /// Time after which one request fails. Default 10 s: computing is faster than loading 4 MiB in that time.
    pub request_timeout: HumanDuration,
    /// Maximum size, including objects that are marked for deletion. `serve` writes nothing beyond it, and removes the
    /// least recently used objects to keep an eighth of it free. Default: no limit.
    pub capacity: Option<ByteSize>,
    /// Time after the last use after which an object is removed. Default: no limit.
    pub max_age: Option<HumanDuration>,
    /// Interval of garbage collection by one of all processes with such a limit. Default 1 h: each run reads all
    /// manifests.
    pub gc_interval: HumanDuration,
    /// Time from marking an object to deleting it. Default 10 min: running processes know of the mark after seconds,
    /// and a process that was suspended for minutes can still read the objects that it knows.
    pub gc_grace: HumanDuration,
}

/// The log, on standard error.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Filter directives of `tracing`. Default `info`.
    pub filter: String,
    /// Format of a line: `text` or `json`. Default `text`.
    pub format: LogFormat,
}

/// Format of a line of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// The origin of each value of a configuration.
pub struct Origins(BTreeMap<String, String>);

impl Config {
    /// The defaults, with the data folder in `cache` (the user's cache folder).
    pub fn with_cache(cache: &std::path::Path) -> Self {
        Self {
            model: Model::BuiltIn(Builtin::Small),
            upstreams: Vec::new(),
            aliases: BTreeMap::new(),
            tokenizers: BTreeMap::new(),
            listen: Listen { host: "127.0.0.1".into(), port: 8000 },
            workers: Workers::default(),
            threads: Threads::Auto,
            data_dir: cache.join("blockyard"),
            shutdown_timeout: None,
            tiers: Tiers::default(),
            credentials: Credentials::default(),
            master_keys: None,
            engine: worker::llama::Settings::default(),
            router: router::Settings::default(),
            frontend: frontend::Settings::default(),
            admin: Admin::default(),
            cluster: Cluster::default(),
            nats: Nats::default(),
            log: Log::default(),
            tracing: Tracing::default(),
        }
    }

    /// Folders in which other processes store blocks too: G4, if it is a folder, and shared flash.
    pub fn shared_folders(&self) -> impl Iterator<Item = &Path> {
        let store = match &self.tiers.g4.url {
            Some(StoreLocation::Folder(folder)) => Some(folder.as_path()),
            _ => None,
        };
        self.tiers.g3_5.iter().map(|flash| flash.path.as_path()).chain(store)
    }
}

impl Default for G4 {
    fn default() -> Self {
        Self {
            url: None,
            endpoint: None,
            region: None,
            request_timeout: HumanDuration::secs(10),
            capacity: None,
            max_age: None,
            gc_interval: HumanDuration(Duration::from_hours(1)),
            gc_grace: HumanDuration(kvbm::object::gc::Policy::default().grace),
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
