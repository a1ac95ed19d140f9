//! What each domain is promised of a tier, and what it may take at most. Pure.
//!
//! **Who pays when there is no room**: the domain that is furthest over what it is guaranteed, of those that have
//! something to give up. So what is within a guarantee goes only when nobody is over theirs; one tenant's flood displaces
//! what that tenant itself has, or what nobody was promised. A maximum binds also while there is room: a domain above its
//! own gives up its own blocks at once. What running requests hold counts, and is never taken from them.
//!
//! Domains that nobody named share one place, with no guarantee and no maximum.

use crate::{DomainId, Level};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What domains are promised. The default promises nothing: whoever comes shares everything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shares(BTreeMap<DomainId, BTreeMap<Level, Quota>>);

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
        self.0.entry(domain).or_default().insert(level, quota);
        self
    }

    /// What it means for a tier whose blocks take `unit` bytes.
    pub(crate) fn at(&self, level: Level, unit: u64) -> Division {
        let bounds = |quotas: &BTreeMap<Level, Quota>| {
            let quota = quotas.get(&level).copied().unwrap_or_default();
            let blocks = |bytes: u64| (bytes / unit.max(1)) as usize;
            Bounds { guaranteed: blocks(quota.guaranteed), maximum: quota.maximum.map_or(usize::MAX, blocks) }
        };
        let domains = self.0.keys().zip(1..).map(|(domain, group)| (*domain, group)).collect();
        let bounds = std::iter::once(Bounds::default()).chain(self.0.values().map(bounds)).collect();
        Division { domains, bounds }
    }
}

/// A tier's domains, numbered; 0 is everybody who was not named.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    domains: BTreeMap<DomainId, u16>,
    pub(crate) bounds: Vec<Bounds>,
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
        Self { domains: BTreeMap::new(), bounds: vec![Bounds::default()] }
    }
}

impl Division {
    /// Where a domain's blocks are counted.
    pub(crate) fn group(&self, domain: DomainId) -> u16 {
        self.domains.get(&domain).copied().unwrap_or(0)
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
        assert_eq!(shares.at(Level::G1, 100).bounds[1], Bounds::default());
    }
}
