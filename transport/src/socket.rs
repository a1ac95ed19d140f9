//! The socket of a connection, with TLS or without.

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
