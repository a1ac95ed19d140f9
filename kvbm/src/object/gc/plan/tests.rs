//! Which objects are marked (expired, old, over capacity) and which are kept (pinned, built upon, in the grace
//! period).

use super::*;
use crate::block::{Fingerprint, SequenceHash};
use crate::object::format::manifest::{BlockEntry, Section};
use crate::object::gc::inventory::AccessRecord;
use crate::tier::Quota;
use proptest::prelude::*;
use std::collections::HashSet;

const HOUR: u64 = 3600;
const NOW: Date = Date::from_unix(1_000 * HOUR);

/// An object of one block, written at an hour, which builds on another object's block.
#[derive(Clone, Debug)]
struct Object {
    hour: u64,
    on: Option<u64>,
    domain: u8,
    pinned: bool,
    expired: bool,
}

const fn at(hour: u64) -> Object {
    Object { hour, on: None, domain: 1, pinned: false, expired: false }
}

fn writer() -> InstanceId {
    InstanceId::from_bytes([7; 16])
}

fn id(number: u64) -> ObjectId {
    ObjectId { writer: writer(), number }
}

fn domain(domain: u8) -> DomainId {
    DomainId::from_bytes([domain; 16])
}

fn hash(number: u64) -> SequenceHash {
    let mut bytes = [1; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

/// An inventory with one manifest per object, and a hundred bytes per object.
fn inventory(objects: &[Object]) -> Inventory {
    let mut inventory = Inventory::default();
    for (number, object) in (0..).zip(objects) {
        let modified = Date::from_unix(object.hour * HOUR);
        let entry = BlockEntry {
            hash: hash(number),
            parent: object.on.map(hash),
            offset: 0,
            length: 0,
            expires: object.expired.then_some(NOW),
            pinned: object.pinned.then(|| NOW.after(Duration::from_secs(1))),
        };
        let fingerprint = Fingerprint::from_bytes([0; 32]);
        let section = Section {
            domain: domain(object.domain),
            fingerprint,
            object: number,
            idle: Duration::ZERO,
            entries: vec![entry],
        };
        let path = Path::from(format!("manifest {number}"));
        inventory.manifests.push(Manifest { path, writer: writer(), number, modified, contents: of([section]) });
        let path = Path::from(format!("object {number}"));
        inventory.objects.insert(id(number), StoredObject { path, bytes: 100, modified });
    }
    inventory
}

fn of(sections: [Section; 1]) -> Contents {
    Contents::Sections(sections.into())
}

fn first(manifest: &Manifest) -> Section {
    manifest.objects().next().unwrap().1.clone()
}

/// A manifest whose sections are unknown.
fn unread(contents: Contents) -> Manifest {
    Manifest { path: Path::from("manifest"), writer: writer(), number: 99, modified: Date::from_unix(HOUR), contents }
}

fn hours(hours: u64) -> Duration {
    Duration::from_secs(hours * HOUR)
}

fn select_marked(inventory: &Inventory, policy: &Policy) -> Vec<(u64, MarkReason)> {
    inventory.plan(policy, NOW).mark.into_iter().map(|(id, why)| (id.number, why)).collect()
}

#[test]
fn expired_and_old_objects_are_marked_but_not_pinned() {
    let old = at(900);
    let objects = [
        at(999),
        Object { expired: true, ..at(999) },
        old.clone(),
        Object { pinned: true, ..old.clone() },
        Object { pinned: true, expired: true, ..old },
    ];
    let policy = Policy { max_age: Some(hours(10)), ..Policy::default() };
    assert_eq!(
        select_marked(&inventory(&objects), &policy),
        [(1, MarkReason::Expired), (2, MarkReason::MaxAge), (4, MarkReason::Expired)]
    );
    assert_eq!(
        select_marked(&inventory(&objects), &Policy::default()),
        [(1, MarkReason::Expired), (4, MarkReason::Expired)]
    );
}

#[test]
fn a_prefix_is_marked_after_what_builds_on_it() {
    // Chain 0 ← 1 ← 2, and 3, which has no successor and is younger than 0.
    let objects = [at(100), Object { on: Some(0), ..at(200) }, Object { on: Some(1), ..at(990) }, at(300)];
    let policy = |capacity| Policy { capacity: Some(capacity), ..Policy::default() };
    assert_eq!(select_marked(&inventory(&objects), &policy(300)), [(3, MarkReason::Capacity)]);
    assert_eq!(
        select_marked(&inventory(&objects), &policy(200)),
        [(2, MarkReason::Capacity), (3, MarkReason::Capacity)]
    );
    let aged = Policy { max_age: Some(hours(500)), ..Policy::default() };
    assert_eq!(select_marked(&inventory(&objects), &aged), [(3, MarkReason::MaxAge)]);
}

#[test]
fn a_read_renews_an_object_and_its_prefix() {
    // Chain 0 ← 1, and 2 and 3, equal except for their age; 1 was read today, by two processes, and 2 two days ago.
    let mut inventory = inventory(&[at(100), Object { on: Some(0), ..at(200) }, at(300), at(400)]);
    let record = |hour: u64, used: &[(u64, u64)]| AccessRecord {
        path: Path::from(format!("note {hour}")),
        reader: InstanceId::from_bytes([hour as u8; 16]),
        modified: Date::from_unix(hour * HOUR),
        used: used.iter().map(|(number, before)| (id(*number), hours(*before))).collect(),
    };
    inventory.access_records =
        vec![record(995, &[(1, 5), (2, 44)]), record(900, &[(1, 0), (9, 0)]), record(200, &[(2, 0)])];
    let aged = |hours_max| Policy { max_age: Some(hours(hours_max)), ..Policy::default() };
    assert_eq!(select_marked(&inventory, &aged(50)), [(3, MarkReason::MaxAge)]);
    assert_eq!(select_marked(&inventory, &aged(49)), [(2, MarkReason::MaxAge), (3, MarkReason::MaxAge)]);
    let policy = |capacity| Policy { capacity: Some(capacity), ..Policy::default() };
    assert_eq!(select_marked(&inventory, &policy(300)), [(3, MarkReason::Capacity)]);
    assert_eq!(inventory.groups()[0].last_used_at, 990 * HOUR);
    // The access record of a process that ended long ago is deleted.
    assert_eq!(inventory.plan(&Policy::default(), NOW).access_records, [Path::from("note 200")]);
    inventory.access_records.pop();
    assert_eq!(select_marked(&inventory, &policy(200)), [(2, MarkReason::Capacity), (3, MarkReason::Capacity)]);
    assert_eq!(inventory.plan(&aged(900), NOW).access_records, [] as [Path; 0]);
}

/// Objects of several blocks, each with the hour in which it was written and its expiry hour.
fn copies(objects: &[(u64, &[u64], Option<u64>)]) -> Inventory {
    let mut inventory = inventory(&objects.iter().map(|(hour, ..)| at(*hour)).collect::<Vec<_>>());
    for (manifest, (_, blocks, until)) in inventory.manifests.iter_mut().zip(objects) {
        let mut section = first(manifest);
        let expires = until.map(|hour| Date::from_unix(hour * HOUR));
        section.entries = blocks.iter().map(|n| BlockEntry { hash: hash(*n), expires, ..section.entries[0] }).collect();
        manifest.contents = of([section]);
    }
    inventory.objects.values_mut().for_each(|stored| stored.bytes = 1_000);
    inventory
}

#[test]
fn duplicates_are_marked_once_the_copy_is_known() {
    let copied = |objects: &[_]| select_marked(&copies(objects), &Policy::default());
    let small: [(u64, &[u64], _); 3] = [(10, &[1, 2], None), (11, &[3], None), (12, &[4, 5], None)];
    let one = |new| [&small[..], &[new]].concat();
    let small_marked = [(0, MarkReason::Duplicate), (1, MarkReason::Duplicate)];
    assert_eq!(copied(&one((13, &[1, 2, 3, 4], None))), small_marked, "5 has no copy");
    assert_eq!(copied(&one((1_000, &[1, 2, 3, 4], None))), [], "it was written a moment ago");
    let itself = [(3, MarkReason::Duplicate)];
    assert_eq!(copied(&one((13, &[1, 2, 3, 4], Some(2_000)))), itself, "its blocks expire earlier");
    assert_eq!(copied(&one((9, &[1, 2, 3, 4], None))), itself, "the newest copy is kept");
    assert_eq!(copied(&one((9, &[1, 2, 3, 6], None))), [], "6 is only in 3");
    let mut cut = copies(&one((13, &[1, 2, 3, 4], None)));
    cut.objects.get_mut(&id(3)).unwrap().bytes = 1;
    assert_eq!(select_marked(&cut, &Policy::default()), []);
}

#[test]
fn new_and_pinned_duplicates_displace_no_others() {
    // The blocks of 0 and 1 are also in 2, which was written just now or a while ago; 3 is the oldest object.
    let objects = |new: u64| copies(&[(10, &[1], None), (11, &[2], None), (new, &[1, 2], None), (9, &[3], None)]);
    let policy = Policy { capacity: Some(2_000), ..Policy::default() };
    assert_eq!(select_marked(&objects(1_000), &policy), [], "two of the four will be duplicates");
    let pin = |inventory: &mut Inventory, objects: &[(usize, u64)]| {
        for &(object, seconds) in objects {
            let mut section = first(&inventory.manifests[object]);
            let until = NOW.after(Duration::from_secs(seconds));
            section.entries.iter_mut().for_each(|entry| entry.pinned = Some(until));
            inventory.manifests[object].contents = of([section]);
        }
    };
    let mut pinned = objects(900);
    pin(&mut pinned, &[(0, 500), (1, 500), (2, 500)]);
    assert_eq!(select_marked(&pinned, &policy), [(0, MarkReason::Duplicate), (1, MarkReason::Duplicate)]);
    let mut longer = objects(900);
    pin(&mut longer, &[(0, 600), (2, 500)]);
    assert!(!select_marked(&longer, &policy).iter().any(|(object, _)| *object == 0), "its pin lasts longer");
}

#[test]
fn a_domain_above_its_maximum_displaces_no_other() {
    let objects = [at(1), at(2), Object { domain: 2, ..at(3) }, Object { domain: 2, ..at(4) }];
    let most = Quota { guaranteed: 0, maximum: Some(150) };
    let policy = Policy { quotas: [(domain(2), most)].into(), ..Policy::default() };
    assert_eq!(select_marked(&inventory(&objects), &policy), [(2, MarkReason::Capacity)]);
}

#[test]
fn guaranteed_bytes_of_a_domain_are_kept() {
    // The oldest objects are of domain 2; objects of domain 1 were written later.
    let of_domain_2 = (1..=4).map(|hour| Object { domain: 2, ..at(hour) });
    let objects: Vec<_> = of_domain_2.chain((10..40).map(at)).collect();
    let guarantee = |guaranteed| Policy {
        capacity: Some(1_000),
        quotas: [(domain(2), Quota { guaranteed, maximum: None })].into(),
        ..Policy::default()
    };
    let left_of_domain_2 = |policy: &Policy| {
        let marked = select_marked(&inventory(&objects), policy);
        assert_eq!(objects.len() - marked.len(), 10, "the capacity holds");
        (0..4).filter(|id| !marked.iter().any(|(other, _)| other == id)).collect::<Vec<u64>>()
    };
    assert_eq!(left_of_domain_2(&guarantee(0)), [0; 0]);
    assert_eq!(left_of_domain_2(&guarantee(250)), [1, 2, 3], "whole objects, the oldest first");
    assert_eq!(left_of_domain_2(&guarantee(10_000)), [0, 1, 2, 3]);
    let both = Policy {
        quotas: [1, 2].map(|of| (domain(of), Quota { guaranteed: 900, maximum: None })).into(),
        ..guarantee(0)
    };
    assert_eq!(left_of_domain_2(&both).len(), 1, "the guarantees exceed the capacity: the oldest is marked");
}

#[test]
fn deletion_waits_for_the_grace_period() {
    let mut inventory = inventory(&[at(10), at(20)]);
    let list = |minutes: u64| TombstoneList {
        path: Path::from("removal"),
        modified: Date::from_unix(1_000 * HOUR - minutes * 60),
        objects: [id(0)].into(),
    };
    inventory.tombstone_lists.push(list(9));
    let waiting = Plan { next_deletion: Some(Duration::from_mins(1)), ..Plan::default() };
    assert_eq!(inventory.plan(&Policy::default(), NOW), waiting, "in grace, and marked once");
    inventory.tombstone_lists.push(list(10));
    let plan = inventory.plan(&Policy::default(), NOW);
    assert_eq!((plan.objects, plan.manifests.len(), plan.tombstone_lists.len()), (vec![id(0)], 1, 1));
    // An object that no manifest lists stays in the tombstone list until it is deleted.
    inventory.manifests.remove(0);
    assert_eq!(inventory.plan(&Policy::default(), NOW).objects, [id(0)]);
    inventory.objects.remove(&id(0));
    inventory.tombstone_lists.remove(0);
    let plan = inventory.plan(&Policy::default(), NOW);
    assert_eq!((plan.objects.len(), plan.tombstone_lists.len()), (0, 1));
}

#[test]
fn unlisted_objects_are_deleted_after_an_hour() {
    let mut inventory = inventory(&[at(999), at(1_000)]);
    inventory.manifests.clear();
    assert_eq!(inventory.plan(&Policy::default(), NOW).objects, [id(0)], "the other one's manifest may be under way");
    inventory.manifests.push(unread(Contents::Invalid));
    assert_eq!(inventory.plan(&Policy::default(), NOW), Plan::default());
    let aged = Policy { max_age: Some(hours(1)), ..Policy::default() };
    let plan = inventory.plan(&aged, NOW);
    assert_eq!((plan.objects, plan.manifests.len()), (vec![id(0)], 1));
}

#[test]
fn own_objects_unread_by_others_skip_the_grace() {
    let mut inventory = inventory(&[at(1), at(2), at(3)]);
    let marked_at = NOW.before(OWN_GRACE);
    let objects = [id(0), id(1)].into();
    inventory.tombstone_lists.push(TombstoneList { path: Path::from("removal"), modified: marked_at, objects });
    let record = |reader, number| AccessRecord {
        path: Path::from("note"),
        reader,
        modified: NOW,
        used: [(id(number), Duration::ZERO)].into(),
    };
    inventory.access_records = vec![record(InstanceId::from_bytes([8; 16]), 1), record(writer(), 0)];
    assert_eq!(inventory.plan(&Policy::default(), NOW).objects, [], "another process collects");
    inventory.own = Some(writer());
    let plan = inventory.plan(&Policy::default(), NOW);
    assert_eq!(plan.objects, [id(0)]);
    assert_eq!(plan.next_deletion, Policy::default().grace.checked_sub(OWN_GRACE));
    inventory.own = Some(InstanceId::from_bytes([8; 16]));
    assert_eq!(inventory.plan(&Policy::default(), NOW).objects, []);
}

#[test]
fn headroom_does_not_take_guaranteed_bytes() {
    let objects = [at(1), at(2), at(3), at(4)];
    let quota = Quota { guaranteed: 400, maximum: None };
    let with = |headroom, guarantee: bool| Policy {
        capacity: Some(400),
        headroom,
        quotas: if guarantee { [(domain(1), quota)].into() } else { BTreeMap::new() },
        ..Policy::default()
    };
    assert_eq!(select_marked(&inventory(&objects), &with(0, false)), []);
    assert_eq!(
        select_marked(&inventory(&objects), &with(150, false)),
        [(0, MarkReason::Capacity), (1, MarkReason::Capacity)]
    );
    assert_eq!(select_marked(&inventory(&objects), &with(150, true)), []);
}

#[test]
fn objects_of_an_unreadable_manifest_are_kept() {
    let mut inventory = inventory(&[at(1), at(2)]);
    inventory.manifests[0].contents = Contents::Unreadable;
    let aged = Policy { max_age: Some(hours(1)), ..Policy::default() };
    assert_eq!(select_marked(&inventory, &aged), [(1, MarkReason::MaxAge)], "the other manifest is readable");
    inventory.manifests.pop();
    assert_eq!(inventory.plan(&aged, NOW), Plan::default());
    // An object of that writer whose number is unknown is kept too; one of another writer is not.
    let other = ObjectId { writer: InstanceId::from_bytes([8; 16]), number: 7 };
    let modified = Date::from_unix(HOUR);
    inventory.objects.insert(other, StoredObject { path: Path::from("object 7"), bytes: 100, modified });
    assert_eq!(inventory.plan(&aged, NOW).objects, [other]);
}

#[test]
fn the_last_manifest_of_a_writer_is_kept_with_others() {
    let of = |numbers: &[u64]| numbers.iter().map(|n| Path::from(format!("manifest {n}"))).collect::<Vec<_>>();
    let mut inventory = inventory(&[at(1), at(2), at(3), at(4)]);
    inventory.objects.retain(|id, _| id.number == 1);
    assert_eq!(inventory.plan(&Policy::default(), NOW).manifests, of(&[0, 2]));
    // Manifests of another writer do not keep it.
    inventory.manifests[1].writer = InstanceId::from_bytes([8; 16]);
    inventory.objects = inventory
        .objects
        .into_values()
        .map(|it| (ObjectId { writer: inventory.manifests[1].writer, number: 1 }, it))
        .collect();
    assert_eq!(inventory.plan(&Policy::default(), NOW).manifests, of(&[0, 2, 3]));
    inventory.objects.clear();
    assert_eq!(inventory.plan(&Policy::default(), NOW).manifests, of(&[0, 1, 2, 3]), "no object is left");
}

fn objects() -> impl Strategy<Value = Vec<Object>> {
    let object = (900u64..1_000, any::<Option<u8>>(), 1u8..4, prop::bool::weighted(0.2), prop::bool::weighted(0.2));
    let object = object.prop_map(|(hour, on, domain, pinned, expired)| Object {
        hour,
        on: on.map(u64::from),
        domain,
        pinned,
        expired,
    });
    prop::collection::vec(object, 0..40).prop_map(|mut objects| {
        // A block builds on an earlier one.
        for (number, object) in objects.iter_mut().enumerate() {
            object.on = object.on.filter(|_| number > 0).map(|on| on % number as u64);
        }
        objects
    })
}

/// Objects with the hour in which each was written, its blocks, and their expiry hour.
fn copied_objects() -> impl Strategy<Value = Vec<(u64, Vec<u64>, Option<u64>)>> {
    let blocks = prop::collection::vec(0u64..12, 1..6);
    prop::collection::vec((900u64..1_000, blocks, prop::option::of(1_001u64..1_004)), 1..12)
}

proptest! {
    #[test]
    fn each_block_keeps_its_best_copy(
        objects in copied_objects()
    ) {
        let objects: Vec<_> = objects.iter().map(|(hour, blocks, until)| (*hour, &blocks[..], *until)).collect();
        let marked = select_marked(&copies(&objects), &Policy::default());
        let marked: HashSet<u64> = marked.into_iter().map(|(id, _)| id).collect();
        let mut longest = std::collections::BTreeMap::new();
        for (number, (_, blocks, until)) in (0..).zip(&objects) {
            for block in *blocks {
                let until = until.unwrap_or(u64::MAX);
                let (all, left) = longest.entry(*block).or_insert((0, 0));
                *all = until.max(*all);
                *left = if marked.contains(&number) { *left } else { until.max(*left) };
            }
        }
        prop_assert!(longest.values().all(|(all, left)| all == left), "{longest:?} without {marked:?}");
        // And no object is left whose blocks all have better copies.
        let mut left = copies(&objects);
        left.manifests.retain(|manifest| !marked.contains(&first(manifest).object));
        prop_assert_eq!(select_marked(&left, &Policy::default()), vec![]);
    }

    #[test]
    fn capacities_hold_except_for_pins_and_nothing_is_wasted(
        objects in objects(), capacity in 0u64..5_000, own in 0u64..2_000, guarantee in 0u64..2_000
    ) {
        let inventory = inventory(&objects);
        let quota = |guaranteed, maximum| Quota { guaranteed, maximum };
        let quotas = [(domain(1), quota(0, Some(own))), (domain(2), quota(guarantee, None))].into();
        let policy = Policy { capacity: Some(capacity), quotas, ..Policy::default() };
        let plan = inventory.plan(&policy, NOW);
        prop_assert_eq!(&plan, &inventory.plan(&policy, NOW));
        prop_assert_eq!((plan.objects.len(), plan.manifests.len()), (0, 0), "nothing is deleted without its grace");
        let marked: HashSet<u64> = plan.mark.iter().map(|(id, _)| id.number).collect();
        let left = |of: &dyn Fn(&Object) -> bool| {
            (0..).zip(&objects).filter(|(number, object)| !marked.contains(number) && of(object)).count() as u64 * 100
        };
        let pinned = |object: &Object| object.pinned && !object.expired;
        prop_assert!(left(&|_| true) <= capacity.max(left(&pinned)));
        let own_pinned = left(&|object| pinned(object) && object.domain == 1);
        prop_assert!(left(&|object| object.domain == 1) <= own.max(own_pinned));
        // Guaranteed bytes, in whole objects, are only taken for pinned objects of others, or if the capacity is
        // smaller.
        let of_domain_2 = |object: &Object| object.domain == 2 && !object.expired;
        let had = objects.iter().filter(|object| of_domain_2(object)).count() as u64 * 100;
        let others_pinned = left(&|object| pinned(object) && object.domain != 2);
        if guarantee.next_multiple_of(100) + others_pinned <= capacity {
            prop_assert!(left(&of_domain_2) >= had.min(guarantee));
        }
        for (id, why) in &plan.mark {
            let object = &objects[id.number as usize];
            prop_assert_eq!(object.expired, *why == MarkReason::Expired);
            prop_assert!(object.expired || !object.pinned);
        }
        // The last object was necessary: without it, one of the capacities would be exceeded.
        let spared = plan.mark.iter().filter(|(_, why)| *why == MarkReason::Capacity).any(|(id, _)| {
            let own_fits = objects[id.number as usize].domain != 1 || left(&|object| object.domain == 1) + 100 <= own;
            left(&|_| true) + 100 <= capacity && own_fits
        });
        prop_assert!(!spared);
    }
}
