//! What is wrong with a configuration, all of it at once, with key, value, origin and what would be right.

use std::fmt;
use std::path::PathBuf;

/// The configuration cannot be used; at least one reason.
#[derive(Debug)]
pub struct Errors(pub Vec<Error>);

/// One thing that is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not there or cannot be read.
    #[error("configuration file {}: {error}", .path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// The file is not TOML.
    #[error("configuration file {}, line {line}: {error}", .path.display())]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What the parser says.
        error: String,
    },
    /// There is no such key.
    #[error("unknown key `{key}` ({origin}){}", .meant.as_ref().map(|meant| format!("; {meant}")).unwrap_or_default())]
    UnknownKey {
        /// As it was written.
        key: String,
        /// Where it was written.
        origin: String,
        /// The key that was probably meant, or how the wish is met here.
        meant: Option<String>,
    },
    /// The key is known, the value is not possible.
    #[error("{key} = {value} ({origin}): {problem}")]
    Value {
        /// The key.
        key: String,
        /// The value as it was written.
        value: String,
        /// Where it was written.
        origin: String,
        /// What would be right.
        problem: String,
    },
    /// Values that do not go together; the text names the keys.
    #[error("{0}")]
    Check(String),
    /// There is no folder to keep models and blocks in.
    #[error("neither HOME nor XDG_CACHE_HOME is set; say where models and blocks may be kept: --data-dir DIR")]
    NoCache,
}

impl fmt::Display for Errors {
    /// One error in one line; several below a line that counts them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [error] => write!(f, "{error}")?,
            errors => {
                write!(f, "the configuration has {} errors:", errors.len())?;
                errors.iter().try_for_each(|error| write!(f, "\n  {error}"))?;
            }
        }
        if self.0.iter().any(|error| matches!(error, Error::UnknownKey { .. })) {
            write!(f, "\n`blockyard serve --print-config` without these lists all keys")?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}

impl From<Error> for Errors {
    fn from(error: Error) -> Self {
        Self(vec![error])
    }
}
