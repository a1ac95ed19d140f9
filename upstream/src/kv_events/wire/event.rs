//! One event: its fields in both encodings, and the typed events that they make up.

use super::{Head, Reader, WireError};

/// The engine's own hash of a block: the low 64 bits. vLLM sends these bits as an unsigned number or all 32 bytes,
/// SGLang sends a signed number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EngineHash(pub u64);

/// Where an engine stores a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum Medium {
    /// Device memory: `GPU`, or no medium.
    #[default]
    G1,
    /// Host memory of the engine: `CPU`, `CPU_PINNED`.
    G2,
    /// Local storage of the engine: `DISK`, `STORAGE`.
    G3,
    /// Storage that other engines may share: `EXTERNAL`, or any medium with the locality `REMOTE`.
    Shared,
    /// A name that this release does not know.
    Unknown,
}

impl Medium {
    fn named(name: &[u8]) -> Self {
        match name {
            b"GPU" => Self::G1,
            b"CPU" | b"CPU_PINNED" => Self::G2,
            b"DISK" | b"STORAGE" => Self::G3,
            b"EXTERNAL" | b"REMOTE" => Self::Shared,
            _ => Self::Unknown,
        }
    }
}

/// What a key-value cache group of a hybrid model stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GroupKind {
    /// The engine did not say.
    #[default]
    Unspecified,
    /// The keys and values of all tokens: `full_attention`, and its variants with MLA or sinks.
    FullAttention,
    /// Only some tokens or a state: sliding window, Mamba, and names that this release does not know.
    Other,
}

impl GroupKind {
    fn named(name: &[u8]) -> Self {
        match name {
            b"full_attention" | b"mla_attention" | b"sink_full_attention" => Self::FullAttention,
            _ => Self::Other,
        }
    }
}

/// What a block's hash depends on besides its tokens and its parent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtraKey {
    /// A text without a tag: the name of an adapter, or the cache salt, which only the first block of a chain has. In
    /// old releases also the identifier of a multimodal item.
    Text(Box<str>),
    /// Content that the token ids do not identify: a multimodal item, embeddings.
    Content,
}

/// Blocks were stored: a run of one chain.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stored {
    /// Hashes of the blocks, each the child of the one before it.
    pub blocks: Vec<EngineHash>,
    /// Parent of the first block.
    pub parent: Option<EngineHash>,
    /// Tokens of all blocks; empty in a placeholder.
    pub tokens: Vec<u32>,
    /// Whether a token id was no `u32`. Such ids stand for multimodal content; `tokens` is empty then.
    pub foreign_tokens: bool,
    /// Tokens per block; 0 in a placeholder.
    pub block_size: u32,
    /// Where the blocks are.
    pub medium: Medium,
    /// Whether the blocks belong to an adapter, as the engine's own number or id of it says.
    pub has_lora_id: bool,
    /// Name of the adapter.
    pub lora_name: Option<Box<str>>,
    /// Cache salt of the chain; SGLang sends it as a field of its own.
    pub cache_salt: Option<Box<str>>,
    /// The extra keys of the blocks that have some, with the position of the block.
    pub extra_keys: Vec<(u32, ExtraKey)>,
    /// Key-value cache group of a hybrid model.
    pub group: Option<u32>,
    /// What that group stores.
    pub group_kind: GroupKind,
    /// Name of the offloading tier that announces the blocks; `None` for the engine itself.
    pub ownership: Option<Box<str>>,
}

/// Blocks were removed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Hashes of the blocks, in any order.
    pub blocks: Vec<EngineHash>,
    /// Where the blocks were.
    pub medium: Medium,
    /// Key-value cache group of a hybrid model.
    pub group: Option<u32>,
    /// Name of the offloading tier; `None` for the engine itself.
    pub ownership: Option<Box<str>>,
}

/// A change of the engine's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Blocks were stored.
    Stored(Box<Stored>),
    /// Blocks were removed.
    Removed(Removed),
    /// The engine has no blocks now.
    Cleared,
}

#[derive(Clone, Copy)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

#[derive(Clone, Copy)]
enum Field {
    Type,
    BlockHashes,
    ParentBlockHash,
    TokenIds,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    GroupIdx,
    GroupKind,
    Locality,
    Ownership,
    CacheSalt,
    Skipped,
}

