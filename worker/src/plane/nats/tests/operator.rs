//! An operator of NATS servers: it signs an account, which signs users. The claims are those of version 2 of the JWTs
//! that `nsc` writes.

use nkeys::KeyPair;
use serde_json::{Value, json};

/// The operator, its account with JetStream, and the system account, which a server with JetStream needs.
pub(super) struct Operator {
    key: KeyPair,
    account: KeyPair,
    system: KeyPair,
}

/// The header of each JWT.
const HEADER: &[u8] = br#"{"typ":"JWT","alg":"ed25519-nkey"}"#;

impl Operator {
    pub(super) fn new() -> Self {
        Self { key: KeyPair::new_operator(), account: KeyPair::new_account(), system: KeyPair::new_account() }
    }

    /// The configuration of a server that trusts this operator and knows its accounts.
    pub(super) fn configuration(&self) -> String {
        let account = |key: &KeyPair, storage: i64| {
            let limits = json!({
                "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1,
                "leaf": -1, "mem_storage": storage, "disk_storage": storage, "streams": storage, "consumer": storage,
            });
            format!("{}: {}", key.public_key(), jwt(&self.key, key, "account", json!({ "limits": limits })))
        };
        format!(
            "operator: {}\nresolver: MEMORY\nsystem_account: {}\nresolver_preload {{\n{}\n{}\n}}\n",
            jwt(&self.key, &self.key, "operator", json!({})),
            self.system.public_key(),
            account(&self.account, -1),
            account(&self.system, 0),
        )
    }

    /// The credentials file of a new user of the account.
    pub(super) fn user(&self) -> String {
        let user = KeyPair::new_user();
        let limits = json!({ "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {} });
        format!(
            "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
            jwt(&self.account, &user, "user", limits),
            user.seed().unwrap(),
        )
    }
}

/// A JWT with which `issuer` says what `subject` is.
fn jwt(issuer: &KeyPair, subject: &KeyPair, kind: &str, mut nats: Value) -> String {
    nats["type"] = kind.into();
    nats["version"] = 2.into();
    let claims = json!({
        "jti": subject.public_key(), "iat": 1_700_000_000, "iss": issuer.public_key(), "sub": subject.public_key(),
        "name": kind, "nats": nats,
    });
    let signed = format!("{}.{}", base64url(HEADER), base64url(claims.to_string().as_bytes()));
    let signature = issuer.sign(signed.as_bytes()).unwrap();
    format!("{signed}.{}", base64url(&signature))
}

/// Base64 for URLs, without padding.
fn base64url(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digits = |chunk: &[u8]| {
        let word =
            [0_usize, 1, 2].iter().fold(0_u32, |word, at| (word << 8) | u32::from(*chunk.get(*at).unwrap_or(&0)));
        (0..=chunk.len()).map(|at| char::from(DIGITS[(word >> (18 - 6 * at)) as usize % 64])).collect::<String>()
    };
    bytes.chunks(3).map(digits).collect()
}
