//! Checks of this machine: configuration, ports, memory, and for the native engine model, disks and stores.

use super::findings::{self, Check, Findings};
use crate::config::{ByteSize, Config, Error, Errors, Listen, Purpose};
use crate::node::sizes::{ShortContext, Shortage};
use crate::node::{self, NativeSizes, PortError, native_sizes, preflight};
use crate::process::machine::{self, Machine, Space};
use futures::future::join_all;
use http::Uri;
use kvbm::object::StoreLocation;
use rustix::fs::Access;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;
use upstream::ask::{self, AnswerLimits};
use upstream::relay::client::{Client, Settings};

/// For the answer of the program that has the port. Blockyard's own has 20 bytes.
const LIVE: AnswerLimits = AnswerLimits { bytes: 4096, time: Duration::from_secs(2) };
/// Time for the check of a store: four requests.
const STORE_TIMEOUT: Duration = Duration::from_secs(15);

/// The checks of a configuration that cannot be used.
pub(super) fn unusable(errors: &Errors) -> Vec<Check> {
    let mut findings = Findings::of("configuration");
    for error in &errors.0 {
        let fix = match error {
            Error::File { .. } => "correct the path of --config",
            _ => "change it there; `blockyard serve --print-config` lists all keys and their origins",
        };
        findings.problem("configuration", error.to_string(), fix);
    }
    findings.into_checks()
}

/// The checks of this machine.
pub(super) async fn examine(config: &Config) -> Vec<Check> {
    let mut findings = Findings::of("this machine");
    let (checked, native) = (config.clone(), config.upstreams.is_empty());
    // Reads files of the model and asks the system.
    let blocking = move || {
        let refused: Vec<String> =
            preflight(&checked, Purpose::Serve).err().iter().flat_map(node::Refused::reasons).collect();
        let sizes = if native && refused.is_empty() { native_sizes(&checked).ok() } else { None };
        (refused, sizes)
    };
    let (refused, sizes) = tokio::task::spawn_blocking(blocking).await.expect("the checks do not panic");
    let is_usable = refused.is_empty();
    for reason in refused {
        findings.problem("configuration", reason, "change the key that is named; `serve` refuses to start");
    }
    if is_usable {
        let serves = match config.upstreams.len() {
            0 => format!("the native engine serves {}", config.model),
            servers => format!("the gateway of other servers; upstreams: {servers}"),
        };
        findings.ok("configuration", serves);
    }
    // That it cannot be read is a problem of the configuration.
    if let Ok(Some(expiry)) = frontend::check_tls(&config.frontend) {
        let fix = "renew it, and write it to frontend.tls_cert_file; a running gateway notices";
        findings::expiry("tls_certificate", &expiry, fix, &mut findings);
    }
    port(("port", "listen"), &config.listen, config.frontend.tls_cert_file.is_some(), &mut findings).await;
    if let Some(at) = &config.admin.listen {
        port(("admin_port", "admin.listen"), at, false, &mut findings).await;
    }
    if let Some(sizes) = sizes {
        tiers(config, &sizes, &mut findings).await;
    } else if !config.upstreams.is_empty() {
        index_memory(config.router.index_memory, Machine::detect().memory, &mut findings);
    }
    findings.into_checks()
}

