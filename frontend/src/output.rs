//! From the engine's tokens to the text of choices: generation, detokenization, stop strings, log-probabilities,
//! metrics.

mod choice;
mod detokenize;
mod generation;
mod json_text;
mod logprobs;
mod merged;
mod meter;
mod relay_meter;
mod stop;
mod stored_object;
mod stream_text;

pub(crate) use choice::{ChoiceDelta, FinishReason, StopReason};
pub(crate) use generation::{Generation, GenerationRequest};
pub(crate) use logprobs::{TokenLogprobs, decimal, finite};
pub(crate) use relay_meter::{BYTES_PER_TOKEN, BodyKind, OutputText, RelayMeter};
pub(crate) use stored_object::{Access, StoredObject};
