//! Where the body of an answer ends (RFC 9112, section 6), and the removal of the chunked transfer coding.
//!
//! A chunk is no unit of meaning: chunks that arrive together are joined, so that they cost the relay one frame.

use std::io;

/// How the end of a body is known, and what is left of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Framing {
    /// After this many more bytes. 0: it has ended.
    Length(u64),
    /// With a chunk of length 0.
    Chunked(Chunked),
    /// The connection ends with it.
    UntilClose,
}

/// The position in a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chunked {
    at: At,
    /// Bytes of extensions and trailers so far.
    ignored: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    /// In the length of a chunk, of which this many digits were read.
    Size {
        size: u64,
        digits: u32,
    },
    /// In what may follow the length in its line.
    Extension {
        size: u64,
    },
    /// Before the LF of the line with the length.
    SizeLf {
        size: u64,
    },
    /// This many bytes before the end of a chunk.
    Data(u64),
    /// Before the CR and the LF after a chunk.
    DataCr,
    DataLf,
    /// At the start of a line of the trailer section, or in one.
    TrailerStart,
    Trailer,
    TrailerLf,
    /// Before the last LF.
    EndLf,
    End,
}

/// Maximum number of bytes of extensions and trailers. Both are ignored, and no engine sends any.
const MAX_IGNORED: usize = 16 << 10;
/// Maximum number of hexadecimal digits of a length of 64 bits.
const MAX_DIGITS: u32 = 16;

/// What [`Framing::decode`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Decoded {
    /// Bytes of the body, which are now at the start of the received bytes.
    pub(super) body: usize,
    /// Received bytes that belong to the answer: all, unless it has ended.
    pub(super) taken: usize,
}

impl Framing {
    /// The start of a chunked body.
    pub(super) const CHUNKED: Self = Self::Chunked(Chunked { at: At::Size { size: 0, digits: 0 }, ignored: 0 });

    /// Whether the body has ended.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Length(0) | Self::Chunked(Chunked { at: At::End, .. }))
    }

    /// Takes received bytes, and moves those of the body to their start.
    pub(super) fn decode(&mut self, received: &mut [u8]) -> io::Result<Decoded> {
        match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).map_or(received.len(), |left| left.min(received.len()));
                *left -= taken as u64;
                Ok(Decoded { body: taken, taken })
            }
            Self::Chunked(chunked) => chunked.decode(received),
            Self::UntilClose => Ok(Decoded { body: received.len(), taken: received.len() }),
        }
    }
}

impl Chunked {
    fn decode(&mut self, received: &mut [u8]) -> io::Result<Decoded> {
        let (mut body, mut at) = (0, 0);
        while at < received.len() && self.at != At::End {
            if let At::Data(left) = self.at {
                let length = usize::try_from(left).map_or(received.len() - at, |left| left.min(received.len() - at));
                received.copy_within(at..at + length, body);
                body += length;
                at += length;
                self.at = if length as u64 == left { At::DataCr } else { At::Data(left - length as u64) };
            } else {
                self.at = self.after(received[at])?;
                at += 1;
            }
        }
        Ok(Decoded { body, taken: at })
    }

    /// The position after a byte that is not one of the body.
    fn after(&mut self, byte: u8) -> io::Result<At> {
        Ok(match (self.at, byte) {
            (At::Size { size, digits }, _) if byte.is_ascii_hexdigit() => {
                let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
                if digits == MAX_DIGITS {
                    return Err(malformed("the length of a chunk has more than 64 bits"));
                }
                At::Size { size: size << 4 | digit, digits: digits + 1 }
            }
            (At::Size { digits: 0, .. }, _) => return Err(malformed("a chunk has no length")),
            (At::Size { size, .. } | At::Extension { size }, b'\r') => At::SizeLf { size },
            // A bare LF could end the line for another reader.
            (At::Extension { .. }, b'\n') => return Err(malformed("an extension of a chunk has a line end")),
            (At::Size { size, .. }, b';' | b' ' | b'\t') | (At::Extension { size }, _) => {
                self.ignore(At::Extension { size })?
            }
            (At::SizeLf { size: 0 } | At::TrailerLf, b'\n') => At::TrailerStart,
            (At::SizeLf { size }, b'\n') => At::Data(size),
            (At::DataCr, b'\r') => At::DataLf,
            (At::DataLf, b'\n') => At::Size { size: 0, digits: 0 },
            (At::TrailerStart, b'\r') => At::EndLf,
            (At::EndLf, b'\n') => At::End,
            (At::Trailer, b'\r') => At::TrailerLf,
            (At::TrailerStart | At::Trailer, _) => self.ignore(At::Trailer)?,
            (At::Size { .. } | At::SizeLf { .. } | At::DataCr | At::DataLf | At::TrailerLf | At::EndLf, _) => {
                return Err(malformed("a chunk is not framed as RFC 9112 says"));
            }
            (At::Data(_) | At::End, _) => unreachable!("handled by `decode`"),
        })
    }

