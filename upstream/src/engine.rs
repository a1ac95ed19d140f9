//! One server as an [`Engine`].

mod error_response;

use crate::continuation::{self, Followed};
use crate::load::{Counted, LoadCounter};
use crate::load_reports::{LoadReports, ReportedLoad};
use crate::metrics::Metrics;
use crate::probe::Probes;
use crate::relay::client::{Body, Client, Switched, Upgrade};
use crate::relay::error::RelayError;
use crate::relay::headers;
use crate::relay::splice::{Splice, SpliceError};
use crate::relay::stream::{Item, Relay, Report, UsageInStream};
use crate::relay::transcript::Transcript;
use crate::salts::{SaltedEndpoints, Salting, Salts};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::poll_fn;
use futures::{FutureExt, StreamExt};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use worker::engine::{
    Domain, EndpointKind, Engine, Error, HttpRequest, ModelCard, Output, OutputStream, Readiness, RelayProgress,
    RelayReport, Request, ResponseHead, Tunnel, Work, below_collection,
};
use worker::plane::Load;

/// Endpoints whose streams end with the usage when the request asks for it in `stream_options`.
const WITH_STREAM_OPTIONS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/invocations"];

/// Endpoints of which it is known how their streams end. At others any end of a body is the end of the stream.
const WITH_KNOWN_END: [&str; 10] = [
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/cohere/v2/chat",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/generate",
    "/invocations",
];

/// Endpoints whose requests are computed by the rank that they name. vLLM chooses the rank of others itself.
const WITH_RANK: [&str; 5] =
    ["/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/messages", "/cohere/v2/chat"];

/// Endpoints that need no model in a request to the gateway if it serves one, or if the key allows one. The server may
/// have others, of which it would choose its first.
const WITH_MODEL: [&str; 2] = ["/tokenize", "/detokenize"];

/// The endpoint that stores its responses.
const RESPONSES: &str = "/v1/responses";
/// The field of its requests by which vLLM and SGLang let a client choose the id of the response. With the id of a
/// response that is stored, a client would replace that one, which may be of another client, and the output of two
/// responses would count as that of one.
const RESPONSE_ID: &str = "request_id";

/// Back-pressure of a server that has as many requests as it may: some of them end within a second.
const RETRY_WHEN_FULL: Duration = Duration::from_secs(1);

/// What is known of a server beside its model.
#[derive(Clone, Default)]
pub struct UpstreamSettings {
    /// The server for an operator: its URL without credentials.
    pub address: Option<String>,
    /// Identifies the server: all its models and ranks have the same.
    pub server: Option<u64>,
    /// The value of the header `authorization` for the server; `None`: none is sent.
    pub api_key: Option<HeaderValue>,
    /// Gets the salts that are sent.
    pub salts: Arc<Salts>,
    /// The endpoints whose requests get a salt.
    pub salted: SaltedEndpoints,
    /// Requests may have tenants, whose caches are to be kept apart. Without them a salt is a field of the client like
    /// others: where its endpoint gets no salt of the gateway, it passes as it came.
    pub has_tenants: bool,
    /// The only kind of endpoints that the server has; `None`: it may have any.
    pub only: Option<EndpointKind>,
    /// The data-parallel rank of the server that the engine is; `None`: the whole server.
    pub rank: Option<Rank>,
    /// Streams are followed, so that another server can continue them, and those of other servers are continued.
    pub continues_streams: bool,
    /// Notified when the server cannot be reached or responds with status 404, 401 or 403: it may have restarted
    /// with another model or another key.
    pub may_have_changed: Arc<Notify>,
}

/// A data-parallel rank of a server, which has a cache of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    /// Position among the ranks of the server, by which requests name it.
    pub position: u32,
    /// Its number among the ranks of all servers of the deployment, by which metrics name it.
    pub number: u32,
}

/// One model of one server.
pub struct UpstreamEngine {
    client: Client,
    settings: UpstreamSettings,
    card: Arc<ModelCard>,
    load: LoadCounter,
    probes: Probes,
    /// The log says that the server sends no token ids.
    has_warned: Arc<AtomicBool>,
}

