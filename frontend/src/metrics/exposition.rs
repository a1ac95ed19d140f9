//! The metrics of a registry as text: the Prometheus text format, or OpenMetrics 1.0 when the client prefers it.
//!
//! OpenMetrics differs in four points: a counter's family has no `_total`, bucket bounds are written as floating-point
//! numbers, help escapes double quotes too, and the text ends with `# EOF`.

use axum::http::HeaderMap;
use axum::http::header::ACCEPT;
use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Registry, TEXT_FORMAT, TextEncoder};
use std::fmt::Write;

/// A format of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// The Prometheus text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

/// The name of OpenMetrics in `Accept`.
const OPEN_METRICS: &str = "application/openmetrics-text";
/// The versions of OpenMetrics that this text satisfies; 0.0.1 is the draft that older Prometheus servers ask for.
const OPEN_METRICS_VERSIONS: [&str; 2] = ["1.0.0", "0.0.1"];

impl Format {
    pub(super) const ALL: [Self; 2] = [Self::Prometheus, Self::OpenMetrics];

    /// The format that the client prefers. Without `Accept`, or with one that names neither, the Prometheus format.
    pub(crate) fn negotiated(headers: &HeaderMap) -> Self {
        let (mut open_metrics, mut text) = (0.0_f64, 0.0_f64);
        for header in headers.get_all(ACCEPT) {
            for range in header.to_str().unwrap_or_default().split(',') {
                let mut parts = range.split(';').map(str::trim);
                let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
                let (mut quality, mut version) = (1.0_f64, None);
                for (name, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
                    match name.trim() {
                        "q" => quality = value.trim().parse().unwrap_or(0.0),
                        "version" => version = Some(value.trim().trim_matches('"').to_owned()),
                        _ => {}
                    }
                }
                match kind.as_str() {
                    OPEN_METRICS if version.is_none_or(|v| OPEN_METRICS_VERSIONS.contains(&v.as_str())) => {
                        open_metrics = open_metrics.max(quality);
                    }
                    "text/plain" | "text/*" | "*/*" => text = text.max(quality),
                    _ => {}
                }
            }
        }
        if open_metrics > 0.0 && open_metrics >= text { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// What goes into `Content-Type`.
    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => TEXT_FORMAT,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// All metrics of the registry in this format.
    pub(crate) fn write(self, registry: &Registry) -> Result<String, prometheus::Error> {
        let families = registry.gather();
        match self {
            Self::Prometheus => TextEncoder::new().encode_to_string(&families),
            Self::OpenMetrics => Ok(open_metrics(&families)),
        }
    }
}

fn open_metrics(families: &[MetricFamily]) -> String {
    let mut text = String::new();
    for family in families {
        let kind = family.get_field_type();
        let name = match kind {
            MetricType::COUNTER => family.name().strip_suffix("_total").unwrap_or(family.name()),
            _ => family.name(),
        };
        let kind_name = match kind {
            MetricType::COUNTER => "counter",
            MetricType::GAUGE => "gauge",
            MetricType::HISTOGRAM => "histogram",
            MetricType::SUMMARY => "summary",
            MetricType::UNTYPED => "unknown",
        };
        // `fmt::Write` on a string cannot fail.
        let _ = writeln!(text, "# TYPE {name} {kind_name}");
        if !family.help().is_empty() {
            let _ = writeln!(text, "# HELP {name} {}", escaped(family.help()));
        }
        for metric in family.get_metric() {
            samples(&mut text, name, kind, metric);
        }
    }
    text.push_str("# EOF\n");
    text
}

fn samples(text: &mut String, name: &str, kind: MetricType, metric: &Metric) {
    let labels = metric.get_label();
    match kind {
        MetricType::COUNTER => sample(text, name, "_total", labels, None, metric.get_counter().get_value()),
        MetricType::HISTOGRAM => {
            let histogram = metric.get_histogram();
            let count = histogram.get_sample_count();
            let finite = histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
            let buckets = finite.map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
            for (bound, count) in buckets.chain([(f64::INFINITY, count)]) {
                sample(text, name, "_bucket", labels, Some(("le", bound)), count as f64);
            }
            sample(text, name, "_sum", labels, None, histogram.get_sample_sum());
            sample(text, name, "_count", labels, None, count as f64);
        }
        MetricType::SUMMARY => {
            let summary = metric.get_summary();
            for quantile in summary.get_quantile() {
                sample(text, name, "", labels, Some(("quantile", quantile.quantile())), quantile.value());
            }
            sample(text, name, "_sum", labels, None, summary.sample_sum());
            sample(text, name, "_count", labels, None, summary.sample_count() as f64);
        }
        MetricType::GAUGE | MetricType::UNTYPED => sample(text, name, "", labels, None, metric.get_gauge().get_value()),
    }
}

/// One line. `bound` is the label that a bucket or a quantile has beside the metric's own.
fn sample(text: &mut String, name: &str, suffix: &str, labels: &[LabelPair], bound: Option<(&str, f64)>, value: f64) {
    text.push_str(name);
    text.push_str(suffix);
    let own = labels.iter().map(|label| (label.name(), escaped(label.value())));
    let mut opening = '{';
    for (name, value) in own.chain(bound.map(|(name, bound)| (name, number(bound)))) {
        let _ = write!(text, "{opening}{name}=\"{value}\"");
        opening = ',';
    }
    if opening == ',' {
        text.push('}');
    }
    let _ = writeln!(text, " {value}", value = if value.is_infinite() { number(value) } else { value.to_string() });
}

/// A bound as OpenMetrics writes it: always recognisable as a floating-point number.
fn number(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.into();
    }
    format!("{value:?}")
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts};

