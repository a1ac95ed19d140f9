//! The text that `serve`, `frontend` and `worker` print when they are ready: for people, or as one line of JSON.

use crate::config::{ByteSize, SharedFlash};
use crate::node::sizes::Sizes;
use kvbm::object::StoreLocation;
use serde_json::{Value, json};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{self, PathBuf};
use std::sync::Arc;
use worker::engine::ModelCard;
use worker::plane::{Role, WorkerId};

/// The facts about a node that the banner shows.
#[derive(Clone, Debug)]
pub struct Banner {
    /// Address of the OpenAI-compatible API; of workers, the address for requests of frontends.
    pub address: SocketAddr,
    /// Whether the API speaks HTTPS.
    pub has_tls: bool,
    /// What the example says for the certificate of the API.
    pub certificate: ExampleCertificate,
    /// Whether requests need an API key; of workers, the secret or a client certificate.
    pub needs_key: bool,
    /// What serves.
    pub serves: Serves,
}

/// What a client on this machine must know of the certificate of the API.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ExampleCertificate {
    /// The file with which the client trusts it: that of the certificate, if it is self-signed. Whether the client
    /// trusts another authority is not known.
    pub ca_file: Option<PathBuf>,
    /// The certificate is for `localhost`, and not for the address of the API.
    pub is_for_localhost: bool,
}

impl ExampleCertificate {
    /// Of the API with these settings at an address. A file that cannot be read is an error elsewhere. Blocks.
    pub(super) fn of(settings: &frontend::Settings, address: IpAddr) -> Self {
        let Some(chain) = frontend::tls_certificate(settings).ok().flatten() else { return Self::default() };
        let file = settings.tls_cert_file.as_ref().filter(|_| chain.is_self_signed());
        Self {
            // The client may run in another folder.
            ca_file: file.map(|file| path::absolute(file).unwrap_or_else(|_| file.clone())),
            is_for_localhost: !chain.is_for(&address.to_string()) && chain.is_for("localhost"),
        }
    }
}

/// The warning for an API at this port that other machines can use without a key.
pub(super) fn open_to_all(port: u16) -> String {
    format!("{OPEN_TO_ALL}; {}", fix_of_open_to_all(port))
}

/// What is wrong with an API that other machines can use without a key.
pub(crate) const OPEN_TO_ALL: &str =
    "every machine that reaches this address can use the API, because it asks for no key";

/// What to change about an API at this port that other machines can use without a key.
pub(crate) fn fix_of_open_to_all(port: u16) -> String {
    format!(
        "create one with `blockyard key add --file keys.toml NAME` and set frontend.api_keys_file, or set \
         BLOCKYARD_API_KEY, or listen on this machine only: --listen 127.0.0.1:{port}"
    )
}

/// The warnings for workers at this address: whether other machines can use them, and can read what they receive.
pub(super) fn worker_warnings(address: SocketAddr, needs_secret: bool, has_tls: bool) -> Vec<String> {
    if address.ip().is_loopback() {
        return Vec::new();
    }
    let open = (!needs_secret).then(|| workers_open_to_all(address.port()));
    open.into_iter().chain((!has_tls).then(|| READABLE.to_owned())).collect()
}

/// The warning for workers at this port that other machines can use without a secret.
fn workers_open_to_all(port: u16) -> String {
    format!(
        "every machine that reaches this address can use the workers, because they require neither a secret nor a \
         client certificate; set cluster.secret_file to a file with the output of `openssl rand -hex 32`, the same for \
         all frontends and workers, or cluster.tls.client_ca_file, or listen on this machine only: --listen \
         127.0.0.1:{port}"
    )
}

/// The warning for workers that other machines reach without TLS.
const READABLE: &str = "requests of other machines arrive without TLS: prompts, keys of cache domains, and the MACs \
    with which this worker accepts requests can be read on the network; set cluster.tls.cert_file and \
    cluster.tls.key_file, or use a network that you trust";

/// What serves the requests of a node.
#[derive(Clone, Debug)]
pub enum Serves {
    /// The native engine.
    Native(Box<NativeFacts>),
    /// Servers of other processes.
    Upstreams(Vec<UpstreamFacts>),
    /// Workers of other processes, found over NATS.
    Cluster(ClusterFacts),
    /// Workers of this process, for frontends in other processes.
    Workers(Box<WorkerFacts>),
}

