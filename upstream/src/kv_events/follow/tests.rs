//! One test for each transition of the table in the parent's documentation.

use super::*;
use proptest::prelude::*;

/// Batch `number` of process `process`.
fn batch(process: u8, number: u64) -> Message {
    Message { number, payload: Bytes::from(vec![process, number as u8]) }
}

fn live(follower: &mut Follower, number: u64) -> Vec<Action> {
    follower.live(batch(1, number))
}

fn replayed(follower: &mut Follower, number: u64) -> Vec<Action> {
    follower.replayed(Replayed::Batch(batch(1, number)))
}

fn end(follower: &mut Follower) -> Vec<Action> {
    follower.replayed(Replayed::End)
}

fn apply(number: u64) -> Action {
    Action::Apply(batch(1, number))
}

fn replay(from: u64) -> Action {
    Action::Replay { from }
}

/// A follower with a replay socket that has applied the batches before `next`.
fn following(next: u64) -> Follower {
    let mut follower = Follower::new(true);
    for number in 0..next {
        assert_eq!(live(&mut follower, number), [apply(number)]);
    }
    follower
}

#[test]
fn a_first_connection_replays_all() {
    let mut follower = Follower::new(true);
    assert_eq!(follower.connected(), [replay(0)]);
    assert_eq!(replayed(&mut follower, 0), [apply(0)]);
    assert_eq!(live(&mut follower, 1), [], "held");
    assert_eq!(replayed(&mut follower, 1), [apply(1)]);
    assert_eq!(end(&mut follower), [], "batch 1 is not applied twice");
    assert_eq!(live(&mut follower, 2), [apply(2)]);
}

#[test]
fn a_gap_is_replayed_and_held_batches_follow() {
    let mut follower = following(2);
    assert_eq!(live(&mut follower, 4), [replay(2)]);
    assert_eq!(live(&mut follower, 5), [], "held");
    assert_eq!(replayed(&mut follower, 2), [apply(2)]);
    assert_eq!(replayed(&mut follower, 3), [apply(3)]);
    assert_eq!(end(&mut follower), [apply(4), apply(5)]);
    assert_eq!(live(&mut follower, 6), [apply(6)]);
}

#[test]
fn a_live_batch_that_was_replayed_is_no_restart() {
    let mut follower = following(2);
    live(&mut follower, 3);
    for number in 2..=4 {
        replayed(&mut follower, number);
    }
    end(&mut follower);
    assert_eq!(live(&mut follower, 4), [], "it was on its way while the replay had it too");
    assert_eq!(live(&mut follower, 5), [apply(5)]);
}

#[test]
fn a_gap_without_a_replay_socket_is_stale() {
    let mut follower = Follower::new(false);
    assert_eq!(follower.connected(), []);
    assert_eq!(live(&mut follower, 0), [apply(0)]);
    assert_eq!(live(&mut follower, 2), [Action::Stale, apply(2)]);
    assert_eq!(live(&mut follower, 3), [apply(3)]);
}

#[test]
fn a_buffer_that_is_too_short_is_stale() {
    let mut follower = following(2);
    live(&mut follower, 9);
    assert_eq!(replayed(&mut follower, 7), [Action::Stale, apply(7)]);
    assert_eq!(replayed(&mut follower, 8), [apply(8)]);
    assert_eq!(end(&mut follower), [apply(9)]);
}

#[test]
fn a_number_that_goes_back_is_a_restart() {
    let mut follower = following(5);
    assert_eq!(live(&mut follower, 0), [Action::NewEpoch, apply(0)]);
    assert_eq!(live(&mut follower, 0), [Action::NewEpoch, apply(0)], "the same number as well");
    assert_eq!(live(&mut follower, 1), [apply(1)]);
}

