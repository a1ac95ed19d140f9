//! How fast the waiting room drains: measured only while somebody waits, because what passes an empty room says nothing of
//! what the fleet can do. Pure: the time is passed in.

use std::time::Duration;
use tokio::time::Instant;

/// Prompt tokens per second.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Rate {
    per_second: Option<f64>,
    /// The window that is being measured: since when, and how much.
    window: Option<(Instant, u64)>,
}

/// Long enough for some prompts of a slow worker.
const WINDOW: Duration = Duration::from_secs(2);
/// How much a new window counts: the last five or so decide.
const NEWEST: f64 = 0.2;

impl Rate {
    /// Somebody begins to wait, or does again.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.window.get_or_insert((now, 0));
    }

    /// So many tokens went.
    pub(crate) fn granted(&mut self, tokens: u64) {
        if let Some((_, sum)) = &mut self.window {
            *sum += tokens;
        }
    }

    /// Time passes.
    pub(crate) fn pass(&mut self, now: Instant) {
        let Some((since, tokens)) = self.window.filter(|(since, _)| now - *since >= WINDOW) else { return };
        let newest = tokens as f64 / (now - since).as_secs_f64();
        self.per_second = Some(self.per_second.map_or(newest, |value| value + NEWEST * (newest - value)));
        self.window = Some((now, 0));
    }

    /// Nobody waits any more. What was measured stands.
    pub(crate) fn end(&mut self) {
        self.window = None;
    }

    /// How long it takes for so many tokens to go, if that is known.
    pub(crate) fn seconds(&self, tokens: u64) -> Option<f64> {
        // Nothing at all moved: then nobody can say.
        self.per_second.filter(|rate| *rate > 0.0).map(|rate| tokens as f64 / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_is_measured_only_while_somebody_waits_and_forgets_slowly() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(rate.seconds(100), None);
        rate.begin(start);
        rate.granted(1000);
        rate.pass(at(1));
        assert_eq!(rate.seconds(100), None, "the window is not over");
        rate.pass(at(2));
        assert_eq!(rate.seconds(100), Some(0.2));
        rate.end();
        rate.granted(1_000_000);
        rate.pass(at(1000));
        assert_eq!(rate.seconds(100), Some(0.2), "an empty room says nothing");
        rate.begin(at(1000));
        rate.begin(at(1001));
        rate.pass(at(1002));
        assert_eq!(rate.seconds(100), Some(0.25), "a fifth slower, though somebody began to wait again");
    }
}
