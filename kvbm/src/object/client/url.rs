//! The location of a shared store (a URL or a folder), and the access to it (endpoint, region, credentials).
//!
//! ```text
//!   s3://BUCKET/PREFIX      az://CONTAINER/PREFIX      gs://BUCKET/PREFIX      /FOLDER      file:///FOLDER
//! ```
//! The other forms that `object_store` accepts (`abfss://…`, `https://….blob.core.windows.net/…`, `https://s3.…`) are
//! valid too. A URL never contains a credential, so it can be printed. Credentials come from environment variables,
//! which the caller reads.

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

/// Timeout of opening a connection. The farthest region is a third of a second away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The location of a shared store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum StoreLocation {
    /// A local or mounted folder.
    Folder(PathBuf),
    /// A bucket or a container.
    Cloud {
        /// The protocol of the store.
        cloud: Cloud,
        /// The URL as it was given.
        url: Url,
        /// The prefix of all objects in the bucket.
        prefix: Path,
    },
}

/// The protocol of an object store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cloud {
    /// Amazon S3 and compatible stores.
    S3,
    /// Azure Blob Storage.
    Azure,
    /// Google Cloud Storage.
    Google,
}

/// The address of a server instead of the cloud's own: `http://…` or `https://…`, without a credential.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint(Url);

/// An invalid location or endpoint. The message says what is expected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidLocation(String);

/// Cloud credentials and options from environment variables: `AWS_…`, `AZURE_…`, `GOOGLE_…`. The values are never
/// printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Credentials(Vec<(String, String)>);

/// How to access a cloud's object store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// The server, if it is not the cloud's own.
    pub endpoint: Option<Endpoint>,
    /// The region of an S3 bucket.
    pub region: Option<String>,
    /// The credentials.
    pub credentials: Credentials,
}

impl StoreLocation {
    /// Creates a client of a bucket or container with the given request timeout, or `None` for a folder. Sends no
    /// request.
    pub fn client(&self, access: &Access, timeout: Duration) -> Result<Option<Arc<dyn ObjectStore>>, Error> {
        let Self::Cloud { cloud, url, .. } = self else { return Ok(None) };
        // No other provider can be installed: `rustls` is built with this one only. The error means that it is
        // installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let endpoint = access.endpoint.as_ref().map(|endpoint| endpoint.0.as_str().trim_end_matches('/').to_owned());
        // An explicit `http://` endpoint allows plain HTTP.
        let is_plain_http = |endpoint: Option<String>| endpoint.is_some_and(|url| url.starts_with("http://"));
        let client = |allow_http| {
            let options = ClientOptions::new().with_connect_timeout(CONNECT_TIMEOUT).with_timeout(timeout);
            if allow_http { options.with_allow_http(true) } else { options }
        };
        // Retries are made by `RetryPolicy`, see there for the reasons.
        let no_retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        Ok(Some(match cloud {
            Cloud::S3 => {
                let region = access.region.iter().map(|region| (AmazonS3ConfigKey::Region, region.clone()));
                let endpoint = endpoint.map(|endpoint| (AmazonS3ConfigKey::Endpoint, endpoint));
                let options = access.credentials.options("AWS_").chain(region).chain(endpoint);
                let builder =
                    options.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
                let allow = is_plain_http(builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
                Arc::new(
                    builder.with_url(url.as_str()).with_client_options(client(allow)).with_retry(no_retries).build()?,
                )
            }
            Cloud::Azure => {
                let endpoint = endpoint.map(|endpoint| (AzureConfigKey::Endpoint, endpoint));
                let options = access.credentials.options("AZURE_").chain(endpoint);
                let builder =
                    options.fold(MicrosoftAzureBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
                let allow = is_plain_http(builder.get_config_value(&AzureConfigKey::Endpoint));
                Arc::new(
                    builder.with_url(url.as_str()).with_client_options(client(allow)).with_retry(no_retries).build()?,
                )
            }
            Cloud::Google => {
                let endpoint = endpoint.map(|endpoint| (GoogleConfigKey::BaseUrl, endpoint));
                let options = access.credentials.options("GOOGLE_").chain(endpoint);
                let builder = options
                    .fold(GoogleCloudStorageBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
                let allow = is_plain_http(builder.get_config_value(&GoogleConfigKey::BaseUrl));
                Arc::new(
                    builder.with_url(url.as_str()).with_client_options(client(allow)).with_retry(no_retries).build()?,
                )
            }
        }))
    }
}

impl Cloud {
    /// What an operator can do when the store refuses access.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::S3 => {
                "the bucket must exist in that region, and AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY in the \
                 environment, or the machine's role, must allow s3:ListBucket, s3:GetObject, s3:PutObject and \
                 s3:DeleteObject; tiers.g4.endpoint names a server other than Amazon's"
            }
            Self::Azure => {
                "the container must exist, and AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY (or a SAS \
                 token, or a workload's identity) in the environment must allow to list, read, write and delete blobs"
            }
            Self::Google => {
                "the bucket must exist, and GOOGLE_APPLICATION_CREDENTIALS (or GOOGLE_SERVICE_ACCOUNT) in the \
                 environment, or the machine's service account, must have the role storage.objectUser"
            }
        }
    }
}

