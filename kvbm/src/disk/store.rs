//! Stores: chooses a path for each block, queues the block there, and waits for the result.

use super::log::Log;
use super::path::LogPath;
use super::tier::DiskTier;
use crate::block::Block;
use crate::tier::StoreError;
use std::io;
use std::sync::Arc;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Result of [`DiskTier::submit`].
enum Submitted {
    Answered(Result<(), StoreError>),
    /// The block is queued.
    Waits {
        path: usize,
        failed: CancellationToken,
        answer: oneshot::Receiver<Result<(), StoreError>>,
    },
    /// Another caller is storing the same block.
    Claimed(CancellationToken),
}

impl DiskTier {
    /// Queues blocks at once, and waits for the results, in the order of the blocks. A block that one path refuses is
    /// queued on another.
    pub(super) fn store_on_paths(
        &self,
        blocks: Vec<Block>,
    ) -> impl Future<Output = Vec<Result<(), StoreError>>> + Send + use<'_> {
        let submitted: Vec<Submitted> = blocks.iter().map(|block| self.submit(block, &[])).collect();
        self.start_writers();
        async move {
            let mut answers = Vec::with_capacity(blocks.len());
            for (block, mut submitted) in blocks.into_iter().zip(submitted) {
                let mut refused_by = Vec::new();
                answers.push(loop {
                    let (answer, refused) = self.finish(&block, submitted).await;
                    refused_by.extend(refused);
                    if refused.is_none() || refused_by.len() == self.log_paths.len() {
                        break answer;
                    }
                    // A path that fails costs a block another try, but not its place in the order.
                    submitted = match self.submit(&block, &refused_by) {
                        Submitted::Answered(Err(StoreError::Busy | StoreError::Unavailable(_))) => break answer,
                        submitted => submitted,
                    };
                    self.start_writers();
                });
            }
            answers
        }
    }

    /// Queues a block on one of the paths that are not in `refused_by`.
    fn submit(&self, block: &Block, refused_by: &[usize]) -> Submitted {
        let (fingerprint, hash) = (block.header.fingerprint, block.header.hash);
        if self.shared.index.get(fingerprint, hash).is_some() {
            return Submitted::Answered(Ok(()));
        }
        let claim = match self.claims.claim(fingerprint, hash) {
            Ok(claim) => claim,
            Err(other) => return Submitted::Claimed(other),
        };
        let mut logs = self.logs();
        if logs.iter().all(Option::is_none) {
            return Submitted::Answered(Err(StoreError::Unavailable(self.why_down())));
        }
        if !logs.iter().flatten().any(|log| log.fits(block.header.length)) {
            return Submitted::Answered(Err(StoreError::TooLarge(block.header.length)));
        }
        let accepts = |path: usize, log: &Log| {
            !refused_by.contains(&path)
                && log.fits(block.header.length)
                && !log.in_cooldown()
                && log.queue.has_room(block)
        };
        let weight = |(path, log): (usize, &Option<Arc<Log>>)| {
            let log = log.as_ref().filter(|log| accepts(path, log));
            log.map(|log| log.capacity())
        };
        let weights: Vec<Option<u64>> = logs.iter().enumerate().map(weight).collect();
        let turn = self.striper.lock().next(block.header.length, &weights);
        let chosen = turn.and_then(|path| Some((path, logs[path].take()?)));
        let Some((path, log)) = chosen else { return Submitted::Answered(Err(StoreError::Busy)) };
        match log.queue.push(block.clone(), Some(claim)) {
            Ok(answer) => Submitted::Waits { path, failed: log.failed.clone(), answer },
            Err(error) => Submitted::Answered(Err(error)),
        }
    }

    /// Why no path takes blocks.
    fn why_down(&self) -> String {
        let why = |log_path: &LogPath| {
            let why = log_path.failure().unwrap_or_else(|| "it is closed".to_owned());
            format!("{}: {why}", log_path.folder.display())
        };
        let all: Vec<String> = self.log_paths.iter().map(|log_path| why(log_path)).collect();
        all.join("; ")
    }

    /// Waits for the result of a submission. On an error the second value is the path that refused.
    async fn finish(&self, block: &Block, submitted: Submitted) -> (Result<(), StoreError>, Option<usize>) {
        match submitted {
            Submitted::Answered(answer) => (answer, None),
            Submitted::Waits { path, failed, answer } => {
                let answer = tokio::select! {
                    biased;
                    answer = answer => answer.ok(),
                    // A device that does not answer may take an hour; the path fails before that.
                    () = failed.cancelled() => None,
                };
                let answer = answer.unwrap_or_else(|| {
                    self.claims.revoke(block.header.fingerprint, block.header.hash);
                    Err(io::Error::other("the G3 path has failed").into())
                });
                let refused = answer.is_err().then_some(path);
                (answer, refused)
            }
            Submitted::Claimed(other) => {
                other.cancelled().await;
                let is_stored = self.shared.index.get(block.header.fingerprint, block.header.hash).is_some();
                (if is_stored { Ok(()) } else { Err(StoreError::Busy) }, None)
            }
        }
    }

    /// Starts a writer on each path that has queued blocks and no writer.
    pub(super) fn start_writers(&self) {
        for log_path in &self.log_paths {
            if let Some(log) = log_path.log().filter(|log| log.queue.needs_writer()) {
                let log_path = log_path.clone();
                // The handle is dropped: a writer ends by itself, and one that panics answers the queued jobs.
                let writing = move || log_path.work(&log, Log::drain).unwrap_or_default();
                drop(self.tasks.spawn_blocking_on(writing, &self.runtime));
            }
        }
    }
}
