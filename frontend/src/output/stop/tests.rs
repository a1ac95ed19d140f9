use super::{Matcher, StopState};
use proptest::prelude::*;

/// The expected result, from the whole text.
fn naive(text: &str, stops: &[String], include: bool) -> (String, bool) {
    for end in 0..=text.len() {
        let hits = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some(stop) = hits.max_by_key(|stop| stop.len()) {
            return (text[..if include { end } else { end - stop.len() }].into(), true);
        }
    }
    (text.into(), false)
}

fn in_pieces(pieces: &[String], stops: &[String], include: bool) -> (String, bool) {
    let mut matcher = Matcher::new(stops.to_vec(), include);
    let mut out = String::new();
    for piece in pieces {
        if matcher.push(piece, &mut out) == StopState::Stop {
            return (out, true);
        }
    }
    matcher.finish(&mut out);
    (out, false)
}

proptest! {
    /// Few letters, so that stop strings overlap and contain one another often.
    #[test]
    fn in_pieces_is_as_whole(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{1,5}", 0..4),
        include: bool,
    ) {
        prop_assert_eq!(in_pieces(&pieces, &stops, include), naive(&pieces.concat(), &stops, include));
    }
}

#[test]
fn only_a_possible_stop_string_is_withheld() {
    let mut matcher = Matcher::new(vec!["###".into()], false);
    let mut out = String::new();
    assert_eq!(matcher.push("one #", &mut out), StopState::Continue);
    assert_eq!(out, "one ");
    assert_eq!(matcher.push("#two", &mut out), StopState::Continue);
    assert_eq!(out, "one ##two");
}