/// The connection on which a health check is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Via {
    /// An open connection, if there is one.
    Any,
    New,
}

impl UpstreamEngine {
    /// The model of `card` on the server behind `client`.
    pub fn new(client: Client, settings: UpstreamSettings, card: Arc<ModelCard>, metrics: Metrics) -> Self {
        let (load, probes) = (LoadCounter::new(), Probes::new(metrics));
        Self { client, settings, card, load, probes, has_warned: Arc::default() }
    }

    /// Adds what the server reports to the load of the engine.
    pub fn add_reports(&self, reports: &Arc<LoadReports>) -> ReportedLoad {
        reports.add(self.load.clone(), self.settings.rank.map(|rank| rank.number))
    }

    /// The load of the engine, now and after each change.
    pub fn load(&self) -> watch::Receiver<Load> {
        self.load.watch()
    }

    async fn relay(&self, request: &Request) -> Result<OutputStream, Error> {
        let Work::Relay(http) = &request.work else {
            let problem = format!("the engine of {} takes HTTP requests only", self.card.id);
            return Err(Error::Invalid { field: "model", problem });
        };
        let counted = self.load.start(request.tokens.len() as u64, request.choices());
        let salt = self.salt(http, &request.domain)?;
        let transcript = self.transcript(http, request)?;
        let (body, usage) = self.body(http, request, salt.as_deref(), transcript.is_some())?;
        let mut headers = headers::request(&http.headers, self.settings.api_key.as_ref());
        if let Some(rank) = self.settings.rank.filter(|_| is_by_rank(http)) {
            headers::set_rank(&mut headers, rank.position);
        }
        headers::set_request_id(&mut headers, &request.id);
        spans::inject(&request.attributes.trace, &mut headers);
        if let Some(protocol) = http.upgrade {
            headers::set_upgrade(&mut headers, protocol);
            let answer = self.client.upgrade(http.method.clone(), &http.target, &headers, protocol).await;
            return match answer.map_err(|error| self.failed(error))? {
                Upgrade::Switched(switched) => Ok(tunnel(switched, counted)),
                // Endpoints with WebSocket are none of those whose streams are known.
                Upgrade::Answered(items) => Ok(outputs(items.ending_anywhere(), counted, http, None)),
            };
        }
        let relay = self.client.relay(http.method.clone(), &http.target, headers, body, usage).await;
        let mut items = relay.map_err(|error| self.failed(error))?;
        if !WITH_KNOWN_END.contains(&http.target.path()) {
            items = items.ending_anywhere();
        }
        // No engine answers with one, and a proxy answers at once, so it would get most requests.
        if items.is_page() && http.kind().is_some() {
            return Err(Error::Failed("the server answered with a page of HTML".to_owned()));
        }
        let is_followed = transcript.is_some_and(|transcript| items.follow(transcript));
        if http.continues.is_some() && !is_followed {
            return Err(Error::Failed("the server did not continue a stream with a stream".to_owned()));
        }
        let followed = is_followed.then(|| {
            let (server, has_warned) = (self.settings.address.clone(), Arc::clone(&self.has_warned));
            Followed::new(http, request, self.card.context, server, has_warned)
        });
        Ok(outputs(items, counted, http, followed))
    }

