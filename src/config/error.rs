//! Errors of a configuration. All of them are reported at once, each with key, value, origin and what is expected.

use std::fmt;
use std::path::PathBuf;

/// What stands for the user and the password of a URL in a message.
const HIDDEN: &str = "***";

/// All errors of a configuration; at least one.
#[derive(Debug)]
pub struct Errors(pub Vec<Error>);

/// One error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is missing or cannot be read.
    #[error("configuration file {}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// The file is not TOML.
    #[error("configuration file {}, line {line}: {error}", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The message of the parser.
        error: String,
    },
    /// The key does not exist.
    #[error(
        "unknown key `{key}` ({}){}",
        without_password(.origin),
        .meant.as_ref().map(|meant| format!("; {meant}")).unwrap_or_default()
    )]
    UnknownKey {
        /// The key as it was written.
        key: String,
        /// The source of the value.
        origin: String,
        /// The key that was probably meant, or what to do instead.
        meant: Option<String>,
    },
    /// The value is invalid.
    #[error("{key} = {} ({}): {problem}", without_password(.value), without_password(.origin))]
    Value {
        /// The key.
        key: String,
        /// The value as it was written.
        value: String,
        /// The source of the value.
        origin: String,
        /// What is expected.
        problem: String,
    },
    /// Values that contradict each other; the text names the keys.
    #[error("{0}")]
    Check(String),
    /// No folder for models and blocks is known.
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
            write!(f, "\nremove the unknown keys and run `blockyard serve --print-config` to list all keys")?;
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

/// The text without the users and passwords of its URLs: messages are logged. A user without a password is kept where
/// it can be a name, as the container in `abfss://container@account`.
fn without_password(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + "://".len());
        shown.push_str(before);
        let is_authority = |c: char| !matches!(c, '/' | '?' | '#' | '"' | '\'' | ',' | '\\') && !c.is_whitespace();
        let authority = &after[..after.find(|c| !is_authority(c)).unwrap_or(after.len())];
        rest = after;
        if let Some((user, _)) = authority.rsplit_once('@')
            && (user.contains(':') || before.ends_with("http://") || before.ends_with("https://"))
        {
            shown.push_str(HIDDEN);
            rest = &after[user.len()..];
        }
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use super::without_password;

    #[test]
    fn passwords_of_urls_are_hidden() {
        for (text, shown) in [
            ("http://ann:secret@a:8000/b@c", "http://***@a:8000/b@c"),
            ("[\"https://secret@a\", \"http://b:p@ss@c\"]", "[\"https://***@a\", \"http://***@c\"]"),
            ("--set upstreams=[http://ann:secret@a]", "--set upstreams=[http://***@a]"),
            ("nats://ann:secret@a:4222,nats://b", "nats://***@a:4222,nats://b"),
            ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
            ("http://a/?to=ann@b", "http://a/?to=ann@b"),
            ("a:b@c", "a:b@c"),
            ("://", "://"),
        ] {
            assert_eq!(without_password(text), shown);
        }
    }
}
