//! Text to tokens, up to a limit.
//!
//! A tokenizer takes about a hundred bytes of memory per byte of text, and a second for two megabytes. So a text with
//! too many tokens is rejected before all of it is tokenized:
//!
//! 1. from its bytes ([`TokenLowerBound`]): a token covers at most as many bytes as the longest token that begins with
//!    the same bytes;
//! 2. while counting ([`TextPieces`]): a long text is tokenized piece by piece until the tokens exceed the limit.
//!
//! The tokens of recent pieces are kept, so of the next turn of a conversation only the new text is tokenized: pieces
//! begin at the same positions in texts that begin alike. They are found only by requests of the same cache domain:
//! else the time of a request would tell whether another tenant has sent a guessed text.
//!
//! **Invariant**: the tokens of the pieces are the tokens of the whole text. `segments` and `split` explain why.

mod byte_level;
mod lower_bound;
mod segments;
mod split;

use super::token_cache::TokenCache;
use super::vocabulary::Vocabulary;
use crate::error::Error;
use byte_level::{ByteLevel, Unsupported};
use lower_bound::TokenLowerBound;
use segments::AddedTokens;
use split::{SplitKind, TextPieces};
use tokenizers::Tokenizer;
use tokio_util::sync::{CancellationToken, DropGuard};
use worker::engine::Domain;

/// Memory for the tokens of recent pieces: of 30 MB of text, or a thousand conversations of 8,000 tokens.
const CACHE_BYTES: usize = 64 << 20;
/// Bytes of text per token, of which most texts have more.
const BYTES_PER_TOKEN: usize = 3;
/// Minimum size of a piece whose tokens are kept. A shorter one is tokenized in 20 µs.
const MIN_CACHED: usize = 64;

/// The request that a text is tokenized for.
#[derive(Clone, Default)]
pub(crate) struct EncodeJob {
    /// Its cache domain.
    domain: Domain,
    cancelled: CancellationToken,
}

impl EncodeJob {
    /// A job for a request of this domain.
    pub(crate) fn new(domain: Domain) -> Self {
        Self { domain, cancelled: CancellationToken::new() }
    }

    /// Cancels the job when it is dropped.
    pub(crate) fn cancel_on_drop(&self) -> DropGuard {
        self.cancelled.clone().drop_guard()
    }
}

/// Tokenizes the texts of one model.
pub(crate) struct Encoder {
    tokenizer: Tokenizer,
    /// The same tokens in less time; `None` if this tokenizer has another kind.
    byte_level: Option<ByteLevel>,
    /// Where a long text may be split; empty if this tokenizer's texts cannot be split.
    splits: Vec<SplitKind>,
    /// Where a text of any length may be cut; `None` if it cannot be.
    segments: Option<AddedTokens>,
    /// Tokens that the tokenizer adds before and after those of a text, if requested. `None`: the tokens of the text
    /// change too, so it is tokenized as a whole.
    added: Option<Added>,
    bound: Option<TokenLowerBound>,
    /// Minimum size of a piece in bytes.
    piece: usize,
    /// The tokens of recent pieces.
    cache: TokenCache,
}

/// Why a text was not tokenized.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum EncodeError {
    /// It has at least this many tokens, more than the limit.
    #[error("at least {0} tokens")]
    TooLong(usize),
    /// It has a longer run of bytes than this without a split point.
    #[error("more than {0} bytes without a space between words, a line's end, or the like")]
    Unsplittable(usize),
    /// The client disconnected.
    #[error("the client disconnected")]
    Cancelled,
    /// The tokenizer failed.
    #[error("tokenizer.json: {0}")]
    Failed(String),
}

