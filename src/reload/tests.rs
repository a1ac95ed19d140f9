use super::*;
use crate::node::Upstreams;
use router::Router;
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};
use worker::plane::RouterId;
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::serve::Planes;

/// A reload from a temporary file.
struct Harness {
    file: tempfile::NamedTempFile,
    reload: Arc<Reload>,
    router: Arc<Router>,
    filters_set: Arc<AtomicUsize>,
    registry: Registry,
}

/// The configuration, with the stamp of its file.
fn load(sources: &Sources, purpose: Purpose) -> (Config, Origins, FileStamp) {
    let stamp = FileStamp::of(sources);
    let (config, origins) = Config::load_for(sources, purpose).unwrap();
    (config, origins, stamp)
}

impl Harness {
    fn new(text: &str) -> Self {
        Self::with(text, None)
    }

    fn with(text: &str, upstreams: Option<Arc<Upstreams>>) -> Self {
        Self::of(Purpose::Serve, text, upstreams)
    }

    fn of(purpose: Purpose, text: &str, upstreams: Option<Arc<Upstreams>>) -> Self {
        Self::changed_at_the_start(purpose, text, None, upstreams)
    }

    /// The file becomes `changed` after the process has read it, before it has started.
    fn changed_at_the_start(
        purpose: Purpose,
        text: &str,
        changed: Option<&str>,
        upstreams: Option<Arc<Upstreams>>,
    ) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let environment = vec![("HOME".into(), "/home/ada".into())];
        let sources = Sources { file: Some(file.path().into()), environment, flags: vec![] };
        let loaded = load(&sources, purpose);
        if let Some(changed) = changed {
            std::fs::write(file.path(), changed).unwrap();
        }
        let registry = Registry::new();
        let (discovery, events) = (Arc::new(LocalDiscovery::default()), Arc::new(LocalEvents::default()));
        let router = Router::new(RouterId(1), discovery, events, loaded.0.router.clone(), &registry).unwrap();
        let filters_set = Arc::new(AtomicUsize::new(0));
        let count = filters_set.clone();
        let set_log_filter: SetLogFilter = Box::new(move |filter, apply| {
            if filter == "noise" {
                return Err("log.filter = \"noise\": no such level".into());
            }
            if filter == "kvbm=error" && apply == Apply::Apply {
                return Err("the log cannot change now".into());
            }
            count.fetch_add(usize::from(apply == Apply::Apply), Ordering::Relaxed);
            Ok(())
        });
        let mut sections: Vec<Box<dyn Section>> = vec![Box::new(Routing(router.clone()))];
        let may_be_none = purpose == Purpose::Frontend;
        sections
            .extend(upstreams.map(|upstreams| Box::new(Servers { upstreams, has_tenants: false, may_be_none }) as _));
        let sources = (sources, purpose);
        let reload = Reload::new(sources, loaded, sections, set_log_filter, &registry, Arc::default()).unwrap();
        Self { file, reload, router, filters_set, registry }
    }

    fn write(&self, text: &str) {
        std::fs::write(self.file.path(), text).unwrap();
    }

    fn runs(&self, key: &str) -> Value {
        self.reload.as_json()["config"][key]["value"].clone()
    }

    fn count(&self, outcome: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "blockyard_config_reloads_total");
        let metrics = family.map_or(&[][..], |family| family.get_metric());
        let of = metrics.iter().find(|metric| metric.get_label()[0].value() == outcome);
        of.expect("each outcome has a series before the first reload").get_counter().get_value() as u64
    }
}

#[tokio::test]
async fn live_keys_apply_and_other_keys_need_a_restart() {
    let harness = Harness::new("listen = '127.0.0.1:1'\n[router]\npolicy = 'kv'\n");
    harness.write(
        "listen = '127.0.0.1:2'\n[router]\nseed = 5\n[log]\nfilter = 'debug'\n\
         [router.models.small]\npolicy = 'random'\n[router.planner]\nmode = 'apply'\n",
    );
    let report = harness.reload.now("SIGHUP");
    assert_eq!(report.outcome, Outcome::Applied, "{report:?}");
    let applied = ["log.filter", "router.models.small.policy", "router.planner.mode", "router.seed"];
    assert_eq!((report.applied, report.needs_restart), (applied.map(String::from).into(), vec!["listen".to_owned()]));
    assert_eq!((harness.runs("router.seed"), harness.runs("listen")), (5.into(), "127.0.0.1:1".into()));
    let again = harness.reload.now("admin");
    assert_eq!((again.outcome, again.needs_restart.len()), (Outcome::Unchanged, 1), "the restart is still to come");
    assert_eq!(harness.reload.as_json()["reload"]["trigger"], "admin");
    assert_eq!((harness.count("applied"), harness.count("unchanged"), harness.count("rejected")), (1, 1, 0));
}

