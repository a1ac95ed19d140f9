//! Suggestions for unknown keys: a known key with a similar name, or the key that replaces one of another server.

use super::defaults;

/// Keys of other servers (their last word), and the replacement here: a key in backquotes, or a sentence.
const SYNONYMS: [(&[&str], &str); 19] = [
    (&["port", "host", "bind", "address", "addr", "bind_address", "server"], "`listen`"),
    (&["api_key", "api_keys", "auth", "token"], "`frontend.api_keys_file`"),
    (&["model_path", "model_dir", "model_name", "models_dir", "checkpoint", "weights"], "`model`"),
    (&["served_model_name"], "a model is served under the name of its folder"),
    (&["max_model_len", "context_length", "max_context"], "the context is what the model's config.json says"),
    (&["gpu", "device", "hbm", "gpu_memory", "gpu_memory_utilization", "kv_cache_memory"], "`tiers.g1`"),
    (&["ram", "dram", "cpu", "memory", "swap_space", "host_memory"], "`tiers.g2`"),
    (&["ssd", "disk", "nvme"], "`tiers.g3`"),
    (&["ssd_paths", "disk_paths", "paths"], "`tiers.g3_paths`"),
    (&["s3", "bucket", "object_store", "shared_storage"], "`tiers.g4`"),
    (&["cache_dir", "data", "data_folder", "data_path"], "`data_dir`"),
    (&["log_level", "level", "loglevel"], "`log.filter`"),
    (&["max_batch_size", "max_running_requests"], "`engine.max_num_seqs`"),
    (&["max_num_batched_tokens", "chunked_prefill_size"], "`engine.max_prefill_chunk_tokens`"),
    (&["max_queue_size", "max_waiting"], "`engine.max_queued_requests`"),
    (&["max_body_size", "body_limit", "client_max_body_size"], "`frontend.max_body`"),
    (&["tenants", "tenant"], "`router.admission.tenants`"),
    (&["grace_period", "drain_timeout"], "`shutdown_timeout`"),
    (&["num_workers", "replicas", "data_parallel_size"], "`workers`"),
];

/// A suggestion for an unknown key. `siblings` are the known keys of the same section.
pub(super) fn suggestion(key: &str, siblings: &[&str]) -> Option<String> {
    let (parent, last) = key.rsplit_once('.').map_or(("", key), |(parent, last)| (parent, last));
    let within = |name: &str| if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
    let close = siblings.iter().map(|name| (distance(last, name), *name)).min();
    if let Some((_, name)) = close.filter(|(found, name)| is_misspelling(*found, last, name)) {
        return Some(format!("did you mean `{}`?", within(name)));
    }
    if parent == "admin" && ["port", "host", "address", "bind"].contains(&last) {
        return Some("did you mean `admin.listen`?".into());
    }
    let word = last.replace('-', "_").to_lowercase();
    if let Some((_, meant)) = SYNONYMS.iter().find(|(words, _)| words.contains(&word.as_str())) {
        return Some(if meant.starts_with('`') { format!("did you mean {meant}?") } else { (*meant).into() });
    }
    nearest(key, last).map(|key| format!("did you mean `{key}`?"))
}

/// The known key that has dots where a name has underscores.
pub(super) fn with_underscores(name: &str) -> Option<String> {
    defaults().into_iter().map(|(known, _)| known).find(|known| known.replace('.', "_") == name)
}

/// The known key that results from a key without its empty parts.
pub(super) fn without_empty_parts(key: &str) -> Option<String> {
    let parts: Vec<&str> = key.split('.').filter(|part| !part.is_empty()).collect();
    let key = parts.join(".");
    defaults().into_iter().map(|(known, _)| known).find(|known| *known == key)
}

