//! Whose turn it is, where domains share something slower than they are: deficit round robin, weighted.
//!
//! Each group has its queue. In its turn it may take as much as its weight says, and what it could not use for want of size it
//! keeps for its next one; a group that waits for nothing keeps nothing. So whoever comes waits for one turn of each of the
//! others, however many of theirs wait already. After Shreedhar and Varghese, 1995.
//!
//! [`Fair`] is pure. [`Gate`] lets so many through at a time, in that order.
//!
//! Not `manager::offload`'s fair queue: that one serves domains that are not known in advance in batches, is bounded, and
//! drops from the longest queue, whereas DRR serves fixed groups in quanta and saves up credit for a large request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// What a group of weight [`ONE`] may take in a turn: as much as the largest read or write.
const QUANTUM: u64 = 4 << 20;
/// What the smallest request counts as: it takes time, whatever it carries.
const LEAST: u64 = 256 << 10;
/// The weight of a group that nobody weighed.
pub(crate) const ONE: u32 = 100;

/// What waits, by group.
pub(crate) struct Fair<T> {
    groups: Vec<Group<T>>,
    turn: usize,
    waiting: usize,
}

struct Group<T> {
    quantum: u64,
    credit: u64,
    waiting: VecDeque<(u64, T)>,
}

impl<T> Fair<T> {
    /// Nothing waits; groups are numbered as their weights stand here, at least one.
    pub(crate) fn new(weights: &[u32]) -> Self {
        let group = |weight: &u32| Group {
            quantum: (QUANTUM * u64::from(*weight) / u64::from(ONE)).max(1),
            credit: 0,
            waiting: VecDeque::new(),
        };
        let groups = if weights.is_empty() { vec![group(&ONE)] } else { weights.iter().map(group).collect() };
        Self { groups, turn: 0, waiting: 0 }
    }

    /// Lets something wait that takes so much.
    pub(crate) fn push(&mut self, group: u16, cost: u64, item: T) {
        let last = self.groups.len() - 1;
        self.groups[usize::from(group).min(last)].waiting.push_back((cost, item));
        self.waiting += 1;
    }

    /// Whose turn it is, and what is the first of theirs.
    pub(crate) fn first(&mut self) -> Option<(u16, &T)> {
        if self.waiting == 0 {
            return None;
        }
        loop {
            let group = &mut self.groups[self.turn];
            match group.waiting.front() {
                Some((cost, _)) if *cost <= group.credit => break,
                Some(_) => {}
                None => group.credit = 0,
            }
            self.turn = (self.turn + 1) % self.groups.len();
            let group = &mut self.groups[self.turn];
            group.credit = group.credit.saturating_add(group.quantum);
        }
        let turn = self.turn;
        self.groups[turn].waiting.front().map(|(_, item)| (turn as u16, item))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Forgets all that waits.
    pub(crate) fn clear(&mut self) {
        self.groups.iter_mut().for_each(|group| group.waiting.clear());
        self.waiting = 0;
    }

    /// Takes the first of those whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.first()?;
        let group = &mut self.groups[self.turn];
        let (cost, item) = group.waiting.pop_front()?;
        group.credit = if group.waiting.is_empty() { 0 } else { group.credit - cost };
        self.waiting -= 1;
        Some(item)
    }
}

/// Lets so many through at a time.
pub(crate) struct Gate(Mutex<State>);

struct State {
    free: usize,
    waiting: Fair<oneshot::Sender<Pass>>,
}

/// The right to be beyond the gate, until it is dropped.
#[must_use = "dropping it lets the next one through"]
pub(crate) struct Pass(Option<Arc<Gate>>);

