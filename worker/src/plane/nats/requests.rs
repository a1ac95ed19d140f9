//! Asks sources for ranges of their logs and for snapshots: over HTTP if the process that offers the log serves it at
//! the URL that it names, else over NATS.
//!
//! A log has a subject of its own for each epoch, so a request reaches the processes that offer this epoch, and the
//! server itself answers if there is none. Which epoch of a source is the latest is asked of all processes that offer
//! one; answers are awaited until none arrives for [`GATHER`]. A process that answers later than that is not
//! considered: a follower refuses the snapshot of a former epoch and asks again.

use super::codec::{self, CodecError, LogAnswer, LogRequest};
use super::connection::{ANSWER_TIMEOUT, Connection};
use super::http_logs::HttpLogs;
use super::metrics::{Refused, Transport};
use super::transfers;
use crate::plane::{PlaneError, RangeAnswer, Source};
use async_nats::{HeaderMap, Message, Request, RequestErrorKind, StatusCode};
use bytes::Bytes;
use futures::StreamExt;
use kvbm::{Epoch, Numbered, Snapshot};
use std::time::Duration;

/// Time after an answer in which another process may answer too: several round trips in a cluster.
const GATHER: Duration = Duration::from_millis(50);

/// Time for making a snapshot: seconds for tens of millions of blocks.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(8);

/// Largest accepted snapshot: 32 million blocks.
const MAX_SNAPSHOT_BYTES: u64 = 512 << 20;

pub(super) async fn range(
    connection: &Connection,
    http: Option<&HttpLogs>,
    source: Source,
    epoch: Epoch,
    after: u64,
) -> RangeAnswer {
    if let Some(http) = http
        && let Some(offered) = send(connection, source, epoch, LogRequest::Epoch, ANSWER_TIMEOUT).await?
        && let Some(url) = http.url_in(offered.headers.as_ref(), source, epoch)
    {
        let range = http.reader.range(url.clone(), source, epoch, after).await;
        if let Some(range) = http.outcome(&url, source, range)? {
            connection.metrics.log_read(Transport::Http);
            return Ok(range);
        }
    }
    let range = range_over_nats(connection, source, epoch, after).await;
    range.inspect(|_| connection.metrics.log_read(Transport::Nats))
}

async fn range_over_nats(connection: &Connection, source: Source, epoch: Epoch, after: u64) -> RangeAnswer {
    let request = LogRequest::Range { after };
    match ask(connection, source, epoch, request, ANSWER_TIMEOUT).await? {
        Some((LogAnswer::Range { events }, rest)) => decode_range(&rest, events).map(Some),
        Some((LogAnswer::Truncated, _)) => Ok(None),
        Some((LogAnswer::Absent, _)) | None => {
            // Only other epochs of the source are offered, or none.
            latest_epoch(connection, source).await?;
            Ok(None)
        }
        Some((other, _)) => Err(unexpected(other)),
    }
}

pub(super) async fn snapshot(
    connection: &Connection,
    http: Option<&HttpLogs>,
    source: Source,
) -> Result<Snapshot, PlaneError> {
    let (epoch, headers) = latest_epoch(connection, source).await?;
    if let Some(http) = http
        && let Some(url) = http.url_in(headers.as_ref(), source, epoch)
    {
        let snapshot = http.reader.snapshot(url.clone(), source, epoch).await;
        if let Some(snapshot) = http.outcome(&url, source, snapshot)? {
            connection.metrics.log_read(Transport::Http);
            return Ok(snapshot);
        }
    }
    let snapshot = snapshot_over_nats(connection, source, epoch).await;
    snapshot.inspect(|_| connection.metrics.log_read(Transport::Nats))
}

async fn snapshot_over_nats(connection: &Connection, source: Source, epoch: Epoch) -> Result<Snapshot, PlaneError> {
    let (snapshot, bytes, first) =
        match ask(connection, source, epoch, LogRequest::OpenSnapshot, SNAPSHOT_TIMEOUT).await? {
            Some((LogAnswer::Snapshot { snapshot, bytes }, first)) if bytes <= MAX_SNAPSHOT_BYTES => {
                (snapshot, bytes, first)
            }
            Some((LogAnswer::Busy, _)) => {
                return Err(PlaneError::Unavailable(format!("{source} sends too many snapshots now")));
            }
            Some((LogAnswer::Absent, _)) | None => return Err(PlaneError::Absent(source.to_string())),
            Some((other, _)) => return Err(unexpected(other)),
        };
    let pieces = transfers::fetch(first, bytes, async |offset| {
        let request = LogRequest::ReadSnapshot { snapshot, offset };
        match ask(connection, source, epoch, request, ANSWER_TIMEOUT).await {
            Ok(Some((LogAnswer::Piece, piece))) => Ok(piece),
            Ok(Some((other, _))) => Err(unexpected(other).to_string()),
            Ok(None) => Err(format!("{source} has left")),
            Err(error) => Err(error.to_string()),
        }
    });
    let encoded = pieces.await.map_err(PlaneError::Unavailable)?;
    let decoded = transfers::decode_snapshot(encoded).await;
    decoded.map_err(|error| refused(connection, source, error))
}

