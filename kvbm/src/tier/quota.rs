//! Quotas of cache domains: guaranteed and maximum bytes of each tier, and weights of their transfers. Pure.
//!
//! **Victims when a tier is full**: the domain that exceeds its guarantee most, of those that have evictable blocks.
//! Blocks within a guarantee are evicted only if no domain exceeds its own; a domain that floods the tier evicts its
//! own blocks, or those without a guarantee. A maximum applies even if there is free space: a domain above it evicts
//! its own blocks at once. Blocks in use by running requests count, and are never evicted.
//!
//! **Order of transfers** between a tier and memory: domains take turns, by their weights (`drr`).
//!
//! Domains without an entry form one group, with no guarantee, no maximum and a weight of 1.

use super::drr;
use crate::block::{DomainId, Level};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Quotas and weights by domain. By default there are none, and all domains form one group.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Quotas(BTreeMap<DomainId, DomainQuotas>);

#[derive(Clone, PartialEq, Eq, Debug)]
struct DomainQuotas {
    by_tier: BTreeMap<Level, Quota>,
    /// Weight in hundredths.
    weight: u32,
}

impl Default for DomainQuotas {
    fn default() -> Self {
        Self { by_tier: BTreeMap::new(), weight: drr::DEFAULT_WEIGHT }
    }
}

/// Bytes of one tier for one domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quota {
    /// Bytes that are not evicted for other domains. Default 0.
    pub guaranteed: u64,
    /// Maximum number of bytes. Default: the capacity of the tier.
    pub maximum: Option<u64>,
}

impl Quotas {
    /// Sets the quota of a domain in a tier.
    #[must_use]
    pub fn with_quota(mut self, domain: DomainId, level: Level, quota: Quota) -> Self {
        self.0.entry(domain).or_default().by_tier.insert(level, quota);
        self
    }

    /// Sets a domain's weight in transfers between memory and the tiers below it. The default is 1.
    #[must_use]
    pub fn with_weight(mut self, domain: DomainId, weight: f64) -> Self {
        self.0.entry(domain).or_default().weight =
            (weight * f64::from(drr::DEFAULT_WEIGHT)).round().clamp(1.0, 1e9) as u32;
        self
    }

    /// The quotas of a tier by domain.
    pub fn quotas(&self, level: Level) -> BTreeMap<DomainId, Quota> {
        let at = |share: &DomainQuotas| share.by_tier.get(&level).copied().filter(|quota| *quota != Quota::default());
        self.0.iter().filter_map(|(domain, share)| Some((*domain, at(share)?))).collect()
    }

    /// The weight of a domain in hundredths.
    pub(crate) fn weight(&self, domain: DomainId) -> u32 {
        self.0.get(&domain).map_or(drr::DEFAULT_WEIGHT, |share| share.weight)
    }

    /// The quotas of a tier with blocks of `unit` bytes.
    pub(crate) fn for_tier(&self, level: Level, unit: u64) -> TierQuotas {
        let quota = |share: &DomainQuotas| share.by_tier.get(&level).copied().unwrap_or_default();
        let named = |(_, share): &(&DomainId, &DomainQuotas)| {
            quota(share) != Quota::default() || share.weight != drr::DEFAULT_WEIGHT
        };
        let named: Vec<(&DomainId, &DomainQuotas)> = self.0.iter().filter(named).collect();
        let bounds = |share: &DomainQuotas| {
            let quota = quota(share);
            let blocks = |bytes: u64| (bytes / unit.max(1)) as usize;
            Bounds { guaranteed: blocks(quota.guaranteed), maximum: quota.maximum.map_or(usize::MAX, blocks) }
        };
        let domains = named.iter().zip(1..).map(|((domain, _), group)| (**domain, group)).collect();
        let weights = std::iter::once(drr::DEFAULT_WEIGHT).chain(named.iter().map(|(_, share)| share.weight)).collect();
        let bounds = named.iter().map(|(_, share)| bounds(share));
        TierQuotas { domains, bounds: std::iter::once(Bounds::default()).chain(bounds).collect(), weights }
    }
}

