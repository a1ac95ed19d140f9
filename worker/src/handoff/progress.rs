//! How far a prefill is whose blocks are handed over. The prefill worker reports it, the decode worker follows it.

use dashmap::DashMap;
use futures::StreamExt;
use futures::stream::BoxStream;
use kvbm::Level;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

/// Identifies a hand-over in the process of its prefill worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct HandoffId(pub u64);

impl fmt::Display for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How far a prefill is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Progress {
    /// This many leading blocks of the prompt can be fetched.
    Computing {
        /// Number of blocks; it never becomes smaller.
        blocks: u32,
    },
    /// All blocks that another worker can reuse can be fetched. It is the last progress.
    Complete {
        /// Prompt tokens that the prefill worker found cached, by tier: they were not computed for this request.
        cached: Vec<(Level, u32)>,
    },
}

/// The progress of one prefill, as it changes. Without [`Progress::Complete`] at its end the prefill has failed, or its
/// worker cannot be reached.
pub type ProgressStream = BoxStream<'static, Progress>;

/// The prefills of this process whose blocks are handed over.
pub(super) struct Handoffs {
    open: Arc<DashMap<HandoffId, watch::Receiver<Progress>>>,
    next: AtomicU64,
}

/// The prefill worker's end of a hand-over. Dropping it before the prefill is complete tells the decode worker that the
/// prefill has failed.
#[must_use = "dropping it ends the hand-over"]
pub struct HandoffProgress {
    id: HandoffId,
    open: Arc<DashMap<HandoffId, watch::Receiver<Progress>>>,
    progress: watch::Sender<Progress>,
}

impl Default for Handoffs {
    /// The first number is random: a ticket from before a restart of this process belongs to no hand-over of it.
    fn default() -> Self {
        Self { open: Arc::default(), next: AtomicU64::new(RandomState::new().hash_one(())) }
    }
}

impl Handoffs {
    pub(super) fn begin(&self) -> HandoffProgress {
        let id = HandoffId(self.next.fetch_add(1, Ordering::Relaxed));
        let (progress, receiver) = watch::channel(Progress::Computing { blocks: 0 });
        self.open.insert(id, receiver);
        HandoffProgress { id, open: Arc::clone(&self.open), progress }
    }

    /// `None`: it has ended, or never began here.
    pub(super) fn follow(&self, id: HandoffId) -> Option<ProgressStream> {
        let receiver = self.open.get(&id)?.clone();
        Some(WatchStream::new(receiver).boxed())
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }
}

impl HandoffProgress {
    /// Its id, for the ticket.
    pub(crate) fn id(&self) -> HandoffId {
        self.id
    }

    /// This many leading blocks can be fetched.
    pub fn computed(&self, blocks: usize) {
        self.progress.send_if_modified(|progress| match progress {
            Progress::Computing { blocks: before } if (*before as usize) < blocks => {
                *before = blocks as u32;
                true
            }
            _ => false,
        });
    }

    /// All blocks can be fetched.
    pub fn complete(&self, cached: Vec<(Level, u32)>) {
        self.progress.send_replace(Progress::Complete { cached });
    }
}

impl Drop for HandoffProgress {
    fn drop(&mut self) {
        self.open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn progress_is_followed_to_its_end() {
        let handoffs = Handoffs::default();
        let sender = handoffs.begin();
        let mut followed = handoffs.follow(sender.id()).unwrap();
        assert_eq!(followed.next().await, Some(Progress::Computing { blocks: 0 }));
        sender.computed(3);
        sender.computed(2);
        assert_eq!(followed.next().await, Some(Progress::Computing { blocks: 3 }));
        assert!(followed.next().now_or_never().is_none(), "it never goes back");
        let complete = Progress::Complete { cached: vec![(Level::G2, 16)] };
        sender.complete(vec![(Level::G2, 16)]);
        let late = handoffs.follow(sender.id()).unwrap();
        drop(sender);
        assert_eq!(followed.collect::<Vec<_>>().await, std::slice::from_ref(&complete));
        assert_eq!(late.collect::<Vec<_>>().await, [complete]);
        assert_eq!(handoffs.len(), 0);
    }

    #[tokio::test]
    async fn a_prefill_that_fails_ends_without_complete() {
        let handoffs = Handoffs::default();
        let sender = handoffs.begin();
        let (id, followed) = (sender.id(), handoffs.follow(sender.id()).unwrap());
        sender.computed(1);
        drop(sender);
        assert_eq!(followed.collect::<Vec<_>>().await, [Progress::Computing { blocks: 1 }]);
        assert!(handoffs.follow(id).is_none());
    }
}