/// The latest epoch that a process offers, and the headers of its answer.
async fn latest_epoch(connection: &Connection, source: Source) -> Result<(Epoch, Option<HeaderMap>), PlaneError> {
    let Connection { client, subjects, .. } = connection;
    let unavailable = |error: String| PlaneError::Unavailable(error);
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await.map_err(|error| unavailable(error.to_string()))?;
    let request = codec::encode(&LogRequest::Epoch).into();
    let sent = client.publish_with_reply(subjects.log(source), inbox, request).await;
    sent.map_err(|error| unavailable(error.to_string()))?;
    let (mut latest, mut refusal) = (None::<(Epoch, Option<HeaderMap>)>, None);
    let mut first = Some(in_time(answers.next()).await?);
    loop {
        let answer = match first.take() {
            Some(answer) => answer,
            None => match tokio::time::timeout(GATHER, answers.next()).await {
                Ok(answer) => answer,
                Err(_) => break,
            },
        };
        let Some(answer) = answer.filter(|answer| answer.status != Some(StatusCode::NO_RESPONDERS)) else { break };
        match codec::decode(&answer.payload) {
            Ok(LogAnswer::Epoch(epoch)) if latest.as_ref().is_none_or(|(known, _)| *known < epoch) => {
                latest = Some((epoch, answer.headers));
            }
            Ok(_) => {}
            Err(error) => refusal = Some(refused(connection, source, error)),
        }
    }
    latest.ok_or_else(|| refusal.unwrap_or_else(|| PlaneError::Absent(source.to_string())))
}

/// Asks the log of an epoch; `None` if no process offers it.
async fn ask(
    connection: &Connection,
    source: Source,
    epoch: Epoch,
    request: LogRequest,
    timeout: Duration,
) -> Result<Option<(LogAnswer, Bytes)>, PlaneError> {
    let Some(answer) = send(connection, source, epoch, request, timeout).await? else { return Ok(None) };
    let answer = answer.payload;
    let (decoded, rest) = codec::decode_head(&answer).map_err(|error| refused(connection, source, error))?;
    Ok(Some((decoded, answer.slice_ref(rest))))
}

/// Sends a request to the processes that offer the log of an epoch, and returns the first answer.
async fn send(
    connection: &Connection,
    source: Source,
    epoch: Epoch,
    request: LogRequest,
    timeout: Duration,
) -> Result<Option<Message>, PlaneError> {
    let subject = connection.subjects.log_of_epoch(source, epoch);
    let request = Request::new().payload(codec::encode(&request).into()).timeout(Some(timeout));
    match connection.client.send_request(subject, request).await {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.kind() == RequestErrorKind::NoResponders => Ok(None),
        Err(error) => Err(PlaneError::Unavailable(format!("{source}: {error}"))),
    }
}

fn decode_range(encoded: &[u8], events: u32) -> Result<Vec<Numbered>, PlaneError> {
    let mut rest = encoded;
    let mut next = || {
        let (event, after) = codec::decode_head(rest)?;
        rest = after;
        Ok(event)
    };
    let decoded: Result<_, CodecError> = (0..events).map(|_| next()).collect();
    decoded.map_err(|error| PlaneError::Unavailable(error.to_string()))
}

fn unexpected(answer: LogAnswer) -> PlaneError {
    PlaneError::Unavailable(format!("unexpected answer: {answer:?}"))
}

fn refused(connection: &Connection, source: Source, error: CodecError) -> PlaneError {
    connection.metrics.refused(Refused::Log);
    PlaneError::Unavailable(format!("{source}: {error}"))
}

/// Waits as long as an answer may take.
pub(super) async fn in_time<T>(answer: impl Future<Output = T>) -> Result<T, PlaneError> {
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, answer).await;
    answer.map_err(|_| PlaneError::Unavailable("no answer from NATS in time".to_owned()))
}