    fn accepting(accept: &[&str]) -> Format {
        let mut headers = HeaderMap::new();
        for value in accept {
            headers.append(ACCEPT, value.parse().unwrap());
        }
        Format::negotiated(&headers)
    }

    #[test]
    fn the_format_follows_the_accept_header() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                          application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let cases: [(&[&str], Format); 8] = [
            (&[], Format::Prometheus),
            (&["*/*"], Format::Prometheus),
            (&["text/plain"], Format::Prometheus),
            (&[prometheus], Format::OpenMetrics),
            (&["application/openmetrics-text"], Format::OpenMetrics),
            (&["text/plain;q=0.5", "application/openmetrics-text; version=1.0.0"], Format::OpenMetrics),
            (&["application/openmetrics-text;q=0.3, text/plain;q=0.9"], Format::Prometheus),
            (&["application/openmetrics-text; version=2.0.0", "text/html"], Format::Prometheus),
        ];
        for (accept, format) in cases {
            assert_eq!(accepting(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn open_metrics_text_has_its_own_names_and_an_end() {
        let registry = Registry::new();
        let requests = IntCounterVec::new(Opts::new("a_requests_total", "All \"requests\"."), &["path"]).unwrap();
        registry.register(Box::new(requests.clone())).unwrap();
        requests.with_label_values(&["a\"b\\c\nd"]).inc_by(3);
        let gauge = IntGauge::new("b_bytes", "Bytes.").unwrap();
        registry.register(Box::new(gauge.clone())).unwrap();
        gauge.set(7);
        let options = HistogramOpts::new("c_seconds", "Time.").buckets(vec![0.005, 1.0]);
        let histogram = HistogramVec::new(options, &["model"]).unwrap();
        registry.register(Box::new(histogram.clone())).unwrap();
        histogram.with_label_values(&["m"]).observe(0.5);
        let wanted = r#"# TYPE a_requests counter
# HELP a_requests All \"requests\".
a_requests_total{path="a\"b\\c\nd"} 3
# TYPE b_bytes gauge
# HELP b_bytes Bytes.
b_bytes 7
# TYPE c_seconds histogram
# HELP c_seconds Time.
c_seconds_bucket{model="m",le="0.005"} 0
c_seconds_bucket{model="m",le="1.0"} 1
c_seconds_bucket{model="m",le="+Inf"} 1
c_seconds_sum{model="m"} 0.5
c_seconds_count{model="m"} 1
# EOF
"#;
        assert_eq!(Format::OpenMetrics.write(&registry).unwrap(), wanted);
        let text = Format::Prometheus.write(&registry).unwrap();
        assert!(text.contains("# TYPE a_requests_total counter") && !text.contains("# EOF"), "{text}");
    }
}
