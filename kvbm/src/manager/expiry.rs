//! Removes expired blocks periodically, so that events reflect expiry and memory is freed.
//!
//! Correctness does not depend on it: expiry is checked when a block is served.

use super::shared::Core;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

/// Dates have a resolution of a second. A round without expired blocks reads one entry per tier.
const INTERVAL: Duration = Duration::from_secs(1);

/// A task that expires blocks until the manager is dropped.
pub(super) fn spawn(core: &Arc<Core>) -> AbortOnDropHandle<()> {
    let core = Arc::downgrade(core);
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(core) = core.upgrade() else { return };
            core.expire();
        }
    }))
}

impl Core {
    pub(super) fn expire(&self) {
        self.pool.expire();
        if let Some(host) = &self.host {
            host.expire_now();
        }
        let now = self.clock.now();
        // The memory tiers count their expired blocks themselves.
        for tier in self.tiers.iter().skip(usize::from(self.host.is_some())) {
            self.metrics.expired(tier.level(), tier.expire(now));
        }
    }
}
