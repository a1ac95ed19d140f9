//! An upstream as text: a URL, or a table with a URL.

use super::{CacheSalt, HttpVersion, KvEvents, KvSockets, Resolve, Upstream, UpstreamRole, http_url};
use ::upstream::Authorities;
use ::upstream::kv_events::{Endpoint, Source};
use ::upstream::relay::client::{Protocol, Settings};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::net::IpAddr;
use std::num::NonZero;
use std::path::PathBuf;
use std::{fmt, io};
use transport::read_text;

/// Maximum size of a file with an API key.
const MAX_KEY_BYTES: u64 = 64 << 10;

impl Upstream {
    /// A server without further settings.
    pub fn new(url: http::Uri) -> Self {
        Self {
            url,
            resolve: Resolve::default(),
            api_key_file: None,
            ca_file: None,
            kv_events: KvEvents::default(),
            cache_salt: CacheSalt::default(),
            role: UpstreamRole::default(),
            block_size: None,
            http: HttpVersion::default(),
            max_requests: None,
            continue_streams: false,
        }
    }

    /// The URL as logs and operators see it: without a user and a password.
    pub fn shown_url(&self) -> String {
        let url = self.url.to_string();
        match self.url.authority().and_then(|authority| authority.as_str().rsplit_once('@')) {
            Some((user, _)) => url.replacen(&format!("{user}@"), "", 1),
            None => url,
        }
    }

    /// One spelling of the URLs that mean the same: scheme and host in lower case, no default port, and one slash at
    /// the end.
    pub fn canonical_url(&self) -> String {
        let url = &self.url;
        let scheme = url.scheme_str().unwrap_or_default().to_lowercase();
        let host = url.host().unwrap_or_default().to_lowercase();
        let default = if scheme == "https" { 443 } else { 80 };
        let port = url.port_u16().filter(|port| *port != default).map(|port| format!(":{port}")).unwrap_or_default();
        format!("{scheme}://{host}{port}{}/", url.path().trim_end_matches('/'))
    }

    /// The port of the URL, or that of its scheme.
    pub fn port(&self) -> u16 {
        let default = if self.url.scheme_str() == Some("https") { 443 } else { 80 };
        self.url.port_u16().unwrap_or(default)
    }

    /// How to connect to the server at these addresses; none: at those of its host. `authorities`: those that may sign
    /// its certificate; `None`: those of the operating system.
    pub fn connection(&self, addresses: Vec<IpAddr>, authorities: Option<&Authorities>) -> Settings {
        let protocol = match self.http {
            HttpVersion::Auto => Protocol::Negotiated,
            HttpVersion::H2c => Protocol::Http2,
        };
        let default = Settings::default();
        let max_requests = self.max_requests.map_or(default.max_requests, |max| max.get() as usize);
        Settings { protocol, max_requests, addresses, roots: authorities.map(Authorities::roots), ..default }
    }

    /// The API key for the server.
    ///
    /// # Errors
    /// If the file cannot be read, or has no key.
    pub fn api_key(&self) -> io::Result<Option<String>> {
        let Some(path) = &self.api_key_file else { return Ok(None) };
        let text = read_text(path, MAX_KEY_BYTES)?;
        // Editors of some systems begin a file with a byte order mark.
        let key = text.trim_start_matches('\u{feff}').trim();
        let key = key.strip_prefix("Bearer ").unwrap_or(key).trim_start();
        if key.is_empty() { Err(io::Error::other("the file has no key")) } else { Ok(Some(key.to_owned())) }
    }

    /// The authorities that may sign the server's certificate.
    pub fn authorities(&self) -> io::Result<Option<Authorities>> {
        self.ca_file.as_ref().map(|path| Authorities::read(path)).transpose()
    }

