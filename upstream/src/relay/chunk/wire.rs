//! The members of chunks that are read, as they stand in JSON.

use super::response_id;
use crate::relay::splice;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// The top level of a chunk.
#[derive(Deserialize)]
pub(super) struct Wire<'a> {
    #[serde(borrow, default)]
    pub(super) choices: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
    #[serde(borrow, default)]
    r#type: Option<&'a RawValue>,
    /// `message_start` has its usage in here.
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    /// `response.completed` has its usage in here.
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
    /// Cohere's `message-end` has its usage and the finish reason in here.
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    /// SGLang's `/generate` has its usage in here, that of one item of a batch.
    #[serde(borrow, default)]
    meta_info: Option<&'a RawValue>,
    /// The position of that item.
    #[serde(borrow, default)]
    index: Option<&'a RawValue>,
}

/// A message or a response within an event, or what Cohere's `message-end` has.
#[derive(Default, Deserialize)]
pub(super) struct Inner<'a> {
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
}

impl Inner<'_> {
    pub(super) fn response_id(&self) -> Option<u64> {
        let written = self.id?.get().strip_prefix('"')?.strip_suffix('"')?;
        Some(response_id(written.as_bytes()))
    }
}

impl<'a> Wire<'a> {
    pub(super) fn event_type(&self) -> Option<&'a str> {
        self.r#type?.get().strip_prefix('"')?.strip_suffix('"')
    }

    pub(super) fn is_error(&self) -> bool {
        let object = self.object.is_some_and(|object| object.get() == r#""error""#);
        object
            || self.error.is_some()
            || matches!(self.event_type(), Some("error" | "response.failed"))
            || self.end().and_then(|end| end.finish_reason).is_some_and(|reason| reason.get() == r#""ERROR""#)
    }

    /// The message or the response that an event is about.
    pub(super) fn inner(&self) -> Inner<'a> {
        let inner = self.message.or(self.response);
        inner.and_then(|inner| serde_json::from_str(inner.get()).ok()).unwrap_or_default()
    }

    /// The usage at the end of a stream of Cohere's API.
    pub(super) fn end_usage(&self) -> Option<&'a RawValue> {
        self.end()?.usage
    }

    /// The end of a stream of Cohere's API.
    fn end(&self) -> Option<Inner<'a>> {
        let delta = self.delta.filter(|_| self.event_type() == Some("message-end"))?;
        serde_json::from_str(delta.get()).ok()
    }

    /// The usage of an item of a batch, and the position of the item.
    pub(super) fn item(&self) -> Option<(u64, &'a RawValue)> {
        let index = self.index.and_then(|index| number(index.get().as_bytes()));
        self.meta_info.map(|usage| (index.unwrap_or_default(), usage))
    }
}

/// The `usage` object of all APIs. A number of tokens is `None` for null and for anything that is no such number.
#[derive(Default, Debug)]
#[expect(clippy::struct_field_names, reason = "these are the names of the APIs")]
pub(super) struct WireUsage {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    pub(super) input_tokens: Option<u64>,
    pub(super) output_tokens: Option<u64>,
    pub(super) total_tokens: Option<u64>,
    pub(super) cache_read_input_tokens: Option<u64>,
    pub(super) cache_creation_input_tokens: Option<u64>,
    /// In `prompt_tokens_details`, or in `input_tokens_details`; of SGLang's `/generate` beside the other numbers.
    pub(super) cached_tokens: Option<u64>,
}

impl WireUsage {
    /// Reads an object. Every answer has one, so that it is read without a parser for types.
    pub(super) fn read(json: &[u8]) -> Option<Self> {
        let mut usage = Self::default();
        splice::each_member(json, |name, value| usage.set(name, value)).ok()?;
        Some(usage)
    }

