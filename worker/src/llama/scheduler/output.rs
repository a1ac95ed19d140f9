//! The output of a request on its way from the engine to the client's stream: one slot, which the engine fills and the
//! stream empties.
//!
//! Tokens that were not read when the next ones come are merged into one item. A queue of items would take more memory
//! per stream, all of which the caches of the processor lose while a step computes.

use crate::engine::{EndToken, Error, FinishReason, Handoff, Logprobs, Output, PromptReport, Tokens};
use futures::Stream;
use parking_lot::Mutex;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::sync::Notify;

/// The ends of a request's output.
pub(in crate::llama) fn output() -> (OutputSender, OutputReceiver) {
    let shared = Arc::new(Shared::default());
    (OutputSender { shared: Arc::clone(&shared), report_due: true }, OutputReceiver { shared, has_ended: false })
}

#[derive(Default)]
struct Shared {
    slot: Mutex<Slot>,
    /// Notifies the engine that the stream was dropped.
    closed: Notify,
}

#[derive(Default)]
struct Slot {
    /// What was not read yet.
    tokens: Tokens,
    /// The handoff of a prefill, which comes before its end.
    handoff: Option<Handoff>,
    /// The item after these: an error, or the end of a prefill.
    last: Option<Result<Output, Error>>,
    /// The task that waits for output.
    reader: Option<Waker>,
    sender_dropped: bool,
    receiver_dropped: bool,
}

impl Slot {
    /// The next item. Prompt log-probabilities alone are none: they come with the first token.
    fn take(&mut self) -> Option<Result<Output, Error>> {
        if !self.tokens.ids.is_empty() || self.tokens.finish.is_some() {
            return Some(Ok(Output::Tokens(mem::take(&mut self.tokens))));
        }
        if let Some(handoff) = self.handoff.take() {
            return Some(Ok(Output::Handoff(handoff)));
        }
        self.last.take().or_else(|| {
            let stopped = || Err(Error::Failed("the engine stopped before the request finished".into()));
            self.sender_dropped.then(stopped)
        })
    }
}

impl Shared {
    /// Changes the slot, and wakes the reader.
    fn update(&self, change: impl FnOnce(&mut Slot)) {
        let reader = {
            let mut slot = self.slot.lock();
            change(&mut slot);
            slot.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// How a request ends.
pub(super) struct Ending {
    pub(super) finish: FinishReason,
    /// The last token and its log-probabilities, if they are not sent yet.
    pub(super) token: Option<(u32, Option<Logprobs>)>,
    /// The token that ended the request.
    pub(super) end: Option<EndToken>,
}

impl Ending {
    /// The end of a request whose tokens are all sent.
    pub(super) const fn without_token(finish: FinishReason) -> Self {
        Self { finish, token: None, end: None }
    }
}

/// The engine's end. Dropping it without a last item ends the stream with an error.
pub(in crate::llama) struct OutputSender {
    shared: Arc<Shared>,
    report_due: bool,
}

impl OutputSender {
    /// Tokens ahead of a client that does not read, before its sequence pauses: some seconds of generation.
    const MAX_UNREAD_TOKENS: usize = 72;

    /// Whether the client dropped the stream.
    pub(super) fn is_closed(&self) -> bool {
        self.shared.slot.lock().receiver_dropped
    }

    /// Resolves when the client drops the stream.
    pub(super) fn closed(&self) -> impl Future<Output = ()> + use<> {
        let shared = Arc::clone(&self.shared);
        async move {
            // One notification is stored, so none is lost between the check and the wait.
            while !shared.slot.lock().receiver_dropped {
                shared.closed.notified().await;
            }
        }
    }

    /// Whether so much is unread that the sequence must not go on.
    pub(super) fn is_stalled(&self) -> bool {
        self.shared.slot.lock().tokens.ids.len() >= Self::MAX_UNREAD_TOKENS
    }

    /// Whether the prompt's report is still to be sent, with the first token.
    pub(super) fn is_report_due(&self) -> bool {
        self.report_due
    }

    /// Adds log-probabilities of prompt tokens, which are sent with the first token.
    pub(super) fn push_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>) {
        if !logprobs.is_empty() {
            self.shared.slot.lock().tokens.prompt_logprobs.extend(logprobs);
        }
    }

    /// Sends a token, and the prompt's report with the first one.
    pub(super) fn push(&mut self, token: u32, logprobs: Option<Logprobs>, report: &PromptReport) {
        let report = self.due(report);
        self.shared.update(|Slot { tokens, .. }| {
            tokens.prompt = tokens.prompt.take().or(report);
            tokens.ids.push(token);
            tokens.logprobs.extend(logprobs);
        });
    }

    /// Ends the stream.
    pub(super) fn finish(mut self, ending: Ending, report: &PromptReport) {
        let report = self.due(report);
        let Ending { finish, token, end } = ending;
        // One change, so that the last token and the reason to finish are in one item.
        self.shared.update(|Slot { tokens, .. }| {
            tokens.prompt = tokens.prompt.take().or(report);
            if let Some((id, logprobs)) = token {
                tokens.ids.push(id);
                tokens.logprobs.extend(logprobs);
            }
            tokens.finish = Some(finish);
            tokens.end = end;
        });
    }

    fn due(&mut self, report: &PromptReport) -> Option<PromptReport> {
        mem::take(&mut self.report_due).then(|| report.clone())
    }

    /// Ends the stream with an error.
    pub(in crate::llama) fn fail(self, error: Error) {
        self.shared.update(|slot| slot.last = Some(Err(error)));
    }

    /// Sends the handoff of a prefill.
    pub(super) fn send_handoff(&self, handoff: Handoff) {
        self.shared.update(|slot| slot.handoff = Some(handoff));
    }

    /// Sends the end of a prefill; the stream stays open.
    pub(super) fn send_prefilled(&self) {
        self.shared.update(|slot| slot.last = Some(Ok(Output::Prefilled)));
    }
}

impl Drop for OutputSender {
    fn drop(&mut self) {
        self.shared.update(|slot| slot.sender_dropped = true);
    }
}

/// The client's end: the stream of a request.
pub(in crate::llama) struct OutputReceiver {
    shared: Arc<Shared>,
    has_ended: bool,
}

impl Stream for OutputReceiver {
    type Item = Result<Output, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let item = {
            let mut slot = self.shared.slot.lock();
            let item = slot.take();
            if item.is_none() && !slot.reader.as_ref().is_some_and(|reader| reader.will_wake(cx.waker())) {
                slot.reader = Some(cx.waker().clone());
            }
            item
        };
        let Some(item) = item else { return Poll::Pending };
        self.has_ended = match &item {
            Ok(Output::Tokens(tokens)) => tokens.finish.is_some(),
            Ok(_) => false,
            Err(_) => true,
        };
        Poll::Ready(Some(item))
    }
}

impl Drop for OutputReceiver {
    fn drop(&mut self) {
        {
            let mut slot = self.shared.slot.lock();
            slot.receiver_dropped = true;
            slot.reader = None;
        }
        self.shared.closed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, StreamExt};

