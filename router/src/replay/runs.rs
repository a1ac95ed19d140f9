//! Runs of policies at request rates, several at a time.

use super::clairvoyant;
use super::options::{Options, PolicyUnderTest};
use super::results::Results;
use super::simulation::{RunError, Simulation};
use super::traffic::Traffic;
use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// What is replayed: policies at request rates, each with several seeds.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    /// The requests.
    pub traffic: &'a Traffic,
    /// The fleet.
    pub options: &'a Options,
    /// How the worker of a request is chosen.
    pub policies: &'a [PolicyUnderTest],
    /// Requests per second.
    pub rates: &'a [f64],
    /// One run for each seed.
    pub seeds: Range<u64>,
    /// Runs at the same time. Results do not depend on it.
    pub threads: NonZero<usize>,
    /// Whether the best results that an offline search finds are added, under the name [`CLAIRVOYANT`].
    pub clairvoyant: bool,
}

/// Name of the results of the offline search, which knows all arrivals and output lengths.
pub const CLAIRVOYANT: &str = "clairvoyant";

impl Runs<'_> {
    /// Replays everything. Returns the results by rate, then by policy: the mean over the seeds. `progress` is called
    /// with each of them when it is known.
    pub fn replay(&self, progress: impl Fn(&Results) + Sync) -> Result<Vec<Results>, RunError> {
        let Self { traffic, options, policies, rates, .. } = self;
        let seeds: Vec<u64> = self.seeds.clone().collect();
        let run = |at: usize, rate: f64, seed: u64| -> Result<Results, RunError> {
            let outcome = Simulation::new(&traffic.at(rate, seed), options, &policies[at], rate, seed)?.run()?;
            Ok(outcome.results(rate, options.slo))
        };
        let names: Vec<&str> = policies.iter().map(PolicyUnderTest::name).collect();
        let by_policy = self.each(&seeds, &names, run, &progress)?;
        let mut found = Vec::new();
        if self.clairvoyant {
            let search = |_, rate: f64, seed: u64| {
                let of_run = |at: usize| {
                    let rate_at = rates.iter().position(|it| it.to_bits() == rate.to_bits()).unwrap_or(0);
                    let seed_at = seeds.iter().position(|it| *it == seed).unwrap_or(0);
                    (&policies[at], &by_policy[rate_at * policies.len() + at][seed_at])
                };
                let results: Vec<_> = (0..policies.len()).map(of_run).collect();
                clairvoyant::best_found(&traffic.at(rate, seed), options, rate, seed, &results)
            };
            found = self.each(&seeds, &[CLAIRVOYANT], search, &progress)?;
        }
        let mut found = found.into_iter();
        let mut all = Vec::new();
        for of_rate in by_policy.chunks(policies.len().max(1)) {
            all.extend(names.iter().zip(of_rate).map(|(name, runs)| mean(name, runs)));
            all.extend(found.next().map(|runs| mean(CLAIRVOYANT, &runs)));
        }
        Ok(all)
    }

    /// Does `run` for each rate, name and seed. Returns the results of all seeds by rate, then by name.
    fn each(
        &self,
        seeds: &[u64],
        names: &[&str],
        run: impl Fn(usize, f64, u64) -> Result<Results, RunError> + Sync,
        progress: &(impl Fn(&Results) + Sync),
    ) -> Result<Vec<Vec<Results>>, RunError> {
        let cells: Vec<(f64, usize)> =
            self.rates.iter().flat_map(|rate| (0..names.len()).map(|name| (*rate, name))).collect();
        let runs = cells.len() * seeds.len();
        let next = AtomicUsize::new(0);
        let finished: Mutex<Vec<Vec<Option<Results>>>> = Mutex::new(vec![vec![None; seeds.len()]; cells.len()]);
        let work = || -> Result<(), RunError> {
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                if nth >= runs {
                    return Ok(());
                }
                let (cell, seed) = (nth / seeds.len(), nth % seeds.len());
                let (rate, name) = cells[cell];
                // After an error the other threads end with their current run.
                let results = run(name, rate, seeds[seed]).inspect_err(|_| next.store(runs, Ordering::Relaxed))?;
                let mut finished = finished.lock().unwrap_or_else(PoisonError::into_inner);
                finished[cell][seed] = Some(results);
                if let Some(of_cell) = finished[cell].iter().cloned().collect::<Option<Vec<Results>>>() {
                    progress(&mean(names[name], &of_cell));
                }
            }
        };
        thread::scope(|scope| {
            let start = |_| thread::Builder::new().spawn_scoped(scope, work);
            let threads: Vec<_> = (0..self.threads.get().min(runs)).map(start).collect();
            // All of them are waited for, with the first error.
            let ended = threads.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join().expect("a run does not panic"),
                Err(error) => Err(RunError::Thread(error)),
            });
            ended.collect::<Vec<_>>().into_iter().collect::<Result<(), _>>()
        })?;
        let finished = finished.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(finished.into_iter().map(|of_cell| of_cell.into_iter().flatten().collect()).collect())
    }
}

fn mean(name: &str, runs: &[Results]) -> Results {
    Results { policy: name.to_owned(), ..Results::mean_of_runs(runs) }
}
