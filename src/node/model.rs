//! Opening the model: off the async threads, with progress in the log, and not when it cannot fit.

use crate::config::{ByteSize, Model};
use crate::process::machine::Machine;
use anyhow::{Context, bail};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use worker::engine::llama::{Builtin, ModelSource, Runtime, Shape};

/// Loads the model, once for all workers.
pub(super) async fn open(
    model: &Model,
    data_dir: &Path,
    threads: usize,
    machine: &Machine,
) -> anyhow::Result<Arc<Runtime>> {
    let source = source(model, machine)?;
    tracing::info!("loading {model}");
    let (start, data_dir) = (Instant::now(), data_dir.to_owned());
    let load = move || Runtime::open(&source, &data_dir, threads, &Making::default().told());
    let loaded = tokio::task::spawn_blocking(load).await.context("loading the model failed")?;
    let runtime = loaded.with_context(|| format!("cannot load the model {model}"))?;
    let weights = ByteSize(runtime.shape().weights_bytes).about();
    tracing::info!("loaded {model}: weights of {weights} in {:.1} s", start.elapsed().as_secs_f64());
    Ok(runtime)
}

/// What the model asks of the machine, by what is said of it in its folder. Its weights are not loaded.
pub(super) fn shape(model: &Model, machine: &Machine) -> anyhow::Result<Shape> {
    let shape = Shape::of(&source(model, machine)?);
    shape.with_context(|| format!("cannot load the model {model}"))
}

fn source(model: &Model, machine: &Machine) -> anyhow::Result<ModelSource> {
    Ok(match model {
        Model::BuiltIn(model) => ModelSource::Builtin(*model),
        Model::Folder(path) => {
            if !path.is_dir() {
                let names = Builtin::ALL.map(Builtin::name).join(", ");
                bail!(
                    "the folder {} does not exist; --model expects a Hugging Face folder or one of {names}",
                    path.display()
                );
            }
            fits(path, machine)?;
            ModelSource::Folder(path.clone())
        }
    })
}

/// Says how far the making of a built-in model is, a few times.
#[derive(Default)]
struct Making {
    said: AtomicU64,
}

impl Making {
    const STEPS: u64 = 4;

    fn told(&self) -> impl Fn(u64, u64) + Sync {
        |written, all| {
            let step = written * Self::STEPS / all.max(1);
            if self.said.fetch_max(step + 1, Ordering::Relaxed) <= step {
                let percent = 100 * step / Self::STEPS;
                tracing::info!(
                    "creating the built-in model (first start only): {percent} % of {}",
                    ByteSize(all).about()
                );
            }
        }
    }
}

/// Weights take at least their size on disk; that much must be there before hours are spent on reading them.
fn fits(folder: &Path, machine: &Machine) -> anyhow::Result<()> {
    let files = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let weights = files
        .filter_map(Result::ok)
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "safetensors"))
        // Links into a cache of downloads are followed.
        .filter_map(|file| Some(std::fs::metadata(file.path()).ok()?.len()))
        .sum::<u64>();
    match machine.memory {
        Some(have) if weights > have => bail!(
            "not enough memory: the weights in {} take {} on disk, and {} is available; serve a smaller model",
            folder.display(),
            ByteSize(weights).about(),
            ByteSize(have).about()
        ),
        _ => Ok(()),
    }
}
