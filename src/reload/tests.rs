use super::*;
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};
use worker::plane::RouterId;
use worker::plane::local::{Bus, Roster};

/// A process that reads from a file of its own.
struct Yard {
    file: tempfile::NamedTempFile,
    reload: Arc<Reload>,
    relogged: Arc<AtomicUsize>,
    registry: Registry,
}

impl Yard {
    fn new(text: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let environment = vec![("HOME".into(), "/home/ada".into())];
        let sources = Sources { file: Some(file.path().into()), environment, flags: vec![] };
        let loaded = Config::load(&sources).unwrap();
        let registry = Registry::new();
        let (roster, bus) = (Arc::new(Roster::default()), Arc::new(Bus::default()));
        let router = Router::new(RouterId(1), roster, bus, loaded.0.router.clone(), &registry).unwrap();
        let relogged = Arc::new(AtomicUsize::new(0));
        let count = relogged.clone();
        let relog: Relog = Box::new(move |filter, apply| {
            if filter == "noise" {
                return Err("log.filter = \"noise\": no such level".into());
            }
            if filter == "full" && apply == Apply::Do {
                return Err("the log cannot change now".into());
            }
            count.fetch_add(usize::from(apply == Apply::Do), Ordering::Relaxed);
            Ok(())
        });
        let reload = Reload::new(sources, loaded, router, relog, &registry).unwrap();
        Self { file, reload, relogged, registry }
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
        of.map_or(0, |metric| metric.get_counter().get_value() as u64)
    }
}

#[tokio::test]
async fn what_can_change_changes_and_the_rest_is_said_to_need_a_restart() {
    let yard = Yard::new("listen = '127.0.0.1:1'\n[router]\npolicy = 'kv'\n");
    yard.write("listen = '127.0.0.1:2'\n[router]\npreset = 'cache'\n[log]\nfilter = 'debug'\n[router.models.small]\npolicy = 'random'\n[router.planner]\nmode = 'apply'\n");
    let report = yard.reload.now("SIGHUP");
    assert_eq!(report.outcome, Outcome::Applied, "{report:?}");
    let applied =
        ["log.filter", "router.models.small.policy", "router.planner.mode", "router.prefix_affinity", "router.preset"];
    assert_eq!((report.applied, report.needs_restart), (applied.map(String::from).into(), vec!["listen".to_owned()]));
    assert_eq!((yard.runs("router.preset"), yard.runs("listen")), ("cache".into(), "127.0.0.1:1".into()));
    let again = yard.reload.now("admin");
    assert_eq!((again.outcome, again.needs_restart.len()), (Outcome::Unchanged, 1), "the restart is still to come");
    assert_eq!(yard.reload.as_json()["reload"]["trigger"], "admin");
    assert_eq!((yard.count("applied"), yard.count("unchanged"), yard.count("rejected")), (1, 1, 0));
}

#[tokio::test]
async fn one_wrong_value_rolls_everything_back_and_is_named() {
    let yard = Yard::new("[router]\npolicy = 'round-robin'\n");
    for (text, named) in [
        ("[router]\npolicy = 'random'\ndecode_interference_weight = -1.0\n", "router.decode_interference_weight"),
        ("[router]\npolicy = 'randm'\n", "router.policy = \"randm\""),
        ("[router]\npolicy = 'random'\n[log]\nfilter = 'noise'\n", "log.filter = \"noise\""),
        ("[router]\npolicy = 'random'\nfast = true\n", "router.fast"),
        ("[router\n", "line 1"),
    ] {
        yard.write(text);
        let report = yard.reload.now("file");
        assert_eq!(report.outcome, Outcome::Rejected);
        assert!(report.error.as_deref().is_some_and(|error| error.contains(named)), "{report:?}");
        assert_eq!(yard.runs("router.policy"), "round-robin");
    }
    assert_eq!((yard.count("rejected"), yard.relogged.load(Ordering::Relaxed)), (5, 0));
    assert!(yard.reload.as_json()["reload"]["error"].as_str().is_some_and(|error| error.contains("line 1")));
}

#[tokio::test]
async fn what_waits_for_a_restart_is_shown_with_who_said_what_runs() {
    let yard = Yard::new("shutdown_timeout = '20s'\n");
    let file = yard.file.path().display().to_string();
    yard.write("shutdown_timeout = '10s'\nthreads = 3\n[router]\nseed = 7\n");
    assert_eq!(yard.reload.now("admin").needs_restart, ["shutdown_timeout", "threads"]);
    let told = |key: &str| yard.reload.as_json()["config"][key].clone();
    let is = |value: Value, origin: &str| serde_json::json!({ "value": value, "origin": origin });
    assert_eq!(told("router.seed"), is(7.into(), &format!("{file}:4")));
    assert_eq!(told("shutdown_timeout"), is("20s".into(), &format!("{file}:1")));
    assert_eq!(told("threads"), is("auto".into(), "default"));
    yard.write("shutdown_timeout = '10s'\n");
    yard.reload.now("admin");
    assert_eq!(
        (told("router.seed"), told("shutdown_timeout")),
        (is(0.into(), "default"), is("20s".into(), &format!("{file}:1")))
    );
}

#[tokio::test]
async fn when_the_log_cannot_change_the_router_goes_back_too() {
    let yard = Yard::new("[router]\npolicy = 'round-robin'\n");
    yard.write("[router]\npolicy = 'random'\n[log]\nfilter = 'full'\n");
    let report = yard.reload.now("admin");
    assert_eq!((report.outcome, report.error.as_deref()), (Outcome::Rejected, Some("the log cannot change now")));
    let router = format!("{:?}", yard.reload.router);
    assert!(router.contains("policy: RoundRobin"), "{router}");
    assert_eq!(yard.runs("router.policy"), "round-robin");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_changes_is_read_once_it_keeps_still() {
    let yard = Yard::new("[router]\nseed = 1\n");
    let watch = tokio::spawn(yard.reload.clone().watch());
    tokio::time::sleep(LOOK_EVERY * 3).await;
    assert_eq!(yard.count("unchanged"), 0, "nobody touched it");
    yard.write("[router]\nseed = 222\n");
    tokio::time::sleep(LOOK_EVERY * 3).await;
    assert_eq!((yard.runs("router.seed"), yard.count("applied")), (222.into(), 1));
    tokio::time::sleep(LOOK_EVERY * 3).await;
    assert_eq!(yard.count("applied") + yard.count("unchanged"), 1, "once");
    watch.abort();
}
