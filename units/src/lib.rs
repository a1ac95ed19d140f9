//! Durations and sizes in the configuration: text with a unit, read and printed without loss.
//!
//! ```text
//!   "250ms", "30s", "5m", "1h"   ⇄  HumanDuration(Duration)
//!   "4GiB", "512MB", "65536B"    ⇄  ByteSize(u64)
//! ```
//! A number without a unit is an error that says what would be right; only 0 needs none. The crates `humantime` and `bytesize`
//! are not used: `bytesize` prints sizes rounded, and takes numbers without a unit as bytes; `humantime` has no error that names
//! the right spelling of a number without a unit.
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

/// A text is no duration or no size; the message says what would be right.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);
