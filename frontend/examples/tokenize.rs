//! Compares the tokens and the speed of prompts with those of the tokenizer library:
//! `tokenize TOKENIZER.JSON TEXT… [--json]`.
//!
//! Each text is tokenized line group by line group of about 1 KiB, which is what prompts are cut into, on one thread.
//! First all groups as new text, then again: the gateway finds these in its cache, the library finds its words.

use frontend::{LocalTokenizer, TokenizerText};
use serde_json::json;
use std::time::Instant;
use tokenizers::Tokenizer;

type Failure = Box<dyn std::error::Error>;

/// Size of a group of lines.
const GROUP_BYTES: usize = 1 << 10;

fn main() -> Result<(), Failure> {
    let (flags, paths): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|argument| argument == "--json");
    let (as_json, mut paths) = (!flags.is_empty(), paths.into_iter());
    let json = std::fs::read_to_string(paths.next().ok_or("usage: tokenize TOKENIZER.JSON TEXT… [--json]")?)?;
    let started = Instant::now();
    let library = Tokenizer::from_bytes(&json).map_err(|error| error.to_string())?;
    let library_loaded = started.elapsed();
    let ours = LocalTokenizer::new(TokenizerText { tokenizer: &json, chat_template: None, special_tokens: &[] })?;
    let loaded = started.elapsed().saturating_sub(library_loaded);
    if !as_json {
        println!("loaded in {library_loaded:.0?} (library), {loaded:.0?} (gateway: library, checks, own tables)");
    }
    for path in paths {
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        let groups = groups(&text);
        let (mut tokens, mut times) = ([0, 0], Vec::new());
        for _ in 0..2 {
            let started = Instant::now();
            for group in &groups {
                let encoded = library.encode_fast(*group, false).map_err(|error| error.to_string())?;
                tokens[0] += encoded.get_ids().len();
            }
            times.push(started.elapsed());
            let started = Instant::now();
            for group in &groups {
                tokens[1] += ours.text_tokens(group)?.len();
            }
            times.push(started.elapsed());
        }
        for group in groups.iter().copied().chain([text.as_str()]) {
            let want = library.encode_fast(group, false).map_err(|error| error.to_string())?;
            if ours.text_tokens(group)? != want.get_ids() {
                return Err(format!("{path}: the tokens differ: {group:?}").into());
            }
        }
        if as_json {
            let [_, new, _, again] = times[..] else { unreachable!("four times were measured") };
            let (new_s, again_s) = (new.as_secs_f64(), again.as_secs_f64());
            println!("{}", json!({ "bytes": text.len(), "tokens": tokens[1] / 2, "new_s": new_s, "again_s": again_s }));
            continue;
        }
        let speed = |number: usize| text.len() as f64 / times[number].as_secs_f64() / 1e6;
        println!(
            "{path}: {} bytes, {} tokens, equal; MB/s new: library {:.1}, gateway {:.1} ({:.0}x); again: {:.1}, {:.1}",
            text.len(),
            tokens[0] / 2,
            speed(0),
            speed(1),
            speed(1) / speed(0),
            speed(2),
            speed(3),
        );
    }
    Ok(())
}

/// The text in groups of lines.
fn groups(text: &str) -> Vec<&str> {
    let (mut groups, mut start, mut end) = (Vec::new(), 0, 0);
    for line in text.split_inclusive('\n') {
        end += line.len();
        if end - start >= GROUP_BYTES {
            groups.push(&text[start..end]);
            start = end;
        }
    }
    groups.push(&text[start..]);
    groups
}
