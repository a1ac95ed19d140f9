//! A lookup: along a prompt from page to page. What each page says of its holders, a [`Partition`] counts.

use super::overlap::Overlap;
use super::page::{PLACES, Seen};
use super::partition::{Partition, Window};
use super::position::Place;
use super::snapshot::Body;
use super::sync::fetch;
use super::worker_overlap::Answer;
use kvbm::SequenceHash;

/// Pages ahead whose heads are brought near, in case they lie side by side.
const NEAR: usize = 8;
/// Blocks from one to the next.
const STRIDE: usize = PLACES as usize;
/// A block may be moved between finding and reading it, and then be found again.
const TRIES: usize = 3;

/// The walk.
pub(super) struct Walk<'a> {
    body: &'a Body,
    names: &'a [SequenceHash],
    answer: &'a mut Answer,
    partition: &'a mut Partition,
    /// Blocks walked.
    at: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(body: &'a Body, names: &'a [SequenceHash], out: &'a mut Overlap) -> Self {
        let Overlap { answer, partition } = out;
        answer.reset(partition.begin(body.roll.workers.len()));
        Self { body, names, answer, partition, at: 0 }
    }

    /// Walks as far as anybody holds the prompt.
    pub(super) fn run(mut self) {
        self.walk();
        self.partition.end(self.answer);
    }

    fn walk(&mut self) {
        self.names.iter().skip(STRIDE - 1).step_by(STRIDE).take(NEAR).for_each(fetch);
        let mut led = None;
        while self.at < self.names.len() {
            let Some((place, seen)) = led.take().or_else(|| self.page()) else { return };
            self.at += seen.len as usize;
            let (times, next) = self.alike(place, &seen);
            // The next is looked at before this one is counted, so that its lines come meanwhile.
            led = next.and_then(|place| self.read(place));
            let window = Window { at: place.at(), len: seen.len, times };
            if !self.partition.count(&seen, window, &self.body.roll.reach, self.answer) {
                return;
            }
        }
    }

    /// How many pages, from this one on, have the prompt alike, and where it goes on then. They are whole, so that one look at a
    /// line tells.
    fn alike(&mut self, place: Place, seen: &Seen) -> (u32, Option<Place>) {
        let (mut times, mut next) = (1, seen.next);
        if place.at() != 0 || seen.len != PLACES {
            return (times, next);
        }
        while let Some(place) = next.filter(|place| place.at() == 0)
            && let Some(end) = self.names.get(self.at + STRIDE - 1)
            && let Some(page) = self.body.page(place.page())
            && let Some(further) = page.goes_on_as(seen, end.short())
        {
            self.fetch_ahead(place);
            page.warm();
            self.at += STRIDE;
            (times, next) = (times + 1, Some(further).filter(|further| *further != Place::NOWHERE));
        }
        (times, next)
    }

    /// Brings near what will probably be read soon after a page that has the next block of the prompt.
    fn fetch_ahead(&self, place: Place) {
        self.body.fetch_head(place.page() + NEAR as u32);
        if let Some(name) = self.names.get(self.at + (NEAR + 1) * STRIDE - 1) {
            fetch(name);
        }
    }

    /// What the page that the one before it led to has of the prompt.
    fn read(&self, place: Place) -> Option<(Place, Seen)> {
        let names = self.names.get(self.at..).filter(|names| !names.is_empty())?;
        let page = self.body.page(place.page())?;
        self.fetch_ahead(place);
        let seen = page.look(place.at(), names).filter(|seen| seen.len > 0)?;
        if let Some(crowd) = seen.several.as_deref().and_then(Option::as_ref) {
            crowd.fetch();
        }
        page.warm();
        Some((place, seen))
    }

    /// The page that has the next block, and how much of the prompt.
    fn page(&self) -> Option<(Place, Seen)> {
        for _ in 0..TRIES {
            let place = self.body.find(self.names[self.at].short())?;
            let Some(page) = self.body.page(place.page()) else { continue };
            let seen = page.look(place.at(), &self.names[self.at..])?;
            if seen.len > 0 {
                page.warm();
                return Some((place, seen));
            }
        }
        None
    }
}
