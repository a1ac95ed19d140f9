//! The shutdown timeout of a process: the share of it that running requests get, and what is said of it.

use crate::config::{Config, HumanDuration};
use std::time::Duration;

/// The shutdown timeout by default: orchestrators kill a process after 30 s.
const DEFAULT: Duration = Duration::from_secs(25);

/// Share of the shutdown timeout that running requests get. The remainder is for writing blocks.
pub(super) const REQUEST_SHARE: f64 = 0.8;

/// What ends the wait for running requests.
pub(super) const AT_ONCE: &str = "a second signal stops at once";

/// What the log says of the time that running requests get after the signal to stop.
pub(super) fn request_time(shutdown_timeout: Duration) -> String {
    let time = shutdown_timeout.mul_f64(REQUEST_SHARE).as_secs_f64();
    format!("running ones may finish within {time} s ({})", request_share(shutdown_timeout))
}

/// The share of the shutdown timeout that running requests get, in words.
pub(super) fn request_share(shutdown_timeout: Duration) -> String {
    format!("four fifths of shutdown_timeout = {}", HumanDuration(shutdown_timeout))
}

/// The shutdown timeout of a process that has requests of clients: long enough for the longest one, unless it is
/// configured.
pub(super) fn of_frontend(config: &Config) -> Duration {
    let default = longest_request(config).map_or(DEFAULT, |longest| least_for(longest).0.max(DEFAULT));
    config.shutdown_timeout.map_or(default, |configured| configured.0)
}

/// The shutdown timeout of a worker. Streams that take longer are continued on other workers.
pub(super) fn of_worker(config: &Config) -> Duration {
    config.shutdown_timeout.map_or(DEFAULT, |configured| configured.0)
}

/// Time from the signal to stop until the last request that the frontend allows has ended. `None`: without limit.
fn longest_request(config: &Config) -> Option<Duration> {
    // Requests that arrive at the end of the delay may take as long as others.
    Some(config.frontend.max_request_time?.0 + config.frontend.shutdown_delay.0)
}

/// The least shutdown timeout with time for such a request, in whole seconds.
fn least_for(longest: Duration) -> HumanDuration {
    HumanDuration::secs(longest.div_f64(REQUEST_SHARE).as_secs_f64().ceil() as u64)
}

/// The warning for a configured shutdown timeout that is too short for requests which the frontend allows.
pub(super) fn short_drain(config: &Config) -> Option<String> {
    let (max_time, delay) = (config.frontend.max_request_time?, config.frontend.shutdown_delay);
    let least = least_for(longest_request(config)?);
    (of_frontend(config) < least.0).then(|| {
        format!(
            "a stop ends requests that frontend.max_request_time = {max_time} allows: in {}, new ones are served for \
             frontend.shutdown_delay = {delay}; set shutdown_timeout to at least {least} or leave it out, and the \
             grace period of the orchestrator above it",
            request_share(of_frontend(config))
        )
    })
}

/// What the start of a process says if its shutdown timeout is not the usual one because it follows from the longest
/// request: orchestrators do not know of it.
pub(super) fn long_drain(config: &Config) -> Option<String> {
    let timeout = of_frontend(config);
    (config.shutdown_timeout.is_none() && timeout > DEFAULT).then(|| {
        format!(
            "a stop takes up to {}, because frontend.max_request_time allows such requests; the grace period of the \
             orchestrator must be longer",
            HumanDuration(timeout)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_running_requests_is_four_fifths_of_the_shutdown_timeout() {
        assert_eq!(
            request_time(Duration::from_secs(25)),
            "running ones may finish within 20 s (four fifths of shutdown_timeout = 25s)"
        );
        assert!(request_time(Duration::from_secs(6)).contains("within 4.8 s ("));
    }

    #[test]
    fn by_default_the_shutdown_timeout_is_longer_than_the_longest_request() {
        let mut config = Config::with_cache("".as_ref());
        let of_both = |config: &Config| [of_frontend(config), of_worker(config)].map(|timeout| timeout.as_secs());
        assert_eq!((of_both(&config), long_drain(&config)), ([25, 25], None), "requests have no limit");
        config.frontend.max_request_time = Some(HumanDuration::secs(10));
        assert_eq!((of_both(&config), long_drain(&config)), ([25, 25], None), "short requests");
        config.frontend.max_request_time = Some(HumanDuration::secs(600));
        // Four fifths of it are at least ten minutes and the delay of 5 s.
        assert_eq!((of_both(&config), short_drain(&config)), ([757, 25], None));
        assert!(long_drain(&config).unwrap().contains("up to 757s"));
        config.shutdown_timeout = Some(HumanDuration::secs(40));
        assert_eq!((of_both(&config), long_drain(&config)), ([40, 40], None));
    }

    #[test]
    fn a_shutdown_timeout_below_the_longest_request_is_a_warning() {
        let mut config = Config::with_cache("".as_ref());
        config.shutdown_timeout = Some(HumanDuration::secs(25));
        assert_eq!(short_drain(&config), None, "requests have no limit to compare with");
        config.frontend.max_request_time = Some(HumanDuration::secs(600));
        let warning = short_drain(&config).unwrap();
        assert!(warning.contains("max_request_time = 10m") && warning.contains("shutdown_timeout = 25s"), "{warning}");
        assert!(warning.contains("at least 757s"), "{warning}");
        config.shutdown_timeout = Some(HumanDuration::secs(757));
        assert_eq!(short_drain(&config), None);
    }
}
