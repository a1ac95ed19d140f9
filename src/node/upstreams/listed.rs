//! Which of the models that a server lists are registered, and which of them are names of one model.
//!
//! Each becomes a worker of the router, so the list of one server is limited, whatever the server says.

use std::collections::{HashMap, HashSet};
use upstream::ListedModel;

/// Maximum number of models of one server: its model and its adapters, of which servers hold some hundreds. Each is a
/// worker with a task and series of its own in `/metrics`, and the router copies its list of workers whenever one joins
/// or leaves.
pub(super) const MAX_MODELS: usize = 1000;

/// Maximum number of bytes of an id, which is a label of metrics and part of log lines. The longest ids are paths of
/// files, as llama.cpp has them.
const MAX_ID_BYTES: usize = 512;

/// Maximum number of names of one model that get its KV events: each reads them by itself, and keeps the blocks in a
/// view and an index of its own. Servers have two or three.
const MAX_NAMES: usize = 8;

/// How many models of a list are not registered.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct LeftOut {
    /// Those with an invalid id.
    invalid: usize,
    /// Those beyond [`MAX_MODELS`].
    beyond: usize,
}

impl LeftOut {
    /// Says it in the log.
    pub(super) fn warn(self, upstream: &str) {
        if self.invalid > 0 {
            tracing::warn!(
                upstream,
                models = self.invalid,
                "the server lists models whose ids are empty, have control characters or more than {MAX_ID_BYTES} \
                 bytes; these models are left out"
            );
        }
        if self.beyond > 0 {
            tracing::warn!(
                upstream,
                models = self.beyond,
                "the server lists more than {MAX_MODELS} models; those after the first {MAX_MODELS} are left out"
            );
        }
    }
}

/// The models that are registered, each once, in the order of the list, and how many others it has. vLLM lists each
/// `--served-model-name` as a model with the same `root`, so such a model is a name of the first one with its root.
pub(super) fn to_register(listed: Vec<ListedModel>) -> (Vec<ListedModel>, LeftOut) {
    let count = listed.len();
    let mut models: Vec<_> = listed.into_iter().filter(|model| is_valid(&model.card.id)).collect();
    let invalid = count - models.len();
    let mut ids = HashSet::new();
    models.retain(|model| ids.insert(model.card.id.clone()));
    let beyond = models.len().saturating_sub(MAX_MODELS);
    models.truncate(MAX_MODELS);
    let mut first_with: HashMap<String, String> = HashMap::new();
    for ListedModel { card, root, .. } in models.iter_mut().filter(|model| model.card.parent.is_none()) {
        let Some(root) = root else { continue };
        match first_with.get(root) {
            Some(first) => card.name_of = Some(first.clone()),
            None => drop(first_with.insert(root.clone(), card.id.clone())),
        }
    }
    (models, LeftOut { invalid, beyond })
}

/// The names of the first model that is no adapter, its own first. They share one cache and one stream of KV events.
pub(super) fn names_of_first(models: &[ListedModel]) -> Vec<String> {
    let mut bases = models.iter().filter(|model| model.card.parent.is_none());
    let Some(first) = bases.next() else { return Vec::new() };
    let further = bases.filter(|model| model.card.name_of.as_ref() == Some(&first.card.id));
    std::iter::once(first).chain(further).take(MAX_NAMES).map(|model| model.card.id.clone()).collect()
}

fn is_valid(id: &str) -> bool {
    (1..=MAX_ID_BYTES).contains(&id.len()) && !id.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;
    use worker::engine::ModelCard;

    fn listed(id: &str, root: Option<&str>, parent: Option<&str>) -> ListedModel {
        let (root, parent) = (root.map(str::to_owned), parent.map(str::to_owned));
        ListedModel { card: ModelCard { parent, ..ModelCard::new(id, 64, 16) }, root, owned_by: None }
    }

    fn registered(ids: impl IntoIterator<Item = String>) -> (Vec<String>, LeftOut) {
        let (models, left_out) = to_register(ids.into_iter().map(|id| listed(&id, None, None)).collect());
        (models.into_iter().map(|model| model.card.id).collect(), left_out)
    }

    #[test]
    fn models_are_registered_once_and_under_a_valid_id() {
        let (short, long) = ("x".repeat(MAX_ID_BYTES), "x".repeat(MAX_ID_BYTES + 1));
        let ids =
            ["b", "", "a\nb", "\u{1b}[31m", "a", "b", long.as_str(), short.as_str(), "ü/x.gguf"].map(str::to_owned);
        let (models, left_out) = registered(ids);
        assert_eq!(models, ["b", "a", short.as_str(), "ü/x.gguf"]);
        assert_eq!(left_out, LeftOut { invalid: 4, beyond: 0 });
    }

    #[test]
    fn models_beyond_the_limit_are_counted() {
        let ids = |count: usize| (0..count).map(|nth| format!("m{nth}")).collect::<Vec<_>>();
        assert_eq!(registered(ids(MAX_MODELS)), (ids(MAX_MODELS), LeftOut::default()));
        let more = LeftOut { invalid: 0, beyond: 7 };
        assert_eq!(registered(ids(MAX_MODELS + 7)), (ids(MAX_MODELS), more));
    }

    #[test]
    fn models_with_the_same_root_are_names_of_one() {
        let (path, other) = (Some("/srv/m"), Some("/srv/n"));
        let names = |listed: Vec<ListedModel>| names_of_first(&to_register(listed).0);
        let models = || {
            vec![
                listed("adapter", path, Some("m")),
                listed("m", path, None),
                listed("n", other, None),
                listed("m-latest", path, None),
                listed("x", None, None),
                listed("n-latest", other, None),
            ]
        };
        let (registered, _) = to_register(models());
        let name_of: Vec<_> = registered.iter().map(|model| model.card.name_of.as_deref()).collect();
        assert_eq!(name_of, [None, None, None, Some("m"), None, Some("n")]);
        assert_eq!(names(models()), ["m", "m-latest"]);
        let without_root = vec![listed("a", None, None), listed("b", None, None)];
        assert_eq!(names(without_root), ["a"], "they may be different models");
        assert_eq!(names(vec![listed("adapter", path, Some("m"))]), [""; 0]);
        let many: Vec<_> = (0..20).map(|nth| listed(&format!("m{nth}"), path, None)).collect();
        assert_eq!(names(many).len(), MAX_NAMES);
    }
}