#[tokio::test]
async fn an_invalid_value_changes_nothing_and_is_named() {
    let harness = Harness::new("[router]\npolicy = 'round-robin'\n");
    for (text, named) in [
        ("[router]\npolicy = 'random'\ndecode_interference_weight = -1.0\n", "router.decode_interference_weight"),
        ("[router]\npolicy = 'randm'\n", "router.policy = \"randm\""),
        ("[router]\npolicy = 'random'\n[log]\nfilter = 'noise'\n", "log.filter = \"noise\""),
        ("[router]\npolicy = 'random'\nfast = true\n", "router.fast"),
        ("[router\n", "line 1"),
    ] {
        harness.write(text);
        let report = harness.reload.now("file");
        assert_eq!(report.outcome, Outcome::Rejected);
        assert!(report.error.as_deref().is_some_and(|error| error.contains(named)), "{report:?}");
        assert_eq!(harness.runs("router.policy"), "round-robin");
    }
    assert_eq!((harness.count("rejected"), harness.filters_set.load(Ordering::Relaxed)), (5, 0));
    assert!(harness.reload.as_json()["reload"]["error"].as_str().is_some_and(|error| error.contains("line 1")));
}

#[tokio::test]
async fn a_file_that_is_named_or_no_longer_named_needs_a_restart() {
    for (key, section, name) in [
        ("cluster.secret_file", "cluster", "secret_file"),
        ("cluster.tls.ca_file", "cluster.tls", "ca_file"),
        ("frontend.api_keys_file", "frontend", "api_keys_file"),
        ("nats.ca_file", "nats", "ca_file"),
    ] {
        let text = format!("[{section}]\n{name} = '/srv/file'\n");
        for (before, after) in [("", &*text), (&*text, "")] {
            let harness = Harness::of(Purpose::Frontend, before, None);
            harness.write(after);
            let report = harness.reload.now("SIGHUP");
            // The file does not exist.
            if after.is_empty() {
                assert_eq!((report.outcome, &report.needs_restart[..]), (Outcome::Unchanged, &[key.to_owned()][..]));
            } else {
                assert_eq!(report.outcome, Outcome::Rejected, "{key}");
                assert!(report.error.as_deref().is_some_and(|error| error.contains("/srv/file")), "{report:?}");
            }
        }
    }
}

#[tokio::test]
async fn what_a_restart_would_refuse_is_rejected() {
    let harness = Harness::new("[router]\npolicy = 'round-robin'\n");
    for (text, named) in [
        ("model = '/nonexistent'", "/nonexistent"),
        ("tiers.g1 = '900TiB'", "not enough memory"),
        ("tiers.g4.url = 'az://container/prefix'", "tiers.g4.url"),
        ("tiers.encryption = { keys = { file = '/nonexistent/key' } }", "tiers.encryption"),
        ("frontend.api_keys_file = '/nonexistent/keys'", "frontend.api_keys_file"),
    ] {
        harness.write(&format!("{text}\n[router]\npolicy = 'random'\n"));
        let report = harness.reload.now("admin");
        assert_eq!(report.outcome, Outcome::Rejected, "{text}");
        let error = report.error.unwrap();
        assert!(error.starts_with("a restart would refuse it: ") && error.contains(named), "{text}: {error}");
        assert!(error.matches("blockyard key add").count() <= 1, "the advice once: {error}");
        assert_eq!(harness.runs("router.policy"), "round-robin", "{text}");
    }
}