impl Credentials {
    /// Selects the variables that cloud clients understand.
    pub fn from_environment<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let is_cloud_variable = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|cloud| name.starts_with(cloud));
        let picked = variables.into_iter().filter(|(name, value)| is_cloud_variable(name) && !value.is_empty());
        Self(picked.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    /// The options of one cloud that its client knows.
    fn options<K: FromStr>(&self, cloud: &'static str) -> impl Iterator<Item = (K, String)> {
        let of_cloud = self.0.iter().filter(move |(name, _)| name.starts_with(cloud));
        of_cloud.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())))
    }
}

impl fmt::Debug for Credentials {
    /// Prints the names without the values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl FromStr for StoreLocation {
    type Err = InvalidLocation;

    fn from_str(text: &str) -> Result<Self, InvalidLocation> {
        let invalid = |why: &str| {
            let expected =
                r#"expected "s3://bucket/prefix", "az://container/prefix", "gs://bucket/prefix" or a folder"#;
            Err(InvalidLocation(format!("{why}{expected}")))
        };
        if text.is_empty() {
            return invalid("");
        }
        if !text.contains("://") && !text.starts_with("file:") {
            // `s3:/bucket` and `minio:9000/bucket` are mistyped URLs.
            if text.split('/').next().is_some_and(|first| first.contains(':')) {
                return invalid("not a URL; ").map_err(|InvalidLocation(why)| {
                    InvalidLocation(format!(r#"{why}; write a folder of that name as "./{text}""#))
                });
            }
            if let Some(url) = missing_colon(text) {
                return Err(InvalidLocation(format!(
                    r#"did you mean "{url}"? For a folder of that name write "./{text}""#
                )));
            }
            return Ok(Self::Folder(text.into()));
        }
        let Ok(url) = Url::parse(text) else { return invalid("not a URL; ") };
        if url.scheme() == "file" {
            return url.to_file_path().map(Self::Folder).or_else(|()| invalid("a folder's URL has three slashes; "));
        }
        let (cloud, prefix) = match ObjectStoreScheme::parse(&url) {
            Ok((ObjectStoreScheme::AmazonS3, prefix)) => (Cloud::S3, prefix),
            Ok((ObjectStoreScheme::MicrosoftAzure, prefix)) => (Cloud::Azure, prefix),
            Ok((ObjectStoreScheme::GoogleCloudStorage, prefix)) => (Cloud::Google, prefix),
            Ok((ObjectStoreScheme::Http, _)) => {
                return invalid("tiers.g4.endpoint names a self-hosted server, and this key its bucket; ");
            }
            _ => return invalid(""),
        };
        // `container@account` is Azure's syntax for an account.
        let has_user = !url.username().is_empty() && cloud != Cloud::Azure;
        if has_user || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
            return Err(InvalidLocation(
                "a URL is printed and logged: put credentials into the environment instead (AWS_…, AZURE_…, GOOGLE_…)"
                    .into(),
            ));
        }
        let bucket = url.host_str().unwrap_or_default();
        if url.scheme() != "https" && url.username().is_empty() && !(3..=63).contains(&bucket.len()) {
            return invalid("the name of a bucket has 3 to 63 characters; ");
        }
        Ok(Self::Cloud { cloud, url, prefix })
    }
}

/// The URL that a text lacks only characters of `://` of: `s3//bucket/prefix`. A folder's path has no empty step, so
/// nothing else is meant.
fn missing_colon(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("//")?;
    let is_scheme = ["s3", "s3a", "az", "azure", "adl", "abfs", "abfss", "gs", "http", "https"].contains(&scheme);
    is_scheme.then(|| format!("{scheme}://{}", rest.trim_start_matches('/')))
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => path.display().fmt(f),
            Self::Cloud { url, .. } => f.write_str(url.as_str().trim_end_matches('/')),
        }
    }
}

