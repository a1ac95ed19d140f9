//! Weighted deficit round robin (DRR) between the groups of cache domains that share a device.
//!
//! Source: Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995. Each group has a
//! queue. In each round it may spend a quantum proportional to its weight, and keeps unspent credit for the next round
//! while its queue is not empty. So a new group waits for one round at most, however long the other queues are.
//!
//! [`DrrQueue`] is pure. [`FairSemaphore`] grants permits in DRR order.
//!
//! Not `manager::offload`'s fair queue: that one serves domains that are not known in advance in batches, is bounded,
//! and drops from the longest queue, whereas DRR serves fixed groups in quanta and saves up credit for a large request.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Bytes that a group of weight [`DEFAULT_WEIGHT`] may transfer in a round: the size of the largest read or write.
const QUANTUM: u64 = 4 << 20;
/// Minimum cost of a request in bytes: small requests take time, too.
const MIN_COST: u64 = 256 << 10;
/// The default weight, in hundredths.
pub(crate) const DEFAULT_WEIGHT: u32 = 100;

/// Queued items by group.
pub(crate) struct DrrQueue<T> {
    groups: Vec<Group<T>>,
    /// The group whose round it is.
    current: usize,
    /// Number of queued items of all groups.
    len: usize,
}

struct Group<T> {
    /// Bytes added to the credit in each round.
    quantum: u64,
    /// Bytes that the group may transfer now: the deficit counter of DRR.
    credit: u64,
    /// Cost in bytes and item.
    queue: VecDeque<(u64, T)>,
}

impl<T> DrrQueue<T> {
    /// An empty queue with a group for each of `weights` (in hundredths), and with at least one group.
    pub(crate) fn new(weights: &[u32]) -> Self {
        let group = |weight: &u32| Group {
            quantum: (QUANTUM * u64::from(*weight) / u64::from(DEFAULT_WEIGHT)).max(1),
            credit: 0,
            queue: VecDeque::new(),
        };
        let groups =
            if weights.is_empty() { vec![group(&DEFAULT_WEIGHT)] } else { weights.iter().map(group).collect() };
        Self { groups, current: 0, len: 0 }
    }

    /// Appends an item of `cost` bytes to a group's queue.
    pub(crate) fn push(&mut self, group: u16, cost: u64, item: T) {
        let last = self.groups.len() - 1;
        self.groups[usize::from(group).min(last)].queue.push_back((cost, item));
        self.len += 1;
    }

    /// The next item and its group.
    pub(crate) fn first(&mut self) -> Option<(u16, &T)> {
        if self.len == 0 {
            return None;
        }
        loop {
            let group = &mut self.groups[self.current];
            match group.queue.front() {
                Some((cost, _)) if *cost <= group.credit => break,
                Some(_) => {}
                None => group.credit = 0,
            }
            self.current = (self.current + 1) % self.groups.len();
            let group = &mut self.groups[self.current];
            group.credit = group.credit.saturating_add(group.quantum);
        }
        let current = self.current;
        self.groups[current].queue.front().map(|(_, item)| (current as u16, item))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all items.
    pub(crate) fn clear(&mut self) {
        self.groups.iter_mut().for_each(|group| group.queue.clear());
        self.len = 0;
    }

    /// Removes the next item.
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.first()?;
        let group = &mut self.groups[self.current];
        let (cost, item) = group.queue.pop_front()?;
        group.credit = if group.queue.is_empty() { 0 } else { group.credit - cost };
        self.len -= 1;
        Some(item)
    }
}

/// A semaphore that grants permits to waiting groups in DRR order.
pub(crate) struct FairSemaphore(Mutex<State>);

struct State {
    /// Permits that are not granted.
    free: usize,
    waiting: DrrQueue<oneshot::Sender<Permit>>,
}

/// A permit of a [`FairSemaphore`]. Drop returns it.
#[must_use = "dropping it returns the permit"]
pub(crate) struct Permit(Option<Arc<FairSemaphore>>);

