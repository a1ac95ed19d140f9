//! Durations and sizes of the configuration: text with a unit, parsed and printed without loss.
//!
//! ```text
//!   "250ms", "30s", "5m", "1h"   ⇄  HumanDuration(Duration)
//!   "4GiB", "512MB", "65536B"    ⇄  ByteSize(u64)
//! ```
//! A number without a unit is an error that shows the correct spelling; only 0 needs no unit. Why not other crates:
//! `bytesize` prints rounded sizes and reads numbers without a unit as bytes; the errors of `humantime` do not show the
//! correct spelling of a number without a unit.
//!
//! ```
//! use units::{ByteSize, HumanDuration};
//!
//! assert_eq!("90m".parse::<HumanDuration>()?.0.as_secs(), 5400);
//! assert_eq!("1.5GiB".parse::<ByteSize>()?.to_string(), "1536MiB");
//! assert!("30".parse::<HumanDuration>().unwrap_err().to_string().contains("\"30s\""));
//! # Ok::<(), units::Invalid>(())
//! ```

#![forbid(unsafe_code)]

mod duration;
mod size;
mod text;

pub use duration::HumanDuration;
pub use size::ByteSize;

/// A text is not a valid duration or size. The message shows the correct spelling.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);
