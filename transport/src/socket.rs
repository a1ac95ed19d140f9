//! The socket of a connection, with TLS or without.

use std::error::Error;
use std::io;
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tokio_util::either::Either;

/// A socket: without TLS on the left, with it on the right, where its large state is boxed, because sockets are moved.
pub type Socket = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// The socket below TLS.
pub fn tcp(socket: &Socket) -> &TcpStream {
    match socket {
        Socket::Left(tcp) => tcp,
        Socket::Right(tls) => tls.get_ref().0,
    }
}

/// Whether bytes that were written may wait in this process for the peer to read.
pub fn is_buffered(socket: &Socket) -> bool {
    matches!(socket, Socket::Right(_))
}

/// Whether the peer has shown a certificate. It was verified in the handshake.
pub fn has_certificate(socket: &Socket) -> bool {
    match socket {
        Socket::Left(_) => false,
        Socket::Right(tls) => tls.get_ref().1.peer_certificates().is_some_and(|chain| !chain.is_empty()),
    }
}

/// Whether an error, or one of its causes, says that this process or this machine can open no more files. It says
/// nothing about the peer.
pub fn is_out_of_files(error: &(dyn Error + 'static)) -> bool {
    /// `EMFILE` and `ENFILE`, the same numbers on every Unix.
    const NO_DESCRIPTORS: [i32; 2] = [24, 23];
    let mut next = Some(error);
    while let Some(error) = next {
        let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if code.is_some_and(|code| NO_DESCRIPTORS.contains(&code)) {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("tcp open error")]
    struct Outer(#[source] io::Error);

    #[test]
    fn the_limit_of_open_files_is_found_among_the_causes() {
        for (code, expected) in [(24, true), (23, true), (111, false)] {
            assert_eq!(is_out_of_files(&io::Error::from_raw_os_error(code)), expected);
            assert_eq!(is_out_of_files(&Outer(io::Error::from_raw_os_error(code))), expected);
        }
        assert!(!is_out_of_files(&io::Error::other("24")));
    }
}
