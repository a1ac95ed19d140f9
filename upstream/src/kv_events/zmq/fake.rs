//! A publisher of KV events for tests. Without a replay socket it sends each subscriber all messages from the first one
//! on. With one, a subscriber gets those that are published from its connection on, as with vLLM.

use super::codec::{self, Decoder, Received};
use bytes::Bytes;
use std::io;
use std::net::Ipv4Addr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The publisher. Dropping it closes its ports and connections.
#[derive(Debug)]
pub struct FakePublisher {
    port: u16,
    replay_port: Option<u16>,
    messages: watch::Sender<Vec<Published>>,
    /// One task for each port.
    accepting: Vec<JoinHandle<()>>,
}

/// A message.
#[derive(Clone, Debug)]
struct Published {
    /// Topic, number, batch.
    frames: [Vec<u8>; 3],
    /// Subscribers do not get it: it can only be replayed.
    is_lost: bool,
}

impl FakePublisher {
    /// Binds a port of the loopback interface. There is no replay socket.
    pub async fn start() -> io::Result<Self> {
        Self::start_at(0, None).await
    }

    /// The same at a port of its own, and with a replay socket at another. 0: at any port.
    pub async fn start_at(port: u16, replay_port: Option<u16>) -> io::Result<Self> {
        let messages: watch::Sender<Vec<Published>> = watch::Sender::default();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        let port = listener.local_addr()?.port();
        let (publisher, has_replay) = (messages.clone(), replay_port.is_some());
        let mut accepting = vec![tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let from = if has_replay { publisher.borrow().len() } else { 0 };
                tokio::spawn(serve(socket, publisher.subscribe(), from));
            }
        })];
        let replay_port = match replay_port {
            None => None,
            Some(port) => {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
                let port = listener.local_addr()?.port();
                let publisher = messages.clone();
                accepting.push(tokio::spawn(async move {
                    while let Ok((socket, _)) = listener.accept().await {
                        tokio::spawn(replay(socket, publisher.subscribe()));
                    }
                }));
                Some(port)
            }
        };
        Ok(Self { port, replay_port, messages, accepting })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port of its replay socket.
    pub fn replay_port(&self) -> Option<u16> {
        self.replay_port
    }

    /// Publishes a message: topic, number, batch.
    pub fn publish(&self, frames: [&[u8]; 3]) {
        self.push(frames, false);
    }

    /// Publishes a message that subscribers do not get, as one that a slow subscriber misses. It can be replayed.
    pub fn lose(&self, frames: [&[u8]; 3]) {
        self.push(frames, true);
    }

    /// Ends as a process that is killed. When this returns, nothing listens at its ports.
    pub async fn kill(mut self) {
        for accepting in &mut self.accepting {
            accepting.abort();
            // The error says that it was aborted.
            let _ = accepting.await;
        }
    }

    fn push(&self, frames: [&[u8]; 3], is_lost: bool) {
        let frames = frames.map(<[u8]>::to_vec);
        self.messages.send_modify(|messages| messages.push(Published { frames, is_lost }));
    }
}

impl Drop for FakePublisher {
    fn drop(&mut self) {
        self.accepting.iter().for_each(JoinHandle::abort);
    }
}

/// Sends a subscriber the messages from this position on, until the connection or the publisher ends.
async fn serve(mut socket: TcpStream, mut messages: watch::Receiver<Vec<Published>>, from: usize) -> io::Result<()> {
    socket.write_all(&[&codec::greeting()[..], &codec::ready("PUB")].concat()).await?;
    if first_message(&mut socket, &mut Decoder::default()).await?.is_none() {
        return Ok(());
    }
    for sent in from.. {
        let published =
            messages.wait_for(|messages| messages.len() > sent).await.map(|messages| messages[sent].clone());
        let Ok(Published { frames: [topic, number, batch], is_lost }) = published else { return Ok(()) };
        if !is_lost {
            socket.write_all(&codec::message(&[&topic, &number, &batch])).await?;
        }
    }
    Ok(())
}

/// Answers one request for a replay.
async fn replay(mut socket: TcpStream, messages: watch::Receiver<Vec<Published>>) -> io::Result<()> {
    socket.write_all(&[&codec::greeting()[..], &codec::ready("ROUTER")].concat()).await?;
    let mut decoder = Decoder::default();
    let Some(request) = first_message(&mut socket, &mut decoder).await? else { return Ok(()) };
    let from = request.last().map_or(0, |frame| number(frame));
    let mut answers = Vec::new();
    for Published { frames: [topic, at, batch], .. } in messages.borrow().iter() {
        if number(at) >= from {
            answers.extend(codec::message(&[b"", topic, at, batch]));
        }
    }
    answers.extend(codec::message(&[b"", b"", &u64::MAX.to_be_bytes(), b""]));
    socket.write_all(&answers).await?;
    // The other side closes the connection.
    while socket.read_buf(&mut decoder.buffer).await? > 0 {}
    Ok(())
}

/// A number of eight bytes; 0 if it has another length.
fn number(frame: &[u8]) -> u64 {
    frame.try_into().map_or(0, u64::from_be_bytes)
}

/// The first message of the other side: a subscription or a request. `None`: it closes the connection. READY and the
/// message may arrive together.
async fn first_message(socket: &mut TcpStream, decoder: &mut Decoder) -> io::Result<Option<Vec<Bytes>>> {
    loop {
        match decoder.next().map_err(io::Error::other)? {
            Some(Received::Message(frames)) => return Ok(Some(frames)),
            Some(_) => {}
            None => {
                if socket.read_buf(&mut decoder.buffer).await? == 0 {
                    return Ok(None);
                }
            }
        }
    }
}
