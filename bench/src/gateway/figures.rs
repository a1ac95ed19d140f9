//! The figures of all gateways, and their goals.

use super::options::Options;
use super::peers::Gateway;
use crate::figure::{Figure, Goal};
use std::collections::BTreeMap;

/// A figure of one gateway, in the order of the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// CPU time per request of [`Scenario::Plain`](super::scenario::Scenario::Plain).
    CpuRequest,
    /// CPU time per chunk of streams without a pace.
    CpuChunk,
    /// CPU time per chunk of streams of 50 tokens per second.
    CpuChunkPaced,
    /// CPU time per request with a prompt of 16 KiB.
    CpuLong,
    /// Median of the time that the gateway adds to the first token.
    AddedFirst50,
    /// 99th percentile of the same.
    AddedFirst99,
    /// Memory while many streams are open.
    MemoryStreams,
    /// Memory after many distinct prompts.
    MemoryPrompts,
}

impl What {
    /// All figures.
    pub const ALL: [Self; 8] = [
        Self::CpuRequest,
        Self::CpuChunk,
        Self::CpuChunkPaced,
        Self::CpuLong,
        Self::AddedFirst50,
        Self::AddedFirst99,
        Self::MemoryStreams,
        Self::MemoryPrompts,
    ];

    fn name(self, options: &Options) -> String {
        match self {
            Self::CpuRequest => "CPU per request, 32 clients".to_owned(),
            Self::CpuChunk => "CPU per chunk, 32 streams unpaced".to_owned(),
            Self::CpuChunkPaced => "CPU per chunk, 256 streams at 50/s".to_owned(),
            Self::CpuLong => "CPU per request, prompts of 16 KiB".to_owned(),
            Self::AddedFirst50 => "added first token p50, one at a time".to_owned(),
            Self::AddedFirst99 => "added first token p99, one at a time".to_owned(),
            Self::MemoryStreams => format!("memory at {} open streams", options.streams),
            Self::MemoryPrompts => format!("memory after {} distinct prompts", options.prompts),
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::MemoryStreams | Self::MemoryPrompts => "MiB",
            _ => "µs",
        }
    }

    /// The goal of this program, where it is a number.
    fn goal(self, gateway: Gateway, options: &Options) -> Goal {
        match (gateway, self) {
            (Gateway::Blockyard, Self::AddedFirst50) => Goal::AtMost(100.0),
            (Gateway::Blockyard, Self::AddedFirst99) => Goal::AtMost(200.0),
            (Gateway::Blockyard, Self::MemoryPrompts) if options.prompts == 200_000 => Goal::AtMost(80.0),
            _ => Goal::None,
        }
    }
}

/// The figures of one gateway, or why there are none.
pub type Results = BTreeMap<What, Result<f64, &'static str>>;

/// The results of a gateway that is not installed.
pub fn not_installed() -> Results {
    What::ALL.map(|what| (what, Err("not installed"))).into()
}

/// The figures of all gateways, and this program's as parts of the others'. `new_text_us`: what the tokenizer takes for
/// the new text of a long prompt.
pub fn figures(results: &BTreeMap<&'static str, Results>, options: &Options, new_text_us: Option<f64>) -> Vec<Figure> {
    let mut figures = Vec::new();
    for what in What::ALL {
        for gateway in Gateway::ALL {
            let Some(result) = results.get(gateway.name()).and_then(|results| results.get(&what)) else { continue };
            let name = format!("{}: {}", what.name(options), gateway.name());
            let goal = what.goal(gateway, options);
            figures.push(match result {
                Ok(value) => Figure::of(name, *value, what.unit(), goal),
                Err(why) => Figure::missing(name, why, goal),
            });
        }
        if matches!(what, What::CpuRequest | What::CpuChunk | What::CpuChunkPaced) {
            figures.extend(ratios(what, results, options));
        }
    }
    figures.extend(events(results, new_text_us));
    figures
}

