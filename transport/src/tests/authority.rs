//! An authority that signs certificates for tests.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use std::fs;
use std::path::{Path, PathBuf};

/// An authority.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        // All authorities have this name, and those that they certify another one.
        params.distinguished_name.push(DnType::CommonName, "authority of tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Its certificate in PEM format.
    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes its certificate.
    pub(crate) fn write(&self, path: &Path) -> PathBuf {
        fs::write(path, self.pem()).unwrap();
        path.to_owned()
    }

    /// Writes a certificate for these hosts and its key: `<name>.pem` and `<name>.key`.
    pub(crate) fn sign(&self, folder: &Path, name: &str, hosts: &[&str], is_expired: bool) -> [PathBuf; 2] {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        if is_expired {
            (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2020, 2, 1));
        }
        let key = KeyPair::generate().unwrap();
        let [certificate_file, key_file] = ["pem", "key"].map(|kind| folder.join(format!("{name}.{kind}")));
        fs::write(&certificate_file, params.signed_by(&key, &*self.0).unwrap().pem()).unwrap();
        fs::write(&key_file, key.serialize_pem()).unwrap();
        [certificate_file, key_file]
    }
}
