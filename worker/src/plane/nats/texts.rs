//! The texts of a model, its tokenizer and chat template: named by their hash, served by every worker of the model.
//!
//! The workers of a model subscribe to the subject of the hash as one queue group, so a request reaches one of them,
//! and each piece may come from another worker. The reader verifies the hash.

use super::codec::{self, Piece};
use super::connection::Connection;
use super::transfers;
use crate::engine::ModelCard;
use bytes::Bytes;
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use tokio_util::sync::{CancellationToken, DropGuard};

/// The texts of a model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Texts {
    tokenizer: Option<Arc<str>>,
    chat_template: Option<String>,
}

/// Names encoded texts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct TextsRef {
    /// BLAKE3, hexadecimal.
    blake3: String,
    bytes: u64,
}

/// Largest accepted texts: several times the tokenizer of a model with 260,000 tokens.
const MAX_BYTES: u64 = 128 << 20;

/// Queue group of the workers that serve the same texts.
const QUEUE_GROUP: &str = "texts";

impl Texts {
    /// The texts of a model; `None` if it has none.
    pub(super) fn of(model: &ModelCard) -> Option<Self> {
        let ModelCard { tokenizer, chat_template, .. } = model;
        (tokenizer.is_some() || chat_template.is_some())
            .then(|| Self { tokenizer: tokenizer.clone(), chat_template: chat_template.clone() })
    }

    pub(super) fn reference(&self) -> TextsRef {
        reference(&codec::encode(self))
    }

    pub(super) fn add_to(self, model: ModelCard) -> ModelCard {
        ModelCard { tokenizer: self.tokenizer, chat_template: self.chat_template, ..model }
    }

    /// Serves the texts until the guard is dropped. Returns when a request of this process would be answered.
    pub(super) async fn serve(&self, connection: &Arc<Connection>) -> Result<DropGuard, String> {
        let encoded: Bytes = codec::encode(self).into();
        let subject = connection.subjects.texts(&reference(&encoded).blake3);
        let subscribed = connection.client.queue_subscribe(subject, QUEUE_GROUP.to_owned()).await;
        let mut requests = subscribed.map_err(|error| error.to_string())?;
        let (stop, connection) = (CancellationToken::new(), Arc::clone(connection));
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            while let Some(request) = requests.next().await {
                let piece = codec::decode::<Piece>(&request.payload).ok();
                let Some((reply, piece)) = connection.reply_to(&request).zip(piece) else { continue };
                // An error means that the client is closed.
                let _ = connection.client.publish(reply, transfers::piece_of(&encoded, piece.offset)).await;
            }
        }));
        Ok(stop.drop_guard())
    }
}

fn reference(encoded: &[u8]) -> TextsRef {
    TextsRef { blake3: blake3::hash(encoded).to_hex().to_string(), bytes: encoded.len() as u64 }
}

/// Fetches texts, each once for as long as an instance has them.
#[derive(Default)]
pub(super) struct TextsCache(HashMap<String, Weak<Texts>>);

impl TextsCache {
    pub(super) async fn get(&mut self, connection: &Connection, of: &TextsRef) -> Result<Arc<Texts>, String> {
        if let Some(known) = self.0.get(&of.blake3).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let texts = Arc::new(fetch(connection, of).await?);
        self.0.retain(|_, texts| texts.strong_count() > 0);
        self.0.insert(of.blake3.clone(), Arc::downgrade(&texts));
        Ok(texts)
    }
}

async fn fetch(connection: &Connection, of: &TextsRef) -> Result<Texts, String> {
    if of.bytes > MAX_BYTES {
        return Err(format!("the tokenizer and chat template have {} bytes; the limit is {MAX_BYTES}", of.bytes));
    }
    let subject = connection.subjects.texts(&of.blake3);
    let encoded = transfers::fetch(Bytes::new(), of.bytes, async |offset| {
        let request = codec::encode(&Piece { offset }).into();
        let answer = connection.client.request(subject.clone(), request).await;
        answer
            .map(|answer| answer.payload)
            .map_err(|error| format!("no worker sends the tokenizer and chat template: {error}"))
    })
    .await?;
    if reference(&encoded) != *of {
        return Err("the tokenizer and chat template do not have the hash of the record".to_owned());
    }
    codec::decode(&encoded).map_err(|error| error.to_string())
}