#[tokio::test]
async fn what_a_restart_would_refuse_already_does_not_stop_other_changes() {
    let missing = "frontend.api_keys_file = '/nonexistent/keys'";
    let harness = Harness::new(&format!("{missing}\n"));
    harness.write(&format!("{missing}\nshutdown_timeout = '9s'\n[router]\npolicy = 'random'\n"));
    let report = harness.reload.now("admin");
    assert_eq!((report.error, report.needs_restart), (None, vec!["shutdown_timeout".to_owned()]));
    assert_eq!(harness.runs("router.policy"), "random");
}

#[tokio::test]
async fn a_key_that_needs_a_restart_keeps_its_running_origin() {
    let harness = Harness::new("shutdown_timeout = '20s'\n");
    let file = harness.file.path().display().to_string();
    harness.write("shutdown_timeout = '10s'\nthreads = 3\n[router]\nseed = 7\n");
    assert_eq!(harness.reload.now("admin").needs_restart, ["shutdown_timeout", "threads"]);
    let entry = |key: &str| harness.reload.as_json()["config"][key].clone();
    let is = |value: Value, origin: &str| serde_json::json!({ "value": value, "origin": origin });
    assert_eq!(entry("router.seed"), is(7.into(), &format!("{file}:4")));
    assert_eq!(entry("shutdown_timeout"), is("20s".into(), &format!("{file}:1")));
    assert_eq!(entry("threads"), is("auto".into(), "default"));
    harness.write("shutdown_timeout = '10s'\n");
    harness.reload.now("admin");
    assert_eq!(
        (entry("router.seed"), entry("shutdown_timeout")),
        (is(0.into(), "default"), is("20s".into(), &format!("{file}:1")))
    );
}

#[tokio::test]
async fn a_failed_log_filter_rolls_the_router_back() {
    let harness = Harness::new("[router]\npolicy = 'round-robin'\n");
    harness.write("[router]\npolicy = 'random'\n[log]\nfilter = 'kvbm=error'\n");
    let report = harness.reload.now("admin");
    assert_eq!((report.outcome, report.error.as_deref()), (Outcome::Rejected, Some("the log cannot change now")));
    let router = format!("{:?}", harness.router);
    assert!(router.contains("policy: RoundRobin"), "{router}");
    assert_eq!(harness.runs("router.policy"), "round-robin");
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_loaded_once_it_is_stable() {
    let harness = Harness::new("[router]\nseed = 1\n");
    let watch = tokio::spawn(harness.reload.clone().watch());
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert_eq!(harness.count("unchanged"), 0, "the file has not changed");
    harness.write("[router]\nseed = 222\n");
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert_eq!((harness.runs("router.seed"), harness.count("applied")), (222.into(), 1));
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert_eq!(harness.count("applied") + harness.count("unchanged"), 1, "once");
    harness.write("[router]\nseed = 3\n");
    assert_eq!(harness.reload.now("SIGHUP").outcome, Outcome::Applied);
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert_eq!(
        harness.count("applied") + harness.count("unchanged"),
        2,
        "a file that SIGHUP has read is not read again"
    );
    watch.abort();
}

#[tokio::test(start_paused = true)]
async fn a_file_that_changes_during_the_start_is_loaded() {
    let (before, after) = ("[router]\nseed = 1\n", "[router]\nseed = 222\n");
    let harness = Harness::changed_at_the_start(Purpose::Serve, before, Some(after), None);
    let watch = tokio::spawn(harness.reload.clone().watch());
    tokio::time::sleep(POLL_INTERVAL * 3).await;
    assert_eq!((harness.runs("router.seed"), harness.count("applied")), (222.into(), 1));
    watch.abort();
}

/// Upstreams of a process, none yet.
fn no_upstreams() -> Arc<Upstreams> {
    let planes = Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) };
    let metrics = upstream::Metrics::new(&Registry::new()).unwrap();
    let tokenizers =
        frontend::Tokenizers::new(std::collections::BTreeMap::new(), &prometheus::Registry::new()).unwrap();
    let lookup = upstream::resolve::system_lookup();
    Arc::new(Upstreams::new(planes, lookup, Arc::default(), Arc::new(tokenizers), metrics))
}

