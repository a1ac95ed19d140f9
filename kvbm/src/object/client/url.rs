//! Where a shared store is: one URL, or a folder; and how to get in.
//!
//! ```text
//!   s3://BUCKET/PREFIX      az://CONTAINER/PREFIX      gs://BUCKET/PREFIX      /FOLDER      file:///FOLDER
//! ```
//! The other spellings that `object_store` knows (`abfss://…`, `https://….blob.core.windows.net/…`, `https://s3.…`) count too.
//! A URL never carries a credential, so it can be printed; credentials are handed over by whoever reads the environment.

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{ClientOptions, Error, ObjectStore, ObjectStoreScheme, RetryConfig};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// A connection that takes longer to open has failed: the farthest region is a third of a second away.
const CONNECT: Duration = Duration::from_secs(5);

/// Where a shared store is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Location {
    /// A folder, local or mounted.
    Folder(PathBuf),
    /// A bucket or a container.
    Cloud {
        /// Whose protocol.
        cloud: Cloud,
        /// Which bucket.
        url: Url,
        /// Below which name in it.
        prefix: Path,
    },
}

/// Whose protocol a store speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cloud {
    /// Amazon's, and that of everything compatible.
    S3,
    /// Azure Blob Storage.
    Azure,
    /// Google Cloud Storage.
    Google,
}

/// The address of a server that stands in for a cloud's own: `http://…` or `https://…`, without a credential.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint(Url);

/// A location or an endpoint that cannot be one, and what would be right.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

/// What the environment knows of clouds, as they name it: `AWS_…`, `AZURE_…`, `GOOGLE_…`. Never printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Credentials(Vec<(String, String)>);

/// How to reach a cloud.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// Instead of the cloud's own server.
    pub endpoint: Option<Endpoint>,
    /// Where the bucket is, for S3.
    pub region: Option<String>,
    /// Who asks.
    pub credentials: Credentials,
}

impl Location {
    /// A client of a bucket or container whose requests end after `timeout`. Nothing is asked yet.
    pub fn client(&self, access: &Access, timeout: Duration) -> Result<Option<Arc<dyn ObjectStore>>, Error> {
        let Self::Cloud { cloud, url, .. } = self else { return Ok(None) };
        // No other provider can be there: `rustls` is built with this one alone. An error says that it is set already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let endpoint = access.endpoint.as_ref().map(|endpoint| endpoint.0.as_str().trim_end_matches('/').to_owned());
        // Whoever writes `http://` means it.
        let in_clear = |endpoint: Option<String>| endpoint.is_some_and(|url| url.starts_with("http://"));
        let client = |allow_http| {
            let options = ClientOptions::new().with_connect_timeout(CONNECT).with_timeout(timeout);
            if allow_http { options.with_allow_http(true) } else { options }
        };
        // Repeating is ours: seeded, under one budget, in the runtime's time.
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        Ok(Some(match cloud {
            Cloud::S3 => {
                let region = access.region.iter().map(|region| (AmazonS3ConfigKey::Region, region.clone()));
                let endpoint = endpoint.map(|endpoint| (AmazonS3ConfigKey::Endpoint, endpoint));
                let options = access.credentials.options("AWS_").chain(region).chain(endpoint);
                let builder =
                    options.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
                let allow = in_clear(builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
                Arc::new(builder.with_url(url.as_str()).with_client_options(client(allow)).with_retry(once).build()?)
            }
            Cloud::Azure => {
                let endpoint = endpoint.map(|endpoint| (AzureConfigKey::Endpoint, endpoint));
                let options = access.credentials.options("AZURE_").chain(endpoint);
                let builder =
                    options.fold(MicrosoftAzureBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
                let allow = in_clear(builder.get_config_value(&AzureConfigKey::Endpoint));
                Arc::new(builder.with_url(url.as_str()).with_client_options(client(allow)).with_retry(once).build()?)
            }
            Cloud::Google => {
                let endpoint = endpoint.map(|endpoint| (GoogleConfigKey::BaseUrl, endpoint));
                let options = access.credentials.options("GOOGLE_").chain(endpoint);
                let builder = options
                    .fold(GoogleCloudStorageBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
                let allow = in_clear(builder.get_config_value(&GoogleConfigKey::BaseUrl));
                Arc::new(builder.with_url(url.as_str()).with_client_options(client(allow)).with_retry(once).build()?)
            }
        }))
    }
}

impl Cloud {
    /// What would make a refused request right.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::S3 => {
                "the bucket must exist in that region, and AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY in the \
                 environment, or the machine's role, must allow s3:ListBucket, s3:GetObject, s3:PutObject and \
                 s3:DeleteObject; tiers.g4.endpoint names a server other than Amazon's"
            }
            Self::Azure => {
                "the container must exist, and AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY (or a SAS token, \
                 or a workload's identity) in the environment must allow to list, read, write and delete blobs"
            }
            Self::Google => {
                "the bucket must exist, and GOOGLE_APPLICATION_CREDENTIALS (or GOOGLE_SERVICE_ACCOUNT) in the environment, \
                 or the machine's service account, must have the role storage.objectUser"
            }
        }
    }
}

impl Credentials {
    /// Picks out of an environment what clouds understand.
    pub fn from_environment<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let ours = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|cloud| name.starts_with(cloud));
        let picked = variables.into_iter().filter(|(name, value)| ours(name) && !value.is_empty());
        Self(picked.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    /// Those of one cloud that its client knows.
    fn options<K: FromStr>(&self, cloud: &'static str) -> impl Iterator<Item = (K, String)> {
        let of_cloud = self.0.iter().filter(move |(name, _)| name.starts_with(cloud));
        of_cloud.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())))
    }
}

