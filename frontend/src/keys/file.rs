//! The key file: reads, checks and replaces it.

use super::{KeyHash, is_name};
use chrono::DateTime;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::num::NonZero;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use toml::value::Datetime;

/// Maximum size of the file: about 50,000 keys, more than one gateway has users.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Minimum length in bytes of the part of a message that says something without what it quotes.
const MIN_PROBLEM: usize = 10;
/// The first line of a file that is written.
const NOTE: &str =
    "# Written by `blockyard key`, which keeps no other comments. It has hashes of keys, not the keys.\n\n";

/// The content of a key file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyFile {
    /// One entry per key.
    #[serde(default)]
    pub keys: Vec<KeyEntry>,
}

/// One key: its hash, what it may use, and its limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// The name, by which the log and `blockyard key` call it.
    pub name: String,
    /// The hash of the key.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub hash: KeyHash,
    /// When the key was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<Datetime>,
    /// The tenant of requests with this key. Default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The models that it may use. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    /// Maximum requests per minute. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<NonZero<u32>>,
    /// Maximum tokens per minute, of prompts and outputs together. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<NonZero<u32>>,
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file does not exist.
    #[error("the key file {0:?} does not exist; create it with the first key: blockyard key add --file {0:?} NAME")]
    Missing(PathBuf),
    /// The file cannot be read or written.
    #[error("the key file {path:?}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The content is wrong.
    #[error("the key file {path:?}{}: {problem}", .line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line, from 1, if it is known.
        line: Option<usize>,
        /// What is wrong.
        problem: String,
    },
}

impl KeyFileError {
    /// The problem for `/ready`, which needs no key: without the path, and without text of the file, which may be a key
    /// in a wrong place.
    pub(crate) fn without_content(&self) -> String {
        match self {
            Self::Missing(_) => "does not exist".to_owned(),
            Self::Io { source, .. } => format!("cannot be read: {source}"),
            Self::Invalid { line, problem, .. } => {
                // Messages quote what the file has.
                let unquoted = problem.split(['`', '"', '\'']).next().unwrap_or_default();
                let known = unquoted.trim_end().trim_end_matches("expected").trim_end_matches([' ', ',', ':']);
                let known = if known.len() < MIN_PROBLEM { "the content is not what is expected" } else { known };
                let line = line.map(|line| format!("line {line}: ")).unwrap_or_default();
                format!("is not valid: {line}{known}")
            }
        }
    }
}

impl KeyEntry {
    /// An entry for a key that is created now, without limits.
    pub fn new(name: impl Into<String>, hash: KeyHash) -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let date = i64::try_from(seconds).ok().and_then(DateTime::from_timestamp_secs).unwrap_or_default();
        Self {
            name: name.into(),
            hash,
            // A year beyond 9999 is no date of TOML.
            created: date.format("%Y-%m-%dT%H:%M:%SZ").to_string().parse().ok(),
            tenant: None,
            models: None,
            requests_per_minute: None,
            tokens_per_minute: None,
        }
    }
}

impl KeyFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, KeyFileError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => KeyFileError::Missing(path.into()),
            _ => KeyFileError::Io { path: path.into(), source },
        };
        let invalid = |line, problem: String| KeyFileError::Invalid { path: path.into(), line, problem };
        // Opening a pipe would wait for its writer.
        if !fs::metadata(path).map_err(failed)?.is_file() {
            return Err(invalid(None, "expected a regular file".into()));
        }
        let mut text = String::new();
        File::open(path).map_err(failed)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(invalid(None, format!("it is larger than {} MiB", MAX_FILE_BYTES >> 20)));
        }
        let file: Self = toml::from_str(&text).map_err(|error| {
            // The message alone: the whole error repeats the line, which may have a key in place of its hash.
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            invalid(line, error.message().replace("a nonzero u32", "a whole number, 1 or more"))
        })?;
        file.check().map_err(|problem| invalid(None, problem))?;
        Ok(file)
    }

    /// Changes a file, and replaces it at once. A missing file counts as empty. Other processes that change it wait.
    pub fn change<T>(path: &Path, change: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, KeyFileError> {
        let io = |source| KeyFileError::Io { path: path.into(), source };
        // A link stays; what it points to is replaced.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.into());
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = File::open(folder).map_err(io)?;
        folder.lock().map_err(io)?;
        let mut file = match Self::read(path) {
            Err(KeyFileError::Missing(_)) => Self::default(),
            read => read?,
        };
        let invalid = |problem| KeyFileError::Invalid { path: path.clone(), line: None, problem };
        let outcome = change(&mut file).map_err(invalid)?;
        file.check().map_err(invalid)?;
        file.replace(path).map_err(io)?;
        folder.sync_all().map_err(io)?;
        Ok(outcome)
    }

    /// The problem with the entries, if there is one.
    fn check(&self) -> Result<(), String> {
        let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
        for KeyEntry { name, hash, tenant, models, .. } in &self.keys {
            let wrong = |what: &str| Err(format!("key {name:?}: {what}"));
            let expected = "expected 1 to 64 letters, digits or `-_.:/+=@`";
            if name.is_empty() || !is_name(name) {
                return wrong(&format!("the name: {expected}"));
            }
            if tenant.as_ref().is_some_and(|tenant| tenant.is_empty() || !is_name(tenant)) {
                return wrong(&format!("the tenant: {expected}"));
            }
            if models.as_ref().is_some_and(Vec::is_empty) {
                return wrong("models = [] would allow no model; leave it out to allow all");
            }
            if !names.insert(name) {
                return wrong("the name is used twice; choose another, or remove the other key first");
            }
            if !hashes.insert(hash) {
                return wrong("another name has the same hash; remove one of them");
            }
        }
        Ok(())
    }

    /// Writes the file beside the old one, and renames it: a reader finds the one or the other.
    fn replace(&self, path: &Path) -> io::Result<()> {
        let text = NOTE.to_owned() + &toml::to_string(self).map_err(io::Error::other)?;
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
        let new = path.with_file_name(format!(".{name}.{}.new", std::process::id()));
        // Left by a process with the same id that was killed.
        let _ = fs::remove_file(&new);
        let written = (|| {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            if let Ok(old) = fs::metadata(path) {
                // A server that runs as another user must be able to read the file still, as it could before.
                if fchown(&file, Some(old.uid()), Some(old.gid())).is_ok() {
                    file.set_permissions(Permissions::from_mode(old.mode() & 0o640 | 0o600))?;
                }
            }
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, path)
        })();
        if written.is_err() {
            // The first error is the one to report.
            let _ = fs::remove_file(&new);
        }
        written
    }
}

