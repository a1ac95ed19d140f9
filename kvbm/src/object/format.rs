//! What lies in a store: names of objects, and the bytes of manifests and of lists of deletions.
//!
//! Everything here is pure: values to bytes and back. A parser accepts any bytes and allocates no more than they justify.
//! Not here: the format of a block (`crate::block`), of access logs (`access_log`), and any request.

pub(in crate::object) mod layout;
pub(in crate::object) mod manifest;
pub(in crate::object) mod tombstones;
