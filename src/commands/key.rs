//! `blockyard key`: adds, lists and removes API keys in a key file. Running servers follow the file.

use crate::commands::cli::at_least_one;
use crate::commands::output;
use anyhow::Context;
use clap::{Args, Subcommand};
use frontend::{ApiKey, KeyEntry, KeyFile};
use serde_json::json;
use std::fmt::Display;
use std::num::NonZero;
use std::path::PathBuf;

/// `blockyard key`.
#[derive(Args, Debug)]
pub struct Key {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Create a key, and print it this one time: the file has only its hash.
    ///
    /// A server whose `frontend.api_keys_file` is this file knows the key within a second.
    Add {
        /// Name of the key, as the log shows it
        name: String,
        #[command(flatten)]
        file: File,
        /// Tenant of requests with this key: its cached blocks are kept apart from those of other tenants
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        /// A model that the key may use; may be repeated [default: all]
        #[arg(long = "model", value_name = "MODEL", value_parser = model_name)]
        models: Vec<String>,
        /// Maximum requests per minute [default: no limit]
        #[arg(long, value_name = "N", value_parser = at_least_one::<NonZero<u32>>)]
        requests_per_minute: Option<NonZero<u32>>,
        /// Maximum tokens per minute, of prompts and outputs together [default: no limit]
        #[arg(long, value_name = "N", value_parser = at_least_one::<NonZero<u32>>)]
        tokens_per_minute: Option<NonZero<u32>>,
        /// Print JSON: an object with `name` and `key`
        #[arg(long)]
        json: bool,
    },
    /// List the keys: names and what they may use.
    List {
        #[command(flatten)]
        file: File,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a key. Servers refuse it within a second; requests that run go on.
    Remove {
        /// Name of the key
        name: String,
        #[command(flatten)]
        file: File,
    },
}

#[derive(Args, Debug)]
struct File {
    /// The key file, which `frontend.api_keys_file` of the server names; `add` creates it
    #[arg(long = "file", value_name = "PATH")]
    path: PathBuf,
}

fn model_name(name: &str) -> Result<String, &'static str> {
    if name.trim().is_empty() {
        Err("expected the name of a model, as /v1/models lists it")
    } else {
        Ok(name.to_owned())
    }
}

/// Runs the command.
pub fn run(key: &Key) -> anyhow::Result<()> {
    match &key.command {
        Command::Add { name, file, tenant, models, requests_per_minute, tokens_per_minute, json } => {
            let key = ApiKey::generate()?;
            let entry = KeyEntry {
                tenant: tenant.clone(),
                models: (!models.is_empty()).then(|| models.clone()),
                requests_per_minute: *requests_per_minute,
                tokens_per_minute: *tokens_per_minute,
                ..KeyEntry::new(name, key.hash())
            };
            KeyFile::change(&file.path, |known| {
                if known.keys.iter().any(|key| key.name == *name) {
                    let path = file.path.display();
                    return Err(format!(
                        "`{name}` exists already; remove it first: blockyard key remove --file {path} {name}"
                    ));
                }
                known.keys.push(entry);
                Ok(())
            })?;
            // The entry holds only a hash, so a key that was not shown is of no use.
            let created = if *json {
                format!("{}\n", json!({ "name": name, "key": key.reveal() }))
            } else {
                format!("{}\n", key.reveal())
            };
            output::print_to_the_end(&created).with_context(|| {
                format!(
                    "the key could not be written to standard output and cannot be shown again; remove it with \
                     `blockyard key remove {name} --file {}`",
                    file.path.display()
                )
            })?;
            output::note(format_args!("This is the only time that the key of {name:?} is shown. Clients send it as"));
            output::note(format_args!("  Authorization: Bearer KEY"));
        }
        Command::List { file, json } => return list(&KeyFile::read(&file.path)?.keys, *json),
        Command::Remove { name, file } => {
            let path = &file.path;
            // A missing file is a typing error, and not to be created.
            KeyFile::read(path)?;
            KeyFile::change(path, |file| {
                let before = file.keys.len();
                file.keys.retain(|key| key.name != *name);
                if file.keys.len() < before {
                    return Ok(());
                }
                let known: Vec<_> = file.keys.iter().map(|key| key.name.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(format!("no key {name:?}; it has {known}"))
            })?;
            output::note(format_args!("Removed {name:?}. Servers that use the file refuse it within a second."));
        }
    }
    Ok(())
}

fn list(keys: &[KeyEntry], as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let key = |key: &KeyEntry| {
            json!({
                "name": key.name,
                "created": key.created.map(|date| date.to_string()),
                "tenant": key.tenant,
                "models": key.models,
                "requests_per_minute": key.requests_per_minute,
                "tokens_per_minute": key.tokens_per_minute,
            })
        };
        return output::print(&format!("{:#}\n", json!(keys.iter().map(key).collect::<Vec<_>>())));
    }
    let row = |key: &KeyEntry| {
        [
            key.name.clone(),
            or_none(key.created),
            or_none(key.tenant.as_ref()),
            or_none(key.requests_per_minute),
            or_none(key.tokens_per_minute),
            key.models.as_ref().map_or_else(|| "all".to_owned(), |models| models.join(" ")),
        ]
    };
    let head = ["name", "created", "tenant", "requests/min", "tokens/min", "models"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(keys.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: [usize; 5] = std::array::from_fn(width);
    let line = |row: &[String; 6]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}  {}\n", cells.collect::<Vec<_>>().join("  "), row[5])
    };
    output::print(&rows.iter().map(line).collect::<String>())
}

fn or_none(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