/// The most similar known key or section: one with the same last word, else one within a few letters.
fn nearest(key: &str, last: &str) -> Option<String> {
    let leaves = defaults().into_iter().map(|(key, _)| key);
    let mut known: Vec<String> =
        leaves.flat_map(|key| sections(&key).chain([key.clone()]).collect::<Vec<_>>()).collect();
    known.sort_unstable();
    known.dedup();
    let scored = known.into_iter().filter_map(|candidate| {
        let word = candidate.rsplit('.').next().unwrap_or_default();
        let whole = distance(key, &candidate);
        // The section may be right, so its letters do not make a wrong last word similar.
        let is_close = distance(last, word) * 3 <= last.len().max(3);
        // A key of no section that was written below a header is more likely than a key of another section.
        let edits = if candidate == last {
            0
        } else if word == last {
            whole.min(1)
        } else {
            whole
        };
        is_close.then_some((edits, candidate))
    });
    let (found, candidate) = scored.min()?;
    (found * 3 <= key.len().max(3)).then_some(candidate)
}

/// The sections that contain a key: `router.planner.mode` is in `router.planner` and `router`.
fn sections(key: &str) -> impl Iterator<Item = String> {
    key.match_indices('.').map(|(at, _)| key[..at].to_owned())
}

/// Whether one name may be a misspelling of the other: a few letters differ, or a word is missing.
fn is_misspelling(distance: usize, from: &str, to: &str) -> bool {
    let word_missing = from.len() >= 4 && (to.starts_with(from) || to.ends_with(from) || from.starts_with(to));
    distance * 3 <= from.len().max(3) || word_missing
}

/// Edits from one name to the other: characters that are inserted, removed or replaced, and neighbours that are swapped
/// (optimal string alignment).
pub(super) fn distance(from: &str, to: &str) -> usize {
    let [from, to] = [from, to].map(|name| name.chars().collect::<Vec<char>>());
    let (mut before, mut last) = (Vec::new(), (0..=to.len()).collect::<Vec<usize>>());
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let replaced = last[j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut edits = replaced.min(row[j - 1] + 1).min(last[j] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                edits = edits.min(before[j - 2] + 1);
            }
            row.push(edits);
        }
        (before, last) = (last, row);
    }
    last[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_suggests_a_similar_or_synonymous_one() {
        let top = ["model", "listen", "workers", "tiers", "router", "log"];
        let tenant = ["weight", "max_inflight_tokens", "max_queued_tokens"];
        let cases: [(&str, &[&str], Option<&str>); 18] = [
            ("tier", &top, Some("did you mean `tiers`?")),
            ("tires", &top, Some("did you mean `tiers`?")),
            ("router.bar", &["policy", "planner", "slo"], None),
            ("router.solo", &["policy", "planner", "slo"], Some("did you mean `router.slo`?")),
            ("port", &top, Some("did you mean `listen`?")),
            ("modl", &top, Some("did you mean `model`?")),
            ("server", &top, Some("did you mean `listen`?")),
            ("server.port", &[], Some("did you mean `listen`?")),
            ("frontend.listen", &["max_body"], Some("did you mean `listen`?")),
            ("admin.port", &["listen"], Some("did you mean `admin.listen`?")),
            ("policy", &top, Some("did you mean `router.policy`?")),
            ("router.polcy", &["policy", "planner"], Some("did you mean `router.policy`?")),
            ("router.planer", &["planner"], Some("did you mean `router.planner`?")),
            (
                "router.admission.tenants.blue.wieght",
                &tenant,
                Some("did you mean `router.admission.tenants.blue.weight`?"),
            ),
            (
                "router.admission.tenants.blue.inflight_tokens",
                &tenant,
                Some("did you mean `router.admission.tenants.blue.max_inflight_tokens`?"),
            ),
            ("tiers.ssd", &["g1", "g2", "g3"], Some("did you mean `tiers.g3`?")),
            ("api_key", &top, Some("did you mean `frontend.api_keys_file`?")),
            ("colour", &top, None),
        ];
        for (key, siblings, wanted) in cases {
            assert_eq!(suggestion(key, siblings).as_deref(), wanted, "{key}");
        }
    }
}
