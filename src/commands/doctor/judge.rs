//! What the completions and their KV events say: pure, from what was seen to checks.

use super::findings::Findings;
use super::probe::{ProbeResult, Refusal};
use super::server::Kind;
use crate::commands::output::count;
use frontend::{TokenAgreement, TokenizerComparison};
use upstream::relay::chunk::Usage;

/// The flag of vLLM that makes it report cached tokens.
const DETAILS: &str = "start vLLM with --enable-prompt-tokens-details";

/// Checks what was seen of the upstream at this position of the configuration.
pub(super) fn judge(seen: &ProbeResult, kind: Kind, at: usize, findings: &mut Findings) {
    let is_followed = seen.ranks > 0;
    tokens(seen, at, findings);
    if let Err(refusal) = &seen.first {
        refused(refusal, findings);
        return;
    }
    if is_followed {
        events(seen, kind, at, findings);
        replays(seen, at, findings);
    }
    match &seen.second {
        Some(Ok(usage)) => cached(seen, *usage, kind, findings),
        Some(Err(refusal)) => refused(refusal, findings),
        None => {}
    }
    if let Some(salted) = &seen.salted {
        salt(salted, at, findings);
    }
}

/// Without tokens a server is routed to by load, if its events are followed.
fn tokens(seen: &ProbeResult, at: usize, findings: &mut Findings) {
    match &seen.tokens {
        Ok(tokens) => findings.ok("tokenize", format!("the prompt of the probe has {} tokens", tokens.len())),
        Err(why) if seen.ranks > 0 => {
            let fix = format!(
                "KV events need the tokens of prompts: use a server with /tokenize, or set upstreams.{at}.kv_events = \
                 \"off\" for routing by text"
            );
            findings.warning("tokenize", format!("{why}: prompts are placed by load"), fix);
        }
        Err(why) => findings.ok("tokenize", format!("{why}; not needed, because no KV events are followed")),
    }
}

/// Whether a local tokenizer has the tokens of the server. Where it has others, the server is asked for each prompt.
pub(super) fn tokenizer(model: &str, comparison: &TokenizerComparison, findings: &mut Findings) {
    const CHECK: &str = "local_tokenizer";
    let kinds = match comparison {
        TokenizerComparison::Compared(kinds) => kinds,
        TokenizerComparison::Unsupported => {
            let detail = format!("{model}: the server has no /tokenize, so the tokenizer is used without a comparison");
            findings.ok(CHECK, detail);
            return;
        }
        TokenizerComparison::Failed(why) => {
            let detail = format!("{model}: {why}; the tokenizer is not used before it was compared");
            findings.problem(CHECK, detail, "look at the log of the server, or try again: it may be busy");
            return;
        }
    };
    let of = |wanted: TokenAgreement| {
        let kinds = kinds.iter().filter(|(_, agreement)| *agreement == wanted);
        kinds.map(|(kind, _)| *kind).collect::<Vec<_>>().join(", ")
    };
    let (same, not_compared) = (of(TokenAgreement::Same), of(TokenAgreement::NotCompared));
    if !same.is_empty() {
        findings.ok(CHECK, format!("{model}: the tokens of the server in prompts of {same}"));
    }
    for (kind, agreement) in kinds {
        if let TokenAgreement::Different(difference) = agreement {
            let fix = format!(
                "set tokenizers.{model:?} to the folder from which the server loads tokenizer.json and the chat \
                 template, or remove it"
            );
            let detail = format!("{model}, prompts of {kind}: {difference}, which is asked for such prompts");
            findings.problem(CHECK, detail, fix);
        }
    }
    if !not_compared.is_empty() {
        let detail =
            format!("{model}: the server refuses the prompts of {not_compared}, and is asked for their tokens");
        findings.ok(CHECK, detail);
    }
}

fn refused(refusal: &Refusal, findings: &mut Findings) {
    let fix = match refusal.status {
        Some(404 | 405) => "the server has no completions for this model: skip them with --no-probe".to_owned(),
        Some(401 | 403) => "use a key that may send completions".to_owned(),
        Some(429 | 503) | None => "the server is busy or hangs: try again, or look at its log".to_owned(),
        Some(_) => "correct what the server says, or look at its log".to_owned(),
    };
    let is_problem = !matches!(refusal.status, Some(404 | 405));
    findings.wrong(is_problem, "completion", refusal.why.clone(), fix);
}

