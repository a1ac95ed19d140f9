//! A check of a store with one small object: whether it can be listed, written, read and deleted.

use super::client::health::{NO_ROLE, StoreHealth};
use super::client::url::{Access, StoreLocation};
use super::format::layout::{InstanceId, Layout};
use object_store::local::LocalFileSystem;
use object_store::{Error, ObjectStore, ObjectStoreExt};
use std::sync::Arc;
use std::time::Duration;

/// The step that failed, and why.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot {step}: {why}")]
pub struct ProbeError {
    /// `use it`, `list it`, `write to it`, `read from it` or `delete from it`.
    pub step: &'static str,
    /// The error as text.
    pub why: String,
    /// Whether credentials, rights or the store itself are missing, and not a way to reach it.
    pub is_refused: bool,
}

/// Content of the object. Its meaning is for people who find one that could not be deleted.
const CONTENT: &[u8] = b"written by blockyard doctor; can be deleted";

impl StoreLocation {
    /// Lists the manifests under the prefix, and writes, reads and deletes an object beside them, which no process
    /// takes for a block. Each request may take `timeout`. A folder must exist.
    pub async fn probe(&self, access: &Access, timeout: Duration) -> Result<(), ProbeError> {
        let (store, layout) = match self {
            Self::Folder(folder) => {
                let store = LocalFileSystem::new_with_prefix(folder).map_err(|error| failed("use it", &error))?;
                (Arc::new(store) as Arc<dyn ObjectStore>, Layout::new(""))
            }
            Self::Cloud { prefix, .. } => {
                let client = self.client(access, timeout).map_err(|error| failed("use it", &error))?;
                (client.expect("a cloud has a client"), Layout::new(prefix.as_ref()))
            }
        };
        let (manifests, object) = (layout.manifests(), layout.doctor(InstanceId::new()));
        store.list_with_delimiter(Some(&manifests)).await.map_err(|error| failed("list it", &error))?;
        store.put(&object, CONTENT.into()).await.map_err(|error| failed("write to it", &error))?;
        let read = async { store.get(&object).await?.bytes().await };
        let read = read.await.map_err(|error| failed("read from it", &error));
        // Also after a failed read, so that nothing stays behind.
        let deleted = store.delete(&object).await.map_err(|error| failed("delete from it", &error));
        if read? != CONTENT {
            let why = "the object that was just written has another content".to_owned();
            return Err(ProbeError { step: "read from it", why, is_refused: false });
        }
        deleted
    }
}

fn failed(step: &'static str, error: &Error) -> ProbeError {
    let (why, is_refused) = match StoreHealth::from(error) {
        StoreHealth::Refused(why) => (why, true),
        StoreHealth::Unavailable(why) => {
            let has_no_credentials = why.starts_with(NO_ROLE);
            (why, has_no_credentials)
        }
        StoreHealth::Starting | StoreHealth::Ready => (error.to_string(), false),
    };
    ProbeError { step, why, is_refused }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Credentials;

    #[test]
    fn missing_credentials_are_no_problem_of_the_network() {
        let of = |message: &str| failed("list it", &Error::Generic { store: "S3", source: message.into() });
        assert!(of("Error performing PUT http://169.254.169.254/latest/api/token in 1 s").is_refused);
        assert!(of("status code: 403 Forbidden").is_refused);
        assert!(!of("connection refused").is_refused);
    }

    #[tokio::test]
    async fn a_probed_folder_is_left_as_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let access = Access { endpoint: None, region: None, credentials: Credentials::default() };
        let location = StoreLocation::Folder(folder.path().into());
        assert_eq!(location.probe(&access, Duration::from_secs(5)).await, Ok(()));
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 0);
        let missing = StoreLocation::Folder(folder.path().join("missing"));
        assert_eq!(missing.probe(&access, Duration::from_secs(5)).await.expect_err("no folder").step, "use it");
    }
}