/// Where a frontend finds workers, and its upstreams.
#[derive(Clone, Debug)]
pub struct ClusterFacts {
    /// URLs of the NATS servers.
    pub nats: Vec<String>,
    /// The first tokens of the subjects.
    pub prefix: String,
    /// The models of the workers and upstreams that were found; empty if there are none yet.
    pub models: Vec<String>,
    /// The servers of its configuration.
    pub upstreams: Vec<UpstreamFacts>,
}

/// The workers of a process, and where frontends find them.
#[derive(Clone, Debug)]
pub struct WorkerFacts {
    /// The engine and its tiers.
    pub native: NativeFacts,
    /// The id of each worker.
    pub ids: Vec<WorkerId>,
    /// The URL at which frontends reach them.
    pub url: String,
    /// URLs of the NATS servers.
    pub nats: Vec<String>,
    /// The first tokens of the subjects.
    pub prefix: String,
}

/// A server behind the gateway.
#[derive(Clone, Debug)]
pub struct UpstreamFacts {
    /// Its URL.
    pub url: String,
    /// Number of servers that have answered: of a name with several addresses one for each.
    pub servers: usize,
    /// Their models; empty if none can be used yet.
    pub models: Vec<String>,
}

/// The native engine and its tiers.
#[derive(Clone, Debug)]
pub struct NativeFacts {
    /// The served model.
    pub model: Arc<ModelCard>,
    /// The role of each worker.
    pub roles: Vec<Role>,
    /// Number of compute threads of all workers together.
    pub threads: usize,
    /// Sizes of the tiers, in bytes.
    pub sizes: Sizes,
    /// Folders of the G3 log.
    pub disks: Vec<PathBuf>,
    /// Folder of built-in models and of G3.
    pub data_dir: PathBuf,
    /// G3.5, if it is configured.
    pub g3_5: Option<SharedFlash>,
    /// The store of G4, if it is configured.
    pub g4: Option<StoreLocation>,
}

impl Banner {
    /// As one JSON object.
    pub fn as_json(&self) -> Value {
        let mut object = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "address": self.address,
            "url": self.url(),
            "needs_key": self.needs_key,
        });
        let facts = match &self.serves {
            Serves::Native(native) => native.as_json(),
            Serves::Upstreams(upstreams) => json!({ "upstreams": upstreams_as_json(upstreams) }),
            Serves::Cluster(ClusterFacts { nats, prefix, models, upstreams }) => json!({
                "nats": { "servers": nats, "prefix": prefix },
                "models": models,
                "upstreams": upstreams_as_json(upstreams),
            }),
            Serves::Workers(facts) => {
                let WorkerFacts { native, ids, url, nats, prefix } = &**facts;
                let mut json = native.as_json();
                json["nats"] = json!({ "servers": nats, "prefix": prefix });
                json["advertised"] = url.as_str().into();
                json["worker_ids"] = json!(ids);
                json
            }
        };
        let facts = facts.as_object().cloned().unwrap_or_default();
        object.as_object_mut().expect("it was made as an object").extend(facts);
        object
    }

    /// The URL for clients on this machine. An unspecified address such as 0.0.0.0 is no address to connect to.
    fn url(&self) -> String {
        let scheme = if self.has_tls { "https" } else { "http" };
        match self.address {
            at if at.ip().is_unspecified() || (at.ip().is_loopback() && self.certificate.is_for_localhost) => {
                format!("{scheme}://localhost:{}", at.port())
            }
            at => format!("{scheme}://{at}"),
        }
    }

    fn write_address(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Serves::Workers(workers) = &self.serves {
            writeln!(f, "  address  {}, for frontends", workers.url)?;
            let mut warnings = worker_warnings(self.address, self.needs_key, self.has_tls).into_iter();
            return warnings.try_for_each(|warning| writeln!(f, "           WARNING: {warning}"));
        }
        writeln!(f, "  address  {}", self.url())?;
        if !self.needs_key && !self.address.ip().is_loopback() {
            writeln!(f, "           WARNING: {}", open_to_all(self.address.port()))?;
        }
        Ok(())
    }

    /// The model of the example request.
    fn example(&self) -> &str {
        match &self.serves {
            Serves::Native(native) => &native.model.id,
            Serves::Upstreams(upstreams) => {
                upstreams.iter().find_map(|upstream| upstream.models.first()).map_or("MODEL", |model| model)
            }
            Serves::Cluster(cluster) => cluster.models.first().map_or("MODEL", |model| model),
            Serves::Workers(workers) => &workers.native.model.id,
        }
    }

    fn write_native(&self, native: &NativeFacts, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  model    {}, context of {} tokens", native.model.id, native.model.context)?;
        if native.model.random_weights {
            writeln!(
                f,
                "           its weights are random and its text is meaningless; load a real model with --model DIR"
            )?;
        }
        self.write_address(f)?;
        writeln!(f, "  workers  {}", native.workers())?;
        writeln!(f, "  tiers    {}", native.tiers())
    }
}

