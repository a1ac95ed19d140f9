//! What the router believes that rests where, for whoever wants to hold it against what does.

use crate::index::{Digest, LEVELS};
use crate::router::Router;
use kvbm::Level;
use std::collections::BTreeSet;
use worker::plane::Source;

impl Router {
    /// Each worker, and each store that one of them reaches, with what it is believed to hold at each level where that is
    /// anything.
    pub fn believed(&self) -> Vec<(Source, Level, Digest)> {
        let roster = self.core.fleet.roster();
        let workers = roster.members().map(|member| Source::Worker(member.id()));
        let stores: BTreeSet<_> = roster.members().flat_map(|member| member.instance.stores.iter().copied()).collect();
        let sources = workers.chain(stores.into_iter().map(Source::Store));
        let each = |source| LEVELS.into_iter().map(move |level| (source, level));
        let seen = |(source, level)| Some((source, level, self.core.index.digest(source, level)?));
        sources.flat_map(each).filter_map(seen).filter(|(.., digest)| digest.blocks > 0).collect()
    }
}
