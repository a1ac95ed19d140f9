//! Request ids: unique within the process and not predictable.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// A new id of 32 hexadecimal digits: a counter hashed with the random keys of the standard library's hash maps, which
/// are drawn once per process.
pub(crate) fn generate() -> Arc<str> {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut digits = [0; 32];
    for (keys, digits) in KEYS.iter().zip(digits.chunks_exact_mut(16)) {
        let hash = keys.hash_one(count);
        for (at, digit) in digits.iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(hash >> (4 * at) & 15) as usize];
        }
    }
    std::str::from_utf8(&digits).expect("digits are ASCII").into()
}

#[cfg(test)]
mod tests {
    use super::generate;

    #[test]
    fn ids_are_32_digits_and_differ() {
        let (one, two) = (generate(), generate());
        assert!(one.len() == 32 && one.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(one, two);
    }
}