    /// The error of a request that has no answer, or one that is an error.
    fn failed(&self, error: RelayError) -> Error {
        let changed = match &error {
            RelayError::Unreachable(_) | RelayError::NoAnswer(_) => true,
            RelayError::Answered(answer) => {
                matches!(answer.status, StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
            }
            RelayError::OutOfFiles
            | RelayError::Full(_)
            | RelayError::Refused(_)
            | RelayError::Http2Only
            | RelayError::PathTooLong(_)
            | RelayError::Malformed(_)
            | RelayError::BrokenOff(_)
            | RelayError::Unfinished => false,
        };
        if changed {
            self.settings.may_have_changed.notify_one();
        }
        error_of(error)
    }

    /// What follows the stream of a request, if another server could continue it.
    fn transcript(&self, http: &HttpRequest, request: &Request) -> Result<Option<Box<Transcript>>, Error> {
        let Some(continuation) = &http.continues else {
            return Ok(if self.settings.continues_streams { continuation::followed(http, request) } else { None });
        };
        let transcript = continuation::continued(continuation, request).filter(|_| self.settings.continues_streams);
        // The router sends it only where streams are continued, unless no server does that any more.
        let problem = || "the server continues no streams of others".to_owned();
        transcript.map(Some).ok_or_else(|| Error::Invalid { field: "continues", problem: problem() })
    }

    /// The salt for a request. Fails if the request has one, but its endpoint does not take it and there are tenants.
    fn salt(&self, http: &HttpRequest, domain: &Domain) -> Result<Option<String>, Error> {
        match self.settings.salted.salting(http) {
            Salting::Salted => Ok(self.settings.salts.of(domain)),
            Salting::Refused(problem) if self.settings.has_tenants && domain.engine_salt().is_some() => {
                Err(Error::Invalid { field: "cache_salt", problem })
            }
            Salting::Unsalted | Salting::Refused(_) => Ok(None),
        }
    }

    /// The body for the server, and whether the usage in its stream is for the client. A body that is no JSON object
    /// passes unchanged, and so does one that needs no change. `with_ids`: token ids are asked for.
    fn body(
        &self,
        http: &HttpRequest,
        request: &Request,
        salt: Option<&str>,
        with_ids: bool,
    ) -> Result<(Bytes, UsageInStream), Error> {
        let mut usage = UsageInStream::Keep;
        if http.body.trim_ascii_start().first() != Some(&b'{') {
            // A body that a server reads as JSON all the same could have the salt of another tenant.
            if salt.is_some() && !http.body.trim_ascii().is_empty() && !is_form(http) {
                return Err(invalid("requests of tenants, and those with a salt, need a JSON object or a form"));
            }
            return Ok((http.body.clone(), usage));
        }
        let mut splice = Splice::scan(http.body.clone()).map_err(|error| invalid(error.to_string()))?;
        http.private_fields.iter().for_each(|field| splice.remove(field));
        if http.target.path().trim_end_matches('/').eq_ignore_ascii_case(RESPONSES) {
            splice.remove(RESPONSE_ID);
        }
        // The client may know the model by another name.
        let is_another = |name: Bytes| !is_text(&name, &self.card.id);
        if splice.get("model").map_or_else(|| WITH_MODEL.contains(&http.target.path()), is_another) {
            splice.set("model", json(&self.card.id));
        }
        if let Some(salt) = salt {
            splice.set("cache_salt", json(salt));
            // SGLang's, which is part of the salt. Beside it, a client could name the salt of a tenant.
            splice.remove("extra_key");
        }
        if with_ids {
            splice.set("return_token_ids", "true");
        }
        // vLLM writes `system_fingerprint` into the usage chunk, or without one into the last chunk of each choice. Of
        // several choices those that ended first would lack it, so their usage is requested only if it is charged.
        let is_asked = http.wants_usage || http.is_metered || request.group.is_none();
        if http.is_stream && is_asked && WITH_STREAM_OPTIONS.contains(&http.target.path()) {
            ask_for_usage(&mut splice, http.wants_usage).map_err(|error| invalid(error.to_string()))?;
            if !http.wants_usage {
                usage = UsageInStream::Strip;
            }
        }
        Ok((splice.finish(), usage))
    }

    /// The status of the server's own health check. Servers without one are asked for their models.
    async fn health(&self, via: Via) -> Result<(), Error> {
        for path in ["/health", "/v1/models"] {
            let headers = headers::request(&HeaderMap::new(), self.settings.api_key.as_ref());
            let path = PathAndQuery::from_static(path);
            let response = match via {
                Via::Any => self.client.send(Method::GET, &path, headers, Bytes::new()).await,
                Via::New => self.client.send_on_new_connection(Method::GET, &path, headers, Bytes::new()).await,
            };
            let response = response.map_err(error_of)?;
            match response.status() {
                status if status.is_success() => return Ok(()),
                StatusCode::NOT_FOUND => {}
                status => return Err(Error::Failed(format!("{path} answered {status}"))),
            }
        }
        Err(Error::Failed("the server has neither /health nor /v1/models".to_owned()))
    }
}

impl Engine for UpstreamEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        async move { self.relay(&request).await }.boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![Arc::clone(&self.card)]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn address(&self) -> Option<String> {
        self.settings.address.clone()
    }

