//! The running choices of one request, merged into one stream.

use super::choice::ChoiceDelta;
use crate::error::Error;
use futures::stream::{self, BoxStream, SelectAll};
use futures::{Stream, StreamExt};
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The deltas of one choice.
pub(super) type ChoiceStream = BoxStream<'static, Result<ChoiceDelta, Error>>;

/// Choices, as one stream. Most requests have a single choice: it is polled directly, because [`SelectAll`] allocates
/// for every item.
pub(super) enum Merged {
    Single(ChoiceStream),
    Several(SelectAll<ChoiceStream>),
}

impl Merged {
    /// Adds choices.
    pub(super) fn extend(&mut self, choices: impl ExactSizeIterator<Item = ChoiceStream>) {
        if choices.len() == 0 {
            return;
        }
        let mut all = match mem::take(self) {
            Self::Single(first) => stream::select_all([first]),
            Self::Several(all) => all,
        };
        all.extend(choices);
        *self = Self::Several(all);
    }

    /// Ends all choices.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Default for Merged {
    fn default() -> Self {
        Self::Several(SelectAll::new())
    }
}

impl FromIterator<ChoiceStream> for Merged {
    fn from_iter<I: IntoIterator<Item = ChoiceStream>>(choices: I) -> Self {
        let mut choices: Vec<_> = choices.into_iter().collect();
        match choices.pop() {
            Some(only) if choices.is_empty() => Self::Single(only),
            last => Self::Several(stream::select_all(choices.into_iter().chain(last))),
        }
    }
}

impl Stream for Merged {
    type Item = Result<ChoiceDelta, Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.get_mut() {
            Self::Single(only) => only.poll_next_unpin(cx),
            Self::Several(all) => all.poll_next_unpin(cx),
        }
    }
}
