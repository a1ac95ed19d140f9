//! A check of a store with one small object: whether it can be listed, written, read and deleted.

use super::client::health::StoreHealth;
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
            return Err(ProbeError { step: "read from it", why });
        }
        deleted
    }
}

fn failed(step: &'static str, error: &Error) -> ProbeError {
    let why = match StoreHealth::from(error) {
        StoreHealth::Unavailable(why) | StoreHealth::Refused(why) => why,
        StoreHealth::Starting | StoreHealth::Ready => error.to_string(),
    };
    ProbeError { step, why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Credentials;

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
