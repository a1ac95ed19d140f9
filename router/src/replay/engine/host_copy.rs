//! The host memory of a simulated worker as the target of copies ahead of demand.
//!
//! Not here: when a copy loads which block, and from where (`simulation`).

use super::steps::nanoseconds;
use super::{BlockChange, Effects, Engine};
use kvbm::Level;

/// A copy takes at most one in this many blocks of host memory, as in `kvbm/src/manager/host_copy.rs`.
const MAX_SHARE: usize = 4;

impl Engine {
    /// Whether requests wait for memory or for blocks. A copy waits for them.
    pub(in crate::replay) fn has_queue(&self, now_ns: u64) -> bool {
        !self.waiting.is_empty() || self.running.iter().any(|sequence| sequence.ready_ns > now_ns)
    }

    /// Whether a block is in device memory or in host memory.
    pub(in crate::replay) fn has_in_memory(&self, block: u32) -> bool {
        self.pool.contains(block) || self.host.as_ref().is_some_and(|host| host.contains(block))
    }

    /// The blocks of a prefix that are not in memory, in order. `None`: they are too many for the host memory, or the
    /// worker has no host memory.
    pub(in crate::replay) fn blocks_to_copy(&self, prefix: impl Iterator<Item = u32>) -> Option<Vec<u32>> {
        let host = self.host.as_ref()?;
        let missing: Vec<u32> = prefix.filter(|block| !self.has_in_memory(*block)).collect();
        (missing.len() <= host.capacity() / MAX_SHARE).then_some(missing)
    }

    /// Begins to load something for a copy, which takes `seconds`. `sender_free_ns`: the time at which the link of the
    /// worker is free that sends it; nothing is sent before the links of both workers are free. Returns when it has
    /// arrived.
    pub(in crate::replay) fn load_for_copy(
        &mut self,
        now_ns: u64,
        seconds: f64,
        sender_free_ns: Option<&mut u64>,
    ) -> u64 {
        let Some(sender_free_ns) = sender_free_ns else { return now_ns + nanoseconds(seconds) };
        let end_ns = now_ns.max(self.receive_link_free_ns).max(*sender_free_ns) + nanoseconds(seconds);
        (self.receive_link_free_ns, *sender_free_ns) = (end_ns, end_ns);
        end_ns
    }

    /// Stores a block of a copy in host memory, unless it was stored there in the meantime.
    pub(in crate::replay) fn store_copied(&mut self, block: u32, copy: u32, effects: &mut Effects) {
        let is_computed = self.pool.contains(block);
        let Some(host) = self.host.as_mut().filter(|host| !host.contains(block)) else { return };
        effects.changes.push(BlockChange { level: Level::G2, block, stored: true });
        if !is_computed {
            self.unused_copied.insert(block, copy);
        }
        if let Some(evicted) = host.insert(block) {
            effects.changes.push(BlockChange { level: Level::G2, block: evicted, stored: false });
            self.unused_copied.remove(&evicted);
        }
    }

    /// A request onboards these blocks.
    pub(super) fn use_copied(&mut self, blocks: &[u32], effects: &mut Effects) {
        effects.used_copies.extend(blocks.iter().filter_map(|block| self.unused_copied.remove(block)));
    }
}