impl fmt::Debug for Credentials {
    /// Names without values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl FromStr for Location {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = |why: &str| {
            let right = r#"expected "s3://bucket/prefix", "az://container/prefix", "gs://bucket/prefix" or a folder"#;
            Err(Invalid(format!("{why}{right}")))
        };
        if text.is_empty() {
            return wrong("");
        }
        if !text.contains("://") && !text.starts_with("file:") {
            return Ok(Self::Folder(text.into()));
        }
        let Ok(url) = Url::parse(text) else { return wrong("not a URL; ") };
        if url.scheme() == "file" {
            return url.to_file_path().map(Self::Folder).or_else(|()| wrong("a folder's URL has three slashes; "));
        }
        let (cloud, prefix) = match ObjectStoreScheme::parse(&url) {
            Ok((ObjectStoreScheme::AmazonS3, prefix)) => (Cloud::S3, prefix),
            Ok((ObjectStoreScheme::MicrosoftAzure, prefix)) => (Cloud::Azure, prefix),
            Ok((ObjectStoreScheme::GoogleCloudStorage, prefix)) => (Cloud::Google, prefix),
            Ok((ObjectStoreScheme::Http, _)) => {
                return wrong("a server of one's own is named by tiers.g4.endpoint, and its bucket here; ");
            }
            _ => return wrong(""),
        };
        // `container@account` is Azure's way to name an account.
        let names_a_user = !url.username().is_empty() && cloud != Cloud::Azure;
        if names_a_user || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
            return Err(Invalid(
                "a URL is printed and logged: put credentials into the environment instead (AWS_…, AZURE_…, GOOGLE_…)"
                    .into(),
            ));
        }
        let bucket = url.host_str().unwrap_or_default();
        if url.scheme() != "https" && url.username().is_empty() && !(3..=63).contains(&bucket.len()) {
            return wrong("the name of a bucket has 3 to 63 characters; ");
        }
        Ok(Self::Cloud { cloud, url, prefix })
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => path.display().fmt(f),
            Self::Cloud { url, .. } => f.write_str(url.as_str().trim_end_matches('/')),
        }
    }
}

impl FromStr for Endpoint {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let is_address = |url: &Url| {
            matches!(url.scheme(), "http" | "https")
                && url.has_host()
                && url.username().is_empty()
                && url.password().is_none()
                && url.query().is_none()
        };
        let url = Url::parse(text).ok().filter(is_address);
        url.map(Self).ok_or_else(|| {
            Invalid(
                r#"expected the address of a server, like "https://minio.internal:9000", without credentials"#.into(),
            )
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str().trim_end_matches('/'))
    }
}

impl TryFrom<String> for Location {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Location> for String {
    fn from(location: Location) -> Self {
        location.to_string()
    }
}

impl TryFrom<String> for Endpoint {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> Self {
        endpoint.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> String {
        match text.parse() {
            Ok(Location::Folder(path)) => format!("folder {}", path.display()),
            Ok(Location::Cloud { cloud, prefix, .. }) => format!("{cloud:?} {prefix}"),
            Err(Invalid(why)) => why,
        }
    }

    #[test]
    fn one_url_chooses_the_store() {
        for (text, chosen) in [
            ("/mnt/kv", "folder /mnt/kv"),
            ("kv", "folder kv"),
            ("file:///mnt/kv", "folder /mnt/kv"),
            ("s3://bucket/a/b", "S3 a/b"),
            ("s3://bucket", "S3 "),
            ("https://s3.eu-west-1.amazonaws.com/bucket/a", "S3 a"),
            ("az://container/a", "Azure a"),
            ("abfss://container@account.dfs.core.windows.net/a", "Azure a"),
            ("https://account.blob.core.windows.net/container/a", "Azure a"),
            ("gs://bucket/a/", "Google a"),
        ] {
            assert_eq!(read(text), chosen, "{text}");
        }
        let printed = "s3://bucket/a/".parse::<Location>().unwrap().to_string();
        assert_eq!(printed, "s3://bucket/a", "one spelling: processes know a store by it");
    }

    #[test]
    fn what_cannot_be_a_store_is_refused_with_what_would_be_right() {
        for (text, said) in [
            ("", "s3://bucket/prefix"),
            ("ftp://host/a", "s3://bucket/prefix"),
            ("file://host/a", "three slashes"),
            ("s3://kv/a", "3 to 63"),
            ("http://127.0.0.1:9000/bucket", "tiers.g4.endpoint"),
            ("https://minio.internal/bucket", "tiers.g4.endpoint"),
            ("s3://key:secret@bucket/a", "environment"),
            ("s3://key@bucket/a", "environment"),
            ("az://container/a?sig=secret", "environment"),
        ] {
            assert!(read(text).contains(said), "{text}: {}", read(text));
            assert!(!read(text).contains("secret"), "{text}");
        }
        for text in ["minio:9000", "ftp://minio", "http://key:secret@minio", "https://"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn credentials_reach_the_client_and_nothing_else() {
        let environment =
            [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("HOME", "/"), ("AWS_REGION", "")];
        let credentials = Credentials::from_environment(environment);
        assert_eq!(format!("{credentials:?}"), r#"{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}"#);
        let access = Access { endpoint: None, region: Some("eu-west-1".into()), credentials };
        let client = |location: &Location| location.client(&access, Duration::from_secs(1)).unwrap();
        for location in ["s3://bucket/a", "s3a://bucket", "https://bucket.s3.eu-west-1.amazonaws.com"] {
            let client = client(&location.parse().unwrap()).expect("a cloud");
            assert!(client.to_string().contains("bucket"), "{client}");
        }
        assert!(client(&"folder".parse().unwrap()).is_none());
    }
}
