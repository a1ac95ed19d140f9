//! The gateways that are compared, and how each is started and installed.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::engine::MODEL;
use super::tokenizer::Tokenizer;
use anyhow::Result;
use serde_json::json;

/// The folder in which Dynamo's processes find each other.
const DYNAMO_DISCOVERY: &str = "dynamo-discovery";

/// A gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gateway {
    /// This program, routing by the text of prompts.
    Blockyard,
    /// This program, routing by KV events, with the tokens of prompts from the engines.
    BlockyardEvents,
    /// The same with the tokens of prompts from a tokenizer of its own.
    BlockyardTokenizer,
    /// Round robin, without a look into bodies.
    Nginx,
    /// vLLM's router, round robin.
    VllmRouter,
    /// SGLang's router, cache-aware.
    Smg,
    /// The proxy.
    LiteLlm,
    /// The frontend, routing by KV events, with workers of its own: it cannot stand in front of an OpenAI server.
    Dynamo,
}

/// What a gateway is started with.
pub struct Setting<'a> {
    /// The program under test.
    pub blockyard: &'a Path,
    /// A Python environment with the peers.
    pub environment: &'a Path,
    /// Configuration and logs.
    pub folder: &'a Path,
    /// The engines.
    pub engines: &'a [SocketAddr],
    /// Where it listens.
    pub listen: SocketAddr,
}

impl Gateway {
    /// All, this program first.
    pub const ALL: [Self; 8] = [
        Self::Blockyard,
        Self::BlockyardEvents,
        Self::BlockyardTokenizer,
        Self::Nginx,
        Self::VllmRouter,
        Self::Smg,
        Self::LiteLlm,
        Self::Dynamo,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blockyard => "blockyard",
            Self::BlockyardEvents => "blockyard-events",
            Self::BlockyardTokenizer => "blockyard-tokenizer",
            Self::Nginx => "nginx",
            Self::VllmRouter => "vllm-router",
            Self::Smg => "smg",
            Self::LiteLlm => "litellm",
            Self::Dynamo => "dynamo",
        }
    }

    /// Where it has the tokens of prompts from, as the label `tokens` of `relayed_prompts_total` names it; `None` if it
    /// routes without them.
    pub const fn tokens_from(self) -> Option<&'static str> {
        match self {
            Self::BlockyardEvents => Some("engine"),
            Self::BlockyardTokenizer => Some("local"),
            Self::Blockyard | Self::Nginx | Self::VllmRouter | Self::Smg | Self::LiteLlm | Self::Dynamo => None,
        }
    }

    /// Its program, if it is installed.
    pub fn program(self, setting: &Setting<'_>) -> Option<PathBuf> {
        let program = match self {
            Self::Blockyard | Self::BlockyardEvents | Self::BlockyardTokenizer => setting.blockyard.to_owned(),
            Self::Nginx => {
                return ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/bin/nginx"]
                    .iter()
                    .map(PathBuf::from)
                    .find(|path| path.exists());
            }
            Self::VllmRouter => setting.environment.join("bin/vllm-router"),
            Self::Smg => setting.environment.join("bin/smg"),
            Self::LiteLlm => setting.environment.join("bin/litellm"),
            Self::Dynamo => {
                let mut libraries = fs::read_dir(setting.environment.join("lib")).ok()?.flatten();
                libraries.find(|python| python.path().join("site-packages/dynamo/frontend").exists())?;
                setting.environment.join("bin/python")
            }
        };
        program.exists().then_some(program)
    }

    /// The command that installs it.
    pub fn install(self, environment: &Path) -> String {
        let pip = |package: &str| {
            let at = environment.display();
            format!("python3 -m venv {at} && {at}/bin/pip install {package}")
        };
        match self {
            Self::Blockyard | Self::BlockyardEvents | Self::BlockyardTokenizer => {
                "cargo build --locked --profile dist".to_owned()
            }
            Self::Nginx => "apt-get install nginx-light".to_owned(),
            Self::VllmRouter => pip("vllm-router==0.1.17"),
            Self::Smg => pip("smg==1.13.0"),
            Self::LiteLlm => pip("'litellm[proxy]==1.106.2'"),
            // Without the libraries of its engines.
            Self::Dynamo => {
                let runtime = pip("ai-dynamo-runtime==1.6.1 packaging pyyaml msgspec 'zstandard<1.0'");
                format!("{runtime} && {}/bin/pip install --no-deps ai-dynamo==1.6.1", environment.display())
            }
        }
    }

    /// The command that starts its engines, if it needs others than the common ones.
    pub fn own_engines(self, program: &Path, setting: &Setting<'_>) -> Result<Option<Command>> {
        if self != Self::Dynamo {
            return Ok(None);
        }
        let tokenizer = Tokenizer::default();
        let model = setting.folder.join("dynamo-model");
        tokenizer.write(&model)?;
        fs::create_dir_all(setting.folder.join(DYNAMO_DISCOVERY))?;
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": tokenizer.vocabulary_size(), "max_position_embeddings": 1 << 17, "bos_token_id": 0,
            "eos_token_id": 10,
        });
        fs::write(model.join("config.json"), config.to_string())?;
        fs::write(model.join("generation_config.json"), json!({ "eos_token_id": 10 }).to_string())?;
        let mut command = dynamo(program, "dynamo.mocker", setting.folder);
        command.arg("--model-path").arg(model).args(["--model-name", MODEL, "--speedup-ratio", "1000"]);
        command.args(["--num-workers", &setting.engines.len().to_string(), "--max-num-seqs", "1024"]);
        Ok(Some(command))
    }

    /// The command that starts it.
    pub fn command(self, program: &Path, setting: &Setting<'_>) -> Result<Command> {
        let Setting { folder, engines, listen, .. } = setting;
        let urls: Vec<String> = engines.iter().map(|engine| format!("http://{engine}")).collect();
        let write = |name: &str, text: &str| -> Result<PathBuf> {
            let path = folder.join(name);
            fs::write(&path, text)?;
            Ok(path)
        };
        let (host, port) = (listen.ip().to_string(), listen.port().to_string());
        let metrics = (listen.port() + 1).to_string();
        let mut command = Command::new(program);
        match self {
            Self::Blockyard | Self::BlockyardEvents | Self::BlockyardTokenizer => {
                let events = if self == Self::Blockyard { "off" } else { "auto" };
                let table = |url: &String| format!("[[upstreams]]\nurl = \"{url}\"\nkv_events = \"{events}\"\n");
                let mut tables = urls.iter().map(table).collect::<Vec<_>>().concat();
                // As many as nginx has: memory may be measured with more streams than the default allows.
                tables.push_str("[frontend]\nmax_connections = 32768\nshutdown_delay = \"0s\"\n");
                if self == Self::BlockyardTokenizer {
                    let files = folder.join("tokenizer");
                    Tokenizer::default().write(&files)?;
                    tables.extend(["[tokenizers]\n", MODEL, " = \"", &files.display().to_string(), "\"\n"]);
                }
                let config = write(&format!("{}.toml", self.name()), &tables)?;
                command.args(["serve", "--log", "warn", "--listen", &listen.to_string(), "--config"]).arg(config);
            }
            Self::Nginx => {
                let config = write("nginx.conf", &nginx(folder, engines, *listen))?;
                command.arg("-c").arg(config);
            }
            Self::VllmRouter => {
                command.args(["--host", &host, "--port", &port, "--policy", "round_robin", "--log-level", "warning"]);
                command.args(["--prometheus-host", &host, "--prometheus-port", &metrics, "--worker-urls"]).args(urls);
            }
            Self::Smg => {
                command.args(["launch", "--host", &host, "--port", &port, "--policy", "cache_aware"]);
                command.args(["--log-level", "warn", "--prometheus-host", &host, "--prometheus-port", &metrics]);
                command.arg("--worker-urls").args(urls);
            }
            Self::Dynamo => {
                command = dynamo(program, "dynamo.frontend", folder);
                command.args(["--http-host", &host, "--http-port", &port, "--router-mode", "kv"]);
            }
            Self::LiteLlm => {
                let models: String = urls.iter().map(|url| litellm_model(url)).collect();
                let config = write("litellm.yaml", &format!("model_list:\n{models}"))?;
                command.args(["--host", &host, "--port", &port, "--num_workers", "2", "--telemetry", "False"]);
                command.arg("--config").arg(config);
                command.envs([
                    ("LITELLM_MASTER_KEY", "sk-bench"),
                    ("LITELLM_LOG", "ERROR"),
                    ("LITELLM_MODE", "PRODUCTION"),
                    // Otherwise it downloads a list of prices.
                    ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
                ]);
            }
        }
        Ok(command)
    }
}

