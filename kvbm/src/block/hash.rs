//! Hashes of block content, the cache domains that separate them, and fingerprints of the engines that compute blocks.
//!
//! A block hash depends on content only: the cache domain's key, the model's identity, the adapter, and every token
//! up to the end of the block. Hashes are chained by keyed BLAKE3: the parent's 32-byte chain value is the key with
//! which the block's tokens are hashed. So one block costs one compression, and a hash commits to the whole prefix.
//! The block hash is the first 16 bytes of the chain value. It does not contain the fingerprint, so that engines of
//! several kinds share one prefix index.

// `blake3::platform` is not documented because it is internal; the tests below compare it with the public functions.
use blake3::platform::{Platform, le_bytes_from_words_32, words_from_le_bytes_32};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Hash of a block: 128 bits of a keyed BLAKE3 chain over all tokens up to its end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SequenceHash([u8; 16]);

impl SequenceHash {
    /// The 16 bytes, as in block headers and on the wire.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// A hash from a block header or the wire.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The first eight bytes as a number, for indexes that tolerate a collision.
    pub fn short(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Both halves as numbers, the second one made odd, for tables that derive several positions by double hashing.
    pub(crate) fn halves(&self) -> (u64, u64) {
        let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| self.0[at + i]));
        (half(0), half(8) | 1)
    }
}

impl fmt::Display for SequenceHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SequenceHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A cache domain: requests of one domain share blocks. Hashes are keyed by a secret of the domain, so that two domains
/// never share a hash.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Domain {
    /// Key of the tenant.
    key: [u8; 32],
    /// Key of the first hash of each chain: the tenant key, or a hash of it and the salts.
    root: [u8; 32],
}

impl Domain {
    /// The domain of the tenant `name` in a deployment. All processes of the deployment need the same `secret` to share
    /// blocks. An empty secret separates tenants too, but then a reader of a store can compute the hashes of guessed
    /// prompts of a tenant.
    pub fn derived(secret: &[u8], name: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("blockyard 2026-11 cache domain of a tenant");
        // The length comes first, so that no two (secret, name) pairs hash the same bytes.
        hasher.update(&(secret.len() as u64).to_le_bytes());
        hasher.update(secret).update(name.as_bytes());
        Self::of_key(*hasher.finalize().as_bytes())
    }

    fn of_key(key: [u8; 32]) -> Self {
        Self { key, root: key }
    }

    /// The part of the domain whose blocks are shared only by requests with the same salt. It has the id of the
    /// domain, and so its data key, quota and deletion.
    #[must_use]
    pub fn salted(&self, salt: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("blockyard 2026-11 salt of a cache domain");
        // The root comes first and has a fixed length, so that no two pairs hash the same bytes.
        hasher.update(&self.root).update(salt.as_bytes());
        Self { key: self.key, root: *hasher.finalize().as_bytes() }
    }

    /// The domain of all requests when no tenants are configured.
    pub fn shared() -> Self {
        Self::of_key(blake3::derive_key("blockyard 2026-11 shared cache domain", b""))
    }

    /// A salt that keeps the blocks of this domain apart in an engine that knows salts only (vLLM's `cache_salt`).
    /// `None` for the shared domain.
    pub fn engine_salt(&self) -> Option<String> {
        let salt = blake3::derive_key("blockyard 2026-11 salt for other engines", &self.root);
        (self.root != Self::shared().root).then(|| blake3::Hash::from_bytes(salt).to_hex()[..32].to_owned())
    }

    /// The keys of the domain, for another process of the same deployment. A holder of them can compute the hashes of
    /// guessed prompts of the tenant, so they are never logged, and cross only networks that are trusted or encrypted.
    pub fn secret_parts(&self) -> ([u8; 32], [u8; 32]) {
        (self.key, self.root)
    }

    /// The domain with these [`secret_parts`](Self::secret_parts).
    pub fn of_secret_parts((key, root): ([u8; 32], [u8; 32])) -> Self {
        Self { key, root }
    }

    /// The public id, which block headers contain. It selects the domain's data key and quota.
    pub fn id(&self) -> DomainId {
        if self.key == Self::shared().key {
            return DomainId::SHARED;
        }
        let digest = blake3::derive_key("blockyard 2026-11 cache domain id", &self.key);
        DomainId(std::array::from_fn(|i| digest[i]))
    }
}

impl Default for Domain {
    fn default() -> Self {
        Self::shared()
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is secret; eight hex digits of its hash distinguish domains in a log.
        write!(f, "Domain({})", &blake3::hash(&self.root).to_hex()[..8])
    }
}

/// Public id of a [`Domain`]. It reveals neither key nor hashes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DomainId([u8; 16]);

