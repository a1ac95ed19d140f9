#!/usr/bin/env python3
"""Trains the byte-pair merges of the built-in models and writes `merges.bin`.

    pip install tokenizers==0.23.3
    train_merges.py "$(rustc --print sysroot)/share/doc/rust/html"      # rustup component rust-docs, 1.95.0

The text is the documentation that comes with Rust 1.95.0: its books, its release notes, and the prose of std, alloc and
core; MIT OR Apache-2.0, "The Rust Project Developers". Every line is counted once, so that boilerplate has no weight.

`merges.bin` is the list of merges, each two little-endian u16. A number below 256 is that byte; 256 + i is what merge i
made. Everything else of a tokenizer.json follows from it, see `tokenizer.rs`.
"""
import html
import json
import pathlib
import re
import struct
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

MERGES = 31_740  # 32,000 tokens with 256 bytes and 4 special ones
BOOKS = ("book", "cargo", "clippy", "edition-guide", "embedded-book", "error_codes", "nomicon", "reference",
         "rust-by-example", "rustc", "rustdoc", "style-guide", "unstable-book")
BLOCK = re.compile(r"<(p|li|h[1-6]|pre|td)\b[^>]*>(.*?)</\1>", re.S)
TAG = re.compile(r"<[^>]+>")


def lines(page):
    for _, inner in BLOCK.findall(page):
        yield from html.unescape(TAG.sub("", inner)).split("\n")


def corpus(docs):
    seen = set()
    pages = [docs / book / "print.html" for book in BOOKS]
    pages += sorted(p for crate in ("std", "alloc", "core") for p in (docs / crate).rglob("*.html") if "/arch/" not in str(p))
    sources = [lines(p.read_text(errors="replace")) for p in pages] + [(docs / "releases.md").read_text().split("\n")]
    for source in sources:
        for line in source:
            if line.strip() and line not in seen:
                seen.add(line)
                yield line + "\n"


def main():
    docs, out = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).with_name("merges.bin")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = list(corpus(docs))
    print(f"{len(text)} lines, {sum(map(len, text)) / 1e6:.1f} M characters")
    # Some merges make a token that an earlier merge made already; train a few more, and leave those out.
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=256 + MERGES + 2000, initial_alphabet=alphabet, show_progress=False, max_token_length=32))
    shown = {shown: byte for byte, shown in byte_to_char().items()}
    numbers = dict(shown)
    merges = []
    for left, right in (m if isinstance(m, list) else m.split(" ") for m in json.loads(tokenizer.to_str())["model"]["merges"]):
        if left + right not in numbers and len(merges) < MERGES:
            numbers[left + right] = 256 + len(merges)
            merges.append((numbers[left], numbers[right]))
    assert len(merges) == MERGES, f"the text yields {len(merges)} merges only"
    out.write_bytes(b"".join(struct.pack("<HH", *m) for m in merges))
    print(f"{out}: {len(merges)} merges, {out.stat().st_size} bytes")


def byte_to_char():
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


if __name__ == "__main__":
    main()