impl FromStr for Endpoint {
    type Err = InvalidLocation;

    fn from_str(text: &str) -> Result<Self, InvalidLocation> {
        let is_address = |url: &Url| {
            matches!(url.scheme(), "http" | "https")
                && url.has_host()
                && url.username().is_empty()
                && url.password().is_none()
                && url.query().is_none()
        };
        let url = Url::parse(text).ok().filter(is_address);
        url.map(Self).ok_or_else(|| {
            InvalidLocation(
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

impl TryFrom<String> for StoreLocation {
    type Error = InvalidLocation;

    fn try_from(text: String) -> Result<Self, InvalidLocation> {
        text.parse()
    }
}

impl From<StoreLocation> for String {
    fn from(location: StoreLocation) -> Self {
        location.to_string()
    }
}

impl TryFrom<String> for Endpoint {
    type Error = InvalidLocation;

    fn try_from(text: String) -> Result<Self, InvalidLocation> {
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
            Ok(StoreLocation::Folder(path)) => format!("folder {}", path.display()),
            Ok(StoreLocation::Cloud { cloud, prefix, .. }) => format!("{cloud:?} {prefix}"),
            Err(InvalidLocation(why)) => why,
        }
    }

    #[test]
    fn the_url_selects_the_kind_of_store() {
        for (text, chosen) in [
            ("/mnt/kv", "folder /mnt/kv"),
            ("kv", "folder kv"),
            ("./s3:/bucket/x", "folder ./s3:/bucket/x"),
            ("/mnt/kv:1", "folder /mnt/kv:1"),
            ("kv/a:b", "folder kv/a:b"),
            ("kv//a", "folder kv//a"),
            ("s3/bucket", "folder s3/bucket"),
            ("./s3//bucket", "folder ./s3//bucket"),
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
        let printed = "s3://bucket/a/".parse::<StoreLocation>().unwrap().to_string();
        assert_eq!(printed, "s3://bucket/a", "one spelling: processes know a store by it");
    }

    #[test]
    fn an_invalid_location_is_an_error_that_says_what_is_expected() {
        for (text, message) in [
            ("", "s3://bucket/prefix"),
            ("ftp://host/a", "s3://bucket/prefix"),
            ("s3:/bucket/x", r#"or a folder; write a folder of that name as "./s3:/bucket/x""#),
            ("s3:", "not a URL; expected"),
            ("s3//bucket/x", r#"did you mean "s3://bucket/x"? For a folder of that name write "./s3//bucket/x""#),
            ("gs//bucket", r#"did you mean "gs://bucket"?"#),
            ("https//account.blob.core.windows.net/c", r#"did you mean "https://account"#),
            ("minio:9000/bucket", "not a URL; expected"),
            ("file://host/a", "three slashes"),
            ("s3://kv/a", "3 to 63"),
            ("http://127.0.0.1:9000/bucket", "tiers.g4.endpoint"),
            ("https://minio.internal/bucket", "tiers.g4.endpoint"),
            ("s3://key:secret@bucket/a", "environment"),
            ("s3://key@bucket/a", "environment"),
            ("az://container/a?sig=secret", "environment"),
        ] {
            assert!(read(text).contains(message), "{text}: {}", read(text));
            assert!(!read(text).contains("secret"), "{text}");
        }
        for text in ["minio:9000", "ftp://minio", "http://key:secret@minio", "https://"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn credentials_reach_the_client_and_are_not_printed() {
        let environment =
            [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("HOME", "/"), ("AWS_REGION", "")];
        let credentials = Credentials::from_environment(environment);
        assert_eq!(format!("{credentials:?}"), r#"{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}"#);
        let access = Access { endpoint: None, region: Some("eu-west-1".into()), credentials };
        let client = |location: &StoreLocation| location.client(&access, Duration::from_secs(1)).unwrap();
        for location in ["s3://bucket/a", "s3a://bucket", "https://bucket.s3.eu-west-1.amazonaws.com"] {
            let client = client(&location.parse().unwrap()).expect("a cloud");
            assert!(client.to_string().contains("bucket"), "{client}");
        }
        assert!(client(&"folder".parse().unwrap()).is_none());
    }
}
