//! Quotas of tenants: from tenant names and sizes in the configuration to cache domains and bytes per tier. Quotas that
//! do not fit their tier are refused before anything is loaded.

use super::sizes::Sizes;
use crate::config::{ByteSize, Config, TenantQuota};
use kvbm::{Domain, DomainId, Level, Quota, Quotas};
use std::collections::{BTreeMap, HashSet};

/// A quota that cannot be guaranteed.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub(super) enum Error {
    /// No header carries the tenant.
    #[error(
        "tiers.quotas: requests have no tenant; set the header that carries it (--set frontend.tenant_header=…) or \
             keys with tenants (--set frontend.api_keys_file=…)"
    )]
    NoTenants,
    /// Two quotas for one tenant.
    #[error("tiers.quotas: tenant `{0}` appears twice")]
    Twice(String),
    /// The limit is below the guaranteed size.
    #[error(
        "tiers.quotas: tenant `{tenant}` has {guaranteed} of {tier} guaranteed, which is above its limit of {most}",
        guaranteed = ByteSize(.quota.guaranteed).about(),
        most = ByteSize(.quota.maximum.unwrap_or(u64::MAX)).about()
    )]
    LessThanGuaranteed {
        /// The tenant.
        tenant: String,
        /// The tier.
        tier: &'static str,
        /// Its quota in the tier.
        quota: Quota,
    },
    /// The guaranteed sizes exceed the tier.
    #[error(
        "tiers.quotas: {guaranteed} of {tier} are guaranteed, but at most {have} can be; guarantee less, or enlarge \
         the tier: --set {key}=…",
        guaranteed = ByteSize(*.guaranteed).about(),
        have = ByteSize(*.have).about()
    )]
    TooMuch {
        /// The tier.
        tier: &'static str,
        /// The key of the configuration that sets its size.
        key: &'static str,
        /// Sum of the guaranteed sizes of all tenants, in bytes.
        guaranteed: u64,
        /// Size that can be guaranteed, in bytes.
        have: u64,
    },
    /// The weight is not a number above 0.
    #[error("tiers.quotas: tenant `{0}` has a weight of {1}; expected a number above 0, like 2 or 0.5")]
    Weight(String, f64),
}

impl Error {
    /// What to change. The text of some errors ends with it.
    pub(super) fn advice(&self) -> String {
        match self {
            Self::NoTenants => "set the header that carries it (--set frontend.tenant_header=…) or keys with tenants \
                                (--set frontend.api_keys_file=…)"
                .to_owned(),
            Self::Twice(tenant) => format!("remove one of the entries of tenant `{tenant}` from tiers.quotas"),
            Self::LessThanGuaranteed { tenant, tier, .. } => {
                format!("raise {tier}_limit of tenant `{tenant}` in tiers.quotas, or lower its {tier}_guaranteed")
            }
            Self::TooMuch { key, .. } => format!("guarantee less, or enlarge the tier: --set {key}=…"),
            Self::Weight(tenant, _) => format!("set weight of tenant `{tenant}` in tiers.quotas to a number above 0"),
        }
    }
}

/// Bytes of each tier that quotas can guarantee.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Capacities {
    g1: u64,
    g2: u64,
    g3: u64,
    g3_5: u64,
    g4: u64,
}

impl Capacities {
    pub(super) fn of(config: &Config, sizes: &Sizes) -> Self {
        Self {
            g1: sizes.g1,
            g2: sizes.g2.unwrap_or(0),
            // A quarter of the log may consist of segments that are being written or reclaimed.
            g3: sizes.g3.unwrap_or(0) / 4 * 3,
            g3_5: config.tiers.g3_5.as_ref().map_or(0, |flash| flash.capacity.0),
            g4: config.tiers.g4.capacity.map_or(0, |capacity| capacity.0),
        }
    }
}

/// The shares of cache domains in tiers of these capacities. `domain` maps a tenant to its cache domain; `None` if
/// requests have no tenant.
pub(super) fn shares(
    quotas: &[TenantQuota],
    capacities: Capacities,
    domain: Option<impl Fn(&str) -> Domain>,
) -> Result<Quotas, Error> {
    if quotas.is_empty() {
        return Ok(Quotas::default());
    }
    let domain = domain.ok_or(Error::NoTenants)?;
    let mut tenants = HashSet::new();
    if let Some(twice) = quotas.iter().find(|quota| !tenants.insert(&quota.tenant)) {
        return Err(Error::Twice(twice.tenant.clone()));
    }
    let mut shares = Quotas::default();
    let tiers = [
        (Level::G1, capacities.g1, "tiers.g1"),
        (Level::G2, capacities.g2, "tiers.g2"),
        (Level::G3, capacities.g3, "tiers.g3"),
        (Level::G3_5, capacities.g3_5, "tiers.g3_5.capacity"),
        (Level::G4, capacities.g4, "tiers.g4.capacity"),
    ];
    for (level, have, key) in tiers {
        let (tier, mut guaranteed) = (level.name(), 0_u64);
        for quotas in quotas {
            let (tenant, quota) = (&quotas.tenant, quotas.at(level));
            if quota.maximum.is_some_and(|most| most < quota.guaranteed) {
                return Err(Error::LessThanGuaranteed { tenant: tenant.clone(), tier, quota });
            }
            guaranteed = guaranteed.saturating_add(quota.guaranteed);
            shares = shares.with_quota(domain(tenant).id(), level, quota);
        }
        if guaranteed > have {
            return Err(Error::TooMuch { tier, key, guaranteed, have });
        }
    }
    for TenantQuota { tenant, weight, .. } in quotas {
        if !(weight.is_finite() && *weight > 0.0) {
            return Err(Error::Weight(tenant.clone(), *weight));
        }
        shares = shares.with_weight(domain(tenant).id(), *weight);
    }
    Ok(shares)
}