/// This program's CPU time as a part of that of nginx, and of the best gateway that knows engines.
fn ratios(what: What, results: &BTreeMap<&'static str, Results>, options: &Options) -> [Figure; 2] {
    let of = |gateway: Gateway| results.get(gateway.name())?.get(&what)?.ok();
    let peers = [Gateway::VllmRouter, Gateway::Smg, Gateway::LiteLlm];
    let best = peers.into_iter().filter_map(of).min_by(f64::total_cmp);
    [("the best router", best, Goal::AtMost(0.5)), ("nginx", of(Gateway::Nginx), Goal::AtMost(2.0))].map(
        |(other, reference, goal)| {
            let name = format!("{}: blockyard / {other}", what.name(options));
            match (of(Gateway::Blockyard), reference) {
                (Some(own), Some(reference)) if reference > 0.0 => Figure::ratio(name, own / reference, goal),
                _ => Figure::missing(name, "not measured", goal),
            }
        },
    )
}

/// What routing by KV events adds to a request, with the tokens from an engine, and with those of a local tokenizer
/// beyond the time that it takes for the new text.
fn events(results: &BTreeMap<&'static str, Results>, new_text_us: Option<f64>) -> Vec<Figure> {
    let of = |gateway: Gateway| results.get(gateway.name())?.get(&What::CpuLong)?.ok();
    let added = |gateway| Some(of(gateway)? - of(Gateway::Blockyard)?);
    let figure = |what: &str, value: Option<f64>, goal| {
        let name = format!("CPU per request, prompts of 16 KiB: {what}");
        value.map(|value| Figure::of(name, value, "µs", goal))
    };
    let (from_engine, local) = (added(Gateway::BlockyardEvents), added(Gateway::BlockyardTokenizer));
    let beyond = local.and_then(|local| Some(local - new_text_us?));
    let of_dynamo = of(Gateway::BlockyardTokenizer).and_then(|own| Some(own / of(Gateway::Dynamo)?));
    let figures = [
        figure("added by KV events, tokens from an engine", from_engine, Goal::None),
        figure("added by KV events, local tokenizer", local, Goal::None),
        figure("tokens of 4 KiB of new text, one thread", new_text_us, Goal::None),
        figure("added by KV events, local tokenizer, beyond the tokens of the new text", beyond, Goal::AtMost(60.0)),
    ];
    let name = "CPU per request, prompts of 16 KiB: blockyard-tokenizer / dynamo";
    let of_dynamo = of_dynamo.map(|ratio| Figure::ratio(name.to_owned(), ratio, Goal::Below(1.0)));
    figures.into_iter().flatten().chain(of_dynamo).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_need_both_and_take_the_best_router() {
        let cpu = |value| Results::from([(What::CpuRequest, value)]);
        let mut results = BTreeMap::from([
            ("blockyard", cpu(Ok(30.0))),
            ("vllm-router", cpu(Ok(75.0))),
            ("smg", cpu(Ok(180.0))),
            ("nginx", cpu(Err("not installed"))),
        ]);
        let [routers, nginx] = ratios(What::CpuRequest, &results, &Options::default());
        assert_eq!((routers.met(), nginx.met()), (Some(true), None));
        assert_eq!(routers.row()[1], "0.40");
        results.remove("vllm-router");
        results.insert("nginx", cpu(Ok(10.0)));
        let [routers, nginx] = ratios(What::CpuRequest, &results, &Options::default());
        assert_eq!((routers.row()[1].as_str(), nginx.met()), ("0.17", Some(false)));
    }

    #[test]
    fn a_gateway_that_is_not_installed_has_no_number() {
        let results = BTreeMap::from([("nginx", Results::from([(What::CpuRequest, Err("not installed"))]))]);
        let rows: Vec<_> = figures(&results, &Options::default(), None).iter().map(Figure::row).collect();
        assert_eq!(rows[0][1], "not installed");
        assert!(rows.iter().all(|row| row[1].starts_with("not ")), "{rows:?}");
    }

    #[test]
    fn routing_by_kv_events_has_its_goal_beyond_the_tokens_of_the_new_text() {
        let cpu = |value| Results::from([(What::CpuLong, Ok(value))]);
        let mut results = BTreeMap::from([("blockyard", cpu(150.0)), ("blockyard-tokenizer", cpu(300.0))]);
        let met = |new_text_us| events(&results, new_text_us).iter().filter_map(Figure::met).collect::<Vec<_>>();
        assert_eq!((met(Some(100.0)), met(Some(80.0)), met(None)), (vec![true], vec![false], vec![]));
        results.insert("dynamo", cpu(6000.0));
        assert_eq!(events(&results, None).last().and_then(Figure::met), Some(true));
    }
}
