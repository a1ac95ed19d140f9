//! How many workers may have computed a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts the workers that have got a request, without those that have refused it. A router counts; the copies of a
/// request share the count. The default counts nothing.
#[derive(Clone, Default, Debug)]
pub struct Attempts(Option<Arc<AtomicU32>>);

impl Attempts {
    /// Counts from zero.
    pub fn counted() -> Self {
        Self(Some(Arc::default()))
    }

    /// A worker gets the request.
    pub fn begin(&self) {
        if let Some(count) = &self.0 {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A worker that has got the request has computed nothing for it: see
    /// [`Error::is_refusal`](super::Error::is_refusal).
    pub fn refused(&self) {
        if let Some(count) = &self.0 {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether a worker may have computed a part of the request.
    pub fn may_have_computed(&self) -> bool {
        self.0.as_ref().is_some_and(|count| count.load(Ordering::Relaxed) > 0)
    }
}

impl PartialEq for Attempts {
    /// Whether both are counts of the same request, or none.
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(count), Some(other)) => Arc::ptr_eq(count, other),
            (None, None) => true,
            _ => false,
        }
    }
}

impl Eq for Attempts {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_refuse_a_request_do_not_count() {
        let attempts = Attempts::counted();
        let of_copy = attempts.clone();
        assert!(!attempts.may_have_computed());
        of_copy.begin();
        assert!(attempts.may_have_computed());
        of_copy.refused();
        assert!(!attempts.may_have_computed());
        of_copy.begin();
        of_copy.begin();
        of_copy.refused();
        assert!(attempts.may_have_computed(), "one has computed it before the other refused it");
        Attempts::default().begin();
        assert!(!Attempts::default().may_have_computed());
    }
}
