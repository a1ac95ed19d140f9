//! Checks of this machine: configuration, ports, memory, and for the native engine model, disks and stores.

use super::findings::{self, Check, Findings};
use crate::config::{ByteSize, Config, Error, Errors, GRPC_PORT_FIX, Listen, Model, Purpose};
use crate::node::banner;
use crate::node::sizes::{ShortContext, Shortage};
use crate::node::{self, NativeSizes, PortError, native_sizes, preflight};
use crate::process::machine::{self, Machine, Space};
use futures::future::join_all;
use kvbm::disk::OpenError;
use kvbm::object::StoreLocation;
use rustix::fs::Access;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// Time for the check of a store: four requests.
const STORE_TIMEOUT: Duration = Duration::from_secs(15);

/// The checks of a configuration that cannot be used.
pub(super) fn unusable(errors: &Errors) -> Vec<Check> {
    let mut findings = Findings::of("configuration");
    for error in &errors.0 {
        findings.problem("configuration", error.to_string(), change(error));
    }
    findings.into_checks()
}

/// What to change because of an error of the configuration.
fn change(error: &Error) -> String {
    const LIST: &str = "`blockyard serve --print-config` without it lists all keys";
    match error {
        Error::File { path, error } => {
            let path = path.display();
            match error.kind() {
                ErrorKind::NotFound => format!("create {path}, or correct the path of --config"),
                ErrorKind::PermissionDenied => format!("let the user of this process read {path}"),
                _ => format!("make {path} a file of UTF-8 text that can be read, or name another file: --config FILE"),
            }
        }
        Error::Syntax { path, line, .. } => format!("correct line {line} of {}: expected TOML", path.display()),
        Error::UnknownKey { key, origin, meant } => {
            let is_similar = meant.as_ref().is_some_and(|meant| meant.starts_with("did you mean"));
            let verb = if is_similar { "rename" } else { "remove" };
            format!("{verb} {key} {}; {LIST}", place(origin))
        }
        Error::Value { key, origin, .. } => format!("correct {key} {}", place(origin)),
        // The text says what is expected.
        Error::Check(text) => {
            let key = text.split(':').next().unwrap_or_default();
            format!("correct {key}; {LIST}")
        }
        Error::NoCache => "name a folder: --data-dir DIR".to_owned(),
    }
}

/// Where a value was written, after `correct KEY`.
fn place(origin: &str) -> String {
    match origin.strip_prefix("environment ") {
        Some(variable) => format!("in the environment variable {variable}, or unset it"),
        None if origin.starts_with("--") => format!("on the command line ({origin})"),
        None => format!("in {origin}"),
    }
}

