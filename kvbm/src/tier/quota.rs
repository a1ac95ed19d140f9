//! What each domain is promised of a tier, and what it may take at most. Pure.
//!
//! **Who pays when there is no room**: the domain that is furthest over what it is guaranteed, of those that have
//! something to give up. So what is within a guarantee goes only when nobody is over theirs; one tenant's flood displaces
//! what that tenant itself has, or what nobody was promised. A maximum binds also while there is room: a domain above its
//! own gives up its own blocks at once. What running requests hold counts, and is never taken from them.
//!
//! **Who moves blocks first** between a tier and memory: domains in turn, by their weights (`drr`).
//!
//! Domains that nobody named share one place, with no guarantee, no maximum and a weight of one.

use super::drr;
use crate::block::{DomainId, Level};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What domains are promised. The default promises nothing: whoever comes shares everything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shares(BTreeMap<DomainId, Share>);

#[derive(Clone, PartialEq, Eq, Debug)]
struct Share {
    quotas: BTreeMap<Level, Quota>,
    /// In hundredths.
    weight: u32,
}

impl Default for Share {
    fn default() -> Self {
        Self { quotas: BTreeMap::new(), weight: drr::ONE }
    }
}

/// Bytes of one tier for one domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quota {
    /// Not given up for others. Default none.
    pub guaranteed: u64,
    /// Never more than these. Default: all that there is.
    pub maximum: Option<u64>,
}

impl Shares {
    /// Promises a domain some of a tier.
    #[must_use]
    pub fn promise(mut self, domain: DomainId, level: Level, quota: Quota) -> Self {
        self.0.entry(domain).or_default().quotas.insert(level, quota);
        self
    }

    /// Gives a domain so much of what tiers below memory can move, beside others of weight 1.
    #[must_use]
    pub fn weigh(mut self, domain: DomainId, weight: f64) -> Self {
        self.0.entry(domain).or_default().weight = (weight * f64::from(drr::ONE)).round().clamp(1.0, 1e9) as u32;
        self
    }

    /// What is promised of a tier, by domain.
    pub fn quotas(&self, level: Level) -> BTreeMap<DomainId, Quota> {
        let at = |share: &Share| share.quotas.get(&level).copied().filter(|quota| *quota != Quota::default());
        self.0.iter().filter_map(|(domain, share)| Some((*domain, at(share)?))).collect()
    }

    /// What a domain weighs, in hundredths.
    pub(crate) fn weight(&self, domain: DomainId) -> u32 {
        self.0.get(&domain).map_or(drr::ONE, |share| share.weight)
    }

    /// What it means for a tier whose blocks take `unit` bytes.
    pub(crate) fn at(&self, level: Level, unit: u64) -> Division {
        let quota = |share: &Share| share.quotas.get(&level).copied().unwrap_or_default();
        let named = |(_, share): &(&DomainId, &Share)| quota(share) != Quota::default() || share.weight != drr::ONE;
        let named: Vec<(&DomainId, &Share)> = self.0.iter().filter(named).collect();
        let bounds = |share: &Share| {
            let quota = quota(share);
            let blocks = |bytes: u64| (bytes / unit.max(1)) as usize;
            Bounds { guaranteed: blocks(quota.guaranteed), maximum: quota.maximum.map_or(usize::MAX, blocks) }
        };
        let domains = named.iter().zip(1..).map(|((domain, _), group)| (**domain, group)).collect();
        let weights = std::iter::once(drr::ONE).chain(named.iter().map(|(_, share)| share.weight)).collect();
        let bounds = named.iter().map(|(_, share)| bounds(share));
        Division { domains, bounds: std::iter::once(Bounds::default()).chain(bounds).collect(), weights }
    }
}

/// A tier's domains, numbered; 0 is everybody who was not named.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    domains: BTreeMap<DomainId, u16>,
    pub(crate) bounds: Vec<Bounds>,
    /// In hundredths.
    pub(crate) weights: Vec<u32>,
}

/// What one of them is promised, in blocks.
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

impl Default for Division {
    fn default() -> Self {
        Self { domains: BTreeMap::new(), bounds: vec![Bounds::default()], weights: vec![drr::ONE] }
    }
}

impl Division {
    /// Where a domain's blocks are counted.
    pub(crate) fn group(&self, domain: DomainId) -> u16 {
        self.domains.get(&domain).copied().unwrap_or(0)
    }

    /// What it means for a part of the tier: so many of `all`.
    pub(crate) fn part(&self, some: u64, all: u64) -> Self {
        let part = |whole: usize| (whole as u128 * u128::from(some) / u128::from(all.max(1))) as usize;
        let bounds = self.bounds.iter().map(|Bounds { guaranteed, maximum }| Bounds {
            guaranteed: part(*guaranteed),
            maximum: if *maximum == usize::MAX { usize::MAX } else { part(*maximum) },
        });
        Self { bounds: bounds.collect(), ..self.clone() }
    }
}

/// Which group gives something up, given what each has, and whether it has something to give.
pub(crate) fn payer(groups: impl Iterator<Item = (Bounds, usize, bool)>) -> Option<usize> {
    let over = |(group, (bounds, has, _)): (usize, (Bounds, usize, bool))| {
        (has.cast_signed().saturating_sub_unsigned(bounds.guaranteed), std::cmp::Reverse(group))
    };
    groups.enumerate().filter(|(_, (.., gives))| *gives).map(over).max().map(|(_, group)| group.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pays(groups: &[(usize, usize, bool)]) -> Option<usize> {
        payer(groups.iter().map(|&(guaranteed, has, gives)| (Bounds { guaranteed, ..Bounds::default() }, has, gives)))
    }

    #[test]
    fn the_one_furthest_over_its_guarantee_pays() {
        assert_eq!(pays(&[(0, 5, true), (10, 12, true), (10, 18, true)]), Some(2));
        assert_eq!(pays(&[(0, 1, true), (10, 10, true)]), Some(0), "within a guarantee nothing is taken");
    }

    #[test]
    fn within_guarantees_the_one_with_least_left_to_be_promised_pays_when_all_else_is_held() {
        assert_eq!(pays(&[(0, 5, false), (10, 9, true), (10, 3, true)]), Some(1));
        assert_eq!(pays(&[(0, 5, false)]), None);
    }

    #[test]
    fn promises_are_kept_apart_by_tier_and_domain() {
        let domain = DomainId::from_bytes([7; 16]);
        let shares = Shares::default().promise(domain, Level::G2, Quota { guaranteed: 1_000, maximum: Some(4_100) });
        let host = shares.at(Level::G2, 100);
        assert_eq!(host.bounds[usize::from(host.group(domain))], Bounds { guaranteed: 10, maximum: 41 });
        assert_eq!(host.group(DomainId::SHARED), 0);
        assert_eq!(shares.at(Level::G1, 100).bounds, [Bounds::default()], "nothing was promised there");
        assert_eq!(host.part(1, 4).bounds[1], Bounds { guaranteed: 2, maximum: 10 });
        let weighed = shares.weigh(domain, 2.5).at(Level::G3, 1);
        assert_eq!((weighed.group(domain), weighed.weights), (1, vec![100, 250]));
    }
}
