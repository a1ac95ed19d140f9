//! Types of values that are written as text: sizes of tiers, addresses, models, workers, threads. Each error says what
//! is expected. Not here: durations and sizes (crate `units`).

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::num::NonZero;
use std::path::PathBuf;
use std::str::FromStr;
use units::ByteSize;
use worker::llama::Builtin;
use worker::plane::Role;

/// Size of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Budget {
    /// A share of what the machine has available.
    #[default]
    Auto,
    /// There is no such tier.
    Off,
    /// A fixed size.
    Bytes(ByteSize),
}

/// Address to listen on: `host:port`, or a port alone, which only this machine can reach.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listen {
    /// A name or an address, without the brackets of IPv6.
    pub host: String,
    /// 0: the system chooses a free port.
    pub port: u16,
}

/// The served model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Model {
    /// A built-in model, by name.
    BuiltIn(Builtin),
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// Number of workers of each role: `"prefill:1,decode:2"`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Workers(Vec<(Role, usize)>);

/// Number of compute threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// As many as this machine runs at the same time.
    Auto,
    /// A fixed number.
    Count(NonZero<usize>),
}

/// An invalid value; the message says what is expected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Bytes(size) => size.fmt(f),
        }
    }
}

impl FromStr for Budget {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text.trim() {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            size => match size.parse() {
                Ok(ByteSize(0)) => Ok(Self::Off),
                Ok(size) => Ok(Self::Bytes(size)),
                Err(_) => {
                    let bytes = size.parse().map(|bytes| format!("; write {bytes} bytes as \"{}\"", ByteSize(bytes)));
                    let hint = bytes.unwrap_or_default();
                    Err(Invalid(format!(r#"expected a size with its unit, like "4GiB", or "auto" or "off"{hint}"#)))
                }
            },
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl FromStr for Listen {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = || Invalid(r#"expected an address with a port, like "127.0.0.1:8000" or "0.0.0.0:8000""#.into());
        let (host, port) = text.trim().rsplit_once(':').unwrap_or(("127.0.0.1", text.trim()));
        let port = port.parse().map_err(|_| wrong())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        match bare.unwrap_or(host) {
            "" => Err(wrong()),
            host if bare.is_none() && host.contains(':') => Err(wrong()),
            host => Ok(Self { host: host.into(), port }),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn(model) => f.write_str(model.name()),
            Self::Folder(path) => path.display().fmt(f),
        }
    }
}

impl FromStr for Model {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match Builtin::named(text) {
            Some(model) => Ok(Self::BuiltIn(model)),
            None if text.is_empty() => Err(Invalid("expected a model folder, or `tiny`, `small` or `bench`".into())),
            None => Ok(Self::Folder(text.into())),
        }
    }
}

impl Workers {
    /// Limit of workers in one process. A larger number is most likely a mistake.
    const MAX: usize = 64;

    /// One worker that prefills and decodes.
    pub(super) fn one() -> Self {
        Self(vec![(Role::Both, 1)])
    }

    /// The role of each worker, prefill first.
    pub fn roles(&self) -> impl Iterator<Item = Role> {
        self.0.iter().flat_map(|(role, count)| std::iter::repeat_n(*role, *count))
    }

    /// Number of workers; at least one.
    pub fn count(&self) -> usize {
        self.0.iter().map(|(_, count)| count).sum()
    }
}

impl Default for Workers {
    /// One prefill worker and two decode workers: the smallest fleet with both disaggregation and routing.
    fn default() -> Self {
        Self(vec![(Role::Prefill, 1), (Role::Decode, 2)])
    }
}

impl fmt::Display for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(n, (role, count))| {
            let comma = if n == 0 { "" } else { "," };
            write!(f, "{comma}{role}:{count}")
        })
    }
}

impl FromStr for Workers {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::roles_of(text, Self::MAX)
    }
}

impl Workers {
    /// Parses the number of workers of each role, at most `most` in all. At least one must decode.
    pub(crate) fn of(text: &str, most: usize) -> Result<Self, Invalid> {
        let workers = Self::roles_of(text, most)?;
        if workers.any_decodes() { Ok(workers) } else { Err(Invalid(Self::NONE_DECODES.into())) }
    }

    /// The problem of a fleet in which no worker decodes.
    pub(super) const NONE_DECODES: &str = "no worker would decode; add `decode:1`, or use `both:1`";

    /// Whether a worker decodes.
    pub(super) fn any_decodes(&self) -> bool {
        self.roles().any(|role| role != Role::Prefill)
    }

