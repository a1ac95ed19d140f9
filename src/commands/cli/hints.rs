//! Hints for flags that vLLM and SGLang have and this program has not.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Flags of vLLM and SGLang, each with its replacement here.
const FOREIGN: [(&str, &str); 27] = [
    ("--host", "--listen ADDR:PORT takes address and port together"),
    ("--port", "--listen ADDR:PORT takes address and port together, or --listen PORT for this machine only"),
    ("--api-key", "BLOCKYARD_API_KEY=KEY in the environment, or --set frontend.api_keys_file=PATH for several keys"),
    ("--served-model-name", "a model is served under the name of its folder: rename the folder, or link to it"),
    ("--max-model-len", "the context is what the model's config.json says; memory for it is --set tiers.g1=SIZE"),
    ("--context-length", "the context is what the model's config.json says; memory for it is --set tiers.g1=SIZE"),
    ("--model-path", "--model DIR"),
    ("--tokenizer", "the tokenizer is tokenizer.json in the model's folder"),
    ("--tokenizer-path", "the tokenizer is tokenizer.json in the model's folder"),
    ("--chat-template", "the template is chat_template.jinja or tokenizer_config.json in the model's folder"),
    ("--trust-remote-code", "no code of a model is ever run; the flag is not needed"),
    ("--dtype", "weights are computed as their folder has them; the flag is not needed"),
    ("--quantization", "quantised weights are not supported"),
    ("--gpu-memory-utilization", "--set tiers.g1=SIZE is the memory for KV blocks of each worker"),
    ("--mem-fraction-static", "--set tiers.g1=SIZE is the memory for KV blocks of each worker"),
    ("--swap-space", "--set tiers.g2=SIZE is the host memory for KV blocks of each worker"),
    ("--max-num-seqs", "--set engine.max_num_seqs=N"),
    ("--max-running-requests", "--set engine.max_num_seqs=N"),
    ("--max-num-batched-tokens", "--set engine.max_prefill_chunk_tokens=N"),
    ("--chunked-prefill-size", "--set engine.max_prefill_chunk_tokens=N"),
    ("--enable-prefix-caching", "prefixes are always cached; the flag is not needed"),
    ("--tensor-parallel-size", "--workers SPEC starts several workers; one model is not split among them"),
    ("--data-parallel-size", "--workers both:N starts N workers"),
    ("--kv-transfer-config", "--workers prefill:1,decode:2 disaggregates; --g4 URL shares blocks between nodes"),
    ("--disaggregation-mode", "--workers prefill:1 or --workers decode:1 of `blockyard worker`, one for each process"),
    ("--uvicorn-log-level", "--log LEVEL"),
    ("--log-level", "--log LEVEL"),
];

/// The error, with a hint for each flag of another server.
pub(super) fn with_hints(mut error: clap::Error, words: &[String]) -> clap::Error {
    let is_serve = words.get(1).is_some_and(|word| ["serve", "worker", "frontend"].contains(&word.as_str()));
    if !is_serve || error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let mut hints: Vec<String> = words.iter().filter_map(|word| hint(word)).collect();
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && !word.starts_with('-')
    {
        hints.push(format!("set the model with a flag: --model {word}"));
    }
    if !hints.is_empty() {
        // The similar flag that clap suggests is a wrong one beside a hint that names the right one.
        error.remove(ContextKind::SuggestedArg);
        hints.dedup();
        let hints = hints.into_iter().map(Into::into).collect();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(hints));
    }
    error
}

fn hint(word: &str) -> Option<String> {
    let flag = word.split('=').next().unwrap_or_default();
    let (flag, replacement) = FOREIGN.iter().find(|(name, _)| *name == flag)?;
    Some(format!("instead of {flag}: {replacement}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::cli::Cli;
    use crate::commands::cli::tests::refused;
    use clap::CommandFactory;

    #[test]
    fn flags_of_other_servers_get_a_hint() {
        for (line, hints) in [
            ("serve --host 0.0.0.0 --port 80", &["--listen ADDR:PORT", "instead of --host", "instead of --port"][..]),
            ("serve --api-key=secret", &["BLOCKYARD_API_KEY", "frontend.api_keys_file"]),
            ("serve --model tiny --served-model-name gpt", &["name of its folder"]),
            ("serve --max-model-len 4096", &["config.json", "tiers.g1"]),
            ("worker --disaggregation-mode prefill", &["--workers prefill:1"]),
            ("serve meta-llama/Llama-3.2-1B", &["--model meta-llama/Llama-3.2-1B"]),
            ("serve org/model --port 8000", &["--model org/model", "--listen"]),
        ] {
            let error = refused(&format!("blockyard {line}"));
            assert!(hints.iter().all(|hint| error.contains(hint)), "{line}: {error}");
            assert!(!error.contains("a similar argument exists"), "{line}: {error}");
        }
        let unknown = refused("blockyard serve --colour red");
        assert!(!unknown.contains("instead of"), "{unknown}");
        assert!(!refused("blockyard replay --port 80 x").contains("instead of"), "hints are for serve");
    }

    #[test]
    fn foreign_flags_are_unknown_and_hints_name_known_keys() {
        let mut serve = Cli::command().find_subcommand_mut("serve").unwrap().clone();
        serve.build();
        let flags: Vec<String> = serve.get_arguments().filter_map(|a| Some(format!("--{}", a.get_long()?))).collect();
        let keys: Vec<String> = crate::config::defaults().into_iter().map(|(key, _)| key).collect();
        for (flag, hint) in FOREIGN {
            assert!(!flags.contains(&flag.to_owned()), "{flag} is a flag of ours");
            for ours in hint.split(' ').filter(|word| word.starts_with("--")) {
                assert!(flags.contains(&ours.to_owned()), "{ours} is no flag");
            }
            for key in hint.split("--set ").skip(1).filter_map(|rest| rest.split('=').next()) {
                assert!(keys.contains(&key.to_owned()), "{key} is no key");
            }
        }
    }
}
