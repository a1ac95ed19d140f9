//! Sources of master keys. Secrets are never printed: errors name the position of a malformed key, not its content.

use super::master_key::MasterKeys;
use crate::folder::open_regular;
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The source of master keys. Each is 64 hex digits; several are separated by white space or commas. The first one
/// wraps data keys, the others only unwrap. To rotate, put a new key first, and remove the old one once it wraps
/// nothing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeySource {
    /// A file. It is read again when an unknown master key is needed.
    File(PathBuf),
    /// An environment variable.
    Env(String),
    /// A program that writes the keys to its standard output, for instance a client of a vault. It is run again when an
    /// unknown master key is needed.
    Command(Vec<String>),
}

/// Reads an environment variable. Provided by the loader of the configuration.
pub type Environment = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// There is no master key.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The file cannot be read.
    #[error("master key file {path:?}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The variable is not set.
    #[error("master key: environment variable {0} is not set")]
    Env(String),
    /// The program failed.
    #[error("master key command {program:?}: {source}")]
    Command {
        /// The program.
        program: String,
        /// The error.
        source: io::Error,
    },
    /// The source contains no key.
    #[error("{place} holds no master key: expected 64 hex digits (make one with `openssl rand -hex 32`)")]
    Empty {
        /// Description of the source.
        place: String,
    },
    /// An entry is not a key.
    #[error("{place}: entry {entry} is not a master key: expected 64 hex digits, found {found}")]
    Malformed {
        /// Description of the source.
        place: String,
        /// Number of the entry, from 1.
        entry: usize,
        /// Number and kind of the characters.
        found: String,
    },
}

/// Maximum size of a source: about a thousand keys.
const MAX_BYTES: u64 = 64 << 10;
/// Maximum run time of the program.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

impl KeySource {
    /// Checks that there are keys. Blocking; runs the program if there is one.
    pub fn check(&self, environment: &Environment) -> Result<(), SourceError> {
        self.read(environment).map(drop)
    }

    /// Reads the keys. Blocking.
    pub(super) fn read(&self, environment: &Environment) -> Result<MasterKeys, SourceError> {
        match self {
            Self::File(path) => {
                let failed = |source| SourceError::File { path: path.clone(), source };
                let text = open_regular(path, OpenOptions::new().read(true)).and_then(bounded).map_err(failed)?;
                parse(&text, format!("master key file {}", path.display()))
            }
            Self::Env(name) => {
                let text = environment(name).ok_or_else(|| SourceError::Env(name.clone()))?;
                parse(&text, format!("environment variable {name}"))
            }
            Self::Command(words) => {
                let program = words.first().cloned().unwrap_or_default();
                let failed = |source| SourceError::Command { program: program.clone(), source };
                parse(&run(words).map_err(failed)?, format!("output of master key command {program}"))
            }
        }
    }
}

fn parse(text: &str, place: String) -> Result<MasterKeys, SourceError> {
    let mut keys = Vec::new();
    let entries = text.split(|c: char| c.is_whitespace() || c == ',').filter(|entry| !entry.is_empty());
    for (n, entry) in entries.enumerate() {
        let Some(key) = unhex(entry) else {
            let digits = entry.chars().all(|c| c.is_ascii_hexdigit());
            let found = format!("{} {}", entry.chars().count(), if digits { "hex digits" } else { "other characters" });
            return Err(SourceError::Malformed { place, entry: n + 1, found });
        };
        keys.push(key);
    }
    let mut keys = keys.into_iter();
    let first = keys.next().ok_or(SourceError::Empty { place })?;
    Ok(MasterKeys::new(first, keys))
}

/// Decodes exactly `2 * N` hex digits.
pub(super) fn unhex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let digits = digits.as_bytes();
    let value = |at: usize| char::from(digits[at]).to_digit(16).map(|digit| digit as u8);
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = value(2 * n)? << 4 | value(2 * n + 1)?;
    }
    Some(bytes)
}

fn bounded(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    match from.take(MAX_BYTES + 1).read_to_string(&mut text)? as u64 {
        0..=MAX_BYTES => Ok(text),
        _ => Err(io::Error::other(format!("more than {MAX_BYTES} bytes"))),
    }
}

fn run(words: &[String]) -> io::Result<String> {
    let (program, arguments) = words.split_first().ok_or_else(|| io::Error::other("no program given"))?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let output = child.stdout.take().expect("piped");
    let reading = std::thread::spawn(move || bounded(output));
    let began = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if began.elapsed() < COMMAND_TIMEOUT => std::thread::sleep(Duration::from_millis(10)),
            None => {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {COMMAND_TIMEOUT:?}")));
            }
        }
    };
    if !status.success() {
        return Err(io::Error::other(format!("failed with {status}")));
    }
    reading.join().map_err(|_| io::Error::other("cannot read its output"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "0101010101010101010101010101010101010101010101010101010101010101";
    const TWO: &str = "0202020202020202020202020202020202020202020202020202020202020202";

    fn none() -> Environment {
        Arc::new(|_| None)
    }

    fn error(source: &KeySource, environment: &Environment) -> String {
        source.read(environment).err().expect("no key").to_string()
    }

    #[test]
    fn every_source_returns_its_keys_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, format!("{TWO}\n{ONE}\n")).unwrap();
        let environment: Environment = Arc::new(|name| (name == "KEYS").then(|| format!("{TWO},{ONE}")));
        let echo = ["echo", TWO, ONE].map(String::from).to_vec();
        for source in [KeySource::File(path), KeySource::Env("KEYS".into()), KeySource::Command(echo)] {
            let masters = source.read(&environment).unwrap();
            assert_eq!(masters.first(), MasterKeys::new([2; 32], []).first(), "{source:?}");
            assert!(masters.has(MasterKeys::new([1; 32], []).first()));
        }
    }

    #[test]
    fn a_named_pipe_is_no_key_file_and_blocks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let message = error(&KeySource::File(path), &none());
        assert!(message.ends_with("/pipe\": expected a regular file"), "{message}");
    }

    #[test]
    fn errors_name_the_place_and_never_the_secret() {
        let message = error(&KeySource::File("/nowhere/keys".into()), &none());
        assert!(message.contains("/nowhere/keys"), "{message}");
        let message = error(&KeySource::Env("KEYS".into()), &none());
        assert!(message.contains("KEYS is not set"), "{message}");
        let with = |text: String| -> Environment { Arc::new(move |_| Some(text.clone())) };
        let message = error(&KeySource::Env("KEYS".into()), &with("  ".into()));
        assert!(message.contains("holds no master key"), "{message}");
        let message = error(&KeySource::Env("KEYS".into()), &with(format!("{ONE} {}", &TWO[2..])));
        assert!(
            message.contains("entry 2") && message.contains("62 hex digits") && !message.contains(&TWO[2..10]),
            "{message}"
        );
        let message = error(&KeySource::Env("KEYS".into()), &with("hunter2".into()));
        assert!(message.contains("7 other characters") && !message.contains("hunter2"), "{message}");
        let message = error(&KeySource::Command(vec!["false".into()]), &none());
        assert!(message.contains("false") && message.contains("exit status: 1"), "{message}");
        assert!(error(&KeySource::Command(vec![]), &none()).contains("no program given"));
    }
}
