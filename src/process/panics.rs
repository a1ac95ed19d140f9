//! Logs and counts every panic of the process, on any thread. `/ready` lists the counts.
//!
//! Not here: stopping the component that panicked. Its owner does that (ARCHITECTURE.md, invariant 11).

use prometheus::{IntCounterVec, Opts, Registry};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::LazyLock;
use std::thread;

/// Values of the label `component`: the crates of the workspace, and one value for all dependencies.
const COMPONENTS: [&str; 10] =
    ["blockyard", "frontend", "router", "upstream", "worker", "kvbm", "transport", "spans", "units", "dependency"];

static PANICS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let help = "Panics since the start, by the crate that panicked. Each has a line at level error in the log.";
    let panics = IntCounterVec::new(Opts::new("blockyard_panics_total", help), &["component"]);
    let panics = panics.expect("name and label are well-formed");
    for component in COMPONENTS {
        panics.with_label_values(&[component]);
    }
    panics
});

/// Installs the panic hook. To be called once.
pub fn install_hook() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        record(panic);
        // Without a log, the previous hook prints to standard error.
        if !tracing::dispatcher::has_been_set() {
            before(panic);
        }
    }));
}

/// Registers the counter.
pub fn register(registry: &Registry) -> Result<(), prometheus::Error> {
    registry.register(Box::new(PANICS.clone()))
}

/// Number of panics of each component that panicked.
pub fn counts() -> Vec<(&'static str, u64)> {
    let count = |component: &&'static str| (*component, PANICS.with_label_values(&[*component]).get());
    COMPONENTS.iter().map(count).filter(|(_, panics)| *panics > 0).collect()
}

fn record(panic: &PanicHookInfo<'_>) {
    let at = panic.location().map(ToString::to_string).unwrap_or_default();
    let component = panic.location().map_or("dependency", |at| component(at.file()));
    PANICS.with_label_values(&[component]).inc();
    let thread = thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    let message = panic.payload_as_str().unwrap_or("no message");
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        tracing::error!(component, thread, %at, message, %backtrace, "panic");
    } else {
        tracing::error!(component, thread, %at, message, "panic");
    }
}

/// The component that a source file belongs to.
fn component(file: &str) -> &'static str {
    let parts: Vec<&str> = file.split('/').collect();
    let source = parts.iter().rposition(|part| *part == "src");
    let folder = match source {
        Some(0) => "blockyard",
        Some(at) => parts[at - 1],
        None => "",
    };
    COMPONENTS.into_iter().find(|component| *component == folder).unwrap_or("dependency")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_file_belongs_to_its_crate() {
        let cases = [
            ("src/node/stores.rs", "blockyard"),
            ("kvbm/src/disk/recover.rs", "kvbm"),
            ("/home/me/blockyard/router/src/control/feed.rs", "router"),
            ("/home/me/.cargo/registry/src/index.crates.io-1/tokio-1.47.0/src/time/sleep.rs", "dependency"),
            ("/rustc/0123/library/core/src/option.rs", "dependency"),
        ];
        for (file, wanted) in cases {
            assert_eq!(component(file), wanted, "{file}");
        }
    }

    #[test]
    fn every_crate_of_the_workspace_is_a_component() {
        let manifest: toml::Table = toml::from_str(include_str!("../../Cargo.toml")).unwrap();
        let members = manifest["workspace"]["members"].as_array().unwrap().iter().map(|name| name.as_str().unwrap());
        let mut expected: Vec<&str> = members.chain(["blockyard", "dependency"]).collect();
        let mut components = COMPONENTS.to_vec();
        expected.sort_unstable();
        components.sort_unstable();
        assert_eq!(components, expected);
        assert_eq!(component("upstream/src/relay/client.rs"), "upstream");
    }

    #[test]
    fn a_panic_on_any_thread_is_counted() {
        install_hook();
        let count =
            || counts().iter().find(|(component, _)| *component == "blockyard").map_or(0, |(_, panics)| *panics);
        let before = count();
        let died = thread::spawn(|| panic!("for a test")).join();
        assert!(died.is_err());
        assert!(count() > before);
        let registry = Registry::new();
        register(&registry).unwrap();
        let series = registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        assert_eq!(series, COMPONENTS.len(), "components without a panic have a series, too");
    }
}
