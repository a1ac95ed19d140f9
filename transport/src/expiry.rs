//! When a certificate expires, and from when on that is near.
//!
//! The library that checks certificates names the end of their validity in its error for an expired one, and the start
//! in that for one that is not valid yet. So each certificate is checked at the last and at the first moment that one
//! can name.

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, Error, RootCertStore};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Later than any certificate is valid: the year 10000 (RFC 5280, 4.1.2.5).
const LAST: Duration = Duration::from_hours(70_389_528);
/// Warnings begin this long before the end. Renewal by ACME begins 30 days before, so something is wrong by then.
const MAX_NOTICE: Duration = Duration::from_hours(14 * 24);
/// Part of its validity in which a shorter-lived certificate is near its end. ACME renews it after two thirds of it.
const NOTICE_PART: u32 = 6;

/// The validity of a chain of certificates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CertificateExpiry {
    /// The end of the first of them to expire.
    pub at: SystemTime,
    /// From when on that is near.
    pub warn_from: SystemTime,
}

impl CertificateExpiry {
    /// The validity of these certificates. `None` for none, and for those that cannot be read.
    pub fn of(chain: &[CertificateDer<'_>]) -> Option<Self> {
        chain.iter().filter_map(Self::of_one).min_by_key(|expiry| expiry.at)
    }

    fn of_one(certificate: &CertificateDer<'_>) -> Option<Self> {
        let parsed = ParsedCertificate::try_from(certificate).ok()?;
        let (roots, provider) = (RootCertStore::empty(), default_provider());
        let check = |at| {
            let algorithms = provider.signature_verification_algorithms.all;
            let now = UnixTime::since_unix_epoch(at);
            verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &[], now, algorithms)
        };
        let time = |time: UnixTime| UNIX_EPOCH + Duration::from_secs(time.as_secs());
        let Err(Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) = check(LAST) else {
            return None;
        };
        let at = time(not_after);
        let notice = match check(Duration::ZERO) {
            Err(Error::InvalidCertificate(CertificateError::NotValidYetContext { not_before, .. })) => {
                let validity = at.duration_since(time(not_before)).unwrap_or_default();
                MAX_NOTICE.min(validity / NOTICE_PART)
            }
            _ => MAX_NOTICE,
        };
        Some(Self { at, warn_from: at - notice })
    }

    /// Days from `now` until the end; 0 on the last day and after it.
    pub fn days_left(&self, now: SystemTime) -> u64 {
        self.at.duration_since(now).unwrap_or_default().as_secs() / (24 * 60 * 60)
    }

    /// The end in seconds since 1970, as Prometheus has times.
    pub(crate) fn timestamp(&self) -> i64 {
        self.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::pem::PemObject;

    fn chain(files: &[&str]) -> Vec<CertificateDer<'static>> {
        files.iter().map(|pem| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).collect()
    }

    #[test]
    fn a_chain_expires_with_the_first_of_its_certificates() {
        let [long, short] = [
            include_str!("../../frontend/tests/fixtures/tls/one.pem"),
            include_str!("../../frontend/tests/fixtures/tls/short.pem"),
        ];
        let day = Duration::from_hours(24);
        let of = |files: &[&str]| CertificateExpiry::of(&chain(files)).unwrap();
        // As `openssl x509 -enddate` says: Oct 30 05:19:36 2126 GMT.
        assert_eq!(of(&[long]).timestamp(), 4_949_011_176);
        assert_eq!(of(&[long]).warn_from, of(&[long]).at - 14 * day);
        // Valid from Jan 1 to Jan 31 2026: its last five days.
        let expiry = of(&[long, short]);
        assert_eq!((expiry.timestamp(), expiry.warn_from), (1_769_817_600, expiry.at - 5 * day));
        assert_eq!((expiry.days_left(expiry.at - 3 * day), expiry.days_left(expiry.at + day)), (3, 0));
        assert_eq!(CertificateExpiry::of(&[CertificateDer::from(vec![0])]), None);
    }
}
