//! Blocks that are over go, although nobody asks for them: so events say what is there, and memory is free for others.
//!
//! Nothing rests on it. What is served is looked at when it is served.

use super::Core;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

/// Dates are whole seconds. A round in which nothing is over costs a look at one entry per tier.
const ROUND: Duration = Duration::from_secs(1);

/// Sweeps while the manager lives.
pub(super) fn spawn(core: &Arc<Core>) -> AbortOnDropHandle<()> {
    let core = Arc::downgrade(core);
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut rounds = interval(ROUND);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            rounds.tick().await;
            let Some(core) = core.upgrade() else { return };
            core.sweep();
        }
    }))
}

impl Core {
    pub(super) fn sweep(&self) {
        self.pool.sweep();
        if let Some(host) = &self.host {
            host.sweep();
        }
        let now = self.clock.now();
        // Memory has counted for itself.
        for tier in self.tiers.iter().skip(usize::from(self.host.is_some())) {
            self.metrics.expired(tier.level(), tier.expire(now));
        }
    }
}
