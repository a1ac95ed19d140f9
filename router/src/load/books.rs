//! How busy a worker is: what it last reported, and what was booked on it since.
//!
//! A report is a picture of some time ago. What was sent since it came counts on top of it; what was sent long enough
//! before it is in it, and counts no more. In between nobody can say, so the larger of both counts: never twice. While
//! reports are missing, bookings alone are what is known.

use super::published::Face;
use super::stats::{Known, ONBOARDED, Speeds, Standing, below};
use super::timestamp::Moment;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::Load;

/// What a request brings to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Amount {
    /// Prompt tokens to compute there.
    pub(crate) prefill_tokens: u64,
    /// Blocks that prompt and output will take.
    pub(crate) blocks: u64,
    /// Prompts to compute there: 1 until the first token.
    pub(crate) prompts: u64,
    /// Sequences: 1 for a request that decodes there.
    pub(crate) sequences: u64,
}

/// The state of one worker.
pub(crate) struct Books {
    state: Mutex<State>,
    /// What decisions see of `state`.
    face: Face,
}

#[derive(Default)]
struct State {
    report: Option<(Load, Instant)>,
    /// Ordered, so that sums and walks come out the same each time.
    open: BTreeMap<u64, Entry>,
    last: u64,
    /// Of all that is open.
    all: Amount,
    /// Of what is [`Seen::No`].
    fresh: Amount,
    /// Of what is [`Seen::Maybe`].
    unsure: Amount,
    /// Of what waits in other routers.
    elsewhere: Amount,
    /// Of what the latest report may have in it and has ended since. Without prefill: how much of that was still to be
    /// computed at the time of the report, nobody knows.
    ended: Amount,
    step: Option<f64>,
    resume: Option<f64>,
    residence: Option<f64>,
}

/// What a decision sees of a worker.
pub(crate) struct Glance {
    pub(crate) standing: Standing,
    pub(crate) known: Known,
    /// Better left alone while others are there: it is silent, or rests.
    pub(crate) avoided: bool,
    /// When it was last chosen, in choices; 0 is never.
    pub(crate) chosen: u64,
    /// From then on it is another, if nothing changes until then.
    pub(crate) until: Option<Moment>,
}

struct Entry {
    amount: Amount,
    booked: Instant,
    /// When the request went out to the worker; `None` while its prefill runs elsewhere.
    sent: Option<Instant>,
    seen: Seen,
    started: bool,
    /// It waits in another router, or is about to be sent by it.
    elsewhere: bool,
}

/// Whether the latest report has a booking in it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// The report came before the request was sent.
    No,
    /// It came so soon after that it may have crossed the request on its way.
    Maybe,
    Yes,
}

/// A request that went out this long before a report is counted in the report: a hop and the engine's next turn.
const SEEN_AFTER: Duration = Duration::from_millis(50);
/// Reports come at least once a second. After three missed ones the last is no news.
const STALE: Duration = Duration::from_secs(3);
/// After five missed reports a worker that used to report is passed over while others are there.
const SILENT: Duration = Duration::from_secs(5);
/// How much a new measurement counts against the old ones: the last ten or so decide.
const NEWEST: f64 = 0.1;

impl Books {
    /// Books an amount, under a number of its own.
    pub(crate) fn book(&self, amount: Amount, now: Instant) -> u64 {
        self.lock().book(amount, now, false)
    }

    /// Books what another router has booked.
    pub(crate) fn book_elsewhere(&self, amount: Amount, now: Instant) -> u64 {
        self.lock().book(amount, now, true)
    }

    /// What other routers have booked and not sent.
    pub(crate) fn elsewhere(&self) -> Amount {
        self.state().elsewhere
    }

    /// All that is booked.
    #[cfg(test)]
    pub(crate) fn booked(&self) -> Amount {
        self.state().all
    }

    /// Another router's request will be sent, though not yet.
    pub(crate) fn going(&self, number: u64) {
        self.lock().change(number, |entry| entry.elsewhere = false);
    }

    /// The request went out to the worker.
    pub(crate) fn sent(&self, number: u64, now: Instant) {
        self.lock().change(number, |entry| {
            entry.sent = Some(now);
            entry.elsewhere = false;
        });
    }