/// Whether the replay sockets are those of the publishers.
fn replays(seen: &ProbeResult, at: usize, findings: &mut Findings) {
    for endpoint in &seen.foreign_replays {
        let detail = format!(
            "{endpoint} does not have the batch that the publisher has just sent, as if it were of another server or \
             rank: lost events are replaced by those of its cache"
        );
        let fix = format!(
            "set upstreams.{at}.kv_events_replay to the address of replay_endpoint in --kv-events-config of this \
             server, and of several ranks in the order of kv_events"
        );
        findings.warning("kv_replay", detail, fix);
    }
}

/// Whether events arrive, and are those of the prompt.
fn events(seen: &ProbeResult, kind: Kind, at: usize, findings: &mut Findings) {
    let ProbeResult { events, block_size, ranks, .. } = seen;
    if events.connected == 0 {
        findings.problem(
            "kv_arrive",
            "the publisher accepted one connection, and not the next",
            "let the firewall or proxy between keep connections open",
        );
        return;
    }
    if events.stored == 0 {
        let fix = match kind {
            Kind::Sglang => {
                "start SGLang with \"publisher\":\"zmq\" in --kv-events-config, and with prefix caching (no \
                 --disable-radix-cache), and let the address be that of this server"
            }
            Kind::Vllm | Kind::Other => {
                "start vLLM with \"enable_kv_cache_events\":true and \"publisher\":\"zmq\" in --kv-events-config, and \
                 with prefix caching (no --no-enable-prefix-caching), and let the address be that of this server"
            }
        };
        findings.problem("kv_arrive", "no event of a stored block has arrived after a new prompt", fix);
        return;
    }
    findings.ok("kv_arrive", format!("events of stored blocks after a new prompt: {}", events.stored));
    match events.block_size {
        Some(engine) if engine != *block_size => {
            let fix = format!("set upstreams.{at}.block_size = {engine}, or remove it where the server says its own");
            let detail = format!("events have {}, expected {block_size}", count(engine.into(), "token"));
            findings.problem("kv_block_size", detail, fix);
            return;
        }
        Some(engine) => {
            let detail = format!("events have {}, as expected", count(engine.into(), "token"));
            findings.ok("kv_block_size", detail);
        }
        None => {}
    }
    let Ok(tokens) = &seen.tokens else { return };
    let (full, found) = (tokens.len() / *block_size as usize, events.found.len());
    if full == 0 {
        findings.warning(
            "kv_tokens",
            format!("the context is too short for a prompt of one block of {}", count((*block_size).into(), "token")),
            "start the server with a smaller block size: no prompt can be cached",
        );
    } else if found == full {
        findings.ok("kv_tokens", format!("events have the tokens of /tokenize: {found} of {full} blocks"));
    } else {
        let fix = if *ranks > 1 {
            "let every data-parallel rank publish its events at a port of its own"
        } else {
            "let kv_events be the publisher of this server and not of another; the first model that it lists is asked"
        };
        let detail = format!("events have the tokens of /tokenize in {found} of {full} blocks of the probe's prompt");
        findings.problem("kv_tokens", detail, fix);
    }
}

/// Whether cached tokens are reported, and as the events predict.
fn cached(seen: &ProbeResult, usage: Usage, kind: Kind, findings: &mut Findings) {
    let Some(cached) = usage.cached_tokens else {
        let fix = match kind {
            Kind::Vllm => DETAILS,
            Kind::Sglang => "start SGLang with --enable-cache-report",
            Kind::Other => "nothing can be changed if the server cannot report them",
        };
        findings.warning(
            "cached_tokens",
            "the usage of a repeated prompt has no prompt_tokens_details: predicted cache hits cannot be checked",
            fix,
        );
        return;
    };
    let block_size = u64::from(seen.block_size);
    let prompt = usage.prompt_tokens.unwrap_or_default();
    // The last token is computed in any case, because its output is wanted.
    let most = prompt.saturating_sub(1) / block_size * block_size;
    let predicted = (seen.events.found.len() as u64 * block_size).min(most);
    let is_predictable = seen.ranks > 0 && seen.tokens.is_ok() && !seen.events.found.is_empty();
    let reported = format!("{cached} of {prompt} tokens of a repeated prompt");
    if is_predictable && cached == predicted {
        findings.ok("cached_tokens", format!("{reported}, as predicted"));
    } else if is_predictable && seen.ranks > 1 {
        let detail = format!("{reported}, {predicted} predicted: another data-parallel rank may have answered");
        findings.warning("cached_tokens", detail, "run `blockyard doctor` again");
    } else if is_predictable {
        let fix = "look for other requests that evict these blocks, and for a proxy that spreads requests over several \
                   servers behind one URL: name each server in `upstreams`";
        findings.problem("cached_tokens", format!("{reported}, {predicted} predicted"), fix);
    } else if cached == 0 && most > 0 {
        let fix = "start the server with prefix caching: --enable-prefix-caching of vLLM, no --disable-radix-cache of \
                   SGLang";
        findings.warning("cached_tokens", format!("{reported}: the server caches no prefixes"), fix);
    } else {
        findings.ok("cached_tokens", reported);
    }
}

