//! The rules of the architecture, checked on the source code: dependencies between crates, imports between rooms,
//! access to the environment, sizes of files and lines. Each failure names the file and the rule.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates of this workspace that each crate may depend on.
const EDGES: [(&str, &[&str]); 9] = [
    ("units", &[]),
    ("spans", &[]),
    ("transport", &[]),
    ("kvbm", &["spans"]),
    ("worker", &["kvbm", "spans", "transport"]),
    ("upstream", &["worker", "kvbm", "spans", "transport"]),
    ("router", &["worker", "kvbm", "units", "spans"]),
    ("frontend", &["worker", "units", "spans", "transport"]),
    ("blockyard", &["frontend", "router", "upstream", "worker", "kvbm", "units", "spans", "transport"]),
];

/// Rooms of a crate: each a file beside a folder of its name, or a file alone.
type Rooms = &'static [(&'static str, &'static [&'static str])];

/// Rooms of each crate, from top to bottom, each with the rooms that it may import. All of these are below it, so there
/// is no circle.
const ROOMS: [(&str, Rooms); 7] = [
    (
        "blockyard",
        &[
            ("commands", &["node", "config", "process"]),
            ("admin", &["reload", "node", "config"]),
            ("reload", &["node", "config"]),
            ("node", &["otlp", "config", "process"]),
            ("otlp", &["config"]),
            ("config", &[]),
            ("process", &[]),
        ],
    ),
    (
        "kvbm",
        &[
            ("manager", &["pool", "tier", "event", "table", "metrics", "blocking", "block"]),
            ("disk", &["transform", "tier", "event", "table", "permissions", "folder", "block"]),
            ("object", &["transform", "tier", "event", "table", "permissions", "folder", "block"]),
            ("pool", &["tier", "event", "table", "metrics", "blocking", "block"]),
            ("transform", &["tier", "metrics", "permissions", "folder", "block"]),
            ("tier", &["event", "table", "block"]),
            ("event", &["table", "blocking", "block"]),
            ("table", &["block"]),
            ("metrics", &["block"]),
            ("permissions", &[]),
            ("folder", &[]),
            ("heap", &["blocking"]),
            ("blocking", &[]),
            ("block", &[]),
        ],
    ),
    (
        "router",
        &[
            (
                "replay",
                &[
                    "control",
                    "dispatch",
                    "state",
                    "admission",
                    "telemetry",
                    "policy",
                    "booking",
                    "fleet",
                    "load",
                    "index",
                    "config",
                    "hash",
                ],
            ),
            ("router", &["control", "dispatch", "state", "policy", "fleet", "index"]),
            ("control", &["state", "admission", "telemetry", "policy", "booking", "fleet", "load", "index"]),
            ("dispatch", &["state", "admission", "telemetry", "policy", "booking", "fleet", "load", "index", "hash"]),
            ("state", &["admission", "telemetry", "policy", "booking", "fleet", "load", "index", "config", "hash"]),
            ("admission", &["telemetry", "fleet", "load", "config", "hash"]),
            ("telemetry", &["policy", "fleet", "hash"]),
            ("policy", &["booking", "fleet", "load", "index", "config", "hash"]),
            ("booking", &["fleet", "load", "index", "hash"]),
            ("fleet", &["load", "index"]),
            ("load", &["hash"]),
            ("index", &[]),
            ("config", &[]),
            ("hash", &[]),
        ],
    ),
    (
        "frontend",
        &[
            (
                "api",
                &[
                    "state",
                    "tokenizers",
                    "output",
                    "params",
                    "model",
                    "http",
                    "keys",
                    "limits",
                    "settings",
                    "metrics",
                    "error",
                ],
            ),
            ("state", &["tokenizers", "params", "model", "http", "keys", "limits", "settings", "metrics"]),
            ("tokenizers", &["model", "metrics"]),
            ("output", &["params", "model", "http", "limits", "metrics", "error"]),
            ("params", &["settings", "keys", "error"]),
            ("model", &["error"]),
            ("http", &["limits", "settings", "metrics", "keys", "error"]),
            ("limits", &["settings", "error"]),
            ("settings", &["keys"]),
            ("metrics", &["keys", "error"]),
            ("keys", &["error"]),
            ("error", &[]),
        ],
    ),
    (
        "upstream",
        &[
            ("engine", &["continuation", "load_reports", "probe", "metrics", "load", "salts", "relay"]),
            ("continuation", &["relay"]),
            ("load_reports", &["load", "ask", "relay"]),
            ("cache_events", &["metrics", "salts", "kv_events"]),
            ("kv_sources", &["program", "ask", "relay", "kv_events"]),
            ("program", &["ask", "relay"]),
            ("api_description", &["ask", "salts", "relay"]),
            ("models", &["ask", "relay"]),
            ("certificates", &[]),
            ("resolve", &[]),
            ("conversation", &[]),
            ("probe", &["metrics"]),
            ("metrics", &["kv_events"]),
            ("tokenize", &["ask", "relay"]),
            ("ask", &["relay"]),
            ("load", &[]),
            ("salts", &[]),
            ("relay", &[]),
            ("kv_events", &[]),
        ],
    ),
    (
        "worker",
        &[
            ("llama", &["handoff", "metrics", "plane", "engine"]),
            ("serve", &["plane", "engine"]),
            ("remote", &["handoff", "plane", "engine"]),
            ("handoff", &["plane", "engine"]),
            ("metrics", &["engine"]),
            ("plane", &["engine"]),
            ("engine", &[]),
        ],
    ),
    (
        "transport",
        &[
            ("client", &["expiry", "files", "reloadable", "socket"]),
            ("server", &["expiry", "files", "reloadable", "socket"]),
            ("reloadable", &["expiry", "files", "watch"]),
            ("files", &[]),
            ("expiry", &[]),
            ("socket", &[]),
            ("watch", &[]),
        ],
    ),
];

