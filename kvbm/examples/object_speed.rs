//! Compares reads from G4 with the raw client of `object_store`, against one S3 server in this process: `cargo run
//! --release -p kvbm --example object_speed [-- --json]`. Both read the same objects. The raw client uses its best
//! number of concurrent requests, and each measurement of the tier is between two of the raw client; the result is the
//! median of their ratios. The server shares the cores with both, so the ratio is meaningful and the rates are not.

use bytes::Bytes;
use futures::stream::{self, StreamExt};
use kvbm::object::{Access, Credentials, Settings, StoreLocation};
use kvbm::{Block, Epoch, EventLog, Fingerprint, ObjectTier, SequenceHash, Tier};
use object_store::{ObjectStore, ObjectStoreExt};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "../src/object/tests/s3_server.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod s3_server;
use s3_server::{BUCKET, Conditions, KEYS, S3Server};

/// Bytes of a block of a small model, and the number of blocks, so that a round takes a second.
const BLOCK: usize = 192 << 10;
const BLOCKS: usize = 1024;
/// Bytes per raw read, as in the tier.
const RANGE: u64 = 4 << 20;
/// Tried numbers of concurrent requests of the raw client.
const CONCURRENCY: [usize; 5] = [2, 4, 8, 16, 32];
/// Rounds to find the best concurrency of the raw client, and pairs of measurements after that.
const ROUNDS: usize = 3;
const PAIRS: usize = 9;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let json = std::env::args().any(|argument| argument == "--json");
    let server = S3Server::start(Conditions::Honoured);
    let location: StoreLocation = format!("s3://{BUCKET}/speed").parse()?;
    let keys = [("AWS_ACCESS_KEY_ID", KEYS.0), ("AWS_SECRET_ACCESS_KEY", KEYS.1)];
    let access = Access {
        endpoint: Some(server.endpoint.parse()?),
        region: None,
        credentials: Credentials::from_environment(keys),
    };
    let tier =
        ObjectTier::open_location(&location, &access, Settings::default(), Arc::new(EventLog::new(Epoch(1))), None)?;
    let fingerprint = Fingerprint::from_bytes([1; 32]);
    let hash = |n: usize| {
        let digest = blake3::hash(&n.to_le_bytes());
        SequenceHash::from_bytes(std::array::from_fn(|i| digest.as_bytes()[i]))
    };
    let block = |n: usize| Block::new(hash(n), None, fingerprint, Bytes::from(vec![n as u8; BLOCK]));
    for part in (0..BLOCKS).collect::<Vec<_>>().chunks(256) {
        for answer in tier.store(part.iter().map(|n| block(*n)).collect()).await {
            answer?;
        }
    }
    let hashes: Vec<SequenceHash> = (0..BLOCKS).map(hash).collect();
    let client = location.client(&access, Duration::from_secs(30))?.ok_or("a cloud has a client")?;
    let StoreLocation::Cloud { prefix, .. } = &location else { return Err("a cloud".into()) };
    let ranges: Vec<_> = client
        .list(Some(&prefix.clone().join("blocks")))
        .map(|meta| {
            meta.map(|meta| {
                (0..meta.size)
                    .step_by(RANGE as usize)
                    .map(move |at| (meta.location.clone(), at..(at + RANGE).min(meta.size)))
                    .collect::<Vec<_>>()
            })
        })
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?
        .concat();

    let speed = |bytes: usize, start: Instant| bytes as f64 / start.elapsed().as_secs_f64() / 1e6;
    let raw = async |concurrency: usize| {
        let start = Instant::now();
        let read = stream::iter(ranges.clone()).map(|(path, range)| {
            let client: Arc<dyn ObjectStore> = client.clone();
            async move { client.get_range(&path, range).await.map(|bytes| bytes.len()) }
        });
        let read: Vec<_> = read.buffer_unordered(concurrency).collect().await;
        Ok::<_, Box<dyn Error>>(speed(read.into_iter().sum::<Result<usize, _>>()?, start))
    };
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); CONCURRENCY.len()];
    for _ in 0..ROUNDS {
        for (concurrency, rates) in CONCURRENCY.iter().zip(&mut rates) {
            rates.push(raw(*concurrency).await?);
        }
    }
    let rates: Vec<f64> = rates.into_iter().map(median).collect();
    let best = (0..CONCURRENCY.len()).max_by(|a, b| rates[*a].total_cmp(&rates[*b])).ok_or("nothing was measured")?;
    // Each measurement of the tier is between two of the raw client.
    let mut tier_rates = Vec::new();
    let mut ratios = Vec::new();
    let mut before = raw(CONCURRENCY[best]).await?;
    for _ in 0..PAIRS {
        let start = Instant::now();
        let loaded: Vec<_> = tier.load(fingerprint, hashes.clone()).collect().await;
        let found = loaded.iter().filter(|(_, answer)| matches!(answer, Ok(Some(_)))).count();
        if found != BLOCKS {
            return Err(format!("{found} of {BLOCKS} blocks were loaded").into());
        }
        let rate = speed(BLOCKS * BLOCK, start);
        let after = raw(CONCURRENCY[best]).await?;
        tier_rates.push(rate);
        ratios.push(rate / (before * after).sqrt());
        before = after;
    }
    let tier_rate = median(tier_rates);
    let ratio = median(ratios);
    if json {
        let raw: serde_json::Map<_, _> =
            CONCURRENCY.iter().zip(&rates).map(|(n, rate)| (n.to_string(), (*rate).into())).collect();
        println!("{}", serde_json::json!({ "tier_mb_s": tier_rate, "raw_mb_s": raw, "ratio": ratio }));
    } else {
        for (concurrency, rate) in CONCURRENCY.iter().zip(&rates) {
            println!("raw client, {concurrency:2} requests {rate:6.0} MB/s");
        }
        println!("G4 tier                 {tier_rate:6.0} MB/s, {ratio:.2} of the raw client's best");
    }
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
