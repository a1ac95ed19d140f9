//! `blockyard replay` and `blockyard calibrate` on traces: recorded by a running program, or made here.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::{client, program};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn blockyard(args: &[&str], file: &Path) -> Output {
    let (verb, rest) = args.split_first().unwrap();
    Command::new(env!("CARGO_BIN_EXE_blockyard")).arg(verb).arg(file).args(rest).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_of_a_running_program_can_be_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--workers", "both:2", "--json"]);
    command.arg("--data-dir").arg(folder.path().join("data"));
    command.arg("--set").arg(format!("router.trace_file={}", file.display()));
    command.args(["--set", "tiers.g3=off", "--set", "tiers.g1=32MiB"]);
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut banner = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut banner).unwrap();
    let url = serde_json::from_str::<Value>(&banner).unwrap()["address"].as_str().unwrap().to_owned();
    for turn in 1..=3 {
        let prompt: Vec<u32> = (0..600 * turn).map(|at| 5 + at % 200).collect();
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": true});
        let answer = client().post(format!("http://{url}/v1/completions")).json(&body).send().await.unwrap();
        assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
    }
    // A trace line is written after its answer.
    let written = async {
        loop {
            let text = std::fs::read_to_string(&file).unwrap();
            if text.ends_with('\n') && text.lines().count() == 3 {
                break text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = tokio::time::timeout(Duration::from_mins(5), written).await.expect("three lines");
    process.kill().unwrap();
    process.wait().unwrap();

    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lengths: Vec<_> =
        lines.iter().map(|line| (line["input_length"].clone(), line["output_length"].clone())).collect();
    assert!(lines.iter().all(|line| line["max_tokens"] == 4 && line.get("tenant").is_none()), "{lines:?}");
    assert_eq!(lengths, [(json!(600), json!(4)), (json!(1200), json!(4)), (json!(1800), json!(4))]);
    let replayed = blockyard(&["replay", "--workers", "2", "--rate", "1", "--policy", "kv", "--json"], &file);
    let report: Value = serde_json::from_slice(&replayed.stdout).unwrap();
    // Of 2 + 3 + 4 trace units, the second prompt can reuse one full unit and the third two.
    assert_eq!((&report["requests"], &report["policies"][0]["completed"]), (&json!(3), &json!(3)));
    assert!((report["hit_rate_bound"].as_f64().unwrap() - 3.0 / 9.0).abs() < 1e-9, "{report:#}");
    let calibrated = blockyard(&["calibrate"], &file);
    let error = String::from_utf8(calibrated.stderr).unwrap();
    assert!(
        !calibrated.status.success() && error.contains("the same worker (3)") && error.contains("at least 50"),
        "{error}"
    );
}

#[test]
fn replay_accepts_a_calibrated_profile() {
    let folder = tempfile::tempdir().unwrap();
    let (run, profile) = (folder.path().join("run.jsonl"), folder.path().join("worker.toml"));
    // Sequential requests: 10 ms per step, 0.1 ms per prompt token.
    let line = |at: u64| {
        let (input, output) = (500 + 300 * (at % 7), 2 + at % 20);
        let first = 0.01 + input as f64 * 0.000_1;
        let ids: Vec<u64> = (0..input.div_ceil(512)).map(|unit| 10 * at + unit).collect();
        json!({
            "timestamp": 2000 * at, "input_length": input, "output_length": output, "hash_ids": ids, "model": "toy",
            "worker": "w1", "dispatched_s": 0.0, "first_token_s": first,
            "last_token_s": first + 0.01 * (output - 1) as f64,
            "kv_cache_tokens": 100_000, "kv_bytes_per_token": 1000.0, "max_num_seqs": 8,
        })
        .to_string()
            + "\n"
    };
    std::fs::write(&run, (0..100).map(line).collect::<String>()).unwrap();
    let calibrated = blockyard(&["calibrate"], &run);
    let log = String::from_utf8(calibrated.stderr).unwrap();
    assert!(calibrated.status.success() && log.contains("100 requests"), "{log}");
    std::fs::write(&profile, &calibrated.stdout).unwrap();
    let report: Value = serde_json::from_slice(&blockyard(&["calibrate", "--json"], &run).stdout).unwrap();
    for (key, want) in
        [("step_base_s", 0.01), ("prefill_token_s", 0.000_1), ("max_num_seqs", 8.0), ("kv_cache_bytes", 1e8)]
    {
        let found = report["profile"][key].as_f64().unwrap();
        assert!((found / want - 1.0).abs() < 0.02, "{key}: {found}");
    }
    let with = ["replay", "--rate", "0.5", "--policy", "kv", "--json", "--profile", profile.to_str().unwrap()];
    let replay = |workers| blockyard(&[&with[..], &["--workers", workers]].concat(), &run);
    let replayed: Value = serde_json::from_slice(&replay("1").stdout).unwrap();
    let mean = replayed["policies"][0]["ttft_mean_s"].as_f64().unwrap();
    // 10 ms and 1,400 tokens on average, at 0.1 ms.
    assert!((mean - 0.15).abs() < 0.02, "{mean}");
    let disaggregated: Value = serde_json::from_slice(&replay("prefill:1,decode:1").stdout).unwrap();
    let results = &disaggregated["policies"][0];
    assert!(disaggregated["roles"] == "prefill:1,decode:1" && results["completed"] == 100, "{disaggregated:#}");
    assert!(results["remote_prefills"].as_u64().is_some_and(|count| count > 50), "{disaggregated:#}");
    let text = std::fs::read_to_string(&profile).unwrap();
    std::fs::write(&profile, text.split("[peer]").next().unwrap()).unwrap();
    let error = String::from_utf8(replay("prefill:1,decode:1").stderr).unwrap();
    assert!(error.contains("[peer]") && replay("2").status.success(), "{error}");
}

#[test]
fn replay_checks_trace_roles_and_output_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let (run, notes) = (folder.path().join("run.jsonl"), folder.path().join("README.md"));
    let line = json!({"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]});
    std::fs::write(&run, line.to_string()).unwrap();
    std::fs::write(&notes, "# Traces\n").unwrap();
    let nowhere = folder.path().join("none/report.html");
    let with = ["replay", "--rate", "1", "--policy", "session,least-loaded", "--html"];
    let replay = |page: &Path, trace: &Path| {
        let output = blockyard(&[&with[..], &[page.to_str().unwrap()]].concat(), trace);
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (success, log) = replay(&nowhere, &run);
    assert!(!success && log.contains("--html") && !log.contains("as recorded"), "{log}");
    let page = folder.path().join("report.html");
    let (success, log) = replay(&page, &notes);
    assert!(!success && log.contains("trace, line 1: ") && log.contains("\"hash_ids\": [1, 2]"), "{log}");
    assert_eq!(log.matches("line 1").count(), 1, "{log}");
    let rebalance = |workers: &str| {
        blockyard(&["replay", "--rate", "1", "--policy", "kv", "--rebalance", "--workers", workers], &run)
    };
    assert!(rebalance("prefill:1,decode:1").status.success());
    assert!(!rebalance("2").status.success(), "rebalancing needs prefill and decode workers");
    assert!(replay(&page, &run).0 && std::fs::read_to_string(&page).unwrap().contains(">session</text>"));
    let mut writing = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    let writing = writing.args(["replay", "--workload", "chat", "--rate", "1", "--write-trace"]).arg(&nowhere);
    let error = String::from_utf8(writing.output().unwrap().stderr).unwrap();
    assert!(error.starts_with(&format!("error: --write-trace {}: ", nowhere.display())), "{error}");
}

#[test]
fn replay_compares_policies_with_and_without_copies_ahead_of_demand() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("worker.toml");
    let profile = include_str!("../../deploy/profiles/h100-8b.toml");
    std::fs::write(&file, profile).unwrap();
    let replay = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        command.args(["replay", "--workload", "hot-prefix:16k", "--requests", "200", "--workers", "32"]);
        command.args(["--rate", "6", "--policy", "kv,llm-d", "--prefetch", "both", "--json", "--profile"]).arg(&file);
        command.output().unwrap()
    };
    let error = String::from_utf8(replay().stderr).unwrap();
    assert!(error.contains("--prefetch both") && error.contains("[host]"), "{error}");
    let host = "[host]\ncapacity_bytes = 200_000_000_000\nbytes_per_second = 32e9\nlatency_s = 0.0005\n";
    std::fs::write(&file, profile.to_owned() + "\n" + host).unwrap();
    let report: Value = serde_json::from_slice(&replay().stdout).unwrap();
    let policies = report["policies"].as_array().unwrap();
    let names: Vec<&str> = policies.iter().map(|results| results["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["kv", "kv (no copies)", "llm-d"]);
    assert!(policies[0]["copies"]["ordered"].as_u64().unwrap() >= 1, "{report:#}");
    assert!(policies[1].get("copies").is_none() && policies[2].get("copies").is_none(), "{report:#}");
}

#[test]
fn replay_reads_the_router_configuration_as_serve_does() {
    let folder = tempfile::tempdir().unwrap();
    let (run, file) = (folder.path().join("run.jsonl"), folder.path().join("blockyard.toml"));
    // Prompts with common prefixes arrive while other requests decode.
    let line = |at: u64| {
        let ids: Vec<u64> = (0..=at % 3).chain([1000 + at]).collect();
        json!({"timestamp": 60 * at, "input_length": 512 * ids.len(), "output_length": 200, "hash_ids": ids})
            .to_string()
    };
    std::fs::write(&run, (0..200).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    std::fs::write(&file, "[router]\ndecode_interference_weight = 40\n").unwrap();
    let replay = |more: &[&str]| {
        let output = blockyard(&[&["replay", "--rate", "40", "--workers", "4", "--json"], more].concat(), &run);
        let log = String::from_utf8(output.stderr).unwrap();
        let report = serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| log.clone().into());
        (report, log)
    };
    let policies = |report: &Value| -> Vec<String> {
        report["policies"].as_array().unwrap().iter().map(|f| f["policy"].as_str().unwrap().to_owned()).collect()
    };
    let kv = |more: &[&str]| replay(&[&["--policy", "kv"], more].concat()).0;
    let plain = kv(&[]);
    let set = kv(&["--set", "router.decode_interference_weight=40"]);
    let from_file = kv(&["--config", file.to_str().unwrap()]);
    assert_ne!(plain["policies"], set["policies"], "--set has an effect");
    assert_eq!(set["policies"], from_file["policies"]);
    assert_eq!((&set["router"]["decode_interference_weight"], plain.get("router")), (&json!(40.0), None));
    assert_eq!((&plain["resync_delay_s"], &plain["rebalance"]), (&json!(0.05), &json!(false)));
    // Policies of the flag, each once; else the policy of the configuration; else all policies.
    assert_eq!(policies(&kv(&["--policy", "kv,random,kv"])), ["kv", "random"]);
    let composed = "router.policy={score=[{term=queue}]}";
    assert_eq!(policies(&replay(&["--policy", "kv,composed", "--set", composed]).0), ["kv", "composed"]);
    assert_eq!(policies(&replay(&["--set", composed]).0), ["composed"]);
    assert_eq!(policies(&replay(&["--set", "router.policy=session"]).0), ["session"]);
    assert_eq!(policies(&replay(&["--set", "router.decode_interference_weight=2"]).0).len(), 13);
    let planner = ["--workers", "prefill:2,decode:2", "--set", "router.planner.mode=apply"];
    let disaggregated =
        blockyard(&[&["replay", "--rate", "40", "--policy", "kv", "--json"], &planner[..]].concat(), &run);
    let report: Value = serde_json::from_slice(&disaggregated.stdout).unwrap();
    assert!(report["rebalance"] == true && report["policies"][0]["role_changes"].is_u64(), "{report:#}");
    // Errors have the words of `serve`.
    for (setting, expected) in [
        ("router.index_memry=1GiB", "unknown key `router.index_memry` (--set router.index_memry=1GiB); did you mean"),
        ("router.policy=kvv", "router.policy = \"kvv\""),
        ("router.decode_interference_weight=-1", "router.decode_interference_weight = -1"),
    ] {
        let (_, error) = replay(&["--set", setting]);
        assert!(error.contains(expected), "{error}");
    }
}
