//! A client's HTTP/1.1 connection for responses with large bodies.
//!
//! The kernel copies a body into few buffers, and its parts are split off without another copy. A buffer is used again
//! once all of its parts are dropped, so that its pages are mapped once. While parts are dropped before more is read,
//! one buffer is enough, and it stays in the processor's cache. A general HTTP client yields a body in pieces of its
//! own sizes, from which a block has to be copied together, and maps a new buffer for each of them.
//!
//! Not here: HTTP in general. One request at a time, and no trailers, upgrades or interim responses.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::FutureExt;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A connection without a request.
pub(in crate::remote) struct Connection<S> {
    socket: S,
    /// Bytes that have arrived and are not used yet.
    arrived: BytesMut,
    /// Buffers whose parts may still be in use, the oldest first.
    used: VecDeque<BytesMut>,
    ends: PartEnds,
}

/// Where large parts of a body end. Those of a response are mostly of one size, with as many bytes between them.
#[derive(Clone, Copy, Default)]
struct PartEnds {
    /// Bytes from the end of one large part to the end of the next; 0 before the first.
    period: usize,
    /// Bytes that were used since the end of the last one.
    since: usize,
}

/// A response: its status, and its body on the connection.
pub(in crate::remote) struct Response<S> {
    pub(in crate::remote) status: u16,
    connection: Connection<S>,
    framing: Framing,
    keep_alive: bool,
}

/// How the end of a body is found, and how many bytes are left: of the body, or of the current chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Framing {
    Length(u64),
    /// Before a chunk's size.
    ChunkSize,
    Chunk(u64),
    /// Before the end of the line after a chunk.
    ChunkEnd,
    Ended,
}

