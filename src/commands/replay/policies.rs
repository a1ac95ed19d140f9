//! The policies that a replay compares, each with its settings of the router.

use super::Replay;
use crate::config::{self, Config, Origins, Sources};
use anyhow::bail;
use router::replay::PolicyUnderTest;
use router::{Policy, Settings};

/// Whether copies ahead of demand are simulated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Prefetch {
    On,
    Off,
    /// Each policy with and without them.
    Both,
}

impl Prefetch {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Both => "both",
        }
    }

    /// The policies with or without copies ahead of demand, or each of our own with and without, under its name and
    /// ` (no copies)`. `settings`: of the router, with this choice.
    pub(super) fn apply(self, settings: &Settings, policies: Vec<PolicyUnderTest>) -> Vec<PolicyUnderTest> {
        let variants = |policy: PolicyUnderTest| {
            let (name, of_policy) = match &policy {
                PolicyUnderTest::Policy(chosen) => (chosen.name().to_owned(), settings.clone().choosing(chosen)),
                PolicyUnderTest::Settings(name, of_policy) => (name.clone(), (**of_policy).clone()),
                // Other routers order no copies.
                PolicyUnderTest::Peer(_) => return vec![policy],
            };
            let of =
                |name, prefetch| PolicyUnderTest::Settings(name, Box::new(Settings { prefetch, ..of_policy.clone() }));
            match self {
                Self::On | Self::Off => vec![of(name, self == Self::On)],
                Self::Both => {
                    let without = format!("{name} (no copies)");
                    vec![of(name, true), of(without, false)]
                }
            }
        };
        policies.into_iter().flat_map(variants).collect()
    }
}

/// The router settings of the given configuration, and the policies to compare: those of `--policy`, else the one that
/// the configuration sets, else all.
pub(super) fn configured_policies(args: &Replay) -> anyhow::Result<(Settings, Vec<PolicyUnderTest>)> {
    let (config, origins) = load(args)?;
    let settings = config.router;
    let chosen = matches!(settings.policy, Policy::Composed(_)) || origins.of("router.policy") != "default";
    let compared = if args.policy.is_empty() && chosen {
        vec![PolicyUnderTest::Settings(settings.policy.name().to_owned(), Box::new(settings.clone()))]
    } else {
        policies_to_compare(args, Some(&settings))?
    };
    Ok((settings, compared))
}

/// The policies of `--policy`, without repetitions; all policies if the flag is absent. `configured` holds the settings
/// of the given configuration.
pub(super) fn policies_to_compare(
    args: &Replay,
    configured: Option<&Settings>,
) -> anyhow::Result<Vec<PolicyUnderTest>> {
    let known = PolicyUnderTest::all();
    if args.policy.is_empty() {
        return Ok(known);
    }
    let names = known.iter().map(PolicyUnderTest::name).collect::<Vec<_>>().join(", ");
    let of = |name: &String| match (known.iter().find(|each| each.name() == name), configured) {
        (Some(policy), _) => Ok(policy.clone()),
        (None, Some(Settings { policy: composed @ Policy::Composed(_), .. })) if name == "composed" => {
            Ok(PolicyUnderTest::Policy(composed.clone()))
        }
        (None, _) if name == "composed" => {
            let is = configured.map_or("kv", |settings| settings.policy.name());
            bail!("--policy composed: router.policy is {is}, not a table of filter, score and pick")
        }
        (None, _) => bail!("--policy {name}: expected one of {names}, composed"),
    };
    let first = |(at, name): &(usize, &String)| !args.policy[..*at].contains(name);
    args.policy.iter().enumerate().filter(first).map(|(_, name)| of(name)).collect()
}

/// The configuration that `serve` would have.
fn load(args: &Replay) -> Result<(Config, Origins), config::Errors> {
    Config::load(&Sources::of_process(args.config.clone(), args.set.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use router::replay::Peer;

    #[test]
    fn prefetch_both_adds_each_of_our_policies_without_copies() {
        let policies = [PolicyUnderTest::Policy(Policy::Kv), PolicyUnderTest::Peer(Peer::ALL[0])];
        let names_and_prefetch = |prefetch: Prefetch| -> Vec<(String, Option<bool>)> {
            let each = |policy: &PolicyUnderTest| {
                let prefetch = match policy {
                    PolicyUnderTest::Settings(_, settings) => Some(settings.prefetch),
                    _ => None,
                };
                (policy.name().to_owned(), prefetch)
            };
            prefetch.apply(&Settings::default(), policies.to_vec()).iter().map(each).collect()
        };
        let peer = (Peer::ALL[0].name().to_owned(), None);
        let kv = |copies| ("kv".to_owned(), Some(copies));
        assert_eq!(names_and_prefetch(Prefetch::On), [kv(true), peer.clone()]);
        assert_eq!(names_and_prefetch(Prefetch::Off), [kv(false), peer.clone()]);
        let both = [kv(true), ("kv (no copies)".to_owned(), Some(false)), peer];
        assert_eq!(names_and_prefetch(Prefetch::Both), both);
    }
}
