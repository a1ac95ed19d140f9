//! The inventory of a store at one time: its objects, manifests, tombstone lists and access logs.

use crate::block::{Date, DomainId, Fingerprint, SequenceHash};
use crate::object::format::layout::{InstanceId, ObjectId};
use crate::object::format::manifest::{BlockEntry, Section};
use object_store::path::Path;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Everything in a store.
#[derive(Debug, Default)]
pub struct Inventory {
    pub(in crate::object) manifests: Vec<Manifest>,
    pub(in crate::object) objects: BTreeMap<ObjectId, StoredObject>,
    pub(in crate::object) tombstone_lists: Vec<TombstoneList>,
    pub(in crate::object) access_records: Vec<AccessRecord>,
    /// The collecting process, if it writes to the store too.
    pub(in crate::object) own: Option<InstanceId>,
}

#[derive(Debug)]
pub(in crate::object) struct Manifest {
    pub(in crate::object) path: Path,
    pub(in crate::object) writer: InstanceId,
    /// Number among the manifests of its writer.
    pub(in crate::object) number: u64,
    pub(in crate::object) modified: Date,
    pub(in crate::object) contents: Contents,
}

/// The contents of a manifest.
#[derive(Clone, Debug)]
pub(in crate::object) enum Contents {
    Sections(Arc<[Section]>),
    /// The manifest is corrupt, or of another version.
    Invalid,
    /// The manifest cannot be read although the store serves reads, so its objects are unknown.
    Unreadable,
}

/// The access log of one process.
#[derive(Debug)]
pub(in crate::object) struct AccessRecord {
    pub(in crate::object) path: Path,
    pub(in crate::object) reader: InstanceId,
    pub(in crate::object) modified: Date,
    /// The objects that it read, and how long before `modified`.
    pub(in crate::object) used: Arc<[(ObjectId, Duration)]>,
}

#[derive(Debug)]
pub(in crate::object) struct StoredObject {
    pub(in crate::object) path: Path,
    pub(in crate::object) bytes: u64,
    pub(in crate::object) modified: Date,
}

#[derive(Debug)]
pub(in crate::object) struct TombstoneList {
    pub(in crate::object) path: Path,
    pub(in crate::object) modified: Date,
    pub(in crate::object) objects: Arc<[ObjectId]>,
}

/// An object whose blocks can be loaded.
#[derive(Clone, Copy)]
pub(in crate::object) struct LiveObject<'a> {
    pub(in crate::object) id: ObjectId,
    pub(in crate::object) section: &'a Section,
    pub(in crate::object) stored: &'a StoredObject,
    /// When it was last written or, as far as reads are logged, read.
    pub(in crate::object) used: Date,
}

/// Blocks of one cache domain, one engine fingerprint and one writer that the store can serve.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct StoredGroup {
    /// Id of the cache domain.
    pub domain: String,
    /// Fingerprint of the engine.
    pub fingerprint: String,
    /// Id of the process that wrote them.
    pub writer: String,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of objects that contain them.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// When the first of them was written, in seconds since 1970.
    pub first_written_at: u64,
    /// When the last of them was written, in seconds since 1970.
    pub last_written_at: u64,
    /// When one of them was last written or read, in seconds since 1970, as far as reads are logged.
    pub last_used_at: u64,
}

