use super::*;
use crate::http::body::read_any;
use axum::body::Body;
use bytes::Bytes;
use futures::{StreamExt, stream};
use std::convert::Infallible;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use units::ByteSize;

const MIB: usize = 1 << 20;
const HOUR: Duration = Duration::from_hours(1);

struct Server {
    settings: Settings,
    memory: BodyMemory,
}

impl Server {
    /// A server with memory for one body of `bytes`.
    fn new(bytes: usize) -> Arc<Self> {
        let size = ByteSize(bytes as u64);
        let settings = Settings { max_body: size, max_inflight_bodies: size, ..Settings::default() };
        Arc::new(Self { memory: BodyMemory::new(&settings), settings })
    }

    /// Reads a body in a task, up to its length.
    fn read(self: &Arc<Self>, body: Body) -> JoinHandle<Result<usize, Error>> {
        let server = Arc::clone(self);
        tokio::spawn(async move {
            let body = read_any(body, &server.settings, &server.memory).await;
            body.map(|body| body.bytes.len())
        })
    }

    /// Reads a body that arrives at once.
    async fn read_whole(self: &Arc<Self>, bytes: usize) -> Result<usize, Error> {
        self.read(Body::from(vec![b' '; bytes])).await.unwrap()
    }
}

/// A body of `first` bytes at once, and then `pieces` pieces of `size` bytes, each `pause` after the one before.
fn body(first: usize, pieces: usize, size: usize, pause: Duration) -> Body {
    let first = stream::iter([Ok::<_, Infallible>(Bytes::from(vec![b' '; first]))]);
    let rest = stream::iter(0..pieces).then(move |_| async move {
        sleep(pause).await;
        Ok::<_, Infallible>(Bytes::from(vec![b' '; size]))
    });
    Body::from_stream(first.chain(rest))
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_was_fast_and_then_idles_ends_when_memory_is_short() {
    let server = Server::new(MIB);
    let idle = server.read(body(MIB - 600, 500, 1, Duration::from_secs(1)));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(server.read_whole(200_000).await, Err(Error::Overloaded(RETRY_AFTER)), "it is not late yet");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(server.read_whole(20_000).await, Ok(20_000));
    assert!(!idle.is_finished(), "a small body needs no memory");
    assert_eq!(server.read_whole(200_000).await, Ok(200_000));
    assert_eq!(idle.await.unwrap(), Err(Error::UploadEvicted));
}

#[tokio::test(start_paused = true)]
async fn an_upload_at_a_normal_rate_does_not_end() {
    const MB: usize = 1_000_000;
    for (memory, first, pieces, size, pause) in [
        // 1 MB/s, smooth and in bursts.
        (17 * MB, 0, 32, MB / 2, 500),
        (17 * MB, 8 * MB, 4, 2 * MB, 2000),
        // 100 kB/s.
        (MB / 2, 100_000, 30, 10_000, 100),
        (MB / 2, 0, 2, 200_000, 2000),
    ] {
        let server = Server::new(memory);
        let upload = server.read(body(first, pieces, size, Duration::from_millis(pause)));
        let mut refused = 0;
        while !upload.is_finished() {
            sleep(Duration::from_millis(pause / 2)).await;
            refused += usize::from(server.read_whole(memory).await.is_err());
        }
        assert_eq!(upload.await.unwrap(), Ok(first + pieces * size), "{size} bytes each {pause} ms");
        assert!(refused > 0, "memory was short");
    }
}

#[tokio::test(start_paused = true)]
async fn the_upload_that_wastes_most_memory_ends_first() {
    let server = Server::new(MIB);
    let small = server.read(body(100_000, 1, 1, HOUR));
    sleep(Duration::from_secs(10)).await;
    let large = server.read(body(800_000, 1, 1, HOUR));
    sleep(Duration::from_secs(10)).await;
    assert_eq!(server.read_whole(400_000).await, Ok(400_000));
    assert_eq!(large.await.unwrap(), Err(Error::UploadEvicted));
    assert!(!small.is_finished(), "there was room without it");
    small.abort();
}

#[tokio::test(start_paused = true)]
async fn uploads_end_only_if_that_makes_enough_room() {
    let server = Server::new(MIB);
    let processed = read_any(Body::from(vec![b' '; 900_000]), &server.settings, &server.memory).await.unwrap();
    let idle = server.read(body(200_000, 1, 1, HOUR));
    sleep(Duration::from_secs(10)).await;
    assert_eq!(server.read_whole(MIB).await, Err(Error::Overloaded(RETRY_AFTER)));
    assert!(!idle.is_finished());
    drop(processed);
    assert_eq!(server.read_whole(MIB).await, Ok(MIB));
    assert_eq!(idle.await.unwrap(), Err(Error::UploadEvicted));
}

#[tokio::test(start_paused = true)]
async fn several_requests_get_the_memory_of_one_upload() {
    let server = Server::new(MIB);
    let idle = server.read(body(MIB - 600, 1, 1, HOUR));
    sleep(Duration::from_secs(10)).await;
    let read = [0; 3].map(|_| server.read(Body::from(vec![b' '; 300_000])));
    for read in read {
        assert_eq!(read.await.unwrap(), Ok(300_000));
    }
    assert_eq!(idle.await.unwrap(), Err(Error::UploadEvicted));
}