/// The quotas of cache domains in a tier that garbage collection bounds.
pub(super) fn stored(config: &Config, level: Level) -> anyhow::Result<BTreeMap<DomainId, Quota>> {
    let domains = frontend::CacheDomains::open(&config.frontend)?;
    let quotas = config.tiers.quotas.iter().map(|quota| (domains.of(&quota.tenant).id(), quota.at(level)));
    let quotas: BTreeMap<_, _> = quotas.filter(|(_, quota)| *quota != Quota::default()).collect();
    if !quotas.is_empty() && !config.frontend.has_tenants() {
        return Err(Error::NoTenants.into());
    }
    Ok(quotas)
}

impl TenantQuota {
    fn at(&self, level: Level) -> Quota {
        let (guaranteed, most) = match level {
            Level::G1 => (self.g1_guaranteed, self.g1_limit),
            Level::G2 => (self.g2_guaranteed, self.g2_limit),
            Level::G3 => (self.g3_guaranteed, self.g3_limit),
            Level::G3_5 => (self.g3_5_guaranteed, self.g3_5_limit),
            Level::G4 => (self.g4_guaranteed, self.g4_limit),
            Level::Peer => (ByteSize(0), None),
        };
        Quota { guaranteed: guaranteed.0, maximum: most.map(|most| most.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITIES: Capacities = Capacities { g1: 1000, g2: 0, g3: 3000, g3_5: 0, g4: 500 };

    fn quota(tenant: &str, g1: u64, g1_limit: Option<u64>) -> TenantQuota {
        TenantQuota { g1_guaranteed: ByteSize(g1), g1_limit: g1_limit.map(ByteSize), ..TenantQuota::of(tenant) }
    }

    fn of(quotas: &[TenantQuota]) -> Result<Quotas, Error> {
        shares(quotas, CAPACITIES, Some(|tenant: &str| Domain::derived(b"secret", tenant)))
    }

    #[test]
    fn each_tenant_gets_its_quota_in_its_own_domain() {
        let ann = Domain::derived(b"secret", "ann").id();
        let levels = [Level::G2, Level::G3, Level::G3_5, Level::G4];
        let wanted = Quotas::default().with_quota(ann, Level::G1, Quota { guaranteed: 600, maximum: Some(700) });
        let wanted = levels.into_iter().fold(wanted, |shares, level| shares.with_quota(ann, level, Quota::default()));
        assert_eq!(of(&[quota("ann", 600, Some(700))]), Ok(wanted));
        assert_eq!(of(&[]), Ok(Quotas::default()));
    }

    #[test]
    fn impossible_quotas_are_refused_with_the_reason() {
        let cases = [
            (vec![quota("ann", 600, None), quota("bob", 500, None)], "1.1 KiB of g1 are guaranteed"),
            (vec![quota("ann", 600, Some(500))], "`ann` has 600 B of g1 guaranteed, which is above its limit of 500 B"),
            (vec![quota("ann", 0, None), quota("ann", 1, None)], "tenant `ann` appears twice"),
            (vec![TenantQuota { g2_guaranteed: ByteSize(1), ..TenantQuota::of("ann") }], "at most 0 B can be"),
            (vec![TenantQuota { g3_guaranteed: ByteSize(3001), ..TenantQuota::of("ann") }], "--set tiers.g3="),
            (vec![TenantQuota { g4_guaranteed: ByteSize(501), ..TenantQuota::of("ann") }], "--set tiers.g4.capacity="),
            (vec![TenantQuota { weight: 0.0, ..TenantQuota::of("ann") }], "a weight of 0"),
        ];
        for (quotas, part) in cases {
            let error = of(&quotas).unwrap_err().to_string();
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        let no_tenants = shares(&[quota("ann", 1, None)], CAPACITIES, None::<fn(&str) -> Domain>);
        assert_eq!(no_tenants, Err(Error::NoTenants));
    }
}