/// Order of the fields after the type when an event is an array. SGLang's order ends with the cache salt in place of
/// the adapter name. It is read as a name: the blocks keep apart from all others, and no request finds them.
const STORED: [Field; 13] = [
    Field::BlockHashes,
    Field::ParentBlockHash,
    Field::TokenIds,
    Field::BlockSize,
    Field::LoraId,
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::GroupIdx,
    Field::GroupKind,
    Field::Skipped,
    Field::Locality,
    Field::Ownership,
];
const REMOVED: [Field; 5] = [Field::BlockHashes, Field::Medium, Field::GroupIdx, Field::Locality, Field::Ownership];

impl Field {
    fn named(name: &[u8]) -> Self {
        match name {
            b"type" => Self::Type,
            b"block_hashes" => Self::BlockHashes,
            b"parent_block_hash" => Self::ParentBlockHash,
            b"token_ids" => Self::TokenIds,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"medium" => Self::Medium,
            b"lora_name" => Self::LoraName,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::GroupIdx,
            b"kv_cache_spec_kind" => Self::GroupKind,
            b"locality" => Self::Locality,
            b"ownership" => Self::Ownership,
            b"cache_salt" => Self::CacheSalt,
            _ => Self::Skipped,
        }
    }
}

/// The fields read so far, of any kind of event.
#[derive(Default)]
pub(super) struct Fields {
    kind: Option<Kind>,
    has_blocks: bool,
    remote: bool,
    stored: Stored,
}

impl Fields {
    /// Reads an event in either encoding.
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut fields = Self::default();
        match reader.head()? {
            Head::Map(pairs) => {
                for _ in 0..pairs {
                    let Head::Text(name) = reader.head()? else { return Err(WireError::Unexpected("field name")) };
                    fields.value(Field::named(name), reader)?;
                }
            }
            Head::Array(len @ 1..) => {
                fields.value(Field::Type, reader)?;
                let order = match fields.kind {
                    Some(Kind::Stored) => &STORED[..],
                    Some(Kind::Removed) => &REMOVED[..],
                    _ => &[],
                };
                for at in 0..len - 1 {
                    fields.value(order.get(at).copied().unwrap_or(Field::Skipped), reader)?;
                }
            }
            _ => return Err(WireError::Unexpected("event")),
        }
        Ok(fields)
    }

    /// The event, or `None` if its type is not known.
    pub(super) fn into_event(self) -> Result<Option<Event>, WireError> {
        let Self { kind, has_blocks, remote, mut stored } = self;
        if remote {
            stored.medium = Medium::Shared;
        }
        match kind {
            None => Ok(None),
            Some(Kind::Cleared) => Ok(Some(Event::Cleared)),
            Some(_) if !has_blocks => Err(WireError::Unexpected("block_hashes")),
            Some(Kind::Stored) => Ok(Some(Event::Stored(Box::new(stored)))),
            Some(Kind::Removed) => {
                let Stored { blocks, medium, group, ownership, .. } = stored;
                Ok(Some(Event::Removed(Removed { blocks, medium, group, ownership })))
            }
        }
    }

    fn value(&mut self, field: Field, reader: &mut Reader<'_>) -> Result<(), WireError> {
        let stored = &mut self.stored;
        match field {
            Field::Type => self.kind = kind(reader)?,
            Field::BlockHashes => {
                stored.blocks = blocks(reader)?;
                self.has_blocks = true;
            }
            Field::ParentBlockHash => stored.parent = hash(reader.head()?)?,
            Field::TokenIds => (stored.tokens, stored.foreign_tokens) = tokens(reader)?,
            Field::BlockSize => stored.block_size = number(reader, "block_size")?.unwrap_or(0),
            Field::LoraId => {
                let id = reader.head()?;
                stored.has_lora_id = id != Head::Nil;
                reader.skip_rest(id)?;
            }
            Field::Medium => stored.medium = name(reader, "medium")?.map_or(Medium::G1, Medium::named),
            Field::LoraName => stored.lora_name = text(reader, "lora_name")?,
            Field::ExtraKeys => stored.extra_keys = extra_keys(reader)?,
            Field::GroupIdx => stored.group = number(reader, "group_idx")?,
            Field::GroupKind => {
                stored.group_kind =
                    name(reader, "kv_cache_spec_kind")?.map_or(GroupKind::Unspecified, GroupKind::named);
            }
            Field::Locality => self.remote = name(reader, "locality")? == Some(b"REMOTE"),
            Field::Ownership => stored.ownership = text(reader, "ownership")?,
            Field::CacheSalt => stored.cache_salt = text(reader, "cache_salt")?,
            Field::Skipped => reader.skip()?,
        }
        Ok(())
    }
}