impl fmt::Display for UpstreamFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, servers, models } = self;
        let models = if models.is_empty() { "cannot be used yet, see the log".to_owned() } else { models.join(", ") };
        let servers = if *servers > 1 { format!(" ({servers} servers)") } else { String::new() };
        write!(f, "  upstream {url}: {models}{servers}")
    }
}

impl NativeFacts {
    fn as_json(&self) -> Value {
        let Self { model, sizes, disks, data_dir, g3_5, g4, threads, roles } = self;
        json!({
            "model": model.id,
            "random_weights": model.random_weights,
            "max_model_len": model.context,
            "workers": roles,
            "threads": threads,
            "tiers": {
                "g1": sizes.g1,
                "g2": sizes.g2,
                "g3": sizes.g3,
                "g3_5": g3_5.as_ref().map(|flash| flash.capacity.0),
                "g4": g4,
            },
            "g3_paths": disks,
            "data_dir": data_dir,
        })
    }

    fn workers(&self) -> String {
        let names = [(Role::Prefill, "prefill"), (Role::Decode, "decode"), (Role::Both, "prefill and decode in one")];
        let count = |wanted| self.roles.iter().filter(|role| **role == wanted).count();
        let parts: Vec<_> = names
            .into_iter()
            .map(|(role, name)| (count(role), name))
            .filter(|(count, _)| *count > 0)
            .map(|(count, name)| format!("{count} {name}"))
            .collect();
        let plural = if self.threads == 1 { "" } else { "s" };
        format!("{}; one copy of the weights, {} thread{plural}", parts.join(", "), self.threads)
    }

    fn tiers(&self) -> String {
        let size = |bytes| ByteSize(bytes).about();
        let Self { sizes, disks, g3_5, g4, .. } = self;
        let g1 = format!("G1 {}", size(sizes.g1));
        let g2 = sizes.g2.map_or("G2 off".into(), |bytes| format!("G2 {}", size(bytes)));
        let g3 = sizes.g3.map_or("G3 off".into(), |bytes| format!("G3 {} in {}", size(bytes), folders(disks)));
        let g4 = g4.as_ref().map_or("G4 off (--g4 URL)".into(), |store| format!("G4 in {store}"));
        let g3_5 = g3_5.as_ref();
        let g3_5 = g3_5.map(|flash| format!("G3.5 {} in {}, ", size(flash.capacity.0), flash.path.display()));
        format!("{g1} and {g2} per worker, {g3}, {}{g4}", g3_5.unwrap_or_default())
    }
}

