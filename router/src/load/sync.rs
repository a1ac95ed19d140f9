//! The atomics of what is read without a lock. Its test reads that file a second time with others in this place.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
