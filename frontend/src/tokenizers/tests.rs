use super::*;
use crate::model::TokenizerText;
use crate::tiny_tokenizer;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::sync::atomic::AtomicBool;

/// Concatenates parts of text.
const PARTS: &str = "{% for m in messages %}<|turn|>{{ m.role }} {% for part in m.content %}{{ part.text or part }}\
    {% endfor %}{{ m.tool_calls | tojson if m.tool_calls }}<|eos|>{% endfor %}{{ tools | tojson if tools }}\
    {{ '<|turn|>' if add_generation_prompt }}";

fn local(template: &str) -> Arc<LocalTokenizer> {
    let tokenizer = tiny_tokenizer::tokenizer();
    let text = TokenizerText { tokenizer: &tokenizer, chat_template: Some(template), special_tokens: &[] };
    Arc::new(LocalTokenizer::new(text).unwrap())
}

/// A server that tokenizes like `local`, or fails.
struct FakeServer {
    local: Arc<LocalTokenizer>,
    format: ContentFormat,
    error: Mutex<Option<TokenizeError>>,
    /// Tokens of prompts with tools have one token more.
    odd_tools: AtomicBool,
    is_vllm: AtomicBool,
    asked: AtomicUsize,
}

impl FakeServer {
    fn new(template: &str, format: ContentFormat) -> Arc<Self> {
        let (odd_tools, is_vllm, asked) = (AtomicBool::default(), AtomicBool::default(), AtomicUsize::default());
        Arc::new(Self { local: local(template), format, error: Mutex::default(), odd_tools, is_vllm, asked })
    }