impl fmt::Display for Banner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "blockyard {}", env!("CARGO_PKG_VERSION"))?;
        match &self.serves {
            Serves::Native(native) => self.write_native(native, f)?,
            Serves::Upstreams(upstreams) => {
                self.write_address(f)?;
                upstreams.iter().try_for_each(|upstream| writeln!(f, "{upstream}"))?;
            }
            Serves::Cluster(ClusterFacts { nats, prefix, models, upstreams }) => {
                self.write_address(f)?;
                writeln!(f, "  nats     {}, prefix {prefix}", nats.join(", "))?;
                upstreams.iter().try_for_each(|upstream| writeln!(f, "{upstream}"))?;
                let none = "none yet; start workers with `blockyard worker`".to_owned();
                writeln!(f, "  models   {}", if models.is_empty() { none } else { models.join(", ") })?;
            }
            Serves::Workers(facts) => {
                self.write_native(&facts.native, f)?;
                let ids = facts.ids.iter().map(WorkerId::to_string).collect::<Vec<_>>().join(", ");
                writeln!(f, "  nats     {}, prefix {}", facts.nats.join(", "), facts.prefix)?;
                return writeln!(f, "  ids      {ids}");
            }
        }
        writeln!(f, "\ntry it:")?;
        let body = json!({"model": self.example(), "messages": [{"role": "user", "content": "hello"}], "stream": true});
        let body = quoted(&body.to_string());
        let ca_file = self.certificate.ca_file.as_ref();
        let ca_file = ca_file.map_or(String::new(), |file| format!(" --cacert {}", quoted(&file.to_string_lossy())));
        let key = if self.needs_key { " -H \"authorization: Bearer $KEY\"" } else { "" };
        let url = self.url();
        writeln!(f, "  curl{ca_file} {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {body}")
    }
}

/// An argument for the shell. A single quote within it must not end it.
fn quoted(argument: &str) -> String {
    format!("'{}'", argument.replace('\'', r"'\''"))
}

fn upstreams_as_json(upstreams: &[UpstreamFacts]) -> Vec<Value> {
    let upstream = |one: &UpstreamFacts| json!({ "url": one.url, "servers": one.servers, "models": one.models });
    upstreams.iter().map(upstream).collect()
}

