//! Sizes of the tiers: as configured, or a share of the memory and disks of the machine. Sizes that do not fit are an
//! error that names the sizes and what to change.

use crate::config::{Budget, ByteSize, DiskPath, Tiers};
use crate::process::machine::{Machine, Space};
use kvbm::{Quotas, disk};
use std::path::{Path, PathBuf};
use worker::llama::Shape;

/// Automatic size of G1, all workers together: percent of the memory that is free after loading the weights. G1 and G2
/// together take less than a third: activations, requests and other programs need memory too.
const G1_SHARE: u64 = 15;

/// Automatic size of G2, in the same way.
const G2_SHARE: u64 = 15;

/// Automatic size of the G3 log in one folder, in bytes: about ten minutes of writing at the prefill speed of a small
/// machine, and acceptable in a user's cache folder.
const G3_BYTES: u64 = 10 << 30;

/// Name of the folder of the G3 log in the data folder.
pub(super) const G3_FOLDER: &str = "g3";

/// Limit of the automatic size: percent of the free space on the disk.
const G3_SHARE: u64 = 20;

/// Automatic free space that G3 leaves on a disk, in bytes: enough for operators to notice and act.
const G3_MIN_FREE: u64 = 1 << 30;

/// Limit of the automatic free space: percent of the size of the disk.
const G3_MIN_FREE_SHARE: u64 = 5;

/// Sizes of the memory tiers and of G3, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// G1 of each worker.
    pub g1: u64,
    /// G2 of each worker; `None` if G2 is off.
    pub g2: Option<u64>,
    /// G3 of the process, all folders together; `None` if G3 is off.
    pub g3: Option<u64>,
}

/// Memory that the model needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needs {
    /// Bytes of the weights, once per process.
    pub weights: u64,
    /// Bytes of KV that one request of the full context takes.
    pub context: u64,
    /// Bytes of one block.
    pub block: u64,
    /// Tokens of one block.
    pub block_tokens: u64,
    /// The context, in tokens.
    pub context_tokens: u64,
}

impl Needs {
    /// The needs of a model with this shape.
    pub fn of(shape: &Shape) -> Self {
        let Shape { weights_bytes, block_bytes, block_tokens, context_tokens, context_bytes } = *shape;
        Self {
            weights: weights_bytes,
            context: context_bytes,
            block: block_bytes as u64,
            block_tokens: block_tokens as u64,
            context_tokens: context_tokens as u64,
        }
    }
}

/// The configured sizes are impossible.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// G1 is off, but the engine computes in it.
    #[error("tiers.g1 cannot be off, because the engine needs it; expected a size or `auto`")]
    NoG1,
    /// G1 is smaller than one block (bytes).
    #[error("tiers.g1 = {0} is smaller than one block of {block}", block = ByteSize(*.1).about())]
    TooSmall(ByteSize, u64),
    /// The machine has too little memory.
    #[error(
        "not enough memory: {workers_need} {needed} (weights {weights}, G1 {g1} and G2 {g2} each), \
         and {have} is available; \
         {advice}",
        workers_need = workers_need(*.workers),
        advice = smaller(*.workers, .sizes),
        needed = ByteSize(*.needed).about(),
        weights = ByteSize(*.weights).about(),
        g1 = ByteSize(.sizes.g1).about(),
        g2 = ByteSize(.sizes.g2.unwrap_or(0)).about(),
        have = ByteSize(*.have).about()
    )]
    Memory {
        /// Number of workers.
        workers: u64,
        /// Bytes for weights, G1 and G2 of all workers.
        needed: u64,
        /// Bytes of the weights.
        weights: u64,
        /// The configured or automatic sizes.
        sizes: Sizes,
        /// Available bytes of memory.
        have: u64,
    },
}

impl Error {
    /// What to change.
    pub fn advice(&self) -> String {
        match self {
            Self::NoG1 => "set a size, or a share of the memory: --set tiers.g1=auto".to_owned(),
            Self::TooSmall(_, block) => {
                // In whole KiB, so that the size in the text is accepted.
                let least = ByteSize(block.next_multiple_of(1 << 10));
                format!("set at least one block, --set tiers.g1={least}, or a share of the memory: --set tiers.g1=auto")
            }
            Self::Memory { workers, sizes, .. } => smaller(*workers, sizes),
        }
    }
}