#[test]
fn a_restart_whose_first_batches_are_missed() {
    let mut follower = following(5);
    assert_eq!(live(&mut follower, 2), [Action::NewEpoch, replay(0)]);
    assert_eq!(replayed(&mut follower, 0), [apply(0)]);
    assert_eq!(replayed(&mut follower, 1), [apply(1)]);
    assert_eq!(end(&mut follower), [apply(2)]);
}

#[test]
fn a_restart_during_a_replay() {
    let mut follower = following(2);
    assert_eq!(live(&mut follower, 7), [replay(2)]);
    assert_eq!(live(&mut follower, 0), [Action::NewEpoch, apply(0)], "batch 7 of the old process is dropped");
    assert_eq!(replayed(&mut follower, 2), [], "an answer of the abandoned replay");
    assert_eq!(live(&mut follower, 1), [apply(1)]);
}

#[test]
fn a_reconnection_to_the_same_process_goes_on() {
    let mut follower = following(3);
    assert_eq!(follower.connected(), [replay(2)], "from the last applied batch");
    assert_eq!(live(&mut follower, 4), []);
    assert_eq!(replayed(&mut follower, 1), [], "earlier than requested");
    assert_eq!(replayed(&mut follower, 2), [], "the same batch: the same process");
    assert_eq!(replayed(&mut follower, 3), [apply(3)]);
    assert_eq!(end(&mut follower), [apply(4)]);
}

#[test]
fn a_process_that_does_not_listen_any_more_has_ended() {
    let mut follower = following(3);
    assert_eq!(follower.refused(), [Action::NewEpoch]);
    assert_eq!(follower.refused(), [], "nothing is left to forget");
    assert_eq!(follower.connected(), [replay(0)]);
    assert_eq!(replayed(&mut follower, 0), [apply(0)]);
    assert_eq!(Follower::new(true).refused(), [], "nothing was known");
}

#[test]
fn another_batch_with_the_last_number_is_a_restart() {
    let mut follower = following(3);
    follower.connected();
    assert_eq!(follower.replayed(Replayed::Batch(batch(2, 2))), [Action::NewEpoch, replay(0)]);
    for number in 0..6 {
        let message = batch(2, number);
        assert_eq!(follower.replayed(Replayed::Batch(message.clone())), [Action::Apply(message)]);
    }
    assert_eq!(end(&mut follower), []);
}

#[test]
fn a_process_without_the_last_batch_is_a_restart() {
    let mut follower = following(3);
    follower.connected();
    assert_eq!(end(&mut follower), [Action::NewEpoch, replay(0)]);
    assert_eq!(end(&mut follower), [], "it has published nothing");
    assert_eq!(live(&mut follower, 0), [apply(0)]);
}

#[test]
fn a_process_that_cannot_be_confirmed_starts_over() {
    let mut follower = following(3);
    follower.connected();
    assert_eq!(replayed(&mut follower, 900), [Action::NewEpoch, Action::Stale, apply(900)]);
    assert_eq!(end(&mut follower), []);
    assert_eq!(live(&mut follower, 901), [apply(901)]);
}

#[test]
fn a_process_that_cannot_be_asked_starts_over() {
    let mut follower = following(3);
    follower.connected();
    live(&mut follower, 3);
    assert_eq!(follower.replay_failed(), [Action::NewEpoch, Action::Stale, apply(3)]);
    let mut follower = Follower::new(false);
    assert_eq!(follower.connected(), []);
    live(&mut follower, 0);
    assert_eq!(follower.connected(), [Action::NewEpoch]);
    assert_eq!(live(&mut follower, 0), [apply(0)]);
}

#[test]
fn a_failed_replay_applies_what_is_held() {
    let mut follower = following(2);
    live(&mut follower, 4);
    live(&mut follower, 5);
    assert_eq!(follower.replay_failed(), [Action::Stale, apply(4), apply(5)]);
    assert_eq!(follower.replay_failed(), [], "not replaying");
    assert_eq!(end(&mut follower), []);
}

