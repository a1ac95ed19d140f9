//! Copies of a prefix that many requests share: what a further one saves.

use super::cost::{Cost, RemainingWork};
use crate::load::{HORIZON, ServiceEstimate, SharedPrefix, WorkerSequences};

/// A shared prefix and its copies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Replication {
    pub(crate) shared: SharedPrefix,
    /// Workers that hold it.
    pub(crate) copies: u32,
    /// Mean number of sequences on these, and mean queue in seconds.
    holder_sequences: f64,
    holder_queue: f64,
    /// Mean number of sequences on the other workers.
    other_sequences: f64,
    /// By how many sequences the holders stay above the other workers while the prefix is asked for as often as now,
    /// wherever the prompts without it go.
    lasting_excess: f64,
    /// Time for which a larger excess lasts, ÷ [`HORIZON`].
    transient: f64,
    /// Seconds that the expected requests save for each sequence by which a worker has fewer than the holders.
    per_sequence: f64,
    /// Requests per second that a further copy takes from the holders; 0 when there is nothing to share, because no
    /// worker has the prefix, or all have.
    rate: f64,
}

impl Replication {
    /// `holders`: the workers that hold the prefix; `all`: these and all others. `per_sequence`: seconds that a request
    /// and the sequences beside it save, on average, for each sequence fewer on its worker.
    pub(crate) fn of<'a>(
        shared: SharedPrefix,
        holders: impl Iterator<Item = &'a ServiceEstimate>,
        all: WorkerSequences,
        per_sequence: f64,
    ) -> Self {
        let (mut copies, mut sequences, mut queue, mut duration) = (0_u32, 0_u64, 0.0, 0.0);
        for holder in holders {
            copies += 1;
            sequences += u64::from(holder.sequences);
            queue += holder.queue;
            duration += holder.mean_duration;
        }
        let others = all.workers.saturating_sub(copies);
        let other_sequences = all.sequences.saturating_sub(sequences);
        let may_copy = copies > 0 && others > 0;
        let share = if may_copy { f64::from(copies + 1).recip() } else { 0.0 };
        let holders = f64::from(copies.max(1));
        // With the mean number of sequences on all workers: those of the prefix are on its holders, and the rest is on
        // the others.
        let (sequences_of_all, workers) = (all.sequences as f64, f64::from(all.workers));
        let on_holder = shared.share * sequences_of_all / holders;
        let on_other = (1.0 - shared.share) * sequences_of_all / (workers - holders).max(1.0);
        Self {
            shared,
            copies,
            lasting_excess: (on_holder - on_other).max(0.0),
            transient: (duration / holders / HORIZON).min(1.0),
            holder_sequences: sequences as f64 / holders,
            holder_queue: queue / holders,
            other_sequences: other_sequences as f64 / f64::from(others.max(1)),
            // The difference shrinks as the copy takes its share: half of it is saved on average.
            per_sequence: per_sequence / 2.0 * shared.requests * share,
            rate: shared.per_second() * share,
        }
    }

    /// Whether a further copy can take a share of the requests.
    pub(crate) fn may_copy(&self) -> bool {
        self.rate > 0.0
    }

    /// What later requests save when a worker with this load computes the prefix, as a negative cost. It is at most
    /// what the placement costs because the worker does not have the prefix.
    ///
    /// The number of sequences on a single worker changes within seconds, because later requests go where there are
    /// fewer. A difference between the means of the workers with the prefix and of those without it lasts, so this is
    /// what counts.
    pub(crate) fn saving(&self, work: &RemainingWork, estimate: &ServiceEstimate, cost: &Cost) -> f64 {
        if work.shared <= 0.0 {
            return 0.0;
        }
        let caused = (cost.prefill + cost.decode_stall + cost.queue_externality) * work.shared;
        -self.saved_at(self.other_sequences, estimate.queue).min(caused)
    }

    /// The most that [`saving`](Self::saving) is for any worker: for one without a queue.
    pub(crate) fn max_saved(&self) -> f64 {
        if self.may_copy() { self.saved_at(self.other_sequences, 0.0) } else { 0.0 }
    }

    /// Share of the time to compute a further copy that later requests save, at most 1; 0 if no copy can be made.
    /// `copy_seconds`: that time; `None` before prompts were measured.
    pub(crate) fn repaid(&self, copy_seconds: Option<f64>) -> f64 {
        match (self.may_copy(), copy_seconds) {
            (false, _) => 0.0,
            (true, None) => 1.0,
            (true, Some(seconds)) => (self.max_saved() / seconds).min(1.0),
        }
    }

    /// Seconds that later requests save when a worker with this load has a copy.
    pub(crate) fn saved(&self, estimate: &ServiceEstimate) -> f64 {
        self.saved_at(estimate.sequences.into(), estimate.queue)
    }

    fn saved_at(&self, sequences: f64, queue: f64) -> f64 {
        let fewer = (self.holder_sequences - sequences).max(0.0);
        let lasting = fewer.min(self.lasting_excess);
        // More than the prefix causes is gone when these sequences end, because other prompts go elsewhere.
        let fewer = lasting + (fewer - lasting) * self.transient;
        // The holders' queue stays longer for as many seconds as it is longer now, and the difference shrinks in that
        // time: the requests that come then save half of it on average.
        let shorter = (self.holder_queue - queue).max(0.0);
        self.per_sequence * fewer + self.rate * shorter * shorter / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::WorkerOverlap;
    use crate::load::LoadStats;
    use crate::policy::prompt::Prompt;

    const PROMPT: Prompt = Prompt { tokens: 1000, block_size: 10, blocks: 110, output_tokens: 100.0 };
    const SHARED: SharedPrefix = SharedPrefix { blocks: 80, requests: 600.0, share: 0.9 };

    fn with_queue(queue: f64) -> ServiceEstimate {
        let mut estimate = ServiceEstimate::of(&LoadStats::default());
        estimate.queue = queue;
        estimate
    }

    /// A fleet of `workers` workers, of which some hold the prefix and have these queues. The others are idle.
    fn fleet(holders: &[f64], workers: usize) -> Vec<(bool, ServiceEstimate)> {
        let holders = holders.iter().map(|queue| (true, with_queue(*queue)));
        let mut all: Vec<_> = holders.collect();
        all.resize_with(workers, || (false, with_queue(0.0)));
        all
    }

    fn replication(fleet: &[(bool, ServiceEstimate)], per_sequence: f64) -> Replication {
        replication_of(SHARED, fleet, per_sequence)
    }

    fn replication_of(shared: SharedPrefix, fleet: &[(bool, ServiceEstimate)], per_sequence: f64) -> Replication {
        let holders = fleet.iter().filter(|(holds, _)| *holds).map(|(_, worker)| worker);
        let all = fleet.iter().map(|(_, worker)| worker).collect();
        Replication::of(shared, holders, all, per_sequence)
    }

    /// What a copy saves on a worker with an empty queue, for requests of two seconds.
    fn saving(holders: &[f64], workers: usize) -> f64 {
        let work = RemainingWork::of(PROMPT, WorkerOverlap::default(), None, SHARED.blocks);
        let cost = Cost { prefill: 2.0, ..Cost::default() };
        replication(&fleet(holders, workers), 0.0).saving(&work, &with_queue(0.0), &cost)
    }

    #[test]
    fn requests_that_come_while_the_holders_queue_is_longer_save_its_half() {
        // Ten requests per second, of which a second copy takes five: half a second for half of that, 0.25 s each.
        assert!((saving(&[0.5], 4) + 5.0 * 0.5 * 0.25).abs() < 1e-9, "{}", saving(&[0.5], 4));
        assert!(saving(&[0.5, 0.5], 4) > saving(&[0.5], 4), "a third copy takes fewer");
        assert!(saving(&[0.0], 4).abs() < 1e-9, "there is nothing to save");
    }

    #[test]
    fn a_copy_saves_at_most_what_it_costs() {
        // Eight tenths of the prompt are the prefix.
        assert!((saving(&[9.0], 4) + 1.6).abs() < 1e-9, "{}", saving(&[9.0], 4));
    }

    #[test]
    fn sequences_on_one_worker_do_not_count_but_those_on_the_workers_without_the_prefix() {
        let saving = |sequences: [u32; 4]| {
            let mut all = fleet(&[0.0, 0.0], 4);
            all.iter_mut().zip(sequences).for_each(|((_, worker), sequences)| worker.sequences = sequences);
            let work = RemainingWork::of(PROMPT, WorkerOverlap::default(), None, SHARED.blocks);
            let cost = Cost { prefill: 1e6, ..Cost::default() };
            let (_, worker) = &all[2];
            replication(&all, 1.0).saving(&work, worker, &cost)
        };
        assert!(saving([10, 10, 0, 20]).abs() < 1e-9, "later requests go where there are fewer");
        // A third of the requests runs beside six sequences fewer, of which half counts.
        assert!((saving([10, 10, 0, 8]) + SHARED.requests / 3.0 * 6.0 / 2.0).abs() < 1e-6);
    }

    #[test]
    fn more_sequences_than_the_prefix_causes_count_until_they_end() {
        // Two holders of four workers, with twelve sequences each.
        let saving = |share: f64| {
            let mut all = fleet(&[0.0, 0.0], 4);
            all.iter_mut().zip([12, 12, 0, 0]).for_each(|((_, worker), sequences)| {
                worker.sequences = sequences;
                worker.mean_duration = 6.0;
            });
            let work = RemainingWork::of(PROMPT, WorkerOverlap::default(), None, SHARED.blocks);
            let cost = Cost { prefill: 1e6, ..Cost::default() };
            replication_of(SharedPrefix { share, ..SHARED }, &all, 1.0).saving(&work, &with_queue(0.0), &cost)
        };
        let (per_sequence, is) = (SHARED.requests / 3.0 / 2.0, |saving: f64, sequences: f64, per_sequence: f64| {
            assert!((saving + sequences * per_sequence).abs() < 1e-6, "{saving}");
        });
        is(saving(1.0), 12.0, per_sequence);
        // Three quarters of the prompts ask for it: nine sequences on each holder, three on each other worker. The six
        // seconds of a request are a tenth of the horizon.
        is(saving(0.75), 6.0 + 6.0 / 10.0, per_sequence);
        is(saving(0.5), 12.0 / 10.0, per_sequence);
        is(saving(0.1), 12.0 / 10.0, per_sequence);
    }

    #[test]
    fn a_copy_repays_a_share_of_its_time() {
        let fleet = fleet(&[1.0], 2);
        let replication = replication(&fleet, 0.0);
        let saved = replication.max_saved();
        assert!(saved > 0.0);
        let repays = |seconds, share: f64| (replication.repaid(seconds) - share).abs() < 1e-9;
        assert!(repays(Some(4.0 * saved), 0.25) && repays(Some(saved / 2.0), 1.0) && repays(None, 1.0));
    }

    #[test]
    fn there_is_nothing_to_copy_without_a_holder_or_when_all_hold_it() {
        let may_copy = |holders: &[f64]| replication(&fleet(holders, 2), 1.0).may_copy();
        assert!(!may_copy(&[]) && may_copy(&[1.0]) && !may_copy(&[1.0, 1.0]));
        assert!(replication(&fleet(&[], 2), 1.0).repaid(None) < 1e-9);
    }
}