/// The checks of this machine.
pub(super) async fn examine(config: &Config) -> Vec<Check> {
    let mut findings = Findings::of("this machine");
    let (checked, native) = (config.clone(), config.upstreams.is_empty());
    // Reads files of the model and asks the system.
    let blocking = move || {
        let refused: Vec<(String, String)> =
            preflight(&checked, Purpose::Serve).err().iter().flat_map(node::Refused::reasons).collect();
        let sizes = if native && refused.is_empty() { native_sizes(&checked).ok() } else { None };
        (refused, sizes)
    };
    let (refused, sizes) = tokio::task::spawn_blocking(blocking).await.expect("the checks do not panic");
    let is_usable = refused.is_empty();
    for (reason, fix) in refused {
        findings.problem("configuration", reason, fix);
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
    let has_tls = config.frontend.tls_cert_file.is_some();
    let at_port = port(("port", "listen"), &config.listen, has_tls, &mut findings).await;
    if !config.frontend.needs_key() && !is_for_this_machine(&config.listen) {
        findings.warning("api_keys", banner::OPEN_TO_ALL, banner::fix_of_open_to_all(config.listen.port));
    }
    if let Some(at) = &config.admin.listen {
        port(("admin_port", "admin.listen"), at, false, &mut findings).await;
    }
    grpc_port(config, &mut findings);
    open_files(config.frontend.max_connections, machine::max_open_files(), &mut findings);
    if let Some(sizes) = sizes {
        tiers(config, &sizes, at_port, &mut findings).await;
    } else if !config.upstreams.is_empty() {
        index_memory(config.router.index_memory, Machine::detect().memory, &mut findings);
        address_space(config.router.index_memory.0, machine::address_space(), "router.index_memory", &mut findings);
    }
    findings.into_checks()
}

/// Whether only clients on this machine reach an address.
fn is_for_this_machine(at: &Listen) -> bool {
    at.host == "localhost" || at.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// What has a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PortUser {
    /// A running Blockyard.
    Blockyard,
    /// A program that is not asked, because it has TLS.
    Unknown,
    /// Nothing, or another program.
    Other,
}

/// Whether the port of a key can be used. A running gateway may have it: it is what is checked then.
async fn port((check, key): (&'static str, &str), at: &Listen, has_tls: bool, findings: &mut Findings) -> PortUser {
    if at.port == 0 {
        findings.ok(check, format!("{at}: the system chooses a port"));
        return PortUser::Other;
    }
    let Err(PortError { problem, advice, used_by }) = node::bind(at, &format!("--set {key}=")).await else {
        findings.ok(check, format!("{at} is free"));
        return PortUser::Other;
    };
    if let Some(blockyard) = used_by {
        if blockyard.is_shutting_down {
            findings.warning(check, problem, advice);
        } else {
            findings.ok(check, problem);
        }
        return PortUser::Blockyard;
    }
    if has_tls {
        // The certificate is that of a name, which the address need not have.
        let detail = format!("{problem}, which may be this gateway: with TLS it is not asked");
        findings.warning(check, detail, advice);
        return PortUser::Unknown;
    }
    findings.problem(check, problem, advice);
    PortUser::Other
}

/// Whether spans are sent to the port of another protocol.
fn grpc_port(config: &Config, findings: &mut Findings) {
    if let Some(warning) = config.tracing.grpc_port() {
        findings.warning("tracing", warning, GRPC_PORT_FIX);
    }
}

/// Whether the system lets the process open as many files as its connections take. `limit`: the hard limit, to which
/// `serve` raises its own.
fn open_files(connections: usize, limit: Option<u64>, findings: &mut Findings) {
    let needed = node::files_for(connections);
    let Some(limit) = limit.filter(|limit| *limit < needed) else { return };
    let fit = node::connections_within(limit);
    let detail = format!(
        "the hard limit of open files is {limit}: of frontend.max_connections = {connections} at most {fit} \
         connections are accepted, because each needs a second one to a server, and the tiers need files too"
    );
    let fix = format!(
        "raise the limit (ulimit -Hn {needed}, LimitNOFILE={needed} in systemd, --ulimit nofile={needed} of Docker), \
         or accept fewer connections: --set frontend.max_connections={fit}"
    );
    findings.warning("open_files", detail, fix);
}

/// Address space beside what is counted: stacks of threads, and what the allocator reserves for each of them.
const OTHER_ADDRESSES: u64 = 2 << 30;

/// Whether the limit of the address space (`ulimit -v`) suffices for `needed` bytes, whose size `key` sets.
fn address_space(needed: u64, limit: Option<u64>, key: &str, findings: &mut Findings) {
    let with_others = needed.saturating_add(OTHER_ADDRESSES);
    let Some(limit) = limit.filter(|limit| *limit < with_others) else { return };
    let size = |bytes: u64| ByteSize(bytes).about();
    let detail = format!(
        "the address space is limited to {} (ulimit -v), and {} are needed: {} of memory, and {} for threads",
        size(limit),
        size(with_others),
        size(needed),
        size(OTHER_ADDRESSES)
    );
    let fix = format!("raise the limit (ulimit -v unlimited, LimitAS=infinity in systemd), or lower {key}");
    findings.wrong(limit < needed, "address_space", detail, fix);
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

async fn tiers(config: &Config, native: &NativeSizes, at_port: PortUser, findings: &mut Findings) {
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
    address_space(needed, machine::address_space(), "tiers.g1 and tiers.g2", findings);
    folder(&config.data_dir, "data_dir", findings);
    let missing = match &config.model {
        Model::BuiltIn(model) => model.missing_bytes(&config.data_dir),
        Model::Folder(_) => 0,
    };
    model_space(&config.data_dir, missing, machine::space(&config.data_dir).free, findings);
    for disk in disks {
        folder(&disk.folder, "disk", findings);
        owner(&disk.folder, at_port, findings);
        let Space { free, taken, .. } = machine::space(&disk.folder);
        // The model is written first, to the same disk if the log is in the data folder.
        let missing = if disk.folder.starts_with(&config.data_dir) { missing } else { 0 };
        let free = free.saturating_sub(missing);
        match disk.shortage(&config.tiers, free, taken) {
            Some(Shortage { is_full, detail, advice }) => {
                findings.wrong(is_full, "disk_space", after_model(detail, missing), advice);
            }
            None => findings.ok("disk_space", after_model(disk.detail(free), missing)),
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
            Ok(outcome) => outcome.err().map(|error| (error.to_string(), error.is_refused)),
            Err(_) => Some((format!("no answer within {} s", STORE_TIMEOUT.as_secs()), false)),
        };
        (check, location, Some(failure))
    }));
    for (check, location, probed) in probed.await {
        match (probed, &location) {
            (Some(None), _) => findings.ok(check, format!("{location}: listed, written, read and deleted an object")),
            (None, StoreLocation::Folder(path)) => folder(path, check, findings),
            (failure, _) => {
                let (failure, is_refused) = failure.flatten().unwrap_or_default();
                findings.problem(check, format!("{location}: {failure}"), advice(&location, is_refused));
            }
        }
    }
}

/// What to change if a store cannot be used. `is_refused`: credentials, rights or the store itself are
/// missing.
fn advice(location: &StoreLocation, is_refused: bool) -> &'static str {
    match location {
        StoreLocation::Folder(_) => "give the user of this process all rights on the folder, or name another",
        StoreLocation::Cloud { cloud, .. } if is_refused => cloud.advice(),
        StoreLocation::Cloud { .. } => {
            "let this machine reach the store: correct tiers.g4.endpoint, which names a server other than the cloud's \
             own, look at proxies and firewalls, or raise tiers.g4.request_timeout where the connection is slow"
        }
    }
}

