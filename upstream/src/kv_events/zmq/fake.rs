//! A publisher of KV events for tests. It sends each subscriber all messages from the first one on, and has no replay
//! socket.

use super::codec::{self, Decoder, Received};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// The publisher. Dropping it closes its port.
#[derive(Debug)]
pub struct FakePublisher {
    address: SocketAddr,
    /// The encoded messages.
    messages: watch::Sender<Vec<Vec<u8>>>,
    accepting: AbortHandle,
}

impl FakePublisher {
    /// Binds a port of the loopback interface.
    pub async fn start() -> io::Result<Self> {
        Self::start_at(0).await
    }

    /// Binds this port of the loopback interface; 0: any.
    pub async fn start_at(port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        let (address, messages) = (listener.local_addr()?, watch::Sender::default());
        let publisher = messages.clone();
        let accept = async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(serve(socket, publisher.subscribe()));
            }
        };
        Ok(Self { address, messages, accepting: tokio::spawn(accept).abort_handle() })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Publishes a message: topic, number, batch.
    pub fn publish(&self, frames: [&[u8]; 3]) {
        self.messages.send_modify(|messages| messages.push(codec::message(&frames)));
    }
}

impl Drop for FakePublisher {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Serves one subscriber, until the connection or the publisher ends.
async fn serve(mut socket: TcpStream, mut messages: watch::Receiver<Vec<Vec<u8>>>) -> io::Result<()> {
    socket.write_all(&[&codec::greeting()[..], &codec::ready("PUB")].concat()).await?;
    let mut decoder = Decoder::default();
    // READY and the subscription may arrive together.
    loop {
        match decoder.next() {
            Ok(Some(Received::Message(_))) => break,
            Ok(Some(_)) => {}
            Ok(None) => {
                if socket.read_buf(&mut decoder.buffer).await? == 0 {
                    return Ok(());
                }
            }
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    for sent in 0.. {
        let published =
            messages.wait_for(|messages| messages.len() > sent).await.map(|messages| messages[sent].clone());
        let Ok(message) = published else { return Ok(()) };
        socket.write_all(&message).await?;
    }
    Ok(())
}
