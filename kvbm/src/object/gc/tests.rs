//! Who goes: expired, old, over budget; who stays: pinned, built upon, in grace. Then the same on stores, with readers.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

const HOUR: u64 = 3600;
const NOW: Date = Date::from_unix(1_000 * HOUR);

/// An object of one block: written at an hour, building on another object's block.
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

fn writer() -> Writer {
    Writer::from_bytes([7; 16])
}

fn id(number: u64) -> ObjectId {
    ObjectId { writer: writer(), number }
}

fn domain(domain: u8) -> DomainId {
    DomainId::from_bytes([domain; 16])
}

fn name(number: u64) -> SequenceHash {
    let mut bytes = [1; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

/// Each object in a manifest of its own, a hundred bytes each.
fn survey(objects: &[Object]) -> Survey {
    let mut survey = Survey::default();
    for (number, object) in (0..).zip(objects) {
        let modified = Date::from_unix(object.hour * HOUR);
        let entry = Entry {
            name: name(number),
            parent: object.on.map(name),
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
        survey.manifests.push(Manifest { path, writer: writer(), number, modified, contents: of([section]) });
        let path = Path::from(format!("object {number}"));
        survey.objects.insert(id(number), Stored { path, bytes: 100, modified });
    }
    survey
}

fn of(sections: [Section; 1]) -> Contents {
    Contents::Sections(sections.into())
}

fn first(manifest: &Manifest) -> Section {
    manifest.named().next().unwrap().1.clone()
}

/// A manifest of which no section is known.
fn unread(contents: Contents) -> Manifest {
    Manifest { path: Path::from("manifest"), writer: writer(), number: 99, modified: Date::from_unix(HOUR), contents }
}

fn hours(hours: u64) -> Duration {
    Duration::from_secs(hours * HOUR)
}

fn condemned(survey: &Survey, policy: &Policy) -> Vec<(u64, Why)> {
    survey.plan(policy, NOW).condemn.into_iter().map(|(id, why)| (id.number, why)).collect()
}

#[test]
fn expired_goes_at_once_old_by_age_and_pinned_stays() {
    let old = at(900);
    let objects = [
        at(999),
        Object { expired: true, ..at(999) },
        old.clone(),
        Object { pinned: true, ..old.clone() },
        Object { pinned: true, expired: true, ..old },
    ];
    let policy = Policy { age_max: Some(hours(10)), ..Policy::default() };
    assert_eq!(condemned(&survey(&objects), &policy), [(1, Why::Expired), (2, Why::Age), (4, Why::Expired)]);
    assert_eq!(condemned(&survey(&objects), &Policy::default()), [(1, Why::Expired), (4, Why::Expired)]);
}

#[test]
fn a_prefix_is_as_young_as_what_builds_on_it_and_goes_after_it() {
    // 0 ← 1 ← 2, and 3 that nobody builds on and that is younger than the head.
    let objects = [at(100), Object { on: Some(0), ..at(200) }, Object { on: Some(1), ..at(990) }, at(300)];
    let policy = |budget| Policy { budget: Some(budget), ..Policy::default() };
    assert_eq!(condemned(&survey(&objects), &policy(300)), [(3, Why::Budget)]);
    assert_eq!(condemned(&survey(&objects), &policy(200)), [(2, Why::Budget), (3, Why::Budget)]);
    let aged = Policy { age_max: Some(hours(500)), ..Policy::default() };
    assert_eq!(condemned(&survey(&objects), &aged), [(3, Why::Age)]);
}

#[test]
fn what_was_read_lately_is_young_and_so_is_what_it_builds_on() {
    // 0 ← 1, and 2 and 3, all alike but for their age; 1 was read today, by two processes, and 2 two days ago.
    let mut survey = survey(&[at(100), Object { on: Some(0), ..at(200) }, at(300), at(400)]);
    let note = |hour: u64, used: &[(u64, u64)]| Note {
        path: Path::from(format!("note {hour}")),
        reader: Writer::from_bytes([hour as u8; 16]),
        modified: Date::from_unix(hour * HOUR),
        used: used.iter().map(|(number, before)| (id(*number), hours(*before))).collect(),
    };
    survey.notes = vec![note(995, &[(1, 5), (2, 44)]), note(900, &[(1, 0), (9, 0)]), note(200, &[(2, 0)])];
    let aged = |hours_max| Policy { age_max: Some(hours(hours_max)), ..Policy::default() };
    assert_eq!(condemned(&survey, &aged(50)), [(3, Why::Age)]);
    assert_eq!(condemned(&survey, &aged(49)), [(2, Why::Age), (3, Why::Age)]);
    let policy = |budget| Policy { budget: Some(budget), ..Policy::default() };
    assert_eq!(condemned(&survey, &policy(300)), [(3, Why::Budget)]);
    assert_eq!(survey.holdings()[0].last_used_at, 990 * HOUR);
    // The note of a process that ended long ago goes, and with it what it said.
    assert_eq!(survey.plan(&Policy::default(), NOW).notes, [Path::from("note 200")]);
    survey.notes.pop();
    assert_eq!(condemned(&survey, &policy(200)), [(2, Why::Budget), (3, Why::Budget)]);
    assert_eq!(survey.plan(&aged(900), NOW).notes, [] as [Path; 0]);
}

/// Objects of several blocks, each with when it was written and until when its blocks are kept.
fn copies(objects: &[(u64, &[u64], Option<u64>)]) -> Survey {
    let mut survey = survey(&objects.iter().map(|(hour, ..)| at(*hour)).collect::<Vec<_>>());
    for (manifest, (_, blocks, until)) in survey.manifests.iter_mut().zip(objects) {
        let mut section = first(manifest);
        let expires = until.map(|hour| Date::from_unix(hour * HOUR));
        section.entries = blocks.iter().map(|n| Entry { name: name(*n), expires, ..section.entries[0] }).collect();
        manifest.contents = of([section]);
    }
    survey.objects.values_mut().for_each(|stored| stored.bytes = 1_000);
    survey
}

#[test]
fn what_lies_elsewhere_too_goes_once_everybody_knows() {
    let copied = |objects: &[_]| condemned(&copies(objects), &Policy::default());
    let small: [(u64, &[u64], _); 3] = [(10, &[1, 2], None), (11, &[3], None), (12, &[4, 5], None)];
    let one = |new| [&small[..], &[new]].concat();
    let gone = [(0, Why::Copied), (1, Why::Copied)];
    assert_eq!(copied(&one((13, &[1, 2, 3, 4], None))), gone, "5 lies nowhere else");
    assert_eq!(copied(&one((1_000, &[1, 2, 3, 4], None))), [], "it was written a moment ago");
    let itself = [(3, Why::Copied)];
    assert_eq!(copied(&one((13, &[1, 2, 3, 4], Some(2_000)))), itself, "it is not kept for so long");
    assert_eq!(copied(&one((9, &[1, 2, 3, 4], None))), itself, "of copies the later one stays");
    assert_eq!(copied(&one((9, &[1, 2, 3, 6], None))), [], "in part");
    let mut cut = copies(&one((13, &[1, 2, 3, 4], None)));
    cut.objects.get_mut(&id(3)).unwrap().bytes = 1;
    assert_eq!(condemned(&cut, &Policy::default()), []);
}

#[test]
fn a_copy_that_is_new_or_pinned_takes_no_room_from_others() {
    // 0 and 1 lie in 2, too, which was written just now or a while ago; 3 is the oldest of all.
    let objects = |new: u64| copies(&[(10, &[1], None), (11, &[2], None), (new, &[1, 2], None), (9, &[3], None)]);
    let policy = Policy { budget: Some(2_000), ..Policy::default() };
    assert_eq!(condemned(&objects(1_000), &policy), [], "two of the four are about to go");
    let pin = |survey: &mut Survey, objects: &[(usize, u64)]| {
        for &(object, seconds) in objects {
            let mut section = first(&survey.manifests[object]);
            let until = NOW.after(Duration::from_secs(seconds));
            section.entries.iter_mut().for_each(|entry| entry.pinned = Some(until));
            survey.manifests[object].contents = of([section]);
        }
    };
    let mut pinned = objects(900);
    pin(&mut pinned, &[(0, 500), (1, 500), (2, 500)]);
    assert_eq!(condemned(&pinned, &policy), [(0, Why::Copied), (1, Why::Copied)]);
    let mut longer = objects(900);
    pin(&mut longer, &[(0, 600), (2, 500)]);
    assert!(!condemned(&longer, &policy).iter().any(|(object, _)| *object == 0), "it would go before its time");
}

#[test]
fn one_domain_over_its_own_budget_costs_no_other_domain_anything() {
    let objects = [at(1), at(2), Object { domain: 2, ..at(3) }, Object { domain: 2, ..at(4) }];
    let most = Quota { guaranteed: 0, maximum: Some(150) };
    let policy = Policy { shares: [(domain(2), most)].into(), ..Policy::default() };
    assert_eq!(condemned(&survey(&objects), &policy), [(2, Why::Budget)]);
}

#[test]
fn a_flood_takes_nothing_of_what_another_domain_was_promised() {
    // The oldest are of domain 2; a flood of domain 1 came later.
    let theirs = (1..=4).map(|hour| Object { domain: 2, ..at(hour) });
    let objects: Vec<_> = theirs.chain((10..40).map(at)).collect();
    let promised = |guaranteed| Policy {
        budget: Some(1_000),
        shares: [(domain(2), Quota { guaranteed, maximum: None })].into(),
        ..Policy::default()
    };
    let left_of_theirs = |policy: &Policy| {
        let condemned = condemned(&survey(&objects), policy);
        assert_eq!(objects.len() - condemned.len(), 10, "the budget holds");
        (0..4).filter(|id| !condemned.iter().any(|(gone, _)| gone == id)).collect::<Vec<u64>>()
    };
    assert_eq!(left_of_theirs(&promised(0)), [0; 0]);
    assert_eq!(left_of_theirs(&promised(250)), [1, 2, 3], "whole objects, the oldest first");
    assert_eq!(left_of_theirs(&promised(10_000)), [0, 1, 2, 3]);
    let both = Policy {
        shares: [1, 2].map(|of| (domain(of), Quota { guaranteed: 900, maximum: None })).into(),
        ..promised(0)
    };
    assert_eq!(left_of_theirs(&both).len(), 1, "more was promised than there is: the oldest goes");
}

#[test]
fn nothing_is_deleted_before_its_grace_and_the_word_of_it_goes_last() {
    let mut survey = survey(&[at(10), at(20)]);
    let removal = |minutes: u64| Removal {
        path: Path::from("removal"),
        modified: Date::from_unix(1_000 * HOUR - minutes * 60),
        objects: [id(0)].into(),
    };
    survey.removals.push(removal(9));
    let waiting = Plan { next: Some(Duration::from_mins(1)), ..Plan::default() };
    assert_eq!(survey.plan(&Policy::default(), NOW), waiting, "in grace, and condemned once");
    survey.removals.push(removal(10));
    let plan = survey.plan(&Policy::default(), NOW);
    assert_eq!((plan.objects, plan.manifests.len(), plan.removals.len()), (vec![id(0)], 1, 1));
    // What no manifest names any more is still spoken for, until it is gone.
    survey.manifests.remove(0);
    assert_eq!(survey.plan(&Policy::default(), NOW).objects, [id(0)]);
    survey.objects.remove(&id(0));
    survey.removals.remove(0);
    let plan = survey.plan(&Policy::default(), NOW);
    assert_eq!((plan.objects.len(), plan.removals.len()), (0, 1));
}

#[test]
fn what_no_manifest_names_goes_after_an_hour_unless_another_version_may_name_it() {
    let mut survey = survey(&[at(999), at(1_000)]);
    survey.manifests.clear();
    assert_eq!(survey.plan(&Policy::default(), NOW).objects, [id(0)], "the other one's manifest may be under way");
    survey.manifests.push(unread(Contents::Foreign));
    assert_eq!(survey.plan(&Policy::default(), NOW), Plan::default());
    let aged = Policy { age_max: Some(hours(1)), ..Policy::default() };
    let plan = survey.plan(&aged, NOW);
    assert_eq!((plan.objects, plan.manifests.len()), (vec![id(0)], 1));
}

#[test]
fn own_objects_that_no_other_process_used_skip_the_grace() {
    let mut survey = survey(&[at(1), at(2), at(3)]);
    let said = NOW.before(NOTICE);
    let objects = [id(0), id(1)].into();
    survey.removals.push(Removal { path: Path::from("removal"), modified: said, objects });
    let note = |reader, number| Note {
        path: Path::from("note"),
        reader,
        modified: NOW,
        used: [(id(number), Duration::ZERO)].into(),
    };
    survey.notes = vec![note(Writer::from_bytes([8; 16]), 1), note(writer(), 0)];
    assert_eq!(survey.plan(&Policy::default(), NOW).objects, [], "another process collects");
    survey.own = Some(writer());
    let plan = survey.plan(&Policy::default(), NOW);
    assert_eq!(plan.objects, [id(0)]);
    assert_eq!(plan.next, Policy::default().grace.checked_sub(NOTICE));
    survey.own = Some(Writer::from_bytes([8; 16]));
    assert_eq!(survey.plan(&Policy::default(), NOW).objects, []);
}

#[test]
fn headroom_is_freed_but_not_at_the_cost_of_what_is_promised() {
    let objects = [at(1), at(2), at(3), at(4)];
    let quota = Quota { guaranteed: 400, maximum: None };
    let with = |headroom, promised| Policy {
        budget: Some(400),
        headroom,
        shares: if promised { [(domain(1), quota)].into() } else { BTreeMap::new() },
        ..Policy::default()
    };
    assert_eq!(condemned(&survey(&objects), &with(0, false)), []);
    assert_eq!(condemned(&survey(&objects), &with(150, false)), [(0, Why::Budget), (1, Why::Budget)]);
    assert_eq!(condemned(&survey(&objects), &with(150, true)), []);
}

#[test]
fn what_an_unreadable_manifest_may_name_stays_at_any_age() {
    let mut survey = survey(&[at(1), at(2)]);
    survey.manifests[0].contents = Contents::Unreadable;
    let aged = Policy { age_max: Some(hours(1)), ..Policy::default() };
    assert_eq!(condemned(&survey, &aged), [(1, Why::Age)], "the other manifest is as good as before");
    survey.manifests.pop();
    assert_eq!(survey.plan(&aged, NOW), Plan::default());
    // One whose object is unknown to it stays too; that of another writer does not.
    let other = ObjectId { writer: Writer::from_bytes([8; 16]), number: 7 };
    let modified = Date::from_unix(HOUR);
    survey.objects.insert(other, Stored { path: Path::from("object 7"), bytes: 100, modified });
    assert_eq!(survey.plan(&aged, NOW).objects, [other]);
}

#[test]
fn the_highest_manifest_of_a_writer_stays_while_another_does() {
    let of = |numbers: &[u64]| numbers.iter().map(|n| Path::from(format!("manifest {n}"))).collect::<Vec<_>>();
    let mut survey = survey(&[at(1), at(2), at(3), at(4)]);
    survey.objects.retain(|id, _| id.number == 1);
    assert_eq!(survey.plan(&Policy::default(), NOW).manifests, of(&[0, 2]));
    // Another writer's manifests are no reason to keep it.
    survey.manifests[1].writer = Writer::from_bytes([8; 16]);
    survey.objects = survey
        .objects
        .into_values()
        .map(|it| (ObjectId { writer: survey.manifests[1].writer, number: 1 }, it))
        .collect();
    assert_eq!(survey.plan(&Policy::default(), NOW).manifests, of(&[0, 2, 3]));
    survey.objects.clear();
    assert_eq!(survey.plan(&Policy::default(), NOW).manifests, of(&[0, 1, 2, 3]), "nothing of theirs stays");
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

proptest! {
    #[test]
    fn copies_go_and_each_block_stays_somewhere(
        objects in prop::collection::vec((900u64..1_000, prop::collection::vec(0u64..12, 1..6), prop::option::of(1_001u64..1_004)), 1..12)
    ) {
        let objects: Vec<_> = objects.iter().map(|(hour, blocks, until)| (*hour, &blocks[..], *until)).collect();
        let gone: HashSet<u64> = condemned(&copies(&objects), &Policy::default()).into_iter().map(|(id, _)| id).collect();
        let mut longest = std::collections::BTreeMap::new();
        for (number, (_, blocks, until)) in (0..).zip(&objects) {
            for block in *blocks {
                let until = until.unwrap_or(u64::MAX);
                let (all, left) = longest.entry(*block).or_insert((0, 0));
                *all = until.max(*all);
                *left = if gone.contains(&number) { *left } else { until.max(*left) };
            }
        }
        prop_assert!(longest.values().all(|(all, left)| all == left), "{longest:?} without {gone:?}");
        // And none is left whose blocks all lie in better ones.
        let mut left = copies(&objects);
        left.manifests.retain(|manifest| !gone.contains(&first(manifest).object));
        prop_assert_eq!(condemned(&left, &Policy::default()), vec![]);
    }

    #[test]
    fn budgets_hold_but_for_pins_nothing_goes_for_nothing_and_the_choice_is_the_same(
        objects in objects(), budget in 0u64..5_000, own in 0u64..2_000, promised in 0u64..2_000
    ) {
        let survey = survey(&objects);
        let quota = |guaranteed, maximum| Quota { guaranteed, maximum };
        let shares = [(domain(1), quota(0, Some(own))), (domain(2), quota(promised, None))].into();
        let policy = Policy { budget: Some(budget), shares, ..Policy::default() };
        let plan = survey.plan(&policy, NOW);
        prop_assert_eq!(&plan, &survey.plan(&policy, NOW));
        prop_assert_eq!((plan.objects.len(), plan.manifests.len()), (0, 0), "nothing is deleted without its grace");
        let gone: HashSet<u64> = plan.condemn.iter().map(|(id, _)| id.number).collect();
        let left = |of: &dyn Fn(&Object) -> bool| {
            (0..).zip(&objects).filter(|(number, object)| !gone.contains(number) && of(object)).count() as u64 * 100
        };
        let pinned = |object: &Object| object.pinned && !object.expired;
        prop_assert!(left(&|_| true) <= budget.max(left(&pinned)));
        prop_assert!(left(&|object| object.domain == 1) <= own.max(left(&|object| pinned(object) && object.domain == 1)));
        // What was promised, in whole objects, goes only for what is pinned elsewhere, or if the budget is smaller.
        let theirs = |object: &Object| object.domain == 2 && !object.expired;
        let had = objects.iter().filter(|object| theirs(object)).count() as u64 * 100;
        let others_pinned = left(&|object| pinned(object) && object.domain != 2);
        if promised.next_multiple_of(100) + others_pinned <= budget {
            prop_assert!(left(&theirs) >= had.min(promised));
        }
        for (id, why) in &plan.condemn {
            let object = &objects[id.number as usize];
            prop_assert_eq!(object.expired, *why == Why::Expired);
            prop_assert!(object.expired || !object.pinned);
        }
        // The last that went was needed: without it, one of the budgets would not hold.
        let spared = plan.condemn.iter().filter(|(_, why)| *why == Why::Budget).any(|(id, _)| {
            let own_fits = objects[id.number as usize].domain != 1 || left(&|object| object.domain == 1) + 100 <= own;
            left(&|_| true) + 100 <= budget && own_fits
        });
        prop_assert!(!spared);
    }
}