/// The free space of a disk, to which the `missing` bytes of the built-in model are written first.
fn after_model(detail: String, missing: u64) -> String {
    if missing == 0 {
        return detail;
    }
    format!("{detail} after the built-in model, which takes {}", ByteSize(missing).about())
}

/// Whether the built-in model, of which `missing` bytes are not written yet, fits on the disk of the data folder.
fn model_space(data_dir: &Path, missing: u64, free: u64, findings: &mut Findings) {
    if missing > free {
        let (needed, free) = (ByteSize(missing).about(), ByteSize(free).about());
        let detail = format!("{}: the built-in model takes {needed}, and {free} are free", data_dir.display());
        findings.problem("disk_space", detail, "free space on that disk, or name another folder: --data-dir DIR");
    }
}

/// Whether another process has the log in a folder: a problem, unless it is the one that is running with this
/// configuration.
fn owner(folder: &Path, at_port: PortUser, findings: &mut Findings) {
    let Err(error @ OpenError::Owned { .. }) = kvbm::disk::check_owner(folder) else { return };
    if at_port == PortUser::Blockyard {
        findings.ok("disk_owner", format!("{error}, the running Blockyard"));
        return;
    }
    let fix = "stop that process, or use another folder: --data-dir DIR, or tiers.g3_paths if it is set";
    findings.wrong(at_port == PortUser::Other, "disk_owner", error.to_string(), fix);
}

