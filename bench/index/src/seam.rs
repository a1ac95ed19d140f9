//! What a measurement asks of an index: one trait, which each index under test implements in a file of its own.

/// A block, as everybody names it.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Of the block's own tokens.
    pub(crate) content: u64,
    /// Of everything up to its end.
    pub(crate) sequence: u64,
}

/// How large an index is to be made.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) workers: u32,
    /// Threads that apply events.
    pub(crate) threads: usize,
}

/// An index.
///
/// **Contract.** Changes of one worker come in order, never two at once; changes of different workers may come at once.
/// They MAY be queued; [`drain`](Self::drain) MUST return only when all of them are seen by `overlap`. Turning the borrowed
/// blocks into what the index takes belongs to the change, and is timed with it. `overlap` MUST be callable at any time.
pub(crate) trait Index: Sync + Sized {
    /// A prompt, prepared outside of every timing.
    type Query: Send + Sync;
    /// Where an answer is written; reused from one lookup to the next.
    type Answer: Default;

    /// Whether the index has threads of its own that apply what one caller hands over.
    const QUEUES: bool = false;

    fn new(size: Size) -> Self;
    fn stored(&self, worker: u32, parent: Option<u64>, blocks: &[Block]);
    fn removed(&self, worker: u32, sequences: &[u64]);
    fn drain(&self) {}
    fn query(prompt: &[Block]) -> Self::Query;
    /// Leading blocks of the prompt that each worker holds.
    fn overlap(&self, query: &Self::Query, answer: &mut Self::Answer);
    /// The same as `(worker, blocks)`, for checking; not timed.
    fn depths(&self, answer: &Self::Answer) -> Vec<(u32, u32)>;
}
