//! A lookup: along a prompt from page to page. What each page says of its holders, a [`Partition`] counts.

use super::body::{Body, Place};
use super::locator::Key;
use super::overlap::{Answer, Overlap};
use super::page::{PLACES, Seen};
use super::partition::{Partition, Window};
use super::sync::fetch;
use kvbm::SequenceHash;

/// Places looked for at once, one for each page that a prompt takes at least: as many as a core can wait for.
const AHEAD: usize = 16;
/// Pages ahead whose heads are brought near, in case they lie side by side.
const NEAR: usize = 4;
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
    /// Where blocks ahead are, probably: one in [`STRIDE`], from `ahead_from` on.
    ahead: [Option<Place>; AHEAD],
    ahead_from: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(body: &'a Body, names: &'a [SequenceHash], out: &'a mut Overlap) -> Self {
        let Overlap { answer, partition } = out;
        answer.reset(partition.begin(body.roll.workers.len()));
        Self { body, names, answer, partition, at: 0, ahead: [None; AHEAD], ahead_from: 0 }
    }

    /// Walks as far as anybody holds the prompt.
    pub(super) fn run(mut self) {
        self.walk();
        self.partition.end(self.answer);
    }

    fn walk(&mut self) {
        // The first page says whether to look further.
        let mut look_ahead_at = 1;
        let mut led = None;
        while self.at < self.names.len() {
            if led.is_none() && self.at >= look_ahead_at {
                self.look_ahead();
                look_ahead_at = self.at + AHEAD * STRIDE;
            }
            let Some((place, seen)) = led.take().or_else(|| self.page()) else { return };
            self.at += seen.len as usize;
            // The next is looked at before this one is counted, so that its lines come meanwhile.
            led = seen.next.and_then(|place| self.read(place));
            let window = Window { at: place.at(), len: seen.len };
            if !self.partition.count(&seen, window, &self.body.roll.reach, self.answer) {
                return;
            }
        }
    }

    /// What the page that the one before it led to has of the prompt.
    fn read(&self, place: Place) -> Option<(Place, Seen)> {
        let names = self.names.get(self.at..).filter(|names| !names.is_empty())?;
        let page = self.body.page(place.page())?;
        self.body.fetch_head(place.page() + NEAR as u32);
        if let Some(name) = names.get((NEAR + 1) * STRIDE - 1) {
            fetch(name);
        }
        let seen = page.look(place.at(), names).filter(|seen| seen.len > 0)?;
        if let Some(crowd) = seen.several.as_deref().and_then(Option::as_ref) {
            crowd.fetch();
        }
        page.warm();
        Some((place, seen))
    }

    /// The page that has the next block, and how much of the prompt.
    fn page(&self) -> Option<(Place, Seen)> {
        let mut guess = self.guess();
        let mut tries = 0;
        while tries < TRIES {
            let guessed = guess.take();
            tries += usize::from(guessed.is_none());
            let place = guessed.or_else(|| self.body.find(self.names[self.at].short()))?;
            let Some(page) = self.body.page(place.page()) else { continue };
            let seen = page.look(place.at(), &self.names[self.at..])?;
            if seen.len > 0 {
                page.warm();
                return Some((place, seen));
            }
        }
        None
    }

    /// Where the next block is if it lies in one page with the next that was looked for.
    fn guess(&self) -> Option<Place> {
        let between = self.at.checked_sub(self.ahead_from)?;
        let next = between.div_ceil(STRIDE);
        let place = (*self.ahead.get(next)?)?;
        let at = place.at().checked_sub((next * STRIDE - between) as u32)?;
        Some(Place::new(place.page(), at))
    }

    /// Brings near the pages that come next, and notes where they are. A page has sixty-four blocks of the prompt at most, so one
    /// of as many is in each of them.
    fn look_ahead(&mut self) {
        let names = &self.names[self.at..];
        let keys = || names.iter().step_by(STRIDE).take(AHEAD).map(|name| Key::of(name.short()));
        keys().for_each(|key| self.body.tables[key.shard].fetch(key.tag));
        self.ahead = [None; AHEAD];
        self.ahead_from = self.at;
        for (place, key) in self.ahead.iter_mut().zip(keys()) {
            *place = self.body.tables[key.shard].find(key.tag, |_| true).map(Place);
        }
        let places = self.ahead.iter().flatten();
        let pages = places.filter_map(|place| Some(self.body.page(place.page())?.touch(place.at())));
        std::hint::black_box(pages.fold(0, |sum, page| sum ^ page));
    }
}
