//! Panics, on whichever thread: logged with their place, counted, and from then on a reason for `/ready` to say more.
//!
//! What becomes of the component is its owner's to decide (ARCHITECTURE.md, invariant 11); here none goes unseen.

use prometheus::{IntCounterVec, Opts, Registry};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::LazyLock;
use std::thread;

/// Where a panic may come from: our crates, and what they use.
const COMPONENTS: [&str; 6] = ["blockyard", "frontend", "router", "worker", "kvbm", "dependency"];

static PANICS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let help = "Panics since the start, by the crate that panicked. Each has a line at level error in the log.";
    let panics = IntCounterVec::new(Opts::new("blockyard_panics_total", help), &["component"]);
    let panics = panics.expect("name and label are well-formed");
    for component in COMPONENTS {
        panics.with_label_values(&[component]);
    }
    panics
});

/// Has panics of this process counted and logged from now on. To be called once.
pub fn watch() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        note(panic);
        // Before there is a log, standard error has to do.
        if !tracing::dispatcher::has_been_set() {
            before(panic);
        }
    }));
}

/// Makes the counter known to `registry`.
pub fn register(registry: &Registry) -> Result<(), prometheus::Error> {
    registry.register(Box::new(PANICS.clone()))
}

/// How often each component panicked that did.
pub fn counts() -> Vec<(&'static str, u64)> {
    let count = |component: &&'static str| (*component, PANICS.with_label_values(&[*component]).get());
    COMPONENTS.iter().map(count).filter(|(_, panics)| *panics > 0).collect()
}

fn note(panic: &PanicHookInfo<'_>) {
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

/// Which of the components a source file belongs to.
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
            ("/home/me/blockyard/router/src/feed.rs", "router"),
            ("/home/me/.cargo/registry/src/index.crates.io-1/tokio-1.47.0/src/time/sleep.rs", "dependency"),
            ("/rustc/0123/library/core/src/option.rs", "dependency"),
        ];
        for (file, wanted) in cases {
            assert_eq!(component(file), wanted, "{file}");
        }
    }

    #[test]
    fn a_panic_on_any_thread_is_counted() {
        watch();
        let count =
            || counts().iter().find(|(component, _)| *component == "blockyard").map_or(0, |(_, panics)| *panics);
        let before = count();
        let died = thread::spawn(|| panic!("for a test")).join();
        assert!(died.is_err());
        assert!(count() > before);
        let registry = Registry::new();
        register(&registry).unwrap();
        let series = registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        assert_eq!(series, COMPONENTS.len(), "those that did not panic are there, too");
    }
}