    fn choosing_server(&self, request: &Request) -> Option<u64> {
        let Work::Relay(http) = &request.work else { return None };
        self.settings.rank.filter(|_| !is_by_rank(http)).and(self.settings.server)
    }

    fn only_endpoint_kind(&self) -> Option<EndpointKind> {
        self.settings.only
    }

    fn refuses(&self, request: &Request) -> bool {
        let Work::Relay(http) = &request.work else { return false };
        let UpstreamSettings { salted, has_tenants, continues_streams, .. } = &self.settings;
        let needs_salt = || *has_tenants && request.domain.engine_salt().is_some();
        (http.continues.is_some() && !continues_streams) || (!salted.takes(http) && needs_salt())
    }

    fn continues_streams(&self) -> bool {
        self.settings.continues_streams
    }

    fn probed_server(&self) -> Option<u64> {
        self.settings.server
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), Error>> {
        // An idle engine has no other changes of its load.
        self.load.refresh();
        self.probes.hedge(self.health(Via::Any), self.health(Via::New)).boxed()
    }
}

/// The stream of an answer. `followed`: what another server needs to continue it.
fn outputs(
    mut items: Relay<Body>,
    counted: Arc<Counted>,
    http: &HttpRequest,
    mut followed: Option<Followed>,
) -> OutputStream {
    // The speeds of a server are not those of a response that several have generated.
    let (is_stream, is_timed) = (http.is_stream, http.is_stream && http.continues.is_none());
    // The error that follows the request for the rest.
    let mut broken_off = None;
    // The id of a stored object must be known before the client can ask for the object.
    let is_reported = http.is_metered || below_collection(http.target.path()).is_some();
    let progress = is_reported.then(Arc::<RelayProgress>::default);
    // Until the end, which the rest of a body may follow.
    let mut running = Some(counted);
    let outputs = poll_fn(move |context| {
        let is_known = broken_off.is_some();
        let item = if is_known { broken_off.take() } else { ready!(items.poll_next_unpin(context)) };
        if let Some(stream) = &mut followed {
            if matches!(item, Some(Ok(Item::Head(_)))) {
                stream.began(items.lacks_ids());
            }
            if matches!(item, Some(Err(_)))
                && let Some(rest) = stream.take_rest(items.broken())
            {
                broken_off = item;
                return Poll::Ready(Some(Ok(Output::Rest(Box::new(rest)))));
            }
        }
        if let (Some(progress), Some(Ok(Item::Head(_) | Item::Frame(_)))) = (&progress, &item) {
            progress.set(relay_report(items.so_far()));
        }
        let is_last = matches!(item, Some(Ok(Item::End(_))));
        let output = |item| output(item, running.as_deref(), is_stream, is_timed, progress.as_ref());
        let item = item.map(|item| item.map(output).map_err(error_of));
        if is_last {
            running = None;
        }
        Poll::Ready(item)
    });
    outputs.boxed()
}

/// The stream of a connection that has switched to another protocol: its head, and then nothing until it is dropped.
fn tunnel(switched: Switched, counted: Arc<Counted>) -> OutputStream {
    let Switched { headers, received, socket, place } = switched;
    counted.first_output(true);
    let mut head = Some(ResponseHead {
        status: StatusCode::SWITCHING_PROTOCOLS,
        headers: headers::response(headers, headers::Body::Changed),
        worker: None,
        server: None,
        explain: None,
        progress: None,
        tunnel: Some(Tunnel::new(received, socket)),
    });
    let outputs = poll_fn(move |_| {
        let _held = (&counted, &place);
        head.take().map_or(Poll::Pending, |head| Poll::Ready(Some(Ok::<_, Error>(Output::Head(Box::new(head))))))
    });
    outputs.boxed()
}

fn is_by_rank(http: &HttpRequest) -> bool {
    WITH_RANK.contains(&http.target.path())
}

