//! What tenants are promised of each worker's memory: names and sizes in, cache domains and bytes out. Pure, and what cannot
//! be kept is an error before anything is loaded.

use super::sizes::Sizes;
use crate::config::{ByteSize, TenantQuota};
use kvbm::{Domain, Level, Quota, Shares};
use std::collections::HashSet;

/// A promise that cannot be kept.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Error {
    /// All requests are nobody's.
    #[error("tiers.quotas: nobody says whose a request is; name the header that does: --set frontend.tenant_header=…")]
    NoTenants,
    /// Which of the two holds?
    #[error("tiers.quotas: there are two of tenant `{0}`")]
    Twice(String),
    /// The guarantee is void.
    #[error(
        "tiers.quotas: tenant `{tenant}` has {promised} of {tier} guaranteed, and may have at most {most}",
        promised = ByteSize(.quota.guaranteed).about(),
        most = ByteSize(.quota.maximum.unwrap_or(u64::MAX)).about()
    )]
    LessThanGuaranteed {
        /// Whose.
        tenant: String,
        /// Where.
        tier: &'static str,
        /// So much.
        quota: Quota,
    },
    /// More is promised than there is.
    #[error(
        "tiers.quotas: {promised} of {tier} are guaranteed, and each worker's {tier} has {have}; promise less, or make it \
         larger: --set tiers.{tier}=…",
        promised = ByteSize(*.promised).about(),
        have = ByteSize(*.have).about()
    )]
    TooMuch {
        /// Of which.
        tier: &'static str,
        /// To all together.
        promised: u64,
        /// What there is.
        have: u64,
    },
}

/// What `quotas` mean for tiers of these sizes. `domain` says whose cache a tenant's prompts belong to; `None` when
/// requests are not told apart.
pub(super) fn shares(
    quotas: &[TenantQuota],
    sizes: &Sizes,
    domain: Option<impl Fn(&str) -> Domain>,
) -> Result<Shares, Error> {
    if quotas.is_empty() {
        return Ok(Shares::default());
    }
    let domain = domain.ok_or(Error::NoTenants)?;
    let mut tenants = HashSet::new();
    if let Some(twice) = quotas.iter().find(|quota| !tenants.insert(&quota.tenant)) {
        return Err(Error::Twice(twice.tenant.clone()));
    }
    let mut shares = Shares::default();
    for (level, have) in [(Level::G1, sizes.g1), (Level::G2, sizes.g2.unwrap_or(0))] {
        let (tier, mut promised) = (level.name(), 0_u64);
        for quotas in quotas {
            let (tenant, quota) = (&quotas.tenant, quotas.at(level));
            if quota.maximum.is_some_and(|most| most < quota.guaranteed) {
                return Err(Error::LessThanGuaranteed { tenant: tenant.clone(), tier, quota });
            }
            promised = promised.saturating_add(quota.guaranteed);
            shares = shares.promise(domain(tenant).id(), level, quota);
        }
        if promised > have {
            return Err(Error::TooMuch { tier, promised, have });
        }
    }
    Ok(shares)
}

impl TenantQuota {
    fn at(&self, level: Level) -> Quota {
        let (guaranteed, most) = match level {
            Level::G1 => (self.g1, self.g1_max),
            Level::G2 => (self.g2, self.g2_max),
            Level::G3 | Level::Pod | Level::G4 | Level::Peer => (ByteSize(0), None),
        };
        Quota { guaranteed: guaranteed.0, maximum: most.map(|most| most.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { g1: 1000, g2: None, g3: None };

    fn quota(tenant: &str, g1: u64, g1_max: Option<u64>) -> TenantQuota {
        TenantQuota { g1: ByteSize(g1), g1_max: g1_max.map(ByteSize), ..TenantQuota::of(tenant) }
    }

    fn of(quotas: &[TenantQuota]) -> Result<Shares, Error> {
        shares(quotas, &SIZES, Some(|tenant: &str| Domain::derived(b"secret", tenant)))
    }

    #[test]
    fn each_tenant_is_promised_what_its_quota_says_in_its_own_domain() {
        let ann = Domain::derived(b"secret", "ann").id();
        let wanted = Shares::default().promise(ann, Level::G1, Quota { guaranteed: 600, maximum: Some(700) }).promise(
            ann,
            Level::G2,
            Quota::default(),
        );
        assert_eq!(of(&[quota("ann", 600, Some(700))]), Ok(wanted));
        assert_eq!(of(&[]), Ok(Shares::default()));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_the_reason() {
        let cases = [
            (vec![quota("ann", 600, None), quota("bob", 500, None)], "1.1 KiB of g1 are guaranteed"),
            (vec![quota("ann", 600, Some(500))], "`ann` has 600 B of g1 guaranteed, and may have at most 500 B"),
            (vec![quota("ann", 0, None), quota("ann", 1, None)], "two of tenant `ann`"),
            (vec![TenantQuota { g2: ByteSize(1), ..TenantQuota::of("ann") }], "each worker's g2 has 0 B"),
        ];
        for (quotas, part) in cases {
            let error = of(&quotas).unwrap_err().to_string();
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        let nobody = shares(&[quota("ann", 1, None)], &SIZES, None::<fn(&str) -> Domain>);
        assert_eq!(nobody, Err(Error::NoTenants));
    }
}
