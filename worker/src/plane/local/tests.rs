use super::*;
use crate::plane::contract::{self, instance, next};
use crate::plane::{Discovery, Event, EventBody, Events, Load, Source, Topic, WorkerId};
use futures::StreamExt;
use std::time::Duration;
use tokio::time::Instant;

mod discovery {
    crate::plane::contract::discovery_contract!(async { Some(crate::plane::local::LocalDiscovery::default()) });
}

mod events {
    crate::plane::contract::events_contract!(async { Some(crate::plane::local::LocalEvents::default()) });
}

fn load(number: u64) -> Event {
    let body = EventBody::Load(Load { number, ..Load::default() });
    Event { source: Source::Worker(WorkerId(1)), epoch: kvbm::Epoch(1), body }
}

async fn received(link: Link, sent: u64) -> Vec<u64> {
    let plane = LocalEvents::new(link);
    let events = plane.subscribe(Topic::Cache);
    (1..=sent).for_each(|number| plane.publish(load(number)));
    drop(plane);
    let numbers = events.map(|event| match event.body {
        EventBody::Load(load) => load.number,
        body => unreachable!("only loads were sent, not {body:?}"),
    });
    numbers.collect().await
}

#[tokio::test]
async fn a_subscriber_that_lags_loses_the_oldest() {
    assert_eq!(received(Link { backlog: 8, ..Link::default() }, 20).await, (13..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn the_seed_decides_which_events_are_lost() {
    let lossy = |seed| received(Link { loss: 0.5, seed, ..Link::default() }, 200);
    let (once, again, other) = (lossy(1).await, lossy(1).await, lossy(2).await);
    assert_eq!(once, again);
    assert_ne!(once, other);
    assert!((60..140).contains(&once.len()), "{} of 200 arrived", once.len());
}

#[tokio::test]
async fn reordering_and_duplicates_are_seeded_and_bounded() {
    let link = |reorder, repeat| Link { reorder, repeat, seed: 3, ..Link::default() };
    let sorted = |mut numbers: Vec<u64>| {
        numbers.sort_unstable();
        numbers
    };
    let (all, late) = ((1..=200).collect::<Vec<_>>(), received(link(0.2, 0.0), 200).await);
    assert_eq!(late, received(link(0.2, 0.0), 200).await);
    assert_eq!(sorted(late.clone()), all, "late, and not lost");
    let overtaken = late.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!((20..80).contains(&overtaken), "{overtaken} of 200 were late");
    assert!(late.iter().enumerate().all(|(at, number)| number.abs_diff(at as u64 + 1) <= 16), "{late:?}");
    let mut twice = received(link(0.0, 0.2), 200).await;
    assert!((220..280).contains(&twice.len()), "{} for 200", twice.len());
    twice = sorted(twice);
    twice.dedup();
    assert_eq!(twice, all);
}

#[tokio::test(start_paused = true)]
async fn a_lagging_plane_delivers_late_and_complete() {
    let lag = Duration::from_secs(3);
    let start = Instant::now();
    assert_eq!(received(Link { lag, ..Link::default() }, 5).await, [1, 2, 3, 4, 5]);
    assert_eq!(start.elapsed(), lag);

    let discovery = LocalDiscovery::lagging(lag);
    let mut watch = discovery.watch();
    drop(discovery.register(instance(1, 1), contract::engine()).await.unwrap());
    assert_eq!(next(&mut watch).await, (1, 1, true));
    assert_eq!(next(&mut watch).await, (1, 1, false));
    assert_eq!(start.elapsed(), lag * 2);
}

#[tokio::test]
async fn an_expired_lease_stays_expired() {
    let discovery = LocalDiscovery::default();
    let mut watch = discovery.watch();
    let stale = discovery.register(instance(1, 1), contract::engine()).await.unwrap();
    discovery.expire(WorkerId(1));
    let _back = discovery.register(instance(1, 2), contract::engine()).await.unwrap();
    drop(stale);
    let _other = discovery.register(instance(2, 1), contract::engine()).await.unwrap();
    let mut seen = vec![];
    for _ in 0..4 {
        seen.push(next(&mut watch).await);
    }
    assert_eq!(seen, [(1, 1, true), (1, 1, false), (1, 2, true), (2, 1, true)]);
}
