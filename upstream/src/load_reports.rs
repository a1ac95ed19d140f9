//! The load of a server as its `/metrics` says: requests of all gateways, and how full its cache is.
//!
//! vLLM, SGLang and llama.cpp (`--metrics`) have such metrics, vLLM and SGLang by data-parallel rank. A server without
//! them has the load that this process gives it.

use crate::ask::{Page, page};
use crate::load::{CacheUsage, LoadCounter, Reported};
use crate::relay::client::Client;
use http::HeaderValue;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Interval at which the metrics of a server are read: the longest interval of the load reports of native workers. A
/// page has about 100 KB.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same for a server without such metrics. It may be replaced by one that has them.
const ABSENT_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum age of a report. A server that answers late has much to do, so that its last report is better than none;
/// after this time the server may have ended.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The load reports of one server.
#[derive(Default)]
pub struct LoadReports {
    /// Of the server's models, each with the data-parallel rank that it counts.
    counters: Mutex<Vec<(Option<u32>, LoadCounter)>>,
}

/// A model whose load contains the reports of its server, until this is dropped.
#[must_use = "dropping it ends the reports"]
pub struct ReportedLoad {
    reports: Arc<LoadReports>,
    counter: LoadCounter,
}

impl LoadReports {
    /// Adds a counter of the requests to a rank of the server, or to the whole server.
    pub(crate) fn add(self: &Arc<Self>, counter: LoadCounter, rank: Option<u32>) -> ReportedLoad {
        self.counters.lock().push((rank, counter.clone()));
        ReportedLoad { reports: Arc::clone(self), counter }
    }

    /// Asks the server until it is dropped.
    pub async fn follow(self: Arc<Self>, client: Client, api_key: Option<HeaderValue>, block_size: u32) -> Infallible {
        let mut last = None;
        loop {
            let asked = self.counters.lock().clone();
            for (_, counter) in &asked {
                counter.asking();
            }
            let reported = match page(&client, api_key.as_ref(), "/metrics").await {
                Page::Body(page) => Some(read(&page, block_size)),
                Page::Absent | Page::TooLarge => Some(Ranks::default()),
                Page::Failed => None,
            };
            let is_absent = reported.as_ref().is_some_and(Ranks::is_empty);
            match reported {
                Some(ranks) => {
                    last = (!is_absent).then(Instant::now);
                    self.publish(&asked, &ranks);
                }
                None if last.is_some_and(|last| last.elapsed() > MAX_AGE) => {
                    last = None;
                    self.publish(&asked, &Ranks::default());
                }
                None => {}
            }
            sleep(if is_absent { ABSENT_INTERVAL } else { INTERVAL }).await;
        }
    }

    fn publish(&self, asked: &[(Option<u32>, LoadCounter)], ranks: &Ranks) {
        // Under the lock: a model that is taken out gets no report afterwards.
        let counters = self.counters.lock();
        for (rank, counter) in asked.iter().filter(|(_, asked)| counters.iter().any(|(_, one)| one.is(asked))) {
            counter.reported(ranks.load(*rank));
        }
    }
}

impl Drop for ReportedLoad {
    fn drop(&mut self) {
        let mut counters = self.reports.counters.lock();
        counters.retain(|(_, counter)| !counter.is(&self.counter));
        // What is left are the own requests, for which the model's end waits.
        self.counter.reported(None);
    }
}

/// What the metrics of a server say, by the data-parallel rank in their labels. Empty: none of those that are known.
#[derive(Default)]
struct Ranks(BTreeMap<Option<u32>, RankSamples>);

/// The samples of one rank. Those of several models are added.
#[derive(Default)]
struct RankSamples {
    running: Option<f64>,
    waiting: Option<f64>,
    /// Shares of the cache in use.
    shares: Vec<f64>,
    blocks: f64,
}

