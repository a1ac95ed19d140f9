//! The results of all policies for one class and load, and where `kv` stands among them.

use crate::suite::number;
use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The policy under test.
pub(super) const OURS: &str = "kv";
/// The policy under test without copies of prefixes ahead of demand, as `--prefetch both` names it.
pub(super) const WITHOUT_COPIES: &str = "kv (no copies)";
/// The offline search, which is no policy.
const CLAIRVOYANT: &str = "clairvoyant";
/// `kv` may be worse than the best by this share, in each of the times to first token and in goodput.
const CLOSE: f64 = 0.03;
/// The rule for the time between tokens: at most this much longer than that of any policy whose mean time to first
/// token is nearly the lowest.
const CLOSE_ITL: f64 = 0.05;
/// Nearly the lowest mean time to first token.
const NEARLY_LOWEST: f64 = 0.10;
/// Two results are equal when they differ by less: that is below what the table shows.
const EQUAL: f64 = 0.0005;

/// The results of all policies for one class and load.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Cell {
    pub(super) class: String,
    pub(super) load: f64,
    pub(super) rate: f64,
    pub(super) rows: Vec<Row>,
    /// The best that the offline search has found.
    pub(super) clairvoyant: Option<Row>,
}

/// The results of one policy. Times are in seconds.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Row {
    pub(super) policy: String,
    pub(super) ttft_mean_s: f64,
    pub(super) ttft_p99_s: f64,
    pub(super) itl_p50_s: f64,
    /// Share of requests within the SLO.
    pub(super) goodput: f64,
}

/// `kv` beside the other policies in one cell: its results divided by the best of the others.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Standing {
    pub(super) ttft_mean: f64,
    pub(super) ttft_p99: f64,
    pub(super) goodput: f64,
    /// Divided by the shortest of the policies whose mean time to first token is nearly the lowest, and that policy;
    /// `None` if there is no such policy.
    pub(super) itl_p50: Option<(f64, String)>,
    /// Other policies that are within 3 % of the best of them in all three.
    pub(super) others_close: Vec<String>,
    /// Mean and p99 of the time to first token, and goodput, divided by those of the offline search.
    pub(super) clairvoyant: Option<[f64; 3]>,
}

/// The best of each measure, each of which may be of another policy.
struct Best {
    ttft_mean_s: f64,
    ttft_p99_s: f64,
    goodput: f64,
}

impl Best {
    /// Mean and p99 of the time to first token, and goodput, of a policy, divided by the best.
    fn ratios(&self, row: &Row) -> [f64; 3] {
        // Where no policy serves any request in time, all are equal.
        let goodput = if self.goodput > 0.0 { row.goodput / self.goodput } else { 1.0 };
        [row.ttft_mean_s / self.ttft_mean_s, row.ttft_p99_s / self.ttft_p99_s, goodput]
    }
}

/// Whether the ratios of the two times and of the goodput are at most this share worse than 1.
fn are_within([ttft_mean, ttft_p99, goodput]: [f64; 3], share: f64) -> bool {
    ttft_mean <= 1.0 + share && ttft_p99 <= 1.0 + share && goodput >= 1.0 - share
}

/// The cells of a report of `blockyard replay`.
pub(super) fn cells_of(class: &str, report: &Value) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    for results in report["policies"].as_array().context("no policies")? {
        let (load, rate) = (number(&results["load_factor"])?, number(&results["rate_rps"])?);
        let row = Row {
            policy: results["policy"].as_str().context("no name of a policy")?.to_owned(),
            ttft_mean_s: number(&results["ttft_mean_s"])?,
            ttft_p99_s: number(&results["ttft_p99_s"])?,
            itl_p50_s: number(&results["itl_p50_s"])?,
            goodput: number(&results["slo_attainment"])?,
        };
        if cells.last().is_none_or(|cell| cell.load.to_bits() != load.to_bits()) {
            cells.push(Cell { class: class.to_owned(), load, rate, rows: Vec::new(), clairvoyant: None });
        }
        let cell = cells.last_mut().context("no cell")?;
        if row.policy == CLAIRVOYANT {
            cell.clairvoyant = Some(row);
        } else {
            cell.rows.push(row);
        }
    }
    Ok(cells)
}

