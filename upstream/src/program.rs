//! Which program a server is, as far as programs differ, and its version.

use crate::ask::{Page, page};
use crate::relay::client::Client;
use http::HeaderValue;
use serde_json::Value;

/// Maximum number of characters of a version. Those of builds from a commit have about forty.
const MAX_VERSION: usize = 80;

/// The program that a server is. Programs differ in where they say what they publish, and in how they render prompts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// vLLM.
    Vllm,
    /// SGLang: it says what it is in `/server_info`.
    Sglang,
    /// Another one, which may have the pages of vLLM.
    Other,
}

impl Program {
    /// The program that lists its models with this owner.
    pub fn of_owner(owner: Option<&str>) -> Self {
        match owner {
            Some("vllm") => Self::Vllm,
            Some("sglang") => Self::Sglang,
            _ => Self::Other,
        }
    }

    /// Its name, if it is known.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Vllm => Some("vLLM"),
            Self::Sglang => Some("SGLang"),
            Self::Other => None,
        }
    }

    /// The version of a server of this program, for the log. `None`: it does not say.
    pub async fn version(self, client: &Client, api_key: Option<&HeaderValue>) -> Option<String> {
        let path = if self == Self::Sglang { "/server_info" } else { "/version" };
        let Page::Body(body) = page(client, api_key, path).await else { return None };
        let answer: Value = serde_json::from_slice(&body).ok()?;
        let version = answer.get("version")?.as_str()?;
        (!version.contains(char::is_control)).then(|| version.chars().take(MAX_VERSION).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::client::Settings;
    use crate::relay::fake::{FakeEngine, Script};
    use serde_json::json;

    #[tokio::test]
    async fn each_program_says_its_version_at_its_own_path() {
        let server = FakeEngine::start([]).await.unwrap();
        let client = Client::new(&server.uri(), &Settings::default()).unwrap();
        server.set_page("/version", Script::json(200, &json!({ "version": "0.32.0" })));
        server.set_page("/server_info", Script::json(200, &json!({ "version": "0.5.23" })));
        for (program, expected) in
            [(Program::Vllm, "0.32.0"), (Program::Sglang, "0.5.23"), (Program::of_owner(Some("other")), "0.32.0")]
        {
            assert_eq!(program.version(&client, None).await.as_deref(), Some(expected), "{program:?}");
        }
        for odd in [json!({}), json!({ "version": 7 }), json!([]), json!({ "version": "a\nb" })] {
            server.set_page("/version", Script::json(200, &odd));
            assert_eq!(Program::Vllm.version(&client, None).await, None, "{odd}");
        }
        server.set_page("/version", Script::json(200, &json!({ "version": "1".repeat(1000) })));
        assert_eq!(Program::Vllm.version(&client, None).await.map(|version| version.len()), Some(MAX_VERSION));
    }
}
