//! Python's `strftime` for chat templates, which put the date into prompts. Always UTC, so that replicas in different
//! time zones render the same prompt.

use chrono::DateTime;
use chrono::format::StrftimeItems;

/// Formats a Unix time in seconds. An unknown conversion is copied, as Python does on Linux.
pub(super) fn utc(seconds: u64, format: &str) -> String {
    let time = i64::try_from(seconds).ok().and_then(DateTime::from_timestamp_secs).unwrap_or_default();
    // Lenient items contain no error, which `to_string` would panic on.
    time.format_with_items(StrftimeItems::new_lenient(format)).to_string()
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0, "%A, %d %B %Y %H:%M:%S %p"), "Thursday, 01 January 1970 00:00:00 AM");
        assert_eq!(utc(951_782_400, "%a %-d %b %y, day %j"), "Tue 29 Feb 00, day 060");
        assert_eq!(utc(1_798_761_599, "%F %T %I%p %%"), "2026-12-31 23:59:59 11PM %");
        assert_eq!(utc(0, "%Q%"), "%Q%");
    }
}
