//! Files of API keys for tests, and requests with a key.

use axum::body::Body;
use axum::http::Request;
use frontend::{ApiKey, KeyEntry, KeyFile, Settings};
use std::path::PathBuf;

/// A key file in a folder of its own.
pub(crate) struct Keys {
    folder: tempfile::TempDir,
}

impl Keys {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("keys.toml")
    }

    /// Adds a key, to which `change` may give limits and a tenant.
    pub(crate) fn add(&self, name: &str, change: impl FnOnce(&mut KeyEntry)) -> String {
        let key = ApiKey::generate().unwrap();
        let mut entry = KeyEntry::new(name, key.hash());
        change(&mut entry);
        KeyFile::change(&self.path(), |file| {
            file.keys.push(entry);
            Ok(())
        })
        .unwrap();
        key.reveal().to_owned()
    }

    pub(crate) fn settings(&self) -> Settings {
        Settings { api_keys_file: Some(self.path()), ..Settings::default() }
    }
}

pub(crate) fn with_key(mut request: Request<Body>, key: &str) -> Request<Body> {
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}
