//! The safetensors files of a model on disk: one file, or shards and an index.
//!
//! Headers are read and checked first, so a truncated file is found before its values are used. Values are read with
//! positioned reads in parallel chunks, hashed and widened to f32 while they are in the CPU cache. The files are
//! deliberately not mapped: a file that shrinks under a mapping kills the process; under a read it is an error.

use super::tensors;
use crate::llama::loader::config::Config;
use crate::llama::loader::error::FolderError;
use crate::llama::loader::json::{Fields, json};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use transport::open_regular;

/// Values per chunk: 512 KiB of 16-bit values, 1 MiB of f32; fits a core's cache, and reads of that size run at full
/// speed. The hash of a tensor depends on it.
const CHUNK: usize = 1 << 18;

/// Larger headers are rejected; this is the format's own limit.
const HEADER_MAX: u64 = 100_000_000;

/// The opened files of a model's weights.
pub(crate) struct Checkpoint {
    files: Vec<Shard>,
    /// Index into `files` by tensor.
    file_of: HashMap<String, usize>,
}

struct Shard {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Offset of the values in the file.
    start: u64,
}

impl Checkpoint {
    /// Opens the files in `folder` and reads their headers.
    pub(crate) fn open(folder: &Path) -> Result<Self, FolderError> {
        let (one, index) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
        if one.exists() {
            let shard = Shard::open(one)?;
            let file_of = shard.metadata.offset_keys().into_iter().map(|name| (name, 0)).collect();
            return Ok(Self { files: vec![shard], file_of });
        }
        if !index.exists() {
            return Err(FolderError::NoWeights { path: folder.to_owned() });
        }
        Self::open_shards(folder, &index)
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self, FolderError> {
        let file = json(index)?;
        let fields = Fields::of(index, &file)?;
        let map: BTreeMap<String, String> = fields.required("weight_map")?;
        let names: Vec<&String> = map.values().collect::<BTreeSet<_>>().into_iter().collect();
        if let Some(name) = names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            return Err(fields.wrong("weight_map", format!("names {name:?}, which is not a file in the folder")));
        }
        if names.is_empty() {
            return Err(fields.wrong("weight_map", "names no file"));
        }
        let files = names.iter().map(|name| Shard::open(folder.join(name))).collect::<Result<Vec<_>, _>>()?;
        let place = |name: &String| names.binary_search(&name).expect("names holds every value of map");
        let file_of = map.iter().map(|(tensor, name)| (tensor.clone(), place(name))).collect();
        Ok(Self { files, file_of })
    }

