//! A value made of certificate files. It is made again after each change of the files, and a warning is logged before
//! the certificate expires.

use crate::expiry::CertificateExpiry;
use crate::files::{NamedFile, TlsError};
use crate::watch::WatchedFiles;
use parking_lot::{Mutex, RwLock};
use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};
use tokio::time::sleep;

/// Time between two warnings of a certificate that expires soon: enough for an alert on the log, few enough to read.
const WARN_INTERVAL: Duration = Duration::from_hours(24);

/// Why the last change of the files of a certificate was rejected. `None` if it was applied, or there was none.
type Rejection = Mutex<Option<String>>;

/// Metrics of the certificates of one purpose, and those whose last change was rejected. Clones share them.
#[derive(Clone)]
pub struct CertificateMetrics {
    reloads: IntCounterVec,
    expiry: IntGaugeVec,
    rejections: Arc<Mutex<Vec<Weak<Rejection>>>>,
}

impl CertificateMetrics {
    /// The metrics `blockyard_<purpose>_certificate_…`. Fails if they are registered already.
    pub fn new(purpose: &str, registry: &Registry) -> Result<Self, prometheus::Error> {
        let name = |name: &str| format!("blockyard_{purpose}_certificate_{name}");
        let reloads = Opts::new(
            name("reloads_total"),
            "Changes of the files of the TLS certificate, by outcome: applied or rejected.",
        );
        let expiry = Opts::new(
            name("expiry_timestamp_seconds"),
            "When the first of the certificates in the file expires, in seconds since 1970.",
        );
        let metrics = Self {
            reloads: IntCounterVec::new(reloads, &["outcome"])?,
            expiry: IntGaugeVec::new(expiry, &["file"])?,
            rejections: Arc::default(),
        };
        registry.register(Box::new(metrics.reloads.clone()))?;
        registry.register(Box::new(metrics.expiry.clone()))?;
        // An alert computes the increase, and an increase from no series is not seen.
        for outcome in ["applied", "rejected"] {
            metrics.reloads.with_label_values(&[outcome]);
        }
        Ok(metrics)
    }

    /// The certificates whose files have changed and could not be loaded again, each with the reason.
    pub fn problems(&self) -> Vec<String> {
        let rejections = self.rejections.lock();
        // A worker has one certificate as a server and as a client, and the same problem with both.
        let problems: BTreeSet<_> =
            rejections.iter().filter_map(Weak::upgrade).filter_map(|rejection| rejection.lock().clone()).collect();
        problems.into_iter().collect()
    }

    /// What [`problems`](Self::problems) has of one certificate, while it is used.
    fn rejection(&self) -> Arc<Rejection> {
        let rejection = Arc::default();
        let mut rejections = self.rejections.lock();
        rejections.retain(|used| used.strong_count() > 0);
        rejections.push(Arc::downgrade(&rejection));
        rejection
    }
}

/// What was made of the files.
pub(crate) struct Loaded<T> {
    pub(crate) value: T,
    /// When the certificate of this process expires, if it has one.
    pub(crate) expiry: Option<CertificateExpiry>,
}

type Load<T> = Box<dyn Fn() -> Result<Loaded<T>, TlsError> + Send + Sync>;

/// The value in effect, and how it is made again.
pub(crate) struct Reloadable<T> {
    /// Named by the metrics and the log: the file with the certificate of this process, else that with the authorities.
    named: NamedFile,
    load: Load<T>,
    current: RwLock<Arc<T>>,
    expiry: Mutex<Option<CertificateExpiry>>,
    metrics: CertificateMetrics,
    rejection: Arc<Rejection>,
}

impl<T: Send + Sync + 'static> Reloadable<T> {
    /// The value of `files`, the most important first, which are loaded again after each change. Must be called within
    /// a runtime.
    pub(crate) fn open(
        files: Vec<NamedFile>,
        load: impl Fn() -> Result<Loaded<T>, TlsError> + Send + Sync + 'static,
        metrics: CertificateMetrics,
    ) -> Result<Arc<Self>, TlsError> {
        let named = files[0].clone();
        let watched = WatchedFiles::now(files.into_iter().map(|file| file.path).collect());
        let Loaded { value, expiry } = load()?;
        let current = RwLock::new(Arc::new(value));
        let (load, expires, rejection) = (Box::new(load), Mutex::default(), metrics.rejection());
        let reloadable = Arc::new(Self { named, load, current, expiry: expires, metrics, rejection });
        reloadable.set_expiry(expiry);
        watched.spawn(&reloadable, Self::reload);
        let weak = Arc::downgrade(&reloadable);
        tokio::spawn(async move {
            loop {
                sleep(WARN_INTERVAL).await;
                let Some(reloadable) = Weak::upgrade(&weak) else { return };
                reloadable.warn();
            }
        });
        Ok(reloadable)
    }

    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.current.read())
    }

    fn set_expiry(&self, expiry: Option<CertificateExpiry>) {
        *self.expiry.lock() = expiry;
        if let Some(expiry) = expiry {
            let file = self.named.path.display().to_string();
            self.metrics.expiry.with_label_values(&[&file]).set(expiry.timestamp());
        }
        self.warn();
    }

    /// Warns if the certificate expires soon.
    fn warn(&self) {
        let (expiry, now, certificate) = (*self.expiry.lock(), SystemTime::now(), self.named.path.display());
        let Some(expiry) = expiry.filter(|expiry| expiry.warn_from <= now) else { return };
        if expiry.at <= now {
            tracing::error!(%certificate, "the TLS certificate has expired: others refuse it; renew it");
        } else {
            let days = expiry.days_left(now);
            let plural = if days == 1 { "" } else { "s" };
            tracing::warn!(%certificate, days, "the TLS certificate expires in {days} day{plural}; renew it");
        }
    }

    fn reload(&self) {
        let outcome = match (self.load)() {
            Ok(Loaded { value, expiry }) => {
                *self.current.write() = Arc::new(value);
                tracing::info!(certificate = %self.named.path.display(), "TLS certificate reloaded");
                self.set_expiry(expiry);
                *self.rejection.lock() = None;
                "applied"
            }
            Err(error) => {
                tracing::error!(%error, "TLS certificate not reloaded; the previous one stays in effect");
                let problem = format!("TLS certificate not reloaded: {error}; the previous one stays in effect");
                *self.rejection.lock() = Some(problem);
                "rejected"
            }
        };
        self.metrics.reloads.with_label_values(&[outcome]).inc();
    }
}