/// The number of workers, with the verb.
fn workers_need(workers: u64) -> String {
    if workers == 1 { "1 worker needs".to_owned() } else { format!("{workers} workers need") }
}

/// What to change if the machine has too little memory. Names the larger of the two tiers.
fn smaller(workers: u64, sizes: &Sizes) -> String {
    let (key, bytes) = sizes.g2.filter(|g2| *g2 > sizes.g1).map_or(("tiers.g1", sizes.g1), |g2| ("tiers.g2", g2));
    let fewer = if workers > 1 { "fewer workers (--workers both:1), " } else { "" };
    format!("use {fewer}smaller tiers (--set {key}=…, now {}) or a smaller model", ByteSize(bytes).about())
}

/// One folder of the G3 log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disk {
    /// The folder.
    pub folder: PathBuf,
    /// Capacity of the log in the folder, in bytes.
    pub bytes: u64,
    /// Whether the capacity follows from the space on the disk.
    pub is_automatic: bool,
    /// Bytes that the log leaves free on its disk.
    pub min_free: u64,
}

/// G1 is too small for a request of the full context.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShortContext {
    /// The sizes and the consequence.
    pub detail: String,
    /// What to change.
    pub advice: String,
}

/// Too little free space on the disk of a G3 log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shortage {
    /// Whether the disk has less free space than the log must leave there.
    pub is_full: bool,
    /// Folder, sizes and consequence.
    pub detail: String,
    /// What to change.
    pub advice: String,
}

impl Disk {
    /// Folder and size of the log, and the `free` bytes of its disk.
    pub fn detail(&self, free: u64) -> String {
        let size = |bytes: u64| ByteSize(bytes).about();
        format!("{}: log of {}, {} free", self.folder.display(), size(self.bytes), size(free))
    }

    /// Whether the disk is too small for the log, with `free` bytes free and `taken` bytes in the log already.
    pub fn shortage(&self, tiers: &Tiers, free: u64, taken: u64) -> Option<Shortage> {
        let detail = self.detail(free);
        if free < self.min_free {
            let detail = format!("{detail}; it must leave {} free", ByteSize(self.min_free).about());
            let advice = "free space on that disk, or set tiers.g3_paths to another, or tiers.g3_min_free lower";
            return Some(Shortage { is_full: true, detail, advice: advice.to_owned() });
        }
        if free.saturating_add(taken) >= self.bytes.saturating_add(self.min_free) {
            return None;
        }
        let has_capacity = |path: &DiskPath| path.path == self.folder && path.capacity != Budget::Auto;
        let key = if tiers.g3_paths.iter().any(has_capacity) {
            "the capacity of the folder in tiers.g3_paths"
        } else {
            "--set tiers.g3=SIZE"
        };
        Some(Shortage {
            is_full: false,
            detail: format!("{detail}; the log shrinks when the disk is full"),
            advice: format!("free space on that disk, or set a smaller size: {key}"),
        })
    }
}

/// The folders of the G3 log, by default one in the data folder. `space` returns the space on the disk of a folder.
pub fn disks(tiers: &Tiers, data: &Path, space: impl Fn(&Path) -> Space) -> Vec<Disk> {
    let default = [DiskPath { path: data.join(G3_FOLDER), capacity: Budget::Auto }];
    let paths = if tiers.g3_paths.is_empty() { &default[..] } else { &tiers.g3_paths };
    let disk = |DiskPath { path, capacity }: &DiskPath| {
        let bytes = match (tiers.g3, *capacity) {
            (Budget::Off, _) | (_, Budget::Off) => return None,
            (_, Budget::Bytes(size)) | (Budget::Bytes(size), Budget::Auto) => size.0,
            (Budget::Auto, Budget::Auto) => automatic_capacity(space(path)),
        };
        let is_automatic = tiers.g3 == Budget::Auto && *capacity == Budget::Auto;
        let min_free = match tiers.g3_min_free {
            Budget::Auto => G3_MIN_FREE.min(space(path).total / 100 * G3_MIN_FREE_SHARE),
            Budget::Off => 0,
            Budget::Bytes(size) => size.0,
        };
        Some(Disk { folder: path.clone(), bytes, is_automatic, min_free })
    };
    paths.iter().filter_map(disk).collect()
}