/// A program of Dynamo, whose processes find each other through files: without etcd and NATS.
fn dynamo(python: &Path, module: &str, folder: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", module, "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]);
    command.env("DYN_FILE_KV", folder.join(DYNAMO_DISCOVERY));
    command.envs([("DYN_LOG", "error"), ("DYN_TCP_RPC_HOST", "127.0.0.1"), ("HF_HUB_OFFLINE", "1")]);
    command
}

fn litellm_model(url: &str) -> String {
    format!(
        "- model_name: {MODEL}\n  litellm_params: {{ model: openai/{MODEL}, api_base: \"{url}/v1\", api_key: none }}\n"
    )
}

/// A proxy without buffering that keeps its connections.
fn nginx(folder: &Path, engines: &[SocketAddr], listen: SocketAddr) -> String {
    let folder = folder.display();
    let servers = engines.iter().map(|engine| format!("server {engine};")).collect::<Vec<_>>().concat();
    let path = |kind: &str| format!("{kind}_temp_path {folder}/nginx-{kind};\n");
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(path).concat();
    format!(
        "daemon off;\nworker_processes 2;\nerror_log stderr error;\npid {folder}/nginx.pid;\n\
         events {{ worker_connections 32768; }}\n\
         http {{\naccess_log off;\n{paths}client_body_buffer_size 256k;\nkeepalive_requests 1000000000;\n\
         upstream engines {{ {servers} keepalive 512; keepalive_requests 1000000000; }}\n\
         server {{\nlisten {listen} reuseport;\nlocation / {{\nproxy_pass http://engines;\nproxy_http_version 1.1;\n\
         proxy_set_header Connection \"\";\nproxy_buffering off;\nproxy_read_timeout 600s;\n}}\n}}\n}}\n"
    )
}
