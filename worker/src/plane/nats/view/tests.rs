//! When instances join and leave.

use super::*;
use crate::plane::Role;
use crate::plane::contract::{engine, instance};
use kvbm::Epoch;
use std::sync::atomic::{AtomicU32, Ordering};

const LEASE: Duration = Duration::from_secs(6);
/// Time after the last renewal at which a lease is over although the server reports no expiry.
const RENEW_BY: Duration = Duration::from_secs(9);

/// A view, the time at which it began, and the number of engines that were made.
fn view() -> (View, Instant, Arc<AtomicU32>) {
    let made = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&made);
    let connector: Connector = Arc::new(move |_, _| {
        counter.fetch_add(1, Ordering::Relaxed);
        engine()
    });
    (View::new(connector, LEASE), Instant::now(), made)
}

fn address() -> Address {
    Address("http://host:1".into())
}

fn joined(change: Option<Membership>) -> Option<(u64, u64)> {
    change.map(|change| match change {
        Membership::Joined(instance, _) => (instance.id.0, instance.epoch.0),
        Membership::Left(id, _) => panic!("{id} left"),
    })
}

fn left(changes: impl IntoIterator<Item = Membership>) -> Vec<(u64, u64)> {
    let left = |change| match change {
        Membership::Left(id, Epoch(epoch)) => (id.0, epoch),
        Membership::Joined(instance, _) => panic!("{} joined", instance.id),
    };
    changes.into_iter().map(left).collect()
}

#[test]
fn a_renewal_changes_nothing_and_a_role_keeps_the_engine() {
    let (mut view, start, made) = view();
    assert_eq!(joined(view.registered(instance(1, 1), address(), LEASE, start)), Some((1, 1)));
    assert_eq!(joined(view.registered(instance(1, 1), address(), LEASE, start)), None);
    let prefill = Instance { role: Role::Prefill, ..instance(1, 1) };
    assert_eq!(joined(view.registered(prefill, address(), LEASE, start)), Some((1, 1)));
    assert_eq!(made.load(Ordering::Relaxed), 1);
    assert_eq!(joined(view.registered(instance(1, 2), address(), LEASE, start)), Some((1, 2)));
    assert_eq!(made.load(Ordering::Relaxed), 2, "a new epoch is another process");
    assert_eq!(left(view.removed(WorkerId(1))), [(1, 2)]);
    assert!(view.removed(WorkerId(1)).is_none(), "it left once");
}

#[test]
fn an_expiry_counts_at_once_while_messages_arrive() {
    let (mut view, start, _) = view();
    view.registered(instance(1, 1), address(), LEASE, start);
    for second in 1..=6 {
        view.message_received(start + Duration::from_secs(second));
    }
    assert_eq!(left(view.expired(WorkerId(1), start + LEASE)), [(1, 1)]);
    assert_eq!(view.next_due(), None);
}

#[test]
fn after_a_silence_expired_instances_may_renew() {
    let (mut view, start, made) = view();
    view.message_received(start);
    for id in 1..=3 {
        view.registered(instance(id, 1), address(), LEASE, start);
    }
    let back = start + Duration::from_mins(1);
    view.message_received(back);
    for id in 1..=3 {
        assert!(view.expired(WorkerId(id), back).is_none(), "there is no storm of departures");
    }
    assert!(view.renewed(WorkerId(1), LEASE, back) && !view.renewed(WorkerId(4), LEASE, back));
    assert_eq!(left(view.removed(WorkerId(2))), [(2, 1)], "a deletion counts at once");
    let end = view.next_due().unwrap();
    assert_eq!(end, back + LEASE);
    assert_eq!(left(view.due(end - Duration::from_secs(1))), []);
    assert_eq!(left(view.due(end)), [(3, 1)]);
    assert_eq!((view.next_due(), made.load(Ordering::Relaxed)), (Some(back + RENEW_BY), 3));
}

#[test]
fn a_record_that_cannot_be_used_leaves_a_known_worker_its_lease() {
    let (mut view, start, made) = view();
    let at = |seconds| start + Duration::from_secs(seconds);
    for id in 1..=3 {
        view.registered(instance(id, 1), address(), LEASE, start);
    }
    for second in 0..=6 {
        view.message_received(at(second));
        // Of the first: again and again. Of one that is not known: nothing happens.
        for id in [1, 4] {
            view.unusable(WorkerId(id), at(second));
        }
        assert_eq!(view.next_due(), Some(start + LEASE), "more of them do not extend the lease");
    }
    view.unusable(WorkerId(2), at(4));
    assert!(view.renewed(WorkerId(2), LEASE, at(4)), "its own record is there again");
    view.unusable(WorkerId(3), at(4));
    assert_eq!(joined(view.registered(instance(3, 1), address(), LEASE, at(4))), None);
    assert_eq!(left(view.due(at(5))), []);
    assert_eq!(left(view.due(at(6))), [(1, 1)]);
    assert_eq!((view.next_due(), made.load(Ordering::Relaxed)), (Some(at(4) + RENEW_BY), 3), "the others stay");
}

#[test]
fn after_a_silence_a_worker_without_a_usable_record_may_renew() {
    let (mut view, start, _) = view();
    view.registered(instance(1, 1), address(), LEASE, start);
    view.registered(instance(2, 1), address(), LEASE, start);
    view.message_received(start);
    for id in [1, 2] {
        view.unusable(WorkerId(id), start);
    }
    assert_eq!(left(view.due(start + LEASE)), [], "no message came, so NATS may not answer");
    view.unusable(WorkerId(1), start + LEASE);
    assert!(view.renewed(WorkerId(2), LEASE, start + LEASE));
    assert_eq!(view.next_due(), Some(start + LEASE * 2));
    assert_eq!(left(view.due(start + LEASE * 2)), [(1, 1)]);
    assert_eq!(view.next_due(), Some(start + LEASE + RENEW_BY));
}

