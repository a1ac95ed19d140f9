//! Writes the log to standard error on a thread of its own.
//!
//! A reader of the log that is slow, stopped or gone delays no request. While the queue is full, lines are dropped and
//! counted. Not `tracing-appender`: when the log is not read, it prints to standard output at the end.

use parking_lot::{Condvar, Mutex};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, Registry};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of queued lines. A line has about 500 bytes, so a full queue has about 4 MiB: seconds of log at
/// thousands of requests per second.
const MAX_LINES: usize = 8192;
/// Maximum time for writing the queue at the end of the process.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// The lines of this process.
static LINES: LazyLock<Arc<Lines>> = LazyLock::new(Arc::default);

/// Lines that are to be written.
#[derive(Default)]
struct Lines {
    queue: Mutex<Queue>,
    /// Notified when a line is added.
    added: Condvar,
    /// Notified when all lines are written.
    written: Condvar,
    dropped: AtomicU64,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    /// The thread is writing a line.
    is_writing: bool,
}

/// Writes queued lines until it is dropped, and what is queued then for at most a second.
#[must_use]
pub struct LogWriter(Arc<Lines>);

/// Queues each write as a line.
#[derive(Clone)]
pub struct LineQueue(Arc<Lines>);

/// Starts to write the log of this process to standard error. To be called once.
pub fn to_stderr() -> io::Result<(LineQueue, LogWriter)> {
    start(Arc::clone(&LINES), io::stderr())
}

/// Registers the counter of dropped lines.
pub(crate) fn register(registry: &Registry) -> Result<(), prometheus::Error> {
    let help = "Log lines that were dropped because standard error was not read.";
    registry.register(Box::new(DroppedLines(IntCounter::new("blockyard_log_lines_dropped_total", help)?)))
}

fn start(lines: Arc<Lines>, mut output: impl Write + Send + 'static) -> io::Result<(LineQueue, LogWriter)> {
    let queue = Arc::clone(&lines);
    std::thread::Builder::new().name("log".into()).spawn(move || {
        loop {
            let line = queue.next();
            // There is nowhere to report the error to, and the next line may be written again.
            let _ = output.write_all(&line);
        }
    })?;
    Ok((LineQueue(Arc::clone(&lines)), LogWriter(lines)))
}

impl Lines {
    fn add(&self, line: &[u8]) {
        let mut queue = self.queue.lock();
        if queue.lines.len() < MAX_LINES {
            queue.lines.push_back(line.to_vec());
            self.added.notify_one();
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for a line. The line before it is written.
    fn next(&self) -> Vec<u8> {
        let mut queue = self.queue.lock();
        queue.is_writing = false;
        loop {
            if let Some(line) = queue.lines.pop_front() {
                queue.is_writing = true;
                return line;
            }
            self.written.notify_all();
            self.added.wait(&mut queue);
        }
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        let is_pending = |queue: &mut Queue| queue.is_writing || !queue.lines.is_empty();
        self.0.written.wait_while_for(&mut self.0.queue.lock(), is_pending, FLUSH_TIME);
    }
}

impl Write for LineQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.add(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LineQueue {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Reads the counter of the queue at each scrape.
struct DroppedLines(IntCounter);

impl Collector for DroppedLines {
    fn desc(&self) -> Vec<&Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let dropped = LINES.dropped.load(Ordering::Relaxed);
        self.0.inc_by(dropped.saturating_sub(self.0.get()));
        self.0.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, pipe};

    #[test]
    fn lines_are_written_in_order_before_the_end() {
        let (mut reader, writer) = pipe().unwrap();
        let (mut queue, end) = start(Arc::default(), writer).unwrap();
        (0..100).for_each(|nth| writeln!(queue, "{nth}").unwrap());
        drop(end);
        let mut text = [0; 290];
        reader.read_exact(&mut text).unwrap();
        let numbers = str::from_utf8(&text).unwrap().lines().map(|line| line.parse::<u32>().unwrap());
        assert!(numbers.eq(0..100));
    }

    #[test]
    fn lines_beyond_a_full_queue_are_dropped_and_counted() {
        let (reader, writer) = pipe().unwrap();
        let (mut queue, end) = start(Arc::default(), writer).unwrap();
        let line = [b'x'; 4096];
        for _ in 0..2 * MAX_LINES {
            queue.write_all(&line).unwrap();
        }
        assert!(queue.0.dropped.load(Ordering::Relaxed) >= MAX_LINES as u64 / 2);
        drop(end);
        drop(reader);
    }
}
