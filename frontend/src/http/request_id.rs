//! Names for requests and answers that are not to be guessed or repeated in a process's life.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// 32 hexadecimal digits. Keyed by what the standard library draws for its hash maps, once per process; so far the only
/// randomness in this crate, and nothing is computed from it.
pub(crate) fn unique() -> String {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", KEYS[0].hash_one(count), KEYS[1].hash_one(count))
}

#[cfg(test)]
mod tests {
    use super::unique;

    #[test]
    fn names_are_32_digits_and_differ() {
        let (one, two) = (unique(), unique());
        assert!(one.len() == 32 && one.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(one, two);
    }
}
