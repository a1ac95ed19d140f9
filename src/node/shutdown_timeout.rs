//! The shutdown timeout of a process: the share of it that running requests get, and what is said of it.

use crate::config::{Config, HumanDuration};
use std::time::Duration;

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

/// The warning for a shutdown timeout that is too short for requests which the frontend allows.
pub(super) fn short_drain(config: &Config) -> Option<String> {
    let max_time = config.frontend.max_request_time?;
    let delay = config.frontend.shutdown_delay;
    // Requests that arrive at the end of the delay may take as long as others.
    let longest = max_time.0 + delay.0;
    let least = HumanDuration::secs(longest.div_f64(REQUEST_SHARE).as_secs_f64().ceil() as u64);
    (config.shutdown_timeout < least).then(|| {
        format!(
            "a stop ends requests that frontend.max_request_time = {max_time} allows: in {}, new ones are served for \
             frontend.shutdown_delay = {delay}; set shutdown_timeout to at least {least}, and the grace period of the \
             orchestrator above it",
            request_share(config.shutdown_timeout.0)
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
    fn a_shutdown_timeout_below_the_longest_request_is_a_warning() {
        let mut config = Config::with_cache("".as_ref());
        assert_eq!(short_drain(&config), None, "requests have no limit to compare with");
        config.frontend.max_request_time = Some(HumanDuration::secs(600));
        let warning = short_drain(&config).unwrap();
        assert!(warning.contains("max_request_time = 10m") && warning.contains("shutdown_timeout = 25s"), "{warning}");
        // Four fifths of it are at least ten minutes and the delay of 5 s.
        assert!(warning.contains("at least 757s"), "{warning}");
        config.shutdown_timeout = HumanDuration::secs(757);
        assert_eq!(short_drain(&config), None);
    }
}
