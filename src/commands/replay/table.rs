//! The results of a replay as JSON and as a table.

use crate::commands::output::count;
use router::Settings;
use router::replay::{Copies, Planned, PlannedTarget, Results};
use serde::Serialize;

/// Columns of the table for names of policies, if none is longer.
const POLICY_WIDTH: usize = 16;

/// What `--json` prints.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    pub(super) profile: &'a str,
    pub(super) workers: usize,
    /// Number of workers of each role, unless all have the role `both`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) roles: Option<String>,
    #[serde(skip)]
    pub(super) fleet: String,
    pub(super) replicas: usize,
    /// Class of the generated requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) workload: Option<String>,
    pub(super) requests: usize,
    /// Not known of generated requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) recorded_rps: Option<f64>,
    pub(super) hit_rate_bound: f64,
    pub(super) capacity_rps: Option<f64>,
    pub(super) event_delay_s: f64,
    pub(super) event_loss: f64,
    pub(super) event_loss_until: f64,
    pub(super) resync_delay_s: f64,
    pub(super) rebalance: bool,
    /// What `--prefetch` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prefetch: Option<&'static str>,
    /// The `[router]` section of the given configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) router: Option<&'a Settings>,
    pub(super) slo_ttft_s: f64,
    pub(super) slo_itl_s: f64,
    pub(super) admission: &'static str,
    pub(super) runs: u64,
    pub(super) seed: u32,
    pub(super) policies: Vec<Results>,
}

/// The report as text.
pub(super) fn table(report: &Report<'_>) -> String {
    let Report { fleet, profile, requests, hit_rate_bound: bound, .. } = report;
    let capacity = report.capacity_rps.map_or(String::new(), |capacity| format!(", capacity {capacity:.2} requests/s"));
    let requests = count(*requests as u64, "request");
    let mut lines = vec![
        format!("{fleet} × {profile}, {requests}, hit rate at most {:.1} %{capacity}\n", bound * 100.0),
        " load   req/s policy             hit   TTFT mean     p50     p90     p99   ITL p50   p90   p99  goodput  \
         \x20 SLO  imbal"
            .to_owned(),
    ];
    if report.roles.is_some() {
        lines[1] += "  remote";
    }
    if report.policies.iter().any(|results| results.role_changes.is_some()) {
        lines[1] += " roles";
    }
    let names = report.policies.iter().map(|results| results.policy.len()).max().unwrap_or(0).max(POLICY_WIDTH);
    lines[1] = lines[1].replace("policy", &format!("{:<width$}", "policy", width = 6 + names - POLICY_WIDTH));
    lines.extend(report.policies.iter().map(|results| row(results, names)));
    lines.extend(report.policies.iter().filter_map(planned));
    lines.extend(report.policies.iter().filter_map(copies));
    let rejected = report.policies.iter().map(|f| f.rejected).max().filter(|rejected| *rejected > 0);
    let why = if report.admission == "off" {
        "did not fit on any worker"
    } else {
        "at most were rejected, or did not fit on any worker"
    };
    let rejected = rejected.map(|rejected| count(rejected, "request"));
    lines.extend(rejected.map(|rejected| format!("\n{rejected} {why}; times are those of the others.")));
    lines.join("\n") + "\n"
}

/// What the planner advised, and the targets that it missed.
fn planned(results: &Results) -> Option<String> {
    let Planned { prefill_workers, decode_workers, max_workers, ttft, itl } = results.planned?;
    let missed = |(name, target): (&str, PlannedTarget)| {
        let PlannedTarget { target_s, missed, expected_s, .. } = target;
        let expected = if expected_s > 0.0 { format!("up to {expected_s:.3} s") } else { "overload".to_owned() };
        let share = missed * 100.0;
        (missed > 0.0).then(|| format!("; {name} of {target_s} s missed in {share:.0} % of the plans ({expected})"))
    };
    let missed: String =
        [("time to first token", ttft), ("time between tokens", itl)].into_iter().filter_map(missed).collect();
    Some(format!(
        "\n{} at {:.2}/s: planned up to {prefill_workers} prefill and {decode_workers} decode workers, {max_workers} \
         together at most{missed}",
        results.policy, results.rate_rps
    ))
}

/// What became of the copies ahead of demand.
fn copies(results: &Results) -> Option<String> {
    let Copies { ordered, completed, failed, used, unused, copied_tokens, copied_bytes, used_tokens } =
        results.copies?;
    let gigabytes = copied_bytes as f64 / 1e9;
    Some(format!(
        "\n{} at {:.2}/s: {} ahead of demand, {completed} completed, {failed} failed; {used} used, {unused} not used; \
         {copied_tokens} tokens ({gigabytes:.1} GB) copied, {used_tokens} of them used",
        results.policy,
        results.rate_rps,
        if ordered == 1 { "1 copy was ordered".to_owned() } else { format!("{ordered} copies were ordered") }
    ))
}

/// A line of the table, with this many columns for the name of the policy.
fn row(f: &Results, width: usize) -> String {
    let load = f.load_factor.map_or(String::new(), |load| format!("{load:.2}"));
    let ttft = if f.ttft_mean_s.is_nan() {
        format!("{:>8}   {:>7} {:>7} {:>7}", "-", "-", "-", "-")
    } else {
        format!("{:8.3} s {:7.3} {:7.3} {:7.3}", f.ttft_mean_s, f.ttft_p50_s, f.ttft_p90_s, f.ttft_p99_s)
    };
    let itl = if f.itl_p50_s.is_nan() {
        format!("{:>6}    {:>5} {:>5}", "-", "-", "-")
    } else {
        format!("{:6.1} ms {:5.1} {:5.1}", f.itl_p50_s * 1e3, f.itl_p90_s * 1e3, f.itl_p99_s * 1e3)
    };
    let good = format!("{:6.2}/s {:4.0} %", f.goodput_rps, f.slo_attainment * 100.0);
    let hit = f.hit_rate * 100.0;
    let share = |remote: u64| format!(" {:5.1} %", remote as f64 * 100.0 / f.completed.max(1) as f64);
    let changes = |changes: u64| format!(" {changes:5}");
    let disaggregated =
        f.remote_prefills.map(share).unwrap_or_default() + &f.role_changes.map(changes).unwrap_or_default();
    format!(
        "{load:>5} {:7.2} {:<width$} {hit:4.1} % {ttft} {itl} {good} {:6.2}{disaggregated}",
        f.rate_rps, f.policy, f.imbalance
    )
}