impl Cell {
    /// `None` if `kv` or every other policy was not replayed.
    pub(super) fn standing(&self) -> Option<Standing> {
        let ours = self.rows.iter().find(|row| row.policy == OURS)?;
        let others = || self.rows.iter().filter(|row| row.policy != OURS);
        let least = |of: fn(&Row) -> f64| others().map(of).min_by(f64::total_cmp);
        let best = Best {
            ttft_mean_s: least(|row| row.ttft_mean_s)?,
            ttft_p99_s: least(|row| row.ttft_p99_s)?,
            goodput: others().map(|row| row.goodput).max_by(f64::total_cmp)?,
        };
        let [ttft_mean, ttft_p99, goodput] = best.ratios(ours);
        let nearly_lowest = best.ttft_mean_s.min(ours.ttft_mean_s) * (1.0 + NEARLY_LOWEST);
        let near = others().filter(|row| row.ttft_mean_s <= nearly_lowest);
        let steadiest = near.min_by(|a, b| a.itl_p50_s.total_cmp(&b.itl_p50_s));
        let close = others().filter(|row| are_within(best.ratios(row), CLOSE));
        let of_search = |row: &Row| {
            Best { ttft_mean_s: row.ttft_mean_s, ttft_p99_s: row.ttft_p99_s, goodput: row.goodput }.ratios(ours)
        };
        Some(Standing {
            ttft_mean,
            ttft_p99,
            goodput,
            others_close: close.map(|row| row.policy.clone()).collect(),
            clairvoyant: self.clairvoyant.as_ref().map(of_search),
            itl_p50: steadiest.map(|row| (ours.itl_p50_s / row.itl_p50_s, row.policy.clone())),
        })
    }

    /// Mean and p99 of the time to first token, and goodput, of `kv` with copies ahead of demand, divided by those
    /// without.
    pub(super) fn with_copies(&self) -> Option<[f64; 3]> {
        let of = |policy: &str| self.rows.iter().find(|row| row.policy == policy);
        let (with, without) = (of(OURS)?, of(WITHOUT_COPIES)?);
        let goodput = if without.goodput > 0.0 { with.goodput / without.goodput } else { 1.0 };
        Some([with.ttft_mean_s / without.ttft_mean_s, with.ttft_p99_s / without.ttft_p99_s, goodput])
    }

    pub(super) fn as_json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "policy": row.policy, "ttft_mean_s": row.ttft_mean_s, "ttft_p99_s": row.ttft_p99_s,
                "itl_p50_s": row.itl_p50_s, "goodput": row.goodput,
            })
        });
        let standing = self.standing().map(|kv| {
            json!({
                "ttft_mean": kv.ttft_mean, "ttft_p99": kv.ttft_p99, "goodput": kv.goodput,
                "itl_p50": kv.itl_p50.as_ref().map(|(ratio, _)| ratio),
                "clairvoyant": kv.clairvoyant, "close": kv.is_close(), "others_close": kv.others_close,
                "best": kv.is_best(), "steady": kv.is_steady(),
            })
        });
        let (class, load, rate) = (&self.class, self.load, self.rate);
        json!({ "class": class, "load": load, "rate_rps": rate, "kv": standing, "policies": rows.collect::<Vec<_>>() })
    }
}

impl Standing {
    /// Within 3 % of the best policy, or better, in all three measures.
    pub(super) fn is_close(&self) -> bool {
        self.is_within(CLOSE)
    }

    /// The best policy in all three measures, or equal to it.
    pub(super) fn is_best(&self) -> bool {
        self.is_within(EQUAL)
    }

    fn is_within(&self, share: f64) -> bool {
        are_within([self.ttft_mean, self.ttft_p99, self.goodput], share)
    }

    /// Within 3 % in all three measures, or no policy is: what is best in one of them is worse in another.
    pub(super) fn is_close_or_none_is(&self) -> bool {
        self.is_close() || self.others_close.is_empty()
    }

    /// The best mean time to first token, or equal to it.
    pub(super) fn has_best_mean(&self) -> bool {
        self.ttft_mean <= 1.0 + EQUAL
    }

    /// The best p99 of the time to first token, or equal to it.
    pub(super) fn has_best_p99(&self) -> bool {
        self.ttft_p99 <= 1.0 + EQUAL
    }

    /// The best goodput, or equal to it.
    pub(super) fn has_best_goodput(&self) -> bool {
        self.goodput >= 1.0 - EQUAL
    }

