//! The atomics of `published.rs`. The loom test compiles that file again with loom's atomics in this place.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