    /// The request will compute this many prompt tokens here, other than first booked.
    pub(crate) fn amend(&self, number: u64, prefill_tokens: u64) {
        self.lock().change(number, |entry| {
            entry.amount.prefill_tokens = prefill_tokens;
            entry.amount.prompts = 1;
        });
    }

    /// The first token is there: nothing is left to prefill.
    pub(crate) fn started(&self, number: u64) {
        self.lock().change(number, |entry| {
            entry.amount.prefill_tokens = 0;
            entry.amount.prompts = 0;
            entry.started = true;
            entry.elsewhere = false;
        });
    }

    /// Frees what is left of a booking.
    pub(crate) fn release(&self, number: u64, now: Instant) {
        let mut state = self.lock();
        let mut left = Amount::default();
        state.change(number, |entry| left = std::mem::take(&mut entry.amount));
        let Some(entry) = state.open.remove(&number) else { return };
        if entry.seen != Seen::No {
            state.ended.add(Amount { prefill_tokens: 0, prompts: 0, ..left });
        }
        if entry.started {
            average(&mut state.residence, (now - entry.booked).as_secs_f64());
        }
    }

    /// Notes a report.
    pub(crate) fn report(&self, load: Load, now: Instant) {
        let mut state = self.lock();
        let unseen = state.open.iter().filter(|(_, entry)| entry.seen != Seen::Yes && entry.sent.is_some());
        let numbers: Vec<u64> = unseen.map(|(number, _)| *number).collect();
        for number in numbers {
            state.change(number, |entry| match entry.sent {
                Some(sent) if sent + SEEN_AFTER <= now => entry.seen = Seen::Yes,
                Some(_) => entry.seen = Seen::Maybe,
                None => {}
            });
        }
        if let Some(step) = load.decode_step_seconds.filter(|step| *step > 0.0 && load.running > 0) {
            average(&mut state.step, step / f64::from(load.running));
        }
        state.ended = Amount::default();
        state.report = Some((load, now));
    }

    /// Notes how long a hand-over took beside the transfer.
    pub(crate) fn resumed(&self, seconds: f64) {
        average(&mut self.lock().resume, seconds);
    }

    /// The latest report, while it is news.
    pub(crate) fn latest(&self, now: Instant) -> Option<Load> {
        self.state()
            .report
            .as_ref()
            .filter(|(_, at)| now.saturating_duration_since(*at) <= STALE)
            .map(|(load, _)| load.clone())
    }

    /// Whether the worker used to report, and does not any more.
    #[inline]
    pub(crate) fn silent(&self, now: impl Into<Moment>) -> bool {
        self.face.age(now.into()).is_some_and(|age| age > SILENT.as_nanos() as u64)
    }

    /// How busy the worker is.
    pub(crate) fn standing(&self, now: impl Into<Moment>) -> Standing {
        self.glance(now.into()).standing
    }

    /// Is another once a glance is, unless only time has passed.
    #[inline]
    pub(crate) fn version(&self) -> u32 {
        self.face.version()
    }

    /// All that a decision sees of the worker.
    pub(crate) fn glance(&self, now: Moment) -> Glance {
        let (age, rests) = (self.face.age(now), self.face.rests());
        let older = |than: Duration| age.is_some_and(|age| age > than.as_nanos() as u64);
        let turns_older = |than: Duration| Some(now.after((than.as_nanos() as u64 + 1).checked_sub(age?)?));
        let rested = (now.bits() < rests).then(|| now.after(rests - now.bits()));
        Glance {
            // Who never reported is no news, and not silent.
            standing: self.face.standing(age.is_some() && !older(STALE)),
            known: self.face.known(),
            avoided: rested.is_some() || older(SILENT),
            chosen: self.face.chosen(),
            until: [rested, turns_older(STALE), turns_older(SILENT)].into_iter().flatten().min(),
        }
    }

    /// Whether the worker is better left alone while others are there.
    pub(crate) fn avoided(&self, now: impl Into<Moment>) -> bool {
        self.glance(now.into()).avoided
    }

    /// Has it left alone until then.
    pub(crate) fn rest_until(&self, until: Option<Moment>) {
        self.face.rest_until(until);
    }

    /// Notes that the worker was chosen, and when, in choices.
    pub(crate) fn choose(&self, nth: u64) {
        self.face.choose(nth);
    }

