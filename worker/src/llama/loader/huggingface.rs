//! A Hugging Face folder: everything that is needed to serve a model, read once and checked.
//!
//! Files used: `config.json`, `generation_config.json` (further end tokens, sampling defaults), `model.safetensors`
//! or the shards that `model.safetensors.index.json` names, `tokenizer.json`, `tokenizer_config.json` and
//! `chat_template.jinja`. Each error names the file, and the field or tensor in it.

mod memory;
mod tokenizer;

use super::config::{Config, token_ids};
use super::error::FolderError;
use super::json::{Fields, json, parse, read};
use super::weights::{Checkpoint, Weights};
use crate::engine::{ModelCard, SamplingDefaults};
use serde_json::Value;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::UNIX_EPOCH;
pub use tokenizer::TokenizerFiles;

/// Tokens per KV block: small enough that little of a prompt's end is computed again, large enough that a block's
/// bytes are worth a transfer.
pub(crate) const BLOCK_SIZE: usize = 16;

/// The file that describes the model's shape.
const CONFIG: &str = "config.json";

/// A loaded model.
pub(crate) struct LoadedModel {
    /// The model as clients see it.
    pub(crate) card: ModelCard,
    /// The model's shape.
    pub(crate) config: Config,
    /// The weights in memory.
    pub(crate) weights: Weights,
}

impl LoadedModel {
    /// Loads the model at `path`. Its id is the folder's name unless given.
    ///
    /// The card's identity hashes `config.json` and the used weights as stored: the same values stored as another
    /// type are another model, and so is the same model with a changed field of its configuration.
    pub(crate) fn open(path: &Path, id: Option<&str>) -> Result<Self, FolderError> {
        let ModelFolder { config_text, config_json, config, text, sampling, checkpoint } = ModelFolder::read(path)?;
        let config_path = path.join(CONFIG);
        let weights = Weights::load(&checkpoint, &config)?;

        let identity = blake3::Hasher::new()
            .update(blake3::hash(config_text.as_bytes()).as_bytes())
            .update(&weights.identity)
            .finalize();
        let card = ModelCard {
            id: id.map_or_else(|| folder_name(path), str::to_owned),
            parent: None,
            name_of: None,
            identity: identity.to_hex()[..32].to_owned(),
            created: modified(&config_path),
            context: config.context,
            block_size: BLOCK_SIZE,
            vocabulary: config.vocabulary,
            eos: config.eos.clone(),
            tokenizer: Some(text.tokenizer),
            chat_template: text.chat_template,
            special_tokens: text.special_tokens,
            sampling,
            random_weights: Fields::of(&config_path, &config_json)?.optional("random_weights")?.unwrap_or(false),
            is_relayed: false,
            has_exact_blocks: true,
        };
        Ok(Self { card, config, weights })
    }
}

/// The content of a model folder except the weights, checked.
pub(crate) struct ModelFolder {
    config_text: String,
    config_json: Value,
    /// The model's shape.
    pub(crate) config: Config,
    text: TokenizerFiles,
    sampling: SamplingDefaults,
    checkpoint: Checkpoint,
}

impl ModelFolder {
    /// Reads and checks everything that can be checked before the weights are loaded.
    pub(crate) fn read(path: &Path) -> Result<Self, FolderError> {
        if !path.is_dir() {
            return Err(FolderError::NotAFolder { path: path.to_owned() });
        }
        let config_path = path.join(CONFIG);
        let config_text = read(&config_path)?;
        let config_json = parse(&config_path, &config_text)?;
        let mut config = Config::parse(&config_path, &config_json)?;
        let text = TokenizerFiles::open(path, config.vocabulary)?;
        let (eos, sampling) = generation(path, config.vocabulary)?;
        config.eos.extend(eos);
        config.eos.extend(&text.eos);
        config.eos.sort_unstable();
        config.eos.dedup();

        let checkpoint = Checkpoint::open(path)?;
        checkpoint.check(&config)?;
        memory::check(path, Weights::bytes(&config))?;
        Ok(Self { config_text, config_json, config, text, sampling, checkpoint })
    }
}

/// Reads the end tokens and the sampling defaults of `generation_config.json`.
fn generation(folder: &Path, vocabulary: usize) -> Result<(Vec<u32>, SamplingDefaults), FolderError> {
    let path = folder.join("generation_config.json");
    if !path.exists() {
        return Ok((Vec::new(), SamplingDefaults::default()));
    }
    let file = json(&path)?;
    let fields = Fields::of(&path, &file)?;
    let number = |name: &str, range: RangeInclusive<f32>| match fields.optional::<f32>(name)? {
        Some(value) if !range.contains(&value) => {
            let (least, most) = range.into_inner();
            Err(fields.wrong(name, format!("is {value}; it must be from {least} to {most}")))
        }
        value => Ok(value),
    };
    let sampling = SamplingDefaults {
        temperature: number("temperature", 0.0..=2.0)?,
        top_p: number("top_p", f32::MIN_POSITIVE..=1.0)?,
        // 0 and -1 mean off.
        top_k: fields.optional::<i64>("top_k")?.and_then(|k| u32::try_from(k).ok()).filter(|k| *k > 0),
        min_p: number("min_p", 0.0..=1.0)?,
        repetition_penalty: number("repetition_penalty", f32::MIN_POSITIVE..=100.0)?,
    };
    Ok((token_ids(&fields, "eos_token_id", vocabulary)?, sampling))
}

/// The id of a model that is loaded from a folder.
pub fn folder_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// When the file was last changed, in seconds since 1970; 0 where the file system does not say.
fn modified(path: &Path) -> u64 {
    let time = path.metadata().and_then(|metadata| metadata.modified()).ok();
    time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests;