impl FairSemaphore {
    pub(crate) fn new(permits: usize, weights: &[u32]) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { free: permits, waiting: DrrQueue::new(weights) })))
    }

    /// Replaces the weights of the groups, in hundredths. Must be called before the first request waits.
    pub(crate) fn set_weights(&self, weights: &[u32]) {
        self.lock().waiting = DrrQueue::new(weights);
    }

    /// Waits for a permit for a transfer of `cost` bytes.
    pub(crate) async fn acquire(self: &Arc<Self>, group: u16, cost: u64) -> Permit {
        let granted = {
            let mut state = self.lock();
            if state.free > 0 {
                state.free -= 1;
                return Permit(Some(self.clone()));
            }
            let (grant, granted) = oneshot::channel();
            state.waiting.push(group, cost.max(MIN_COST), grant);
            granted
        };
        granted.await.expect("the semaphore grants every waiter")
    }

    fn release(self: &Arc<Self>) {
        let mut state = self.lock();
        while let Some(next) = state.waiting.pop() {
            match next.send(Permit(Some(self.clone()))) {
                Ok(()) => return,
                // The waiter was cancelled. Its permit must not be returned: the next waiter gets it.
                Err(mut permit) => permit.0 = None,
            }
        }
        state.free += 1;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under this lock is one push or pop with its count.
        self.0.lock()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(semaphore) = self.0.take() {
            semaphore.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::sleep;

    /// Fraction of the bytes of the first `taken` items that each group gets, when all queues are always full.
    fn shares(weights: &[u32], costs: &[u64], taken: usize) -> Vec<f64> {
        let mut queue = DrrQueue::new(weights);
        for (group, cost) in (0..).zip(costs) {
            (0..taken).for_each(|_| queue.push(group, *cost, (group, *cost)));
        }
        let mut got = vec![0; weights.len()];
        for _ in 0..taken {
            let (group, cost) = queue.pop().unwrap();
            got[usize::from(group)] += cost;
        }
        let all: u64 = got.iter().sum();
        got.into_iter().map(|got| got as f64 / all as f64).collect()
    }

    #[test]
    fn bytes_are_shared_by_weight_for_any_item_sizes() {
        for costs in [[1 << 20, 1 << 20, 1 << 20], [4 << 20, 64 << 10, 1 << 20], [64 << 10, 9 << 20, 3 << 20]] {
            let got = shares(&[100, 300, 50], &costs, 20_000);
            for (got, right) in got.iter().zip([1.0 / 4.5, 3.0 / 4.5, 0.5 / 4.5]) {
                assert!((got - right).abs() < 0.02, "{costs:?}: {got} of {right}");
            }
        }
    }

    #[test]
    fn a_flood_delays_a_new_group_by_one_round() {
        let mut queue = DrrQueue::new(&[DEFAULT_WEIGHT, DEFAULT_WEIGHT]);
        (0..1_000).for_each(|n| queue.push(0, 1 << 20, (0, n)));
        let first: Vec<_> = (0..6).map(|_| queue.pop().unwrap()).collect();
        assert_eq!(first, (0..6).map(|n| (0, n)).collect::<Vec<_>>(), "the only group, in its order");
        (0..3).for_each(|n| queue.push(1, 1 << 20, (1, n)));
        let next: Vec<_> = (0..8).map(|_| queue.pop().unwrap()).collect();
        assert!([(1, 0), (1, 1), (1, 2)].iter().all(|theirs| next.contains(theirs)), "{next:?}");
        assert_eq!(queue.first(), Some((0, &(0, 11))));
    }

    #[test]
    fn an_empty_queue_saves_no_credit_and_a_light_group_is_served() {
        let mut queue = DrrQueue::new(&[DEFAULT_WEIGHT, 1]);
        for n in 0..2_000 {
            queue.push(0, 1 << 20, 0);
            if n == 1_000 {
                queue.push(1, 4 << 20, 1);
            }
            if n < 1_000 {
                queue.pop();
            }
        }
        let order: Vec<u16> = std::iter::from_fn(|| queue.pop()).collect();
        let at = order.iter().position(|group| *group == 1).unwrap();
        assert!((300..500).contains(&at), "a hundredth of the other group's bytes: after {at}");
    }

    #[tokio::test(start_paused = true)]
    async fn permits_are_limited_fair_and_skip_cancelled_waiters() {
        let semaphore = FairSemaphore::new(2, &[DEFAULT_WEIGHT, DEFAULT_WEIGHT]);
        let done = Arc::new(Mutex::new(Vec::new()));
        let read = |group: u16, n: usize| {
            let semaphore = semaphore.clone();
            let done = done.clone();
            tokio::spawn(async move {
                let permit = semaphore.acquire(group, 4 << 20).await;
                sleep(Duration::from_millis(10)).await;
                done.lock().push((group, n));
                drop(permit);
            })
        };
        let flood: Vec<_> = (0..100).map(|n| read(0, n)).collect();
        sleep(Duration::from_millis(15)).await;
        let other: Vec<_> = (0..3).map(|n| read(1, n)).collect();
        flood[10..50].iter().for_each(tokio::task::JoinHandle::abort);
        for reading in other {
            reading.await.unwrap();
        }
        assert!(done.lock().len() <= 12, "{:?}", done.lock());
        for reading in flood {
            let _ = reading.await;
        }
        assert_eq!(done.lock().len(), 63);
        let both = (semaphore.acquire(0, 1).await, semaphore.acquire(1, 1).await);
        assert!(
            tokio::time::timeout(Duration::from_secs(1), semaphore.acquire(0, 1)).await.is_err(),
            "only two at once"
        );
        drop(both);
        drop(semaphore.acquire(0, 1).await);
    }
}
