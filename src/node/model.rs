//! Opens the model on a blocking thread, with progress in the log. A model that cannot fit is refused before it is
//! read.

use crate::config::{ByteSize, Model};
use crate::process::machine::Machine;
use anyhow::{Context, bail};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::time::timeout;
use worker::llama::{Builtin, ModelSource, Runtime, Shape};

/// The weights do not fit into the memory of the machine.
#[derive(Debug, thiserror::Error)]
#[error(
    "not enough memory: the weights in {folder} take {weights} on disk, and {have} is available; \
         serve a smaller model: --model DIR|NAME"
)]
pub(super) struct TooLarge {
    folder: String,
    weights: String,
    have: String,
}

impl TooLarge {
    /// What to change. The text of the error ends with it.
    pub(super) const ADVICE: &str = "serve a smaller model: --model DIR|NAME";
}

/// What `--model` names, apart from the built-in models.
const FOLDER: &str = "the Hugging Face folder of a model: config.json, *.safetensors, tokenizer.json";

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
    let load = move || Runtime::open(&source, &data_dir, threads, &CreationProgress::default().report());
    let still_loading = |passed: Duration| tracing::info!("still loading {model}, for {} s", passed.as_secs());
    let loaded = reporting(tokio::task::spawn_blocking(load), still_loading).await;
    let loaded = loaded.context("loading the model failed")?;
    let runtime = loaded.with_context(|| format!("cannot load the model {model}"))?;
    let weights = ByteSize(runtime.shape().weights_bytes).about();
    tracing::info!("loaded {model}: weights of {weights} in {:.1} s", start.elapsed().as_secs_f64());
    Ok(runtime)
}

/// Interval of log lines while a model is loaded: large weights take minutes, and without a line the process looks as
/// if it hung.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Waits for work, and reports every [`REPORT_INTERVAL`] for how long it has run.
async fn reporting<T>(work: impl Future<Output = T>, report: impl Fn(Duration)) -> T {
    let start = tokio::time::Instant::now();
    let mut work = pin!(work);
    loop {
        match timeout(REPORT_INTERVAL, &mut work).await {
            Ok(done) => return done,
            Err(_) => report(start.elapsed()),
        }
    }
}

/// The sizes of the model, from the files in its folder. The weights are not loaded.
pub(super) fn shape(model: &Model, machine: &Machine) -> anyhow::Result<Shape> {
    let shape = Shape::of(&source(model, machine)?);
    shape.with_context(|| format!("cannot load the model {model}"))
}

fn source(model: &Model, machine: &Machine) -> anyhow::Result<ModelSource> {
    Ok(match model {
        Model::BuiltIn(model) => ModelSource::Builtin(*model),
        Model::Folder(path) => {
            if path.is_file() {
                bail!(
                    "{} is a file; expected {FOLDER}; other formats, such as .gguf, must be converted to safetensors \
                     first",
                    path.display()
                );
            }
            if !path.is_dir() {
                let names = Builtin::ALL.map(Builtin::name).join(", ");
                bail!(
                    "the folder {} does not exist; --model expects a Hugging Face folder or one of {names}{}",
                    path.display(),
                    download_hint(path)
                );
            }
            if !path.join("config.json").exists() {
                bail!("{} has no config.json; expected {FOLDER}", path.display());
            }
            check_memory(path, machine)?;
            ModelSource::Folder(path.clone())
        }
    })
}

/// How to get the model, if the missing folder is written like the name of a model on a hub: `meta-llama/Llama-3-8B`.
fn download_hint(path: &Path) -> String {
    let name = path.to_string_lossy();
    let is_word = |word: &str| {
        let is_name_char = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
        word.starts_with(|first: char| first.is_ascii_alphanumeric()) && word.chars().all(is_name_char)
    };
    match name.split_once('/') {
        Some((owner, model)) if is_word(owner) && is_word(model) => {
            format!("; models are not downloaded: hf download {name} --local-dir DIR")
        }
        _ => String::new(),
    }
}

/// Logs the progress of creating a built-in model, in quarters.
#[derive(Default)]
struct CreationProgress {
    /// Quarters that were logged.
    logged: AtomicU64,
}

impl CreationProgress {
    const STEPS: u64 = 4;

    fn report(&self) -> impl Fn(u64, u64) + Sync {
        |written, all| {
            let step = written * Self::STEPS / all.max(1);
            if self.logged.fetch_max(step + 1, Ordering::Relaxed) <= step {
                let percent = 100 * step / Self::STEPS;
                tracing::info!(
                    "creating the built-in model (first start only): {percent} % of {}",
                    ByteSize(all).about()
                );
            }
        }
    }
}

/// Refuses weights whose size on disk exceeds the available memory, before they are read.
fn check_memory(folder: &Path, machine: &Machine) -> anyhow::Result<()> {
    let files = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let weights = files
        .filter_map(Result::ok)
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "safetensors"))
        // `metadata` follows links: download caches of Hugging Face link to their files.
        .filter_map(|file| Some(std::fs::metadata(file.path()).ok()?.len()))
        .sum::<u64>();
    match machine.memory {
        Some(have) if weights > have => Err(TooLarge {
            folder: folder.display().to_string(),
            weights: ByteSize(weights).about(),
            have: ByteSize(have).about(),
        }
        .into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use tokio::time::sleep;

    #[tokio::test(start_paused = true)]
    async fn work_that_takes_long_is_reported_until_it_is_done() {
        let reported = RefCell::new(Vec::new());
        let work = async {
            sleep(Duration::from_secs(25)).await;
            "loaded"
        };
        assert_eq!(reporting(work, |passed| reported.borrow_mut().push(passed.as_secs())).await, "loaded");
        assert_eq!(reported.into_inner(), [10, 20]);
    }

    #[test]
    fn weights_beyond_the_memory_are_an_error_that_ends_with_what_to_change() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("model.safetensors"), [0; 2048]).unwrap();
        let machine = |bytes| Machine { memory: Some(bytes), threads: 1 };
        assert!(check_memory(folder.path(), &machine(2048)).is_ok());
        let error = check_memory(folder.path(), &machine(1024)).unwrap_err();
        assert!(error.is::<TooLarge>() && error.to_string().ends_with(TooLarge::ADVICE), "{error}");
        assert!(error.to_string().contains("take 2.0 KiB on disk, and 1.0 KiB is available"), "{error}");
    }

    #[test]
    fn what_is_no_folder_of_a_model_is_refused_with_what_is_expected() {
        let (folder, machine) = (tempfile::tempdir().unwrap(), Machine { memory: None, threads: 1 });
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, "").unwrap();
        let refused = |path: &Path| source(&Model::Folder(path.to_owned()), &machine).err().unwrap().to_string();
        assert!(refused(&file).contains("is a file; expected the Hugging Face folder"), "{}", refused(&file));
        let empty = refused(folder.path());
        assert!(empty.contains("has no config.json; expected the Hugging Face folder"), "{empty}");
    }

    #[test]
    fn the_name_of_a_model_on_a_hub_is_recognised() {
        let hint = download_hint(Path::new("meta-llama/Llama-3-8B"));
        assert_eq!(hint, "; models are not downloaded: hf download meta-llama/Llama-3-8B --local-dir DIR");
        for folder in ["./meta-llama/Llama", "/models/llama", "models/meta/llama", "llama", "../llama", "~/llama"] {
            assert_eq!(download_hint(Path::new(folder)), "", "{folder}");
        }
    }
}