    /// Whether the rule for the time between tokens holds.
    pub(super) fn is_steady(&self) -> bool {
        self.itl_p50.as_ref().is_none_or(|(ratio, _)| *ratio <= 1.0 + CLOSE_ITL)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tables::{bounds_table, farthest_from_bound};
    use super::*;

    pub(in super::super) fn row(policy: &str, ttft_mean_s: f64, itl_p50_s: f64, goodput: f64) -> Row {
        Row { policy: policy.into(), ttft_mean_s, ttft_p99_s: 10.0 * ttft_mean_s, itl_p50_s, goodput }
    }

    fn standing(rows: &[Row]) -> Standing {
        Cell { class: "chat@16".into(), load: 1.0, rate: 9.0, rows: rows.to_vec(), clairvoyant: None }
            .standing()
            .unwrap()
    }

    #[test]
    fn kv_is_compared_with_the_best_of_each_measure() {
        let kv =
            standing(&[row("kv", 1.02, 0.01, 0.9), row("random", 2.0, 0.01, 0.92), row("session", 1.0, 0.02, 0.5)]);
        assert!((kv.ttft_mean - 1.02).abs() < 1e-9 && (kv.goodput - 0.9 / 0.92).abs() < 1e-9, "{kv:?}");
        assert!(kv.is_close() && !kv.is_best(), "{kv:?}");
        assert!(standing(&[row("kv", 1.0, 0.01, 0.0), row("random", 1.0, 0.01, 0.0)]).is_best());
        assert!(!standing(&[row("kv", 1.04, 0.01, 0.9), row("random", 1.0, 0.01, 0.9)]).is_close());
    }

    #[test]
    fn time_between_tokens_is_compared_with_policies_of_nearly_the_lowest_first_token() {
        let kv = |others: &[Row]| standing(&[&[row("kv", 1.0, 0.012, 0.9)], others].concat());
        assert!(kv(&[row("random", 1.2, 0.01, 0.9)]).itl_p50.is_none());
        let near = kv(&[row("random", 1.05, 0.01, 0.9), row("session", 1.0, 0.012, 0.9)]);
        assert!(near.itl_p50 == Some((0.012 / 0.01, "random".into())) && !near.is_steady(), "{near:?}");
    }

    #[test]
    fn cells_are_read_from_a_report() {
        let results = |policy: &str, load: f64| {
            json!({
                "policy": policy, "load_factor": load, "rate_rps": 10.0 * load, "ttft_mean_s": 0.5, "ttft_p99_s": 2.0,
                "itl_p50_s": 0.01, "slo_attainment": 0.9,
            })
        };
        let all =
            [("kv", 0.6), ("random", 0.6), ("clairvoyant", 0.6), ("kv", 1.2)].map(|(name, load)| results(name, load));
        let cells = cells_of("chat@16", &json!({ "policies": all })).unwrap();
        assert_eq!(cells[0].standing().unwrap().clairvoyant, Some([1.0; 3]));
        assert_eq!(cells.iter().map(|cell| (cell.load, cell.rows.len())).collect::<Vec<_>>(), [(0.6, 2), (1.2, 1)]);
        assert!(cells[1].standing().is_none() && cells_of("chat@16", &json!({})).is_err());
        assert!(bounds_table(&cells).contains("1.000") && !bounds_table(&cells).contains("1.20"), "of the first only");
        assert!(farthest_from_bound(cells.iter()).is_some() && farthest_from_bound(cells[1..].iter()).is_none());
    }

    #[test]
    fn a_cell_in_which_no_policy_is_close_to_the_best_of_all_measures_is_no_defeat() {
        // The lowest times and the highest goodput are of two policies.
        let mut rows = vec![row("kv", 1.0, 0.01, 0.5), row("random", 1.0, 0.01, 0.4), row("session", 2.0, 0.01, 0.9)];
        let kv = standing(&rows);
        assert!(!kv.is_close() && kv.others_close.is_empty() && kv.is_close_or_none_is(), "{kv:?}");
        rows.push(row("least-loaded", 1.02, 0.01, 0.89));
        let kv = standing(&rows);
        assert!(kv.others_close == ["least-loaded"] && !kv.is_close_or_none_is(), "{kv:?}");
    }
}
