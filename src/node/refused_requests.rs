//! Requests of other processes that a worker refuses because of what they show: counted, and logged with their address.
//!
//! Not here: the check of the secret (`worker::remote`), whose answer the sender gets.

use prometheus::{IntCounterVec, Opts, Registry};
use spans::LogLimit;
use std::net::SocketAddr;

/// Requests that this process has refused.
pub struct RefusedRequests {
    count: IntCounterVec,
    /// Limits log lines: a frontend with another secret sends a request for each of its clients.
    lines: LogLimit,
}

/// Why a request is refused.
#[derive(Clone, Copy)]
pub(super) enum Refusal {
    /// It has no MAC made with a secret that the worker accepts.
    Secret,
    /// It came without a client certificate.
    Certificate,
}

impl RefusedRequests {
    /// Declares the metric, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let help = "Requests of other processes that were refused, by what they lack: secret or certificate.";
        let count = IntCounterVec::new(Opts::new("blockyard_cluster_requests_refused_total", help), &["reason"])?;
        registry.register(Box::new(count.clone()))?;
        Ok(Self { count, lines: LogLimit::default() })
    }

    /// A request from this address is refused.
    pub(super) fn refused(&self, refusal: Refusal, peer: Option<SocketAddr>) {
        let (reason, problem) = match refusal {
            Refusal::Secret => (
                "secret",
                "a request without a secret that this worker accepts was refused; if it is from a process of the \
                 deployment, write the first secret in its cluster.secret_file to cluster.secret_file of this worker",
            ),
            Refusal::Certificate => (
                "certificate",
                "a request without a client certificate was refused (cluster.tls.client_ca_file); if it is from a \
                 process of the deployment, set cluster.tls.cert_file and cluster.tls.key_file there",
            ),
        };
        self.count.with_label_values(&[reason]).inc();
        if let Some(suppressed) = self.lines.admit() {
            let peer = peer.map(|peer| peer.to_string());
            tracing::warn!(peer, suppressed, "{problem}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_requests_are_counted_by_what_they_lack() {
        let registry = Registry::new();
        let refused = RefusedRequests::new(&registry).unwrap();
        refused.refused(Refusal::Secret, Some(([127, 0, 0, 1], 9).into()));
        refused.refused(Refusal::Secret, None);
        refused.refused(Refusal::Certificate, None);
        let of = |reason: &str| refused.count.with_label_values(&[reason]).get();
        assert_eq!((of("secret"), of("certificate")), (2, 1));
    }
}
