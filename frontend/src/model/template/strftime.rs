//! A subset of C's `strftime` for chat templates, which put the date into prompts. Always UTC, so that replicas in
//! different time zones render the same prompt.

use std::fmt::Write;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a Unix time in seconds. An unknown conversion is copied.
pub(super) fn utc(seconds: u64, format: &str) -> String {
    let days = seconds / 86_400;
    let second = seconds % 86_400;
    let hour = second / 3600;
    let minute = second / 60 % 60;
    let second = second % 60;
    let (year, month, day, of_year) = civil(days);
    let week_day = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut format = format.chars();
    while let Some(c) = format.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut conversion = format.next();
        let padded = conversion != Some('-');
        if !padded {
            conversion = format.next();
        }
        let mut two = |n: u64| if padded { write!(out, "{n:02}") } else { write!(out, "{n}") };
        // Writing to a string cannot fail.
        let _ = match conversion {
            Some('d') => two(day),
            Some('m') => two(month),
            Some('y') => two(year % 100),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('Y') => write!(out, "{year}"),
            Some('B') => write!(out, "{month_name}"),
            Some('b' | 'h') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{week_day}"),
            Some('a') => write!(out, "{}", &week_day[..3]),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('j') => write!(out, "{of_year:03}"),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('%') | None => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
        };
    }
    out
}

/// Year, month, day, and day of the year (from 1) of a day after 1970-01-01.
fn civil(mut days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let of_year = days + 1;
    for (month, length) in (1..).zip([31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]) {
        if days < length {
            return (year, month, days + 1, of_year);
        }
        days -= length;
    }
    unreachable!("a year's months hold all of its days")
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