/// Size of a buffer for parts of at most half the size. Those of all connections of a load stay in the second-level
/// cache of a processor, and larger reads save few system calls. With 2 MiB the processor time is a third more.
const BUFFER_BYTES: usize = 256 << 10;
/// Largest part that is read as a whole into a buffer of this size. Larger ones leave the cache before they are used,
/// so they are better taken in pieces.
pub(super) const MAX_CACHED_PART_BYTES: usize = BUFFER_BYTES / 2;
/// Bytes of a piece at least, except at the end of its part: a checksum of less is slower.
const MIN_PIECE_BYTES: usize = 32 << 10;
/// Bytes that are moved to the beginning of their buffer although it has room behind them: few, so that a copy of them
/// costs less than the smaller reads at the end of a buffer. Also the size from which a part is large.
const MAX_MOVED_BYTES: usize = 4 << 10;
/// Buffers of a connection that are kept to be used again.
const MAX_USED: usize = 3;
/// Largest head of a response.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Maximum number of headers of a response.
const MAX_HEADERS: usize = 64;
/// Longest line with the size of a chunk: sixteen digits, and room for an extension.
const MAX_CHUNK_LINE_BYTES: usize = 256;

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub(in crate::remote) fn new(socket: S) -> Self {
        Self { socket, arrived: BytesMut::new(), used: VecDeque::new(), ends: PartEnds::default() }
    }

    /// Whether the other side has not closed it, as far as is known.
    pub(in crate::remote) fn is_open(&mut self) -> bool {
        // Bytes without a request are not HTTP.
        self.arrived.is_empty() && self.socket.read(&mut [0]).now_or_never().is_none()
    }

    /// Sends a request, and reads the head of its response.
    pub(in crate::remote) async fn send(mut self, request: &[u8]) -> io::Result<Response<S>> {
        self.socket.write_all(request).await?;
        self.socket.flush().await?;
        loop {
            if let Some(head) = parse_head(&self.arrived)?.filter(|head| head.bytes <= MAX_HEAD_BYTES) {
                self.skip(head.bytes);
                let (status, framing, keep_alive) = (head.status, head.framing, head.keep_alive);
                return Ok(Response { status, connection: self, framing, keep_alive });
            }
            let more = self.arrived.len() + 1;
            if more > MAX_HEAD_BYTES {
                return Err(invalid("the head of the response is too long"));
            }
            self.fill(more).await?;
        }
    }

    /// Reads until so many bytes are there.
    async fn fill(&mut self, bytes: usize) -> io::Result<()> {
        while self.arrived.len() < bytes {
            let missing = bytes - self.arrived.len();
            if self.arrived.len() < MAX_MOVED_BYTES {
                // Else there is still room behind it, or another buffer is used.
                let _ = self.begin_again(bytes);
            }
            if self.arrived.capacity() - self.arrived.len() < missing {
                self.next_buffer(bytes);
            }
            // The buffer ends with a part, so that the beginning of the next one is not moved to another buffer.
            let end = self.ends.last_end(self.arrived.capacity()).filter(|end| *end >= bytes);
            let most = end.unwrap_or(self.arrived.capacity()) - self.arrived.len();
            if self.socket.read_buf(&mut (&mut self.arrived).limit(most)).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Uses bytes that have arrived and belong to no part.
    fn skip(&mut self, bytes: usize) {
        self.arrived.advance(bytes);
        self.ends.since += bytes;
    }

    /// Splits off bytes that have arrived.
    fn split(&mut self, bytes: usize) -> Bytes {
        self.ends.used(bytes);
        self.arrived.split_to(bytes).freeze()
    }

    /// Splits off bytes that are a piece of a part: reads need not end with it.
    fn split_piece(&mut self, bytes: usize) -> Bytes {
        self.ends = PartEnds::default();
        self.arrived.split_to(bytes).freeze()
    }

    /// Moves what has arrived to the beginning of its buffer, if all parts before it are dropped and the buffer has
    /// room for this many bytes.
    fn begin_again(&mut self, bytes: usize) -> bool {
        self.arrived.try_reclaim(buffer_bytes(bytes) - self.arrived.len())
    }

    /// Moves what has arrived to another buffer with room for this many bytes.
    fn next_buffer(&mut self, bytes: usize) {
        if self.begin_again(bytes) {
            return;
        }
        let size = buffer_bytes(bytes);
        let free = self.used.front_mut().is_some_and(|oldest| oldest.try_reclaim(size));
        let free = if free { self.used.pop_front() } else { None };
        let mut next = free.unwrap_or_else(|| BytesMut::with_capacity(size));
        next.put_slice(&self.arrived);
        let mut full = std::mem::replace(&mut self.arrived, next);
        full.clear();
        self.used.push_back(full);
        while self.used.len() > MAX_USED {
            self.used.pop_front();
        }
    }
}

impl PartEnds {
    /// A part of so many bytes was used.
    fn used(&mut self, bytes: usize) {
        self.since += bytes;
        if bytes >= MAX_MOVED_BYTES {
            *self = Self { period: self.since, since: 0 };
        }
    }

    /// The last end of a large part in the next `bytes`, if parts go on as before.
    fn last_end(&self, bytes: usize) -> Option<usize> {
        let next = self.period.checked_sub(self.since).filter(|next| *next > 0)?;
        Some(next + bytes.checked_sub(next)? / self.period * self.period)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Response<S> {
    /// The next `bytes` of the body, contiguous; `None` at its end.
    pub(in crate::remote) async fn take(&mut self, bytes: usize) -> io::Result<Option<Bytes>> {
        let left = self.next_part().await?;
        if left == 0 {
            return Ok(None);
        }
        if left >= bytes as u64 {
            return Ok(Some(self.split(bytes).await?));
        }
        // It comes in several chunks.
        let mut taken = BytesMut::with_capacity(bytes);
        while taken.len() < bytes {
            let left = self.next_part().await?;
            if left == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let part = left.min((bytes - taken.len()) as u64) as usize;
            let part = self.split(part).await?;
            taken.put_slice(&part);
        }
        Ok(Some(taken.freeze()))
    }

    /// The next bytes of the body as they have arrived, at least one and at most this many; `None` at its end.
    pub(in crate::remote) async fn take_piece(&mut self, most: usize) -> io::Result<Option<Bytes>> {
        let left = self.next_part().await?.min(most as u64) as usize;
        if left == 0 {
            return Ok(None);
        }
        self.connection.fill(left.min(MIN_PIECE_BYTES)).await?;
        let bytes = left.min(self.connection.arrived.len());
        self.used(bytes);
        Ok(Some(self.connection.split_piece(bytes)))
    }

    /// The rest of the body, if it has at most this many bytes; else its beginning.
    pub(in crate::remote) async fn rest(&mut self, most: usize) -> io::Result<Bytes> {
        let mut taken = BytesMut::new();
        loop {
            let left = self.next_part().await?.min((most - taken.len()) as u64) as usize;
            if left == 0 {
                return Ok(taken.freeze());
            }
            let part = self.split(left).await?;
            taken.put_slice(&part);
        }
    }

    /// The connection, if the body was read to its end and another request may follow.
    pub(in crate::remote) fn into_connection(self) -> Option<Connection<S>> {
        let Connection { socket, arrived, .. } = self.connection;
        let is_reusable = self.framing == Framing::Ended && self.keep_alive && arrived.is_empty();
        // Idle connections keep no buffers.
        is_reusable.then(|| Connection::new(socket))
    }

    /// Bytes that are left of the body or of the current chunk; 0 at the end of the body.
    async fn next_part(&mut self) -> io::Result<u64> {
        loop {
            match self.framing {
                Framing::Length(0) => self.framing = Framing::Ended,
                Framing::Ended => return Ok(0),
                Framing::Length(left) | Framing::Chunk(left) => return Ok(left),
                Framing::ChunkEnd => {
                    self.connection.fill(2).await?;
                    if !self.connection.arrived.starts_with(b"\r\n") {
                        return Err(invalid("a chunk of the response does not end"));
                    }
                    self.connection.skip(2);
                    self.framing = Framing::ChunkSize;
                }
                Framing::ChunkSize => match httparse::parse_chunk_size(&self.connection.arrived) {
                    Ok(httparse::Status::Complete((line, 0))) => {
                        self.connection.skip(line);
                        self.connection.fill(2).await?;
                        if !self.connection.arrived.starts_with(b"\r\n") {
                            return Err(invalid("the response has trailers"));
                        }
                        self.connection.skip(2);
                        self.framing = Framing::Ended;
                    }
                    Ok(httparse::Status::Complete((line, size))) => {
                        self.connection.skip(line);
                        self.framing = Framing::Chunk(size);
                    }
                    Ok(httparse::Status::Partial) if self.connection.arrived.len() < MAX_CHUNK_LINE_BYTES => {
                        let more = self.connection.arrived.len() + 1;
                        self.connection.fill(more).await?;
                    }
                    _ => return Err(invalid("the response has an invalid chunk")),
                },
            }
        }
    }

    /// Takes bytes of which `next_part` has said that they are left.
    async fn split(&mut self, bytes: usize) -> io::Result<Bytes> {
        self.connection.fill(bytes).await?;
        self.used(bytes);
        Ok(self.connection.split(bytes))
    }

    /// Bytes of the body were taken.
    fn used(&mut self, bytes: usize) {
        self.framing = match self.framing {
            Framing::Length(left) => Framing::Length(left - bytes as u64),
            Framing::Chunk(left) if left > bytes as u64 => Framing::Chunk(left - bytes as u64),
            Framing::Chunk(_) => Framing::ChunkEnd,
            other => other,
        };
    }
}

/// Size of a buffer for a part of this many bytes. It has room for what comes before and behind the part, so that a
/// large part is not moved because a little of it came with the one before.
fn buffer_bytes(part: usize) -> usize {
    BUFFER_BYTES.max(part.saturating_add(BUFFER_BYTES / 2))
}

/// What is used of the head of a response.
struct Head {
    bytes: usize,
    status: u16,
    framing: Framing,
    keep_alive: bool,
}

/// `None`: it has not arrived completely.
fn parse_head(arrived: &[u8]) -> io::Result<Option<Head>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let bytes = match response.parse(arrived).map_err(io::Error::other)? {
        httparse::Status::Complete(bytes) => bytes,
        httparse::Status::Partial => return Ok(None),
    };
    let (mut framing, mut keep_alive) = (None, response.version == Some(1));
    for header in response.headers.iter() {
        let value = str::from_utf8(header.value).unwrap_or_default().trim();
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(invalid("the response has an unknown transfer encoding"));
            }
            framing = Some(Framing::ChunkSize);
        } else if header.name.eq_ignore_ascii_case("content-length") {
            let length = Framing::Length(value.parse().map_err(io::Error::other)?);
            match framing {
                None => framing = Some(length),
                Some(Framing::Length(_)) if framing != Some(length) => {
                    return Err(invalid("the response has two lengths"));
                }
                Some(_) => {}
            }
        } else if header.name.eq_ignore_ascii_case("connection") && value.eq_ignore_ascii_case("close") {
            keep_alive = false;
        }
    }
    let framing = framing.ok_or_else(|| invalid("the response does not say where it ends"))?;
    Ok(Some(Head { bytes, status: response.code.unwrap_or_default(), framing, keep_alive }))
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests;
