//! The dashboard, the alerts and the recording rules in `deploy` ask for series that the program exposes.
//!
//! `metrics.rs` checks that `docs/metrics.md` lists exactly these.

use serde_json::Value;
use std::collections::BTreeMap;

const DASHBOARD: &str = include_str!("../../deploy/grafana/blockyard.json");
const ALERTS: &str = include_str!("../../deploy/prometheus/alerts.yaml");
const RULES: &str = include_str!("../../deploy/prometheus/rules.yaml");
const PAGE: &str = include_str!("../../docs/metrics.md");

/// Type and labels of each documented metric. Tables have the columns name, type and labels.
fn documented() -> BTreeMap<String, (String, String)> {
    let row = |line: &str| {
        let cells: Vec<String> =
            line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        Some((cells.first()?.clone(), (cells.get(1)?.clone(), cells.get(2)?.clone())))
    };
    PAGE.lines().filter_map(row).collect()
}

/// The names and labels in an expression: words that no quote, `[` or function call is around.
fn words(expression: &str) -> Vec<String> {
    let mut quoted = false;
    let cleaned: String = expression
        .chars()
        .map(|c| {
            quoted ^= c == '"';
            if !quoted && (c.is_ascii_alphanumeric() || c == '_') { c } else { ' ' }
        })
        .collect();
    cleaned.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn is_metric(word: &str) -> bool {
    word.starts_with("blockyard_") || word.starts_with("process_")
}

/// Labels that Prometheus adds, and the bounds of buckets.
const ADDED_LABELS: [&str; 4] = ["instance", "job", "namespace", "le"];

/// The labels that selectors compare, `{label="value"}`. No value in these files contains a comma.
fn matched_labels(expression: &str) -> Vec<&str> {
    let selectors = expression.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let matchers = selectors.flat_map(|selector| selector.split(','));
    matchers.filter_map(|matcher| Some(matcher.split_once(['=', '!'])?.0.trim())).collect()
}

fn check(expression: &str) {
    let documented = documented();
    let metrics: Vec<String> = words(expression).into_iter().filter(|word| is_metric(word)).collect();
    // Prometheus makes `up` itself.
    assert!(!metrics.is_empty() || words(expression).iter().any(|word| word == "up"), "{expression}");
    let mut labels = String::new();
    for metric in metrics {
        let histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(|suffix| metric.strip_suffix(suffix));
        let name = histogram.filter(|name| documented.contains_key(*name)).unwrap_or(&metric);
        let (kind, of_metric) =
            documented.get(name).unwrap_or_else(|| panic!("no metric {metric} is exposed:\n  {expression}"));
        assert_eq!(kind == "histogram", name != metric, "{metric} is a {kind}:\n  {expression}");
        let needs_rate = kind == "counter" || kind == "histogram";
        let has_rate =
            expression.contains(&format!("rate({metric}")) || expression.contains(&format!("increase({metric}"));
        assert_eq!(needs_rate, has_rate, "{metric} is a {kind}:\n  {expression}");
        labels += of_metric;
        labels += ",";
    }
    let labels: Vec<&str> = labels.split(',').map(str::trim).collect();
    for label in matched_labels(expression) {
        let is_known = labels.contains(&label) || ADDED_LABELS.contains(&label);
        assert!(is_known, "no label {label}:\n  {expression}");
    }
    let groups = [" by (", " without ("].into_iter().flat_map(|word| expression.split(word).skip(1));
    for group in groups.filter_map(|rest| rest.split(')').next()) {
        for label in group.split(',').map(str::trim) {
            let is_known = labels.contains(&label) || ADDED_LABELS.contains(&label);
            assert!(is_known, "no label {label}:\n  {expression}");
        }
    }
}

#[test]
fn every_panel_asks_for_series_that_exist() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let mut count = 0;
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        check(expression);
        let series = words(expression).into_iter().filter(|word| is_metric(word)).count();
        let selected = expression.matches(r#"{job=~"$job",namespace=~"$namespace""#).count();
        assert_eq!(selected, series, "each series needs the job and the namespace:\n  {expression}");
        count += 1;
    }
    assert!(count > 50, "{count} queries");
}

#[test]
fn every_alert_asks_for_series_that_exist() {
    let expressions: Vec<&str> = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect();
    assert_eq!(expressions.len(), ALERTS.matches("- alert: ").count());
    for expression in expressions {
        check(expression);
        // `by (instance)` drops the labels by which Alertmanager routes, and adds up pods of one name in several
        // namespaces.
        assert!(!expression.contains("by (instance"), "use `without (…)`:\n  {expression}");
    }
}

#[test]
fn every_recording_rule_asks_for_series_that_exist() {
    let expressions: Vec<&str> = RULES.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect();
    assert_eq!(expressions.len(), RULES.matches("- record: ").count());
    for expression in expressions {
        check(expression);
        // Otherwise the deployments in several namespaces would add up.
        let keeps_both = expression.split("sum").skip(1).all(|rest| rest.starts_with(" by (job, namespace"));
        assert!(keeps_both, "use `sum by (job, namespace…)`:\n  {expression}");
    }
}

#[test]
#[should_panic(expected = "no label roles")]
fn a_wrong_label_is_found() {
    check("sum without (roles) (blockyard_router_workers)");
}

#[test]
#[should_panic(expected = "no label rolle")]
fn a_wrong_label_of_a_selector_is_found() {
    check(r#"sum(blockyard_router_workers{rolle!="both"})"#);
}

#[test]
#[should_panic(expected = "no metric blockyard_router_wrokers is exposed")]
fn a_wrong_name_is_found() {
    check("sum(blockyard_router_wrokers)");
}