    fn ignore(&mut self, next: At) -> io::Result<At> {
        self.ignored += 1;
        if self.ignored > MAX_IGNORED { Err(malformed("too many extensions or trailers")) } else { Ok(next) }
    }
}

fn malformed(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The body in parts that end at these positions, and the bytes that were left.
    fn decode(mut framing: Framing, bytes: &[u8], cuts: &[usize]) -> io::Result<(Vec<u8>, bool, usize)> {
        let (mut body, mut start, mut left) = (Vec::new(), 0, 0);
        for end in cuts.iter().copied().chain([bytes.len()]) {
            let mut part = bytes[start..end].to_vec();
            let decoded = framing.decode(&mut part)?;
            body.extend_from_slice(&part[..decoded.body]);
            left += part.len() - decoded.taken;
            start = end;
        }
        Ok((body, framing.has_ended(), left))
    }

    #[test]
    fn a_chunked_body_is_the_same_however_it_is_cut() {
        let text = b"5;x=1\r\nhello\r\n00A \r\n, chunked \r\n6\r\nworld!\r\n0\r\nTrailer: 1\r\nb:2\r\n\r\nnext";
        let expected = (b"hello, chunked world!".to_vec(), true, 4);
        for one in 0..=text.len() {
            for other in one..=text.len() {
                assert_eq!(decode(Framing::CHUNKED, text, &[one, other]).unwrap(), expected, "{one} {other}");
            }
        }
        let bytes: Vec<usize> = (0..text.len()).collect();
        assert_eq!(decode(Framing::CHUNKED, text, &bytes).unwrap(), expected);
    }

    #[test]
    fn a_body_that_is_not_framed_as_the_standard_says_is_an_error() {
        let ignored = "a".repeat(MAX_IGNORED + 1);
        for text in [
            "",
            "\r\n",
            "g\r\n",
            "-1\r\n",
            " 5\r\nhello\r\n",
            "5\nhello\r\n",
            "5\r\nhello!\r\n",
            "5\r\nhello\n",
            "5;a\nhello\r\n",
            "5\rhello",
            "0x5\r\nhello\r\n",
            "10000000000000000\r\n",
            "0\r\nx\rb\r\n",
            "0\r\n\rx",
            &format!("5;{ignored}"),
            &format!("0\r\n{ignored}"),
        ] {
            let decoded = decode(Framing::CHUNKED, text.as_bytes(), &[]);
            // A body of nothing has not ended, which is an error at the end of the connection.
            assert!(decoded.is_err() || text.is_empty(), "{text:.40}: {decoded:?}");
        }
        let (_, has_ended, _) = decode(Framing::CHUNKED, b"5\r\nhello\r\n0\r\n", &[]).unwrap();
        assert!(!has_ended);
        // The longest length. It is not added to anything.
        let (body, has_ended, _) = decode(Framing::CHUNKED, b"ffffffffffffffff\r\nabc", &[]).unwrap();
        assert_eq!((&body[..], has_ended), (&b"abc"[..], false));
    }

    #[test]
    fn a_length_ends_a_body() {
        assert_eq!(decode(Framing::Length(5), b"hello, world", &[3]).unwrap(), (b"hello".to_vec(), true, 7));
        assert_eq!(decode(Framing::Length(50), b"hello", &[]).unwrap(), (b"hello".to_vec(), false, 0));
        assert_eq!(decode(Framing::UntilClose, b"hello", &[2]).unwrap(), (b"hello".to_vec(), false, 0));
        assert!(Framing::Length(0).has_ended());
    }
}
