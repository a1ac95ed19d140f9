//! What is stored: paths of objects, and the bytes of manifests, tombstone lists and access logs.
//!
//! Everything here is pure: values to bytes and back. A decoder accepts any bytes and allocates no more than their
//! length justifies. Not here: the format of a block (`crate::block`), and any request.

pub(in crate::object) mod access_log;
pub(in crate::object) mod layout;
pub(in crate::object) mod manifest;
pub(in crate::object) mod tombstones;