#[tokio::test]
async fn servers_apply_and_an_invalid_list_changes_nothing() {
    let harness = Harness::with("upstreams = ['http://127.0.0.1:1']\n", Some(no_upstreams()));
    harness.write("upstreams = ['http://127.0.0.1:1', 'http://127.0.0.1:2']\naliases.chat = 'org/m'\n");
    assert_eq!(harness.reload.now("file").applied, ["aliases.chat", "upstreams"]);
    assert_eq!(harness.runs("upstreams").as_array().unwrap().len(), 2);
    harness.write("[[upstreams]]\nurl = 'http://127.0.0.1:3'\napi_key_file = '/nonexistent/key'\n");
    let report = harness.reload.now("file");
    assert_eq!(report.outcome, Outcome::Rejected);
    assert!(report.error.unwrap().contains("upstreams.0.api_key_file"));
    harness.write("");
    let report = harness.reload.now("file");
    assert_eq!(report.needs_restart, ["aliases.chat", "upstreams"], "the native engine does not start now");
    assert_eq!(harness.runs("upstreams").as_array().unwrap().len(), 2);
}

/// A section that counts what happens to it, and refuses values on request.
struct Counting {
    key: &'static str,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Section for Counting {
    fn has(&self, key: &str) -> bool {
        key == self.key
    }

    fn check<'a>(&'a self, config: &'a Config) -> Result<Option<Change<'a>>, String> {
        let timeout = config.shutdown_timeout.expect("each test sets it");
        self.seen.lock().push(format!("{} checks {timeout}", self.key));
        if timeout.0 == Duration::from_secs(7) {
            return Err("shutdown_timeout: 7 s is refused".to_owned());
        }
        if timeout.0 == Duration::from_secs(8) {
            return Ok(None);
        }
        Ok(Some(Box::new(move || {
            self.seen.lock().push(format!("{} becomes {timeout}", self.key));
            if timeout.0 == Duration::from_secs(9) && self.key == "threads" { Err("broken".into()) } else { Ok(()) }
        })))
    }

    fn copy(&self, from: &Config, to: &mut Config) {
        if self.key == "shutdown_timeout" {
            to.shutdown_timeout = from.shutdown_timeout;
        }
    }
}

#[test]
fn sections_change_together_or_not_at_all() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "shutdown_timeout = '5s'\n").unwrap();
    let sources =
        Sources { file: Some(file.path().into()), environment: vec![("HOME".into(), "/h".into())], flags: vec![] };
    let loaded = load(&sources, Purpose::Worker);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let section = |key| Box::new(Counting { key, seen: seen.clone() }) as Box<dyn Section>;
    let sections = vec![section("shutdown_timeout"), section("threads")];
    let set_log: SetLogFilter = Box::new(|_, _| Ok(()));
    let reload =
        Reload::new((sources, Purpose::Worker), loaded, sections, set_log, &Registry::new(), Arc::default()).unwrap();
    let reloaded = |timeout: u64| {
        std::fs::write(file.path(), format!("shutdown_timeout = '{timeout}s'\n")).unwrap();
        let report = reload.now("admin");
        (report.outcome, report.applied.len(), report.needs_restart.len(), std::mem::take(&mut *seen.lock()))
    };
    let running = || reload.as_json()["config"]["shutdown_timeout"]["value"].clone();
    let (outcome, applied, rest, done) = reloaded(6);
    assert_eq!((outcome, applied, rest), (Outcome::Applied, 1, 0));
    let both = ["shutdown_timeout checks 6s", "threads checks 6s", "shutdown_timeout becomes 6s", "threads becomes 6s"];
    assert_eq!((done, running()), (both.map(String::from).to_vec(), "6s".into()));
    let (outcome, .., done) = reloaded(7);
    assert_eq!((outcome, done.len(), running()), (Outcome::Rejected, 1, "6s".into()), "nothing was changed: {done:?}");
    let (outcome, applied, rest, _) = reloaded(8);
    assert_eq!((outcome, applied, rest, running()), (Outcome::Unchanged, 0, 1, "6s".into()));
    let (outcome, .., done) = reloaded(9);
    let back = [
        "shutdown_timeout becomes 9s",
        "threads becomes 9s",
        "shutdown_timeout checks 6s",
        "shutdown_timeout becomes 6s",
    ];
    assert_eq!((outcome, &done[2..], running()), (Outcome::Rejected, &back.map(String::from)[..], "6s".into()));
}