    /// Checks that the files contain every tensor that `config` requires, in its shape and in a supported type, and
    /// no other tensor of the architecture: a tensor that the forward pass does not read means that `config`
    /// describes another model.
    pub(crate) fn check(&self, config: &Config) -> Result<(), FolderError> {
        let expected = tensors(config);
        self.check_unused(config, &expected)?;
        for (name, shape) in expected {
            let (shard, info) = self.find(&name)?;
            if info.shape != shape {
                return Err(shard.wrong(&name, format!("has shape {:?}; config.json makes it {shape:?}", info.shape)));
            }
            if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                return Err(shard.wrong(&name, format!("is of type {:?}; supported are F32, F16 and BF16", info.dtype)));
            }
        }
        Ok(())
    }

    /// Rejects tensors of layers, embedding, norm or head that are not in `expected`. Other tensors (of a value head,
    /// for example) do not take part in the forward pass and are only logged.
    fn check_unused(&self, config: &Config, expected: &[(String, Vec<usize>)]) -> Result<(), FolderError> {
        let expected: HashSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        // Computed here from config.json.
        let is_derived = |name: &str| name.ends_with(".rotary_emb.inv_freq");
        // Often stored although the embedding is used instead.
        let is_tied_head = |name: &str| config.tied && name == "lm_head.weight";
        let mut unused: Vec<(String, &Shard)> = self
            .files
            .iter()
            .flat_map(|shard| shard.metadata.tensors().into_keys().map(move |name| (name, shard)))
            .filter(|(name, _)| !expected.contains(name.as_str()) && !is_derived(name) && !is_tied_head(name))
            .collect();
        unused.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let takes_part = |name: &str| name.starts_with("model.") || name.starts_with("lm_head.");
        if let Some((name, shard)) = unused.iter().find(|(name, _)| takes_part(name)) {
            return Err(shard.wrong(name, unused_problem(config, name)));
        }
        if let Some((name, shard)) = unused.first() {
            tracing::warn!(
                file = %shard.path.display(), first_tensor = name, count = unused.len(),
                "the checkpoint has tensors that are not used"
            );
        }
        Ok(())
    }

    /// Number of values of a tensor.
    pub(crate) fn size(&self, name: &str) -> Result<usize, FolderError> {
        Ok(self.find(name)?.1.shape.iter().product())
    }

    /// Reads a tensor into `into`, which has its size, and returns a hash of the stored bytes.
    pub(crate) fn read(&self, name: &str, into: &mut [f32]) -> Result<blake3::Hash, FolderError> {
        let (shard, info) = self.find(name)?;
        assert_eq!(info.shape.iter().product::<usize>(), into.len(), "{name}: `check` compared the shapes");
        let width = info.dtype.bitsize() / 8;
        let start = shard.start + info.data_offsets.0 as u64;
        let chunks = into.par_chunks_mut(CHUNK).enumerate().map(|(i, values)| {
            let at = start + (i * CHUNK * width) as u64;
            match info.dtype {
                Dtype::F32 => floats(&shard.file, at, values),
                Dtype::F16 => halves::<f16>(&shard.file, at, values),
                _ => halves::<bf16>(&shard.file, at, values),
            }
        });
        let hashes = chunks.collect::<io::Result<Vec<_>>>();
        let hashes = hashes.map_err(|source| FolderError::Read { path: shard.path.clone(), source })?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{name} {} {:?}\n", hashed_name(info.dtype), info.shape).as_bytes());
        for hash in hashes {
            hasher.update(hash.as_bytes());
        }
        Ok(hasher.finalize())
    }

    /// The error of a tensor, or of one that is read together with it, with values that are NaN or infinite.
    pub(crate) fn not_finite(&self, name: &str) -> FolderError {
        let problem = "has values that are not finite (NaN or infinite); the file is damaged, download it again";
        self.find(name).map_or_else(|error| error, |(shard, _)| shard.wrong(name, problem))
    }

    fn find(&self, name: &str) -> Result<(&Shard, &TensorInfo), FolderError> {
        let shard = &self.files[self.file_of.get(name).copied().unwrap_or(0)];
        match shard.metadata.info(name) {
            Some(info) => Ok((shard, info)),
            None if name == "lm_head.weight" => {
                Err(shard.wrong(name, "is missing, and `tie_word_embeddings` in config.json is not true"))
            }
            None => Err(shard.wrong(name, "is missing")),
        }
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, FolderError> {
        match Self::header(&path) {
            Ok((file, metadata, start)) => Ok(Self { path, file, metadata, start }),
            Err(HeaderError::Io(source)) => Err(FolderError::Read { path, source }),
            Err(HeaderError::Header(problem)) => Err(FolderError::Weights { path, problem }),
        }
    }

    fn header(path: &Path) -> Result<(File, Metadata, u64), HeaderError> {
        let file = open_regular(path)?;
        let size = file.metadata()?.len();
        let mut length = [0; 8];
        if size < 8 {
            return Err(HeaderError::Header(format!("has {size} bytes; it is not a safetensors file")));
        }
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_MAX || length > size - 8 {
            let problem =
                format!("has {size} bytes, but its header claims {length}; the file is truncated or not safetensors");
            return Err(HeaderError::Header(problem));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| HeaderError::Header(format!("the safetensors header is invalid: {error}")))?;
        let (start, expected) = (8 + length, 8 + length + metadata.data_len() as u64);
        if size != expected {
            return Err(HeaderError::Header(format!(
                "has {size} bytes, its header says {expected}; download the file again"
            )));
        }
        Ok((file, metadata, start))
    }

    fn wrong(&self, tensor: &str, problem: impl Into<String>) -> FolderError {
        FolderError::Tensor { path: self.path.clone(), tensor: tensor.to_owned(), problem: problem.into() }
    }
}

/// The error message for an unused tensor.
fn unused_problem(config: &Config, name: &str) -> String {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    match layer {
        Some(layer) if layer >= config.layers => {
            format!("belongs to layer {layer}, but `num_hidden_layers` in config.json is {}", config.layers)
        }
        _ => format!(
            "is not part of the architecture {} that config.json names; the answers would be wrong without it",
            config.family.architecture()
        ),
    }
}

enum HeaderError {
    Io(io::Error),
    Header(String),
}

impl From<io::Error> for HeaderError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The type of a tensor as it is hashed into the identity of a model. A changed name makes all stored blocks misses.
fn hashed_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "F32",
        Dtype::F16 => "F16",
        _ => "BF16",
    }
}

fn floats(file: &File, at: u64, into: &mut [f32]) -> io::Result<blake3::Hash> {
    let bytes = bytemuck::cast_slice_mut(into);
    file.read_exact_at(bytes, at)?;
    Ok(blake3::hash(bytes))
}

fn halves<H: bytemuck::Pod>(file: &File, at: u64, into: &mut [f32]) -> io::Result<blake3::Hash>
where
    [H]: HalfFloatSliceExt,
{
    let mut stored = vec![H::zeroed(); into.len()];
    file.read_exact_at(bytemuck::cast_slice_mut(&mut stored), at)?;
    stored.convert_to_f32_slice(into);
    Ok(blake3::hash(bytemuck::cast_slice(&stored)))
}
