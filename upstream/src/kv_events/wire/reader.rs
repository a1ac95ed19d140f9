//! Reads `MessagePack` values one by one from a slice. Nothing is allocated here, and every length is compared with the
//! remaining bytes, so a claimed length never causes work or memory beyond the size of the input.

use super::WireError;
use rmp::Marker;

/// The start of a value: scalars are complete; the elements of arrays and maps follow in the reader.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Head<'a> {
    Nil,
    Bool,
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(&'a [u8]),
    Binary(&'a [u8]),
    Extension,
    /// Number of elements, at most the number of remaining bytes.
    Array(usize),
    /// Number of pairs, at most half the number of remaining bytes.
    Map(usize),
}

/// The remaining bytes. A copy remembers a position.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads the start of the next value.
    #[inline]
    pub(super) fn head(&mut self) -> Result<Head<'a>, WireError> {
        let [marker] = self.bytes()?;
        Ok(match Marker::from_u8(marker) {
            Marker::Null | Marker::Reserved => Head::Nil,
            Marker::True | Marker::False => Head::Bool,
            Marker::FixPos(value) => Head::Unsigned(value.into()),
            Marker::U8 => Head::Unsigned(u8::from_be_bytes(self.bytes()?).into()),
            Marker::U16 => Head::Unsigned(u16::from_be_bytes(self.bytes()?).into()),
            Marker::U32 => Head::Unsigned(u32::from_be_bytes(self.bytes()?).into()),
            Marker::U64 => Head::Unsigned(u64::from_be_bytes(self.bytes()?)),
            Marker::FixNeg(value) => signed(value.into()),
            Marker::I8 => signed(i8::from_be_bytes(self.bytes()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.bytes()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.bytes()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.bytes()?)),
            Marker::F32 => Head::Float(f32::from_be_bytes(self.bytes()?).into()),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.bytes()?)),
            Marker::FixStr(len) => Head::Text(self.take(len.into())?),
            Marker::Str8 => Head::Text(self.sized::<1>()?),
            Marker::Str16 => Head::Text(self.sized::<2>()?),
            Marker::Str32 => Head::Text(self.sized::<4>()?),
            Marker::Bin8 => Head::Binary(self.sized::<1>()?),
            Marker::Bin16 => Head::Binary(self.sized::<2>()?),
            Marker::Bin32 => Head::Binary(self.sized::<4>()?),
            Marker::FixArray(len) => self.array(len.into())?,
            Marker::Array16 => self.len::<2>().and_then(|len| self.array(len))?,
            Marker::Array32 => self.len::<4>().and_then(|len| self.array(len))?,
            Marker::FixMap(len) => self.map(len.into())?,
            Marker::Map16 => self.len::<2>().and_then(|len| self.map(len))?,
            Marker::Map32 => self.len::<4>().and_then(|len| self.map(len))?,
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => self.len::<1>().and_then(|len| self.extension(len))?,
            Marker::Ext16 => self.len::<2>().and_then(|len| self.extension(len))?,
            Marker::Ext32 => self.len::<4>().and_then(|len| self.extension(len))?,
        })
    }

    /// Appends numbers of up to 32 bits, at most `max`, up to the first value that is something else. Most bytes of an
    /// event are such numbers, and this takes a third of the instructions of their heads.
    pub(super) fn small_numbers(&mut self, max: usize, to: &mut Vec<u32>) {
        for _ in 0..max {
            let (number, rest) = match self.0 {
                [number @ 0..=0x7f, rest @ ..] | [0xcc, number, rest @ ..] => (u32::from(*number), rest),
                [0xcd, high, low, rest @ ..] => (u32::from(u16::from_be_bytes([*high, *low])), rest),
                [0xce, a, b, c, d, rest @ ..] => (u32::from_be_bytes([*a, *b, *c, *d]), rest),
                _ => return,
            };
            self.0 = rest;
            to.push(number);
        }
    }

    /// Skips the next value with all it contains. Without recursion, so nesting needs no limit.
    pub(super) fn skip(&mut self) -> Result<(), WireError> {
        let head = self.head()?;
        self.skip_rest(head)
    }

    /// Skips what follows a head that was read already.
    pub(super) fn skip_rest(&mut self, mut head: Head<'a>) -> Result<(), WireError> {
        // Each head adds at most the number of remaining bytes, so the sum does not overflow.
        let mut pending: u64 = 0;
        loop {
            pending += match head {
                Head::Array(len) => len as u64,
                Head::Map(len) => 2 * len as u64,
                _ => 0,
            };
            if pending == 0 {
                return Ok(());
            }
            pending -= 1;
            head = self.head()?;
        }
    }

    fn array(&self, len: usize) -> Result<Head<'a>, WireError> {
        if len > self.0.len() { Err(WireError::Truncated) } else { Ok(Head::Array(len)) }
    }

    fn map(&self, len: usize) -> Result<Head<'a>, WireError> {
        if len > self.0.len() / 2 { Err(WireError::Truncated) } else { Ok(Head::Map(len)) }
    }

    fn extension(&mut self, len: usize) -> Result<Head<'a>, WireError> {
        // The type byte comes before the data.
        self.take(len.saturating_add(1))?;
        Ok(Head::Extension)
    }

    fn sized<const N: usize>(&mut self) -> Result<&'a [u8], WireError> {
        let len = self.len::<N>()?;
        self.take(len)
    }

    /// A length of `N` bytes.
    fn len<const N: usize>(&mut self) -> Result<usize, WireError> {
        Ok(self.bytes::<N>()?.iter().fold(0, |len, byte| len << 8 | usize::from(*byte)))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(WireError::Truncated)?;
        self.0 = rest;
        Ok(*bytes)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(WireError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }
}

/// Encoders may write a small positive number as a signed one.
fn signed(value: i64) -> Head<'static> {
    u64::try_from(value).map_or(Head::Negative(value), Head::Unsigned)
}
