//! Long runs in virtual time: the share of each class of an overloaded fleet.

use super::*;
use units::HumanDuration;

/// Tokens per second of the worker, which computes one request at a time.
const SPEED: f64 = 1000.0;

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Load: tokens per second by class, in requests of up to `size` tokens, and the limit of the queue.
#[derive(Clone, Debug)]
struct Overload {
    offered: [f64; 3],
    size: u64,
    queue: u64,
    tenants: u64,
    seed: u64,
}

/// Tokens served of each class, and the number of requests that timed out, over this many seconds.
fn run(overload: &Overload, seconds: f64) -> ([u64; 3], usize) {
    let limits = Settings { max_queue_time: HumanDuration::secs(60), ..limits(overload.queue) };
    let mut queue = FairQueue::default();
    let mut random = Random(overload.seed);
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs_f64(seconds);
    let mut arrivals = [0.0_f64; 3];
    let mut served = [0; 3];
    let mut timed_out = 0;
    let mut last_poll = 0.0;
    let mut of = HashMap::new();
    let mut idle_at = 0.0;
    let mean = overload.size.div_ceil(2) as f64;
    loop {
        let class = (0..3).min_by(|a, b| arrivals[*a].total_cmp(&arrivals[*b])).unwrap();
        let now: f64 = arrivals[class];
        if now > seconds {
            return (served, timed_out);
        }
        while idle_at <= now {
            timed_out += std::iter::from_fn(|| queue.pop_expired(at(idle_at))).count();
            if idle_at - last_poll >= 0.25 {
                last_poll = idle_at;
                queue.pop_predicted_timeouts(at(idle_at));
            }
            match queue.admit_next(&limits, at(idle_at), |_, _| OPEN) {
                Some(number) => {
                    let (class, tokens): (usize, u64) = of[&number];
                    served[class] += tokens;
                    idle_at += tokens as f64 / SPEED;
                    queue.leave(number);
                }
                None => idle_at = now + 1e-6,
            }
        }
        let priority = [Priority::Low, Priority::Normal, Priority::High][class];
        let tokens = 1 + (random.next() * overload.size as f64) as u64;
        let tenant = (random.next() * overload.tenants as f64) as u64;
        let mut one = with(priority, request(&tenant.to_string(), tokens));
        (one.placed, one.ticket.queue_deadline) = (at(now), at(now + limits.max_queue_time.as_secs_f64()));
        if let Enqueued::Queued { number, .. } = queue.admit_or_queue(&limits, one, None, at(now)) {
            of.insert(number, (class, tokens));
        }
        arrivals[class] -= random.next().max(1e-9).ln() * mean / overload.offered[class];
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every class is offered as much as the worker can do: each lower one gets a tenth of what those above it get.
    #[test]
    fn each_class_gets_its_share_of_a_full_queue(
        size in 20..1000u64,
        places in 20..200u64,
        tenants in 1..6u64,
        seed: u64,
    ) {
        let overload = Overload { offered: [SPEED; 3], size, queue: size * places, tenants, seed };
        // About three thousand requests are served.
        let seconds = 1500.0 * size as f64 / SPEED;
        let ([low, normal, high], timed_out) = run(&overload, seconds);
        let total = (low + normal + high) as f64;
        prop_assert!(total >= 0.99 * seconds * SPEED, "the worker was idle: {total}");
        prop_assert!(low as f64 >= 0.095 * (normal + high) as f64, "{low} {normal} {high}");
        prop_assert!(normal as f64 >= 0.095 * high as f64, "{low} {normal} {high}");
        prop_assert!(high as f64 >= 0.8 * total, "{low} {normal} {high}");
        // Of about nine thousand, most of them when the queue filled and the inflow of higher classes was unknown.
        prop_assert!(timed_out <= 450, "{timed_out} timed out");
    }
}

/// A reported case: low and high priority, three times the capacity, and a queue for forty requests.
#[test]
fn low_class_gets_a_tenth_at_three_times_capacity() {
    let overload =
        Overload { offered: [0.5 * SPEED, 1e-6, 2.5 * SPEED], size: 1500, queue: 60_000, tenants: 1, seed: 7 };
    let ([low, _, high], _) = run(&overload, 3000.0);
    assert!(low as f64 >= 0.095 * high as f64, "{low} of low, {high} of high");
}