fn folders(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn native() -> NativeFacts {
        let model = ModelCard {
            identity: "x".into(),
            vocabulary: 10,
            random_weights: true,
            ..ModelCard::new("it's", 4096, 16)
        };
        NativeFacts {
            model: Arc::new(model),
            roles: vec![Role::Prefill, Role::Decode, Role::Decode],
            threads: 2,
            sizes: Sizes { g1: 1 << 30, g2: None, g3: Some(10 << 30) },
            disks: vec!["/data/g3".into()],
            data_dir: "/data".into(),
            g3_5: None,
            g4: None,
        }
    }

    fn banner(address: &str) -> Banner {
        Banner {
            address: address.parse().unwrap(),
            has_tls: false,
            certificate: ExampleCertificate::default(),
            needs_key: false,
            serves: Serves::Native(Box::new(native())),
        }
    }

    #[test]
    fn the_text_names_the_parts_and_a_command_to_try() {
        let text = banner("0.0.0.0:9000").to_string();
        for part in [
            "--model DIR",
            "http://localhost:9000",
            "1 prefill, 2 decode",
            "G1 1.0 GiB and G2 off per worker, G3 10.0 GiB in /data/g3, G4 off",
            r#""model":"it'\''s""#,
        ] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
        assert!(banner("[::1]:80").to_string().contains("http://[::1]:80"));
        let tls = Banner { has_tls: true, ..banner("0.0.0.0:80") }.to_string();
        assert!(tls.contains("address  https://localhost:80") && tls.contains("curl https://localhost:80/"), "{tls}");
    }

    #[test]
    fn the_command_trusts_a_certificate_that_is_self_signed() {
        let settings = |file: &str| frontend::Settings {
            tls_cert_file: Some(file.into()),
            tls_key_file: Some("unread".into()),
            ..frontend::Settings::default()
        };
        let command = |address: &str, file: &str| {
            let banner = banner(address);
            let certificate = ExampleCertificate::of(&settings(file), banner.address.ip());
            let text = Banner { has_tls: true, certificate, ..banner }.to_string();
            text.lines().last().unwrap().split("/v1/").next().unwrap().trim().to_owned()
        };
        let file = "frontend/tests/fixtures/tls/one.pem";
        let absolute = path::absolute(file).unwrap();
        let expected = format!("curl --cacert '{}' https://localhost:80", absolute.display());
        for address in ["127.0.0.1:80", "[::1]:80", "0.0.0.0:80"] {
            assert_eq!(command(address, file), expected);
        }
        let other = expected.replace("localhost", "192.168.1.2");
        assert_eq!(command("192.168.1.2:80", file), other, "localhost does not reach this address");
        assert_eq!(command("127.0.0.1:80", "no.pem"), "curl https://127.0.0.1:80");
    }

    #[test]
    fn an_address_open_to_other_machines_is_warned_about() {
        let text = |address, needs_key| Banner { needs_key, ..banner(address) }.to_string();
        for address in ["0.0.0.0:80", "[::]:80", "192.168.1.2:80"] {
            let warning = text(address, false);
            assert!(warning.contains("WARNING: every machine"), "{address}");
            assert!(warning.contains("on this machine only: --listen 127.0.0.1:80\n"), "{warning}");
            assert!(!text(address, true).contains("WARNING"), "{address}");
        }
        assert!(!text("127.0.0.1:80", false).contains("WARNING"));
        assert!(text("127.0.0.1:80", true).contains(r#"-H "authorization: Bearer $KEY""#));
    }

    #[test]
    fn workers_that_other_machines_can_use_or_read_are_warned_about() {
        let text = |address, needs_key, has_tls| {
            let facts = WorkerFacts {
                native: native(),
                ids: vec![WorkerId(7)],
                url: "http://host:8100".into(),
                nats: vec!["nats://n:4222".into()],
                prefix: "p".into(),
            };
            Banner { needs_key, has_tls, serves: Serves::Workers(Box::new(facts)), ..banner(address) }.to_string()
        };
        let (open, readable) =
            ("WARNING: every machine that reaches this address", "WARNING: requests of other machines");
        for (needs_key, has_tls) in [(false, false), (false, true), (true, false), (true, true)] {
            let of_all = text("0.0.0.0:8100", needs_key, has_tls);
            assert_eq!(of_all.contains(open), !needs_key, "{of_all}");
            assert_eq!(of_all.contains(readable), !has_tls, "{of_all}");
            assert!(of_all.contains("address  http://host:8100, for frontends\n"), "{of_all}");
            let of_this_machine = text("127.0.0.1:8100", needs_key, has_tls);
            assert!(!of_this_machine.contains("WARNING"), "{of_this_machine}");
        }
        assert!(text("10.0.0.7:8100", false, true).contains("cluster.secret_file"), "it says what to change");
    }

    #[test]
    fn the_json_has_the_same_facts() {
        let json = banner("127.0.0.1:8000").as_json();
        assert_eq!(json["url"], "http://127.0.0.1:8000");
        assert_eq!(json["workers"], json!(["prefill", "decode", "decode"]));
        assert_eq!(json["tiers"]["g2"], Value::Null);
    }

    #[test]
    fn upstreams_are_listed_with_what_they_serve() {
        let facts = |url: &str, servers, models: &[&str]| UpstreamFacts {
            url: url.to_owned(),
            servers,
            models: models.iter().map(|model| (*model).to_owned()).collect(),
        };
        let upstreams = vec![facts("http://a:8000/", 0, &[]), facts("http://b:8000/", 2, &["org/m", "org/m-lora"])];
        let address = "127.0.0.1:80".parse().unwrap();
        let nats = vec!["nats://n:4222".to_owned()];
        let models = vec!["org/m".to_owned(), "tiny".to_owned()];
        let cluster = ClusterFacts { nats, prefix: "p".into(), models, upstreams: upstreams.clone() };
        for serves in [Serves::Upstreams(upstreams), Serves::Cluster(cluster)] {
            let is_cluster = matches!(serves, Serves::Cluster(_));
            let banner = Banner { address, serves, ..banner("127.0.0.1:80") };
            let text = banner.to_string();
            for part in [
                "http://a:8000/: cannot be used yet, see the log",
                "http://b:8000/: org/m, org/m-lora (2 servers)",
                r#""model":"org/m""#,
            ] {
                assert!(text.contains(part), "`{part}` is not in:\n{text}");
            }
            assert_eq!(text.contains("nats     nats://n:4222, prefix p"), is_cluster, "{text}");
            assert_eq!(text.contains("models   org/m, tiny"), is_cluster, "{text}");
            assert_eq!(banner.as_json()["upstreams"][1]["models"], json!(["org/m", "org/m-lora"]));
        }
    }
}
