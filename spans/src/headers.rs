//! The headers of W3C Trace Context: `traceparent` and `tracestate`.

use crate::context::{CallerContext, Context};
use http::{HeaderMap, HeaderName, HeaderValue};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Longest `tracestate` that is passed on, as the recommendation demands. A longer one is dropped.
const MAX_TRACESTATE: usize = 512;

/// The context of the caller. `None`: it sends none, or none that is valid.
pub fn extract(headers: &HeaderMap) -> Option<CallerContext> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let (first, second) = (values.next()?, values.next());
    let caller = CallerContext::parse(first.to_str().ok()?).filter(|_| second.is_none())?;
    let mut states = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok());
    let first = states.next().map(str::to_owned);
    let state = first.map(|first| states.fold(first, |list, more| format!("{list},{more}")));
    let state = state.filter(|state| !state.is_empty() && state.len() <= MAX_TRACESTATE).map(Into::into);
    Some(CallerContext { state, ..caller })
}

/// Sets the headers of a request that belongs to a span, in place of those that it has. An empty context changes
/// nothing.
pub fn inject(context: &Context, headers: &mut HeaderMap) {
    let Some(traceparent) = context.traceparent() else { return };
    headers.insert(TRACEPARENT, HeaderValue::try_from(traceparent).expect("it is ASCII"));
    match context.tracestate().map(HeaderValue::from_str) {
        Some(Ok(state)) => drop(headers.insert(TRACESTATE, state)),
        _ => drop(headers.remove(TRACESTATE)),
    }
}
