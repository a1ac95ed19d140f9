//! Request ids: unique within the process and not predictable.

use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// A new id of 32 hexadecimal digits: a counter hashed with the random keys of the standard library's hash maps, which
/// are drawn once per process.
pub(crate) fn generate() -> Arc<str> {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // On the stack: the id is allocated once.
    let mut digits = [0; 32];
    write!(&mut digits[..], "{:016x}{:016x}", KEYS[0].hash_one(count), KEYS[1].hash_one(count)).expect("they fit");
    str::from_utf8(&digits).expect("digits are ASCII").into()
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