/// Whether the port of a key can be used. A running gateway may have it: it is what is checked then.
async fn port((check, key): (&'static str, &str), at: &Listen, has_tls: bool, findings: &mut Findings) {
    if at.port == 0 {
        findings.ok(check, format!("{at}: the system chooses a port"));
        return;
    }
    match node::bind(at, &format!("--set {key}=")).await {
        Ok(_) => findings.ok(check, format!("{at} is free")),
        Err(PortError { problem, advice }) => match running(at).await {
            Some(version) => findings.ok(check, format!("{at} is in use by a running Blockyard {version}")),
            // The certificate is that of a name, which the address need not have.
            None if has_tls => {
                let detail = format!("{problem}, which may be this gateway: with TLS it is not asked");
                findings.warning(check, detail, advice);
            }
            None => findings.problem(check, problem, advice),
        },
    }
}

/// The version of the Blockyard that answers at an address.
async fn running(at: &Listen) -> Option<String> {
    let host = match at.host.as_str() {
        "0.0.0.0" => "127.0.0.1".to_owned(),
        "::" => "[::1]".to_owned(),
        host if host.contains(':') => format!("[{host}]"),
        host => host.to_owned(),
    };
    let address: Uri = format!("http://{host}:{}", at.port).parse().ok()?;
    let client = Client::new(&address, &Settings::default()).ok()?;
    let json = async |path| {
        let answer = ask::get(&client, None, path, LIVE).await.ok()?;
        serde_json::from_slice::<serde_json::Value>(&answer.body).ok()
    };
    let is_live = json("/live").await?["status"] == "ok";
    let version = json("/version").await?["version"].as_str().map(str::to_owned);
    version.filter(|_| is_live)
}

/// The index is all that the gateway of other servers keeps.
fn index_memory(limit: ByteSize, available: Option<u64>, findings: &mut Findings) {
    let Some(available) = available else { return };
    let detail =
        format!("the index takes at most {}, and {} are available", limit.about(), ByteSize(available).about());
    if limit.0 > available {
        findings.warning("memory", detail, "set a smaller limit: --set router.index_memory=SIZE");
    } else {
        findings.ok("memory", detail);
    }
}

async fn tiers(config: &Config, native: &NativeSizes, findings: &mut Findings) {
    let NativeSizes { needs, sizes, disks, machine } = native;
    let size = |bytes: u64| ByteSize(bytes).about();
    let workers = config.workers.count() as u64;
    findings.ok("model", format!("{}: weights of {}", config.model, size(needs.weights)));
    let needed = needs.weights + workers * (sizes.g1 + sizes.g2.unwrap_or(0));
    let available = machine.memory.map_or("an unknown amount".to_owned(), size);
    let each = format!("G1 {} and G2 {} for each of {workers}", size(sizes.g1), size(sizes.g2.unwrap_or(0)));
    let memory = format!("{} of {available} available: weights, {each}", size(needed));
    match sizes.short_context(needs) {
        Some(ShortContext { detail, advice }) => findings.warning("memory", format!("{memory}; {detail}"), advice),
        None => findings.ok("memory", memory),
    }
    folder(&config.data_dir, "data_dir", findings);
    for disk in disks {
        folder(&disk.folder, "disk", findings);
        let Space { free, taken, .. } = machine::space(&disk.folder);
        match disk.shortage(&config.tiers, free, taken) {
            Some(Shortage { is_full, detail, advice }) => findings.wrong(is_full, "disk_space", detail, advice),
            None => findings.ok("disk_space", disk.detail(free)),
        }
    }
    if config.tiers.encryption.is_some() {
        findings.ok("encryption", "the master keys can be read");
    }
    let shared = [
        ("shared_flash", config.tiers.g3_5.as_ref().map(|flash| StoreLocation::Folder(flash.path.clone()))),
        ("object_store", config.tiers.g4.url.clone()),
    ];
    let stores = shared.into_iter().filter_map(|(check, location)| Some((check, location?)));
    let probed = join_all(stores.map(async |(check, location)| {
        if let StoreLocation::Folder(path) = &location
            && !path.exists()
        {
            return (check, location, None);
        }
        let access = node::access(config);
        let probe = location.probe(&access, config.tiers.g4.request_timeout.0);
        let probed = timeout(STORE_TIMEOUT, probe).await;
        let failure = match probed {
            Ok(outcome) => outcome.err().map(|error| error.to_string()),
            Err(_) => Some(format!("no answer within {} s", STORE_TIMEOUT.as_secs())),
        };
        (check, location, Some(failure))
    }));
    for (check, location, probed) in probed.await {
        match (probed, &location) {
            (Some(None), _) => findings.ok(check, format!("{location}: listed, written, read and deleted an object")),
            (None, StoreLocation::Folder(path)) => folder(path, check, findings),
            (failure, _) => {
                let failure = failure.flatten().unwrap_or_default();
                findings.problem(check, format!("{location}: {failure}"), advice(&location));
            }
        }
    }
}

fn advice(location: &StoreLocation) -> &'static str {
    match location {
        StoreLocation::Folder(_) => "give the user of this process all rights on the folder, or name another",
        StoreLocation::Cloud { cloud, .. } => cloud.advice(),
    }
}

/// Whether a folder can be written to, or made.
fn folder(path: &Path, check: &'static str, findings: &mut Findings) {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let shown = path.display();
    match rustix::fs::access(existing, Access::WRITE_OK) {
        Ok(()) if existing == path => findings.ok(check, format!("{shown} can be written to")),
        Ok(()) => findings.ok(check, format!("{shown} will be created")),
        Err(error) => findings.problem(
            check,
            format!("{shown}: {} cannot be written to: {error}", existing.display()),
            "give the user of this process the right to write there, or name another folder",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Status;

    #[test]
    fn an_index_above_the_available_memory_is_a_warning() {
        let status = |limit| {
            let mut findings = Findings::of("x");
            index_memory(ByteSize(limit), Some(1 << 30), &mut findings);
            findings.into_checks()[0].status
        };
        assert_eq!((status(1 << 29), status(1 << 31)), (Status::Ok, Status::Warning));
    }
}
