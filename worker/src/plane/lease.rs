//! The guard of a registration.

use std::fmt;
use tokio_util::sync::CancellationToken;

/// Keeps an instance registered; dropping it deregisters the instance.
///
/// The plane may end the registration earlier. Then the lease is [lost](Self::lost), and it deregisters nothing.
#[must_use = "dropping a lease deregisters the instance"]
pub struct Lease {
    deregister: Option<Box<dyn FnOnce() + Send>>,
    lost: CancellationToken,
}

impl Lease {
    /// A lease that calls `deregister` when it is dropped.
    pub fn new(deregister: impl FnOnce() + Send + 'static) -> Self {
        Self::with_loss(CancellationToken::new(), deregister)
    }

    /// The same of a registration that the plane may end earlier: the plane cancels `lost` then.
    pub fn with_loss(lost: CancellationToken, deregister: impl FnOnce() + Send + 'static) -> Self {
        Self { deregister: Some(Box::new(deregister)), lost }
    }

    /// Cancelled when the registration has ended although the lease is kept: the worker was registered in a later
    /// epoch.
    pub fn lost(&self) -> CancellationToken {
        self.lost.clone()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(deregister) = self.deregister.take() {
            deregister();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}