/// Reads the metrics of a server.
fn read(page: &[u8], block_size: u32) -> Ranks {
    let mut ranks = Ranks::default();
    for line in page.split(|byte| *byte == b'\n') {
        let Some(sample) = Sample::of(line) else { continue };
        match sample.name {
            b"vllm:num_requests_running" | b"sglang:num_running_reqs" | b"llamacpp:requests_processing" => {
                *ranks.of(&sample).running.get_or_insert_default() += sample.value;
            }
            b"vllm:num_requests_waiting" | b"sglang:num_queue_reqs" | b"llamacpp:requests_deferred" => {
                *ranks.of(&sample).waiting.get_or_insert_default() += sample.value;
            }
            b"vllm:kv_cache_usage_perc" | b"vllm:gpu_cache_usage_perc" | b"sglang:token_usage" => {
                ranks.of(&sample).shares.push(sample.value);
            }
            b"vllm:cache_config_info" => {
                ranks.of(&sample).blocks += sample.label("num_gpu_blocks").unwrap_or_default();
            }
            b"sglang:max_total_num_tokens" => {
                ranks.of(&sample).blocks += sample.value / f64::from(block_size.max(1));
            }
            _ => {}
        }
    }
    ranks
}

impl Ranks {
    fn of(&mut self, sample: &Sample<'_>) -> &mut RankSamples {
        // vLLM's label, and SGLang's, which only a server with several ranks has.
        let rank = sample.label("engine").or_else(|| sample.label("dp_rank"));
        self.0.entry(rank.map(|rank| rank as u32)).or_default()
    }

    fn is_empty(&self) -> bool {
        self.load(None).is_none()
    }

    /// The load of a rank, or of all ranks together. `None`: it is not reported.
    fn load(&self, rank: Option<u32>) -> Option<Reported> {
        let all = self.0.iter().filter(|(of, _)| rank.is_none() || **of == rank);
        let (mut running, mut waiting, mut shares, mut blocks) = (None, None, Vec::new(), 0.0);
        for (_, samples) in all {
            running = add(running, samples.running);
            waiting = add(waiting, samples.waiting);
            shares.extend(&samples.shares);
            blocks += samples.blocks;
        }
        // Only one of them is no report of this kind.
        let (running, waiting) = (running? as u32, waiting? as u32);
        let mean = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        let cache = if shares.is_empty() {
            CacheUsage::default()
        } else {
            CacheUsage { active_blocks: (mean.min(1.0) * blocks).round() as u64, total_blocks: blocks as u64 }
        };
        Some(Reported { running, waiting, cache })
    }
}

fn add(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(|sum, more| sum + more)
}

/// One line of the Prometheus text format that is no comment.
struct Sample<'a> {
    name: &'a [u8],
    labels: &'a [u8],
    value: f64,
}

impl<'a> Sample<'a> {
    /// `None` for a comment, and for a value that is no count or share.
    fn of(line: &'a [u8]) -> Option<Self> {
        let end = line.iter().position(|byte| matches!(byte, b'{' | b' ' | b'\t'))?;
        let (name, rest) = line.split_at(end);
        // A quoted label may contain a brace, but nothing after the labels does.
        let (labels, rest) = match (rest[0], rest.iter().rposition(|byte| *byte == b'}')) {
            (b'{', Some(close)) => (&rest[1..close], &rest[close + 1..]),
            (b'{', None) => return None,
            _ => (&rest[..0], rest),
        };
        // A timestamp may follow.
        let value = std::str::from_utf8(rest).ok()?.split_ascii_whitespace().next()?;
        let value: f64 = value.parse().ok()?;
        (value.is_finite() && value >= 0.0).then_some(Self { name, labels, value })
    }

