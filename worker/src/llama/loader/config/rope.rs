//! The rotary position embedding, and how `config.json` describes it.

use super::parse::CONTEXT_MAX;
use crate::llama::loader::error::FolderError;
use crate::llama::loader::json::Fields;

/// Rotary position embedding in the half-split form: dimension `i` rotates with `i + head_dim / 2`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rope {
    /// Base of the wavelengths.
    pub(crate) theta: f64,
    /// Scaling of frequencies for a longer context.
    pub(crate) scaling: Option<Llama3Scaling>,
}

/// Llama 3's scaling of frequencies: wavelengths over `original_context / low_freq_factor` are multiplied by
/// `factor`, those under `original_context / high_freq_factor` are unchanged, those between are interpolated linearly
/// in frequency.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Llama3Scaling {
    /// The factor of long wavelengths.
    pub(crate) factor: f64,
    /// Lower bound of the scaled wavelengths, as a fraction of the original context.
    pub(crate) low_freq_factor: f64,
    /// Upper bound of the unchanged wavelengths, as a fraction of the original context.
    pub(crate) high_freq_factor: f64,
    /// The context of the pretraining, in tokens.
    pub(crate) original_context: usize,
}

impl Rope {
    /// Reads either form: `rope_parameters` with all settings (transformers 5), or `rope_theta` beside `rope_scaling`
    /// (transformers 4).
    pub(super) fn parse(fields: &Fields<'_>) -> Result<Self, FolderError> {
        let settings = match fields.object("rope_parameters", "rope_parameters.")? {
            Some(settings) => Some(settings),
            None => fields.object("rope_scaling", "rope_scaling.")?,
        };
        let theta = match settings.map(|settings| settings.optional::<f64>("rope_theta")).transpose()?.flatten() {
            Some(theta) => theta,
            None => fields.optional("rope_theta")?.unwrap_or(10_000.0),
        };
        if !(theta.is_finite() && theta >= 1.0) {
            return Err(fields.wrong("rope_theta", format!("is {theta}; it must be at least 1")));
        }
        for place in [Some(*fields), settings].into_iter().flatten() {
            if place.optional::<f64>("partial_rotary_factor")?.is_some_and(|part| part < 1.0) {
                return Err(
                    place.wrong("partial_rotary_factor", "is below 1; heads that rotate in part are not supported")
                );
            }
        }
        for kind in ["full_attention", "sliding_attention"] {
            if let Some(settings) = settings.filter(|settings| settings.contains(kind)) {
                return Err(settings.wrong(kind, "is set; settings per kind of layer are not supported"));
            }
        }
        let scaling = settings.map(|settings| Llama3Scaling::parse(&settings)).transpose()?.flatten();
        Ok(Self { theta, scaling })
    }
}

impl Llama3Scaling {
    fn parse(settings: &Fields<'_>) -> Result<Option<Self>, FolderError> {
        let name =
            if settings.raw("rope_type").is_none() && settings.raw("type").is_some() { "type" } else { "rope_type" };
        let kind = settings.optional(name)?.unwrap_or_else(|| "default".to_owned());
        match kind.as_str() {
            "default" => Ok(None),
            "llama3" => {
                let factor = |name| {
                    let factor: f64 = settings.required(name)?;
                    if factor.is_finite() && factor > 0.0 {
                        Ok(factor)
                    } else {
                        Err(settings.wrong(name, format!("is {factor}; it must be above 0")))
                    }
                };
                let scaling = Self {
                    factor: factor("factor")?,
                    low_freq_factor: factor("low_freq_factor")?,
                    high_freq_factor: factor("high_freq_factor")?,
                    original_context: settings.count("original_max_position_embeddings", CONTEXT_MAX)?,
                };
                if scaling.high_freq_factor <= scaling.low_freq_factor {
                    return Err(settings.wrong("high_freq_factor", "must be above `low_freq_factor`"));
                }
                Ok(Some(scaling))
            }
            _ => Err(settings.wrong(name, format!("is `{kind}`; supported are default and llama3"))),
        }
    }
}
