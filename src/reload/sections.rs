//! The keys of the configuration that take effect while a process runs, each with the component that it changes. A
//! process lists the sections of the components that it has.

use super::{Apply, SetLogFilter};
use crate::config::Config;
use crate::node::Upstreams;
use router::Router;
use std::sync::Arc;
use worker::llama::Limits;

/// Keys of the configuration that take effect while the process runs.
pub trait Section: Send + Sync {
    /// Whether a key belongs to the section.
    fn has(&self, key: &str) -> bool;

    /// Checks the values of its keys. Nothing changes before the returned change is made. `None`: the values are valid,
    /// but take effect after a restart only.
    fn check<'a>(&'a self, config: &'a Config) -> Result<Option<Change<'a>>, String>;

    /// Copies the values of its keys.
    fn copy(&self, from: &Config, to: &mut Config);
}

/// Makes checked values take effect.
pub type Change<'a> = Box<dyn FnOnce() -> Result<(), String> + 'a>;

/// `log.filter`: what is logged.
pub(super) struct LogFilter(pub(super) SetLogFilter);

impl LogFilter {
    pub(super) const KEY: &str = "log.filter";
}

impl Section for LogFilter {
    fn has(&self, key: &str) -> bool {
        key == Self::KEY
    }

    fn check<'a>(&'a self, config: &'a Config) -> Result<Option<Change<'a>>, String> {
        (self.0)(&config.log.filter, Apply::Check)?;
        Ok(Some(Box::new(|| (self.0)(&config.log.filter, Apply::Apply))))
    }

    fn copy(&self, from: &Config, to: &mut Config) {
        to.log.filter.clone_from(&from.log.filter);
    }
}

/// `[router]`: how requests are placed, admitted and retried.
pub struct Routing(pub Arc<Router>);

impl Section for Routing {
    fn has(&self, key: &str) -> bool {
        key.starts_with("router.")
    }

    fn check<'a>(&'a self, config: &'a Config) -> Result<Option<Change<'a>>, String> {
        let apply = || self.0.update_settings(config.router.clone()).map_err(|error| error.to_string());
        Ok(Some(Box::new(apply)))
    }

    fn copy(&self, from: &Config, to: &mut Config) {
        to.router = from.router.clone();
    }
}

/// `upstreams` and `aliases`: the servers of a gateway, and further names of their models.
pub struct Servers {
    /// The servers behind this process.
    pub upstreams: Arc<Upstreams>,
    /// Whether requests have tenants.
    pub has_tenants: bool,
    /// Whether the process may have none: a frontend has workers besides. `serve` does not become a gateway while it
    /// runs, nor ceases to be one.
    pub may_be_none: bool,
}

impl Section for Servers {
    fn has(&self, key: &str) -> bool {
        key == "upstreams" || key.starts_with("aliases.")
    }

    fn check<'a>(&'a self, config: &'a Config) -> Result<Option<Change<'a>>, String> {
        if config.upstreams.is_empty() && !self.may_be_none {
            return Ok(None);
        }
        // The error with its causes in one line.
        let servers = Upstreams::check(&config.upstreams, self.has_tenants).map_err(|error| format!("{error:#}"))?;
        Ok(Some(Box::new(|| {
            self.upstreams.apply(servers);
            self.upstreams.set_aliases(config.aliases.clone());
            Ok(())
        })))
    }

    fn copy(&self, from: &Config, to: &mut Config) {
        (to.upstreams, to.aliases) = (from.upstreams.clone(), from.aliases.clone());
    }
}

/// `[engine]`: the batch and the queue of each native engine of the process.
pub struct Engines(pub Vec<Arc<Limits>>);

impl Section for Engines {
    fn has(&self, key: &str) -> bool {
        matches!(key, "engine.max_prefill_chunk_tokens" | "engine.max_num_seqs" | "engine.max_queued_requests")
    }

    fn check<'a>(&'a self, config: &'a Config) -> Result<Option<Change<'a>>, String> {
        // The loader has checked the range of each.
        Ok(Some(Box::new(|| {
            self.0.iter().for_each(|limits| limits.set(&config.engine));
            Ok(())
        })))
    }

    fn copy(&self, from: &Config, to: &mut Config) {
        to.engine = from.engine;
    }
}
