//! The guard of a registration.

use std::fmt;

/// Keeps an instance registered; dropping it deregisters the instance.
#[must_use = "dropping a lease deregisters the instance"]
pub struct Lease(Option<Box<dyn FnOnce() + Send>>);

impl Lease {
    /// A lease that calls `deregister` when it is dropped.
    pub fn new(deregister: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(deregister)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(deregister) = self.0.take() {
            deregister();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}
