//! `docs/configuration.md`, `docs/routing.md` and the help agree with the program; wrong configurations are rejected.

use blockyard::config::{Config, Purpose, Sources, Upstream, defaults};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;

const PAGE: &str = include_str!("../../docs/configuration.md");

#[test]
fn the_page_lists_every_key_with_its_default() {
    let documented: BTreeMap<String, String> = rows(Keys::OfTheTree).collect();
    // The data folder depends on the user, so the page describes it in words.
    let shown = |key: &str, value: &Option<String>| match (key, value) {
        ("data_dir", _) => "blockyard in the user's cache folder".into(),
        (_, Some(value)) => value.clone(),
        (_, None) => "unset".into(),
    };
    let real: BTreeMap<String, String> =
        defaults().into_iter().map(|(key, value)| (key.clone(), shown(&key, &value))).collect();
    assert_eq!(documented, real);
}

#[test]
fn the_page_lists_every_key_of_an_upstream() {
    let documented: BTreeSet<String> = rows(Keys::OfAnUpstream).map(|(key, _)| key).collect();
    let unknown = serde_json::from_str::<Upstream>(r#"{ "none": 1 }"#).expect_err("there is no such key").to_string();
    // "unknown field `none`, expected one of `url`, …"
    let (_, known) = unknown.split_once("expected one of ").expect("the error lists the keys");
    let known: BTreeSet<String> = known.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    assert_eq!(documented, known);
}

#[test]
fn serve_help_shows_the_real_defaults() {
    use clap::CommandFactory;
    let mut command = blockyard::commands::cli::Cli::command();
    let help = command.find_subcommand_mut("serve").expect("there is a serve").render_long_help().to_string();
    let Config { model, listen, workers, log, .. } = Config::with_cache("".as_ref());
    for default in [model.to_string(), listen.to_string(), workers.to_string(), log.filter] {
        assert!(help.contains(&format!("[default: {default}]")), "[default: {default}] is not in:\n{help}");
    }
}

#[test]
fn the_sample_configurations_are_valid() {
    let samples = [
        ("laptop", Purpose::Serve),
        ("vllm-host", Purpose::Serve),
        ("nfs", Purpose::Serve),
        ("frontend", Purpose::Frontend),
        ("worker", Purpose::Worker),
    ];
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/samples");
    assert_eq!(std::fs::read_dir(&folder).expect("there are samples").count(), samples.len());
    for (name, purpose) in samples {
        let file = Some(folder.join(format!("{name}.toml")));
        let environment = vec![("HOME".to_owned(), "/home/user".to_owned())];
        // As the comment in the file says: each worker gets its own address.
        let advertise = ("BLOCKYARD_CLUSTER__ADVERTISE".to_owned(), "http://10.0.0.7:8100".to_owned());
        let environment = [environment, vec![advertise]].concat();
        let loaded = Config::load_for(&Sources { file, environment, flags: Vec::new() }, purpose);
        assert!(loaded.is_ok(), "{name}: {}", loaded.err().map(|errors| errors.to_string()).unwrap_or_default());
    }
}

#[test]
fn the_routing_page_lists_every_policy() {
    let page = include_str!("../../docs/routing.md");
    let known = router::Policy::ALL;
    assert!(known.iter().all(|policy| page.contains(&format!("`{}`", policy.name()))));
}

#[test]
fn print_config_rejects_what_serve_rejects_and_writes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, file) = (folder.path().join("data"), folder.path().join("file"));
    std::fs::write(&file, "short").expect("a file");
    let (data, file) = (data.to_str().expect("text"), file.to_str().expect("text"));
    let quota = "tiers.quotas=[{tenant=\"a\", g1_guaranteed=\"1TiB\"}]";
    let keys = format!("tiers.encryption={{keys={{file=\"{file}\"}}}}");
    let secret = format!("frontend.tenant_secret_file={file}");
    let folders = format!("tiers.g3_paths=[{{path=\"{data}/a\"}}, {{path=\"{data}/a/\"}}]");
    let cases: [(&[&str], &str); 16] = [
        (&["--set", &folders], "twice"),
        (&["--set", "tiers.g3_5={path=\"\", capacity=\"1GiB\"}"], "tiers.g3_5.path = \"\": expected the path"),
        (&["--set", "router.trace_file="], "router.trace_file"),
        (&["--set", "frontend.api_keys_file=no/such/file"], "blockyard key add --file"),
        (&["--set", "frontend.tls_cert_file=no/such/file"], "set both, or none"),
        (&["--model", "no/such/folder"], "no/such/folder"),
        (&["--model", folder.path().to_str().expect("text")], "config.json"),
        (&["--set", "tiers.g1=900TiB"], "not enough memory"),
        (&["--set", "tiers.g1=1B"], "smaller than one block"),
        (&["--set", "tiers.g3=100B"], "too small for tiers.g3"),
        (&["--set", "frontend.tenant_header=x-t", "--set", quota], "tiers.quotas"),
        (&["--set", &keys], "tiers.encryption"),
        (&["--set", "frontend.tenant_header=x-t", "--set", &secret], "16"),
        (&["--set", "router.trace_file=no/such/folder/run.jsonl"], "router.trace_file"),
        (&["--set", "router.models.other.policy=random"], "`tiny`"),
        (&["--listen", "203.0.113.7:80"], "listen"),
    ];
    for (arguments, expected) in cases {
        for print in [&["--print-config"][..], &[]] {
            let common = ["--model", "tiny", "--listen", "127.0.0.1:0", "--data-dir", data];
            let output = crate::process::program(&[&common[..], arguments, print].concat()).output().expect("it runs");
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{arguments:?} {print:?}: {error}");
            assert!(error.contains(expected), "{arguments:?} {print:?}: {error}");
            assert!(output.stdout.is_empty() && !std::path::Path::new(data).exists(), "nothing is printed or created");
        }
    }
    let both = ["--data-dir", file, "--model", "no/such/folder", "--print-config"];
    let error = crate::process::program(&both).output().expect("it runs").stderr;
    let error = String::from_utf8_lossy(&error);
    assert!(error.contains("is not a folder") && error.contains("no/such/folder"), "both errors are reported: {error}");
    let error = crate::process::program(&["--data-dir", "", "--model", "tiny", "--print-config"]).output();
    let error = String::from_utf8(error.expect("it runs").stderr).unwrap();
    assert!(error.contains("data_dir = \"\": expected the path of a folder"), "{error}");
    std::fs::create_dir(data).unwrap();
    std::fs::write(format!("{data}/g3"), "").unwrap();
    let error = crate::process::program(&["--data-dir", data, "--model", "tiny", "--print-config"]).output();
    let error = String::from_utf8(error.expect("it runs").stderr).unwrap();
    let expected = format!("data_dir = \"{data}\": {data}/g3 is not a folder, and that of the G3 log has this name");
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_variable_that_is_not_utf_8_is_refused() {
    let keys = std::ffi::OsStr::from_bytes(b"/keys\xff.toml");
    let mut serve = crate::process::program(&["--print-config"]);
    let output = serve.env("BLOCKYARD_FRONTEND__API_KEYS_FILE", keys).output().expect("it runs");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("environment BLOCKYARD_FRONTEND__API_KEYS_FILE: name and value must be UTF-8"), "{error}");
}

/// The keys of a section of the page.
#[derive(PartialEq)]
enum Keys {
    OfTheTree,
    /// Keys of a table in `upstreams`, of which there may be any number.
    OfAnUpstream,
}

/// Keys and defaults from the tables of the page.
fn rows(wanted: Keys) -> impl Iterator<Item = (String, String)> {
    let keys = |section: &str| {
        if section.starts_with("`[[upstreams]]`") { Keys::OfAnUpstream } else { Keys::OfTheTree }
    };
    let sections = PAGE.split("\n## ").filter(move |section| keys(section) == wanted);
    sections.flat_map(str::lines).filter_map(row)
}

/// Key and default from a row of the page's table.
fn row(line: &str) -> Option<(String, String)> {
    let mut cells = line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().replace('`', ""));
    Some((cells.next()?, cells.next()?))
}