fn kind(reader: &mut Reader<'_>) -> Result<Option<Kind>, WireError> {
    Ok(match name(reader, "type")? {
        Some(b"BlockStored") => Some(Kind::Stored),
        Some(b"BlockRemoved") => Some(Kind::Removed),
        Some(b"AllBlocksCleared") => Some(Kind::Cleared),
        _ => None,
    })
}

fn blocks(reader: &mut Reader<'_>) -> Result<Vec<EngineHash>, WireError> {
    let Head::Array(len) = reader.head()? else { return Err(WireError::Unexpected("block_hashes")) };
    let mut blocks = Vec::with_capacity(len);
    for _ in 0..len {
        blocks.push(hash(reader.head()?)?.ok_or(WireError::Unexpected("block_hashes"))?);
    }
    Ok(blocks)
}

fn hash(head: Head<'_>) -> Result<Option<EngineHash>, WireError> {
    Ok(match head {
        Head::Nil => None,
        Head::Unsigned(hash) => Some(EngineHash(hash)),
        Head::Negative(hash) => Some(EngineHash(hash as u64)),
        // vLLM has hashes of 16 and of 32 bytes; a number is their last 8 bytes.
        Head::Binary(bytes @ [_, .., _]) if matches!(bytes.len(), 8..=64) => {
            let low = bytes.last_chunk().expect("at least 8 bytes");
            Some(EngineHash(u64::from_be_bytes(*low)))
        }
        _ => return Err(WireError::Unexpected("hash")),
    })
}

/// The token ids, and whether some of them were no `u32`.
fn tokens(reader: &mut Reader<'_>) -> Result<(Vec<u32>, bool), WireError> {
    let len = match reader.head()? {
        Head::Nil => 0,
        Head::Array(len) => len,
        _ => return Err(WireError::Unexpected("token_ids")),
    };
    let (mut tokens, mut foreign) = (Vec::with_capacity(len), false);
    reader.small_numbers(len, &mut tokens);
    for _ in tokens.len()..len {
        let token = match reader.head()? {
            // SGLang hashes pairs of a token and the next one for EAGLE.
            Head::Array(2) => {
                let first = reader.head()?;
                reader.skip()?;
                first
            }
            token => token,
        };
        match token {
            Head::Unsigned(token) => match u32::try_from(token) {
                Ok(token) => tokens.push(token),
                Err(_) => foreign = true,
            },
            Head::Negative(_) => foreign = true,
            _ => return Err(WireError::Unexpected("token_ids")),
        }
    }
    Ok((if foreign { Vec::new() } else { tokens }, foreign))
}

/// The keys of the blocks that have some: each block has nil or an array.
fn extra_keys(reader: &mut Reader<'_>) -> Result<Vec<(u32, ExtraKey)>, WireError> {
    let blocks = match reader.head()? {
        Head::Nil => 0,
        Head::Array(blocks) => blocks,
        _ => return Err(WireError::Unexpected("extra_keys")),
    };
    let mut keys = Vec::new();
    for block in 0..blocks {
        let len = match reader.head()? {
            Head::Nil => 0,
            Head::Array(len) => len,
            _ => return Err(WireError::Unexpected("extra_keys")),
        };
        let mut content = false;
        for _ in 0..len {
            match reader.head()? {
                Head::Text(key) => keys.push((block as u32, ExtraKey::Text(utf8(key, "extra_keys")?))),
                Head::Nil => {}
                head => {
                    reader.skip_rest(head)?;
                    content = true;
                }
            }
        }
        if content {
            keys.push((block as u32, ExtraKey::Content));
        }
    }
    Ok(keys)
}

fn number<N: TryFrom<u64>>(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<N>, WireError> {
    match reader.head()? {
        Head::Nil => Ok(None),
        Head::Unsigned(number) => N::try_from(number).map(Some).map_err(|_| WireError::Unexpected(field)),
        _ => Err(WireError::Unexpected(field)),
    }
}

fn name<'a>(reader: &mut Reader<'a>, field: &'static str) -> Result<Option<&'a [u8]>, WireError> {
    match reader.head()? {
        Head::Nil => Ok(None),
        Head::Text(name) => Ok(Some(name)),
        _ => Err(WireError::Unexpected(field)),
    }
}

fn text(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<Box<str>>, WireError> {
    name(reader, field)?.map(|text| utf8(text, field)).transpose()
}

fn utf8(text: &[u8], field: &'static str) -> Result<Box<str>, WireError> {
    str::from_utf8(text).map(Box::from).map_err(|_| WireError::Unexpected(field))
}
