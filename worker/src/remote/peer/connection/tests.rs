use super::*;
use proptest::prelude::*;
use tokio::io::{DuplexStream, duplex};

/// A connection to a server that sends `response` in pieces of `size` bytes.
fn serve(response: Vec<u8>, size: usize) -> Connection<DuplexStream> {
    let (client, mut server) = duplex(1 << 20);
    tokio::spawn(async move {
        let mut request = [0; 4];
        server.read_exact(&mut request).await.unwrap();
        for piece in response.chunks(size) {
            if server.write_all(piece).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
        }
        // The client closes.
        let _ = server.read(&mut request).await;
    });
    Connection::new(client)
}

/// A body of `parts`, each in chunks of at most `size` bytes.
fn chunked(parts: &[Vec<u8>], size: usize) -> Vec<u8> {
    let mut bytes = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    for chunk in parts.iter().flat_map(|part| part.chunks(size)) {
        bytes.extend(format!("{:x}\r\n", chunk.len()).bytes().chain(chunk.iter().copied()).chain(*b"\r\n"));
    }
    bytes.extend(b"0\r\n\r\n");
    bytes
}

fn parts() -> Vec<Vec<u8>> {
    (1..30_u8).map(|nth| vec![nth; usize::from(nth) * 7919]).collect()
}

#[tokio::test]
async fn parts_are_taken_from_bodies_in_any_pieces() {
    for (chunk, piece) in [(usize::MAX, 100_000), (usize::MAX, 97), (5000, 4096), (64, 1 << 20)] {
        let mut response = serve(chunked(&parts(), chunk), piece).send(b"GET ").await.unwrap();
        assert_eq!(response.status, 200);
        for part in parts() {
            assert!(response.take(part.len()).await.unwrap().unwrap() == part, "chunks of {chunk}, sent by {piece}");
        }
        assert_eq!(response.take(1).await.unwrap(), None);
        assert!(response.into_connection().unwrap().is_open());
    }
}

#[tokio::test]
async fn payloads_are_taken_from_a_body_with_a_length() {
    let body = parts().concat();
    let whole = [format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), &body].concat();
    for piece in [1 << 20, 1000] {
        let mut response = serve(whole.clone(), piece).send(b"GET ").await.unwrap();
        for part in parts() {
            assert!(response.take(part.len()).await.unwrap().unwrap() == part, "sent by {piece}");
        }
        assert_eq!(response.take(1).await.unwrap(), None);
        assert!(response.into_connection().unwrap().is_open());
    }
}

/// Reads the parts from what a server sends before it closes the connection.
async fn read_parts(sent: &[u8]) -> io::Result<()> {
    let (client, mut server) = duplex(4 << 20);
    server.write_all(sent).await.unwrap();
    drop(server);
    let mut response = Connection::new(client).send(b"").await?;
    for part in parts() {
        for part in [&part[..130], &part[130..]] {
            assert!(response.take(part.len()).await?.ok_or(ErrorKind::UnexpectedEof)? == part);
        }
    }
    match response.take(1).await? {
        None => Ok(()),
        Some(_) => Err(invalid("the body is too long")),
    }
}