    /// To be read only: decisions go on seeing what they saw.
    fn state(&self) -> MutexGuard<'_, State> {
        // Sums and entries change together, without anything that panics between them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> Open<'_> {
        Open { state: self.state(), books: self }
    }
}

impl Default for Books {
    fn default() -> Self {
        let books = Self { state: Mutex::default(), face: Face::default() };
        drop(books.lock());
        books
    }
}

/// Books while they are written in: what decisions see follows when they are closed.
struct Open<'a> {
    state: MutexGuard<'a, State>,
    books: &'a Books,
}

impl Deref for Open<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Open<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let reported = self.state.report.as_ref().map(|(_, at)| Moment::from(*at));
        self.books.face.publish(reported, &self.state.standing(true), &self.state.standing(false));
    }
}

impl State {
    /// How busy the worker is, while its latest report is news and once it is not.
    fn standing(&self, news: bool) -> Standing {
        let Self { all, fresh, unsure, ended, step, resume, residence, .. } = self;
        let (step, resume, residence) = ((*step).into(), (*resume).into(), (*residence).into());
        let mut standing = Standing {
            waiting_tokens: count(all.prefill_tokens),
            prompts: count(all.prompts),
            sequences: count(all.sequences),
            active_blocks: count(all.blocks),
            total_blocks: 0,
            queued: [0; ONBOARDED],
            speeds: Speeds { step, resume, residence, ..Speeds::default() },
        };
        let Some((load, _)) = &self.report else { return standing };
        // A stale report may still say more than the bookings, which know nothing of other routers.
        let join = |reported: u64, of: fn(&Amount) -> u64| {
            let reported = reported.saturating_sub(of(ended));
            count(if news { of(fresh) + reported.max(of(unsure)) } else { reported.max(of(all)) })
        };
        let sequences = u64::from(load.running) + u64::from(load.waiting);
        standing.waiting_tokens = join(load.waiting_tokens, |amount| amount.prefill_tokens);
        // Those in the batch whose prompt is being computed wait, too; of others' the report does not say.
        standing.prompts = join(u64::from(load.waiting), |amount| amount.prompts).max(count(all.prompts));
        standing.sequences = join(sequences, |amount| amount.sequences);
        standing.active_blocks = join(load.active_blocks, |amount| amount.blocks);
        standing.total_blocks = count(load.total_blocks);
        standing.speeds.prefill = load.prefill_tokens_per_second.filter(|speed| *speed > 0.0).into();
        standing.speeds.block_bytes = Some(load.block_bytes as f64).filter(|bytes| *bytes > 0.0).into();
        for speed in load.onboard.iter().filter(|speed| speed.bytes_per_second > 0.0) {
            standing.speeds.onboards(speed.level, speed.latency_seconds, speed.bytes_per_second);
            if let Some(queued) = below(speed.level).and_then(|at| standing.queued.get_mut(at)) {
                *queued = count(speed.queued_blocks);
            }
        }
        standing
    }

    fn book(&mut self, amount: Amount, booked: Instant, elsewhere: bool) -> u64 {
        self.last += 1;
        let nothing = Amount::default();
        let entry = Entry { amount: nothing, booked, sent: None, seen: Seen::No, started: false, elsewhere };
        self.open.insert(self.last, entry);
        self.change(self.last, |entry| entry.amount = amount);
        self.last
    }

    /// Changes a booking, and the sums that it is in.
    fn change(&mut self, number: u64, change: impl FnOnce(&mut Entry)) {
        let Self { open, all, fresh, unsure, elsewhere, .. } = self;
        let Some(entry) = open.get_mut(&number) else { return };
        let mut sums = |entry: &Entry, apply: fn(&mut Amount, Amount)| {
            apply(all, entry.amount);
            match entry.seen {
                Seen::No => apply(fresh, entry.amount),
                Seen::Maybe => apply(unsure, entry.amount),
                Seen::Yes => {}
            }
            if entry.elsewhere {
                apply(elsewhere, entry.amount);
            }
        };
        sums(entry, Amount::sub);
        change(entry);
        sums(entry, Amount::add);
    }
}

