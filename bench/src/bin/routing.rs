//! Prompt tokens that the fleet computes under each routing policy for conversations that share a system prompt,
//! compared with the lower bound: first with the workers' own memory only, then with lower tiers.

use anyhow::{Context, Result, anyhow};
use bench::client::{Answer, Client};
use bench::conversation::{Shape, Turn, lower_bound, script};
use bench::options::Options;
use bench::prompt::Source;
use bench::report::{circumstances, describe, median, short, table};
use bench::server::{Server, Settings};
use serde_json::{Value, json};
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;

const SHAPE: Shape = Shape {
    conversations: 8,
    turns: 10,
    system: 500,
    user: 200,
    reply: 100,
    max_think_time: Duration::from_millis(200),
};

/// Tokens of each answer. Answers are not used: later prompts contain the replies of the script.
const ANSWER_TOKENS: u32 = 16;

/// Tokens per block, the server's default.
const BLOCK: usize = 16;

const POLICIES: [&str; 5] = ["kv", "round-robin", "least-loaded", "random", "power-of-two"];

/// Results of one policy.
struct Run {
    policy: &'static str,
    tiers: bool,
    prompt_tokens: u64,
    /// Prompt tokens computed by all workers, from their metrics.
    computed: u64,
    /// Requests that each worker answered.
    requests_per_worker: Vec<u64>,
    first_token: Duration,
}

const ABOUT: &str = "Prompt tokens computed under each routing policy, compared with the lower bound.";

fn main() -> Result<()> {
    let options = Options::from_args(ABOUT)?;
    let mut source = Source::new(options.seed.unwrap_or_else(Source::fresh_seed));
    let script = script(SHAPE, &mut source);
    let bound = lower_bound(script.iter().flatten().map(|turn| &turn.prompt), BLOCK);
    let mut runs = Vec::new();
    for tiers in [false, true] {
        for policy in POLICIES {
            eprintln!("{policy}, tiers below G1 {}", if tiers { "on" } else { "off" });
            runs.push(run(&options, &script, policy, tiers)?);
        }
    }
    let circumstances = circumstances();
    if options.json {
        println!("{:#}", as_json(&options, &circumstances, bound, &runs));
    } else {
        print(&options, &circumstances, bound, &runs);
    }
    Ok(())
}

/// Runs the script against a fresh server. Conversations start one by one, each after the first answer of the one
/// before; then all run concurrently, each waiting for its own answers.
fn run(options: &Options, script: &[Vec<Turn>], policy: &'static str, tiers: bool) -> Result<Run> {
    let folder = TempDir::with_prefix("blockyard-bench-")?;
    let config = config(policy, tiers);
    let settings = Settings { binary: &options.binary, model: &options.model, data: folder.path(), config };
    let server = Server::start(&settings)?;
    let model = server.client.model()?;
    let answers = std::thread::scope(|scope| {
        let mut conversations = Vec::new();
        for turns in script {
            let (started, next_may_start) = mpsc::channel();
            let (client, model) = (&server.client, &model);
            conversations.push(scope.spawn(move || converse(client, model, turns, &started)));
            // An error in the first answer drops the sender; `converse` reports it.
            let _ = next_may_start.recv();
        }
        let finished =
            conversations.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a conversation panicked"))?);
        finished.collect::<Result<Vec<_>>>()
    });
    let answers = answers.with_context(|| format!("policy {policy}\n{}", server.log_tail()))?.concat();
    let metrics = server.client.metrics()?;
    let computed = metrics.sum("blockyard_worker_prompt_tokens_computed_total", &[]) as u64;
    let generated = metrics.by("blockyard_worker_generated_tokens_total", "worker");
    let requests_per_worker = generated.into_values().map(|tokens| tokens as u64 / u64::from(ANSWER_TOKENS)).collect();
    server.stop()?;
    let prompt_tokens = answers.iter().map(|answer| answer.prompt_tokens).sum();
    let times: Vec<_> = answers.iter().map(|answer| answer.first_token).collect();
    Ok(Run { policy, tiers, prompt_tokens, computed, requests_per_worker, first_token: median(&times) })
}

fn converse(client: &Client, model: &str, turns: &[Turn], started: &mpsc::Sender<()>) -> Result<Vec<Answer>> {
    let mut answers = Vec::with_capacity(turns.len());
    for turn in turns {
        std::thread::sleep(turn.think_time);
        answers.push(client.complete(model, &turn.prompt, ANSWER_TOKENS)?);
        // After the first answer the receiver is gone.
        let _ = started.send(());
    }
    Ok(answers)
}

fn config(policy: &str, tiers: bool) -> String {
    let lower = if tiers { "" } else { "[tiers]\ng2 = \"off\"\ng3 = \"off\"\n" };
    format!("workers = \"decode:2\"\n{lower}[router]\npolicy = \"{policy}\"\n")
}

fn print(options: &Options, circumstances: &Value, bound: u64, runs: &[Run]) {
    let Shape { conversations, turns, system, .. } = SHAPE;
    println!("{conversations} conversations of {turns} turns that share a system prompt of {system} tokens,");
    println!("two decode workers, {}", options.model);
    println!("{}\n", describe(circumstances));
    for tiers in [false, true] {
        println!("tiers below G1 {}", if tiers { "on" } else { "off" });
        let rows: Vec<_> = runs.iter().filter(|run| run.tiers == tiers).map(|run| row(run, bound)).collect();
        println!(
            "{}",
            table(&["policy", "prompt tokens", "computed", "÷ bound", "requests", "median first token"], &rows)
        );
    }
    println!("lower bound: {bound} tokens (each distinct block once, and the partial last block of each prompt)");
}

fn row(run: &Run, bound: u64) -> Vec<String> {
    let ratio = format!("{:.3}", run.computed as f64 / bound as f64);
    let requests: Vec<_> = run.requests_per_worker.iter().map(u64::to_string).collect();
    vec![
        run.policy.into(),
        run.prompt_tokens.to_string(),
        run.computed.to_string(),
        ratio,
        requests.join(" + "),
        short(run.first_token),
    ]
}

fn as_json(options: &Options, circumstances: &Value, bound: u64, runs: &[Run]) -> Value {
    let runs: Vec<Value> = runs
        .iter()
        .map(|run| {
            json!({
                "policy": run.policy, "tiers_below_g1": run.tiers, "prompt_tokens": run.prompt_tokens,
                "computed_tokens": run.computed, "times_bound": run.computed as f64 / bound as f64,
                "requests_per_worker": run.requests_per_worker,
                "median_first_token_seconds": run.first_token.as_secs_f64(),
            })
        })
        .collect();
    json!({
        "benchmark": "routing", "model": options.model, "circumstances": circumstances,
        "lower_bound_tokens": bound, "runs": runs,
    })
}