/// Rooms whose files import each other without circles.
const WITHOUT_CIRCLES: [&str; 16] = [
    "router/src/admission",
    "router/src/booking",
    "router/src/control",
    "router/src/dispatch",
    "router/src/fleet",
    "router/src/index",
    "router/src/load",
    "router/src/policy",
    "kvbm/src/disk",
    "kvbm/src/manager",
    "kvbm/src/manager/offload",
    "kvbm/src/manager/onboard",
    "kvbm/src/object",
    "kvbm/src/pool",
    "kvbm/src/tier",
    "kvbm/src/transform",
];

/// Files that may read the environment, and why.
const READS_THE_ENVIRONMENT: [(&str, &str); 1] = [("src/config", "the one loader of the configuration")];

/// Limit of lines in a file without its tests. A file of more than 400 lines should be checked for a second subject.
const FILE_LINES_MAX: usize = 600;

/// Limit of characters in a line, comments and tests included.
const COLUMNS_MAX: usize = 120;

/// Folders of the production sources.
pub(crate) const SOURCES: [&str; 9] = [
    "src",
    "frontend/src",
    "router/src",
    "upstream/src",
    "worker/src",
    "kvbm/src",
    "transport/src",
    "units/src",
    "spans/src",
];

#[test]
fn crates_depend_downwards_only() {
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        EDGES.iter().map(|(from, to)| (*from, to.iter().copied().collect())).collect();
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("cargo metadata lists packages");
    assert_eq!(packages.len(), allowed.len(), "a crate came or went: say in EDGES what it may name");
    for package in packages {
        let name = package["name"].as_str().expect("a package has a name");
        let may = allowed.get(name).unwrap_or_else(|| panic!("crate {name} is not in EDGES"));
        for dependency in package["dependencies"].as_array().expect("a package lists its dependencies") {
            let on = dependency["name"].as_str().expect("a dependency has a name");
            // A crate may name itself for its tests, with other features.
            let ours = allowed.contains_key(on) && on != name;
            assert!(!ours || may.contains(on), "crate {name} depends on {on}: that edge points up or sideways");
        }
    }
}

#[test]
fn frontend_imports_only_the_engine_seam_of_worker() {
    let offenders = lines_where(&["frontend/src"], |_, line| {
        let code = code(line);
        paths_after(code, "worker").any(|rest| !rest.starts_with("engine"))
            || paths_after(code, "worker::engine").any(|rest| rest.starts_with(char::is_lowercase))
    });
    assert!(offenders.is_empty(), "the frontend may import only worker::engine from worker:\n{}", offenders.join("\n"));
}

