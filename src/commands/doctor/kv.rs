//! Checks of the KV events of one server: where it publishes them, whether the sockets answer, the block size; then
//! the completions, and what they show.

use super::Probing;
use super::findings::Findings;
use super::judge;
use super::probe::{self, Plan};
use super::server::{Kind, Server};
use crate::commands::output::count;
use crate::config::{CacheSalt, KvEvents};
use crate::node::{START_SGLANG, START_VLLM};
use futures::future::join_all;
use std::num::NonZero;
use upstream::kv_events::{ReachError, Source, reach, reach_replay};
use upstream::{ApiDescription, DEFAULT_BLOCK_SIZE, KvSources, Program, SaltedEndpoints};

/// Checks the KV events of a server that answers.
pub(super) async fn examine(server: &Server<'_>, at: usize, probing: Probing, findings: &mut Findings) {
    let listed = KvSources::ask(&server.client, server.api_key.as_ref(), &server.host, program(server)).await;
    let listed = listed.unwrap_or_default();
    let named = server.upstream.url.host().unwrap_or_default();
    let followed = server.upstream.kv_events.sources(listed.sources.clone(), named, &server.host);
    announced(server, at, &listed.sources, &followed, findings);
    let ranks = server.upstream.kv_events.ranks(listed.ranks).len();
    let mut sources = reachable(followed.clone(), at, findings).await;
    // Requests can name the rank that serves them: the probe is for the first one whose publisher answers.
    let rank = followed.iter().take(ranks).position(|source| sources.contains(source));
    if rank.is_some() {
        sources.truncate(1);
    }
    let page = if program(server) == Program::Sglang { "/server_info" } else { "/metrics" };
    let used = block_size(server.upstream.block_size, listed.block_size, page, at, findings);
    let salted = salts(server, at, findings).await;
    if probing == Probing::Skip {
        return;
    }
    let largest = used.max(listed.block_size.unwrap_or(used));
    let plan = Plan {
        server,
        rank: rank.map(|rank| rank as u32),
        sources: &sources,
        block_size: used.get(),
        largest_block: largest.get(),
        salted,
    };
    let seen = probe::send(&plan).await;
    judge::judge(&seen, server.kind, at, findings);
}

/// Which program the server is, found out as `serve` does.
fn program(server: &Server<'_>) -> Program {
    Program::of_owner(server.models.iter().find_map(|model| model.owned_by.as_deref()))
}

/// Whether there are publishers to follow.
fn announced(server: &Server<'_>, at: usize, listed: &[Source], followed: &[Source], findings: &mut Findings) {
    let names = |sources: &[Source]| {
        let names: Vec<String> = sources.iter().map(|source| source.live.to_string()).collect();
        names.join(", ")
    };
    match (&server.upstream.kv_events, listed, followed) {
        (KvEvents::Off, [], _) => {
            findings.ok("kv_events", "off in the configuration: prompts are routed by their text");
        }
        (KvEvents::Off, listed, _) => {
            let detail = format!("off in the configuration, but the server publishes them at {}", names(listed));
            let fix = format!("set upstreams.{at}.kv_events = \"auto\" for routing by what is really cached");
            findings.warning("kv_events", detail, fix);
        }
        (KvEvents::Auto, _, []) => {
            let page = if program(server) == Program::Sglang { "/server_info" } else { "/kv_event_sources" };
            let detail = format!("the server names no publisher ({page}): its cache is estimated");
            let off = format!("or set upstreams.{at}.kv_events = \"off\"");
            let fix = match server.kind {
                Kind::Vllm => format!("{START_VLLM}; {off}"),
                Kind::Sglang => format!("{START_SGLANG}; {off}"),
                Kind::Other => format!(
                    "if the server publishes KV events, set upstreams.{at}.kv_events to the address, like \
                     \"tcp://*:5557\", else to \"off\""
                ),
            };
            findings.wrong(server.kind != Kind::Other, "kv_events", detail, fix);
        }
        (KvEvents::Auto, _, followed) => findings.ok("kv_events", format!("the server names {}", names(followed))),
        (KvEvents::At(_), listed, followed) if listed.len() > followed.len() => {
            let detail = format!(
                "{} in the configuration, but the server has {} data-parallel ranks with a publisher each",
                names(followed),
                listed.len()
            );
            let fix = format!(
                "list the publishers of all ranks in upstreams.{at}.kv_events, or set it to \"auto\" where the \
                 addresses that the server names are reached from here: {}",
                names(listed)
            );
            findings.warning("kv_events", detail, fix);
        }
        (KvEvents::At(_), _, followed) => {
            findings.ok("kv_events", format!("{} in the configuration", names(followed)));
        }
    }
}