    fn of_url(url: &str) -> Result<http::Uri, String> {
        let expected = |problem: &str| format!("{problem}; expected a URL like http://10.0.0.1:8000");
        let uri: http::Uri = url.parse().map_err(|error| expected(&format!("{error}")))?;
        if http_url::has_user(&uri) {
            return Err(
                "the user and the password in a URL are not sent; name the file with the server's key in api_key_file"
                    .to_owned(),
            );
        }
        http_url::check(&uri).map_err(expected)?;
        // Both are lost: requests have paths and queries of their own. The parser removes a fragment.
        if uri.query().is_some() || url.contains('#') {
            return Err(expected("a query or a fragment, which no request would have"));
        }
        if uri.path().trim_end_matches('/').ends_with("/v1") {
            return Err(
                "expected the URL without /v1, like http://127.0.0.1:8001: requests have /v1 in their path".to_owned()
            );
        }
        Ok(uri)
    }
}

impl KvEvents {
    /// The publishers to follow, of a server of the host `named` that is at `address` and names `listed`.
    pub fn sources(&self, listed: Vec<Source>, named: &str, address: &str) -> Vec<Source> {
        match self {
            Self::Off => Vec::new(),
            Self::Auto => listed,
            Self::At(sockets) => {
                let source = |KvSockets { live, replay }: &KvSockets| Source {
                    live: live.moved(named, address),
                    replay: replay.as_ref().map(|replay| replay.moved(named, address)),
                    topic: String::new(),
                };
                sockets.iter().map(source).collect()
            }
        }
    }

    /// The numbers of the ranks of these publishers, if requests can name them: `listed`, where the server says.
    pub fn ranks(&self, listed: Vec<u32>) -> Vec<u32> {
        match self {
            Self::Auto => listed,
            Self::At(sockets) if sockets.len() > 1 => (0..sockets.len() as u32).collect(),
            Self::Off | Self::At(_) => Vec::new(),
        }
    }

    /// From the two keys of the table of a server on `host`.
    fn of_keys(live: Option<Addresses>, replay: Option<Addresses>, host: &str) -> Result<Self, String> {
        let (live, replay) = (live.map(Addresses::into_list), replay.map(Addresses::into_list).unwrap_or_default());
        let live = live.unwrap_or_else(|| vec!["auto".to_owned()]);
        if let [only @ ("auto" | "off")] = live.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            return match replay[..] {
                [] if only == "off" => Ok(Self::Off),
                [] => Ok(Self::Auto),
                [..] => Err("kv_events_replay needs the other socket in kv_events".to_owned()),
            };
        }
        if live.is_empty() {
            return Err(
                "kv_events: an empty list; expected the address of each data-parallel rank, `auto` or `off`".to_owned()
            );
        }
        if !replay.is_empty() && replay.len() != live.len() {
            let (replays, lives) = (replay.len(), live.len());
            return Err(format!(
                "kv_events_replay: expected as many addresses as in kv_events, {lives}; got {replays}"
            ));
        }
        let endpoint = |key: &str, text: &String| {
            let endpoint = Endpoint::on_host(text, host);
            endpoint.map_err(|error| format!("{key}: {error}"))
        };
        let mut sockets = Vec::new();
        for (at, live) in live.iter().enumerate() {
            let live = endpoint("kv_events", live).map_err(|error| format!("{error}, `auto` or `off`"))?;
            let replay = replay.get(at).map(|text| endpoint("kv_events_replay", text)).transpose()?;
            sockets.push(KvSockets { live, replay });
        }
        Ok(Self::At(sockets))
    }
}

/// One address, or those of the data-parallel ranks in their order.
#[derive(serde::Deserialize, serde::Serialize)]
#[serde(
    untagged,
    expecting = "expected an address like \"tcp://*:5557\", or a list of one for each data-parallel rank"
)]
enum Addresses {
    One(String),
    OfRanks(Vec<String>),
}

