//! Text to tokens, no further than a limit.
//!
//! A tokenizer takes about a hundred bytes of memory for each byte of text, and a second for two megabytes. So a text of too many
//! tokens is refused before all of it is tokenised:
//!
//! 1. from its bytes ([`Bound`]): each token covers at most as many bytes as the longest token that begins with the same bytes;
//! 2. while counting ([`Pieces`]): a long text is tokenised piece by piece, until the tokens exceed the limit.
//!
//! **Invariant**: the tokens of the pieces are the tokens of the whole text. `cut` says why.

mod bound;
mod cut;

use super::vocabulary::Vocabulary;
use crate::error::Error;
use bound::Bound;
use cut::{Cut, Pieces};
use tokenizers::Tokenizer;
use tokio_util::sync::CancellationToken;

/// Tokenises the texts of one model.
pub(crate) struct Encoder {
    tokenizer: Tokenizer,
    /// Where a long text is cut; nowhere when this tokenizer's texts cannot be.
    cuts: Vec<Cut>,
    /// What the tokenizer adds before and after the tokens of a text when asked to.
    added: (Vec<u32>, Vec<u32>),
    bound: Option<Bound>,
    /// Bytes of a piece.
    piece: usize,
}

/// Why a text was not tokenised.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Refused {
    /// It has at least this many tokens, more than the limit.
    #[error("at least {0} tokens")]
    TooLong(usize),
    /// It goes on for longer than this without a place to cut it.
    #[error("more than {0} bytes without a space between words, a line's end, or the like")]
    Word(usize),
    /// The client is gone.
    #[error("the client disconnected")]
    Gone,
    /// The tokenizer failed.
    #[error("tokenizer.json: {0}")]
    Failed(String),
}

impl From<tokenizers::Error> for Refused {
    fn from(error: tokenizers::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Encoder {
    pub(crate) fn new(tokenizer: Tokenizer, vocabulary: &Vocabulary) -> Result<Self, Error> {
        let failed = |error: tokenizers::Error| Error::Failed(format!("tokenizer.json: {error}"));
        let added = added(&tokenizer).map_err(failed)?;
        // Without knowing what is added around a text, pieces cannot replace it.
        let cuts = added.as_ref().map(|_| cut::learn(&tokenizer, vocabulary)).transpose().map_err(failed)?;
        let bound = Bound::new(&tokenizer, vocabulary);
        Ok(Self {
            cuts: cuts.unwrap_or_default(),
            added: added.unwrap_or_default(),
            bound,
            tokenizer,
            piece: cut::PIECE,
        })
    }

    /// Without the bound from bytes, for a tokenizer whose tokens cover other bytes than the vocabulary says.
    pub(crate) fn unbounded(tokenizer: Tokenizer, vocabulary: &Vocabulary) -> Result<Self, Error> {
        Ok(Self { bound: None, ..Self::new(tokenizer, vocabulary)? })
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Refuses a text that has more than `limit` tokens for certain.
    pub(crate) fn check(&self, text: &str, limit: usize) -> Result<(), Refused> {
        self.bound.as_ref().map_or(Ok(()), |bound| bound.check(text, limit))
    }

    /// The tokens of a text, if they are at most `limit`. With `special`, with those that the tokenizer adds around every text.
    pub(crate) fn encode(
        &self,
        text: &str,
        special: bool,
        limit: usize,
        gone: &CancellationToken,
    ) -> Result<Vec<u32>, Refused> {
        self.check(text, limit)?;
        if self.cuts.is_empty() || text.len() <= self.piece {
            return Ok(ids(&self.tokenizer, text, special)?);
        }
        let (mut tokens, after) = if special { self.added.clone() } else { Default::default() };
        for piece in Pieces::new(text, &self.cuts, self.piece) {
            tokens.extend(ids(&self.tokenizer, piece?, false)?);
            if tokens.len() > limit {
                return Err(Refused::TooLong(tokens.len()));
            }
            if gone.is_cancelled() {
                return Err(Refused::Gone);
            }
        }
        tokens.extend(after);
        Ok(tokens)
    }
}

/// The tokens of a text, whatever it takes.
fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, tokenizers::Error> {
    Ok(tokenizer.encode_fast(text, special)?.get_ids().to_vec())
}

/// Tokens before and after those of a text.
type Added = (Vec<u32>, Vec<u32>);

/// What the tokenizer adds before and after the tokens of a text.
fn added(tokenizer: &Tokenizer) -> Result<Option<Added>, tokenizers::Error> {
    let (bare, full) = (ids(tokenizer, "a", false)?, ids(tokenizer, "a", true)?);
    let at = full.windows(bare.len().max(1)).position(|tokens| tokens == bare);
    Ok(at.map(|at| (full[..at].to_vec(), full[at + bare.len()..].to_vec())))
}

#[cfg(test)]
mod tests;