/// Whether a salt keeps cache domains apart.
fn salt(salted: &Result<Usage, Refusal>, at: usize, findings: &mut Findings) {
    let fix = || {
        format!(
            "update the server of upstreams.{at} to one that knows cache_salt, or serve without tenants \
             (frontend.tenant_header, frontend.api_keys_file)"
        )
    };
    match salted {
        Err(refusal) => {
            findings.problem("cache_salt", format!("a request with cache_salt is refused: {}", refusal.why), fix());
        }
        Ok(Usage { cached_tokens: Some(1..), .. }) => findings.problem(
            "cache_salt",
            "the server ignores cache_salt: tenants share cached blocks, and can find out each other's prompts",
            fix(),
        ),
        Ok(_) => findings.ok("cache_salt", "a request with a salt finds no block of one without"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::probe::{Events, hashes};
    use super::*;
    use crate::commands::doctor::{Check, Status};

    /// A vLLM with blocks of 32 tokens that has done everything right.
    fn healthy() -> ProbeResult {
        let tokens: Vec<u32> = (100..200).collect();
        let found = hashes(&tokens, 32).into_iter().collect();
        let usage = |cached| Usage { prompt_tokens: Some(100), completion_tokens: Some(1), cached_tokens: cached };
        ProbeResult {
            block_size: 32,
            ranks: 1,
            tokens: Ok(tokens),
            events: Events { connected: 1, stored: 1, block_size: Some(32), found },
            foreign_replays: Vec::new(),
            first: Ok(usage(None)),
            second: Some(Ok(usage(Some(96)))),
            salted: Some(Ok(usage(None))),
        }
    }

    fn judged(kind: Kind, change: impl FnOnce(&mut ProbeResult)) -> Vec<Check> {
        let (mut seen, mut findings) = (healthy(), Findings::of("http://a/"));
        change(&mut seen);
        judge(&seen, kind, 0, &mut findings);
        findings.into_checks()
    }

    fn wrong(kind: Kind, change: impl FnOnce(&mut ProbeResult)) -> Vec<(&'static str, Status, String)> {
        let checks = judged(kind, change).into_iter();
        let wrong = checks.filter(|check| check.status != Status::Ok);
        wrong.map(|check| (check.check, check.status, check.fix.expect("what to change"))).collect()
    }

    /// The only check that is not ok, and that its fix has a word.
    fn only(kind: Kind, change: impl FnOnce(&mut ProbeResult), word: &str) -> (&'static str, Status) {
        let [(check, status, fix)] = &wrong(kind, change)[..] else { panic!("not one check") };
        assert!(fix.contains(word), "{fix}");
        (*check, *status)
    }

    #[test]
    fn a_healthy_server_has_no_finding() {
        let checks = judged(Kind::Vllm, |_| {});
        assert!(checks.iter().all(|check| check.status == Status::Ok && check.fix.is_none()), "{checks:?}");
        let named: Vec<_> = checks.iter().map(|check| check.check).collect();
        assert_eq!(named, ["tokenize", "kv_arrive", "kv_block_size", "kv_tokens", "cached_tokens", "cache_salt"]);
    }

    #[test]
    fn a_prompt_of_whole_blocks_is_not_cached_to_its_end() {
        let whole = |seen: &mut ProbeResult, cached| {
            let usage = Usage { prompt_tokens: Some(96), completion_tokens: Some(1), cached_tokens: Some(cached) };
            (seen.tokens, seen.second) = (Ok((100..196).collect()), Some(Ok(usage)));
        };
        assert_eq!(wrong(Kind::Vllm, |seen| whole(seen, 64)), []);
        assert_eq!(only(Kind::Vllm, |seen| whole(seen, 96), "name each server").0, "cached_tokens");
    }

    #[test]
    fn each_fault_has_its_check_and_its_fix() {
        let silent = |seen: &mut ProbeResult| seen.events = Events { connected: 1, ..Events::default() };
        let arrive = wrong(Kind::Vllm, silent);
        assert_eq!((arrive[0].0, arrive[0].1), ("kv_arrive", Status::Problem));
        assert!(arrive[0].2.contains("enable_kv_cache_events"));
        assert!(wrong(Kind::Sglang, silent)[0].2.contains("no --disable-radix-cache"), "its own flags");
        let size = |seen: &mut ProbeResult| {
            (seen.events.block_size, seen.events.found) = (Some(16), std::collections::HashSet::new());
        };
        assert_eq!(only(Kind::Vllm, size, "upstreams.0.block_size = 16"), ("kv_block_size", Status::Problem));
        let other = |seen: &mut ProbeResult| {
            let half = hashes(&(100..164).collect::<Vec<u32>>(), 32);
            seen.events.found = half.into_iter().collect();
            seen.second = None;
        };
        assert_eq!(only(Kind::Vllm, other, "publisher of this server"), ("kv_tokens", Status::Problem));
        let details = |seen: &mut ProbeResult| seen.second = Some(Ok(Usage::default()));
        assert_eq!(only(Kind::Vllm, details, "--enable-prompt-tokens-details"), ("cached_tokens", Status::Warning));
        assert_eq!(only(Kind::Sglang, details, "--enable-cache-report"), ("cached_tokens", Status::Warning));
        let salt = |seen: &mut ProbeResult| seen.salted.clone_from(&seen.second);
        assert_eq!(only(Kind::Vllm, salt, "frontend.tenant_header"), ("cache_salt", Status::Problem));
        let no_tokens = |seen: &mut ProbeResult| seen.tokens = Err("/tokenize answers 404".into());
        assert_eq!(only(Kind::Sglang, no_tokens, "kv_events = \"off\""), ("tokenize", Status::Warning));
    }

    #[test]
    fn each_kind_of_prompts_with_other_tokens_is_a_problem() {
        let checks = |comparison: &TokenizerComparison| {
            let mut findings = Findings::of("http://a/");
            tokenizer("org/m", comparison, &mut findings);
            findings.into_checks()
        };
        let statuses = |checks: &[Check]| checks.iter().map(|check| check.status).collect::<Vec<_>>();
        let (same, other) = (TokenAgreement::Same, TokenAgreement::Different("token 3 of a prompt is 5".into()));
        let compared = [("completion", same.clone()), ("chat", same), ("tools", other)];
        let mixed = checks(&TokenizerComparison::Compared(compared));
        assert_eq!(statuses(&mixed), [Status::Ok, Status::Problem]);
        assert_eq!(mixed[0].detail, "org/m: the tokens of the server in prompts of completion, chat");
        assert!(mixed[1].detail.starts_with("org/m, prompts of tools: token 3"), "{mixed:?}");
        assert!(mixed[1].fix.as_ref().is_some_and(|fix| fix.contains("tokenizers.\"org/m\"")), "{mixed:?}");
        let refused = ["completion", "chat", "tools"].map(|kind| (kind, TokenAgreement::NotCompared));
        assert_eq!(statuses(&checks(&TokenizerComparison::Compared(refused))), [Status::Ok]);
        assert_eq!(statuses(&checks(&TokenizerComparison::Unsupported)), [Status::Ok]);
        assert_eq!(statuses(&checks(&TokenizerComparison::Failed("no answer".into()))), [Status::Problem]);
    }

    #[test]
    fn a_server_without_completions_is_a_warning() {
        let refuse = |status| move |seen: &mut ProbeResult| seen.first = Err(Refusal { status, why: "no".into() });
        assert_eq!(only(Kind::Other, refuse(Some(404)), "--no-probe"), ("completion", Status::Warning));
        assert_eq!(only(Kind::Vllm, refuse(Some(500)), "log"), ("completion", Status::Problem));
    }
}