    fn roles_of(text: &str, most: usize) -> Result<Self, Invalid> {
        let wrong = || {
            Invalid(
                r#"expected roles with the number of workers of each, like "prefill:1,decode:2" or "both:1""#.into(),
            )
        };
        let mut counts = [(Role::Prefill, 0_usize), (Role::Decode, 0), (Role::Both, 0)];
        for part in text.split(',') {
            let (name, count) = part.trim().split_once(':').ok_or_else(wrong)?;
            let entry = counts.iter_mut().find(|(role, _)| role.to_string() == name.trim()).ok_or_else(wrong)?;
            let count: usize = count.trim().parse().map_err(|_| wrong())?;
            entry.1 = entry.1.saturating_add(count);
        }
        let workers = Self(counts.into_iter().filter(|(_, count)| *count > 0).collect());
        if workers.roles().nth(most).is_some() {
            return Err(Invalid(format!("at most {most} workers fit into one process")));
        }
        let has_workers = workers.count() > 0;
        has_workers.then_some(workers).ok_or_else(|| Invalid("there would be no worker; expected `both:1`".into()))
    }
}

impl Threads {
    /// Limit of compute threads: above any machine, since each thread has a stack.
    const MAX: usize = 4096;

    /// The number of threads on a machine with `here` hardware threads.
    pub fn on(self, here: usize) -> usize {
        match self {
            Self::Auto => here,
            Self::Count(count) => count.get(),
        }
    }
}

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => count.fmt(f),
        }
    }
}

impl FromStr for Threads {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let count =
            || Some(Self::Count(text.trim().parse().ok().filter(|count: &NonZero<usize>| count.get() <= Self::MAX)?));
        let threads = if text.trim() == "auto" { Some(Self::Auto) } else { count() };
        threads.ok_or_else(|| Invalid(format!("expected a number of threads, at most {}, or `auto`", Self::MAX)))
    }
}

/// Written and read as text; numbers are accepted where the text may be one.
macro_rules! as_text {
    ($($kind:ty),+) => {$(
        impl Serialize for $kind {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_any(Text).and_then(|text| text.parse().map_err(de::Error::custom))
            }
        }
    )+};
}
as_text!(Budget, Listen, Model, Workers, Threads);

struct Text;

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text or a number")
    }

    fn visit_str<E>(self, text: &str) -> Result<String, E> {
        Ok(text.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_i64<E>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_f64<E>(self, number: f64) -> Result<String, E> {
        Ok(number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads<T: FromStr<Err = Invalid> + fmt::Display>(text: &str) -> String {
        text.parse::<T>().map_or_else(|error| format!("error: {error}"), |value| value.to_string())
    }

    #[test]
    fn a_budget_is_automatic_off_or_a_size() {
        for (text, printed) in [("auto", "auto"), ("off", "off"), ("0", "off"), ("0GiB", "off"), ("1GiB", "1GiB")] {
            assert_eq!(reads::<Budget>(text), printed);
        }
        assert!(reads::<Budget>("none").contains("off"));
        assert!(reads::<Budget>("65536").contains("\"64KiB\""), "a number without a unit");
    }

    #[test]
    fn a_port_alone_listens_on_loopback() {
        for (text, printed) in
            [("0.0.0.0:80", "0.0.0.0:80"), ("9000", "127.0.0.1:9000"), ("[::1]:1", "[::1]:1"), ("box:0", "box:0")]
        {
            assert_eq!(reads::<Listen>(text), printed);
        }
        for text in ["", "localhost", ":80", "a:70000", "::1:80"] {
            assert!(reads::<Listen>(text).starts_with("error"), "{text}");
        }
    }

    #[test]
    fn workers_are_counted_by_role_and_one_must_decode() {
        assert_eq!(reads::<Workers>("decode:2, prefill:1"), "prefill:1,decode:2");
        assert_eq!("both:3".parse::<Workers>().unwrap().roles().collect::<Vec<_>>(), [Role::Both; 3]);
        assert_eq!(Workers::default().to_string(), "prefill:1,decode:2");
        for (text, hint) in [
            ("both:0", "no worker"),
            ("both:65", "at most 64"),
            ("prefil:1", "like"),
            ("3", "like"),
            ("both:-1", "like"),
        ] {
            assert!(reads::<Workers>(text).contains(hint), "{text}: {}", reads::<Workers>(text));
        }
        assert!(Workers::of("prefill:2", 9).is_err_and(|error| error.to_string().contains("no worker would decode")));
    }
}