#[tokio::test]
async fn a_body_that_is_cut_or_has_another_length_is_an_error() {
    let body = parts().concat();
    let with_length =
        |length: usize| [format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").as_bytes(), &body].concat();
    for whole in [chunked(&parts(), usize::MAX), chunked(&parts(), 70_000), with_length(body.len())] {
        read_parts(&whole).await.unwrap();
        for cut in [10, 30, 60, 100, 1000, whole.len() / 2, whole.len() - 1] {
            let error = read_parts(&whole[..cut]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{cut} of {} bytes", whole.len());
        }
    }
    assert_eq!(read_parts(&with_length(body.len() - 1)).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(read_parts(&with_length(body.len() + 1)).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    let longer = [&with_length(body.len() + 1)[..], b"x"].concat();
    assert_eq!(read_parts(&longer).await.unwrap_err().kind(), ErrorKind::InvalidData);
}

#[tokio::test]
async fn an_excessive_head_is_an_error() {
    let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(MAX_HEAD_BYTES));
    let many = format!("HTTP/1.1 200 OK\r\n{}content-length: 0\r\n\r\n", "x: x\r\n".repeat(MAX_HEADERS));
    let two = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx";
    for head in [&long[..], &many, two] {
        assert!(serve(head.into(), 1 << 20).send(b"GET ").await.is_err());
    }
    let fits = format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(MAX_HEAD_BYTES / 2));
    assert_eq!(serve(fits.into(), 1 << 20).send(b"GET ").await.unwrap().take(1).await.unwrap(), None);
}

#[tokio::test]
async fn a_reader_of_a_server_that_stalls_can_be_dropped() {
    let (client, mut server) = duplex(1 << 20);
    server.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nbeginning").await.unwrap();
    let mut response = Connection::new(client).send(b"").await.unwrap();
    assert!(response.take(1000).now_or_never().is_none(), "the rest has not arrived");
    drop(response);
    assert_eq!(server.read(&mut [0]).await.unwrap(), 0, "the connection is closed");
}

#[tokio::test]
async fn a_body_may_have_a_length_and_the_connection_may_end() {
    let bytes = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nconnection: close\r\n\r\nabcde";
    let mut response = serve(bytes.to_vec(), 7).send(b"GET ").await.unwrap();
    assert_eq!((response.status, &response.rest(100).await.unwrap()[..]), (404, &b"abcde"[..]));
    assert!(response.into_connection().is_none());
    let mut response = serve(bytes.to_vec(), 7).send(b"GET ").await.unwrap();
    assert_eq!(&response.rest(2).await.unwrap()[..], b"ab");
}

#[tokio::test]
async fn what_is_cut_or_is_not_http_is_an_error() {
    let whole = chunked(&parts(), usize::MAX);
    let (client, server) = duplex(1 << 20);
    drop(server);
    assert!(Connection::new(client).send(b"GET ").await.is_err());
    for bytes in
        [&b"SSH-2.0\r\n\r\n"[..], b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: br\r\n\r\n"]
    {
        assert!(serve(bytes.to_vec(), 100).send(b"GET ").await.is_err());
    }
    for (at, byte) in [(whole.len() - 2, b'x'), (49, b'x')] {
        let mut changed = whole.clone();
        changed[at] = byte;
        let mut response = serve(changed, 1 << 20).send(b"GET ").await.unwrap();
        let mut taken = Ok(Some(Bytes::new()));
        for part in parts() {
            if !matches!(taken, Ok(Some(_))) {
                break;
            }
            taken = response.take(part.len()).await;
        }
        assert!(taken.is_err() || response.take(1).await.is_err(), "byte {at}");
    }
}

#[tokio::test]
async fn buffers_are_used_again_once_their_parts_are_dropped() {
    let part = vec![7; 300 << 10];
    let mut response = serve(chunked(&vec![part.clone(); 100], usize::MAX), 1 << 20).send(b"GET ").await.unwrap();
    let mut buffers = std::collections::HashSet::new();
    for _ in 0..100 {
        let taken = response.take(part.len()).await.unwrap().unwrap();
        buffers.insert(taken.as_ptr() as usize / BUFFER_BYTES);
    }
    assert!(buffers.len() <= 8, "30 MB through {} buffers", buffers.len());
}

#[tokio::test]
async fn parts_that_are_dropped_at_once_come_through_one_buffer() {
    for (size, buffer) in [(70 << 10, BUFFER_BYTES), (3 << 20, 3 << 20)] {
        let part = vec![7; size];
        let mut response = serve(chunked(&vec![part.clone(); 40], usize::MAX), 1 << 20).send(b"GET ").await.unwrap();
        let mut addresses = Vec::new();
        for _ in 0..40 {
            addresses.push(response.take(size).await.unwrap().unwrap().as_ptr() as usize);
        }
        // The first one may begin in the buffer of the head.
        let (least, most) = (addresses[2..].iter().min().unwrap(), addresses[2..].iter().max().unwrap());
        assert!(most - least < buffer, "parts of {size} bytes are {} bytes apart", most - least);
    }
}

#[tokio::test]
async fn a_large_part_in_pieces_comes_through_one_small_buffer() {
    let part: Vec<u8> = (0..3 << 20).map(|at: usize| (at / 7) as u8).collect();
    for (chunk, sent) in [(usize::MAX, 1 << 20), (100_000, 70_001)] {
        let mut response = serve(chunked(&vec![part.clone(); 9], chunk), sent).send(b"GET ").await.unwrap();
        let (mut begin, mut end) = (usize::MAX, 0);
        for nth in 0..9 {
            // The header of a block.
            let mut at = response.take(133).await.unwrap().unwrap().len();
            while at < part.len() {
                let piece = response.take_piece(part.len() - at).await.unwrap().unwrap();
                assert!(piece == part[at..at + piece.len()], "byte {at}");
                at += piece.len();
                // After the first one, which may begin in the buffer of the head.
                if nth > 0 {
                    begin = begin.min(piece.as_ptr() as usize);
                    end = end.max(piece.as_ptr() as usize + piece.len());
                }
            }
        }
        assert!(end - begin <= BUFFER_BYTES, "{} bytes", end - begin);
        assert_eq!(response.take_piece(1).await.unwrap(), None);
        assert!(response.into_connection().unwrap().is_open());
    }
}

#[test]
fn the_last_end_of_a_part_is_found_once_one_was_read() {
    let mut ends = PartEnds::default();
    assert_eq!(ends.last_end(BUFFER_BYTES), None);
    ends.since += 50;
    ends.used(70_000);
    assert_eq!(
        (ends.last_end(70_049), ends.last_end(70_050), ends.last_end(BUFFER_BYTES)),
        (None, Some(70_050), Some(3 * 70_050))
    );
    ends.used(50);
    assert_eq!(ends.last_end(BUFFER_BYTES), Some(3 * 70_050 - 50));
    ends.used(70_050);
    assert_eq!(ends.last_end(BUFFER_BYTES), Some(3 * 70_100), "the parts are larger now");
}

#[tokio::test]
async fn a_buffer_ends_with_a_part_if_all_have_one_size() {
    let part = vec![7; 72 << 10];
    let mut response = serve(chunked(&vec![part.clone(); 60], usize::MAX), 1 << 20).send(b"GET ").await.unwrap();
    let (mut begin, mut end) = (usize::MAX, 0);
    for nth in 0..60 {
        let taken = response.take(part.len()).await.unwrap().unwrap();
        // After the first ones, whose distance was unknown.
        if nth >= 6 {
            begin = begin.min(taken.as_ptr() as usize);
            end = end.max(taken.as_ptr() as usize + part.len() + response.connection.arrived.len());
        }
    }
    let parts = BUFFER_BYTES / part.len();
    assert!(end - begin < parts * (part.len() + 20), "{} bytes are more than {parts} parts", end - begin);
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let body = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", &bytes[..]].concat();
        runtime.block_on(async {
            let (client, mut server) = duplex(1 << 16);
            server.write_all(&body).await.unwrap();
            drop(server);
            if let Ok(mut response) = Connection::new(client).send(b"").await {
                while let Ok(Some(_)) = response.take(3).await {}
            }
        });
    }
}
