//! An upstream as text: a URL, or a table with a URL.

use super::Upstream;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::path::PathBuf;
use std::{fmt, fs, io};

impl Upstream {
    /// The API key for the server.
    pub fn api_key(&self) -> io::Result<Option<String>> {
        self.api_key_file.as_ref().map(|path| Ok(fs::read_to_string(path)?.trim().to_owned())).transpose()
    }

    fn of_url(url: &str) -> Result<http::Uri, String> {
        let expected = |problem: &str| format!("{problem}; expected a URL like http://10.0.0.1:8000");
        let uri: http::Uri = url.parse().map_err(|error| expected(&format!("{error}")))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(expected("no http:// or https:// at the start"));
        }
        if uri.path().trim_end_matches('/').ends_with("/v1") {
            return Err("without /v1 at the end: clients send it".to_owned());
        }
        Ok(uri)
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    url: String,
    #[serde(default)]
    api_key_file: Option<PathBuf>,
}

impl<'de> Deserialize<'de> for Upstream {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = Upstream;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a URL like http://10.0.0.1:8000, or a table with `url`")
            }

            fn visit_str<E: de::Error>(self, url: &str) -> Result<Upstream, E> {
                Ok(Upstream { url: Upstream::of_url(url).map_err(E::custom)?, api_key_file: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Upstream, A::Error> {
                let Table { url, api_key_file } = Table::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Upstream { url: Upstream::of_url(&url).map_err(de::Error::custom)?, api_key_file })
            }
        }

        deserializer.deserialize_any(Either)
    }
}

impl Serialize for Upstream {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut table = serializer.serialize_struct("Upstream", 2)?;
        table.serialize_field("url", &self.url.to_string())?;
        if let Some(path) = &self.api_key_file {
            table.serialize_field("api_key_file", path)?;
        }
        table.end()
    }
}
