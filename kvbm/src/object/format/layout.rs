//! Where things lie under the prefix, and who put them there.
//!
//! ```text
//!   PREFIX/manifests/WRITER/NUMBER                   what the objects of one writer hold, immutable, numbered without gaps
//!   PREFIX/blocks/DOMAIN/FINGERPRINT/WRITER/NUMBER   many blocks of one domain and one fingerprint, each as header and
//!                                                    payload
//!   PREFIX/removals/COLLECTOR                        objects that are about to be deleted, and that nobody asks for any more
//!   PREFIX/uses/READER                               what one process read from, and when; written again now and then
//!   PREFIX/collected                                 when somebody last began to collect, in seconds since 1970
//! ```

use crate::block::{DomainId, Fingerprint};
use object_store::path::Path;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// What lies directly under the prefix, but for `collected`.
pub(in crate::object) const FOLDERS: [&str; 4] = ["manifests", "blocks", "removals", "uses"];

/// One life of one process: nobody else ever writes under its name, so nothing that is written needs a lock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(in crate::object) struct Writer {
    started_ms: u64,
    random: u64,
}

impl Writer {
    /// A new name. The clock orders writers roughly; the seed that the system gives to hash maps tells them apart.
    pub(in crate::object) fn new() -> Self {
        let started_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_millis() as u64);
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self { started_ms, random: hasher.finish() }
    }

    /// What makes its pauses differ from others'.
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

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Fixed width, so that names sort by age.
        write!(f, "{:012x}-{:016x}", self.started_ms, self.random)
    }
}

impl FromStr for Writer {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let (started, random) = name.split_once('-').ok_or(())?;
        let number = |hex| u64::from_str_radix(hex, 16).map_err(|_| ());
        let writer = Self { started_ms: number(started)?, random: number(random)? };
        // Exactly as we write it: two spellings would be two writers.
        if writer.to_string() == name { Ok(writer) } else { Err(()) }
    }
}

/// An object of blocks: a writer numbers its own, whosever blocks they hold.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(in crate::object) struct ObjectId {
    pub(in crate::object) writer: Writer,
    pub(in crate::object) number: u64,
}

impl ObjectId {
    /// Which object, or manifest, lies at a path, if that is how we name them.
    pub(in crate::object) fn at(path: &Path) -> Option<Self> {
        let mut parts = path.as_ref().rsplit('/');
        let (number, writer) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { writer, number })
    }
}

/// Names of objects under one prefix.
#[derive(Clone, Debug)]
pub(in crate::object) struct Layout {
    prefix: Path,
}

impl Layout {
    pub(in crate::object) fn new(prefix: &str) -> Self {
        Self { prefix: Path::from(prefix) }
    }

    /// The writers stand below it.
    pub(in crate::object) fn manifests(&self) -> Path {
        self.prefix.clone().join("manifests")
    }

    pub(in crate::object) fn manifests_of(&self, writer: Writer) -> Path {
        self.manifests().join(writer.to_string())
    }

    pub(in crate::object) fn manifest(&self, writer: Writer, number: u64) -> Path {
        self.manifests_of(writer).join(format!("{number:012}"))
    }

    /// A name that no object has, of a process: what reading it shows is how the store answers.
    pub(in crate::object) fn absent(&self, own: Writer) -> Path {
        self.manifests_of(own).join("absent")
    }

    /// What is about to be deleted stands below it.
    pub(in crate::object) fn removals(&self) -> Path {
        self.prefix.clone().join("removals")
    }

    pub(in crate::object) fn removal(&self, collector: Writer) -> Path {
        self.removals().join(collector.to_string())
    }

    /// What was used stands below it.
    pub(in crate::object) fn all_uses(&self) -> Path {
        self.prefix.clone().join("uses")
    }

    pub(in crate::object) fn uses(&self, reader: Writer) -> Path {
        self.all_uses().join(reader.to_string())
    }

    /// Says when somebody last began to collect.
    pub(in crate::object) fn collected(&self) -> Path {
        self.prefix.clone().join("collected")
    }

    /// All objects of blocks stand below it.
    pub(in crate::object) fn all_blocks(&self) -> Path {
        self.prefix.clone().join("blocks")
    }

    pub(in crate::object) fn blocks(
        &self,
        domain: DomainId,
        fingerprint: Fingerprint,
        writer: Writer,
        number: u64,
    ) -> Path {
        let under = self.all_blocks().join(domain.to_string()).join(fingerprint.to_string());
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
    fn an_object_is_known_by_its_path() {
        let (writer, layout) = (Writer::new(), Layout::new("kv/of/all"));
        let path = layout.blocks(DomainId::SHARED, Fingerprint::from_bytes([7; 32]), writer, 42);
        assert_eq!(ObjectId::at(&path), Some(ObjectId { writer, number: 42 }));
        assert_eq!(ObjectId::at(&layout.manifests_of(writer)), None);
        assert_eq!(Writer::from_bytes(writer.to_bytes()), writer);
    }

    #[test]
    fn a_writer_is_read_back_from_its_name_and_from_no_other() {
        let writer = Writer::new();
        assert_eq!(writer.to_string().parse(), Ok(writer));
        assert_ne!(Writer::new(), writer);
        for other in ["", "-", "1-2", "../../etc", &writer.to_string().to_uppercase()[..5]] {
            assert_eq!(other.parse::<Writer>(), Err(()));
        }
    }
}
