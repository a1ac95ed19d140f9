//! Text to tokens, up to a limit.
//!
//! A tokenizer takes about a hundred bytes of memory per byte of text, and a second for two megabytes. So a text with
//! too many tokens is rejected before all of it is tokenized:
//!
//! 1. from its bytes ([`TokenLowerBound`]): a token covers at most as many bytes as the longest token that begins with
//!    the same bytes;
//! 2. while counting ([`TextPieces`]): a long text is tokenized piece by piece until the tokens exceed the limit.
//!
//! **Invariant**: the tokens of the pieces are the tokens of the whole text. `split` explains why.

mod lower_bound;
mod split;

use super::vocabulary::Vocabulary;
use crate::error::Error;
use lower_bound::TokenLowerBound;
use split::{SplitKind, TextPieces};
use tokenizers::Tokenizer;
use tokio_util::sync::CancellationToken;

/// Tokenizes the texts of one model.
pub(crate) struct Encoder {
    tokenizer: Tokenizer,
    /// Where a long text may be split; empty if this tokenizer's texts cannot be split.
    splits: Vec<SplitKind>,
    /// Tokens that the tokenizer adds before and after those of a text, if requested.
    added: (Vec<u32>, Vec<u32>),
    bound: Option<TokenLowerBound>,
    /// Minimum size of a piece in bytes.
    piece: usize,
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
        // If it is not known which tokens are added around a text, the text cannot be split.
        let splits = added.as_ref().map(|_| split::detect(&tokenizer, vocabulary)).transpose().map_err(failed)?;
        let bound = TokenLowerBound::new(&tokenizer, vocabulary);
        Ok(Self {
            splits: splits.unwrap_or_default(),
            added: added.unwrap_or_default(),
            bound,
            tokenizer,
            piece: split::PIECE_BYTES,
        })
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
        cancelled: &CancellationToken,
    ) -> Result<Vec<u32>, EncodeError> {
        self.check(text, limit)?;
        if self.splits.is_empty() || text.len() <= self.piece {
            return Ok(ids(&self.tokenizer, text, special)?);
        }
        let (mut tokens, after) = if special { self.added.clone() } else { Default::default() };
        for piece in TextPieces::new(text, &self.splits, self.piece) {
            tokens.extend(ids(&self.tokenizer, piece?, false)?);
            if tokens.len() > limit {
                return Err(EncodeError::TooLong(tokens.len()));
            }
            if cancelled.is_cancelled() {
                return Err(EncodeError::Cancelled);
            }
        }
        tokens.extend(after);
        Ok(tokens)
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
