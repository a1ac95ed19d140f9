//! Edits of the top-level members of a JSON object, on its bytes.
//!
//! A request body can be megabytes of prompt of which the gateway changes two small members. The body is scanned once,
//! the edits are noted, and the result is assembled from slices of the original. Everything that is not edited keeps
//! its bytes: whitespace, escapes, numbers of any precision, the order of members.
//!
//! Not here: validation of nested values. Their brackets and strings are matched, which suffices to find where a
//! top-level member ends. The engine parses the body anyway and rejects what is malformed inside.

mod scan;

use bytes::Bytes;
use scan::{Scanner, name_starts_with, names};
use std::ops::Range;

/// Maximum number of levels of nesting. Python's parser, which most engines use, gives up at about 1000, others at 128.
const MAX_DEPTH: usize = 512;
/// Maximum number of top-level members. The OpenAI API has about 40, engines add about as many.
const MAX_MEMBERS: usize = 1024;
/// Members of most bodies, for which there is room from the start.
const FEW_MEMBERS: usize = 8;

/// A JSON object whose top level was scanned, and the edits of its members.
///
/// Names of members are given as ASCII text and match however the body writes them (`"model"`, `"mod\u0065l"`). Of
/// members with the same name the last counts, as in Python.
#[derive(Clone, Debug)]
pub struct Splice {
    body: Bytes,
    members: Vec<Member>,
    /// Members that the body does not have.
    added: Vec<(String, Bytes)>,
    /// Position of the closing brace.
    close: usize,
}

/// Why a body cannot be edited.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpliceError {
    /// The body is not a JSON object.
    #[error("invalid JSON at byte {at}: expected {expected}")]
    Syntax {
        /// Offset from the start of the body.
        at: usize,
        /// What would have been right there.
        expected: &'static str,
    },
    /// More than 512 levels of arrays and objects.
    #[error("invalid JSON at byte {at}: nested too deeply")]
    TooDeep {
        /// Offset from the start of the body.
        at: usize,
    },
    /// More than 1024 top-level members.
    #[error("invalid JSON at byte {at}: too many members")]
    TooManyMembers {
        /// Offset from the start of the body.
        at: usize,
    },
    /// A member inside of this one was to be set.
    #[error("{name}: not an object")]
    NotAnObject {
        /// The member's name.
        name: String,
    },
}

#[derive(Clone, Debug)]
struct Member {
    /// Everything between the delimiters (`{`, `,`, `}`) around the member, whitespace included.
    piece: Range<usize>,
    /// The name as written, without its quotes.
    name: Range<usize>,
    value: Range<usize>,
    edit: Edit,
}

#[derive(Clone, Debug)]
enum Edit {
    Keep,
    Remove,
    Replace(Bytes),
}

impl Splice {
    /// Scans the top level of `body`.
    pub fn scan(body: Bytes) -> Result<Self, SpliceError> {
        let mut members = Vec::with_capacity(FEW_MEMBERS);
        let close = scan_members(&body, |member| members.push(member))?;
        Ok(Self { body, members, added: Vec::new(), close })
    }

    /// The value of a member as JSON, edits included.
    pub fn get(&self, name: &str) -> Option<Bytes> {
        let added = || self.added.iter().find(|(added, _)| added == name).map(|(_, json)| json.clone());
        let member = self.named(name).next_back();
        member.map_or_else(added, |member| match &member.edit {
            Edit::Replace(json) => Some(json.clone()),
            _ => Some(self.body.slice(member.value.clone())),
        })
    }

    /// The position of a member's value in the original body. `None` if the body has no such member, or no longer.
    pub fn range(&self, name: &str) -> Option<Range<usize>> {
        self.named(name).next_back().map(|member| member.value.clone())
    }

    /// Removes all members of this name.
    pub fn remove(&mut self, name: &str) {
        let Self { body, members, added, .. } = self;
        for member in members.iter_mut().filter(|member| names(&body[member.name.clone()], name)) {
            member.edit = Edit::Remove;
        }
        added.retain(|(added, _)| added != name);
    }

    /// Removes all members whose names start with `prefix`.
    pub fn remove_prefix(&mut self, prefix: &str) {
        let Self { body, members, added, .. } = self;
        for member in members.iter_mut().filter(|member| name_starts_with(&body[member.name.clone()], prefix)) {
            member.edit = Edit::Remove;
        }
        added.retain(|(added, _)| !added.starts_with(prefix));
    }

