//! The results of checks, and how they are printed.

use crate::commands::output::count;
use crate::process::log_fields::controls_terminal;
use serde::Serialize;
use std::fmt::Write;
use std::time::SystemTime;
use transport::CertificateExpiry;

/// The result of one check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Check {
    /// What was checked.
    pub check: &'static str,
    /// On what: the URL of a server, `this machine`, or `configuration`.
    pub target: String,
    /// The result.
    pub status: Status,
    /// What was found.
    pub detail: String,
    /// What to change; always set for a warning or a problem.
    pub fix: Option<String>,
}

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// `serve` works, but worse than it could.
    Warning,
    /// `serve` does not start, or does not do what is configured.
    Problem,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }

    /// The terminal's sequence for its colour.
    fn colour(self) -> &'static str {
        match self {
            Self::Ok => "\x1b[32m",
            Self::Warning => "\x1b[33m",
            Self::Problem => "\x1b[31m",
        }
    }
}

/// Checks when a certificate expires. `fix`: how to renew it.
pub(super) fn expiry(check: &'static str, expiry: &CertificateExpiry, fix: &str, findings: &mut Findings) {
    let now = SystemTime::now();
    let days = |day: &str| count(expiry.days_left(now), day);
    if expiry.at <= now {
        findings.problem(check, "the certificate has expired: clients refuse it", fix);
    } else if expiry.warn_from <= now {
        findings.warning(check, format!("the certificate expires in {}", days("day")), fix);
    } else {
        findings.ok(check, format!("the certificate is valid for {}", days("more day")));
    }
}

/// The checks of one target.
#[derive(Debug)]
pub(super) struct Findings {
    target: String,
    checks: Vec<Check>,
}

impl Findings {
    pub(super) fn of(target: impl Into<String>) -> Self {
        Self { target: target.into(), checks: Vec::new() }
    }

    pub(super) fn ok(&mut self, check: &'static str, detail: impl Into<String>) {
        self.push(check, Status::Ok, detail.into(), None);
    }

    pub(super) fn warning(&mut self, check: &'static str, detail: impl Into<String>, fix: impl Into<String>) {
        self.push(check, Status::Warning, detail.into(), Some(fix.into()));
    }

    pub(super) fn problem(&mut self, check: &'static str, detail: impl Into<String>, fix: impl Into<String>) {
        self.push(check, Status::Problem, detail.into(), Some(fix.into()));
    }

    /// A problem if `is_problem`, else a warning.
    pub(super) fn wrong(&mut self, is_problem: bool, check: &'static str, detail: String, fix: impl Into<String>) {
        let status = if is_problem { Status::Problem } else { Status::Warning };
        self.push(check, status, detail, Some(fix.into()));
    }

    pub(super) fn into_checks(self) -> Vec<Check> {
        self.checks
    }

    fn push(&mut self, check: &'static str, status: Status, detail: String, fix: Option<String>) {
        self.checks.push(Check { check, target: self.target.clone(), status, detail, fix });
    }
}

/// One line per check, and one more for what to change. Checks of one target stand below its name.
pub(super) fn table(checks: &[Check], is_terminal: bool) -> String {
    let width = checks.iter().map(|check| check.check.len()).max().unwrap_or_default();
    let mut text = String::new();
    let mut target = "";
    for check in checks {
        if check.target != target {
            target = &check.target;
            writeln!(text, "{target}").expect("a string takes everything");
        }
        let status = format!("{:<7}", check.status.name());
        let status = if is_terminal { format!("{}{status}\x1b[0m", check.status.colour()) } else { status };
        // Texts of servers may have lines and terminal sequences.
        writeln!(text, "  {status}  {:<width$}  {}", check.check, printable(&check.detail))
            .expect("a string takes everything");
        if let Some(fix) = &check.fix {
            writeln!(text, "  {:7}  {:width$}  fix: {}", "", "", printable(fix)).expect("a string takes everything");
        }
    }
    let of = |status: Status| checks.iter().filter(|check| check.status == status).count() as u64;
    let some = |status: Status| count(of(status), status.name());
    text + &format!("{} ok, {}, {}\n", of(Status::Ok), some(Status::Warning), some(Status::Problem))
}

fn printable(text: &str) -> String {
    text.chars().map(|char| if controls_terminal(char) { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_certificate_is_a_warning_before_it_expires() {
        let day = Duration::from_hours(24);
        let of = |at: SystemTime| {
            let mut findings = Findings::of("x");
            expiry("tls_certificate", &CertificateExpiry { at, warn_from: at - 14 * day }, "renew it", &mut findings);
            findings.into_checks().remove(0).status
        };
        let now = SystemTime::now();
        assert_eq!([now + 20 * day, now + 13 * day, now - day].map(of), [Status::Ok, Status::Warning, Status::Problem]);
        let mut findings = Findings::of("x");
        let tomorrow = CertificateExpiry { at: now + day + day / 2, warn_from: now };
        expiry("tls_certificate", &tomorrow, "renew it", &mut findings);
        assert_eq!(findings.into_checks()[0].detail, "the certificate expires in 1 day");
    }

    #[test]
    fn the_table_is_aligned_and_shows_each_fix() {
        let mut findings = Findings::of("http://a/");
        findings.ok("dns", "10.0.0.1");
        findings.problem("api_key", "the server\nanswers \x1b[31m401", "set api_key_file");
        let checks = findings.into_checks();
        let expected = "http://a/\n\
            \x20 ok       dns      10.0.0.1\n\
            \x20 problem  api_key  the server answers  [31m401\n\
            \x20                   fix: set api_key_file\n\
            1 ok, 0 warnings, 1 problem\n";
        assert_eq!(table(&checks, false), expected);
        assert!(table(&checks, true).contains("\x1b[31mproblem\x1b[0m  api_key"));
    }

    #[test]
    fn a_check_is_an_object_of_json() {
        let mut findings = Findings::of("http://a/");
        findings.warning("clock", "3 s", "run NTP");
        let json = serde_json::to_string(&findings.into_checks()).unwrap();
        let expected = r#"[{"check":"clock","target":"http://a/","status":"warning","detail":"3 s","fix":"run NTP"}]"#;
        assert_eq!(json, expected);
    }
}
