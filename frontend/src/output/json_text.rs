//! The length of the text in JSON that arrives in parts. Nothing is allocated but a name of a few bytes.

use memchr::memchr2;

/// Members whose values are files in base64, or their URLs. Models write no text into these.
const FILES: [&[u8]; 9] =
    [b"audio", b"b64", b"b64_json", b"base64", b"data", b"embedding", b"image", b"images", b"url"];
/// Length of the longest of these names.
const NAME_MAX: usize = 9;
/// Minimum length of a file: more than the names of members, which may follow its name too.
const FILE_MIN: usize = 64;

/// Counts the bytes of all strings of a JSON text, without files in base64.
#[derive(Default)]
pub(super) struct JsonText {
    /// Of the strings that have ended.
    ended: usize,
    /// Length of the latest string.
    length: usize,
    /// Its beginning.
    start: [u8; NAME_MAX],
    /// The latest name is one of [`FILES`].
    is_of_file: bool,
    /// The latest string follows such a name, and all of it up to here is printable ASCII without white space.
    may_be_file: bool,
    at: At,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Default)]
enum At {
    #[default]
    Between,
    String,
    /// It follows a backslash in a string.
    Escape,
}

/// Counts the bytes of the top-level member `text` of a JSON object.
#[derive(Default)]
pub(super) struct TextMember {
    bytes: usize,
    /// Number of open brackets.
    depth: usize,
    /// The latest name, or the beginning of it.
    name: Vec<u8>,
    /// The value of this name comes next, or is read.
    is_value: bool,
    is_in_string: bool,
    is_escaped: bool,
}

impl JsonText {
    /// Counts a part of the text.
    pub(super) fn add(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let read = match self.at {
                At::Between => self.between(part),
                At::String => self.string(part),
                At::Escape => {
                    self.read(b"\\");
                    self.at = At::String;
                    1
                }
            };
            part = &part[read..];
        }
    }

    /// The bytes of text so far.
    pub(super) fn bytes(&self) -> usize {
        self.ended + if matches!(self.at, At::Between) { 0 } else { self.text() }
    }

    /// Reads on outside of strings. Returns the number of bytes that were read.
    fn between(&mut self, part: &[u8]) -> usize {
        let Some(at) = memchr2(b'"', b':', part) else { return part.len() };
        if part[at] == b'"' {
            (self.at, self.length, self.may_be_file) = (At::String, 0, self.is_of_file);
        } else {
            self.is_of_file = FILES.contains(&self.start.get(..self.length).unwrap_or_default());
        }
        at + 1
    }

    /// Reads on in a string. Returns the number of bytes that were read.
    fn string(&mut self, part: &[u8]) -> usize {
        let end = memchr2(b'"', b'\\', part);
        self.read(&part[..end.unwrap_or(part.len())]);
        let Some(end) = end else { return part.len() };
        if part[end] == b'"' {
            self.ended = self.ended.saturating_add(self.text());
            self.at = At::Between;
        } else {
            self.at = At::Escape;
        }
        end + 1
    }

    /// Adds bytes to the latest string. An escape is one byte.
    fn read(&mut self, bytes: &[u8]) {
        if let Some(free) = self.start.get_mut(self.length..) {
            let kept = bytes.len().min(free.len());
            free[..kept].copy_from_slice(&bytes[..kept]);
        }
        self.length = self.length.saturating_add(bytes.len());
        self.may_be_file = self.may_be_file && bytes.iter().all(u8::is_ascii_graphic);
    }

    /// What the latest string counts.
    fn text(&self) -> usize {
        if self.may_be_file && self.length >= FILE_MIN { 0 } else { self.length }
    }
}

impl TextMember {
    const NAME: &'static [u8] = b"text";

    /// Counts a part of the text.
    pub(super) fn add(&mut self, part: &[u8]) {
        for byte in part.iter().copied() {
            if self.is_in_string {
                self.string(byte);
            } else {
                self.between(byte);
            }
        }
    }

    /// The bytes so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn string(&mut self, byte: u8) {
        let is_escaped = std::mem::take(&mut self.is_escaped);
        match byte {
            b'\\' if !is_escaped => self.is_escaped = true,
            b'"' if !is_escaped => self.is_in_string = false,
            _ if self.depth != 1 => {}
            _ if self.is_value => self.bytes += usize::from(self.name == Self::NAME),
            _ if self.name.len() <= Self::NAME.len() => self.name.push(byte),
            _ => {}
        }
    }

    fn between(&mut self, byte: u8) {
        let is_top = self.depth == 1;
        match byte {
            b'"' => {
                self.is_in_string = true;
                if is_top && !self.is_value {
                    self.name.clear();
                }
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            b':' | b',' if is_top => self.is_value = byte == b':',
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> usize {
        let mut whole = JsonText::default();
        whole.add(text.as_bytes());
        for cut in 0..text.len() {
            let mut parts = JsonText::default();
            parts.add(&text.as_bytes()[..cut]);
            parts.add(&text.as_bytes()[cut..]);
            assert_eq!(parts.bytes(), whole.bytes(), "{text} cut at {cut}");
        }
        whole.bytes()
    }

    #[test]
    fn the_text_of_json_is_its_strings() {
        let text = r#"{"a":"b\"c\\","d":[1.5,null,"e"]}"#;
        assert_eq!(bytes(text), 1 + 4 + 1 + 1, "an escape counts as one byte");
        assert_eq!(bytes(r#"{"a":"bcd"#), 1 + 3, "of a string that has not ended what has arrived");
    }

    #[test]
    fn files_are_no_text() {
        let file = "iVBORw0KGgo+/".repeat(50);
        let escaped = file.replace('/', r"\/");
        let url = format!("data:image/png;base64,{file}=");
        for (json, expected) in [
            (format!(r#"{{"data":[{{"b64_json":"{file}","revised_prompt":"a cat"}}]}}"#), 4 + 8 + 14 + 5),
            (format!(r#"{{"b64_json" : "{escaped}"}}"#), 8),
            (format!(r#"{{"images":["{file}","{file}"],"info":"a cat"}}"#), 6 + 4 + 5),
            (format!(r#"{{"image_url":{{"url":"{url}"}}}}"#), 9 + 3),
            (format!(r#"{{"audio":{{"data":"{file}","transcript":"hello"}}}}"#), 5 + 4 + 10 + 5),
            (format!(r#"{{"b64_json":"{file}"#), 8),
        ] {
            assert_eq!(bytes(&json), expected, "{json}");
        }
        for (name, text) in [("content", &file), ("data", &"a word ".repeat(50)), ("url", &"日本".repeat(50))] {
            assert_eq!(bytes(&format!(r#"{{"{name}":"{text}"}}"#)), name.len() + text.len(), "{name} is text");
        }
    }
}
