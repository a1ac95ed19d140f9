//! The text of `/metrics`, gathered once for all requests that wait for it.
//!
//! Gathering takes milliseconds of a processor, and `/metrics` needs no key by default. So one gathering runs at a
//! time, on a blocking thread, and its text answers all requests that arrived before it began. However many clients
//! ask, other requests find the async threads free. The values are never older than the request.
//!
//! Not here: the formats (`exposition`).

use super::exposition::Format;
use bytes::Bytes;
use prometheus::Registry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Mutex;

/// All metrics of the process.
pub(crate) struct Scrapes {
    registry: Registry,
    /// Gatherings that have begun.
    begun: AtomicU64,
    /// The last gathering of each format. The lock is held while one runs. Waiting requests get it in their order.
    latest: Arc<Mutex<[Option<Gathered>; Format::ALL.len()]>>,
}

struct Gathered {
    /// Position in the order of all gatherings, from 1.
    number: u64,
    text: Bytes,
}

impl Scrapes {
    pub(crate) fn new(registry: Registry) -> Self {
        Self { registry, begun: AtomicU64::new(0), latest: Arc::default() }
    }

    /// The text in this format, with values from after the call. The error is one of the registry.
    pub(crate) async fn text(&self, format: Format) -> Result<Bytes, String> {
        let begun_before = self.begun.load(Ordering::SeqCst);
        let mut latest = Arc::clone(&self.latest).lock_owned().await;
        if let Some(gathered) = latest[format as usize].as_ref().filter(|gathered| gathered.number > begun_before) {
            return Ok(gathered.text.clone());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let registry = self.registry.clone();
        // The thread has the lock: a client that leaves cannot have a second gathering run beside the first.
        let gather = move || {
            let text = Bytes::from(format.write(&registry).map_err(|error| error.to_string())?);
            latest[format as usize] = Some(Gathered { number, text: text.clone() });
            Ok(text)
        };
        tokio::task::spawn_blocking(gather).await.map_err(|error| error.to_string())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::{join_all, poll_immediate};
    use parking_lot::Mutex as SyncMutex;
    use prometheus::core::{Collector, Desc};
    use prometheus::{IntCounter, proto};
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    /// Counts how often it is gathered. Each time it says so, and waits until it may go on.
    struct Gatherings {
        count: IntCounter,
        begun: SyncSender<()>,
        proceed: SyncMutex<Receiver<()>>,
    }

    impl Collector for Gatherings {
        fn desc(&self) -> Vec<&Desc> {
            self.count.desc()
        }

        fn collect(&self) -> Vec<proto::MetricFamily> {
            self.count.inc();
            self.begun.send(()).unwrap();
            self.proceed.lock().recv().unwrap();
            self.count.collect()
        }
    }

    #[tokio::test]
    async fn requests_that_wait_get_the_text_of_one_later_gathering() {
        let registry = Registry::new();
        let ((begun, has_begun), (proceed, may_proceed)) = (sync_channel(9), sync_channel(9));
        let count = IntCounter::new("gatherings_total", "Gatherings.").unwrap();
        let gatherings = Gatherings { count: count.clone(), begun, proceed: SyncMutex::new(may_proceed) };
        registry.register(Box::new(gatherings)).unwrap();
        let scrapes = Scrapes::new(registry);
        let mut left = Box::pin(scrapes.text(Format::Prometheus));
        assert!(poll_immediate(&mut left).await.is_none());
        has_begun.recv().unwrap();
        drop(left);
        let mut waiting: Vec<_> = (0..50).map(|_| Box::pin(scrapes.text(Format::Prometheus))).collect();
        for request in &mut waiting {
            assert!(poll_immediate(request).await.is_none());
        }
        assert_eq!(count.get(), 1, "a gathering goes on though its client has left, and no other begins");
        proceed.send(()).unwrap();
        proceed.send(()).unwrap();
        let texts = join_all(waiting).await;
        assert!(texts.iter().all(|text| text.as_ref().is_ok_and(|text| text.ends_with(b"gatherings_total 2\n"))));
        proceed.send(()).unwrap();
        let text = scrapes.text(Format::OpenMetrics).await.unwrap();
        assert!(text.ends_with(b"gatherings_total 3\n# EOF\n"), "{text:?}");
    }
}
