//! One request of another process: its span and its log line, which ends when its response does.

use crate::engine::{Error, FinishReason, Output, PromptReport, Request, Work};
use crate::plane::WorkerId;
use http::HeaderMap;
use spans::{Kind, Span, TraceId, Tracer};
use std::sync::Arc;
use tokio::time::Instant;

/// A request that is being answered. When it is dropped before its last output, the request counts as cancelled.
pub(super) struct ServedRequest {
    id: Arc<str>,
    worker: WorkerId,
    work: &'static str,
    prompt_tokens: usize,
    accepted: Instant,
    span: Span,
    report: Option<PromptReport>,
    completion_tokens: usize,
    end: Option<End>,
}

enum End {
    Finished(FinishReason),
    HandedOver,
    Failed(Error),
}

impl ServedRequest {
    /// Begins to observe a request, and makes its span the parent of those that the engine records.
    pub(super) fn begin(tracer: &Tracer, headers: &HeaderMap, worker: WorkerId, request: &mut Request) -> Self {
        // Only frontends begin traces.
        let caller = tracer.is_on().then(|| spans::extract(headers)).flatten();
        let span = caller.map(|caller| tracer.root("worker request", Kind::Server, Some(caller)));
        let mut span = span.unwrap_or_default();
        let work = match request.work {
            Work::Generate => "generate",
            Work::Prefill => "prefill",
            Work::Resume(_) => "resume",
            Work::Relay(_) => "relay",
        };
        if span.is_recorded() {
            span.set("blockyard.worker", worker.to_string());
            span.set("blockyard.work", work);
            span.set("blockyard.request_id", &request.id);
        }
        request.attributes.trace = span.context();
        Self {
            id: Arc::clone(&request.id),
            worker,
            work,
            prompt_tokens: request.tokens.len() - request.generated_tokens.min(request.tokens.len()),
            accepted: Instant::now(),
            span,
            report: None,
            completion_tokens: 0,
            end: None,
        }
    }

    /// Records an output before it is sent.
    pub(super) fn output(&mut self, output: &Result<Output, Error>) {
        match output {
            Ok(Output::Tokens(tokens)) => {
                self.completion_tokens += tokens.generated();
                if tokens.prompt.is_some() {
                    self.report.clone_from(&tokens.prompt);
                }
                self.end = tokens.finish.map(End::Finished).or(self.end.take());
            }
            Ok(Output::Prefilled) => self.end = Some(End::HandedOver),
            Ok(Output::Handoff(_) | Output::Head(_) | Output::Body(_) | Output::Rest(_) | Output::End(_)) => {}
            Err(error) => self.fail(error),
        }
    }

    pub(super) fn fail(&mut self, error: &Error) {
        self.span.fail(error);
        self.end = Some(End::Failed(error.clone()));
    }

    fn log(&self) {
        let trace_id = self.span.trace_id();
        let (finish_reason, error) = match &self.end {
            Some(End::Finished(FinishReason::Length)) => (Some("length"), None),
            Some(End::Finished(FinishReason::Stop | FinishReason::StopToken(_))) => (Some("stop"), None),
            Some(End::HandedOver) => (Some("handed_over"), None),
            Some(End::Failed(error)) => (None, Some(error)),
            None => (None, None),
        };
        macro_rules! line {
            ($level:ident, $message:literal) => {
                tracing::$level!(
                    request_id = &*self.id,
                    trace_id = trace_id.as_ref().map(tracing::field::display::<&TraceId>),
                    worker = %self.worker,
                    work = self.work,
                    prompt_tokens = self.prompt_tokens,
                    cached_tokens = self.report.as_ref().map(PromptReport::cached_tokens),
                    handed_over_tokens = self.report.as_ref().map(|report| report.handed_over),
                    completion_tokens = self.completion_tokens,
                    finish_reason,
                    duration_s = self.accepted.elapsed().as_secs_f64(),
                    error = error.map(tracing::field::display),
                    $message
                )
            };
        }
        match (&self.end, error) {
            (_, Some(Error::Failed(_) | Error::NoAnswer(_) | Error::Unresponsive(_) | Error::Unavailable(_))) => {
                line!(warn, "request failed");
            }
            (_, Some(_)) => line!(info, "request rejected"),
            (Some(_), None) => line!(info, "request finished"),
            (None, None) => line!(info, "request cancelled"),
        }
    }
}

impl Drop for ServedRequest {
    fn drop(&mut self) {
        if self.span.is_recorded() {
            self.span.set("gen_ai.usage.output_tokens", self.completion_tokens);
        }
        self.log();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Tokens;

    #[test]
    fn completion_tokens_include_the_token_that_ended_the_request() {
        for (finish, expected) in [(FinishReason::Stop, 4), (FinishReason::StopToken(9), 4), (FinishReason::Length, 3)]
        {
            let mut request = Request::greedy("r1", "m", &[1, 2], 8);
            let mut served = ServedRequest::begin(&Tracer::off(), &HeaderMap::new(), WorkerId(1), &mut request);
            let tokens =
                |ids: &[u32], finish| Ok(Output::Tokens(Tokens { ids: ids.to_vec(), finish, ..Tokens::default() }));
            served.output(&tokens(&[5, 6, 7], None));
            served.output(&tokens(&[], Some(finish)));
            assert_eq!(served.completion_tokens, expected, "{finish:?}");
        }
    }
}