    /// The value of a label that is a number.
    fn label(&self, name: &str) -> Option<f64> {
        let labels = std::str::from_utf8(self.labels).ok()?;
        let value = labels.split(',').find_map(|label| label.trim_start().strip_prefix(name)?.strip_prefix("=\""))?;
        let value: f64 = value.strip_suffix('"')?.parse().ok()?;
        (value.is_finite() && value >= 0.0).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::client::Settings;
    use crate::relay::fake::{FakeEngine, Script};

    /// Lines of vLLM 0.32.0 with two data-parallel ranks.
    const VLLM: &str = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n\
        # TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"org/m\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"org/m\"} 4.0\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"org/m\"} 0.0\n\
        vllm:num_requests_waiting{engine=\"1\",model_name=\"org/m\"} 2.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"org/m\"} 0.5\n\
        vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"org/m\"} 0.25\n\
        vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1000\"} 1.0\n\
        vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"1000\"} 1.0\n";

    #[test]
    fn ranks_of_vllm_are_added_or_told_apart() {
        let (ranks, cache) =
            (read(VLLM.as_bytes(), 16), |active_blocks, total_blocks| CacheUsage { active_blocks, total_blocks });
        assert_eq!(ranks.load(None), Some(Reported { running: 7, waiting: 2, cache: cache(750, 2000) }));
        assert_eq!(ranks.load(Some(0)), Some(Reported { running: 3, waiting: 0, cache: cache(500, 1000) }));
        assert_eq!(ranks.load(Some(1)), Some(Reported { running: 4, waiting: 2, cache: cache(250, 1000) }));
        assert_eq!(ranks.load(Some(2)), None);
    }

    #[test]
    fn sglang_counts_tokens() {
        let page = "sglang:num_running_reqs{model_name=\"m\"} 2.0 1760000000000\nsglang:num_queue_reqs 1\n\
            sglang:token_usage{model_name=\"a}b\"} 0.5\nsglang:max_total_num_tokens{model_name=\"m\"} 6400\n";
        let cache = CacheUsage { active_blocks: 50, total_blocks: 100 };
        assert_eq!(read(page.as_bytes(), 64).load(None), Some(Reported { running: 2, waiting: 1, cache }));
    }

    #[test]
    fn a_rank_of_sglang_has_a_label() {
        let of = |rank: u32| {
            format!(
                "sglang:num_running_reqs{{dp_rank=\"{rank}\",tp_rank=\"0\"}} {rank}\n\
                 sglang:num_queue_reqs{{dp_rank=\"{rank}\",tp_rank=\"0\"}} 5\n"
            )
        };
        let ranks = read([of(1), of(2)].concat().as_bytes(), 64);
        let cache = CacheUsage::default();
        assert_eq!(ranks.load(Some(2)), Some(Reported { running: 2, waiting: 5, cache }));
        assert_eq!(ranks.load(None).map(|all| (all.running, all.waiting)), Some((3, 10)));
    }

    #[test]
    fn llama_cpp_counts_requests_only() {
        let page = "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 3\n\
            # TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred 2\n";
        let cache = CacheUsage::default();
        assert_eq!(read(page.as_bytes(), 16).load(None), Some(Reported { running: 3, waiting: 2, cache }));
    }

    #[test]
    fn what_is_not_understood_is_no_report() {
        for odd in ["", "\n\n", "other:requests_processing 1\n", "vllm:num_requests_running{", "\u{0}\u{1} x"] {
            assert_eq!(read(odd.as_bytes(), 16).load(None), None, "{odd:?}");
        }
        let odd = "vllm:num_requests_running NaN\nvllm:num_requests_running -1\nvllm:num_requests_running 1e99\n\
            vllm:num_requests_waiting 0\n";
        let report = read(odd.as_bytes(), 16).load(None).unwrap();
        assert_eq!((report.running, report.cache), (u32::MAX, CacheUsage::default()));
    }

    #[tokio::test]
    async fn a_model_has_the_reports_until_it_is_taken_out() {
        let server = FakeEngine::start([]).await.unwrap();
        server.set_page("/metrics", Script::events([VLLM]));
        let client = Client::new(&server.uri(), &Settings::default()).unwrap();
        let (reports, counter) = (Arc::new(LoadReports::default()), LoadCounter::new());
        let _own = counter.start(10, 1);
        let reported = reports.add(counter.clone(), None);
        let following = tokio::spawn(Arc::clone(&reports).follow(client, None, 16));
        let mut load = counter.watch();
        let load_of_all = load.wait_for(|load| load.running + load.waiting > 1).await.unwrap().clone();
        assert_eq!((load_of_all.running, load_of_all.waiting, load_of_all.total_blocks), (7, 2, 2000));
        drop(reported);
        assert_eq!((load.borrow().running, load.borrow().waiting, load.borrow().total_blocks), (0, 1, 0));
        following.abort();
    }
}