impl Gate {
    pub(crate) fn new(at_once: usize, weights: &[u32]) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { free: at_once, waiting: Fair::new(weights) })))
    }

    /// Weighs groups otherwise. To be called before anybody waits.
    pub(crate) fn weigh(&self, weights: &[u32]) {
        self.lock().waiting = Fair::new(weights);
    }

    /// Waits for the group's turn with something that takes so much.
    pub(crate) async fn enter(self: &Arc<Self>, group: u16, cost: u64) -> Pass {
        let turn = {
            let mut state = self.lock();
            if state.free > 0 {
                state.free -= 1;
                return Pass(Some(self.clone()));
            }
            let (lets, turn) = oneshot::channel();
            state.waiting.push(group, cost.max(LEAST), lets);
            turn
        };
        turn.await.expect("the gate grants every waiter")
    }

    fn leave(self: &Arc<Self>) {
        let mut state = self.lock();
        while let Some(next) = state.waiting.pop() {
            match next.send(Pass(Some(self.clone()))) {
                Ok(()) => return,
                // Who waited has gone. Its pass must not come back through here.
                Err(mut pass) => pass.0 = None,
            }
        }
        state.free += 1;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under this lock is a push or a pop with its count.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(gate) = self.0.take() {
            gate.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::sleep;

    /// How much of the first `taken` each group got, when all always wait.
    fn shares(weights: &[u32], costs: &[u64], taken: usize) -> Vec<f64> {
        let mut fair = Fair::new(weights);
        for (group, cost) in (0..).zip(costs) {
            (0..taken).for_each(|_| fair.push(group, *cost, (group, *cost)));
        }
        let mut got = vec![0; weights.len()];
        for _ in 0..taken {
            let (group, cost) = fair.pop().unwrap();
            got[usize::from(group)] += cost;
        }
        let all: u64 = got.iter().sum();
        got.into_iter().map(|got| got as f64 / all as f64).collect()
    }

    #[test]
    fn bytes_are_shared_by_weight_whatever_they_come_in() {
        for costs in [[1 << 20, 1 << 20, 1 << 20], [4 << 20, 64 << 10, 1 << 20], [64 << 10, 9 << 20, 3 << 20]] {
            let got = shares(&[100, 300, 50], &costs, 20_000);
            for (got, right) in got.iter().zip([1.0 / 4.5, 3.0 / 4.5, 0.5 / 4.5]) {
                assert!((got - right).abs() < 0.02, "{costs:?}: {got} of {right}");
            }
        }
    }

    #[test]
    fn a_flood_delays_a_newcomer_by_one_turn_of_its_own_and_order_within_a_group_is_kept() {
        let mut fair = Fair::new(&[ONE, ONE]);
        (0..1_000).for_each(|n| fair.push(0, 1 << 20, (0, n)));
        let first: Vec<_> = (0..6).map(|_| fair.pop().unwrap()).collect();
        assert_eq!(first, (0..6).map(|n| (0, n)).collect::<Vec<_>>(), "nobody else is there");
        (0..3).for_each(|n| fair.push(1, 1 << 20, (1, n)));
        let next: Vec<_> = (0..8).map(|_| fair.pop().unwrap()).collect();
        assert!([(1, 0), (1, 1), (1, 2)].iter().all(|theirs| next.contains(theirs)), "{next:?}");
        assert_eq!(fair.first(), Some((0, &(0, 11))));
    }

    #[test]
    fn who_waits_for_nothing_saves_nothing_and_a_light_group_gets_its_large_one_in_the_end() {
        let mut fair = Fair::new(&[ONE, 1]);
        for n in 0..2_000 {
            fair.push(0, 1 << 20, 0);
            if n == 1_000 {
                fair.push(1, 4 << 20, 1);
            }
            if n < 1_000 {
                fair.pop();
            }
        }
        let order: Vec<u16> = std::iter::from_fn(|| fair.pop()).collect();
        let at = order.iter().position(|group| *group == 1).unwrap();
        assert!((300..500).contains(&at), "a hundredth of what the other gets: after {at}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_lets_so_many_through_in_fair_order_and_forgets_those_who_have_gone() {
        let gate = Gate::new(2, &[ONE, ONE]);
        let done = Arc::new(Mutex::new(Vec::new()));
        let read = |group: u16, n: usize| {
            let (gate, done) = (gate.clone(), done.clone());
            tokio::spawn(async move {
                let pass = gate.enter(group, 4 << 20).await;
                sleep(Duration::from_millis(10)).await;
                done.lock().unwrap().push((group, n));
                drop(pass);
            })
        };
        let flood: Vec<_> = (0..100).map(|n| read(0, n)).collect();
        sleep(Duration::from_millis(15)).await;
        let other: Vec<_> = (0..3).map(|n| read(1, n)).collect();
        flood[10..50].iter().for_each(tokio::task::JoinHandle::abort);
        for reading in other {
            reading.await.unwrap();
        }
        assert!(done.lock().unwrap().len() <= 12, "{:?}", done.lock().unwrap());
        for reading in flood {
            let _ = reading.await;
        }
        assert_eq!(done.lock().unwrap().len(), 63);
        let both = (gate.enter(0, 1).await, gate.enter(1, 1).await);
        assert!(tokio::time::timeout(Duration::from_secs(1), gate.enter(0, 1)).await.is_err(), "only two at once");
        drop(both);
        drop(gate.enter(0, 1).await);
    }
}
