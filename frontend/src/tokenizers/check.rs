//! Compares a local tokenizer with a server on a few prompts of each kind.

use super::{CheckedTokenizer, Comparison};
use crate::model::{ContentFormat, EncodeJob, LocalTokenizer, PromptKind};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use worker::engine::{Tokenize, TokenizeError};

/// Added tokens whose texts are in the prompts.
const ADDED: usize = 4;
const KINDS: usize = PromptKind::ALL.len();

/// What [`compare_tokenizer`] has found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TokenizerComparison {
    /// By kind of prompt: `completion`, `chat`, `tools`.
    Compared([(&'static str, TokenAgreement); KINDS]),
    /// The server has no `/tokenize`.
    Unsupported,
    /// The server did not answer; the reason.
    Failed(String),
}

/// Whether a local tokenizer has the tokens of a server for one kind of prompts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TokenAgreement {
    /// It has.
    Same,
    /// It has others: the first different token.
    Different(String),
    /// The server refuses such prompts, or they are rendered in a way that is not known here.
    NotCompared,
}

/// A prompt whose tokens the server and the local tokenizer disagree on.
struct Difference {
    at: usize,
    local: Option<u32>,
    server: Option<u32>,
}

/// The fields of a prompt, and its tokens at the server.
type Answer = (Map<String, Value>, Vec<u32>);

/// Compares a local tokenizer with a server of the model on the prompts by which a gateway does at its start.
pub async fn compare_tokenizer(model: &str, local: &Arc<LocalTokenizer>, server: &dyn Tokenize) -> TokenizerComparison {
    let answers = match ask(model, local, server).await {
        Ok(answers) => answers,
        Err(TokenizeError::Unsupported) => return TokenizerComparison::Unsupported,
        Err(error) => return TokenizerComparison::Failed(error.to_string()),
    };
    let (checked, differences) = best(local, &answers, None);
    TokenizerComparison::Compared(PromptKind::ALL.map(|kind| {
        let agreement = match differences.iter().find(|(of, _)| *of == kind) {
            Some((_, difference)) => TokenAgreement::Different(difference.text(local)),
            None if checked.used[kind as usize] => TokenAgreement::Same,
            None => TokenAgreement::NotCompared,
        };
        (kind.label(), agreement)
    }))
}

/// Compares the tokens of a few prompts. `format`: as found with another server of the model; `None`: either.
pub(super) async fn check(
    model: &str,
    local: &Arc<LocalTokenizer>,
    format: Option<ContentFormat>,
    server: &dyn Tokenize,
) -> Comparison {
    let upstream = server.name();
    let answers = match ask(model, local, server).await {
        Ok(answers) => answers,
        Err(TokenizeError::Unsupported) => {
            tracing::warn!(model, upstream, "the server has no /tokenize: the local tokenizer cannot be checked");
            return Comparison::Unsupported;
        }
        Err(error) => {
            tracing::warn!(model, upstream, %error, "the local tokenizer could not be checked; trying again");
            return Comparison::Failed;
        }
    };
    let (checked, differences) = best(local, &answers, format);
    for (kind, difference) in differences {
        tracing::warn!(
            model,
            upstream,
            prompts = kind.label(),
            "{}, which will be asked for the tokens of such prompts; set tokenizers.{model:?} to the folder from which \
             the server loads tokenizer.json and the chat template, or remove it",
            difference.text(local),
        );
    }
    Comparison::Compared(checked)
}

/// The tokens of the prompts at the server, without those that it refuses.
async fn ask(model: &str, local: &LocalTokenizer, server: &dyn Tokenize) -> Result<Vec<Answer>, TokenizeError> {
    let mut answers = Vec::new();
    for fields in prompts(local.added_tokens()) {
        let mut body = Map::from_iter([("model".to_owned(), model.into())]);
        body.extend(fields.clone());
        let body = serde_json::to_vec(&body).expect("a JSON value is JSON");
        match server.tokenize(body.into()).await {
            Ok(tokens) => answers.push((fields, tokens)),
            // A template may refuse tools, for example. Then the server refuses such requests too.
            Err(TokenizeError::Refused(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(answers)
}

/// The comparison in the format in which most kinds of prompts have the tokens of the server. `format`: the only one.
fn best(
    local: &Arc<LocalTokenizer>,
    answers: &[Answer],
    format: Option<ContentFormat>,
) -> (CheckedTokenizer, Vec<(PromptKind, Difference)>) {
    let formats = format.map_or(vec![ContentFormat::Text, ContentFormat::Parts], |format| vec![format]);
    let outcomes = formats.into_iter().map(|format| compare(local, answers, format));
    let most = |(checked, _): &(CheckedTokenizer, _)| checked.used.iter().filter(|used| **used).count();
    // The first of those with the most.
    outcomes.rev().max_by_key(most).expect("there is a format")
}

/// Which kinds of prompts have the tokens of the server, and the first difference of each other kind. A kind of which
/// the server refused all prompts is not used.
fn compare(
    local: &Arc<LocalTokenizer>,
    answers: &[Answer],
    format: ContentFormat,
) -> (CheckedTokenizer, Vec<(PromptKind, Difference)>) {
    let (mut used, mut differences) = ([false; KINDS], Vec::new());
    for kind in PromptKind::ALL {
        let of_kind = answers.iter().filter(|(fields, _)| PromptKind::of(fields) == kind);
        // What is not rendered here is asked from the server anyway.
        let pairs = of_kind.filter_map(|(fields, theirs)| {
            let prompt = local.prompt(fields.clone(), format)?;
            Some((local.tokens(&prompt, usize::MAX, &EncodeJob::default()).ok()??, theirs))
        });
        let found: Vec<_> = pairs.map(|(ours, theirs)| difference(&ours, theirs)).collect();
        used[kind as usize] = !found.is_empty() && found.iter().all(Option::is_none);
        differences.extend(found.into_iter().flatten().next().map(|difference| (kind, difference)));
    }
    (CheckedTokenizer { tokenizer: Arc::clone(local), format, used }, differences)
}

impl Difference {
    fn text(&self, local: &LocalTokenizer) -> String {
        let name =
            |token: Option<u32>| token.map_or("the end".to_owned(), |id| format!("{id} {:?}", local.token_name(id)));
        let Self { at, local: ours, server: theirs } = self;
        format!(
            "token {at} of a prompt is {} with the local tokenizer and {} at the server",
            name(*ours),
            name(*theirs)
        )
    }
}

fn difference(local: &[u32], server: &[u32]) -> Option<Difference> {
    let at = (0..local.len().max(server.len())).find(|at| local.get(*at) != server.get(*at))?;
    Some(Difference { at, local: local.get(at).copied(), server: server.get(at).copied() })
}

/// Prompts of each kind, as fields of a request: many scripts, spaces, texts of added tokens, several turns, parts of
/// text, tools and calls.
fn prompts(added: &[String]) -> Vec<Map<String, Value>> {
    let special: String = added.iter().take(ADDED).flat_map(|token| ["a ", token, " \n", token]).collect();
    let text = format!(
        "The cache's keys  and values:\n\n\t12,345.67 caf\u{E9} e\u{301} \u{FB01} \u{4E2D} \u{1F600} {special} end "
    );
    let user = |content: Value| json!({ "role": "user", "content": content });
    let assistant = json!({ "role": "assistant", "content": "Sixteen tokens." });
    let system = json!({ "role": "system", "content": "You answer briefly." });
    let parts = json!([{ "type": "text", "text": "One part." }, { "type": "text", "text": "Another part." }]);
    let tools = json!([
        { "type": "function", "function": { "name": "weather", "description": "The weather of a city, \u{FC}berall",
            "parameters": { "type": "object", "properties": { "city": { "type": "string" } }, "required": [] } } },
        { "type": "function", "function": { "name": "now" } },
    ]);
    let call = json!({ "role": "assistant", "content": null, "tool_calls": [
        { "id": "call00001", "type": "function", "function": { "name": "weather", "arguments": "{\"city\":\"Ulm\"}" } },
    ] });
    let result = json!({ "role": "tool", "tool_call_id": "call00001", "content": "{\"celsius\": 21.5}" });
    let turns = json!([system, user("What is a block?".into()), assistant, user(text.as_str().into())]);
    let prompts = [
        json!({ "prompt": text }),
        json!({ "prompt": text, "add_special_tokens": false }),
        json!({ "messages": [user("Hello".into())] }),
        json!({ "messages": turns }),
        json!({ "messages": turns, "add_generation_prompt": false }),
        json!({ "messages": [user(parts)] }),
        json!({ "messages": [system, user("Weather?".into())], "tools": tools }),
        json!({ "messages": [user("Weather?".into()), call, result], "tools": tools }),
    ];
    prompts.into_iter().map(|prompt| if let Value::Object(fields) = prompt { fields } else { Map::new() }).collect()
}
