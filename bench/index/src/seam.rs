//! What a measurement needs of an index: one trait, implemented by each index under test in a file of its own.

/// A block.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Hash of the block's own tokens.
    pub(crate) content: u64,
    /// Hash of all tokens up to the end of the block.
    pub(crate) sequence: u64,
}

/// Size of an index to be created.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) workers: u32,
    /// Threads that apply events.
    pub(crate) threads: usize,
}

/// An index.
///
/// **Contract.** Changes of one worker come in order, one at a time; changes of different workers may be concurrent.
/// Changes MAY be queued; [`drain`](Self::drain) MUST return only when `overlap` sees all of them. Converting the
/// borrowed blocks is part of the change and is timed with it. `overlap` MUST be callable at any time.
pub(crate) trait Index: Sync + Sized {
    /// A prompt, prepared outside of every timing.
    type Query: Send + Sync;
    /// Result of a lookup, reused for the next lookup.
    type Answer: Default;

    /// Whether the index applies changes on threads of its own.
    const QUEUES: bool = false;

    fn new(size: Size) -> Self;
    fn stored(&self, worker: u32, parent: Option<u64>, blocks: &[Block]);
    fn removed(&self, worker: u32, sequences: &[u64]);
    fn drain(&self) {}
    fn query(prompt: &[Block]) -> Self::Query;
    /// Number of leading blocks of the prompt that each worker holds.
    fn overlap(&self, query: &Self::Query, answer: &mut Self::Answer);
    /// The same as pairs `(worker, blocks)`, for checks; not timed.
    fn depths(&self, answer: &Self::Answer) -> Vec<(u32, u32)>;
}
