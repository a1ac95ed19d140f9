//! Export of spans: OTLP over HTTP in JSON, in batches, on a task beside the requests.
//!
//! A collector that is slow or cannot be reached delays no request: spans that find the queue full are dropped and
//! counted, and the log says once that exporting fails, and once that it works again.
//!
//! Not the crates of the OpenTelemetry project: their batch processor does not say how many spans it dropped, and their
//! spans cost allocations where a request is not sampled. What remains of them here is one message in JSON.

mod exporter;
mod message;
mod metrics;

pub use exporter::Exporter;

use crate::config::{Config, GRPC_PORT_FIX, Purpose};
use anyhow::{Context, bail};
use exporter::Collector;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use message::Resource;
use metrics::Metrics;
use prometheus::Registry;
use spans::{Sampling, Tracer};
use upstream::Authorities;
use upstream::relay::client::{Client, Settings};

/// Maximum size of `tracing.headers_file`.
const MAX_HEADERS_BYTES: u64 = 64 << 10;

/// The tracer of a process, and its exporter if there is a collector.
pub fn start(
    config: &Config,
    purpose: Purpose,
    instance: &str,
    registry: &Registry,
) -> anyhow::Result<(Tracer, Option<Exporter>)> {
    let metrics = Metrics::new(registry)?;
    let Some(collector) = collector(config)? else { return Ok((Tracer::off(), None)) };
    if let Some(warning) = config.tracing.grpc_port() {
        tracing::warn!("{warning}; {GRPC_PORT_FIX}");
    }
    let (tracer, queue) = Tracer::new(Sampling::ratio(config.tracing.sample_ratio));
    metrics.read_dropped(queue.dropped());
    let resource = Resource::new(service_name(config, purpose), instance, &config.tracing.variables);
    Ok((tracer, Some(Exporter::spawn(queue, collector, resource, metrics))))
}

/// Why spans cannot be exported.
#[derive(Debug)]
pub struct Unusable {
    /// The error, which names the key.
    pub error: anyhow::Error,
    /// What to change.
    pub fix: &'static str,
}

/// Checks the keys of a configuration, without an effect. Blocks while it reads files.
pub fn check(config: &Config) -> Result<(), Unusable> {
    if config.tracing.url().is_none() {
        return Ok(());
    }
    let unusable = |fix: &'static str| move |error: anyhow::Error| Unusable { error, fix };
    authorities(config).map(drop).map_err(unusable(
        "let tracing.ca_file name a PEM file with the authorities of the collector, which the user of this process can \
         read; without the key those of the operating system are used",
    ))?;
    headers(config).map(drop).map_err(unusable(if config.tracing.headers_file.is_some() {
        "let tracing.headers_file name a file with a line `name: value` for each header, which the user of this \
         process can read"
    } else {
        "write OTEL_EXPORTER_OTLP_HEADERS as name=value,name=value, or unset it"
    }))?;
    collector(config).map(drop).map_err(unusable(
        "let tracing.endpoint, or OTEL_EXPORTER_OTLP_ENDPOINT, be the URL of a collector, like http://127.0.0.1:4318",
    ))
}

fn collector(config: &Config) -> anyhow::Result<Option<Collector>> {
    let Some(url) = config.tracing.url() else { return Ok(None) };
    let settings = Settings {
        roots: authorities(config)?.map(|authorities| authorities.roots()),
        max_idle: 1,
        ..Settings::default()
    };
    let client = Client::new(&exporter::origin(&url), &settings)
        .with_context(|| format!("tracing.endpoint = \"{url}\" cannot be used"))?;
    let path = url.path_and_query().cloned().context("tracing.endpoint has no path")?;
    Ok(Some(Collector { client, path, headers: headers(config)?, url }))
}

/// The authorities that may sign the certificate of the collector; `None`: those of the operating system.
fn authorities(config: &Config) -> anyhow::Result<Option<Authorities>> {
    let Some(path) = &config.tracing.ca_file else { return Ok(None) };
    let read = Authorities::read(path);
    read.map(Some).with_context(|| format!("tracing.ca_file = \"{}\"", path.display()))
}

/// The headers of the file, or else those of the environment.
fn headers(config: &Config) -> anyhow::Result<HeaderMap> {
    let (pairs, source): (Vec<(String, String)>, _) =
        match (&config.tracing.headers_file, &config.tracing.variables.headers) {
            (Some(path), _) => {
                let key = || format!("tracing.headers_file = \"{}\"", path.display());
                let text = transport::read_text(path, MAX_HEADERS_BYTES).with_context(key)?;
                let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
                let pair = |line: &str| line.split_once(':').map(|(name, value)| (name.into(), value.trim().into()));
                let pairs: Option<_> = lines.map(pair).collect();
                (pairs.context("expected a line `name: value` for each header").with_context(key)?, key())
            }
            (None, Some(list)) => (message::pairs(&list.0), "environment OTEL_EXPORTER_OTLP_HEADERS".to_owned()),
            (None, None) => return Ok(HeaderMap::new()),
        };
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        let (Ok(name), Ok(mut value)) = (name.trim().parse::<HeaderName>(), HeaderValue::try_from(value)) else {
            bail!("{source}: `{}` is no header", name.trim());
        };
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

fn service_name(config: &Config, purpose: Purpose) -> &str {
    config.tracing.service_name.as_deref().unwrap_or(match purpose {
        Purpose::Frontend => "blockyard-frontend",
        Purpose::Worker => "blockyard-worker",
        Purpose::Serve | Purpose::Tools => "blockyard-serve",
    })
}

#[cfg(test)]
mod tests;