fn as_text<S: Serializer>(hash: &KeyHash, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(hash)
}

fn from_text<'de, D: Deserializer<'de>>(from: D) -> Result<KeyHash, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::ApiKey;

    fn entry(name: &str) -> KeyEntry {
        KeyEntry {
            created: Some("2026-11-23T04:00:00Z".parse().unwrap()),
            tenant: Some("ann".into()),
            models: Some(vec!["org/m".into()]),
            requests_per_minute: NonZero::new(60),
            ..KeyEntry::new(name, ApiKey::generate().unwrap().hash())
        }
    }

    #[test]
    fn a_change_keeps_other_keys_and_lets_only_the_owner_read() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("keys.toml"), folder.path().join("link"));
        assert!(matches!(KeyFile::read(&path), Err(KeyFileError::Missing(_))));
        let add = |name: &str| {
            KeyFile::change(&path, |file| {
                file.keys.push(entry(name));
                Ok(())
            })
        };
        add("one").unwrap();
        add("two").unwrap();
        assert!(add("two").unwrap_err().to_string().contains("used twice"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let remove = |file: &mut KeyFile| {
            file.keys.retain(|key| key.name != "one");
            Ok(())
        };
        KeyFile::change(&link, remove).unwrap();
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(&path), 0o600);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let [key] = &KeyFile::read(&link).unwrap().keys[..] else { panic!("one key is left") };
        assert_eq!((&*key.name, key.tenant.as_deref()), ("two", Some("ann")));
        assert_eq!(key.created.unwrap().to_string(), "2026-11-23T04:00:00Z");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");

        fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        add("three").unwrap();
        assert_eq!(mode(&path), 0o640, "the group of the server may still read it");
    }

    #[test]
    fn a_wrong_file_is_refused_with_line_and_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let hash = format!("sha256:{}", "a1".repeat(32));
        let secret = "by-0123456789";
        for (text, parts) in [
            (format!("\n[[keys]]\nname = 'a'\nhash = '{secret}'\n"), ["line 4", "64 hexadecimal digits"]),
            (format!("[[keys]]\nname = 'a'\nhash = '{hash}'\nmodel = 'm'"), ["line 4", "model"]),
            (format!("[[keys]]\nname = 'a'\nhash = '{hash}'\nrequests_per_minute = 0"), ["line 4", "1 or more"]),
            (format!("[[keys]]\nname = 'a b'\nhash = '{hash}'"), ["\"a b\"", "letters"]),
            (format!("[[keys]]\nname = 'a'\nhash = '{hash}'\nmodels = []"), ["models = []", "leave it out"]),
            (format!("[[keys]]\nname = 'a'\nhash = '{hash}'\ntenant = 'a b'"), ["tenant", "letters"]),
            (format!("[[keys]]\nname='a'\nhash='{hash}'\n[[keys]]\nname='b'\nhash='{hash}'"), ["\"b\"", "same hash"]),
            (format!("[[keys]\n{secret}"), ["line 1", "keys.toml"]),
        ] {
            fs::write(&path, &text).unwrap();
            let error = KeyFile::read(&path).unwrap_err();
            let public = error.without_content();
            let error = error.to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
            assert!(!error.contains(secret), "{error}");
            assert!(public.starts_with("is not valid: ") && !public.contains("keys.toml"), "{public}");
        }
        for (text, public) in [
            ("by-0123456789", "is not valid: line 1: key with no value"),
            ("keys = 'by-0123456789'", "is not valid: line 1: invalid type: string"),
            ("by-0123456789 = 1", "is not valid: line 1: unknown field"),
            ("[[keys]]\nname = 'a'\nhash = 'x'", "is not valid: line 3: the content is not what is expected"),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(KeyFile::read(&path).unwrap_err().without_content(), public, "{text}");
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(KeyFile::read(&path).unwrap_err().without_content(), "does not exist");
        assert!(KeyFile::read(folder.path()).unwrap_err().to_string().contains("regular file"));
    }
}
