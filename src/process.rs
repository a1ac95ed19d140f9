//! The process on its machine: available memory and threads, limits of the operating system, the format and the writer
//! of the log, panics, process metrics, and the text of errors.

mod error_text;
pub mod log_fields;
pub mod log_lines;
pub mod log_writer;
pub mod machine;
pub(crate) mod metrics;
pub mod panics;

pub use error_text::with_causes;
