//! The socket of a connection, with TLS or without.

use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// A client's socket: without TLS on the left, with it on the right, where its large state is boxed.
pub(super) type Socket = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// The socket below TLS.
pub(super) fn tcp(socket: &Socket) -> &TcpStream {
    match socket {
        Socket::Left(tcp) => tcp,
        Socket::Right(tls) => tls.get_ref().0,
    }
}

/// Whether bytes that were written may wait in this process for the client to read.
pub(super) fn is_buffered(socket: &Socket) -> bool {
    matches!(socket, Socket::Right(_))
}
