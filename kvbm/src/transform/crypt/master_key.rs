//! Master keys, and data keys wrapped by them.
//!
//! A wrapped key, 100 bytes:
//!
//! | offset | bytes | field |
//! | --: | --: | --- |
//! | 0 | 8 | magic `BLKYKEY1`; the last digit is the version |
//! | 8 | 16 | domain |
//! | 24 | 8 | data key's number |
//! | 32 | 8 | master key's number |
//! | 40 | 12 | nonce, random: too few keys are wrapped for a repetition |
//! | 52 | 48 | the data key under AES-256-GCM, with bytes 0 to 40 as associated data |

use super::KeyError;
use super::cipher::{DataKey, aes, random};
use crate::block::{DomainId, KeyId};
use ring::aead::{Aad, NONCE_LEN, Nonce};
use std::fmt;

const MAGIC: [u8; 8] = *b"BLKYKEY1";
const CLEAR: usize = 40;
const SEALED: usize = CLEAR + NONCE_LEN;

/// Bytes of a wrapped key.
pub(super) const WRAPPED: usize = 100;

/// The public identifier of a master key: a hash of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MasterKeyId([u8; 8]);

impl MasterKeyId {
    pub(super) const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    fn of(key: &[u8; 32]) -> Self {
        let digest = blake3::derive_key("blockyard 2026-11 master key id", key);
        Self(std::array::from_fn(|i| digest[i]))
    }
}

impl fmt::Display for MasterKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for MasterKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The master keys of a source. The first one wraps data keys, all unwrap them.
pub(super) struct MasterKeys(Vec<(MasterKeyId, [u8; 32])>);

impl MasterKeys {
    /// One key or more.
    pub(super) fn new(first: [u8; 32], others: impl IntoIterator<Item = [u8; 32]>) -> Self {
        Self(std::iter::once(first).chain(others).map(|key| (MasterKeyId::of(&key), key)).collect())
    }

    /// The key that wraps data keys.
    pub(super) fn first(&self) -> MasterKeyId {
        self.0[0].0
    }

    pub(super) fn has(&self, master: MasterKeyId) -> bool {
        self.0.iter().any(|(id, _)| *id == master)
    }

    pub(super) fn wrap(&self, domain: DomainId, key: &DataKey) -> Result<[u8; WRAPPED], KeyError> {
        let (master, secret) = &self.0[0];
        let mut bytes = [0; WRAPPED];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(domain.as_bytes());
        bytes[24..32].copy_from_slice(key.id().as_bytes());
        bytes[32..CLEAR].copy_from_slice(&master.0);
        let nonce: [u8; NONCE_LEN] = random()?;
        let mut sealed = key.secret().to_vec();
        aes(secret)
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(&bytes[..CLEAR]), &mut sealed)
            .expect("a key is short");
        bytes[CLEAR..SEALED].copy_from_slice(&nonce);
        bytes[SEALED..].copy_from_slice(&sealed);
        Ok(bytes)
    }

    /// Unwraps a data key that was wrapped by `master`. An error if `bytes` are something else.
    pub(super) fn unwrap(
        &self,
        domain: DomainId,
        key: KeyId,
        master: MasterKeyId,
        bytes: &[u8],
    ) -> Result<DataKey, KeyError> {
        let corrupt = || KeyError::Corrupt { domain, key };
        let (_, secret) =
            self.0.iter().find(|(id, _)| *id == master).ok_or(KeyError::UnknownMasterKey { domain, key, master })?;
        let bytes: &[u8; WRAPPED] = bytes.try_into().map_err(|_| corrupt())?;
        let expected = [&MAGIC[..], domain.as_bytes(), key.as_bytes(), &master.0].concat();
        if bytes[..CLEAR] != expected {
            return Err(corrupt());
        }
        let nonce = std::array::from_fn(|i| bytes[CLEAR + i]);
        let mut sealed = bytes[SEALED..].to_vec();
        let opened = aes(secret).open_in_place(Nonce::assume_unique_for_key(nonce), Aad::from(&expected), &mut sealed);
        let opened: &[u8] = opened.map_err(|_| corrupt())?;
        Ok(DataKey::new(key, opened.try_into().map_err(|_| corrupt())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_changed_or_arbitrary_wrapped_key_is_refused(
            bytes in {
                let key = DataKey::new(KeyId::from_bytes([3; 8]), [4; 32]);
                let valid = MasterKeys::new([1; 32], []).wrap(DomainId::SHARED, &key).unwrap().to_vec();
                prop_oneof![fuzz::arbitrary(), fuzz::changed(valid)]
            },
        ) {
            let masters = MasterKeys::new([1; 32], []);
            let key = KeyId::from_bytes([3; 8]);
            let unwrap = |bytes: &[u8]| masters.unwrap(DomainId::SHARED, key, masters.first(), bytes);
            // The change may leave the wrapped key unchanged.
            let unwrapped = fuzz::bounded(&bytes, 1, unwrap);
            assert!(unwrapped.is_err() || unwrapped.is_ok_and(|key| key.secret() == &[4; 32]));
        }
    }

    #[test]
    fn a_key_unwraps_only_for_its_master_key_and_domain() {
        let (old, new) = (MasterKeys::new([1; 32], []), MasterKeys::new([2; 32], [[1; 32]]));
        let (domain, other) = (DomainId::from_bytes([5; 16]), DomainId::from_bytes([6; 16]));
        let key = DataKey::new(KeyId::from_bytes([3; 8]), [4; 32]);
        let wrapped = old.wrap(domain, &key).unwrap();
        assert_ne!(wrapped, old.wrap(domain, &key).unwrap(), "a nonce of its own each time");
        let unwrapped = new.unwrap(domain, key.id(), old.first(), &wrapped).unwrap();
        assert_eq!(unwrapped.secret(), key.secret());
        assert!(matches!(new.unwrap(other, key.id(), old.first(), &wrapped), Err(KeyError::Corrupt { .. })));
        let foreign = MasterKeys::new([9; 32], []);
        assert!(matches!(
            foreign.unwrap(domain, key.id(), old.first(), &wrapped),
            Err(KeyError::UnknownMasterKey { .. })
        ));
    }

    #[test]
    fn any_flipped_bit_of_a_wrapped_key_is_detected() {
        let masters = MasterKeys::new([1; 32], []);
        let domain = DomainId::SHARED;
        let key = DataKey::new(KeyId::from_bytes([3; 8]), [4; 32]);
        let wrapped = masters.wrap(domain, &key).unwrap();
        for bit in 0..WRAPPED * 8 {
            let mut bad = wrapped;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(masters.unwrap(domain, key.id(), masters.first(), &bad).is_err(), "bit {bit}");
        }
    }
}