#[test]
fn only_the_nats_plane_names_async_nats() {
    let offenders = lines_where(&SOURCES, |file, line| {
        !file.starts_with("worker/src/plane/nats") && code(line).contains("async_nats")
    });
    assert!(offenders.is_empty(), "only worker/src/plane/nats may use async_nats:\n{}", offenders.join("\n"));
}

#[test]
fn only_the_configuration_loader_reads_the_environment() {
    let offenders = lines_where(&SOURCES, |file, line| {
        let reads = ["env::var", "env::vars", "env::var_os", "Env::"].iter().any(|word| code(line).contains(word));
        reads && !READS_THE_ENVIRONMENT.iter().any(|(prefix, _)| file.starts_with(prefix))
    });
    assert!(
        offenders.is_empty(),
        "the environment is read by the configuration loader alone:\n{}",
        offenders.join("\n")
    );
}

#[test]
fn only_the_frontend_uses_openai_types() {
    let offenders = lines_where(&["kvbm/src", "router/src", "worker/src"], |file, line| {
        !file.starts_with("worker/src/upstream") && code(line).contains("async_openai")
    });
    assert!(offenders.is_empty(), "only frontend and upstream engine may use async_openai:\n{}", offenders.join("\n"));
}

#[test]
fn rooms_import_only_rooms_of_the_table() {
    let mut wrong = Vec::new();
    for (of, rooms) in ROOMS {
        for (at, (room, allowed)) in rooms.iter().enumerate() {
            let below = |other: &str| rooms[at + 1..].iter().any(|(room, _)| *room == other);
            wrong.extend(
                allowed
                    .iter()
                    .filter(|other| !below(other))
                    .map(|other| format!("ROOMS of {of}: {room} may use {other}, which is not below it")),
            );
        }
        let mut used = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let folder = if of == "blockyard" { "src".to_owned() } else { format!("{of}/src") };
        for (file, text) in sources(&[&folder]).into_iter().filter(|(file, _)| !is_test(file)) {
            let room = first_word(&file[folder.len() + 1..]);
            if ["lib", "main"].contains(&room) {
                continue;
            }
            let Some((room, allowed)) = rooms.iter().find(|(name, _)| *name == room) else {
                wrong.push(format!("{file}: {room} is not in ROOMS of {of}"));
                continue;
            };
            seen.insert(*room);
            for other in rooms_named(&text).into_iter().filter(|other| other != room) {
                if !allowed.contains(&other.as_str()) {
                    wrong.push(format!("{file}: {room} may not use crate::{other}"));
                }
                used.insert((*room, other));
            }
        }
        for (room, allowed) in rooms {
            wrong.extend((!seen.contains(room)).then(|| format!("ROOMS of {of}: there is no {room}")));
            let unused = allowed.iter().filter(|other| !used.contains(&(*room, (**other).to_owned())));
            wrong.extend(unused.map(|other| format!("ROOMS of {of}: {room} no longer uses {other}")));
        }
    }
    assert!(
        wrong.is_empty(),
        "a room uses rooms below it by their own names (not through lib.rs), and only those in ROOMS:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn files_of_a_room_import_each_other_without_circles() {
    for room in WITHOUT_CIRCLES {
        let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (file, text) in sources(&[room]).into_iter().filter(|(file, _)| !is_test(file)) {
            let Some(name) = file[room.len() + 1..].strip_suffix(".rs").filter(|name| !name.contains('/')) else {
                continue;
            };
            let code: Vec<_> = text.lines().take(lines_apart_from_tests(&text)).map(code).collect();
            let imported = paths_after(&code.join("\n"), "super").map(|rest| first_word(rest).to_owned()).collect();
            imports.insert(name.to_owned(), imported);
        }
        // Remove files that import no remaining file, until none is left. What cannot be removed is a circle.
        loop {
            let names: BTreeSet<String> = imports.keys().cloned().collect();
            let before = imports.len();
            imports.retain(|name, imported| imported.iter().any(|other| other != name && names.contains(other)));
            if imports.len() == before {
                break;
            }
        }
        assert!(imports.is_empty(), "{room}: these files import each other in a circle, or use one: {imports:?}");
    }
}

#[test]
fn no_line_exceeds_the_limit_of_columns() {
    let others = [
        "tests",
        "bench/src",
        "bench/index/src",
        "kvbm/examples",
        "router/examples",
        "upstream/examples",
        "worker/examples",
    ];
    let folders = SOURCES.iter().copied().chain(others).collect::<Vec<_>>();
    let long: Vec<_> = sources(&folders)
        .into_iter()
        .flat_map(|(file, text)| {
            let lines = text.lines().enumerate().map(|(n, line)| (n + 1, line.chars().count())).collect::<Vec<_>>();
            lines.into_iter().filter(|(_, columns)| *columns > COLUMNS_MAX).map(move |(n, _)| format!("{file}:{n}"))
        })
        .collect();
    assert!(long.is_empty(), "over {COLUMNS_MAX} columns:\n{}", long.join("\n"));
}

#[test]
fn every_module_opens_with_its_purpose() {
    let silent: Vec<_> = sources(&SOURCES)
        .into_iter()
        .filter(|(file, text)| !is_test(file) && !text.starts_with("//!"))
        .map(|(file, _)| file)
        .collect();
    assert!(silent.is_empty(), "these modules do not open with //!:\n{}", silent.join("\n"));
}

#[test]
fn no_file_exceeds_the_limit_of_lines() {
    let long: Vec<_> = sources(&SOURCES)
        .into_iter()
        .filter(|(file, _)| !is_test(file))
        .map(|(file, text)| (file, lines_apart_from_tests(&text)))
        .filter(|(_, lines)| *lines > FILE_LINES_MAX)
        .map(|(file, lines)| format!("{file}: {lines}"))
        .collect();
    assert!(long.is_empty(), "over {FILE_LINES_MAX} lines without tests; split by subject:\n{}", long.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

/// `file:line: text` of each line that `wanted` picks, tests apart.
pub(crate) fn lines_where(folders: &[&str], wanted: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (file, text) in sources(folders).into_iter().filter(|(file, _)| !is_test(file)) {
        let lines = text.lines().take(lines_apart_from_tests(&text)).enumerate();
        found.extend(
            lines.filter(|(_, line)| wanted(&file, line)).map(|(n, line)| format!("{file}:{}: {}", n + 1, line.trim())),
        );
    }
    found
}

/// What follows `crate::` in a file, tests and comments apart: `a` and `b` of `use crate::{a::Item, b};`
fn rooms_named(text: &str) -> BTreeSet<String> {
    let code: Vec<_> = text.lines().take(lines_apart_from_tests(text)).map(code).collect();
    let code = code.join("\n");
    let mut named = BTreeSet::new();
    for rest in paths_after(&code, "crate") {
        let Some(list) = rest.strip_prefix('{') else {
            named.insert(first_word(rest).to_owned());
            continue;
        };
        let (mut depth, mut expected) = (0, true);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' => expected |= depth == 0,
                c if expected && !c.is_whitespace() => {
                    named.insert(first_word(&list[at..]).to_owned());
                    expected = false;
                }
                _ => {}
            }
        }
    }
    named
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default()
}

/// Every Rust file under the folders, by its path from the root, in order.
fn sources(folders: &[&str]) -> Vec<(String, String)> {
    let mut pending: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    let mut found = Vec::new();
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(
                fs::read_dir(&path).expect("a source folder is readable").map(|entry| entry.expect("an entry").path()),
            );
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(root()).expect("sources are below the root").display().to_string();
            found.push((name, fs::read_to_string(&path).expect("a source file is text")));
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no sources under {folders:?}: the layout changed and this test does not know");
    found
}

fn is_test(file: &str) -> bool {
    let suite = file.ends_with("contract.rs") || file.ends_with("conformance.rs");
    file.ends_with("/tests.rs") || file.contains("/tests/") || suite
}

/// Lines before the unit tests that close a file.
fn lines_apart_from_tests(text: &str) -> usize {
    let all = text.lines().count();
    let tests = text.lines().position(|line| line.trim_end() == "mod tests {");
    tests.map_or(all, |at| at.saturating_sub(1))
}

/// A line without its comment. (`//` in a string cuts it short, which these rules can bear.)
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// What follows `path::` wherever that path starts in the code.
fn paths_after<'a>(code: &'a str, path: &'a str) -> impl Iterator<Item = &'a str> {
    let starts =
        |at: usize| code[..at].chars().next_back().is_none_or(|c| !(c.is_alphanumeric() || c == '_' || c == ':'));
    code.match_indices(path)
        .filter(move |(at, _)| starts(*at))
        .filter_map(move |(at, _)| code[at + path.len()..].strip_prefix("::"))
}