    fn ids(item: Option<Result<Output, Error>>) -> Vec<u32> {
        match item {
            Some(Ok(Output::Tokens(tokens))) => tokens.ids,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn unread_tokens_are_merged() {
        let (mut sender, mut receiver) = output();
        let report = PromptReport { computed: 5, ..PromptReport::default() };
        assert!(receiver.next().now_or_never().is_none());
        (0..OutputSender::MAX_UNREAD_TOKENS as u32 - 1).for_each(|token| sender.push(token, None, &report));
        assert!(!sender.is_stalled());
        sender.push(71, None, &report);
        assert!(sender.is_stalled());
        let Some(Ok(Output::Tokens(first))) = receiver.next().await else { panic!("tokens") };
        assert_eq!((first.ids.len(), first.prompt), (72, Some(report.clone())));
        assert!(!sender.is_stalled());
        sender.finish(Ending { token: Some((8, None)), ..Ending::without_token(FinishReason::Length) }, &report);
        let Some(Ok(Output::Tokens(last))) = receiver.next().await else { panic!("tokens") };
        assert_eq!((last.ids, last.finish, last.prompt), (vec![8], Some(FinishReason::Length), None));
        assert!(receiver.next().await.is_none());
    }

    #[tokio::test]
    async fn an_error_follows_the_tokens_before_it() {
        let report = PromptReport::default();
        let (mut sender, mut receiver) = output();
        sender.push(1, None, &report);
        sender.fail(Error::Failed("broken".into()));
        assert_eq!(ids(receiver.next().await), [1]);
        assert!(receiver.next().await.is_some_and(|item| item.is_err()) && receiver.next().await.is_none());
        let (sender, mut receiver) = output();
        drop(sender);
        assert!(receiver.next().await.is_some_and(|item| item.is_err()), "the engine stopped");
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken_and_a_dropped_one_noticed() {
        let (mut sender, mut receiver) = output();
        let reader = tokio::spawn(async move { (ids(receiver.next().await), receiver) });
        tokio::task::yield_now().await;
        sender.push(3, None, &PromptReport::default());
        let (read, receiver) = reader.await.unwrap();
        assert_eq!(read, [3]);
        let closed = sender.closed();
        assert!(!sender.is_closed());
        drop(receiver);
        closed.await;
        assert!(sender.is_closed());
    }
}
