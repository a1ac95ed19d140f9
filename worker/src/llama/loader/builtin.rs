//! Built-in models: Hugging Face folders with random weights, for use without a downloaded model.
//!
//! Their text is meaningless. They are written once into the data directory, in a form that any loader of Llama
//! models reads, and [`LoadedModel`](super::huggingface::LoadedModel) loads them like any other. The weights depend
//! only on the name and [`VERSION`], bit for bit, on every machine.

mod random_weights;
mod tokenizer;

use super::config::{Config, Family, Rope};
use super::weights::Weights;
use random_weights::RandomWeights;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use tokenizer::Vocabulary;

/// Part of the folder's name, so that a release that changes what is written makes new folders. Raise it with every
/// such change.
const VERSION: u32 = 1;

/// Maximum of prompt and output tokens together. Rotary embedding has no table that grows with it.
const CONTEXT: usize = 16_384;

/// A built-in model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Builtin {
    /// 1.3 million parameters: for tests. It never generates the end token.
    Tiny,
    /// 14.5 million parameters: fast on any machine.
    Small,
    /// 100 million parameters: large enough that prefix reuse saves measurable time.
    Bench,
}

/// A built-in model could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot write the built-in model: {source}", path = .path.display())]
pub struct BuiltinError {
    /// The file or folder.
    path: PathBuf,
    /// The error of the system.
    source: io::Error,
}

impl Builtin {
    /// All built-in models.
    pub const ALL: [Self; 3] = [Self::Tiny, Self::Small, Self::Bench];

    /// The model's id.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
            Self::Bench => "bench",
        }
    }

    /// The model of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name() == name)
    }

    /// The model's folder under `data_dir`, written if it does not exist. `progress` is called with the bytes written
    /// so far and the bytes in all.
    ///
    /// Blocks, for about a second per 100 million parameters and core. One process writes while others wait; a write
    /// that a process did not finish is started again.
    pub fn ensure(self, data_dir: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<PathBuf, BuiltinError> {
        let done = self.folder(data_dir);
        if !done.exists() {
            self.make(&data_dir.join("models"), &done, progress)?;
        }
        Ok(done)
    }

    /// The bytes that [`ensure`](Self::ensure) will write, apart from a few KiB; 0 if the folder exists.
    pub fn missing_bytes(self, data_dir: &Path) -> u64 {
        if self.folder(data_dir).exists() {
            return 0;
        }
        let config = self.config();
        let texts = texts(&config, &Vocabulary::new(config.vocabulary)).map(|(_, text)| text.len() as u64);
        // Two bytes per weight in the file, four in memory.
        texts.iter().sum::<u64>() + Weights::bytes(&config) / 2
    }

    fn folder(self, data_dir: &Path) -> PathBuf {
        data_dir.join("models").join(format!("{}-{VERSION}", self.name()))
    }

    fn make(self, models: &Path, done: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), BuiltinError> {
        fs::create_dir_all(models).map_err(at(models))?;
        let lock = done.with_extension("lock");
        let held = File::create(&lock).and_then(|file| file.lock().map(|()| file)).map_err(at(&lock))?;
        if done.exists() {
            return Ok(()); // by the process that held the lock
        }
        let partial = done.with_extension("partial");
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(at(&partial))?;
        }
        fs::create_dir(&partial).map_err(at(&partial))?;
        self.write(&partial, progress)?;
        fs::rename(&partial, done).and_then(|()| sync(models)).map_err(at(done))?;
        drop(held);
        Ok(())
    }

    /// Writes the files and waits until they are durable.
    fn write(self, folder: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), BuiltinError> {
        let config = self.config();
        let vocabulary = Vocabulary::new(config.vocabulary);
        for (name, text) in texts(&config, &vocabulary) {
            let path = folder.join(name);
            fs::write(&path, text).and_then(|()| sync(&path)).map_err(at(&path))?;
        }
        let path = folder.join("model.safetensors");
        let weights = RandomWeights {
            seed: format!("blockyard {} {VERSION}", self.name()),
            config,
            never_ends: self == Self::Tiny,
        };
        weights.write(&vocabulary, &path, progress).and_then(|()| sync(&path)).map_err(at(&path))?;
        // The safetensors crate creates files readable by the owner only; all files of a model get the same
        // permissions.
        let like = fs::metadata(folder.join("config.json")).map_err(at(folder))?.permissions();
        fs::set_permissions(&path, like).map_err(at(&path))?;
        sync(folder).map_err(at(folder))
    }

    /// The shape of the model.
    pub(crate) fn config(self) -> Config {
        let (hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary) = match self {
            Self::Tiny => (128, 4, 4, 2, 32, 384, 4096),
            Self::Small => (288, 6, 6, 2, 48, 768, 32_000),
            Self::Bench => (768, 12, 12, 4, 64, 2048, 32_000),
        };
        Config {
            family: Family::Llama,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate,
            vocabulary,
            context: CONTEXT,
            norm_eps: 1e-6,
            rope: Rope { theta: 10_000.0, scaling: None },
            tied: true,
            sliding_window: None,
            eos: vec![tokenizer::END.id(vocabulary)],
            bos: Some(tokenizer::BEGIN.id(vocabulary)),
        }
    }
}

/// The files beside the weights, by name.
fn texts(config: &Config, vocabulary: &Vocabulary) -> [(&'static str, String); 3] {
    [
        ("config.json", config_json(config).to_string()),
        ("tokenizer.json", vocabulary.tokenizer_json().to_string()),
        ("tokenizer_config.json", Vocabulary::tokenizer_config_json(config.context).to_string()),
    ]
}

fn config_json(config: &Config) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "hidden_act": "silu",
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rms_norm_eps": f64::from(config.norm_eps),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "attention_bias": false,
        "mlp_bias": false,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos,
        "torch_dtype": "bfloat16",
        "random_weights": true,
    })
}

/// Waits until a file or folder is durable (`fsync`).
fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> BuiltinError {
    |source| BuiltinError { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