impl Inventory {
    /// Objects that exist, that a manifest lists, and that are not marked.
    pub(in crate::object) fn live(&self) -> impl Iterator<Item = LiveObject<'_>> {
        let marked = self.marked();
        self.listed().filter(move |live| !marked.contains(&live.id))
    }

    /// Objects that a manifest lists and that do not exist, although they were not marked.
    pub(in crate::object) fn missing(&self) -> impl Iterator<Item = ObjectId> {
        let marked = self.marked();
        let listed = self.manifests.iter().flat_map(Manifest::objects).map(|(id, _)| id);
        listed.filter(move |id| !self.objects.contains_key(id) && !marked.contains(id))
    }

    /// Objects in a tombstone list.
    pub(in crate::object) fn marked(&self) -> BTreeSet<ObjectId> {
        self.tombstone_lists.iter().flat_map(|list| list.objects.iter().copied()).collect()
    }

    /// Number of manifests that cannot be read although the store serves reads.
    pub(in crate::object) fn unreadable_manifests(&self) -> u64 {
        self.count_manifests(|contents| matches!(contents, Contents::Unreadable))
    }

    pub(in crate::object) fn count_manifests(&self, matches: impl Fn(&Contents) -> bool) -> u64 {
        self.manifests.iter().filter(|manifest| matches(&manifest.contents)).count() as u64
    }

    /// Objects that exist and that a manifest lists, including marked ones.
    pub(in crate::object) fn listed(&self) -> impl Iterator<Item = LiveObject<'_>> {
        let mut last_reads: BTreeMap<ObjectId, Date> = BTreeMap::new();
        for record in &self.access_records {
            for &(id, idle) in record.used.iter() {
                let date = record.modified.before(idle);
                let last = last_reads.entry(id).or_insert(date);
                *last = date.max(*last);
            }
        }
        let sections = self.manifests.iter().flat_map(Manifest::objects);
        sections.filter_map(move |(id, section)| {
            let stored = self.objects.get(&id)?;
            // A rewrite by compaction is not a use.
            let written = stored.modified.before(section.idle);
            let used = last_reads.get(&id).map_or(written, |read| written.max(*read));
            Some(LiveObject { id, section, stored, used })
        })
    }

    /// The live objects, by domain, fingerprint and writer.
    pub fn groups(&self) -> Vec<StoredGroup> {
        let mut groups: BTreeMap<(DomainId, Fingerprint, InstanceId), StoredGroup> = BTreeMap::new();
        for LiveObject { id, section, stored, used } in self.live() {
            let [at, used] = [stored.modified, used].map(|date| u64::from(Date::encode(Some(date))));
            let group = groups.entry((section.domain, section.fingerprint, id.writer)).or_insert_with(|| StoredGroup {
                domain: section.domain.to_string(),
                fingerprint: section.fingerprint.to_string(),
                writer: id.writer.to_string(),
                blocks: 0,
                objects: 0,
                bytes: 0,
                first_written_at: at,
                last_written_at: at,
                last_used_at: used,
            });
            group.blocks += section.entries.len() as u64;
            group.objects += 1;
            group.bytes += stored.bytes;
            group.first_written_at = group.first_written_at.min(at);
            group.last_written_at = group.last_written_at.max(at);
            group.last_used_at = group.last_used_at.max(used);
        }
        groups.into_values().collect()
    }

    /// Hashes of the blocks in live objects that are not expired at `now`; a block with copies appears once per copy.
    pub fn hashes(&self, now: Date) -> impl Iterator<Item = SequenceHash> {
        let entries = self.live().flat_map(|live| &live.section.entries);
        entries.filter(move |entry| !entry.retention().is_expired(now)).map(|entry| entry.hash)
    }

    /// Bytes of all objects, including marked ones.
    pub fn bytes(&self) -> u64 {
        self.objects.values().map(|stored| stored.bytes).sum()
    }
}

impl Manifest {
    /// The objects that the manifest lists.
    pub(in crate::object) fn objects(&self) -> impl Iterator<Item = (ObjectId, &Section)> {
        let sections = match &self.contents {
            Contents::Sections(sections) => &sections[..],
            Contents::Invalid | Contents::Unreadable => &[],
        };
        sections.iter().map(|section| (ObjectId { writer: self.writer, number: section.object }, section))
    }
}

pub(in crate::object) fn is_pinned(entry: &BlockEntry, now: Date) -> bool {
    !entry.retention().is_expired(now) && entry.pinned.is_some_and(|pinned| pinned > now)
}
