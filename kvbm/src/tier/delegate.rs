//! For tiers that wrap another tier: [`delegate`] implements the methods that a wrapper does not change.

/// Implements methods of [`Tier`](super::Tier) by calling them on a field: `delegate!(tier: level, holds);`.
///
/// List the methods with a default implementation too: the default would call other methods of the wrapper.
macro_rules! delegate {
    ($field:tt: $($method:ident),+) => {
        $(crate::tier::delegate!(@$method $field);)+
    };
    (@level $field:tt) => {
        fn level(&self) -> crate::block::Level {
            self.$field.level()
        }
    };
    (@holds $field:tt) => {
        fn holds(&self, fingerprint: crate::block::Fingerprint, hashes: &[crate::block::SequenceHash]) -> usize {
            self.$field.holds(fingerprint, hashes)
        }
    };
    (@load $field:tt) => {
        fn load(
            &self,
            fingerprint: crate::block::Fingerprint,
            hashes: Vec<crate::block::SequenceHash>,
        ) -> futures::stream::BoxStream<'static, crate::tier::Loaded> {
            self.$field.load(fingerprint, hashes)
        }
    };
    (@store $field:tt) => {
        fn store(
            &self,
            blocks: Vec<crate::block::Block>,
        ) -> futures::future::BoxFuture<'_, Vec<Result<(), crate::tier::StoreError>>> {
            self.$field.store(blocks)
        }
    };
    (@discard $field:tt) => {
        fn discard(&self, fingerprint: crate::block::Fingerprint, hash: crate::block::SequenceHash) {
            self.$field.discard(fingerprint, hash);
        }
    };
    (@withdraw $field:tt) => {
        fn withdraw(&self, fingerprint: crate::block::Fingerprint, hash: crate::block::SequenceHash) {
            self.$field.withdraw(fingerprint, hash);
        }
    };
    (@expire_one $field:tt) => {
        fn expire_one(&self, fingerprint: crate::block::Fingerprint, hash: crate::block::SequenceHash) -> usize {
            self.$field.expire_one(fingerprint, hash)
        }
    };
    (@expire $field:tt) => {
        fn expire(&self, now: crate::block::Date) -> usize {
            self.$field.expire(now)
        }
    };
    (@usage $field:tt) => {
        fn usage(&self) -> crate::tier::Usage {
            self.$field.usage()
        }
    };
}

pub(crate) use delegate;