/// Whether a body is a form with files. No server reads it as JSON, which cannot begin with two hyphens.
fn is_form(http: &HttpRequest) -> bool {
    let content_type = http.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    media_type.eq_ignore_ascii_case("multipart/form-data") && http.body.trim_ascii_start().starts_with(b"--")
}

/// The error of a body that cannot be sent.
fn invalid(problem: impl Into<String>) -> Error {
    Error::Invalid { field: "body", problem: problem.into() }
}

/// Asks for the usage at the end of a stream in the one way that all servers understand alike: some read `"yes"` as
/// true, others ignore it.
fn ask_for_usage(splice: &mut Splice, wants_usage: bool) -> Result<(), SpliceError> {
    const OPTIONS: &str = "stream_options";
    const CONTINUOUS: &str = "continuous_usage_stats";
    splice.set_in(OPTIONS, "include_usage", "true")?;
    // Without `include_usage` of the client it has no effect. With that of the gateway every chunk would have a usage.
    let is_continuous = |options: Bytes| Splice::scan(options).is_ok_and(|options| options.range(CONTINUOUS).is_some());
    if !wants_usage && splice.get(OPTIONS).is_some_and(is_continuous) {
        splice.set_in(OPTIONS, CONTINUOUS, "false")?;
    }
    Ok(())
}

/// Whether a JSON value is this text.
fn is_text(value: &[u8], text: &str) -> bool {
    let plain = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    // Text without escapes is compared as it is.
    plain == Some(text.as_bytes()) || serde_json::from_slice::<String>(value).is_ok_and(|value| value == text)
}

fn json(text: &str) -> String {
    serde_json::to_string(text).expect("a string is JSON")
}

/// `counted`: set until the end. `is_timed`: speeds are learned from it. `progress`: what the response reports before
/// its end.
fn output(
    item: Item,
    counted: Option<&Counted>,
    is_stream: bool,
    is_timed: bool,
    progress: Option<&Arc<RelayProgress>>,
) -> Output {
    match item {
        Item::Head(head) => {
            if let Some(counted) = counted {
                counted.first_output(is_stream);
            }
            Output::Head(Box::new(ResponseHead {
                status: head.status,
                headers: head.headers,
                worker: None,
                server: None,
                explain: None,
                progress: progress.cloned(),
                tunnel: None,
            }))
        }
        Item::Frame(bytes) => Output::Body(bytes),
        Item::End(report) => {
            let report = relay_report(report);
            if let Some(counted) = counted.filter(|_| is_timed && !report.failed) {
                counted.streamed(&report);
            }
            Output::End(report)
        }
    }
}

fn relay_report(report: Report) -> RelayReport {
    let usage = report.usage.unwrap_or_default();
    let tokens = |tokens: Option<u64>| tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
    RelayReport {
        prompt_tokens: tokens(usage.prompt_tokens),
        cached_tokens: tokens(usage.cached_tokens),
        completion_tokens: tokens(usage.completion_tokens),
        response_id: report.response_id,
        failed: report.failed,
    }
}

fn error_of(error: RelayError) -> Error {
    match error {
        RelayError::Unreachable(_) => Error::Unavailable(error.to_string()),
        RelayError::NoAnswer(why) => Error::NoAnswer(why),
        RelayError::OutOfFiles => Error::out_of_files(),
        // It says that it takes no request now, not that it has failed.
        RelayError::Full(_) | RelayError::Refused(_) => Error::Overloaded { retry_after: RETRY_WHEN_FULL },
        RelayError::Http2Only => Error::Invalid { field: "upgrade", problem: error.to_string() },
        RelayError::PathTooLong(_) => Error::Relayed(Arc::new(error_response::path_too_long(&error.to_string()))),
        RelayError::BrokenOff(_) | RelayError::Unfinished => Error::Failed(error.to_string()),
        RelayError::Malformed(why) => Error::Relayed(Arc::new(error_response::malformed(&why))),
        RelayError::Answered(answer) => Error::Relayed(Arc::new(error_response::of(*answer))),
    }
}

#[cfg(test)]
mod tests;