#[test]
fn a_new_list_ends_instances_that_are_not_in_it() {
    let (mut view, start, _) = view();
    view.message_received(start);
    view.registered(instance(1, 1), address(), LEASE, start);
    view.registered(instance(2, 1), address(), LEASE, start);
    view.begin_list(start);
    view.registered(instance(1, 1), address(), LEASE, start);
    assert_eq!(left(view.end_list(start)), [], "it may register again");
    assert_eq!(left(view.due(start + LEASE)), [(2, 1)]);
}

#[test]
fn a_worker_that_does_not_renew_leaves_without_a_report_of_the_server() {
    let (mut view, start, _) = view();
    let at = |seconds| start + Duration::from_secs(seconds);
    for id in [1, 2] {
        view.registered(instance(id, 1), address(), LEASE, start);
    }
    for second in [0, 2, 4, 6, 8] {
        view.message_received(at(second));
        assert!(view.renewed(WorkerId(2), LEASE, at(second)));
        assert_eq!(left(view.due(at(second))), []);
    }
    assert_eq!(view.next_due(), Some(start + RENEW_BY));
    assert_eq!(left(view.due(start + RENEW_BY - Duration::from_millis(1))), []);
    assert_eq!(left(view.due(start + RENEW_BY)), [(1, 1)]);
    assert!(view.expired(WorkerId(1), at(10)).is_none(), "it left once");
    assert_eq!(view.next_due(), Some(at(8) + RENEW_BY), "the other one stays");
}

#[test]
fn without_messages_no_lease_is_over() {
    let (mut view, start, _) = view();
    for id in [1, 2] {
        view.registered(instance(id, 1), address(), LEASE, start);
    }
    view.message_received(start);
    // NATS does not answer, or this process was frozen and has not read its connection yet.
    let mut now = start;
    for _ in 0..10 {
        let due = view.next_due().unwrap();
        assert!(due > now, "it is not due all the time");
        now = due;
        assert_eq!(left(view.due(now)), []);
    }
    // Renewals arrive one after another.
    let back = now + Duration::from_secs(1);
    for second in [0, 2, 4, 6] {
        let now = back + Duration::from_secs(second);
        view.message_received(now);
        assert_eq!(left(view.due(now - Duration::from_secs(1))), []);
        assert!(view.renewed(WorkerId(2), LEASE, now));
    }
    assert_eq!(left(view.due(back + LEASE)), [(1, 1)], "a worker that does not renew afterwards is gone");
}

#[test]
fn after_a_new_connection_leases_can_be_renewed_first() {
    let (mut view, start, _) = view();
    view.registered(instance(1, 1), address(), LEASE, start);
    view.message_received(start);
    let back = start + Duration::from_mins(10);
    view.begin_list(back);
    assert_eq!(view.next_due(), Some(back + LEASE));
    view.message_received(back);
    assert_eq!(left(view.due(back)), []);
    assert!(view.renewed(WorkerId(1), LEASE, back + Duration::from_secs(1)));
    assert_eq!(left(view.due(back + LEASE)), []);
}

#[test]
fn a_record_counts_for_its_own_lifetime_up_to_a_limit() {
    let (mut view, start, _) = view();
    view.registered(instance(1, 1), address(), LEASE * 3, start);
    assert_eq!(view.next_due(), Some(start + LEASE * 3 * 3 / 2));
    view.registered(instance(1, 1), address(), Duration::MAX, start);
    assert_eq!(view.next_due(), Some(start + LEASE * MAX_LEASES * 3 / 2));
    view.unusable(WorkerId(1), start);
    assert_eq!(view.next_due(), Some(start + LEASE * MAX_LEASES));
    view.registered(instance(2, 1), address(), LEASE / 3, start);
    assert_eq!(view.next_due(), Some(start + LEASE / 3 + LEASE / 2), "not before a silence would be noticed");
}

#[test]
fn after_a_silence_each_worker_may_renew_for_as_long_as_its_own_lease() {
    let (mut view, start, _) = view();
    let at = |seconds| start + Duration::from_secs(seconds);
    view.message_received(start);
    view.registered(instance(1, 1), address(), LEASE, start);
    // It renews every ten seconds.
    view.registered(instance(2, 1), address(), LEASE * 5, start);
    view.message_received(at(60));
    for id in [1, 2] {
        assert!(view.expired(WorkerId(id), at(60)).is_none());
    }
    assert_eq!(left(view.due(at(66))), [(1, 1)]);
    assert_eq!(view.next_due(), Some(at(90)));
    assert!(view.renewed(WorkerId(2), LEASE * 5, at(69)));
    assert_eq!(left(view.due(at(90))), []);
}

#[test]
fn between_the_renewals_of_workers_with_long_leases_there_is_no_silence() {
    let (mut view, start, _) = view();
    for id in [1, 2] {
        view.registered(instance(id, 1), address(), LEASE * 5, start);
    }
    assert_eq!(view.renewed_within(), LEASE * 5);
    for second in [0, 10, 20, 30] {
        let now = start + Duration::from_secs(second);
        view.message_received(now);
        assert!(view.renewed(WorkerId(2), LEASE * 5, now));
    }
    assert_eq!(left(view.expired(WorkerId(1), start + LEASE * 5)), [(1, 1)], "it counts at once");
    view.renewed(WorkerId(2), LEASE / 2, start + LEASE * 5);
    assert_eq!(view.renewed_within(), LEASE, "not less than the lease of this process");
}