/// The quotas of one tier by group. Each domain with a quota or a weight is a group; group 0 is all others.
#[derive(Clone, Debug)]
pub(crate) struct TierQuotas {
    domains: BTreeMap<DomainId, u16>,
    /// Quotas by group.
    pub(crate) bounds: Vec<Bounds>,
    /// Weights by group, in hundredths.
    pub(crate) weights: Vec<u32>,
}

/// Quota of a group, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    pub(crate) guaranteed: usize,
    pub(crate) maximum: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { guaranteed: 0, maximum: usize::MAX }
    }
}

impl Default for TierQuotas {
    fn default() -> Self {
        Self { domains: BTreeMap::new(), bounds: vec![Bounds::default()], weights: vec![drr::DEFAULT_WEIGHT] }
    }
}

impl TierQuotas {
    /// The group of a domain.
    pub(crate) fn group(&self, domain: DomainId) -> u16 {
        self.domains.get(&domain).copied().unwrap_or(0)
    }

    /// The quotas of a part of the tier: the fraction `some / all`.
    pub(crate) fn scaled(&self, some: u64, all: u64) -> Self {
        let part = |whole: usize| (whole as u128 * u128::from(some) / u128::from(all.max(1))) as usize;
        let bounds = self.bounds.iter().map(|Bounds { guaranteed, maximum }| Bounds {
            guaranteed: part(*guaranteed),
            maximum: if *maximum == usize::MAX { usize::MAX } else { part(*maximum) },
        });
        Self { bounds: bounds.collect(), ..self.clone() }
    }
}

/// The group that evicts a block next. For each group: its quota, its number of blocks, and whether any is evictable.
pub(crate) fn victim_group(groups: impl Iterator<Item = (Bounds, usize, bool)>) -> Option<usize> {
    let excess = |(group, (bounds, has, _)): (usize, (Bounds, usize, bool))| {
        (has.cast_signed().saturating_sub_unsigned(bounds.guaranteed), std::cmp::Reverse(group))
    };
    groups.enumerate().filter(|(_, (.., evictable))| *evictable).map(excess).max().map(|(_, group)| group.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn victim(groups: &[(usize, usize, bool)]) -> Option<usize> {
        let usage = |&(guaranteed, has, evictable): &_| (Bounds { guaranteed, ..Bounds::default() }, has, evictable);
        victim_group(groups.iter().map(usage))
    }

    #[test]
    fn victim_is_the_group_furthest_over_its_guarantee() {
        assert_eq!(victim(&[(0, 5, true), (10, 12, true), (10, 18, true)]), Some(2));
        assert_eq!(victim(&[(0, 1, true), (10, 10, true)]), Some(0), "within a guarantee nothing is taken");
    }

    #[test]
    fn within_guarantees_the_fullest_evictable_group_is_the_victim() {
        assert_eq!(victim(&[(0, 5, false), (10, 9, true), (10, 3, true)]), Some(1));
        assert_eq!(victim(&[(0, 5, false)]), None);
    }

    #[test]
    fn quotas_apply_per_tier_and_domain() {
        let domain = DomainId::from_bytes([7; 16]);
        let quotas = Quotas::default().with_quota(domain, Level::G2, Quota { guaranteed: 1_000, maximum: Some(4_100) });
        let host = quotas.for_tier(Level::G2, 100);
        assert_eq!(host.bounds[usize::from(host.group(domain))], Bounds { guaranteed: 10, maximum: 41 });
        assert_eq!(host.group(DomainId::SHARED), 0);
        assert_eq!(quotas.for_tier(Level::G1, 100).bounds, [Bounds::default()], "no quota in this tier");
        assert_eq!(host.scaled(1, 4).bounds[1], Bounds { guaranteed: 2, maximum: 10 });
        let weighted = quotas.with_weight(domain, 2.5).for_tier(Level::G3, 1);
        assert_eq!((weighted.group(domain), weighted.weights), (1, vec![100, 250]));
    }
}
