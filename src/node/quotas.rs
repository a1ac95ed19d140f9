//! What tenants are promised of each worker's memory and of the tiers that all share: names and sizes in, cache domains and
//! bytes out. Pure, and what cannot be kept is an error before anything is loaded.

use super::sizes::Sizes;
use crate::config::{ByteSize, Config, TenantQuota};
use kvbm::{Domain, DomainId, Level, Quota, Shares};
use std::collections::{BTreeMap, HashSet};

/// A promise that cannot be kept.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub(super) enum Error {
    /// All requests are nobody's.
    #[error("tiers.quotas: requests have no tenant; set the header that carries it: --set frontend.tenant_header=…")]
    NoTenants,
    /// Which of the two holds?
    #[error("tiers.quotas: tenant `{0}` appears twice")]
    Twice(String),
    /// The guarantee is void.
    #[error(
        "tiers.quotas: tenant `{tenant}` has {promised} of {tier} guaranteed, which is above its limit of {most}",
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
        "tiers.quotas: {promised} of {tier} are guaranteed, but at most {have} can be; guarantee less, or enlarge the \
         tier: --set {key}=…",
        promised = ByteSize(*.promised).about(),
        have = ByteSize(*.have).about()
    )]
    TooMuch {
        /// Of which.
        tier: &'static str,
        /// What says how large it is.
        key: &'static str,
        /// To all together.
        promised: u64,
        /// What there is.
        have: u64,
    },
    /// It would get nothing, or everything.
    #[error("tiers.quotas: tenant `{0}` has a weight of {1}; expected a number above 0, like 2 or 0.5")]
    Weight(String, f64),
}

/// What can be promised of each tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Room {
    g1: u64,
    g2: u64,
    g3: u64,
    pod: u64,
    g4: u64,
}

impl Room {
    pub(super) fn of(config: &Config, sizes: &Sizes) -> Self {
        Self {
            g1: sizes.g1,
            g2: sizes.g2.unwrap_or(0),
            // The rest is being written, or is just being given up.
            g3: sizes.g3.unwrap_or(0) / 4 * 3,
            pod: config.tiers.g3_5.as_ref().map_or(0, |pod| pod.capacity.0),
            g4: config.tiers.g4.capacity.map_or(0, |budget| budget.0),
        }
    }
}

/// What `quotas` mean for tiers of these sizes. `domain` says whose cache a tenant's prompts belong to; `None` when
/// requests are not told apart.
pub(super) fn shares(
    quotas: &[TenantQuota],
    room: Room,
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
    let rooms = [
        (Level::G1, room.g1, "tiers.g1"),
        (Level::G2, room.g2, "tiers.g2"),
        (Level::G3, room.g3, "tiers.g3"),
        (Level::Pod, room.pod, "tiers.g3_5.capacity"),
        (Level::G4, room.g4, "tiers.g4.capacity"),
    ];
    for (level, have, key) in rooms {
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
            return Err(Error::TooMuch { tier, key, promised, have });
        }
    }
    for TenantQuota { tenant, weight, .. } in quotas {
        if !(weight.is_finite() && *weight > 0.0) {
            return Err(Error::Weight(tenant.clone(), *weight));
        }
        shares = shares.weigh(domain(tenant).id(), *weight);
    }
    Ok(shares)
}

/// What is promised of a tier that a collector looks after.
pub(super) fn stored(config: &Config, level: Level) -> anyhow::Result<BTreeMap<DomainId, Quota>> {
    let domains = frontend::Domains::open(&config.frontend)?;
    let quotas = config.tiers.quotas.iter().map(|quota| (domains.of(&quota.tenant).id(), quota.at(level)));
    let quotas: BTreeMap<_, _> = quotas.filter(|(_, quota)| *quota != Quota::default()).collect();
    if !quotas.is_empty() && config.frontend.tenant_header.is_none() {
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
            Level::Pod => (self.g3_5_guaranteed, self.g3_5_limit),
            Level::G4 => (self.g4_guaranteed, self.g4_limit),
            Level::Peer => (ByteSize(0), None),
        };
        Quota { guaranteed: guaranteed.0, maximum: most.map(|most| most.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { g1: 1000, g2: 0, g3: 3000, pod: 0, g4: 500 };

    fn quota(tenant: &str, g1: u64, g1_limit: Option<u64>) -> TenantQuota {
        TenantQuota { g1_guaranteed: ByteSize(g1), g1_limit: g1_limit.map(ByteSize), ..TenantQuota::of(tenant) }
    }

    fn of(quotas: &[TenantQuota]) -> Result<Shares, Error> {
        shares(quotas, ROOM, Some(|tenant: &str| Domain::derived(b"secret", tenant)))
    }

    #[test]
    fn each_tenant_is_promised_what_its_quota_says_in_its_own_domain() {
        let ann = Domain::derived(b"secret", "ann").id();
        let levels = [Level::G2, Level::G3, Level::Pod, Level::G4];
        let wanted = Shares::default().promise(ann, Level::G1, Quota { guaranteed: 600, maximum: Some(700) });
        let wanted = levels.into_iter().fold(wanted, |shares, level| shares.promise(ann, level, Quota::default()));
        assert_eq!(of(&[quota("ann", 600, Some(700))]), Ok(wanted));
        assert_eq!(of(&[]), Ok(Shares::default()));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_the_reason() {
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
        let nobody = shares(&[quota("ann", 1, None)], ROOM, None::<fn(&str) -> Domain>);
        assert_eq!(nobody, Err(Error::NoTenants));
    }
}
