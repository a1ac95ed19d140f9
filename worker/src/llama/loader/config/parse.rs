//! Reads a Hugging Face `config.json`, as transformers 4 and 5 write it. An absent field has the default of
//! transformers; a field that this engine cannot compute is rejected by name, never ignored.

use super::{Config, Family, Rope};
use crate::llama::loader::error::FolderError;
use crate::llama::loader::json::Fields;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Far above any existing model, and small enough that products of sizes do not overflow.
const SIZE_MAX: usize = 1 << 24;
const LAYERS_MAX: usize = 1 << 12;
pub(super) const CONTEXT_MAX: usize = 1 << 30;

impl Config {
    /// Reads the text of `config.json`, which is at `path`.
    pub(crate) fn parse(path: &Path, file: &Value) -> Result<Self, FolderError> {
        let fields = Fields::of(path, file)?;
        let family = family(&fields)?;
        refuse_what_is_not_computed(&fields)?;
        let hidden = fields.count("hidden_size", SIZE_MAX)?;
        let layers = fields.count("num_hidden_layers", LAYERS_MAX)?;
        let heads = fields.count("num_attention_heads", SIZE_MAX)?;
        let kv_heads =
            fields.optional_count("num_key_value_heads", SIZE_MAX)?.unwrap_or(family.default_kv_heads(heads));
        if heads % kv_heads != 0 {
            return Err(
                fields.wrong("num_key_value_heads", format!("is {kv_heads}, which does not divide the {heads} heads"))
            );
        }
        let head_dim = match fields.optional_count("head_dim", SIZE_MAX)? {
            Some(head_dim) => head_dim,
            None if family == Family::Qwen3 => 128,
            None => hidden / heads,
        };
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(
                fields.wrong("head_dim", format!("is {head_dim}; rotary embedding needs an even number above 0"))
            );
        }
        let vocabulary = fields.count("vocab_size", SIZE_MAX)?;
        let norm_eps = fields.optional("rms_norm_eps")?.unwrap_or(1e-6);
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(fields.wrong("rms_norm_eps", format!("is {norm_eps}; it must be between 0 and 1")));
        }
        Ok(Self {
            family,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate: fields.count("intermediate_size", SIZE_MAX)?,
            vocabulary,
            context: fields.count("max_position_embeddings", CONTEXT_MAX)?,
            norm_eps,
            rope: Rope::parse(&fields)?,
            tied: fields.optional("tie_word_embeddings")?.unwrap_or(false),
            sliding_window: sliding_window(&fields, family, layers)?,
            eos: token_ids(&fields, "eos_token_id", vocabulary)?,
            bos: token_ids(&fields, "bos_token_id", vocabulary)?.first().copied(),
        })
    }
}

/// The token ids in a field that holds one, several or none.
pub(crate) fn token_ids(fields: &Fields<'_>, name: &str, vocabulary: usize) -> Result<Vec<u32>, FolderError> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a token id or a list of them")]
    enum Ids {
        One(u32),
        Several(Vec<u32>),
    }
    let ids = match fields.optional(name)? {
        None => Vec::new(),
        Some(Ids::One(id)) => vec![id],
        Some(Ids::Several(ids)) => ids,
    };
    match ids.iter().find(|&&id| id as usize >= vocabulary) {
        Some(id) => Err(fields.wrong(name, format!("names token {id}, but the vocabulary has {vocabulary}"))),
        None => Ok(ids),
    }
}

fn family(fields: &Fields<'_>) -> Result<Family, FolderError> {
    let architectures: Vec<String> = fields.required("architectures")?;
    let named = |family: &Family| matches!(&architectures[..], [name] if name == family.architecture());
    Family::ALL.into_iter().find(named).ok_or_else(|| {
        let supported = Family::ALL.map(Family::architecture).join(", ");
        fields.wrong("architectures", format!("is {architectures:?}; supported are {supported}"))
    })
}

fn refuse_what_is_not_computed(fields: &Fields<'_>) -> Result<(), FolderError> {
    for name in ["attention_bias", "mlp_bias"] {
        if fields.optional(name)?.unwrap_or(false) {
            return Err(fields.wrong(name, "is true; such biases are not supported"));
        }
    }
    let activation = fields.optional("hidden_act")?.unwrap_or_else(|| "silu".to_owned());
    if activation != "silu" && activation != "swish" {
        return Err(fields.wrong("hidden_act", format!("is `{activation}`; supported is silu")));
    }
    if fields.raw("quantization_config").is_some() {
        return Err(fields.wrong("quantization_config", "is set; supported are plain f32, f16 and bf16 weights"));
    }
    Ok(())
}

/// The window, if every layer has it. Layers with different windows are rejected.
fn sliding_window(fields: &Fields<'_>, family: Family, layers: usize) -> Result<Option<usize>, FolderError> {
    // Transformers gives these families a window of 4,096 when the field is absent, and none when it is null.
    let absent = if fields.contains("sliding_window") { None } else { Some(4096) };
    let window = fields.optional_count("sliding_window", CONTEXT_MAX)?.or(absent);
    let (field, sliding) = match family {
        Family::Llama => return Ok(None),
        Family::Mistral => ("sliding_window", layers),
        Family::Qwen2 | Family::Qwen3 if !fields.optional("use_sliding_window")?.unwrap_or(false) => return Ok(None),
        Family::Qwen2 | Family::Qwen3 => match fields.optional::<Vec<String>>("layer_types")? {
            Some(kinds) => {
                ("layer_types", kinds.iter().take(layers).filter(|kind| *kind == "sliding_attention").count())
            }
            None => ("max_window_layers", layers.saturating_sub(fields.optional("max_window_layers")?.unwrap_or(28))),
        },
    };
    match sliding {
        0 => Ok(None),
        _ if sliding == layers => Ok(window),
        _ if window.is_none() => Ok(None),
        _ => {
            Err(fields
                .wrong(field, format!("gives {sliding} of {layers} layers a sliding window; layers must be alike")))
        }
    }
}
