//! The results of `blockyard cache` as text.

use super::VerifiedLog;
use crate::commands::output::count;
use crate::config::{ByteSize, HumanDuration};
use kvbm::object::gc::StoredGroup;
use kvbm::object::{GcReport, ObjectTotals, Verification};
use kvbm::{Clock, DomainId, disk};
use serde_json::json;
use std::time::Duration;

/// What `shred` did.
pub(super) fn shredded(domain: DomainId, destroyed: u64, objects: u64) -> String {
    let keys = match destroyed {
        0 => "was shredded before, and has no key since".to_owned(),
        _ => format!("{} destroyed", count(destroyed, "key")),
    };
    format!(
        "domain {domain}: {keys}, {} marked for deletion by a later gc\n\
         running processes that reach the key store drop it from memory within 5 seconds\n",
        count(objects, "object")
    )
}

/// A G3 log as `ls` lists it.
pub(super) fn log(log: &disk::LogContents) -> String {
    let disk::LogContents { folder, in_use, owner_pid, segments, open_segments, bytes, contents, hashes: _ } = log;
    let owner = match owner_pid {
        Some(pid) if *in_use => format!("in use by process {pid}"),
        _ if *in_use => "in use".into(),
        _ => "not in use".into(),
    };
    let (segments, size) = (count(*segments, "segment"), ByteSize(*bytes).about());
    let mut text = format!("G3 in {}, {owner}: {segments}, {open_segments} of them open, {size}\n", folder.display());
    text += &format!("{:<32}  {:<16}  {:>10}  {:>10}\n", "DOMAIN", "FINGERPRINT", "BLOCKS", "SIZE");
    for disk::DomainBlocks { domain, fingerprint, blocks, bytes } in contents {
        let size = ByteSize(*bytes).about();
        text += &format!("{domain:<32}  {fingerprint:<16}  {blocks:>10}  {size:>10}\n");
    }
    text + "\n"
}

/// The contents of a shared store as `ls` lists them.
pub(super) fn holdings(holdings: &[StoredGroup]) -> String {
    let mut text = format!(
        "{:<32}  {:<16}  {:<29}  {:>10}  {:>8}  {:>10}  {:>8}  {:>8}  {:>8}\n",
        "DOMAIN", "FINGERPRINT", "WRITER", "BLOCKS", "OBJECTS", "SIZE", "OLDEST", "NEWEST", "USED"
    );
    let now = u64::from(kvbm::Date::encode(Some(Clock::system().now())));
    let age = |at: u64| match now.saturating_sub(at) {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    };
    for holding in holdings {
        let StoredGroup { domain, fingerprint, writer, blocks, objects, bytes, .. } = holding;
        let ages = [holding.first_written_at, holding.last_written_at, holding.last_used_at].map(age);
        let (size, [oldest, newest, used]) = (ByteSize(*bytes).about(), ages);
        text += &format!(
            "{domain:<32}  {fingerprint:<16}  {writer:<29}  {blocks:>10}  {objects:>8}  {size:>10}  {oldest:>8}  \
             {newest:>8}  {used:>8}\n"
        );
    }
    let sum = |of: fn(&StoredGroup) -> u64| holdings.iter().map(of).sum::<u64>();
    let blocks = count(sum(|holding| holding.blocks), "block");
    let objects = count(sum(|holding| holding.objects), "object");
    text + &format!("{blocks} in {objects}, {}\n", ByteSize(sum(|holding| holding.bytes)).about())
}

/// What `gc` did.
pub(super) fn gc(report: &GcReport, dry_run: bool, grace: Duration) -> String {
    let amount =
        |amount: &ObjectTotals| format!("{}, {}", count(amount.objects, "object"), ByteSize(amount.bytes).about());
    let all = amount(&ObjectTotals { objects: report.objects, bytes: report.bytes });
    let (marked, deleted) = if dry_run { ("would be marked", "would be deleted") } else { ("marked", "deleted") };
    let mut text = format!("found: {all}\n");
    for (why, some) in &report.marked {
        let why = json!(why);
        let (why, grace) = (why.as_str().unwrap_or_default(), HumanDuration(grace));
        text += &format!("{marked} ({why}): {}; a run after {grace} deletes them\n", amount(some));
    }
    if report.already_marked.objects > 0 {
        let waiting = amount(&report.already_marked);
        text += &format!("marked by earlier runs: {waiting}; a run after their grace time deletes them\n");
    }
    let manifests = count(report.deleted_manifests, "manifest");
    text += &format!("{deleted}: {}, and {manifests}\n", amount(&report.deleted));
    if report.unreadable_manifests > 0 {
        let manifests = count(report.unreadable_manifests, "manifest");
        text += &format!("{manifests} cannot be read; the objects listed there are kept\n");
    }
    text
}

/// What `verify` found in a G3 log.
pub(super) fn verified_log(seen: &VerifiedLog) -> String {
    let disk::Verification {
        folder,
        segments,
        bytes,
        unsealed_segments,
        valid_blocks,
        corrupt_blocks,
        corrupt_ranges,
        corrupt_footers,
        unreadable_segments,
        keys: _,
    } = &seen.log;
    let (folder, size, undecryptable) = (folder.display(), ByteSize(*bytes).about(), seen.undecryptable_blocks);
    format!(
        "G3 in {folder}: {} read, {unsealed_segments} of them without a footer, {size}\n\
         {}, {undecryptable} of them without an available key\n\
         {}, {}, {}, {}\n\n",
        count(*segments, "segment"),
        count(*valid_blocks, "valid block"),
        count(*corrupt_blocks, "corrupt block"),
        count(*corrupt_ranges, "corrupt range"),
        count(*corrupt_footers, "corrupt footer"),
        count(*unreadable_segments, "unreadable segment"),
    )
}

/// What `verify` found in a shared store.
pub(super) fn verified(seen: &Verification) -> String {
    let Verification {
        objects,
        valid_blocks,
        undecryptable_blocks,
        corrupt_blocks,
        missing_objects,
        corrupt_manifests,
        unreadable_manifests,
        marked_objects,
    } = seen;
    format!(
        "{} read\n\
         {}, {undecryptable_blocks} of them without an available key\n\
         {}, {}, {}, {}\n\
         {} marked for deletion by a later gc\n",
        count(*objects, "object"),
        count(*valid_blocks, "valid block"),
        count(*corrupt_blocks, "corrupt block"),
        count(*missing_objects, "missing object"),
        count(*corrupt_manifests, "corrupt manifest"),
        count(*unreadable_manifests, "unreadable manifest"),
        count(*marked_objects, "object"),
    )
}