/// Whether a folder can be written to, or made.
fn folder(path: &Path, check: &'static str, findings: &mut Findings) {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let shown = path.display();
    if machine::is_of_kernel(existing) {
        let detail =
            format!("{shown}: {} is a view of the kernel, in which no file can be created", existing.display());
        findings.problem(check, detail, "name a folder on a disk");
        return;
    }
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
    fn a_built_in_model_that_does_not_fit_is_a_problem() {
        let checks = |missing, free| {
            let mut findings = Findings::of("x");
            model_space(Path::new("/d"), missing, free, &mut findings);
            findings.into_checks()
        };
        let problem = checks(29 << 20, 20 << 20);
        assert_eq!(problem[0].detail, "/d: the built-in model takes 29.0 MiB, and 20.0 MiB are free");
        assert_eq!((problem[0].status, checks(0, 0).len()), (Status::Problem, 0));
    }

    #[test]
    fn the_free_space_says_when_the_model_is_to_be_written_first() {
        let free = |missing| after_model("/d/g3: log of 1.0 GiB, 0 B free".to_owned(), missing);
        assert_eq!(free(0), "/d/g3: log of 1.0 GiB, 0 B free");
        let expected = "/d/g3: log of 1.0 GiB, 0 B free after the built-in model, which takes 29.0 MiB";
        assert_eq!(free(29 << 20), expected);
    }

    #[test]
    fn a_store_that_does_not_answer_needs_no_other_credentials() {
        let store = "s3://bucket/kv".parse().unwrap();
        assert!(advice(&store, true).contains("AWS_ACCESS_KEY_ID"));
        assert!(advice(&store, false).contains("tiers.g4.endpoint") && !advice(&store, false).contains("AWS_"));
    }

    #[test]
    fn each_error_of_the_configuration_names_what_to_change() {
        let value = |origin: &str| Error::Value {
            key: "tiers.g2".into(),
            value: "4".into(),
            origin: origin.into(),
            problem: "expected a size".into(),
        };
        let file = |kind: ErrorKind| Error::File { path: "a.toml".into(), error: kind.into() };
        let unknown = |meant: Option<&str>| Error::UnknownKey {
            key: "colour".into(),
            origin: "a.toml:3".into(),
            meant: meant.map(str::to_owned),
        };
        for (error, fix) in [
            (file(ErrorKind::NotFound), "create a.toml, or correct the path of --config"),
            (file(ErrorKind::PermissionDenied), "let the user of this process read a.toml"),
            (Error::Syntax { path: "a.toml".into(), line: 3, error: "?".into() }, "correct line 3 of a.toml"),
            (unknown(None), "remove colour in a.toml:3; "),
            (unknown(Some("did you mean `model`?")), "rename colour in a.toml:3; "),
            (value("environment BLOCKYARD_TIERS__G2"), "in the environment variable BLOCKYARD_TIERS__G2, or unset it"),
            (value("--set tiers.g2=4"), "correct tiers.g2 on the command line (--set tiers.g2=4)"),
            (Error::Check("router.models.x: no such model".into()), "correct router.models.x; "),
            (Error::NoCache, "--data-dir DIR"),
        ] {
            assert!(change(&error).contains(fix), "{error}: {}", change(&error));
        }
    }

    #[test]
    fn limits_of_the_system_below_the_configuration_are_found() {
        let files = |limit| {
            let mut findings = Findings::of("x");
            open_files(4096, limit, &mut findings);
            findings.into_checks()
        };
        assert!(files(None).is_empty() && files(Some(11_008)).is_empty());
        let few = files(Some(1024)).remove(0);
        assert_eq!((few.check, few.status), ("open_files", Status::Warning));
        assert!(few.detail.contains("at most 354 connections"), "{few:?}");
        let fix = few.fix.unwrap_or_default();
        assert!(fix.contains("ulimit -Hn 11008") && fix.contains("--set frontend.max_connections=354"), "{fix}");

        let space = |limit| {
            let mut findings = Findings::of("x");
            address_space(1 << 30, limit, "tiers.g1", &mut findings);
            findings.into_checks().into_iter().map(|check| check.status).collect::<Vec<_>>()
        };
        assert_eq!((space(None), space(Some(3 << 30))), (vec![], vec![]));
        assert_eq!((space(Some(2 << 30)), space(Some(1 << 29))), (vec![Status::Warning], vec![Status::Problem]));
    }

    #[test]
    fn the_port_of_otlp_over_grpc_is_a_warning() {
        let checks = |endpoint: &str| {
            let mut config = Config::with_cache(Path::new("/nonexistent"));
            config.tracing.endpoint = Some(endpoint.to_owned());
            let mut findings = Findings::of("this machine");
            grpc_port(&config, &mut findings);
            findings.into_checks()
        };
        assert_eq!(checks("http://collector:4318"), []);
        let [check] = &checks("http://collector:4317")[..] else { panic!("there is no warning") };
        assert_eq!((check.check, check.status), ("tracing", Status::Warning));
        assert!(check.detail.starts_with("tracing.endpoint = \"http://collector:4317/v1/traces\": 4317 is usually"));
        assert!(check.fix.as_ref().is_some_and(|fix| fix.contains("http://HOST:4318")));
    }

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