impl DomainId {
    /// Id of [`Domain::shared`].
    pub const SHARED: Self = Self([0; 16]);

    /// The 16 bytes, as in block headers.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// An id from a block header.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl FromStr for DomainId {
    type Err = ();

    /// Reads 32 hex digits.
    fn from_str(digits: &str) -> Result<Self, ()> {
        if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(());
        }
        Ok(Self(u128::from_str_radix(digits, 16).map_err(|_| ())?.to_be_bytes()))
    }
}

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The chain value after a prefix: the key with which the next block is hashed.
///
/// ```
/// use kvbm::{ChainKey, Domain};
/// let root = ChainKey::root(&Domain::shared(), "tiny", None);
/// let tokens: Vec<u32> = (0..40).collect();
/// let hashes = root.hashes(&tokens, 16);
/// assert_eq!(hashes.len(), 2, "only full blocks have a hash");
/// assert_eq!(hashes[..1], root.hashes(&tokens[..16], 16), "a hash does not depend on what follows");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ChainKey([u32; 8]);

/// Tokens that fill one BLAKE3 block, which takes one compression.
const ONE_COMPRESSION: usize = 16;
/// BLAKE3's flags for a keyed hash of at most 64 bytes: the only block of its chunk, and the root (its paper, section
/// 2.2).
const ONLY_BLOCK: u8 = CHUNK_START | CHUNK_END | ROOT | KEYED_HASH;
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 1 << 1;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

impl ChainKey {
    /// The empty prefix of `model` (its identity: name and revision) with an optional adapter, in `domain`.
    pub fn root(domain: &Domain, model: &str, adapter: Option<&str>) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&domain.root);
        // Lengths come first, so that no two (model, adapter) pairs hash the same bytes.
        hasher.update(&(model.len() as u64).to_le_bytes());
        hasher.update(model.as_bytes());
        if let Some(adapter) = adapter {
            hasher.update(&(adapter.len() as u64).to_le_bytes());
            hasher.update(adapter.as_bytes());
        }
        Self(words_from_le_bytes_32(hasher.finalize().as_bytes()))
    }

    /// Advances past one full block of tokens and returns its hash.
    pub fn push(&mut self, tokens: &[u32]) -> SequenceHash {
        self.advance(Platform::detect(), tokens)
    }

    /// Hashes of all full blocks of `block_size` tokens, in order. Each takes about 65 ns.
    pub fn hashes(mut self, tokens: &[u32], block_size: usize) -> Vec<SequenceHash> {
        let platform = Platform::detect();
        tokens.chunks_exact(block_size).map(|block| self.advance(platform, block)).collect()
    }

    /// A routing decision computes hundreds of hashes in sequence, so a block of 16 tokens calls the compression
    /// directly: `keyed_hash` takes a third longer.
    #[inline]
    fn advance(&mut self, platform: Platform, tokens: &[u32]) -> SequenceHash {
        if tokens.len() == ONE_COMPRESSION {
            let mut block = [0; ONE_COMPRESSION * 4];
            write(tokens, &mut block);
            platform.compress_in_place(&mut self.0, &block, block.len() as u8, 0, ONLY_BLOCK);
        } else {
            self.0 = words_from_le_bytes_32(keyed_hash(&le_bytes_from_words_32(&self.0), tokens).as_bytes());
        }
        self.hash()
    }

    /// The hash of the block that ends here.
    #[inline]
    pub fn hash(&self) -> SequenceHash {
        let mut hash = [0; 16];
        hash.copy_from_slice(&le_bytes_from_words_32(&self.0)[..16]);
        SequenceHash(hash)
    }
}

/// Keyed hash of any number of tokens.
fn keyed_hash(key: &[u8; 32], tokens: &[u32]) -> blake3::Hash {
    // Up to 64 tokens, which covers the usual block sizes, are hashed in one call; longer blocks are streamed.
    if tokens.len() <= 64 {
        let mut bytes = [0; 256];
        write(tokens, &mut bytes);
        return blake3::keyed_hash(key, &bytes[..tokens.len() * 4]);
    }
    let mut hasher = blake3::Hasher::new_keyed(key);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.finalize()
}

fn write(tokens: &[u32], bytes: &mut [u8]) {
    for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        to.copy_from_slice(&token.to_le_bytes());
    }
}

impl fmt::Debug for ChainKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChainKey(..)")
    }
}

