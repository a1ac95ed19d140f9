//! Where spans of traces are sent, and how many traces are recorded.

use super::{Secret, http_url};
use router::Problem;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Export of spans to an OpenTelemetry collector.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tracing {
    /// URL to which spans are sent, as OTLP over HTTP in JSON; without a path `/v1/traces`. Default none: nothing is
    /// traced.
    pub endpoint: Option<String>,
    /// Share of the traces that is recorded where the client does not say. Default 1: all, as OpenTelemetry's default.
    pub sample_ratio: f64,
    /// A file with headers for the collector, one `name: value` per line. Default none.
    pub headers_file: Option<PathBuf>,
    /// A file with the certificates of the authorities that may sign the collector's. Default none: those of the
    /// operating system.
    pub ca_file: Option<PathBuf>,
    /// Name of the service in traces. Default: `blockyard-` and the command.
    pub service_name: Option<String>,
    /// What the environment says beside these keys.
    #[serde(skip)]
    pub variables: OtelVariables,
}

/// Standard variables of OpenTelemetry that are no keys of the configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OtelVariables {
    /// `OTEL_EXPORTER_OTLP_HEADERS`: `name=value,…`, with keys of the collector. Never printed.
    pub headers: Option<Secret>,
    /// `OTEL_RESOURCE_ATTRIBUTES`: `name=value,…`.
    pub resource_attributes: Option<String>,
}

/// The port on which collectors usually take OTLP over gRPC, and that for HTTP.
const GRPC_PORT: u16 = 4317;
const HTTP_PORT: u16 = 4318;

/// What to change if [`Tracing::grpc_port`] warns.
pub const GRPC_PORT_FIX: &str = "name the port of the collector for OTLP over HTTP, usually 4318: \
    --set tracing.endpoint=http://HOST:4318, or OTEL_EXPORTER_OTLP_ENDPOINT";

/// The path of an endpoint that has none.
const PATH: &str = "/v1/traces";

impl Default for Tracing {
    fn default() -> Self {
        Self {
            endpoint: None,
            sample_ratio: 1.0,
            headers_file: None,
            ca_file: None,
            service_name: None,
            variables: OtelVariables::default(),
        }
    }
}

impl Tracing {
    /// The endpoint with its path.
    pub fn url(&self) -> Option<http::Uri> {
        let uri: http::Uri = self.endpoint.as_ref()?.parse().ok()?;
        if uri.path() == "/" {
            format!("{}{PATH}", uri.to_string().trim_end_matches('/')).parse().ok()
        } else {
            Some(uri)
        }
    }

    /// The warning for an endpoint with the port of OTLP over gRPC.
    pub fn grpc_port(&self) -> Option<String> {
        let url = self.url().filter(|url| url.port_u16() == Some(GRPC_PORT))?;
        Some(format!(
            "tracing.endpoint = \"{url}\": {GRPC_PORT} is usually the port for OTLP over gRPC, and spans are sent over \
             HTTP in JSON, for which collectors usually have port {HTTP_PORT}"
        ))
    }

    /// The variables that stand for a key, weakest first, each with its key and value.
    pub(super) fn keys_of_environment<'a>(
        variable: impl Fn(&str) -> Option<&'a str>,
    ) -> impl Iterator<Item = (&'static str, &'static str, String)> {
        let general = variable("OTEL_EXPORTER_OTLP_ENDPOINT").map(|base| {
            let url = format!("{}{PATH}", base.trim_end_matches('/'));
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "tracing.endpoint", url)
        });
        let same = |name, key| variable(name).map(|value| (name, key, value.to_owned()));
        let traces = same("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "tracing.endpoint");
        let service = same("OTEL_SERVICE_NAME", "tracing.service_name");
        general.into_iter().chain(traces).chain(service)
    }

    /// All invalid values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let endpoint = self.endpoint.as_ref().and_then(|text| {
            let expected = "expected the URL of a collector that takes OTLP over HTTP, like http://127.0.0.1:4318";
            let problem = match text.parse::<http::Uri>() {
                // The exporter does not send them.
                Ok(url) if http_url::has_user(&url) => {
                    "the user and the password in a URL are not sent; write them as a header in tracing.headers_file"
                        .to_owned()
                }
                Ok(url) => format!("{}; {expected}", http_url::check(&url).err()?),
                Err(error) => format!("{error}; {expected}"),
            };
            Some(Problem::new("tracing.endpoint", problem))
        });
        let ratio = Problem::unless_within("tracing.sample_ratio", self.sample_ratio, 0.0..=1.0);
        let name = self.service_name.as_ref().filter(|name| name.is_empty());
        let name = name.map(|_| Problem::new("tracing.service_name", "expected a name"));
        endpoint.into_iter().chain(ratio).chain(name).collect()
    }
}
