//! The outputs of a response.

use super::super::wire;
use super::connections::{ConnectionError, Stream as StreamGuard};
use crate::engine::{Error, Output};
use crate::plane::WorkerId;
use bytes::BytesMut;
use futures::Stream;
use http_body_util::BodyExt;
use hyper::body::Incoming;

struct Outputs {
    worker: WorkerId,
    body: Incoming,
    arrived: BytesMut,
    ended: bool,
    stream: StreamGuard,
}

/// The outputs in `body`. Dropping them resets the stream, which cancels the request.
pub(super) fn stream(
    worker: WorkerId,
    body: Incoming,
    stream: StreamGuard,
) -> impl Stream<Item = Result<Output, Error>> + Send {
    let outputs = Outputs { worker, body, arrived: BytesMut::new(), ended: false, stream };
    futures::stream::unfold(outputs, async |mut outputs| {
        let next = outputs.next().await?;
        Some((next, outputs))
    })
}

impl Outputs {
    async fn next(&mut self) -> Option<Result<Output, Error>> {
        if self.ended {
            return None;
        }
        let output = self.read().await;
        self.ended = match &output {
            Ok(Output::Tokens(tokens)) => tokens.finish.is_some(),
            Ok(_) => false,
            Err(_) => true,
        };
        Some(output)
    }

    async fn read(&mut self) -> Result<Output, Error> {
        let failed = |worker: WorkerId, problem: String| Error::Failed(format!("worker {worker}: {problem}"));
        loop {
            match wire::decode_output(&mut self.arrived) {
                Ok(Some(output)) => return output,
                Ok(None) => {}
                Err(error) => return Err(failed(self.worker, error.to_string())),
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.arrived.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => {
                    return Err(match self.stream.connection_error() {
                        Some(ConnectionError::Unresponsive(problem)) => {
                            Error::Unresponsive(format!("worker {}: {problem}", self.worker))
                        }
                        _ => failed(self.worker, format!("the connection ended: {error}")),
                    });
                }
                None => return Err(failed(self.worker, "the response ended before the last output".to_owned())),
            }
        }
    }
}
