use super::*;
use crate::llama::loader::config::{Family, Llama3Scaling};
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/reference").join(name)
}

fn open(name: &str) -> LoadedModel {
    LoadedModel::open(&reference(name), None).unwrap()
}

/// A copy of a reference model that a test may break.
fn copy(name: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(reference(name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

/// What is said of a folder that does not open.
fn refusal(folder: &Path) -> String {
    LoadedModel::open(folder, None).err().expect("the folder must be refused").to_string()
}

/// What is said of `llama` when fields of its config.json are changed; null takes a field away.
fn refused_with(name: &str, changes: &Value) -> String {
    let folder = copy(name);
    amend(&folder.path().join("config.json"), changes);
    refusal(folder.path())
}

fn config_with(name: &str, changes: &Value) -> Config {
    let path = reference(name).join("config.json");
    let mut file = json(&path).unwrap();
    merge(&mut file, changes);
    Config::parse(&path, &file).unwrap()
}

fn amend(path: &Path, changes: &Value) {
    let mut file = json(path).unwrap();
    merge(&mut file, changes);
    std::fs::write(path, file.to_string()).unwrap();
}

fn merge(file: &mut Value, changes: &Value) {
    for (name, value) in changes.as_object().unwrap() {
        let file = file.as_object_mut().unwrap();
        if value == "absent" { _ = file.shift_remove(name) } else { _ = file.insert(name.clone(), value.clone()) }
    }
}

#[test]
fn every_family_opens() {
    let families = [("llama", Family::Llama), ("llama3", Family::Llama), ("mistral", Family::Mistral)];
    for (name, family) in families.into_iter().chain([("qwen2", Family::Qwen2), ("qwen3", Family::Qwen3)]) {
        let LoadedModel { card, config, weights } = open(name);
        assert_eq!((config.family, card.id.as_str(), card.context, card.vocabulary), (family, name, 256, 264));
        assert_eq!(weights.layers.len(), 2);
        assert_eq!(weights.head.is_none(), config.tied);
        let layer = &weights.layers[1];
        assert_eq!((layer.qkv.rows, layer.qkv.cols), ((4 + 2 * 2) * config.head_dim, 32));
        assert_eq!((layer.output.rows, layer.output.cols), (32, 4 * config.head_dim));
        assert_eq!((layer.gate_up.rows, layer.gate_up.cols, layer.down.cols), (112, 32, 56));
        assert_eq!(layer.qkv_bias.as_ref().map(Vec::len), (family == Family::Qwen2).then_some(64));
        assert_eq!(layer.q_norm.as_ref().map(Vec::len), (family == Family::Qwen3).then_some(16));
    }
}

#[test]
fn a_named_pipe_as_a_file_is_refused_and_blocks_nothing() {
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = copy("llama");
        let path = folder.path().join(name);
        std::fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let said = refusal(folder.path());
        assert!(said.contains(name) && said.contains("expected a regular file"), "{said}");
    }
}

#[test]
fn both_spellings_of_the_rope_settings_are_read() {
    let new = open("qwen2").config.rope;
    assert_eq!((new.theta, new.scaling), (1_000_000.0, None));
    let old = open("llama3").config.rope;
    let scaling = Llama3Scaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 };
    assert_eq!((old.theta, old.scaling), (10_000.0, Some(scaling)));
}

#[test]
fn a_window_must_hold_for_all_layers() {
    assert_eq!(open("mistral").config.sliding_window, Some(24));
    assert_eq!(config_with("mistral", &serde_json::json!({"sliding_window": null})).sliding_window, None);
    assert_eq!(config_with("mistral", &serde_json::json!({"sliding_window": "absent"})).sliding_window, Some(4096));
    let qwen2 = |layers: u32| {
        let window = serde_json::json!({"use_sliding_window": true, "sliding_window": 16, "layer_types": "absent"});
        let mut all = window.as_object().unwrap().clone();
        all.insert("max_window_layers".to_owned(), layers.into());
        Value::Object(all)
    };
    assert_eq!(config_with("qwen2", &qwen2(0)).sliding_window, Some(16));
    assert_eq!(config_with("qwen2", &qwen2(2)).sliding_window, None);
    let said = refused_with("qwen2", &qwen2(1));
    assert!(said.contains("config.json: `max_window_layers` gives 1 of 2 layers"), "{said}");
}

#[test]
fn end_tokens_are_read_from_all_files() {
    assert_eq!(open("llama3").card.eos, [257, 259], "config.json and generation_config.json");
    let folder = copy("llama");
    amend(&folder.path().join("tokenizer_config.json"), &serde_json::json!({"eos_token": {"content": "<|end|>"}}));
    assert_eq!(LoadedModel::open(folder.path(), None).unwrap().card.eos, [257, 259], "and the tokenizer's");
}

#[test]
fn sampling_defaults_come_from_the_generation_config() {
    let folder = copy("llama");
    let path = folder.path().join("generation_config.json");
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    write(r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}"#);
    let card = LoadedModel::open(folder.path(), None).unwrap().card;
    let want = SamplingDefaults {
        temperature: Some(0.6),
        top_p: Some(0.9),
        top_k: Some(20),
        min_p: None,
        repetition_penalty: Some(1.05),
    };
    assert_eq!(card.sampling, want);
    write(r#"{"top_k": 0}"#);
    assert_eq!(LoadedModel::open(folder.path(), None).unwrap().card.sampling, SamplingDefaults::default());
    write(r#"{"top_p": 1.5}"#);
    let text = refusal(folder.path());
    assert!(text.contains("generation_config.json: `top_p` is 1.5; it must be from"), "{text}");
}

#[test]
fn the_chat_template_is_found_in_every_place() {
    let plain = open("llama").card;
    let template = plain.chat_template.unwrap();
    assert!(template.starts_with("{{ bos_token }}"));
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    assert_eq!(plain.special_tokens, special, "as string and as object");
    assert_eq!(open("llama3").card.chat_template.unwrap(), template, "the default one of several");
    let folder = copy("llama");
    std::fs::write(folder.path().join("chat_template.jinja"), "from its own file").unwrap();
    assert_eq!(LoadedModel::open(folder.path(), None).unwrap().card.chat_template.unwrap(), "from its own file");
}

#[test]
fn identity_names_configuration_and_weights() {
    let original = open("llama").card.identity;
    let folder = copy("llama");
    assert_eq!(LoadedModel::open(folder.path(), Some("renamed")).unwrap().card.identity, original);
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    assert_ne!(LoadedModel::open(folder.path(), None).unwrap().card.identity, original, "one bit of one weight");
    let folder = copy("llama");
    amend(&folder.path().join("config.json"), &serde_json::json!({"rms_norm_eps": 1e-5}));
    assert_ne!(LoadedModel::open(folder.path(), None).unwrap().card.identity, original);
}

#[test]
fn an_unsupported_configuration_is_rejected_by_field() {
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    for (changes, said) in [
        (r#"{"architectures": ["GPT2LMHeadModel"]}"#, r#"`architectures` is ["GPT2LMHeadModel"]; supported are Llama"#),
        (r#"{"hidden_size": "absent"}"#, "`hidden_size` is missing"),
        (r#"{"hidden_size": 0}"#, "`hidden_size` is 0; it must be from 1 to"),
        (r#"{"num_hidden_layers": "many"}"#, "`num_hidden_layers` is \"many\": "),
        (r#"{"num_key_value_heads": 3}"#, "`num_key_value_heads` is 3, which does not divide the 4 heads"),
        (r#"{"head_dim": 7}"#, "`head_dim` is 7"),
        (r#"{"mlp_bias": true}"#, "`mlp_bias` is true"),
        (r#"{"attention_bias": true}"#, "`attention_bias` is true"),
        (r#"{"hidden_act": "gelu"}"#, "`hidden_act` is `gelu`; supported is silu"),
        (r#"{"quantization_config": {"bits": 4}}"#, "`quantization_config` is set"),
        (
            r#"{"rope_parameters": {"rope_type": "yarn"}}"#,
            "`rope_parameters.rope_type` is `yarn`; supported are default",
        ),
        (
            r#"{"rope_parameters": "absent", "rope_scaling": {"type": "linear"}}"#,
            "`rope_scaling.type` is `linear`; supp",
        ),
        (r#"{"rope_parameters": {"full_attention": {}}}"#, "`rope_parameters.full_attention` is set"),
        (r#"{"rope_parameters": {"rope_type": "llama3"}}"#, "`rope_parameters.factor` is missing"),
        (r#"{"eos_token_id": [1, 264]}"#, "`eos_token_id` names token 264, but the vocabulary has 264"),
        (r#"{"eos_token_id": "end"}"#, "`eos_token_id` is \"end\": expected a token id or a list of them"),
    ] {
        let text = refused_with("llama", &json(changes));
        assert!(text.contains("/config.json: ") && text.contains(said), "{changes}: {text}");
    }
}

#[test]
fn missing_or_broken_files_are_named() {
    let not_there = Path::new("/nowhere/at/all");
    assert!(refusal(not_there).contains("/nowhere/at/all: no such folder"));
    for (file, content, said) in [
        ("config.json", None, "config.json: No such file"),
        ("config.json", Some("{\"a\": 1,"), "config.json: the file is not valid JSON: EOF while parsing"),
        ("config.json", Some("[]"), "config.json: the file is not a JSON object"),
        ("tokenizer.json", None, ": tokenizer.json is missing; it comes with most models, and transformers writes it"),
        ("tokenizer.json", Some("{}"), "tokenizer.json: the file is not a tokenizer"),
        (
            "tokenizer_config.json",
            Some("{\"chat_template\": 7}"),
            "tokenizer_config.json: `chat_template` is 7: expected",
        ),
        ("generation_config.json", Some("nonsense"), "generation_config.json: the file is not valid JSON"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("model.safetensors", Some(""), "model.safetensors: has 0 bytes; it is not a safetensors file"),
        (
            "model.safetensors",
            Some("version https://git-lfs"),
            "model.safetensors: has 23 bytes, but its header claims",
        ),
    ] {
        let folder = copy("llama");
        let path = folder.path().join(file);
        content.map_or_else(|| std::fs::remove_file(&path), |content| std::fs::write(&path, content)).unwrap();
        let text = refusal(folder.path());
        assert!(text.contains(said), "{file}: {text}");
    }
}

#[test]
fn truncated_or_mismatched_weights_are_named() {
    let folder = copy("llama");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let text = refusal(folder.path());
    let (size, expected) = (bytes.len() - 100, bytes.len());
    assert!(text.contains(&format!("model.safetensors: has {size} bytes, its header says {expected}")), "{text}");

    let text = refused_with("llama", &serde_json::json!({"tie_word_embeddings": false}));
    assert!(text.contains("tensor `lm_head.weight` is missing, and `tie_word_embeddings`"), "{text}");
    let text = refused_with("llama", &serde_json::json!({"num_hidden_layers": 3}));
    assert!(text.contains("tensor `model.layers.2.input_layernorm.weight` is missing"), "{text}");
    let text = refused_with("llama", &serde_json::json!({"vocab_size": 265}));
    assert!(text.contains("`model.embed_tokens.weight` has shape [264, 32]; config.json makes it [265, 32]"), "{text}");
    let text =
        refused_with("llama", &serde_json::json!({"vocab_size": 255, "eos_token_id": null, "bos_token_id": null}));
    assert!(text.contains("tokenizer.json: `model.vocab` has token"), "{text}");
}

#[test]
fn a_norm_that_is_not_finite_is_rejected() {
    let folder = copy("llama");
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..length]).unwrap();
    let tensor = "model.layers.1.input_layernorm.weight";
    let start = length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    // NaN, as F32 and as BF16.
    bytes[start..start + 4].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    let refused = refusal(folder.path());
    assert!(refused.contains(&format!("tensor `{tensor}` has values that are not finite")), "{refused}");
}

#[test]
fn an_unused_tensor_of_the_architecture_is_rejected() {
    let text = refused_with("llama", &serde_json::json!({"num_hidden_layers": 1}));
    let said = "tensor `model.layers.1.input_layernorm.weight` belongs to layer 1, but `num_hidden_layers`";
    assert!(text.contains(said) && text.ends_with("in config.json is 1"), "{text}");
    let text = refused_with("qwen2", &serde_json::json!({"architectures": ["LlamaForCausalLM"]}));
    let said = "tensor `model.layers.0.self_attn.k_proj.bias` is not part of the architecture LlamaForCausalLM";
    assert!(text.contains(said), "{text}");
    let text = refused_with("qwen3", &serde_json::json!({"architectures": ["Qwen2ForCausalLM"]}));
    assert!(text.contains("tensor `model.layers.0.self_attn.k_norm.weight` is not part of"), "{text}");
}

#[test]
fn unused_tensors_outside_the_architecture_are_accepted() {
    for extra in ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "v_head.summary.weight"] {
        let folder = copy("llama");
        add_tensor(folder.path(), extra);
        LoadedModel::open(folder.path(), None).unwrap_or_else(|error| panic!("{extra}: {error}"));
    }
    for extra in ["lm_head.bias", "model.norm.bias", "model.layers.0.mlp.experts.0.weight"] {
        let folder = copy("llama");
        add_tensor(folder.path(), extra);
        let text = refusal(folder.path());
        assert!(text.contains(&format!("tensor `{extra}` is not part of the architecture")), "{text}");
    }
}

/// Adds a tensor of one value to the model's file.
fn add_tensor(folder: &Path, name: &str) {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let end = bytes.len() - 8 - length;
    header[name] = serde_json::json!({"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]});
    let header = header.to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..], &[0; 4]].concat();
    std::fs::write(&path, file).unwrap();
}

#[test]
fn an_index_with_files_outside_the_folder_is_rejected() {
    let folder = copy("mistral");
    std::fs::remove_file(folder.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert!(refusal(folder.path()).contains("model-00002-of-00003.safetensors: No such file"));
    for (map, said) in [
        (
            r#"{"model.norm.weight": "../../secret"}"#,
            "`weight_map` names \"../../secret\", which is not a file in the folder",
        ),
        ("{}", "`weight_map` names no file"),
    ] {
        let index = folder.path().join("model.safetensors.index.json");
        std::fs::write(&index, format!("{{\"weight_map\": {map}}}")).unwrap();
        let text = refusal(folder.path());
        assert!(text.contains(said), "{text}");
    }
}