impl From<tokenizers::Error> for EncodeError {
    fn from(error: tokenizers::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Encoder {
    pub(crate) fn new(tokenizer: Tokenizer, vocabulary: &Vocabulary) -> Result<Self, Error> {
        let failed = |error: tokenizers::Error| Error::Failed(format!("tokenizer.json: {error}"));
        let added = added(&tokenizer).map_err(failed)?;
        let splits = split::detect(&tokenizer, vocabulary).map_err(failed)?;
        let segments = AddedTokens::new(&tokenizer).map_err(failed)?;
        let bound = TokenLowerBound::new(&tokenizer, vocabulary);
        let cache = TokenCache::new(CACHE_BYTES);
        let byte_level = byte_level(&tokenizer);
        Ok(Self { splits, segments, added, bound, byte_level, tokenizer, piece: split::PIECE_BYTES, cache })
    }

    /// An encoder without the lower bound, for a tokenizer whose tokens cover other bytes than the vocabulary's.
    pub(crate) fn unbounded(tokenizer: Tokenizer, vocabulary: &Vocabulary) -> Result<Self, Error> {
        Ok(Self { bound: None, ..Self::new(tokenizer, vocabulary)? })
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Rejects a text that certainly has more than `limit` tokens.
    pub(crate) fn check(&self, text: &str, limit: usize) -> Result<(), EncodeError> {
        self.bound.as_ref().map_or(Ok(()), |bound| bound.check(text, limit))
    }

    /// The tokens of a text, if they are at most `limit`. With `special`, the tokenizer adds its tokens around the
    /// text.
    pub(crate) fn encode(
        &self,
        text: &str,
        special: bool,
        limit: usize,
        job: &EncodeJob,
    ) -> Result<Vec<u32>, EncodeError> {
        let tokens = self.encode_within(text, special, (limit, usize::MAX), job)?;
        Ok(tokens.expect("no text has as many bytes"))
    }

    /// The tokens of a text without a limit, unless more than `max_new` bytes of it would have to be tokenized: `None`.
    /// What was tokenized until then is kept.
    pub(crate) fn encode_known(
        &self,
        text: &str,
        special: bool,
        max_new: usize,
        job: &EncodeJob,
    ) -> Result<Option<Vec<u32>>, EncodeError> {
        self.encode_within(text, special, (usize::MAX, max_new), job)
    }

    /// `limit` and `max_new`: of the tokens, and of the bytes that are tokenized.
    fn encode_within(
        &self,
        text: &str,
        special: bool,
        (limit, mut max_new): (usize, usize),
        job: &EncodeJob,
    ) -> Result<Option<Vec<u32>>, EncodeError> {
        self.check(text, limit)?;
        let Some((before, after)) = &self.added else {
            let is_allowed = text.len() <= max_new;
            return Ok(is_allowed.then(|| ids(&self.tokenizer, text, special)).transpose()?);
        };
        let mut tokens = Vec::with_capacity((text.len() / BYTES_PER_TOKEN).min(limit));
        if special {
            tokens.extend(before);
        }
        let (segments, whole) = match &self.segments {
            Some(added) => (Some(added.segments(text)), None),
            None => (None, Some(text)),
        };
        for segment in segments.into_iter().flatten().chain(whole) {
            for piece in TextPieces::new(segment, &self.splits, self.piece) {
                if !self.encode_piece(piece?, &job.domain, &mut max_new, &mut tokens)? {
                    return Ok(None);
                }
                if tokens.len() > limit {
                    return Err(EncodeError::TooLong(tokens.len()));
                }
                if job.cancelled.is_cancelled() {
                    return Err(EncodeError::Cancelled);
                }
            }
        }
        if special {
            tokens.extend(after);
        }
        Ok(Some(tokens))
    }

    /// Adds the tokens of a piece. `false`: it is not in the cache, and has more bytes than `max_new`, which are those
    /// that may still be tokenized.
    fn encode_piece(
        &self,
        piece: &str,
        domain: &Domain,
        max_new: &mut usize,
        tokens: &mut Vec<u32>,
    ) -> Result<bool, tokenizers::Error> {
        let is_kept = piece.len() >= MIN_CACHED;
        if is_kept && let Some(known) = self.cache.get(domain, piece.as_bytes()) {
            tokens.extend_from_slice(&known);
            return Ok(true);
        }
        let Some(left) = max_new.checked_sub(piece.len()) else { return Ok(false) };
        *max_new = left;
        let known = tokens.len();
        self.encode_new(piece, tokens)?;
        if is_kept {
            self.cache.insert(domain, piece.as_bytes(), tokens[known..].into());
        }
        Ok(true)
    }

    /// Adds the tokens of a piece that is not in the cache.
    fn encode_new(&self, piece: &str, tokens: &mut Vec<u32>) -> Result<(), tokenizers::Error> {
        if !self.byte_level.as_ref().is_some_and(|byte_level| byte_level.encode(piece, tokens)) {
            tokens.extend(self.tokenizer.encode_fast(piece, false)?.get_ids());
        }
        Ok(())
    }
}

/// The faster encoder of a tokenizer. Without one, prompts take longer.
fn byte_level(tokenizer: &Tokenizer) -> Option<ByteLevel> {
    match ByteLevel::new(tokenizer) {
        Ok(byte_level) => Some(byte_level),
        Err(reason @ Unsupported::Feature(_)) => {
            tracing::info!(%reason, "prompts are tokenized by the tokenizer library, which takes longer");
            None
        }
        Err(reason) => {
            tracing::warn!(%reason, "prompts are tokenized by the tokenizer library, which takes longer");
            None
        }
    }
}

/// The tokens of a text, without a limit.
fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, tokenizers::Error> {
    Ok(tokenizer.encode_fast(text, special)?.get_ids().to_vec())
}

/// Tokens added before and after those of a text.
type Added = (Vec<u32>, Vec<u32>);

/// Finds the tokens that the tokenizer adds around a text; `None` if the tokens of the text itself change.
fn added(tokenizer: &Tokenizer) -> Result<Option<Added>, tokenizers::Error> {
    let (without, with) = (ids(tokenizer, "a", false)?, ids(tokenizer, "a", true)?);
    let at = with.windows(without.len().max(1)).position(|tokens| tokens == without);
    Ok(at.map(|at| (with[..at].to_vec(), with[at + without.len()..].to_vec())))
}

#[cfg(test)]
mod tests;