    fn failing(error: TokenizeError) -> Arc<Self> {
        let server = Self::new(PARTS, ContentFormat::Text);
        *server.error.lock() = Some(error);
        server
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Tokenize for FakeServer {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn tokenize(&self, request: Bytes) -> BoxFuture<'_, Result<Vec<u32>, TokenizeError>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut fields: Map<String, Value> = serde_json::from_slice(&request).unwrap();
        assert_eq!(fields.remove("model"), Some("m".into()));
        let is_odd = self.odd_tools.load(Ordering::Relaxed) && fields.contains_key("tools");
        let answer = if let Some(error) = self.error.lock().clone() {
            Err(error)
        } else {
            let prompt = self.local.prompt(fields, self.format);
            let tokens =
                prompt.and_then(|prompt| self.local.tokens(&prompt, usize::MAX, &EncodeJob::default()).unwrap());
            let refused = TokenizeError::Refused("no such message".to_owned());
            tokens.ok_or(refused).map(|tokens| tokens.into_iter().chain(is_odd.then_some(0)).collect())
        };
        futures::future::ready(answer).boxed()
    }

    fn converts_as_vllm(&self) -> bool {
        self.is_vllm.load(Ordering::Relaxed)
    }
}

fn card(id: &str) -> ModelCard {
    ModelCard {
        identity: format!("upstream {id}"),
        is_relayed: true,
        has_exact_blocks: true,
        ..ModelCard::new(id, 1000, 16)
    }
}

fn tokenizers(local: Option<Arc<LocalTokenizer>>) -> (Arc<Tokenizers>, Registry) {
    let registry = Registry::new();
    let local = local.map(|local| ("m".to_owned(), local)).into_iter().collect();
    (Arc::new(Tokenizers::new(local, &registry).unwrap()), registry)
}

fn used(tokenizers: &Tokenizers) -> [i64; 3] {
    PromptKind::ALL.map(|kind| tokenizers.metrics.local_tokenizer_used.with_label_values(&["m", kind.label()]).get())
}

#[tokio::test]
async fn a_tokenizer_with_the_tokens_of_the_server_is_used() {
    for format in [ContentFormat::Text, ContentFormat::Parts] {
        let (tokenizers, registry) = tokenizers(Some(local(PARTS)));
        let server = tokenizers.add_server(&card("m"), None, FakeServer::new(PARTS, format)).await;
        assert_eq!(used(&tokenizers), [1, 1, 1], "{format:?}");
        let found = tokenizers.of(&card("m")).unwrap().local.clone().unwrap();
        assert_eq!(found.format, format);
        let _adapter = tokenizers.add_server(&card("adapter"), Some("m"), FakeServer::new(PARTS, format)).await;
        assert_eq!(tokenizers.of(&card("adapter")).unwrap().local.clone().unwrap().used, [true; 3]);
        let alias = ModelCard { id: "alias".to_owned(), ..card("m") };
        assert_eq!(tokenizers.of(&alias).unwrap().id, "m");
        drop(server);
        assert!(tokenizers.of(&card("m")).is_none(), "no server has the model");
        let exported: Vec<String> = registry
            .gather()
            .iter()
            .flat_map(|family| family.get_metric().iter().flat_map(|metric| metric.get_label().to_vec()))
            .filter(|label| label.name() == "model")
            .map(|label| label.value().to_owned())
            .collect();
        assert_eq!(exported, ["adapter"; 3], "a model without a server has no series");
    }
}

#[tokio::test]
async fn only_vllm_converts_requests_as_it_is_known() {
    let (tokenizers, _) = tokenizers(None);
    let convert = |model: &str| tokenizers.of(&card(model)).unwrap().convert_as_vllm();
    let vllm = || {
        let server = FakeServer::new(PARTS, ContentFormat::Text);
        server.is_vllm.store(true, Ordering::Relaxed);
        server
    };
    let _vllm = tokenizers.add_server(&card("m"), None, vllm()).await;
    assert!(convert("m"));
    let other = tokenizers.add_server(&card("m"), None, FakeServer::new(PARTS, ContentFormat::Text)).await;
    assert!(!convert("m"), "either may get the request");
    drop(other);
    assert!(convert("m"));
    let _harmony = tokenizers.add_server(&card("openai/GPT-OSS-20b"), None, vllm()).await;
    assert!(!convert("openai/GPT-OSS-20b"));
}

#[tokio::test]
async fn kinds_of_prompts_with_other_tokens_are_asked() {
    let (tokenizers, _) = tokenizers(Some(local(PARTS)));
    let same = FakeServer::new(PARTS, ContentFormat::Parts);
    let _same = tokenizers.add_server(&card("m"), None, same.clone()).await;
    let odd = FakeServer::new(PARTS, ContentFormat::Parts);
    odd.odd_tools.store(true, Ordering::Relaxed);
    let _odd = tokenizers.add_server(&card("m"), None, odd).await;
    assert_eq!(used(&tokenizers), [1, 1, 0]);
    let _again = tokenizers.add_server(&card("m"), None, FakeServer::new(PARTS, ContentFormat::Parts)).await;
    assert_eq!(used(&tokenizers), [1, 1, 0], "one server has other tokens");
    let _other =
        tokenizers.add_server(&card("m"), None, FakeServer::new("{{ messages | length }}", ContentFormat::Parts)).await;
    assert_eq!(used(&tokenizers), [1, 0, 0]);
    let local = tokenizers.of(&card("m")).unwrap().local.clone().unwrap();
    let fields = |body: &str| serde_json::from_str::<Map<String, Value>>(body).unwrap();
    assert!(local.prompt(fields(r#"{"prompt":"hello"}"#)).is_some());
    assert!(local.prompt(fields(r#"{"messages":[{"role":"user","content":"hello"}]}"#)).is_none());
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_compared_again_before_use() {
    let (tokenizers, _) = tokenizers(Some(local(PARTS)));
    let late = FakeServer::failing(TokenizeError::Failed("late".to_owned()));
    let registered = tokenizers.add_server(&card("m"), None, late.clone()).await;
    let _adapter =
        tokenizers.add_server(&card("adapter"), Some("m"), FakeServer::new(PARTS, ContentFormat::Text)).await;
    registered.recheck().await;
    assert_eq!((used(&tokenizers), late.asked()), ([0, 0, 0], 2));
    *late.error.lock() = None;
    late.odd_tools.store(true, Ordering::Relaxed);
    registered.recheck().await;
    assert_eq!(used(&tokenizers), [1, 1, 0]);
    let of = |model: &str| tokenizers.of(&card(model)).unwrap().local.clone().unwrap().used;
    assert_eq!((of("m"), of("adapter")), ([true, true, false], [true, true, false]));
    let asked = late.asked();
    registered.recheck().await;
    assert_eq!(late.asked(), asked, "it was compared");
    let other = tokenizers.add_server(&card("m"), None, FakeServer::new(PARTS, ContentFormat::Text)).await;
    drop(registered);
    assert_eq!(used(&tokenizers), [1, 1, 1], "the server with other tokens has gone");
    drop(other);
}

#[tokio::test]
async fn a_server_that_says_no_tokens_checks_nothing() {
    let (tokenizers, _) = tokenizers(Some(local(PARTS)));
    let server = FakeServer::failing(TokenizeError::Unsupported);
    let without = tokenizers.add_server(&card("m"), None, server.clone()).await;
    without.recheck().await;
    assert_eq!((used(&tokenizers), server.asked()), ([1, 1, 1], 1));
    let failing = FakeServer::failing(TokenizeError::Failed("late".to_owned()));
    let _failing = tokenizers.add_server(&card("m"), None, failing).await;
    assert_eq!(used(&tokenizers), [0, 0, 0], "another server will say them");
    let (tokenizers, _) = self::tokenizers(Some(local(PARTS)));
    let refusing = FakeServer::failing(TokenizeError::Refused("no".to_owned()));
    let _refusing = tokenizers.add_server(&card("m"), None, refusing).await;
    assert_eq!(used(&tokenizers), [0, 0, 0], "no prompt was compared");
}

#[tokio::test(start_paused = true)]
async fn a_prompt_is_asked_once() {
    let (tokenizers, _) = tokenizers(None);
    let server = FakeServer::new(PARTS, ContentFormat::Text);
    let request = Bytes::from_static(br#"{"model":"m","prompt":"hello"}"#);
    assert_eq!(tokenizers.ask(&card("m"), &Domain::shared(), &request).await, None, "no server");
    let _server = tokenizers.add_server(&card("m"), None, server.clone()).await;
    for _ in 0..3 {
        assert_eq!(
            tokenizers.ask(&card("m"), &Domain::shared(), &request).await.as_deref(),
            Some(&[tiny_tokenizer::BOS, 259][..])
        );
    }
    assert_eq!(server.asked(), 1);
    tokenizers
        .ask(&card("m"), &Domain::shared(), &Bytes::from_static(br#"{"model":"m","prompt":"hell"}"#))
        .await
        .unwrap();
    assert_eq!(server.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_is_not_asked_for_a_while() {
    let (tokenizers, _) = tokenizers(None);
    let broken = FakeServer::failing(TokenizeError::Failed("late".to_owned()));
    let without = FakeServer::failing(TokenizeError::Unsupported);
    let good = FakeServer::new(PARTS, ContentFormat::Text);
    let _broken = tokenizers.add_server(&card("m"), None, broken.clone()).await;
    let _without = tokenizers.add_server(&card("m"), None, without.clone()).await;
    let mut number = 0;
    let mut ask = async || {
        number += 1;
        tokenizers.ask(&card("m"), &Domain::shared(), &format!(r#"{{"model":"m","prompt":"{number}"}}"#).into()).await
    };
    for _ in 0..4 {
        assert_eq!(ask().await, None);
    }
    assert_eq!((broken.asked(), without.asked()), (1, 1));
    let _good = tokenizers.add_server(&card("m"), None, good.clone()).await;
    for _ in 0..4 {
        assert!(ask().await.is_some());
    }
    tokio::time::sleep(PAUSE_FAILED).await;
    for _ in 0..4 {
        assert!(ask().await.is_some(), "the next server is asked");
    }
    assert_eq!((broken.asked(), without.asked(), good.asked()), (2, 1, 8));
    tokio::time::sleep(PAUSE_UNSUPPORTED).await;
    for _ in 0..4 {
        ask().await;
    }
    assert_eq!((broken.asked(), without.asked()), (3, 2));
}
