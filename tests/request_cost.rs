//! What one relayed request costs in the gateway, from the client's bytes to its answer, and each chunk of a stream.
//! Allocations are asserted, because they do not depend on the machine. A profiler counts the instructions of the
//! thread `gateway`:
//!
//! ```text
//! valgrind --tool=callgrind --separate-threads=yes target/…/request_cost-…
//! ```

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

mod counting_allocator;

use blockyard::config::{Config, Listen, Upstream};
use blockyard::node::{Node, Process as _};
use counting_allocator::{allocations, count_this_thread};
use http::Uri;
use http::header::CONTENT_LENGTH;
use parking_lot::Mutex;
use prometheus::proto::MetricFamily;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use tokio::time::sleep;
use upstream::relay::fake::{FakeEngine, Script};

/// Requests until connections and buffers are there.
const WARMUP: usize = 50;
/// Enough that most of them have no background task of the gateway in between.
const COUNTED: usize = 1000;
/// Allocations of a request: what it takes now.
const BOUND: usize = 61;
const MODEL: &str = "org/m";
/// Tokens of an answer.
const TOKENS: usize = 64;
/// Events of a short and a long stream, whose difference is measured, so that what the request costs cancels out.
const EVENTS: [usize; 2] = [20, 220];
/// Between two events, so that the gateway reads each by itself.
const PAUSE: Duration = Duration::from_millis(1);
/// Pairs of streams, and those before them whose allocations do not count.
const PAIRS: usize = 6;
const WARMUP_PAIRS: usize = 1;
const ALL_PAIRS: usize = WARMUP_PAIRS + PAIRS;
/// Allocations of a chunk: the bytes that are read from the server, which are the frame for the client, and their
/// reference count.
const CHUNK_BOUND: f64 = 2.0;

/// The tests share the count of allocations.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a future on a thread of its own, which ends with the process. The future sends what the test needs.
fn on_thread<T: Send + 'static>(name: &str, start: impl AsyncFnOnce(mpsc::Sender<T>) + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(start(sender));
    };
    thread::Builder::new().name(name.to_owned()).spawn(run).unwrap();
    receiver.recv().unwrap()
}

/// A server that gives these answers.
fn server(answers: Vec<Script>) -> Uri {
    on_thread("server", async move |started| {
        let server = FakeEngine::start(answers).await.unwrap();
        let models = json!({ "object": "list", "data": [{ "id": MODEL, "max_model_len": 4096 }] });
        server.set_page("/v1/models", Script::json(200, &models));
        // Health checks take none of the answers.
        server.set_page("/health", Script::json(200, &json!({})));
        started.send(server.uri()).unwrap();
        std::future::pending::<()>().await;
    })
}

/// A gateway in front of a server, with all of its tasks on one thread.
fn gateway(server: Uri) -> SocketAddr {
    on_thread("gateway", async move |started| {
        let mut config =
            Config { upstreams: vec![Upstream::new(server)], ..Config::with_cache(Path::new("/nonexistent")) };
        config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
        let node = Node::start(&config).await.unwrap();
        while !has_worker(&node) {
            sleep(Duration::from_millis(10)).await;
        }
        count_this_thread();
        started.send(node.address()).unwrap();
        std::future::pending::<()>().await;
    })
}

fn has_worker(node: &Node) -> bool {
    let families = node.registry().gather();
    let workers = families.iter().filter(|family| family.name() == "blockyard_router_workers");
    workers.flat_map(MetricFamily::get_metric).any(|metric| metric.get_gauge().get_value() > 0.0)
}

