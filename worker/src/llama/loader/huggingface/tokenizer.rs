//! The text part of a model folder: tokenizer, chat template, special tokens.

use crate::llama::loader::error::FolderError;
use crate::llama::loader::json::{Fields, json, read};
use serde::Deserialize;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use tokenizers::Tokenizer;

/// The special tokens that templates refer to.
const SPECIAL: [&str; 6] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];

/// The tokenizer and the chat template of a model folder.
pub struct TokenizerFiles {
    /// The text of `tokenizer.json`, checked to be a valid tokenizer.
    pub tokenizer: Arc<str>,
    /// The Jinja template, when there is one.
    pub chat_template: Option<String>,
    /// Name and text.
    pub special_tokens: Vec<(String, String)>,
    /// The id of the `eos_token` in the tokenizer's configuration. For chat models it often differs from the one in
    /// `config.json`.
    pub eos: Option<u32>,
}

/// A special token: its text, or an object that contains it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or an object with `content`")]
enum Special {
    Text(String),
    Object { content: String },
}

/// A chat template, or several with names.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a template or a list of objects with `name` and `template`")]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl TokenizerFiles {
    /// Reads the files in `folder`, of a model with this vocabulary size; [`usize::MAX`] if the size is not known.
    pub fn open(folder: &Path, vocabulary: usize) -> Result<Self, FolderError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Err(FolderError::NoTokenizer { path: folder.to_owned() });
        }
        let text = read(&path)?;
        let tokenizer = Tokenizer::from_str(&text).map_err(|error| FolderError::Json {
            path: path.clone(),
            problem: format!("the file is not a tokenizer: {error}"),
        })?;
        // Added tokens (a `<pad>`, for example) often have higher ids; the model has no rows for them, and they do
        // not occur in text.
        if let Some((token, id)) = tokenizer.get_vocab(false).into_iter().find(|(_, id)| *id as usize >= vocabulary) {
            let problem = format!("has token {token:?} with id {id}, but `vocab_size` in config.json is {vocabulary}");
            return Err(FolderError::Field { path, field: "model.vocab".to_owned(), problem });
        }
        let template = folder.join("chat_template.jinja");
        let mut chat_template = template.exists().then(|| read(&template)).transpose()?;
        let mut special_tokens = Vec::new();
        let path = folder.join("tokenizer_config.json");
        if path.exists() {
            let file = json(&path)?;
            let fields = Fields::of(&path, &file)?;
            if chat_template.is_none() {
                chat_template = fields.optional::<Templates>("chat_template")?.and_then(Templates::default);
            }
            for name in SPECIAL {
                if let Some(Special::Text(text) | Special::Object { content: text }) = fields.optional(name)? {
                    special_tokens.push((name.to_owned(), text));
                }
            }
        } else {
            let problem = "tokenizer_config.json is missing: the model's special tokens and its chat template, if it \
                           is not in chat_template.jinja, are not known, and chats may be refused";
            tracing::warn!(folder = %folder.display(), "{problem}");
        }
        let eos = special_tokens
            .iter()
            .find(|(name, _)| name == "eos_token")
            .and_then(|(_, text)| tokenizer.token_to_id(text));
        Ok(Self { tokenizer: text.into(), chat_template, special_tokens, eos })
    }
}

impl Templates {
    /// The default template.
    fn default(self) -> Option<String> {
        match self {
            Self::One(template) => Some(template),
            Self::Named(all) => all.into_iter().find(|named| named.name == "default").map(|named| named.template),
        }
    }
}
