//! The usage of a stream, of what its events report.

use super::Usage;

/// Maximum number of items of a batch with a count of their own: more than a request may have choices. Further items
/// share the count of the last one.
const ITEMS_MAX: usize = 1 << 16;

/// The usage of a stream so far. Each report replaces what the ones before it say of the same item, or of the whole.
#[derive(Default, Debug)]
pub(super) struct TotalUsage {
    usage: Option<Usage>,
    /// Tokens of the output of each item of a batch.
    items: Vec<u64>,
}

impl TotalUsage {
    /// Adds the report of an event. `item`: the position of the item of a batch that it is about; `None`: it is about
    /// the whole request.
    pub(super) fn update(&mut self, item: Option<u64>, usage: Usage) {
        let total = self.usage.get_or_insert_default();
        let Some(item) = item else { return total.update(usage) };
        let item = usize::try_from(item).unwrap_or(usize::MAX).min(ITEMS_MAX - 1);
        if self.items.len() <= item {
            self.items.resize(item + 1, 0);
        }
        let tokens = &mut self.items[item];
        let more = usage.completion_tokens.unwrap_or_default().saturating_sub(*tokens);
        *tokens += more;
        let completion_tokens = Some(total.completion_tokens.unwrap_or_default().saturating_add(more));
        // Of several items it is not known which have the same prompt.
        let prompt = if self.items.len() == 1 { usage } else { Usage::default() };
        *total = Usage { completion_tokens, ..prompt };
    }

    /// `None` if no event has reported any.
    pub(super) fn get(&self) -> Option<Usage> {
        self.usage
    }
}
