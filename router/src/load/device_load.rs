//! What the workers of one device have to compute. They share its speed, so each of them delays the others.

use super::estimate::ServiceEstimate;
use super::prefix_demand::HORIZON;
use std::collections::BTreeMap;
use worker::plane::DeviceId;

/// Load of each device that has several of the workers in a list.
#[derive(Default)]
pub(super) struct DeviceLoads {
    /// For each worker the index of its device in `loads`; `None` if the worker shares its device with no other.
    device_of: Vec<Option<u32>>,
    loads: Vec<DeviceLoad>,
}

/// Sums over the workers of a device. Integers, because rounding errors of a float would add up.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct DeviceLoad {
    /// The queues in microseconds, each limited to [`HORIZON`].
    queued_micros: u64,
    /// Workers with a queue.
    busy: u64,
    /// Requests that wait for their first token.
    prompts: u64,
}

/// What the other workers of a device compute.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct OtherWorkers {
    /// Sum of their queues, in seconds.
    pub(crate) queue: f64,
    /// Those with a queue.
    pub(crate) busy: f64,
    /// Requests that wait there for their first token.
    pub(crate) prompts: f64,
}

impl DeviceLoads {
    /// `devices`: of each worker.
    pub(super) fn of(devices: impl Iterator<Item = Option<DeviceId>>) -> Self {
        let devices: Vec<_> = devices.collect();
        let mut workers = BTreeMap::<DeviceId, u32>::new();
        for device in devices.iter().flatten() {
            *workers.entry(*device).or_default() += 1;
        }
        workers.retain(|_, workers| *workers > 1);
        for (index, value) in (0..).zip(workers.values_mut()) {
            *value = index;
        }
        let device_of = devices.iter().map(|device| workers.get(&(*device)?).copied()).collect();
        Self { device_of, loads: vec![DeviceLoad::default(); workers.len()] }
    }

    /// Whether there is a device with several workers.
    pub(super) fn are_shared(&self) -> bool {
        !self.loads.is_empty()
    }

    /// The load of the worker at an index changes.
    #[inline]
    pub(super) fn change(&mut self, at: usize, from: &ServiceEstimate, to: &ServiceEstimate) {
        if let Some(device) = self.device_of[at] {
            let load = &mut self.loads[device as usize];
            *load = load.plus(&DeviceLoad::of(to)).minus(&DeviceLoad::of(from));
        }
    }

    /// Computes all sums again.
    pub(super) fn recount<'a>(&mut self, workers: impl Iterator<Item = &'a ServiceEstimate>) {
        self.loads.fill(DeviceLoad::default());
        for (device, estimate) in self.device_of.iter().zip(workers) {
            if let Some(load) = device.map(|device| &mut self.loads[device as usize]) {
                *load = load.plus(&DeviceLoad::of(estimate));
            }
        }
    }

    /// What the other workers of the device of a worker compute; `None` if it shares the device with no other.
    #[inline]
    pub(super) fn others(&self, at: usize, own: &ServiceEstimate) -> Option<OtherWorkers> {
        let others = self.loads[self.device_of[at]? as usize].minus(&DeviceLoad::of(own));
        Some(OtherWorkers {
            queue: others.queued_micros as f64 / 1e6,
            busy: others.busy as f64,
            prompts: others.prompts as f64,
        })
    }

    #[cfg(test)]
    pub(super) fn sums(&self) -> Vec<[u64; 3]> {
        self.loads.iter().map(|load| [load.queued_micros, load.busy, load.prompts]).collect()
    }
}

impl DeviceLoad {
    fn of(estimate: &ServiceEstimate) -> Self {
        let queued_micros = (estimate.queue.min(HORIZON) * 1e6) as u64;
        Self { queued_micros, busy: u64::from(queued_micros > 0), prompts: estimate.prompts.into() }
    }

    fn plus(&self, other: &Self) -> Self {
        Self {
            queued_micros: self.queued_micros + other.queued_micros,
            busy: self.busy + other.busy,
            prompts: self.prompts + other.prompts,
        }
    }

    fn minus(&self, other: &Self) -> Self {
        Self {
            queued_micros: self.queued_micros - other.queued_micros,
            busy: self.busy - other.busy,
            prompts: self.prompts - other.prompts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::stats::{LoadStats, Measured, Speeds};

    #[test]
    fn workers_of_a_device_see_what_the_others_compute() {
        let devices = [Some(7), Some(8), Some(7), None, Some(7)].map(|device| device.map(DeviceId));
        let mut loads = DeviceLoads::of(devices.into_iter());
        let speeds = Speeds { prefill: Measured::of(1000.0), ..Speeds::default() };
        let load = |prompts, waiting_tokens| {
            ServiceEstimate::of(&LoadStats { waiting_tokens, prompts, speeds, ..LoadStats::default() })
        };
        let estimates = [load(1, 500), load(9, 9000), load(0, 0), load(9, 9000), load(2, 1500)];
        loads.recount(estimates.iter());
        let others = |loads: &DeviceLoads, at: usize| loads.others(at, &estimates[at]);
        let expected = OtherWorkers { queue: 1.5, busy: 1.0, prompts: 2.0 };
        assert_eq!(others(&loads, 0), Some(expected));
        let expected = OtherWorkers { queue: 2.0, busy: 2.0, prompts: 3.0 };
        assert_eq!(others(&loads, 2), Some(expected));
        assert_eq!((others(&loads, 1), others(&loads, 3)), (None, None), "no other worker has their device");
        assert!(loads.are_shared() && !DeviceLoads::of(devices[..2].iter().copied()).are_shared());
        loads.change(4, &estimates[4], &load(0, 0));
        let expected = OtherWorkers { queue: 0.0, busy: 0.0, prompts: 0.0 };
        assert_eq!(others(&loads, 0), Some(expected));
    }
}