#[test]
fn a_hole_in_held_batches_is_replayed_once() {
    let mut follower = following(1);
    assert_eq!(live(&mut follower, 3), [replay(1)]);
    live(&mut follower, 6);
    assert_eq!(replayed(&mut follower, 1), [apply(1)]);
    assert_eq!(replayed(&mut follower, 2), [apply(2)]);
    assert_eq!(end(&mut follower), [apply(3), replay(4)]);
    assert_eq!(end(&mut follower), [Action::Stale, apply(6)], "batch 6 was published before this request");
}

#[test]
fn held_batches_are_bounded() {
    let mut follower = following(1);
    assert_eq!(live(&mut follower, 2), [replay(1)]);
    for number in 3..MAX_HELD as u64 + 100 {
        assert_eq!(live(&mut follower, number), []);
    }
    assert_eq!(follower.replaying.as_ref().map(|replaying| replaying.held.len()), Some(MAX_HELD));
    replayed(&mut follower, 1);
    assert_eq!(end(&mut follower).len(), MAX_HELD);
    let last = MAX_HELD as u64 + 2;
    assert_eq!(live(&mut follower, last + 98), [replay(last)], "what was dropped is a gap again");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Batches are lost, connections break, replays fail, processes restart. In an epoch only batches of one process
    /// are applied, each once and in order, and all of them unless the view is stale. With a buffer that is large
    /// enough and replays that succeed, it never is.
    #[test]
    fn an_epoch_is_one_process_in_order(
        steps in prop::collection::vec((0..20u8, any::<bool>()), 1..300),
        with_replay in any::<bool>(),
        reliable in any::<bool>(),
    ) {
        let buffer_len = if reliable { usize::MAX } else { 6 };
        let mut follower = Follower::new(with_replay);
        let (mut process, mut published) = (1_u8, 0_u64);
        let (mut stale, mut applied): (bool, Vec<Message>) = (false, Vec::new());
        let mut answers: Option<VecDeque<Replayed>> = None;
        let mut actions = VecDeque::from(follower.connected());
        // At the end nothing is lost any more.
        let end = [(0, false)].into_iter().chain(std::iter::repeat_n((19, false), 1000)).chain([(0, false)]);
        for (step, lost) in steps.into_iter().chain(end) {
            match step {
                0..6 => {
                    let message = batch(process, published);
                    published += 1;
                    if !lost {
                        actions.extend(follower.live(message));
                    }
                }
                6 | 7 => {
                    if step == 7 {
                        (process, published) = (process + 1, 0);
                    }
                    answers = None;
                    actions.extend(follower.connected());
                }
                8 if !reliable => {
                    answers = None;
                    actions.extend(follower.replay_failed());
                }
                _ => if let Some(answer) = answers.as_mut().and_then(VecDeque::pop_front) {
                    actions.extend(follower.replayed(answer));
                }
            }
            while let Some(action) = actions.pop_front() {
                match action {
                    Action::Apply(message) => applied.push(message),
                    Action::Replay { from } => {
                        prop_assert!(with_replay);
                        let first = from.max(published.saturating_sub(buffer_len as u64));
                        let buffered = (first..published).map(|number| Replayed::Batch(batch(process, number)));
                        answers = Some(buffered.chain([Replayed::End]).collect());
                    }
                    Action::NewEpoch => (stale, applied) = (false, Vec::new()),
                    Action::Stale => stale = true,
                }
            }
            prop_assert!(!(stale && with_replay && reliable));
            let of_one = applied.iter().all(|message| message.payload[0] == applied[0].payload[0]);
            prop_assert!(of_one, "{applied:?}");
            prop_assert!(applied.is_sorted_by(|a, b| a.number < b.number), "{applied:?}");
            prop_assert!(stale || applied.iter().map(|message| message.number).eq(0..applied.len() as u64));
        }
        let last = applied.last().expect("at least the last batch");
        prop_assert_eq!((last.payload[0], last.number), (process, published - 1));
    }
}