    /// Reads the value of a member.
    pub(super) fn set(&mut self, name: &[u8], value: &[u8]) {
        let field = match name {
            b"prompt_tokens" => &mut self.prompt_tokens,
            b"completion_tokens" => &mut self.completion_tokens,
            b"input_tokens" => &mut self.input_tokens,
            b"output_tokens" => &mut self.output_tokens,
            b"total_tokens" => &mut self.total_tokens,
            b"cache_read_input_tokens" => &mut self.cache_read_input_tokens,
            b"cache_creation_input_tokens" => &mut self.cache_creation_input_tokens,
            b"prompt_tokens_details" | b"input_tokens_details" => {
                self.cached_tokens = cached_tokens(value).or(self.cached_tokens);
                return;
            }
            // Cohere's. Beside them are those that it bills.
            b"tokens" => {
                let _ = splice::each_member(value, |name, value| match name {
                    b"input_tokens" => self.input_tokens = number(value),
                    b"output_tokens" => self.output_tokens = number(value),
                    _ => {}
                });
                return;
            }
            b"cached_tokens" => {
                self.cached_tokens = number(value).or(self.cached_tokens);
                return;
            }
            _ => return,
        };
        *field = number(value);
    }
}

/// `cached_tokens` of the details of a usage. Null has none.
fn cached_tokens(details: &[u8]) -> Option<u64> {
    let mut cached = None;
    let read = splice::each_member(details, |name, value| {
        if name == b"cached_tokens" {
            cached = number(value);
        }
    });
    read.ok().and(cached)
}

/// A whole number that is not negative. In Cohere's API it may end with `.0`.
pub(super) fn number(json: &[u8]) -> Option<u64> {
    let json = json.strip_suffix(b".0").unwrap_or(json);
    let digit = |byte: &u8| byte.is_ascii_digit().then(|| u64::from(byte - b'0'));
    let (first, others) = json.split_first()?;
    others.iter().try_fold(digit(first)?, |number, byte| number.checked_mul(10)?.checked_add(digit(byte)?))
}

/// What the choices of a chunk have in common.
#[derive(Clone, Copy)]
pub(super) struct Choices {
    pub(super) count: usize,
    pub(super) output: bool,
    /// One of them has a finish reason.
    pub(super) finished: bool,
}

impl Choices {
    /// Choices of another shape.
    pub(super) const UNKNOWN: Self = Self { count: 1, output: true, finished: true };
}

impl<'de> Deserialize<'de> for Choices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ChoicesVisitor)
    }
}

struct ChoicesVisitor;

impl<'de> Visitor<'de> for ChoicesVisitor {
    type Value = Choices;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("choices")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut choices: A) -> Result<Choices, A::Error> {
        let mut all = Choices { count: 0, output: false, finished: false };
        while let Some(choice) = choices.next_element::<Choice>()? {
            let output = choice.text.0 || choice.delta.is_some_and(|delta| delta.0);
            all.count += 1;
            all.output |= output || choice.finish_reason.0;
            all.finished |= choice.finish_reason.0;
        }
        Ok(all)
    }
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    finish_reason: Filled,
}

/// Whether a delta has any output. Engines add members of their own (`reasoning_content`, `reasoning`, `audio`), so
/// each counts, except for the role.
struct Delta(bool);

impl<'de> Deserialize<'de> for Delta {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DeltaVisitor)
    }
}

struct DeltaVisitor;

impl<'de> Visitor<'de> for DeltaVisitor {
    type Value = Delta;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a delta")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Delta, A::Error> {
        let mut output = false;
        while let Some(name) = members.next_key::<IsRole>()? {
            let filled = members.next_value::<Filled>()?;
            output |= filled.0 && !name.0;
        }
        Ok(Delta(output))
    }
}

/// Whether a name is `role`. Reading it as text would copy a name with escapes.
struct IsRole(bool);

impl<'de> Deserialize<'de> for IsRole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = IsRole;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<IsRole, E> {
                Ok(IsRole(name == "role"))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

/// Whether a value is anything but null, `false`, an empty string, array or object.
#[derive(Default)]
struct Filled(bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FilledVisitor)
    }
}

struct FilledVisitor;

impl<'de> Visitor<'de> for FilledVisitor {
    type Value = Filled;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Filled, E> {
        Ok(Filled(false))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Filled, E> {
        Ok(Filled(value))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Filled, E> {
        Ok(Filled(true))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Filled, E> {
        Ok(Filled(true))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Filled, E> {
        Ok(Filled(true))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Filled, E> {
        Ok(Filled(!value.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Filled, A::Error> {
        let filled = values.next_element::<IgnoredAny>()?.is_some();
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Filled(filled))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Filled, A::Error> {
        let filled = members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some();
        while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Filled(filled))
    }
}