    /// Sets a member to a JSON value. Afterwards it occurs once, so that no engine can read another occurrence.
    ///
    /// `name` must need no escape in JSON, and `json` must be valid JSON.
    pub fn set(&mut self, name: &str, json: impl Into<Bytes>) {
        debug_assert!(name.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'"' && byte != b'\\'));
        let json = json.into();
        let Self { body, members, added, .. } = self;
        let mut found = false;
        let present = |member: &&mut Member| !matches!(member.edit, Edit::Remove);
        let named = |member: &&mut Member| names(&body[member.name.clone()], name);
        for member in members.iter_mut().rev().filter(present).filter(named) {
            let same = body[member.value.clone()] == json;
            member.edit = match (found, same) {
                (true, _) => Edit::Remove,
                (false, true) => Edit::Keep,
                (false, false) => Edit::Replace(json.clone()),
            };
            found = true;
        }
        if found {
            return;
        }
        match added.iter_mut().find(|(added, _)| added == name) {
            Some((_, value)) => *value = json,
            None => added.push((name.to_owned(), json)),
        }
    }

    /// Sets a member of the object that is the value of `name`, and keeps the object's other members. An absent or null
    /// object is created.
    pub fn set_in(&mut self, name: &str, inner: &str, json: impl Into<Bytes>) -> Result<(), SpliceError> {
        let object = match self.get(name) {
            None => Bytes::from_static(b"{}"),
            Some(value) if value == "null" => Bytes::from_static(b"{}"),
            Some(value) if value.starts_with(b"{") => value,
            Some(_) => return Err(SpliceError::NotAnObject { name: name.to_owned() }),
        };
        let offset = self.range(name).map_or(0, |range| range.start);
        let mut object = Self::scan(object).map_err(|error| error.moved(offset))?;
        object.set(inner, json);
        self.set(name, object.finish());
        Ok(())
    }

    /// The edited body. Without edits these are the original bytes, not a copy.
    pub fn finish(self) -> Bytes {
        if self.added.is_empty() && self.members.iter().all(|member| matches!(member.edit, Edit::Keep)) {
            return self.body;
        }
        let replaced =
            self.members.iter().map(|member| if let Edit::Replace(json) = &member.edit { json.len() } else { 0 });
        let added = self.added.iter().map(|(name, json)| name.len() + json.len() + r#","":"#.len());
        let mut out = Vec::with_capacity(self.body.len() + replaced.sum::<usize>() + added.sum::<usize>());

        let open = self.members.first().map_or(self.close, |member| member.piece.start);
        out.extend_from_slice(&self.body[..open]);
        let mut first = true;
        let mut delimit = |out: &mut Vec<u8>| {
            if !std::mem::take(&mut first) {
                out.push(b',');
            }
        };
        for member in &self.members {
            let replacement = match &member.edit {
                Edit::Remove => continue,
                Edit::Keep => None,
                Edit::Replace(json) => Some(json),
            };
            delimit(&mut out);
            out.extend_from_slice(&self.body[member.piece.start..member.value.start]);
            out.extend_from_slice(replacement.map_or(&self.body[member.value.clone()], |json| json));
            out.extend_from_slice(&self.body[member.value.end..member.piece.end]);
        }
        for (name, json) in &self.added {
            delimit(&mut out);
            out.push(b'"');
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":");
            out.extend_from_slice(json);
        }
        out.extend_from_slice(&self.body[self.close..]);
        out.into()
    }

    /// The members of this name that are not removed.
    fn named(&self, name: &str) -> impl DoubleEndedIterator<Item = &Member> {
        let present = |member: &&Member| !matches!(member.edit, Edit::Remove);
        self.members.iter().filter(present).filter(move |member| names(&self.body[member.name.clone()], name))
    }
}

/// Calls `take` with the name of each top-level member of an object, as written between its quotes, and with its value.
pub(crate) fn each_member(object: &[u8], mut take: impl FnMut(&[u8], &[u8])) -> Result<(), SpliceError> {
    scan_members(object, |Member { name, value, .. }| take(&object[name], &object[value])).map(|_| ())
}

/// Calls `take` with each top-level member of an object. Returns the position of its closing brace.
fn scan_members(body: &[u8], mut take: impl FnMut(Member)) -> Result<usize, SpliceError> {
    let mut scanner = Scanner::new(body);
    scanner.expect(b'{', "an object")?;
    let mut start = scanner.position();
    let mut is_last = scanner.accept(b'}');
    let mut count = 0;
    while !is_last {
        if count == MAX_MEMBERS {
            return Err(SpliceError::TooManyMembers { at: scanner.position() });
        }
        count += 1;
        let name = scanner.string("a name")?;
        scanner.expect(b':', "a colon")?;
        let value = scanner.value()?;
        is_last = !scanner.accept(b',');
        if is_last {
            scanner.expect(b'}', "a comma or a closing brace")?;
        }
        let after = scanner.position();
        take(Member { piece: start..after - 1, name, value, edit: Edit::Keep });
        start = after;
    }
    let close = scanner.position() - 1;
    scanner.end()?;
    Ok(close)
}

impl SpliceError {
    /// The error of a part of the body that starts at `offset`.
    fn moved(self, offset: usize) -> Self {
        match self {
            Self::Syntax { at, expected } => Self::Syntax { at: at + offset, expected },
            Self::TooDeep { at } => Self::TooDeep { at: at + offset },
            Self::TooManyMembers { at } => Self::TooManyMembers { at: at + offset },
            other @ Self::NotAnObject { .. } => other,
        }
    }
}

#[cfg(test)]
mod tests;
