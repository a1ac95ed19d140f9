//! Metrics of the process: version, CPU time, memory, open files, threads.
//!
//! On Linux `/proc` is read at each scrape. On other systems only `blockyard_build_info` exists.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge, IntGaugeVec, Opts, Registry};
use std::fs;
use std::path::Path;

/// Clock ticks per second in `/proc`: 100 on every architecture that we build for.
const TICKS: f64 = 100.0;

/// Registers `blockyard_build_info`, and on Linux the `process_*` metrics of Prometheus client libraries.
pub(crate) fn register(registry: &Registry) -> Result<(), prometheus::Error> {
    let build = Opts::new("blockyard_build_info", "Always 1. The labels are the version and the build profile.");
    let build = IntGaugeVec::new(build, &["version", "profile"])?;
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    build.with_label_values(&[env!("CARGO_PKG_VERSION"), profile]).set(1);
    registry.register(Box::new(build))?;
    if Path::new("/proc/self/stat").exists() {
        registry.register(Box::new(Process::new()?))?;
    }
    Ok(())
}

/// The `process_*` metrics.
struct Process {
    cpu: Counter,
    open_fds: Gauge,
    max_fds: Gauge,
    virtual_memory: Gauge,
    resident_memory: Gauge,
    start_time: Gauge,
    threads: Gauge,
}

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Stat {
    cpu_seconds: f64,
    threads: f64,
    /// Start time in seconds since boot.
    started_seconds: f64,
    virtual_bytes: f64,
}

impl Process {
    fn new() -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| Gauge::new(format!("process_{name}"), help);
        Ok(Self {
            cpu: Counter::new("process_cpu_seconds_total", "CPU time of the process, user and system.")?,
            open_fds: gauge("open_fds", "Open file descriptors, sockets included.")?,
            max_fds: gauge("max_fds", "File descriptors that the process may have open.")?,
            virtual_memory: gauge("virtual_memory_bytes", "Size of the address space in bytes.")?,
            resident_memory: gauge("resident_memory_bytes", "Resident memory in bytes.")?,
            start_time: gauge("start_time_seconds", "When the process was started, in seconds since 1970.")?,
            threads: gauge("threads", "Operating system threads of the process.")?,
        })
    }

    fn gauges(&self) -> [&Gauge; 6] {
        let Self { open_fds, max_fds, virtual_memory, resident_memory, start_time, threads, .. } = self;
        [open_fds, max_fds, virtual_memory, resident_memory, start_time, threads]
    }

    fn read(&self) {
        let text = |name: &str| fs::read_to_string(name).unwrap_or_default();
        if let Some(stat) = Stat::parse(&text("/proc/self/stat")) {
            self.cpu.inc_by((stat.cpu_seconds - self.cpu.get()).max(0.0));
            self.threads.set(stat.threads);
            self.virtual_memory.set(stat.virtual_bytes);
            if let Some(boot) = field(&text("/proc/stat"), "btime ") {
                self.start_time.set(boot + stat.started_seconds);
            }
        }
        if let Some(kib) = field(&text("/proc/self/status"), "VmRSS:") {
            self.resident_memory.set(kib * 1024.0);
        }
        if let Some(limit) = field(&text("/proc/self/limits"), "Max open files") {
            self.max_fds.set(limit);
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            // One descriptor is the folder that is being read.
            self.open_fds.set(open.count().saturating_sub(1) as f64);
        }
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.gauges().into_iter().flat_map(Collector::desc).chain(self.cpu.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.read();
        self.gauges().into_iter().flat_map(Collector::collect).chain(self.cpu.collect()).collect()
    }
}

impl Stat {
    /// Parses `/proc/PID/stat`. The second field is the program name in parentheses, which may contain any character.
    fn parse(text: &str) -> Option<Self> {
        let (_, fields) = text.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        // proc(5) numbers the fields from 1, and two fields precede.
        let number = |nth: usize| fields.get(nth - 3)?.parse::<f64>().ok();
        Some(Self {
            cpu_seconds: (number(14)? + number(15)?) / TICKS,
            threads: number(20)?,
            started_seconds: number(22)? / TICKS,
            virtual_bytes: number(23)?,
        })
    }
}

/// The first number after a word at the start of a line.
fn field(text: &str, word: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(word)?.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_parsed_with_any_program_name() {
        let line = "42 (a) b c) S 1 2 3 4 5 6 7 8 9 10 250 150 0 0 20 0 17 0 12345 4096000 99 18446744073709551615";
        let wanted = Stat { cpu_seconds: 4.0, threads: 17.0, started_seconds: 123.45, virtual_bytes: 4_096_000.0 };
        assert_eq!(Stat::parse(line), Some(wanted));
        assert_eq!(Stat::parse("42 (a) S 1"), None);
        assert_eq!(field("a 1\nMax open files            1024    4096   files\n", "Max open files"), Some(1024.0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn process_metrics_have_plausible_values() {
        let registry = Registry::new();
        register(&registry).unwrap();
        let value = |name: &str| {
            let families = registry.gather();
            let family = families.iter().find(|family| family.name() == name).unwrap();
            let metric = &family.get_metric()[0];
            metric.get_gauge().get_value() + metric.get_counter().get_value()
        };
        let files: Vec<_> = (0..50).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        assert!(value("process_open_fds") >= 50.0);
        drop(files);
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_virtual_memory_bytes") > value("process_resident_memory_bytes"));
        assert!(value("process_max_fds") >= 64.0 && value("process_threads") >= 1.0);
        assert!(value("process_start_time_seconds") > 1.5e9, "seconds since 1970");
        assert!(value("process_cpu_seconds_total") >= 0.0);
        assert_eq!(value("blockyard_build_info") as u64, 1);
    }
}
