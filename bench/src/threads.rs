//! CPU time of the threads of a process, from /proc.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// The CPU time of each thread of a process since its start.
#[derive(Clone, Debug)]
pub struct Threads(BTreeMap<u32, Thread>);

#[derive(Clone, PartialEq, Eq, Debug)]
struct Thread {
    name: String,
    cpu: Duration,
}

impl Threads {
    /// The threads of a process now.
    pub fn of(process: u32) -> Result<Self> {
        let folder = format!("/proc/{process}/task");
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir(&folder).with_context(|| folder.clone())? {
            let path = entry?.path();
            let read = |file: &str| fs::read_to_string(path.join(file)).ok();
            let id = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            // A thread may end while it is read.
            if let (Some(id), Some(name), Some(times)) = (id, read("comm"), read("schedstat")) {
                let cpu = on_cpu(&times).with_context(|| format!("{}/schedstat: {times}", path.display()))?;
                threads.insert(id, Thread { name: name.trim().to_owned(), cpu });
            }
        }
        Ok(Self(threads))
    }

    /// CPU time since `earlier` of the threads whose name `counts`. A thread that has ended since has no time.
    pub fn since(&self, earlier: &Self, counts: impl Fn(&str) -> bool) -> Duration {
        let before = |id: &u32| earlier.0.get(id).map_or(Duration::ZERO, |thread| thread.cpu);
        let counted = self.0.iter().filter(|(_, thread)| counts(&thread.name));
        counted.map(|(id, thread)| thread.cpu.saturating_sub(before(id))).sum()
    }
}

/// The first number of a schedstat file: nanoseconds on a CPU. The files in ticks of 10 ms are too coarse.
fn on_cpu(schedstat: &str) -> Option<Duration> {
    schedstat.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;
    use std::time::Instant;

    #[test]
    fn only_the_named_threads_count() {
        let before = Threads::of(std::process::id()).expect("this process has threads");
        let busy = || {
            let started = Instant::now();
            while started.elapsed() < Duration::from_millis(20) {
                black_box(started);
            }
            Threads::of(std::process::id()).expect("this process has threads")
        };
        let thread = std::thread::Builder::new().name("busy-1".into()).spawn(busy).expect("a thread");
        let after = thread.join().expect("it ends");
        assert!(after.since(&before, |name| name == "busy-1") > Duration::ZERO);
        assert_eq!(after.since(&before, |name| name == "busy-2"), Duration::ZERO);
    }
}
