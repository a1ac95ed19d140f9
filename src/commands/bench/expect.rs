//! Estimates the time to first token of a model: from the bandwidth of each tier, and by recomputing.

use super::tiers::Measured;
use crate::commands::output;
use crate::config::{Config, Model};
use anyhow::{Context, bail};
use futures::StreamExt;
use kvbm::{BlockManager, Epoch, EventLog};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use worker::engine::{Domain, Request, measure_ttft};
use worker::handoff::Peers;
use worker::llama::{Builtin, LlamaEngine, ModelSource, Runtime, Settings};
use worker::plane::WorkerId;

/// The estimate for one model.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Expectation {
    model: String,
    /// Tokens of the prefix.
    #[serde(rename = "context_tokens")]
    context: usize,
    kv_bytes_per_token: u64,
    /// `None` if it was neither given nor measured.
    prefill_tokens_per_second: Option<f64>,
    /// Whether the prefill speed was measured here.
    prefill_measured: bool,
    /// Expected time to first token with the prefix in a tier, of each tier's fastest case.
    #[serde(rename = "ttft")]
    by_tier: Vec<TierEstimate>,
}

#[derive(Clone, Debug, Serialize)]
struct TierEstimate {
    tier: &'static str,
    #[serde(rename = "location")]
    place: String,
    #[serde(rename = "ttft_s")]
    seconds: f64,
}

/// Limit of the prompt tokens for measuring the prefill of a built-in model.
const PROMPT: usize = 2048;

impl Expectation {
    /// Reads the sizes of a model from its folder, or runs a built-in model.
    pub(super) async fn of(config: &Config, context: usize, prefill: Option<f64>) -> anyhow::Result<Self> {
        let (kv_bytes_per_token, measured) = match &config.model {
            Model::Folder(folder) => (kv_bytes_per_token(folder)?, None),
            Model::BuiltIn(model) => {
                let model = Running::start(config, *model).await?;
                let per_token = (model.runtime.block_bytes() / model.runtime.card().block_size) as u64;
                (per_token, if prefill.is_none() { Some(model.prefill(context.min(PROMPT)).await?) } else { None })
            }
        };
        let prefill_tokens_per_second = prefill.or(measured);
        let (model, prefill_measured) = (config.model.to_string(), measured.is_some());
        Ok(Self { model, context, kv_bytes_per_token, prefill_tokens_per_second, prefill_measured, by_tier: vec![] })
    }

    /// Adds the estimate of each measured tier.
    pub(super) fn with_tiers(mut self, measured: &[Measured]) -> Self {
        let bytes = (self.kv_bytes_per_token * self.context as u64) as f64;
        for figures in measured {
            let (tier, place, seconds) = (figures.tier, &figures.place, figures.latency + bytes / figures.read);
            match self.by_tier.iter_mut().find(|known| known.tier == tier && known.place == *place) {
                Some(known) => known.seconds = known.seconds.min(seconds),
                None => self.by_tier.push(TierEstimate { tier, place: place.clone(), seconds }),
            }
        }
        self
    }

    fn recompute(&self) -> Option<f64> {
        Some(self.context as f64 / self.prefill_tokens_per_second?)
    }
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, context, kv_bytes_per_token: each, .. } = self;
        let all = crate::config::ByteSize(each * *context as u64).about();
        writeln!(f, "{model}: {context} tokens have {all} of KV, {each} bytes each; time to first token at least")?;
        match (self.recompute(), self.prefill_measured) {
            (Some(seconds), measured) => {
                let speed = self.prefill_tokens_per_second.unwrap_or_default();
                let source = if measured { "measured here" } else { "as given" };
                writeln!(f, "  {:<12} {}  ({speed:.0} tokens/s, {source})", "recomputed", time(seconds))?;
            }
            (None, _) => writeln!(f, "  recomputed   unknown: set --prefill-tokens-per-second")?,
        }
        for TierEstimate { tier, place, seconds } in &self.by_tier {
            let times = self.recompute().map(|recompute| format!(", {:.1} times as fast", recompute / seconds));
            writeln!(f, "  {:<12} {}  ({place}{})", format!("from {tier}"), time(*seconds), times.unwrap_or_default())?;
        }
        Ok(())
    }
}

fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:>8.2} ms", seconds * 1e3) } else { format!("{seconds:>8.2} s ") }
}

/// Bytes of keys and values of one token, from `config.json`.
fn kv_bytes_per_token(folder: &Path) -> anyhow::Result<u64> {
    let path = folder.join("config.json");
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config: Value = serde_json::from_slice(&text).with_context(|| format!("{}", path.display()))?;
    of_config(&config).with_context(|| format!("{}", path.display()))
}

fn of_config(config: &Value) -> anyhow::Result<u64> {
    // Multimodal models nest the configuration of their language model.
    let config = config.get("text_config").unwrap_or(config);
    let number = |key: &str| config.get(key).and_then(Value::as_u64);
    let layers = number("num_hidden_layers").context("num_hidden_layers is missing")?;
    if number("kv_lora_rank").is_some() {
        bail!("the model compresses its KV (MLA), which this estimate does not support");
    }
    let heads = number("num_attention_heads").context("num_attention_heads is missing")?;
    let kv_heads = number("num_key_value_heads").unwrap_or(heads);
    let head_dim = number("head_dim")
        .or_else(|| number("hidden_size")?.checked_div(heads))
        .context("head_dim and hidden_size are missing")?;
    let dtype = config.get("torch_dtype").or_else(|| config.get("dtype")).and_then(Value::as_str);
    let value = if dtype == Some("float32") { 4 } else { 2 };
    Ok(2 * layers * kv_heads * head_dim * value)
}

