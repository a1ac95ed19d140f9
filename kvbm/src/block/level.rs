//! The tiers that store blocks, from the fastest to the slowest, and their labels.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A tier that stores blocks. Ordered from the fastest to the slowest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Device memory, owned by the engine.
    G1,
    /// Host memory of the same process.
    G2,
    /// Local SSD.
    G3,
    /// Shared flash: a folder that several processes share, faster than G4.
    #[serde(rename = "g3_5")]
    G3_5,
    /// Shared object storage.
    G4,
    /// Another worker's memory.
    Peer,
}

impl Level {
    /// All levels, fastest first.
    pub const ALL: [Self; 6] = [Self::G1, Self::G2, Self::G3, Self::G3_5, Self::G4, Self::Peer];

    /// The label in metrics, logs and headers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::G1 => "g1",
            Self::G2 => "g2",
            Self::G3 => "g3",
            Self::G3_5 => "g3_5",
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