/// The request for a short chat. Each has another prompt.
fn request(address: SocketAddr, number: usize, is_stream: bool) -> String {
    let content = format!("{number:06} {}", "word ".repeat(24));
    let mut body = json!({
        "model": MODEL, "max_tokens": TOKENS, "messages": [{ "role": "user", "content": content }],
    });
    if is_stream {
        body["stream"] = true.into();
    }
    let body = body.to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The allocations for each request. Those of the end of a request may be counted with the next one.
fn allocations_per_request(address: SocketAddr, answer: &str) -> Vec<usize> {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_nodelay(true).unwrap();
    let mut received = vec![0; 64 << 10];
    let mut before = allocations();
    let requests = (0..WARMUP + COUNTED).map(|number| {
        socket.write_all(request(address, number, false).as_bytes()).unwrap();
        let mut length = 0;
        while !received[..length].ends_with(answer.as_bytes()) {
            let read = socket.read(&mut received[length..]).unwrap();
            assert!(read > 0, "the gateway has closed the connection");
            length += read;
        }
        assert!(received.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&received[..length]));
        let now = allocations();
        now - std::mem::replace(&mut before, now)
    });
    requests.collect()
}

/// The allocations during a streamed answer, and its chunks of HTTP.
fn allocations_and_chunks(socket: &mut TcpStream, request: &str) -> [usize; 2] {
    let before = allocations();
    socket.write_all(request.as_bytes()).unwrap();
    let (mut received, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    while !received.ends_with(b"\r\n0\r\n\r\n") {
        let read = socket.read(&mut buffer).unwrap();
        assert!(read > 0, "the gateway has closed the connection");
        received.extend_from_slice(&buffer[..read]);
    }
    let allocated = allocations() - before;
    assert!(received.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&received));
    [allocated, chunks(&received)]
}

/// The chunks of a response with `Transfer-Encoding: chunked`.
fn chunks(response: &[u8]) -> usize {
    let end_of = |bytes: &[u8], end: &[u8]| bytes.windows(end.len()).position(|part| part == end).unwrap();
    let mut rest = &response[end_of(response, b"\r\n\r\n") + 4..];
    let mut count = 0;
    loop {
        let line = end_of(rest, b"\r\n");
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        if size == 0 {
            return count;
        }
        count += 1;
        rest = &rest[line + size + 4..];
    }
}

#[test]
fn a_relayed_chunk_allocates_its_frame_only() {
    let _alone = ONE_AT_A_TIME.lock();
    let answers = EVENTS.map(|events| Script::chat(&vec![" token"; events], None).paced(PAUSE));
    let all = vec![answers; ALL_PAIRS].concat();
    let address = gateway(server(all));
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_nodelay(true).unwrap();
    let mut per_chunk = Vec::new();
    for pair in 0..ALL_PAIRS {
        let [short, long] =
            [0, 1].map(|nth| allocations_and_chunks(&mut socket, &request(address, 2 * pair + nth, true)));
        let [allocated, chunks] = [0, 1].map(|at| long[at] as f64 - short[at] as f64);
        assert!(chunks > 0.0, "{short:?} {long:?}");
        per_chunk.push(allocated / chunks);
    }
    // Background tasks of the gateway allocate within some of the streams.
    let counted = &per_chunk[WARMUP_PAIRS..];
    let least = counted.iter().copied().fold(f64::INFINITY, f64::min);
    println!("{least:.2} allocations per chunk; {counted:.2?}");
    assert!(least <= CHUNK_BOUND + 0.2, "{counted:.2?} allocations per chunk");
}

#[test]
fn a_relayed_request_allocates_no_more_than_its_bound() {
    let _alone = ONE_AT_A_TIME.lock();
    let usage = json!({
        "prompt_tokens": 32, "completion_tokens": TOKENS, "total_tokens": 32 + TOKENS,
        "prompt_tokens_details": { "cached_tokens": 16 },
    });
    let message = json!({ "role": "assistant", "content": " token".repeat(TOKENS) });
    let answer = json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": MODEL,
        "choices": [{ "index": 0, "message": message, "finish_reason": "length" }], "usage": usage,
    });
    let length: &'static str = answer.to_string().len().to_string().leak();
    let answer_script = Script::json(200, &answer).header(CONTENT_LENGTH, length);
    let address = gateway(server(vec![answer_script; WARMUP + COUNTED]));
    let mut counts = allocations_per_request(address, &answer.to_string()).split_off(WARMUP);
    counts.sort_unstable();
    // Background tasks of the gateway allocate within some of the requests.
    let median = counts[counts.len() / 2];
    println!("{median} allocations");
    assert!(median <= BOUND, "{median} allocations");
}
