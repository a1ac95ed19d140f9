//! Logs that are read from the HTTP server of the process that offers them: snapshots and ranges exceed a NATS message.
//!
//! ```text
//!   reader ── which epoch? ──▶ responder          NATS: numbers, and the URL of the process with its MAC
//!      └── LogReader ── GET /logs/… ──▶ log       HTTP: one response for a snapshot or a range
//! ```
//!
//! A log is read over NATS, in pieces, if its process names no URL, or if the URL was not signed, cannot be reached,
//! does not answer or does not serve the log. A URL that cannot be reached or does not answer is not asked for a while,
//! so that not every read waits for it.
//!
//! Not here: HTTP. `remote::RemoteLogs` is the [`LogReader`], and `remote::RequestServer` serves.

use super::Address;
use super::authentication::{LogAddress, RecordKeys};
use crate::plane::{PlaneError, Source};
use async_nats::{HeaderMap, HeaderValue};
use futures::future::BoxFuture;
use kvbm::{Epoch, Numbered, Snapshot};
use parking_lot::Mutex;
use spans::LogLimit;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Reads logs from the HTTP servers of other processes.
///
/// # Contract
/// - A read MUST be of the log at the time of the call, and MUST fail if it is not complete.
/// - After some time in which nothing arrives it MUST fail with [`LogReadError::Unreachable`], early enough that a
///   router, which waits ten seconds, can read the log over NATS.
/// - It MUST end when it is dropped.
pub trait LogReader: Send + Sync + 'static {
    /// All blocks of a source in an epoch.
    fn snapshot(&self, at: Address, source: Source, epoch: Epoch) -> BoxFuture<'_, Result<Snapshot, LogReadError>>;

    /// The events after a number, as in [`Events::range`](crate::plane::Events::range); `None` if the log no longer has
    /// all of them.
    fn range(
        &self,
        at: Address,
        source: Source,
        epoch: Epoch,
        after: u64,
    ) -> BoxFuture<'_, Result<Option<Vec<Numbered>>, LogReadError>>;
}

/// Why a log was not read over HTTP.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogReadError {
    /// The process cannot be reached over HTTP, does not answer, or refuses this process.
    #[error("{0}")]
    Unreachable(String),
    /// The process does not serve the log.
    #[error("the process does not serve the log over HTTP")]
    NotServed,
    /// The process serves too many logs now, or the response is not complete.
    #[error("{0}")]
    Failed(String),
}

/// How the logs of this process are read over HTTP, and how it reads those of others.
pub struct HttpLogs {
    /// The URL of this process; `None` if it does not serve the logs that it offers.
    address: Option<Address>,
    keys: Option<RecordKeys>,
    pub(super) reader: Arc<dyn LogReader>,
    /// URLs that could not be reached, and until when they are not asked.
    unreachable: Mutex<HashMap<Address, Instant>>,
    /// Limits log lines about URLs that are not signed: there is one for each read.
    unsigned: LogLimit,
}

/// The header with the URL of the process that answers.
const ADDRESS: &str = "Blockyard-Address";

/// The header with the MAC of this URL.
const MAC: &str = "Blockyard-MAC";

/// Longest accepted URL: several times the longest name of a host.
const MAX_URL_BYTES: usize = 1024;

/// Time for which an unreachable URL is not asked. An attempt takes up to two seconds to connect and four until an
/// answer, of the ten that a router waits for a snapshot.
const RETRY_AFTER: Duration = Duration::from_mins(1);

/// URLs that are known to be unreachable: more than there are workers in one deployment. Without the limit, a client
/// that answers with any URLs would fill the memory.
const MAX_UNREACHABLE: usize = 16_384;

impl HttpLogs {
    /// Reads the logs of other processes with `reader`. Those of this process are served at `address`, if it has one.
    /// With keys, this URL is signed with the first one, and other processes are asked only at URLs that were signed
    /// with one of them.
    pub fn new(address: Option<Address>, keys: Option<RecordKeys>, reader: Arc<dyn LogReader>) -> Self {
        Self { address, keys, reader, unreachable: Mutex::default(), unsigned: LogLimit::default() }
    }

    /// The headers of the answer that this process offers a log: where it can be read.
    pub(super) fn headers(&self, source: Source, epoch: Epoch) -> Option<HeaderMap> {
        let LogAddress { url, mac } = LogAddress::sign(source, epoch, self.address.clone()?, self.keys.as_ref());
        let mut headers = HeaderMap::new();
        headers.insert(ADDRESS, url.0.as_str());
        if let Some(mac) = &mac {
            headers.insert(MAC, mac.as_str());
        }
        Some(headers)
    }

    /// The URL in the headers of an answer, if the log is to be read there.
    pub(super) fn url_in(&self, headers: Option<&HeaderMap>, source: Source, epoch: Epoch) -> Option<Address> {
        let header = |name: &str| headers.and_then(|headers| headers.get(name)).map(HeaderValue::as_str);
        let url = header(ADDRESS).filter(|url| url.len() <= MAX_URL_BYTES)?;
        let named = LogAddress { url: Address(url.to_owned()), mac: header(MAC).map(str::to_owned) };
        if let Err(error) = named.verify(source, epoch, self.keys.as_ref()) {
            if let Some(suppressed) = self.unsigned.admit() {
                // Quoted, because whatever answered chose it.
                let url = &*named.url.0;
                tracing::warn!(
                    %source, url = ?url, %error, suppressed,
                    "the URL of a log is not authentic, so the log is read over NATS; write the same secret to \
                     cluster.secret_file of all frontends and workers"
                );
            }
            return None;
        }
        let is_skipped = self.unreachable.lock().get(&named.url).is_some_and(|until| Instant::now() < *until);
        (!is_skipped).then_some(named.url)
    }

