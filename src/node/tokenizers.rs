//! Loads the tokenizers of the models of upstreams from their folders.

use crate::config::{Config, Purpose};
use anyhow::{Context, anyhow};
use frontend::{LocalTokenizer, TokenizerText};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use worker::llama::TokenizerFiles;

/// The configured tokenizers, by model; none in a process that has no upstreams and gets none. Blocks for about a
/// second for each folder.
pub(crate) fn load(config: &Config, purpose: Purpose) -> anyhow::Result<BTreeMap<String, Arc<LocalTokenizer>>> {
    let mut by_folder: BTreeMap<&Path, Arc<LocalTokenizer>> = BTreeMap::new();
    let mut by_model = BTreeMap::new();
    // A frontend may get its first upstream by a reload.
    let is_gateway = purpose == Purpose::Frontend || !config.upstreams.is_empty();
    let configured = config.tokenizers.iter().filter(|_| is_gateway);
    for (model, folder) in configured {
        let tokenizer = match by_folder.get(folder.as_path()) {
            Some(tokenizer) => Arc::clone(tokenizer),
            None => Arc::new(open(folder).with_context(|| format!("tokenizers.{model:?}"))?),
        };
        by_folder.insert(folder, Arc::clone(&tokenizer));
        by_model.insert(model.clone(), tokenizer);
    }
    Ok(by_model)
}

fn open(folder: &Path) -> anyhow::Result<LocalTokenizer> {
    // The server's vocabulary is not known.
    let files = TokenizerFiles::open(folder, usize::MAX)?;
    let text = TokenizerText {
        tokenizer: &files.tokenizer,
        chat_template: files.chat_template.as_deref(),
        special_tokens: &files.special_tokens,
    };
    LocalTokenizer::new(text).map_err(|problem| anyhow!("{}: {problem}", folder.display()))
}
