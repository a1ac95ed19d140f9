//! The processes of a gateway: started in a folder, measured in /proc with their children, and stopped.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Ticks per second in /proc: `USER_HZ` of Linux, the same on all its architectures of servers.
const TICKS: f64 = 100.0;
/// Bytes of a page.
const PAGE: f64 = 4096.0;
/// Time for the end after SIGTERM. The program under test needs it to write its profile (`make pgo`).
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A process that was started here. Dropping it stops it with SIGTERM, and kills what is left of it and its children.
pub struct Running {
    child: Child,
}

/// CPU time and memory of a process and its children.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Usage {
    /// User and system time, since the start.
    pub cpu: Duration,
    /// Resident memory in MiB. Pages that processes share count in each of them.
    pub resident_mib: f64,
}

impl Running {
    /// Starts a command with its output in `folder/NAME.log`.
    pub fn start(mut command: Command, name: &str, folder: &Path) -> Result<Self> {
        let log = File::create(folder.join(format!("{name}.log")))?;
        command.current_dir(folder).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { child })
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// What it and its children use.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for process in self.tree() {
            if let Some(Stat { cpu, .. }) = Stat::of(process) {
                usage.cpu += cpu;
            }
            let pages = fs::read_to_string(format!("/proc/{process}/statm")).ok();
            let pages = pages.and_then(|text| text.split(' ').nth(1)?.parse::<f64>().ok()).unwrap_or_default();
            usage.resident_mib += pages * PAGE / f64::from(1 << 20);
        }
        usage
    }

    /// The process and its descendants.
    fn tree(&self) -> Vec<u32> {
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let parents: Vec<(u32, u32)> = all.filter_map(|id| Some((id, Stat::of(id)?.parent))).collect();
        let mut tree = vec![self.child.id()];
        let mut at = 0;
        while let Some(&parent) = tree.get(at) {
            tree.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(id, _)| *id));
            at += 1;
        }
        tree
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Children first: nginx and LiteLLM leave theirs behind. An id is not reused within this moment.
        let ids: Vec<String> = self.tree().iter().rev().map(u32::to_string).collect();
        let asked = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        let started = Instant::now();
        while asked.is_ok() && self.is_running() && started.elapsed() < STOP_TIMEOUT {
            sleep(POLL_INTERVAL);
        }
        // Fails for those that have ended.
        let _ = Command::new("kill").arg("-KILL").args(&ids).stderr(Stdio::null()).status();
        let _ = self.child.wait();
    }
}

/// What /proc/PID/stat says.
struct Stat {
    parent: u32,
    /// Of the process, and of its children that have ended.
    cpu: Duration,
}

impl Stat {
    fn of(process: u32) -> Option<Self> {
        Self::read(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    fn read(text: &str) -> Option<Self> {
        // The name of the program, in brackets, may have spaces and brackets.
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
        let ticks = fields.get(11..15)?.iter().map(|ticks| ticks.parse::<f64>().unwrap_or(0.0)).sum::<f64>();
        Some(Self { parent: fields.get(1)?.parse().ok()?, cpu: Duration::from_secs_f64(ticks / TICKS) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let stat = Stat::read("7 (a) b (c)) S 3 7 7 0 -1 4194560 1 2 3 4 100 50 20 30 20 0").unwrap();
        assert_eq!((stat.parent, stat.cpu), (3, Duration::from_secs(2)));
    }

    #[test]
    fn a_child_counts_and_ends_with_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $! > child; wait"]);
        let running = Running::start(command, "sh", folder.path()).unwrap();
        let child = loop {
            let id = fs::read_to_string(folder.path().join("child")).unwrap_or_default();
            if let Ok(id) = id.trim().parse::<u32>() {
                break id;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(running.tree().contains(&child) && running.usage().resident_mib > 0.0);
        drop(running);
        // It ends a moment after the signal, and may be left as a zombie of process 1, which has no memory.
        let memory = || fs::read_to_string(format!("/proc/{child}/statm")).unwrap_or_default();
        let has_ended = || memory().is_empty() || memory().starts_with('0');
        let waits = (0..6_000).take_while(|_| !has_ended()).map(|_| std::thread::sleep(Duration::from_millis(10)));
        assert!(waits.count() < 6_000, "{}", memory());
    }
}