    /// What came of a read at a URL. `None`: the log is to be read over NATS.
    pub(super) fn outcome<T>(
        &self,
        url: &Address,
        source: Source,
        read: Result<T, LogReadError>,
    ) -> Result<Option<T>, PlaneError> {
        match read {
            Ok(read) => {
                if self.unreachable.lock().remove(url).is_some() {
                    tracing::info!(url = ?url.0, "the logs of this process are read over HTTP again");
                }
                Ok(Some(read))
            }
            Err(LogReadError::Unreachable(problem)) => {
                self.skip(url, &problem);
                Ok(None)
            }
            Err(LogReadError::NotServed) => Ok(None),
            Err(LogReadError::Failed(problem)) => Err(PlaneError::Unavailable(format!("{source}: {problem}"))),
        }
    }

    /// Does not ask a URL for some time. Logged once, until it is reached again.
    fn skip(&self, url: &Address, problem: &str) {
        let mut unreachable = self.unreachable.lock();
        if unreachable.len() >= MAX_UNREACHABLE {
            unreachable.clear();
        }
        if unreachable.insert(url.clone(), Instant::now() + RETRY_AFTER).is_none() {
            tracing::warn!(
                url = ?url.0, problem,
                "the logs of this process cannot be read over HTTP and are read over NATS, which takes longer; unless \
                 the problem is a secret or a certificate, allow requests from this process to the URL, and check that \
                 packets of any size arrive both ways"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RecordKey;
    use super::*;
    use crate::plane::WorkerId;

    const SOURCE: Source = Source::Worker(WorkerId(7));
    const EPOCH: Epoch = Epoch(5);

    /// Reads nothing.
    struct Nowhere;

    impl LogReader for Nowhere {
        fn snapshot(&self, _: Address, _: Source, _: Epoch) -> BoxFuture<'_, Result<Snapshot, LogReadError>> {
            Box::pin(async { Err(LogReadError::NotServed) })
        }

        fn range(
            &self,
            _: Address,
            _: Source,
            _: Epoch,
            _: u64,
        ) -> BoxFuture<'_, Result<Option<Vec<Numbered>>, LogReadError>> {
            Box::pin(async { Err(LogReadError::NotServed) })
        }
    }

    fn url() -> Address {
        Address("http://10.0.0.7:8100".to_owned())
    }

    fn logs(address: Option<Address>, secret: Option<&str>) -> HttpLogs {
        let keys = secret.map(|secret| RecordKeys::fixed([RecordKey::derive(secret.as_bytes())]));
        HttpLogs::new(address, keys, Arc::new(Nowhere))
    }

    #[test]
    fn a_url_is_asked_only_if_it_was_signed_for_the_log_or_there_is_no_secret() {
        let (ours, other) = ("0123456789abcdef", "fedcba9876543210");
        for (theirs, mine, is_asked) in [
            (Some(ours), Some(ours), true),
            (Some(other), Some(ours), false),
            (None, Some(ours), false),
            (Some(ours), None, true),
            (None, None, true),
        ] {
            let headers = logs(Some(url()), theirs).headers(SOURCE, EPOCH);
            let reader = logs(None, mine);
            let asked = reader.url_in(headers.as_ref(), SOURCE, EPOCH);
            assert_eq!(asked, is_asked.then(url), "signed with {theirs:?}, read with {mine:?}");
            let elsewhere = reader.url_in(headers.as_ref(), SOURCE, Epoch(6));
            assert_eq!(elsewhere.is_some(), is_asked && mine.is_none(), "another epoch");
        }
        assert!(logs(None, Some(ours)).headers(SOURCE, EPOCH).is_none(), "a process without a server names no URL");
        assert_eq!(logs(None, None).url_in(None, SOURCE, EPOCH), None, "an older process names none");
        let long = logs(Some(Address("x".repeat(MAX_URL_BYTES + 1))), None).headers(SOURCE, EPOCH);
        assert_eq!(logs(None, None).url_in(long.as_ref(), SOURCE, EPOCH), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_url_that_cannot_be_reached_is_asked_again_after_a_while() {
        let headers = logs(Some(url()), None).headers(SOURCE, EPOCH);
        let reader = logs(None, None);
        let is_asked = || reader.url_in(headers.as_ref(), SOURCE, EPOCH).is_some();
        let failed = Err(LogReadError::Failed("the response ended".to_owned()));
        assert!(reader.outcome::<()>(&url(), SOURCE, failed).is_err(), "it is reached, so the read is repeated");
        assert_eq!(reader.outcome::<()>(&url(), SOURCE, Err(LogReadError::NotServed)), Ok(None));
        assert!(is_asked());
        let unreachable = || Err(LogReadError::Unreachable("refused".to_owned()));
        assert_eq!(reader.outcome::<()>(&url(), SOURCE, unreachable()), Ok(None));
        assert!(!is_asked());
        tokio::time::advance(RETRY_AFTER).await;
        assert!(is_asked());
        assert_eq!(reader.outcome(&url(), SOURCE, Ok(())), Ok(Some(())));
        assert!(reader.unreachable.lock().is_empty());
        for n in 0..=MAX_UNREACHABLE {
            assert_eq!(reader.outcome::<()>(&Address(n.to_string()), SOURCE, unreachable()), Ok(None));
        }
        assert_eq!(reader.unreachable.lock().len(), 1, "what clients answer fills no memory");
    }
}
