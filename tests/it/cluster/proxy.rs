//! A TCP proxy that can be severed, as a network that drops packets, or closed, as a server that was stopped.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

/// What happens to bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Passing,
    /// Nothing arrives, in either direction, and no connection ends.
    Severed,
    /// All connections end at once.
    Closed,
}

/// The connections that a state concerns. The others always pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Of {
    All,
    /// Those that begin with a request of HTTP/1.1, as of workers that read blocks; frontends speak HTTP/2.
    Http1,
}

/// A proxy before one address.
pub(super) struct Proxy {
    pub(super) address: String,
    link: watch::Sender<Link>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Proxy {
    pub(super) async fn before(target: String, of: Of) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, link) = (listener.local_addr().unwrap().to_string(), watch::Sender::new(Link::Passing));
        let state = link.subscribe();
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                connections.spawn(pass(client, target.clone(), of, state.clone()));
            }
        });
        Self { address, link, accepting }
    }

    pub(super) fn set(&self, link: Link) {
        self.link.send_replace(link);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Passes one connection, until either side ends it or the link is closed.
async fn pass(mut client: TcpStream, target: String, of: Of, mut link: watch::Receiver<Link>) {
    let mut first = [0; 2];
    if client.peek(&mut first).await.is_err() {
        return;
    }
    let concerned = of == Of::All || first != *b"PR";
    if concerned && link.wait_for(|link| *link != Link::Severed).await.is_ok_and(|link| *link == Link::Closed) {
        return;
    }
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    if !concerned {
        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        return;
    }
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let mut closed = link.clone();
    tokio::select! {
        _ = closed.wait_for(|link| *link == Link::Closed) => {}
        () = copy(&mut from_client, &mut to_server, link.clone()) => {}
        () = copy(&mut from_server, &mut to_client, link) => {}
    }
}

async fn copy(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    mut link: watch::Receiver<Link>,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if link.wait_for(|link| *link == Link::Passing).await.is_err() || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