/// A share of the space that is free without the log. A log that has more keeps it, so that a restart on a disk that
/// others have filled does not remove its blocks.
fn automatic_capacity(Space { free, taken, .. }: Space) -> u64 {
    let share = free.saturating_add(taken) / 100 * G3_SHARE;
    G3_BYTES.min(share.max(taken))
}

/// The folders whose log takes blocks of `block` bytes. A folder with an automatic size that is too small for that has
/// no log; one with a configured size is an error when it is opened.
pub fn usable(disks: Vec<Disk>, block: u64) -> Vec<Disk> {
    let takes = |disk: &Disk| {
        let settings = disk::Settings { capacity_bytes: disk.bytes, ..disk::Settings::default() };
        settings.check_block(&Quotas::default(), block).is_ok()
    };
    // Without any space, the folder cannot be used for anything else either.
    disks.into_iter().filter(|disk| !disk.is_automatic || disk.bytes == 0 || takes(disk)).collect()
}

impl Sizes {
    /// Computes the sizes for `workers` workers; the size of G3 is the sum of its [`disks`].
    pub fn compute(
        tiers: &Tiers,
        workers: usize,
        needs: Needs,
        machine: &Machine,
        disks: &[Disk],
    ) -> Result<Self, Error> {
        let workers = workers as u64;
        // If the system does not report its memory, assume 4 GiB: a quarter of a small machine.
        let have = machine.memory.unwrap_or(4 << 30);
        let free = have.saturating_sub(needs.weights);
        let share = |percent: u64| free / 100 * percent / workers;
        let g1 = match tiers.g1 {
            Budget::Off => return Err(Error::NoG1),
            Budget::Bytes(size) if size.0 < needs.block => return Err(Error::TooSmall(size, needs.block)),
            Budget::Bytes(size) => size.0,
            // At least one full context: with less, requests that the model can serve would be refused.
            Budget::Auto => share(G1_SHARE).max(needs.context),
        };
        let g2 = match tiers.g2 {
            Budget::Off => None,
            Budget::Bytes(size) => Some(size.0),
            Budget::Auto => Some(share(G2_SHARE)),
        };
        let g3 = (!disks.is_empty()).then(|| disks.iter().map(|disk| disk.bytes).sum());
        let sizes = Self { g1, g2, g3 };
        let each = g1.saturating_add(g2.unwrap_or(0));
        let needed = each.saturating_mul(workers).saturating_add(needs.weights);
        match machine.memory {
            Some(have) if needed > have => Err(Error::Memory { workers, needed, weights: needs.weights, sizes, have }),
            _ => Ok(sizes),
        }
    }