/// A native engine with one model, without router and shared tiers.
pub(super) struct Running {
    pub(super) runtime: Arc<Runtime>,
    engine: Arc<LlamaEngine>,
    manager: BlockManager,
    host: kvbm::HostTier,
    fingerprint: kvbm::Fingerprint,
}

impl Running {
    /// Loads a built-in model.
    pub(super) async fn start(config: &Config, model: Builtin) -> anyhow::Result<Self> {
        Self::of(config, ModelSource::Builtin(model)).await
    }

    /// Loads a model.
    pub(super) async fn of(config: &Config, source: ModelSource) -> anyhow::Result<Self> {
        output::note(format_args!("loading {}", config.model));
        let (data_dir, threads) =
            (config.data_dir.clone(), config.threads.on(crate::process::machine::Machine::detect().threads));
        let open = move || Runtime::open(&source, &data_dir, threads, &|_, _| {});
        let runtime = tokio::task::spawn_blocking(open).await.context("loading the model failed")??;
        let registry = prometheus::Registry::new();
        let (blocks, engines) = (kvbm::Metrics::new(&registry)?, worker::metrics::Metrics::new(&registry)?);
        let block = runtime.block_bytes();
        let slots = 2 * PROMPT / runtime.card().block_size;
        let memory = runtime.memory(slots)?;
        let log = Arc::new(EventLog::new(Epoch(1)));
        let fingerprint = memory.device().fingerprint();
        let host = kvbm::HostTier::new((slots * block) as u64, block, fingerprint, log.clone(), &blocks)?;
        let manager = BlockManager::new(memory.device(), Some(host.clone()), vec![], log, blocks);
        let engine = LlamaEngine::start(
            WorkerId(1),
            runtime.clone(),
            memory,
            manager.clone(),
            Peers::default(),
            engines.of("1", &runtime.card().id),
            Settings::default(),
        );
        Ok(Self { runtime, engine, manager, host, fingerprint })
    }

    /// Computes a prompt. Returns the time in seconds.
    async fn compute(&self, tokens: &[u32]) -> anyhow::Result<f64> {
        let request = Request::greedy("bench", &self.runtime.card().id, tokens, 1);
        Ok(measure_ttft(&*self.engine, request).await?.as_secs_f64())
    }

    /// Prompt tokens per second: the median of three prompts without a common prefix.
    async fn prefill(&self, tokens: usize) -> anyhow::Result<f64> {
        output::note(format_args!("measuring prefill with {tokens} tokens"));
        let mut speeds = Vec::new();
        for seed in 0..3_u32 {
            let vocabulary = self.runtime.card().vocabulary as u32;
            let prompt: Vec<u32> = (0..tokens as u32)
                .map(|n| (n * 7919 + seed * 104_729 + 1).wrapping_mul(2_654_435_761) % vocabulary)
                .collect();
            speeds.push(tokens as f64 / self.compute(&prompt).await?);
        }
        Ok(super::tiers::median(speeds))
    }

    /// The full KV blocks of a prompt, as the engine wrote them.
    pub(super) async fn kv(&self, tokens: &[u32]) -> anyhow::Result<Vec<kvbm::Block>> {
        self.compute(tokens).await?;
        self.manager.flush().await;
        let card = self.runtime.card();
        let names = kvbm::ChainKey::root(&Domain::shared(), &card.identity, None).hashes(tokens, card.block_size);
        let found: Vec<_> = kvbm::Tier::load(&self.host, self.fingerprint, names).collect().await;
        let blocks = found.into_iter().map(|(_, block)| block?.context("a block is missing"));
        blocks.collect()
    }
}

/// A number above zero.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|number: &f64| number.is_finite() && *number > 0.0)
        .ok_or("expected a number above 0".into())
}

#[cfg(test)]
mod tests {
    use super::super::tiers::Case;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_token_has_keys_and_values_of_each_layer_and_head() {
        let llama = json!({
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
            "torch_dtype": "bfloat16",
        });
        assert_eq!(of_config(&llama).unwrap(), 131_072, "Llama 3.1 8B");
        assert_eq!(of_config(&json!({ "text_config": llama })).unwrap(), 131_072);
        assert!(of_config(&json!({ "num_hidden_layers": 1, "kv_lora_rank": 512 })).is_err());
    }

    #[test]
    fn the_fastest_case_of_a_tier_is_the_estimate() {
        let figures = |read: f64, latency: f64| Measured {
            tier: "g3",
            place: "/a".into(),
            case: Case { block: 1, parallel: 1, bytes: 1 },
            write: 1.0,
            read,
            raw_write: 1.0,
            raw_read: 1.0,
            write_ratio: 1.0,
            read_ratio: 1.0,
            latency,
            raw: "O_DIRECT",
        };
        let expected = Expectation {
            model: "m".into(),
            context: 1000,
            kv_bytes_per_token: 1_000_000,
            prefill_tokens_per_second: Some(100.0),
            prefill_measured: false,
            by_tier: vec![],
        };
        let expected = expected.with_tiers(&[figures(1e9, 0.5), figures(2e9, 0.1)]);
        assert_eq!(expected.by_tier.len(), 1);
        assert!((expected.by_tier[0].seconds - 0.6).abs() < 1e-9);
        let text = expected.to_string();
        assert!(text.contains("10.00 s") && text.contains("600.00 ms") && text.contains("16.7 times"), "{text}");
    }
}