/// Identifies everything that decides a payload's bytes: weights, dtype, layout, block size, rank, and the
/// instruction set where bytes depend on it. The engine computes it; this crate only compares it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of `(field, value)` pairs in a fixed order.
    pub fn of<'a>(facts: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("blockyard 2026-11 block fingerprint");
        for (field, value) in facts {
            for part in [field.as_bytes(), value] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The 32 bytes, as in block headers.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A fingerprint from a block header.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Sixteen hex digits distinguish fingerprints in logs and folder names.
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn domains_have_distinct_ids_and_the_shared_one_is_zeros() {
        let (one, other) = (Domain::of_key([7; 32]), Domain::of_key([8; 32]));
        assert_eq!(one.id(), one.clone().id());
        assert_ne!(one.id(), other.id());
        assert_eq!(Domain::shared().id(), DomainId::default());
        assert_eq!(one.id().to_string().parse(), Ok(one.id()));
        assert_eq!("+123456789abcdef0123456789abcdef".parse::<DomainId>(), Err(()));
    }

    #[test]
    fn a_salted_domain_keeps_the_id_of_its_tenant() {
        let tenant = Domain::derived(b"s", "a");
        assert_eq!(tenant.salted("x").id(), tenant.id());
        assert_eq!(Domain::shared().salted("x").id(), DomainId::SHARED);
        assert_eq!(tenant.salted("x"), tenant.salted("x"));
    }

    #[test]
    fn a_derived_domain_depends_on_the_whole_of_name_and_secret() {
        let pairs: [(&[u8], &str); 6] = [(b"", ""), (b"", "a"), (b"a", ""), (b"s", "a"), (b"s", "b"), (b"sa", "")];
        let ids: HashSet<_> = pairs.iter().map(|(secret, name)| Domain::derived(secret, name).id()).collect();
        assert_eq!(ids.len(), pairs.len());
        assert!(!ids.contains(&DomainId::SHARED));
        assert_eq!(Domain::derived(b"s", "a"), Domain::derived(b"s", "a"));
    }

    #[test]
    fn domain_model_and_adapter_each_change_every_hash() {
        let tokens: Vec<u32> = (0..64).collect();
        let other = Domain::of_key([7; 32]);
        let roots = [
            ChainKey::root(&Domain::shared().salted("a"), "a", None),
            ChainKey::root(&Domain::shared().salted(""), "a", None),
            ChainKey::root(&Domain::shared().salted("b"), "a", None),
            ChainKey::root(&Domain::shared().salted("a").salted("b"), "a", None),
            ChainKey::root(&other.salted("a"), "a", None),
            ChainKey::root(&Domain::shared(), "a", None),
            ChainKey::root(&other, "a", None),
            ChainKey::root(&Domain::shared(), "b", None),
            ChainKey::root(&Domain::shared(), "a", Some("x")),
            ChainKey::root(&Domain::shared(), "a", Some("")),
        ];
        let hashes: HashSet<_> = roots.iter().flat_map(|root| root.hashes(&tokens, 16)).collect();
        assert_eq!(hashes.len(), roots.len() * 4);
    }

    #[test]
    fn a_hash_commits_to_the_whole_prefix() {
        let root = ChainKey::root(&Domain::shared(), "m", None);
        let mut tokens: Vec<u32> = (0..64).collect();
        let before = root.hashes(&tokens, 16);
        tokens[0] += 1;
        let after = root.hashes(&tokens, 16);
        assert!(before.iter().zip(&after).all(|(a, b)| a != b));
    }

    #[test]
    fn a_block_of_any_length_is_hashed_under_the_value_before_it() {
        let root = ChainKey::root(&Domain::shared(), "m", None);
        let tokens: Vec<u32> = (0..512_u32).map(|token| token.wrapping_mul(0x0101_0107)).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        // These cover the direct compression, the single call and the streamed hash.
        for block in [1, 8, 15, 16, 17, 32, 64, 128, 256] {
            let mut key = le_bytes_from_words_32(&root.0);
            let want = bytes.chunks_exact(block * 4).map(|bytes| {
                key = *blake3::keyed_hash(&key, bytes).as_bytes();
                <[u8; 16]>::try_from(&key[..16]).unwrap()
            });
            let hashes = root.hashes(&tokens, block);
            assert!(hashes.iter().map(|hash| *hash.as_bytes()).eq(want), "blocks of {block}");
        }
    }

    #[test]
    fn hashes_never_change() {
        // Stores outlive programs: blocks that an older version stored must be found.
        let hash = |tokens: &[u32], block| ChainKey::root(&Domain::shared(), "m", None).hashes(tokens, block).pop();
        let tokens: Vec<u32> = (0..64).collect();
        assert_eq!(hash(&tokens, 16).unwrap().to_string(), "71045a80acaf55ac057943b8d33b0b74");
        assert_eq!(hash(&tokens, 32).unwrap().to_string(), "07dc7fa7f7eb2b0e5b626997449d898a");
    }
}
