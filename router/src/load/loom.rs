//! What decisions read without a lock, in every order in which it can be read and written.

use super::stats::{self, Standing};
use super::timestamp::{self, Moment};
use loom::sync::Arc;
use loom::thread;
use published::Face;
use tokio::time::Instant;

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and not all of it in a test")]
#[path = "published.rs"]
mod published;

/// Two preemptions find nearly every wrong order.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn nobody_keeps_an_old_report_under_the_latest_version() {
    let (now, standing) =
        (Moment::from(Instant::now()), |waiting_tokens| Standing { waiting_tokens, ..Standing::default() });
    explore(move || {
        let face = Arc::new(Face::default());
        let books = face.clone();
        let reports = thread::spawn(move || books.publish(Some(now), &standing(7), &standing(3)));
        let version = face.version();
        let seen = (face.age(now), face.standing(true).waiting_tokens);
        reports.join().unwrap();
        if face.version() == version {
            assert_eq!(seen, (Some(0), 7));
        }
    });
}

#[test]
fn nobody_keeps_an_old_rest_or_choice_under_the_latest_version() {
    loom::model(|| {
        let face = Arc::new(Face::default());
        let (health, fleet, now) = (face.clone(), face.clone(), Moment::from(Instant::now()));
        let rests = thread::spawn(move || health.rest_until(Some(now)));
        let chosen = thread::spawn(move || fleet.choose(5));
        let version = face.version();
        let seen = (face.rests(), face.chosen());
        rests.join().unwrap();
        chosen.join().unwrap();
        if face.version() == version {
            assert_eq!(seen, (now.bits(), 5));
        }
    });
}