impl Addresses {
    fn of<'a>(endpoints: impl IntoIterator<Item = &'a Endpoint>) -> Self {
        let mut list: Vec<String> = endpoints.into_iter().map(Endpoint::to_string).collect();
        if list.len() == 1 { Self::One(list.remove(0)) } else { Self::OfRanks(list) }
    }

    fn into_list(self) -> Vec<String> {
        match self {
            Self::One(address) => vec![address],
            Self::OfRanks(list) => list,
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    url: String,
    #[serde(default)]
    resolve: Resolve,
    api_key_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    kv_events: Option<Addresses>,
    kv_events_replay: Option<Addresses>,
    #[serde(default)]
    cache_salt: CacheSalt,
    role: Option<String>,
    block_size: Option<NonZero<u32>>,
    #[serde(default)]
    http: HttpVersion,
    max_requests: Option<NonZero<u32>>,
    #[serde(default)]
    continue_streams: bool,
}

impl TryFrom<Table> for Upstream {
    type Error = String;

    fn try_from(table: Table) -> Result<Self, String> {
        let Table { url, resolve, api_key_file, ca_file, kv_events, kv_events_replay, cache_salt, .. } = table;
        let (role, block_size, http) = (UpstreamRole::of(table.role.as_deref())?, table.block_size, table.http);
        let (max_requests, continue_streams) = (table.max_requests, table.continue_streams);
        let url = Self::of_url(&url)?;
        if http == HttpVersion::H2c && url.scheme_str() == Some("https") {
            return Err("http: `h2c` is HTTP/2 without TLS; with https:// it is negotiated".to_owned());
        }
        if ca_file.is_some() && url.scheme_str() != Some("https") {
            return Err("ca_file: only a server with https:// shows a certificate".to_owned());
        }
        let kv_events = KvEvents::of_keys(kv_events, kv_events_replay, url.host().unwrap_or_default())?;
        Ok(Self {
            url,
            resolve,
            api_key_file,
            ca_file,
            kv_events,
            cache_salt,
            role,
            block_size,
            http,
            max_requests,
            continue_streams,
        })
    }
}

impl UpstreamRole {
    fn of(name: Option<&str>) -> Result<Self, String> {
        match name {
            None | Some("auto") => Ok(Self::Auto),
            Some("both") => Ok(Self::Both),
            Some("generate") => Ok(Self::Generate),
            Some("pooling") => Ok(Self::Pooling),
            Some(stage @ ("prefill" | "decode")) => Err(format!(
                "role: `{stage}` is not supported yet: KV blocks are not handed over between servers, so each server \
                 prefills and decodes its own requests; leave out role"
            )),
            Some(other) => Err(format!("role: `{other}`; expected `auto`, `both`, `generate` or `pooling`")),
        }
    }
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
                Upstream::of_url(url).map(Upstream::new).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Upstream, A::Error> {
                Table::deserialize(MapAccessDeserializer::new(map))?.try_into().map_err(de::Error::custom)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

impl Serialize for Upstream {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut table = serializer.serialize_struct("Upstream", 12)?;
        table.serialize_field("url", &self.url.to_string())?;
        if self.resolve != Resolve::default() {
            table.serialize_field("resolve", &self.resolve)?;
        }
        if let Some(path) = &self.api_key_file {
            table.serialize_field("api_key_file", path)?;
        }
        if let Some(path) = &self.ca_file {
            table.serialize_field("ca_file", path)?;
        }
        match &self.kv_events {
            KvEvents::Auto => {}
            KvEvents::Off => table.serialize_field("kv_events", "off")?,
            KvEvents::At(sockets) => {
                table.serialize_field("kv_events", &Addresses::of(sockets.iter().map(|sockets| &sockets.live)))?;
                let replay: Vec<&Endpoint> = sockets.iter().filter_map(|sockets| sockets.replay.as_ref()).collect();
                if !replay.is_empty() {
                    table.serialize_field("kv_events_replay", &Addresses::of(replay))?;
                }
            }
        }
        if self.cache_salt != CacheSalt::default() {
            table.serialize_field("cache_salt", &self.cache_salt)?;
        }
        if self.role != UpstreamRole::default() {
            table.serialize_field("role", &self.role)?;
        }
        if let Some(size) = &self.block_size {
            table.serialize_field("block_size", size)?;
        }
        if self.http != HttpVersion::default() {
            table.serialize_field("http", &self.http)?;
        }
        if let Some(max) = &self.max_requests {
            table.serialize_field("max_requests", max)?;
        }
        if self.continue_streams {
            table.serialize_field("continue_streams", &true)?;
        }
        table.end()
    }
}
