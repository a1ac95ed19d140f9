//! As much of HTTP/1.1 as client and engines need: heads, and the framing of bodies.

use anyhow::{Context, Result, bail, ensure};

/// Maximum size of a head. Gateways add a dozen headers.
pub const MAX_HEAD: usize = 16 << 10;

/// A parsed head: the words of its first line, and what frames the body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// `GET /path HTTP/1.1`, or `HTTP/1.1 200 OK`.
    pub first_line: Vec<String>,
    /// Bytes of the head with its empty line.
    pub length: usize,
    /// How the body ends.
    pub framing: Framing,
    /// Whether the connection ends with the answer.
    pub closes: bool,
}

/// How a body ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Framing {
    /// After this many more bytes.
    Length(usize),
    /// With a chunk of length 0.
    Chunked(Chunked),
    /// No length is given: there is no body in a request, and in an answer the connection ends it.
    None,
}

/// The position in a chunked body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chunked {
    /// In the line with the length, of which these digits were read.
    Size(Vec<u8>),
    /// This many bytes before the end of a chunk.
    Data(usize),
    /// In the end of line after a chunk.
    End,
    /// After the last chunk, in the empty line or a trailer of this length.
    Trailer(usize),
}

impl Head {
    /// The head at the start of `bytes`; `None` if it is not complete.
    pub fn read(bytes: &[u8]) -> Result<Option<Self>> {
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            ensure!(bytes.len() < MAX_HEAD, "a head of more than {MAX_HEAD} bytes");
            return Ok(None);
        };
        let text = std::str::from_utf8(&bytes[..end]).context("a head that is not UTF-8")?;
        let mut lines = text.split("\r\n");
        let first_line = lines.next().unwrap_or_default().split(' ').map(str::to_owned).collect();
        let (mut framing, mut closes) = (Framing::None, false);
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            if name.eq_ignore_ascii_case("content-length") {
                framing = Framing::Length(value.parse().context("content-length")?);
            } else if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
                framing = Framing::Chunked(Chunked::Size(Vec::new()));
            } else if name.eq_ignore_ascii_case("connection") {
                closes = value.eq_ignore_ascii_case("close");
            }
        }
        Ok(Some(Self { first_line, length: end + 4, framing, closes }))
    }
}

impl Framing {
    /// Takes the next bytes of a body, and gives their content to `content`. Returns whether the body has ended.
    pub fn feed(&mut self, mut bytes: &[u8], mut content: impl FnMut(&[u8])) -> Result<bool> {
        match self {
            Self::None => {
                content(bytes);
                Ok(false)
            }
            Self::Length(left) => {
                ensure!(bytes.len() <= *left, "more bytes than announced");
                content(bytes);
                *left -= bytes.len();
                Ok(*left == 0)
            }
            Self::Chunked(state) => {
                while let Some(&byte) = bytes.first() {
                    let mut taken = 1;
                    *state = match std::mem::replace(state, Chunked::End) {
                        Chunked::Size(digits) if byte == b'\n' => match length(&digits)? {
                            0 => Chunked::Trailer(0),
                            length => Chunked::Data(length),
                        },
                        Chunked::Size(mut digits) => {
                            ensure!(digits.len() < 1024, "a chunk's line of more than 1 KiB");
                            digits.push(byte);
                            Chunked::Size(digits)
                        }
                        Chunked::Data(left) => {
                            taken = left.min(bytes.len());
                            content(&bytes[..taken]);
                            if taken == left { Chunked::End } else { Chunked::Data(left - taken) }
                        }
                        Chunked::End if byte == b'\n' => Chunked::Size(Vec::new()),
                        Chunked::End => Chunked::End,
                        Chunked::Trailer(0) if byte == b'\n' => return Ok(true),
                        Chunked::Trailer(_) if byte == b'\n' => Chunked::Trailer(0),
                        Chunked::Trailer(length) if byte == b'\r' => Chunked::Trailer(length),
                        Chunked::Trailer(length) => Chunked::Trailer(length + 1),
                    };
                    bytes = &bytes[taken..];
                }
                Ok(false)
            }
        }
    }
}

/// The length in a chunk's line, before an extension.
fn length(line: &[u8]) -> Result<usize> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let Ok(text) = std::str::from_utf8(digits) else { bail!("a chunk without a length") };
    usize::from_str_radix(text, 16).with_context(|| format!("a chunk of length {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_the_same_however_it_is_cut() {
        let whole = b"5;x=1\r\nhello\r\n10\r\n, chunked world!\r\n0\r\ntrailer: 1\r\n\r\n";
        for cut in 1..whole.len() {
            let (mut framing, mut body, mut ended) = (Framing::Chunked(Chunked::Size(Vec::new())), Vec::new(), false);
            for part in [&whole[..cut], &whole[cut..]] {
                ended = framing.feed(part, |bytes| body.extend_from_slice(bytes)).unwrap();
            }
            assert!(ended && body == b"hello, chunked world!", "{cut}");
        }
        let mut broken = Framing::Chunked(Chunked::Size(Vec::new()));
        assert!(broken.feed(b"x\r\n", |_| {}).is_err());
    }

    #[test]
    fn a_head_says_how_the_body_ends() {
        let head =
            Head::read(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nconnection: close\r\n\r\nabc").unwrap().unwrap();
        assert_eq!((head.first_line[1].as_str(), head.length, head.closes), ("200", 58, true));
        assert_eq!(head.framing, Framing::Length(12));
        assert_eq!(Head::read(b"HTTP/1.1 200 OK\r\n").unwrap(), None);
        assert!(Head::read(&[b'x'; MAX_HEAD]).is_err());
    }
}
