//! What `serve` says once it answers: for people, or as one line of JSON.

use crate::config::{ByteSize, SharedFlash};
use crate::node::sizes::Sizes;
use kvbm::object::Location;
use serde_json::{Value, json};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use worker::engine::ModelCard;
use worker::plane::Phase;

/// What there is to say about a node.
#[derive(Clone, Debug)]
pub struct Banner {
    /// What is served.
    pub model: Arc<ModelCard>,
    /// Where it listens.
    pub address: SocketAddr,
    /// The phase of each worker.
    pub phases: Vec<Phase>,
    /// Threads that compute.
    pub threads: usize,
    /// How large the tiers are.
    pub sizes: Sizes,
    /// Where G3 is.
    pub disks: Vec<PathBuf>,
    /// Where models are.
    pub data_dir: PathBuf,
    /// The folder between G3 and G4.
    pub pod: Option<SharedFlash>,
    /// Where G4 is.
    pub shared: Option<Location>,
}

impl Banner {
    /// As one JSON object.
    pub fn as_json(&self) -> Value {
        let Self { model, address, sizes, disks, data_dir, pod, shared, threads, .. } = self;
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": model.id,
            "random_weights": model.random_weights,
            "max_model_len": model.context,
            "address": address,
            "url": self.url(),
            "workers": self.phases,
            "threads": threads,
            "tiers": {
                "g1": sizes.g1,
                "g2": sizes.g2,
                "g3": sizes.g3,
                "g3_5": pod.as_ref().map(|pod| pod.capacity.0),
                "g4": shared,
            },
            "g3_paths": disks,
            "data_dir": data_dir,
        })
    }

    /// Where a client on this machine finds it: one cannot connect to "all addresses".
    fn url(&self) -> String {
        match self.address {
            at if at.ip().is_unspecified() => format!("http://localhost:{}", at.port()),
            at => format!("http://{at}"),
        }
    }

    fn workers(&self) -> String {
        let named =
            [(Phase::Prefill, "prefill"), (Phase::Decode, "decode"), (Phase::Both, "prefill and decode in one")];
        let count = |wanted| self.phases.iter().filter(|phase| **phase == wanted).count();
        let parts: Vec<_> = named
            .into_iter()
            .map(|(phase, name)| (count(phase), name))
            .filter(|(count, _)| *count > 0)
            .map(|(count, name)| format!("{count} {name}"))
            .collect();
        format!("{}; one copy of the weights, {} threads", parts.join(", "), self.threads)
    }

    fn tiers(&self) -> String {
        let size = |bytes| ByteSize(bytes).about();
        let Self { sizes, disks, pod, shared, .. } = self;
        let g1 = format!("G1 {}", size(sizes.g1));
        let g2 = sizes.g2.map_or("G2 off".into(), |bytes| format!("G2 {}", size(bytes)));
        let g3 = sizes.g3.map_or("G3 off".into(), |bytes| format!("G3 {} in {}", size(bytes), folders(disks)));
        let g4 = shared.as_ref().map_or("G4 off (--g4 URL)".into(), |store| format!("G4 in {store}"));
        let pod = pod.as_ref().map(|pod| format!("G3.5 {} in {}, ", size(pod.capacity.0), pod.path.display()));
        format!("{g1} and {g2} per worker, {g3}, {}{g4}", pod.unwrap_or_default())
    }
}

impl fmt::Display for Banner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = &self.model.id;
        writeln!(f, "blockyard {}", env!("CARGO_PKG_VERSION"))?;
        writeln!(f, "  model    {id}, context of {} tokens", self.model.context)?;
        if self.model.random_weights {
            writeln!(
                f,
                "           its weights are random and its text is meaningless; load a real model with --model DIR"
            )?;
        }
        writeln!(f, "  address  {}", self.url())?;
        writeln!(f, "  workers  {}", self.workers())?;
        writeln!(f, "  tiers    {}", self.tiers())?;
        writeln!(f, "\ntry it:")?;
        // JSON that is valid inside the shell's single quotes, whatever the model is called.
        let body = json!({"model": id, "messages": [{"role": "user", "content": "hello"}], "stream": true});
        let body = body.to_string().replace('\'', r"'\''");
        writeln!(f, "  curl {}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", self.url())
    }
}

fn folders(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn banner(address: &str) -> Banner {
        let model = ModelCard {
            id: "it's".into(),
            identity: "x".into(),
            created: 0,
            context: 4096,
            block_size: 16,
            vocabulary: 10,
            eos: vec![],
            tokenizer: "{}".into(),
            chat_template: None,
            special_tokens: vec![],
            sampling: worker::engine::SamplingDefaults::default(),
            random_weights: true,
        };
        Banner {
            model: Arc::new(model),
            address: address.parse().unwrap(),
            phases: vec![Phase::Prefill, Phase::Decode, Phase::Decode],
            threads: 2,
            sizes: Sizes { g1: 1 << 30, g2: None, g3: Some(10 << 30) },
            disks: vec!["/data/g3".into()],
            data_dir: "/data".into(),
            pod: None,
            shared: None,
        }
    }

    #[test]
    fn the_banner_says_what_runs_and_how_to_try_it() {
        let text = banner("0.0.0.0:9000").to_string();
        for part in [
            "--model DIR",
            "http://localhost:9000",
            "1 prefill, 2 decode",
            "G1 1.0 GiB and G2 off per worker, G3 10.0 GiB in /data/g3, G4 off",
            r#""model":"it'\''s""#,
        ] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
        assert!(banner("[::1]:80").to_string().contains("http://[::1]:80"));
    }

    #[test]
    fn programs_read_the_same_from_json() {
        let json = banner("127.0.0.1:8000").as_json();
        assert_eq!(json["url"], "http://127.0.0.1:8000");
        assert_eq!(json["workers"], json!(["prefill", "decode", "decode"]));
        assert_eq!(json["tiers"]["g2"], Value::Null);
    }
}
