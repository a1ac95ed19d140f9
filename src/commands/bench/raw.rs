//! Baselines without the tiers, in bytes per second: memory copies, direct I/O, whole files, and the client of the
//! object store.

use anyhow::Context;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use kvbm::object::StoreLocation;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One read or write of a buffer at an offset.
type Access = dyn Fn(&File, &mut [u8], u64) -> io::Result<()> + Sync;

/// Bytes of one direct read or write, and of one copy: the size of a read of the disk tier.
const UNIT: usize = 1 << 20;
/// Bytes of one object: the size of objects in G4.
pub(super) const OBJECT: usize = 8 << 20;
/// Alignment of direct I/O that every common device accepts.
const ALIGN: usize = 4096;

/// Write and read bandwidth, in bytes per second.
pub(super) type Rates = [f64; 2];

fn rate(bytes: usize, elapsed: Duration) -> f64 {
    bytes as f64 / elapsed.as_secs_f64()
}

/// Runs `work` on `count` threads with their numbers. Returns the time until the last one has finished.
fn threads(count: usize, work: impl Fn(usize) -> io::Result<()> + Sync) -> io::Result<Duration> {
    let started = Instant::now();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..count)
            .map(|n| {
                scope.spawn({
                    let work = &work;
                    move || work(n)
                })
            })
            .collect();
        running.into_iter().try_for_each(|thread| thread.join().expect("measuring does not panic"))
    })?;
    Ok(started.elapsed())
}

/// Copies memory between two buffers, in both directions.
pub(super) fn copies(bytes: usize, parallel: usize) -> io::Result<Rates> {
    let each = bytes / parallel;
    let parts: Vec<_> = (0..parallel).map(|_| parking_lot::Mutex::new((vec![1_u8; each], vec![2_u8; each]))).collect();
    let copy = |back: bool| {
        let elapsed = threads(parallel, |n| {
            let mut part = parts[n].lock();
            let (from, to) = &mut *part;
            let (from, to) = if back { (to, from) } else { (from, to) };
            for (from, to) in from.chunks(UNIT).zip(to.chunks_mut(UNIT)) {
                to.copy_from_slice(from);
            }
            std::hint::black_box(to);
            Ok(())
        })?;
        Ok::<_, io::Error>(rate(each * parallel, elapsed))
    };
    Ok([copy(false)?, copy(true)?])
}

/// Writes and reads a file with direct I/O. Returns whether the filesystem supports it; if not, the page cache is used.
pub(super) fn direct(file: &Path, bytes: usize, parallel: usize) -> io::Result<(Rates, bool)> {
    let open = |flags: OFlags| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).custom_flags(flags.bits() as i32).open(file)
    };
    let (file, is_direct) = match open(OFlags::DIRECT) {
        Ok(file) => (file, true),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => (open(OFlags::empty())?, false),
        Err(error) => return Err(error),
    };
    let each = (bytes / parallel).next_multiple_of(UNIT);
    // The tier preallocates its segments too. Without support the measurement is only slower.
    let _ = fallocate(&file, FallocateFlags::empty(), 0, (each * parallel) as u64);
    let through = |access: &Access| {
        let elapsed = threads(parallel, |n| {
            let mut memory = vec![n as u8; UNIT + ALIGN];
            let start = memory.as_ptr().align_offset(ALIGN);
            let unit = &mut memory[start..start + UNIT];
            (n * each..(n + 1) * each).step_by(UNIT).try_for_each(|at| access(&file, unit, at as u64))
        })?;
        Ok::<_, io::Error>(rate(each * parallel, elapsed))
    };
    let write = through(&|file, unit, at| file.write_all_at(unit, at))?;
    let read = through(&|file, unit, at| file.read_exact_at(unit, at))?;
    Ok(([write, read], is_direct))
}

/// Writes and reads files of the size of an object.
pub(super) fn files(folder: &Path, bytes: usize, parallel: usize) -> io::Result<Rates> {
    let objects = bytes.div_ceil(OBJECT);
    let path = |n: usize| folder.join(format!("raw-{n}"));
    let of_thread = |thread: usize| (thread..objects).step_by(parallel);
    let content = vec![7_u8; OBJECT];
    let write = threads(parallel, |n| of_thread(n).try_for_each(|n| std::fs::write(path(n), &content)))?;
    let read = threads(parallel, |n| of_thread(n).try_for_each(|n| std::fs::read(path(n)).map(drop)))?;
    (0..objects).try_for_each(|n| std::fs::remove_file(path(n)))?;
    Ok([rate(objects * OBJECT, write), rate(objects * OBJECT, read)])
}

/// Writes and reads objects with the client of the store.
#[expect(clippy::default_trait_access, reason = "the type is in a crate that this one does not name")]
pub(super) async fn objects(
    location: &StoreLocation,
    access: &kvbm::object::Access,
    timeout: Duration,
    below: &str,
    (bytes, parallel): (usize, usize),
) -> anyhow::Result<Rates> {
    let client = location.client(access, timeout)?.context("a cloud has a client")?;
    let StoreLocation::Cloud { prefix, .. } = location else { anyhow::bail!("a folder has no client") };
    let content = Bytes::from(vec![7_u8; OBJECT]);
    let paths: Vec<_> =
        (0..bytes.div_ceil(OBJECT)).map(|n| prefix.clone().join(below).join(format!("raw-{n}"))).collect();
    let total = paths.len() * OBJECT;
    let started = Instant::now();
    let writing = paths.iter().map(|path| {
        let (client, content) = (Arc::clone(&client), content.clone());
        async move { client.put_opts(path, content.into(), Default::default()).await.map(drop) }
    });
    stream::iter(writing).buffer_unordered(parallel).try_collect::<()>().await?;
    let write = rate(total, started.elapsed());
    let started = Instant::now();
    let reading = paths.iter().map(|path| {
        let client = Arc::clone(&client);
        async move { client.get_ranges(path, std::slice::from_ref(&(0..OBJECT as u64))).await.map(drop) }
    });
    stream::iter(reading).buffer_unordered(parallel).try_collect::<()>().await?;
    Ok([write, rate(total, started.elapsed())])
}

/// Removes all objects below a prefix of a store.
pub(super) async fn clear(
    location: &StoreLocation,
    access: &kvbm::object::Access,
    timeout: Duration,
    below: &str,
) -> anyhow::Result<()> {
    let Some(client) = location.client(access, timeout)? else { return Ok(()) };
    let StoreLocation::Cloud { prefix, .. } = location else { return Ok(()) };
    let found = client.list(Some(&prefix.clone().join(below))).map_ok(|object| object.location).boxed();
    client.delete_stream(found).try_for_each(|_| async { Ok(()) }).await?;
    Ok(())
}