#[tokio::test]
async fn a_frontend_reloads_the_settings_of_models_that_its_workers_serve() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "").unwrap();
    let sources =
        Sources { file: Some(file.path().into()), environment: vec![("HOME".into(), "/h".into())], flags: vec![] };
    let loaded = load(&sources, Purpose::Frontend);
    let set_log: SetLogFilter = Box::new(|_, _| Ok(()));
    let reload =
        Reload::new((sources, Purpose::Frontend), loaded, Vec::new(), set_log, &Registry::new(), Arc::default())
            .unwrap();
    std::fs::write(file.path(), "[router.models.llama]\npolicy = 'random'\n").unwrap();
    assert_eq!(reload.now("file").error, None, "`llama` is a model of another process");
}

#[tokio::test]
async fn a_log_filter_of_the_admin_api_stays_until_the_next_reload() {
    let harness = Harness::new("log.filter = 'warn'\n");
    harness.reload.set_log_filter("debug").unwrap();
    let entry = || harness.reload.as_json()["config"]["log.filter"].clone();
    assert_eq!(entry(), serde_json::json!({ "value": "debug", "origin": "admin API" }));
    assert_eq!(harness.filters_set.load(Ordering::Relaxed), 1);
    for refused in ["noise", "kvbm=error"] {
        harness.reload.set_log_filter(refused).unwrap_err();
        assert_eq!(entry()["value"], "debug");
    }
    let report = harness.reload.now("SIGHUP");
    assert_eq!((report.outcome, report.applied), (Outcome::Applied, vec!["log.filter".to_owned()]));
    assert_eq!(entry()["value"], "warn");
}

#[tokio::test]
async fn a_change_of_the_log_filter_is_logged_once_also_from_off() {
    let (written, file) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let log = tracing_subscriber::fmt().with_ansi(false).with_env_filter("off");
    let log = log.with_writer(Arc::new(written.reopen().unwrap())).with_filter_reloading();
    let handle = log.reload_handle();
    let set_log: SetLogFilter = Box::new(move |filter, apply| match apply {
        Apply::Check => Ok(()),
        Apply::Apply => handle.reload(tracing_subscriber::EnvFilter::new(filter)).map_err(|error| error.to_string()),
    });
    let sources =
        Sources { file: Some(file.path().into()), environment: vec![("HOME".into(), "/h".into())], flags: vec![] };
    let loaded = load(&sources, Purpose::Serve);
    let sources = (sources, Purpose::Serve);
    let reload = Reload::new(sources, loaded, Vec::new(), set_log, &Registry::new(), Arc::default()).unwrap();
    let _log = tracing::subscriber::set_default(log.finish());
    reload.set_log_filter("off").unwrap();
    for filter in ["debug", "warn", "info", "off"] {
        reload.set_log_filter(filter).unwrap();
    }
    let text = std::fs::read_to_string(written.path()).unwrap();
    let lines: Vec<&str> = text.lines().filter_map(|line| line.split("log filter ").nth(1)).collect();
    assert_eq!(
        lines,
        [
            "filter=\"debug\" before=\"off\"",
            "filter=\"warn\" before=\"debug\"",
            "filter=\"info\" before=\"warn\"",
            "filter=\"off\" before=\"info\""
        ]
    );
}

#[tokio::test]
async fn a_frontend_gets_its_first_server_and_loses_its_last_at_run_time() {
    let harness = Harness::of(Purpose::Frontend, "[router]\nseed = 1\n", Some(no_upstreams()));
    // A model of workers, which the configuration of a frontend does not name.
    let of_workers = "[router.models.llama]\npolicy = 'random'\n[router.planner]\nmode = 'apply'\n";
    harness.write(&format!("upstreams = ['http://127.0.0.1:1']\naliases.chat = 'org/m'\n{of_workers}"));
    let report = harness.reload.now("file");
    let applied = ["aliases.chat", "router.models.llama.policy", "router.planner.mode", "router.seed", "upstreams"];
    assert_eq!((report.error, report.applied), (None, applied.map(String::from).to_vec()));
    harness.write("");
    let report = harness.reload.now("file");
    assert!(report.needs_restart.is_empty() && report.applied.contains(&"upstreams".to_owned()), "{report:?}");
    assert_eq!(harness.runs("upstreams").as_array().unwrap().len(), 0);
}
