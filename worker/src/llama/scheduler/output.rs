//! The engine's end of a request's stream.

use crate::engine::{EndToken, Error, FinishReason, Logprobs, Output, PromptReport, Tokens};
use tokio::sync::mpsc;

/// The engine's end of a stream. Tokens that the client has not read yet are merged into one item.
pub(in crate::llama) struct OutputSender {
    sender: mpsc::Sender<Result<Output, Error>>,
    unsent: Tokens,
    report_due: bool,
}

impl OutputSender {
    /// Capacity of the channel, in items. Merging follows behind it, so a few items keep the stream moving.
    pub(in crate::llama) const CAPACITY: usize = 8;
    /// Tokens merged for a client that does not read, before its sequence pauses: some seconds of generation ahead of
    /// the reader.
    const MAX_UNSENT_TOKENS: usize = 64;

    pub(super) fn new(sender: mpsc::Sender<Result<Output, Error>>) -> Self {
        Self { sender, unsent: Tokens::default(), report_due: true }
    }

    /// Whether the client dropped the stream.
    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Resolves when the client drops the stream.
    pub(super) fn closed(&self) -> impl Future<Output = ()> + use<> {
        let sender = self.sender.clone();
        async move { sender.closed().await }
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.unsent.ids.len() >= Self::MAX_UNSENT_TOKENS
    }

    /// Whether the prompt's report is still to be sent, with the first token.
    pub(super) fn is_report_due(&self) -> bool {
        self.report_due
    }

    /// Adds log-probabilities of prompt tokens.
    pub(super) fn push_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>) {
        self.unsent.prompt_logprobs.extend(logprobs);
    }

    /// Adds a token, and the prompt's report before the first token.
    pub(super) fn push(&mut self, token: u32, logprobs: Option<Logprobs>, report: &PromptReport) {
        self.open(report);
        self.unsent.ids.push(token);
        self.unsent.logprobs.extend(logprobs);
    }

    /// Sets the token that ended the request.
    pub(super) fn end_with(&mut self, id: u32, logprobs: Option<Logprobs>) {
        self.unsent.end = Some(EndToken { id, logprobs });
    }

    fn open(&mut self, report: &PromptReport) {
        if std::mem::take(&mut self.report_due) {
            self.unsent.prompt = Some(report.clone());
        }
    }

    /// Sends the unsent tokens. If the channel is full they stay, and are merged with those that follow.
    pub(super) fn flush(&mut self) {
        if self.unsent.ids.is_empty() {
            return;
        }
        if let Ok(place) = self.sender.try_reserve() {
            place.send(Ok(Output::Tokens(std::mem::take(&mut self.unsent))));
        }
    }

    /// Sends the unsent tokens and ends the stream. The last item must arrive however slowly the client reads, so a
    /// task of its own waits for room in the channel.
    pub(super) fn finish(mut self, finish: FinishReason, report: &PromptReport) {
        self.open(report);
        self.unsent.finish = Some(finish);
        let last = std::mem::take(&mut self.unsent);
        self.send(Ok(Output::Tokens(last)));
    }

    /// Ends the stream with an error.
    pub(in crate::llama) fn fail(self, error: Error) {
        self.send(Err(error));
    }

    /// Sends the handoff; the stream stays open.
    pub(super) fn send_handoff(&self, output: Output) {
        self.send(Ok(output));
    }

    fn send(&self, item: Result<Output, Error>) {
        if let Err(mpsc::error::TrySendError::Full(item)) = self.sender.try_send(item) {
            let sender = self.sender.clone();
            // The task ends with the stream: sending to a dropped receiver fails.
            tokio::spawn(async move { sender.send(item).await });
        }
    }
}