/// Checks the sockets of all publishers, and returns the publishers that answer.
async fn reachable(sources: Vec<Source>, at: usize, findings: &mut Findings) -> Vec<Source> {
    let tried = join_all(sources.into_iter().map(async |source| {
        let live = reach(&source).await;
        let replay = match &source.replay {
            Some(endpoint) => Some((endpoint.clone(), reach_replay(endpoint).await)),
            None => None,
        };
        (source, live, replay)
    }));
    let mut reachable = Vec::new();
    for (source, live, replay) in tried.await {
        match live {
            Ok(()) => findings.ok("kv_socket", format!("{} answers as a ZMQ publisher", source.live)),
            Err(error) => {
                let fix = socket_fix(&error, &format!("upstreams.{at}.kv_events"), "endpoint");
                findings.problem("kv_socket", format!("{}: {error}", source.live), fix);
                continue;
            }
        }
        match replay {
            None => {
                let fix = format!(
                    "add \"replay_endpoint\":\"tcp://*:5558\" to --kv-events-config of the server, and name it in \
                     upstreams.{at}.kv_events_replay where kv_events is an address"
                );
                findings.warning("kv_replay", "no replay socket: lost events make the cache unknown", fix);
            }
            Some((endpoint, Ok(()))) => findings.ok("kv_replay", format!("{endpoint} answers")),
            Some((endpoint, Err(error))) => {
                let fix = socket_fix(&error, &format!("upstreams.{at}.kv_events_replay"), "replay_endpoint");
                findings.problem("kv_replay", format!("{endpoint}: {error}"), fix);
            }
        }
        reachable.push(source);
    }
    reachable
}

fn socket_fix(error: &ReachError, key: &str, flag: &str) -> String {
    match error {
        ReachError::Silent => format!("allow this port in the firewall between, or correct the address in {key}"),
        ReachError::Connection(_) => format!(
            "let {flag} in --kv-events-config be an address that this machine reaches, like tcp://*:5557, or set {key} \
             to the one by which it does"
        ),
        ReachError::Protocol(_) => format!("set {key} to the port of {flag} in --kv-events-config of the server"),
    }
}

/// Whether requests of tenants get a salt. A server without the field is not used for them.
async fn salts(server: &Server<'_>, at: usize, findings: &mut Findings) -> bool {
    if !server.gateway.tenants {
        return false;
    }
    match server.upstream.cache_salt {
        CacheSalt::On => true,
        CacheSalt::Off => {
            findings.ok("cache_salt", "off in the configuration: tenants share the cache of this server");
            false
        }
        CacheSalt::Auto => match ApiDescription::ask(&server.client, server.api_key.as_ref()).await {
            Some(description) if description.salted != SaltedEndpoints::None => true,
            Some(_) => {
                let fix = format!(
                    "set upstreams.{at}.cache_salt: \"on\" if the server knows the field all the same, \"off\" if \
                     tenants may share its cache; or serve without tenants (frontend.tenant_header, \
                     frontend.api_keys_file)"
                );
                let detail =
                    "no field cache_salt in /openapi.json: the server gets no requests, because they have tenants";
                findings.problem("cache_salt", detail, fix);
                false
            }
            None => {
                findings.problem("cache_salt", "/openapi.json does not answer", "look at the log of the server");
                false
            }
        },
    }
}

/// The size of a block in words. A block of SGLang has one token by default.
fn tokens(size: NonZero<u32>) -> String {
    count(size.get().into(), "token")
}

/// The block size that the router uses. What is configured is stronger than what the server says on its `page`.
fn block_size(
    configured: Option<NonZero<u32>>,
    listed: Option<NonZero<u32>>,
    page: &str,
    at: usize,
    findings: &mut Findings,
) -> NonZero<u32> {
    match (configured, listed) {
        (Some(configured), Some(listed)) if configured != listed => {
            let detail = format!("{configured} in the configuration, {listed} in the server's {page}");
            findings.problem("block_size", detail, format!("remove upstreams.{at}.block_size, or set it to {listed}"));
        }
        (Some(size), _) => findings.ok("block_size", format!("{} in the configuration", tokens(size))),
        (None, Some(size)) => findings.ok("block_size", format!("{} in the server's {page}", tokens(size))),
        (None, None) => findings.ok("block_size", format!("the server does not say; {DEFAULT_BLOCK_SIZE} is used")),
    }
    configured.or(listed).unwrap_or(DEFAULT_BLOCK_SIZE)
}
