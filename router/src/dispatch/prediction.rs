//! What a decision expects of a worker's cache, held against what the worker found.

use crate::booking::Promises;
use crate::fleet::{Member, Mode};
use crate::index::Index;
use crate::metrics::Metrics;
use crate::policy::{Decision, Overlaps, Row, Split};
use kvbm::SequenceHash;
use tokio::time::Instant;

/// What was expected of a worker when a prompt was placed there.
pub(crate) struct Forecast {
    placed: Instant,
    /// Prompt tokens that should be cached.
    cached: u64,
    /// The same by its own events; `None` when they could not tell: others were about to compute some of it there, or it was to
    /// come from elsewhere.
    announced: Option<u64>,
    /// Prompt tokens in full blocks, and of them those that it had not announced.
    full: u64,
    fresh: u64,
    /// The prompt's blocks, when they are to be noted as sent.
    names: Vec<SequenceHash>,
    /// Seconds that a prompt token takes there.
    token: f64,
    /// Seconds that the next best choice would have cost more.
    spare: f64,
}

impl Forecast {
    /// What a decision expects of a worker in it. To be asked before the request itself is promised.
    pub(crate) fn of(promises: &Promises, decision: &Decision<'_>, row: &Row<'_>, overlaps: &Overlaps) -> Self {
        let (member, way, block_size) = (row.member(), row.seat.way, row.prompt.block_size);
        let names = overlaps.names(way);
        let announced = u64::from(overlaps.held(way, member.announced).run()) * block_size;
        let full = names.len() as u64 * block_size;
        let promised = promises.made(member.announced, names, block_size as usize);
        let noted = member.mode != Mode::Exact || member.ledger.never_announced();
        Self {
            placed: Instant::now(),
            cached: row.cached(),
            announced: (!promised && decision.chosen.split == Split::Together).then_some(announced),
            full,
            fresh: full.saturating_sub(announced),
            names: if noted { names.to_vec() } else { Vec::new() },
            token: row.desk.pace.token,
            spare: (decision.runner_up() - row.cost().total()).max(0.0),
        }
    }

    /// The prompt has been computed there. `found`: tokens that were cached, when the worker says.
    pub(crate) fn computed(&self, index: &Index, member: &Member, found: Option<u64>) {
        // Who found all of it has computed no block.
        if self.fresh > 0 && found.is_none_or(|found| found < self.full) {
            member.ledger.computed(self.placed);
        }
        if !self.names.is_empty() {
            let room = member.books.standing(Instant::now()).total_blocks as usize;
            member.ledger.sent(index, member.id(), &self.names, room);
        }
    }

    /// The first of an answer says how many tokens were cached.
    pub(crate) fn compare(&self, metrics: &Metrics, member: &Member, found: u64) {
        let missing = self.cached.saturating_sub(found);
        metrics.predicted_tokens.inc_by(self.cached);
        metrics.actual_tokens.inc_by(found);
        metrics.false_tokens.inc_by(missing);
        metrics.missed_tokens.inc_by(found.saturating_sub(self.cached));
        // Of the time that the missing tokens took, what the next best choice would have saved.
        metrics.regret_seconds.inc_by((missing as f64 * self.token - self.spare).max(0.0));
        if let Some(announced) = self.announced {
            let block_size = member.instance.model.block_size as u64;
            member.ledger.answered(announced, found, block_size);
        }
    }
}
