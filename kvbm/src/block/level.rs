//! The tiers in which blocks rest, from the fastest to the slowest, and their labels.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a block rests, fastest first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Device memory, owned by the engine.
    G1,
    /// Host memory of the same process.
    G2,
    /// Local SSD.
    G3,
    /// A folder on flash that several processes share, faster than G4: tier G3.5.
    #[serde(rename = "g3_5")]
    Pod,
    /// Shared object storage.
    G4,
    /// Another worker's memory.
    Peer,
}

impl Level {
    /// All levels, fastest first.
    pub const ALL: [Self; 6] = [Self::G1, Self::G2, Self::G3, Self::Pod, Self::G4, Self::Peer];

    /// The label in metrics, logs and headers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::G1 => "g1",
            Self::G2 => "g2",
            Self::G3 => "g3",
            Self::Pod => "g3_5",
            Self::G4 => "g4",
            Self::Peer => "peer",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
