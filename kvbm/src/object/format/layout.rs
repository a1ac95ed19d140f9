//! Paths of objects under the prefix, and the ids in them.
//!
//! ```text
//!   PREFIX/manifests/WRITER/NUMBER                   manifests of one writer, immutable, numbered from 0
//!   PREFIX/blocks/DOMAIN/FINGERPRINT/WRITER/NUMBER   objects: blocks of one domain and fingerprint
//!   PREFIX/removals/COLLECTOR                        tombstone lists: marked objects, which are not read any more
//!   PREFIX/uses/READER                               access logs: what one process read, and when; rewritten
//!   PREFIX/collected                                 start of the last garbage collection, in seconds since 1970
//!   PREFIX/doctor-CHECK                              written and deleted by a check of the store
//! ```
//! WRITER, COLLECTOR, READER and CHECK are instance ids.

use crate::block::{DomainId, Fingerprint};
use object_store::path::Path;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// The folders directly under the prefix. `collected` is a file.
pub(in crate::object) const FOLDERS: [&str; 4] = ["manifests", "blocks", "removals", "uses"];

/// Id of one run of one process. No other process writes under its id, so writes need no lock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(in crate::object) struct InstanceId {
    started_ms: u64,
    random: u64,
}

impl InstanceId {
    /// A new id. Ids of different times sort by the clock. The random part is a hash map seed of the operating system.
    pub(in crate::object) fn new() -> Self {
        let started_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_millis() as u64);
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self { started_ms, random: hasher.finish() }
    }

    /// Seed for the random pauses of this process.
    pub(in crate::object) fn seed(self) -> u64 {
        self.random
    }

    pub(in crate::object) fn from_bytes(bytes: [u8; 16]) -> Self {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self { started_ms: number(0), random: number(8) }
    }

    pub(in crate::object) fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.started_ms.to_le_bytes());
        bytes[8..].copy_from_slice(&self.random.to_le_bytes());
        bytes
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Fixed width, so that ids sort by time.
        write!(f, "{:012x}-{:016x}", self.started_ms, self.random)
    }
}

impl FromStr for InstanceId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (started, random) = text.split_once('-').ok_or(())?;
        let number = |hex| u64::from_str_radix(hex, 16).map_err(|_| ());
        let id = Self { started_ms: number(started)?, random: number(random)? };
        // Only the canonical form is accepted: two forms would be two paths.
        if id.to_string() == text { Ok(id) } else { Err(()) }
    }
}

/// Id of an object. Each writer numbers its objects, across all domains and fingerprints.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(in crate::object) struct ObjectId {
    pub(in crate::object) writer: InstanceId,
    pub(in crate::object) number: u64,
}

impl ObjectId {
    /// The id of the object or manifest at a path; `None` if the path is not in our layout.
    pub(in crate::object) fn from_path(path: &Path) -> Option<Self> {
        let mut parts = path.as_ref().rsplit('/');
        let (number, writer) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { writer, number })
    }
}

/// The paths under one prefix.
#[derive(Clone, Debug)]
pub(in crate::object) struct Layout {
    prefix: Path,
}

impl Layout {
    pub(in crate::object) fn new(prefix: &str) -> Self {
        Self { prefix: Path::from(prefix) }
    }

    /// The folder of all manifests, with a folder for each writer.
    pub(in crate::object) fn manifests(&self) -> Path {
        self.prefix.clone().join("manifests")
    }

    pub(in crate::object) fn manifests_of(&self, writer: InstanceId) -> Path {
        self.manifests().join(writer.to_string())
    }

    pub(in crate::object) fn manifest(&self, writer: InstanceId, number: u64) -> Path {
        self.manifests_of(writer).join(format!("{number:012}"))
    }

    /// A path at which there is no object. Reading it shows whether the store serves reads.
    pub(in crate::object) fn probe(&self, own: InstanceId) -> Path {
        self.manifests_of(own).join("absent")
    }

    /// The object that a check of the store writes and deletes.
    pub(in crate::object) fn doctor(&self, own: InstanceId) -> Path {
        self.prefix.clone().join(format!("doctor-{own}"))
    }

    /// The folder of the tombstone lists.
    pub(in crate::object) fn tombstones(&self) -> Path {
        self.prefix.clone().join("removals")
    }

    pub(in crate::object) fn tombstone_list(&self, collector: InstanceId) -> Path {
        self.tombstones().join(collector.to_string())
    }

    /// The folder of the access logs.
    pub(in crate::object) fn access_logs(&self) -> Path {
        self.prefix.clone().join("uses")
    }

    pub(in crate::object) fn access_log(&self, reader: InstanceId) -> Path {
        self.access_logs().join(reader.to_string())
    }

    /// The object with the start time of the last garbage collection.
    pub(in crate::object) fn last_gc(&self) -> Path {
        self.prefix.clone().join("collected")
    }

    /// The folder of all objects.
    pub(in crate::object) fn objects(&self) -> Path {
        self.prefix.clone().join("blocks")
    }

    pub(in crate::object) fn object(
        &self,
        domain: DomainId,
        fingerprint: Fingerprint,
        writer: InstanceId,
        number: u64,
    ) -> Path {
        let under = self.objects().join(domain.to_string()).join(fingerprint.to_string());
        under.join(writer.to_string()).join(format!("{number:012}"))
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_id_is_read_back_from_its_path() {
        let writer = InstanceId::new();
        let layout = Layout::new("kv/of/all");
        let path = layout.object(DomainId::SHARED, Fingerprint::from_bytes([7; 32]), writer, 42);
        assert_eq!(ObjectId::from_path(&path), Some(ObjectId { writer, number: 42 }));
        assert_eq!(ObjectId::from_path(&layout.manifests_of(writer)), None);
        assert_eq!(InstanceId::from_bytes(writer.to_bytes()), writer);
    }

    #[test]
    fn an_instance_id_parses_only_in_its_canonical_form() {
        let writer = InstanceId::new();
        assert_eq!(writer.to_string().parse(), Ok(writer));
        assert_ne!(InstanceId::new(), writer);
        for other in ["", "-", "1-2", "../../etc", &writer.to_string().to_uppercase()[..5]] {
            assert_eq!(other.parse::<InstanceId>(), Err(()));
        }
    }
}