impl Amount {
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self.add(other);
        self
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.prefill_tokens += other.prefill_tokens;
        self.prompts += other.prompts;
        self.blocks += other.blocks;
        self.sequences += other.sequences;
    }

    pub(crate) fn sub(&mut self, other: Self) {
        self.prefill_tokens -= other.prefill_tokens;
        self.prompts -= other.prompts;
        self.blocks -= other.blocks;
        self.sequences -= other.sequences;
    }
}

/// As a decision reads it. What is beyond is as good as endless.
fn count(count: u64) -> u32 {
    count.try_into().unwrap_or(u32::MAX)
}

fn average(value: &mut Option<f64>, newest: f64) {
    *value = Some(value.map_or(newest, |value| value + NEWEST * (newest - value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Amount = Amount { prefill_tokens: 100, prompts: 1, blocks: 10, sequences: 1 };

    fn report(waiting_tokens: u64) -> Load {
        Load { waiting_tokens, ..Load::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_booking_counts_until_a_report_can_have_seen_it_and_never_twice() {
        let books = Books::default();
        let number = books.book(REQUEST, Instant::now());
        assert_eq!(books.standing(Instant::now()).waiting_tokens, 100);
        books.sent(number, Instant::now());
        books.report(report(0), Instant::now());
        assert_eq!(books.standing(Instant::now()).waiting_tokens, 100, "the report is as old as the request");
        books.report(report(100), Instant::now());
        assert_eq!(books.standing(Instant::now()).waiting_tokens, 100, "it may be in the report, so it counts once");
        tokio::time::advance(SEEN_AFTER).await;
        books.report(Load { running: 2, active_blocks: 25, ..report(80) }, Instant::now());
        assert_eq!(books.standing(Instant::now()).waiting_tokens, 80);
        books.release(number, Instant::now());
        let standing = books.standing(Instant::now());
        assert_eq!((standing.sequences, standing.active_blocks), (1, 15), "it has ended since the report");
        books.report(Load { running: 1, active_blocks: 15, ..report(0) }, Instant::now());
        assert_eq!(books.standing(Instant::now()).sequences, 1, "the next report knows");
    }

    #[tokio::test(start_paused = true)]
    async fn reading_changes_nothing_and_what_has_started_waits_nowhere() {
        let (books, now) = (Books::default(), Instant::now());
        let number = books.book_elsewhere(REQUEST, now);
        let version = books.version();
        assert_eq!((books.elsewhere(), books.latest(now)), (REQUEST, None));
        assert_eq!(books.version(), version);
        books.started(number);
        assert_eq!(books.elsewhere(), Amount::default());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_sent_yet_counts_whatever_is_reported() {
        let books = Books::default();
        let number = books.book(Amount { prefill_tokens: 0, prompts: 0, ..REQUEST }, Instant::now());
        tokio::time::advance(Duration::from_secs(1)).await;
        books.report(report(0), Instant::now());
        assert_eq!(books.standing(Instant::now()).active_blocks, 10);
        books.amend(number, 100);
        assert_eq!(books.standing(Instant::now()).waiting_tokens, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn without_news_the_bookings_are_what_is_known() {
        let books = Books::default();
        books.report(report(0), Instant::now());
        let number = books.book(REQUEST, Instant::now());
        books.sent(number, Instant::now());
        tokio::time::advance(Duration::from_secs(1)).await;
        books.report(report(0), Instant::now());
        tokio::time::advance(STALE + Duration::from_millis(1)).await;
        assert_eq!(books.standing(Instant::now()).waiting_tokens, 100);
        assert!(!books.silent(Instant::now()));
        tokio::time::advance(SILENT).await;
        assert!(books.silent(Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_token_frees_the_prefill_and_the_end_the_rest() {
        let books = Books::default();
        let number = books.book(REQUEST, Instant::now());
        books.started(number);
        let standing = books.standing(Instant::now());
        assert_eq!((standing.waiting_tokens, standing.active_blocks, standing.sequences), (0, 10, 1));
        tokio::time::advance(Duration::from_secs(2)).await;
        books.release(number, Instant::now());
        let standing = books.standing(Instant::now());
        assert_eq!((standing.active_blocks, standing.sequences), (0, 0));
        assert_eq!(standing.speeds.residence.get(), Some(2.0));
    }
}