    /// Whether G1 of a worker is too small for a request of the full context. An automatic G1 never is.
    pub fn short_context(&self, needs: &Needs) -> Option<ShortContext> {
        let (fit, context) = (self.g1 / needs.block * needs.block_tokens, needs.context_tokens);
        if fit >= context {
            return None;
        }
        let g1 = ByteSize(self.g1);
        // In whole MiB, so that it is easy to read.
        let least = ByteSize(needs.context.next_multiple_of(1 << 20));
        Some(ShortContext {
            detail: format!(
                "tiers.g1 = {g1} holds {fit} of the {context} tokens of the model's context; longer requests are \
                 refused or cut"
            ),
            advice: format!("set tiers.g1 to at least {least}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs =
        Needs { weights: 2 << 30, context: 64 << 20, block: 64 << 10, block_tokens: 16, context_tokens: 16_384 };
    const MACHINE: Machine = Machine { memory: Some(12 << 30), threads: 2 };

    fn bytes(text: &str) -> Budget {
        text.parse().unwrap()
    }

    #[test]
    fn automatic_tiers_share_what_the_weights_leave() {
        let disks =
            disks(&Tiers::default(), "/data".as_ref(), |_| Space { free: 100 << 30, total: 200 << 30, taken: 0 });
        let sizes = Sizes::compute(&Tiers::default(), 3, NEEDS, &MACHINE, &disks).unwrap();
        let each = (10_u64 << 30) / 100 * 15 / 3;
        assert_eq!(sizes, Sizes { g1: each, g2: Some(each), g3: Some(10 << 30) });
    }

    #[test]
    fn an_automatic_g3_keeps_its_log_when_others_fill_the_disk() {
        let of = |free: u64, taken: u64| {
            let space = Space { free: free << 20, total: 900 << 20, taken: taken << 20 };
            disks(&Tiers::default(), "/data".as_ref(), |_| space).remove(0)
        };
        let first = of(900, 0).bytes;
        assert_eq!(of(900 - (first >> 20), first >> 20).bytes >> 20, first >> 20, "a restart changes nothing");
        assert_eq!(of(60, 140).bytes, 140 << 20, "nor does a full disk");
        assert_eq!(of(60, 20_000).bytes, G3_BYTES, "but it has a limit");
    }

    #[test]
    fn an_automatic_g3_without_space_for_a_block_is_off() {
        let has_log = |free: u64, tiers: &Tiers| {
            let space = Space { free, total: 1 << 30, taken: 0 };
            !usable(disks(tiers, "/data".as_ref(), |_| space), 1 << 20).is_empty()
        };
        assert!(has_log(500 << 20, &Tiers::default()) && !has_log(15 << 20, &Tiers::default()));
        let configured = Tiers { g3: bytes("1MiB"), ..Tiers::default() };
        assert!(has_log(15 << 20, &configured), "a configured size is an error instead");
    }

    #[test]
    fn a_g3_folder_has_its_own_or_the_common_or_an_automatic_size() {
        let space = |folder: &Path| {
            let free = if folder.starts_with("/small") { 10 << 30 } else { 100 << 30 };
            Space { free, total: free, taken: 0 }
        };
        let found = |tiers: &Tiers| -> Vec<(String, u64)> {
            let disks = disks(tiers, "/data".as_ref(), space);
            disks.iter().map(|disk| (disk.folder.display().to_string(), disk.bytes)).collect()
        };
        let path = |path: &str, capacity: &str| DiskPath { path: path.into(), capacity: bytes(capacity) };
        assert_eq!(found(&Tiers::default()), [("/data/g3".into(), 10 << 30)]);
        let g3_paths = vec![path("/a", "400GiB"), path("/small/b", "auto"), path("/c", "off")];
        let each = Tiers { g3_paths, ..Tiers::default() };
        assert_eq!(found(&each), [("/a".into(), 400 << 30), ("/small/b".into(), (10_u64 << 30) / 100 * 20)]);
        let common = Tiers { g3: bytes("1GiB"), ..each.clone() };
        assert_eq!(found(&common), [("/a".into(), 400 << 30), ("/small/b".into(), 1 << 30)]);
        assert_eq!(found(&Tiers { g3: Budget::Off, ..each }), []);
    }

    #[test]
    fn g3_leaves_a_gibibyte_or_a_twentieth_of_a_small_disk() {
        let min_free = |tiers: &Tiers, total: u64| {
            disks(tiers, "/data".as_ref(), |_| Space { free: total / 2, total, taken: 0 })[0].min_free
        };
        assert_eq!(min_free(&Tiers::default(), 100 << 30), 1 << 30);
        assert_eq!(min_free(&Tiers::default(), 1000), 50);
        let set = |text| Tiers { g3_min_free: bytes(text), ..Tiers::default() };
        assert_eq!((min_free(&set("7GiB"), 1000), min_free(&set("off"), 1000)), (7 << 30, 0));
    }

    #[test]
    fn a_log_that_does_not_fit_on_its_disk_is_a_shortage_with_advice() {
        let disk = Disk { folder: "/a".into(), bytes: 100, is_automatic: false, min_free: 10 };
        let own = DiskPath { path: "/a".into(), capacity: bytes("100B") };
        let tiers = Tiers { g3_paths: vec![own], ..Tiers::default() };
        let shortage = |tiers: &Tiers, free, taken| {
            disk.shortage(tiers, free, taken).map(|shortage| (shortage.is_full, shortage.advice))
        };
        assert_eq!(shortage(&tiers, 110, 0), None);
        assert_eq!(shortage(&tiers, 20, 90), None, "the log that is there already takes a part of it");
        assert!(shortage(&tiers, 9, 100).is_some_and(|(is_full, _)| is_full));
        assert!(shortage(&tiers, 109, 0).is_some_and(|(is_full, advice)| !is_full && advice.contains("capacity")));
        assert!(shortage(&Tiers::default(), 109, 0).is_some_and(|(_, advice)| advice.contains("--set tiers.g3=SIZE")));
    }

    #[test]
    fn automatic_g1_holds_at_least_one_context() {
        let needs = Needs { context: 3 << 30, ..NEEDS };
        assert_eq!(Sizes::compute(&Tiers::default(), 2, needs, &MACHINE, &[]).unwrap().g1, 3 << 30);
    }

    #[test]
    fn a_g1_below_a_full_context_is_short() {
        let short = |g1: &str, needs: &Needs| {
            let tiers = Tiers { g1: bytes(g1), g2: bytes("off"), ..Tiers::default() };
            let short = Sizes::compute(&tiers, 2, *needs, &MACHINE, &[]).unwrap().short_context(needs)?;
            Some(format!("{}; {}", short.detail, short.advice))
        };
        assert_eq!((short("auto", &NEEDS), short("64MiB", &NEEDS)), (None, None));
        let text = short("16MiB", &NEEDS).unwrap();
        assert!(text.starts_with("tiers.g1 = 16MiB holds 4096 of the 16384 tokens of the model's context; "), "{text}");
        assert!(text.ends_with("; set tiers.g1 to at least 64MiB"), "{text}");
        // The blocks of the built-in model `small`: 227 of them fit, and a part of another.
        let small = Needs { context: 72 << 20, block: 72 << 10, ..NEEDS };
        let text = short("16MiB", &small).unwrap();
        assert!(text.contains(" holds 3632 of ") && text.ends_with("; set tiers.g1 to at least 72MiB"), "{text}");
        let odd = Needs { context: (64 << 20) + 1, ..NEEDS };
        assert!(short("1MiB", &odd).unwrap().ends_with("; set tiers.g1 to at least 65MiB"));
    }

    #[test]
    fn configured_sizes_are_used_and_off_is_off() {
        let tiers = Tiers { g1: bytes("1GiB"), g2: bytes("off"), g3: bytes("0"), ..Tiers::default() };
        let sizes = Sizes::compute(&tiers, 3, NEEDS, &MACHINE, &[]).unwrap();
        assert_eq!(sizes, Sizes { g1: 1 << 30, g2: None, g3: None });
    }

    #[test]
    fn an_error_names_the_parts_and_what_to_change() {
        let tiers = Tiers { g1: bytes("4GiB"), ..Tiers::default() };
        let error = Sizes::compute(&tiers, 3, NEEDS, &MACHINE, &[]).unwrap_err().to_string();
        for part in [
            "3 workers need",
            "weights 2.0 GiB",
            "G1 4.0 GiB",
            "12.0 GiB is available",
            "use fewer workers (--workers both:1), smaller tiers (--set tiers.g1=…, now 4.0 GiB)",
        ] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        let large = Tiers { g2: bytes("100GiB"), ..Tiers::default() };
        let error = Sizes::compute(&large, 1, NEEDS, &MACHINE, &[]).unwrap_err().to_string();
        for part in ["1 worker needs", "; use smaller tiers (--set tiers.g2=…, now 100.0 GiB)"] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        let tiny = Tiers { g1: bytes("1KiB"), ..Tiers::default() };
        let too_small = Error::TooSmall(ByteSize(1024), NEEDS.block);
        assert_eq!(Sizes::compute(&tiny, 1, NEEDS, &MACHINE, &[]), Err(too_small.clone()));
        assert!(too_small.advice().contains("--set tiers.g1=64KiB"), "{}", too_small.advice());
        let none = Tiers { g1: Budget::Off, ..Tiers::default() };
        assert_eq!(Sizes::compute(&none, 1, NEEDS, &MACHINE, &[]), Err(Error::NoG1));
    }
}
