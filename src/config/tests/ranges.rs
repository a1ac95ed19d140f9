//! The range of each number.

use super::*;

/// Numeric keys that may be zero, and why.
const MAY_BE_ZERO: [&str; 8] = [
    "frontend.shutdown_delay",            // closes at once
    "router.decode_interference_weight",  // looks at the first token only
    "router.seed",                        // any number is a seed
    "router.admission.max_queued_tokens", // nothing waits
    "router.admission.max_queue_time",    // nothing waits
    "frontend.tenant_metrics",            // no metrics of tenants
    "listen",                             // port 0: the system chooses
    "tracing.sample_ratio",               // records only what clients ask for
];

#[test]
fn numeric_keys_refuse_values_out_of_range() {
    let refuses = |key: &str, value: &str| {
        let (table, name) = key.rsplit_once('.').map_or((String::new(), key), |(t, name)| (format!("[{t}]\n"), name));
        let file = file(&format!("{table}{name} = {value}\n"));
        let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
        Config::load_to_serve(&sources).is_err()
    };
    let mut checked = 0;
    for (key, default) in defaults() {
        let Some(default) = default else { continue };
        let text = default.trim_matches('"');
        let unit = if text.parse::<f64>().is_ok() {
            ""
        } else if text.parse::<HumanDuration>().is_ok() {
            "s"
        } else if text.parse::<ByteSize>().is_ok() {
            "GiB"
        } else {
            continue;
        };
        let quoted = |number: &str| if unit.is_empty() { number.to_owned() } else { format!("'{number}{unit}'") };
        for number in ["-1", "nan", "inf", "-inf", "1e300"] {
            assert!(refuses(&key, &quoted(number)), "{key} = {}", quoted(number));
        }
        let zero = if default.contains('.') && unit.is_empty() { "0.0" } else { "0" };
        assert_eq!(refuses(&key, &quoted(zero)), !MAY_BE_ZERO.contains(&key.as_str()), "{key} = {}", quoted(zero));
        checked += 1;
    }
    assert!(checked >= 24, "only {checked} keys were found to be numeric");
}

#[test]
fn optional_numbers_refuse_zero_and_absurd_values() {
    for text in [
        "[tiers.g4]\ncapacity = '0'",
        "[tiers.g4]\nmax_age = '0s'",
        "[frontend]\nmax_request_time = '0s'",
        "[frontend]\nmax_request_time = '25h'",
        "[tiers]\ng2 = -1",
        "[tiers]\ng3 = 1e300",
        "[tiers]\ng2 = nan",
        "[tiers]\ng3_5 = { path = '/mnt', capacity = '0' }",
        "[tiers]\ng3_5 = { path = '/mnt', capacity = '1GiB', max_age = '0s' }",
        "[tiers]\nquotas = [{ tenant = 'a', weight = 0.0 }]",
        "[tiers]\nquotas = [{ tenant = 'a', weight = 1e300 }]",
        "[router]\npolicy = { score = [{ term = 'queue', weight = nan }] }",
        "[router]\npolicy = { filter = [{ queue_below = '0s' }], score = [{ term = 'queue' }] }",
        "[router.admission.tenants.\"*\"]\nmax_inflight_tokens = 0",
        "[router.admission.tenants.\"*\"]\nweight = nan",
        "[router.models.small]\ndecode_interference_weight = 1e300",
        "threads = 100000000",
    ] {
        let _ = refused_to_serve(text);
    }
}
