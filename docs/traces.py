"""Generates traces for `blockyard replay` that the router was not developed with, in Mooncake's format.

    python3 docs/traces.py traces
    blockyard replay traces/mixed-lengths.jsonl

The same seed gives the same traces. A replay scales their rates to the load factors of `--load-factor`.
"""

import argparse
import json
import math
import pathlib
import random

# Tokens of a block.
BLOCK = 512
REQUESTS = 8000


class Trace:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.rows = []
        self.next_block = 1
        # Id of the block with this content after this prefix.
        self.chained = {}

    def blocks(self, tokens):
        """Blocks that no other prompt has."""
        count = tokens // BLOCK
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def add(self, seconds, blocks, prompt, output):
        self.rows.append((seconds, max(prompt, 1), max(int(output), 1), list(blocks)))

    def lognormal(self, median, sigma, least, most):
        return int(min(most, max(least, median * math.exp(self.random.gauss(0, sigma)))))

    def zipf(self, count, exponent):
        return self.random.choices(range(count), [1 / (rank + 1) ** exponent for rank in range(count)])[0]

    def poisson(self, rate):
        """Arrival times at this many per second, without end."""
        seconds = 0
        while True:
            seconds += self.random.expovariate(rate)
            yield seconds

    def session(self, seconds, blocks, length, turns, user, output, think):
        """A conversation: each prompt has the one before, its answer, and new text."""
        blocks = list(blocks)
        for _ in range(turns):
            prompt = length + user()
            self.fill(blocks, prompt)
            tokens = output()
            self.add(seconds, blocks, prompt, tokens)
            length = prompt + tokens
            self.fill(blocks, length)
            seconds += tokens * 0.02 + think()

    def fill(self, blocks, tokens):
        while len(blocks) < tokens // BLOCK:
            blocks.append(self.next_block)
            self.next_block += 1

    def write(self, path):
        self.rows.sort(key=lambda row: row[0])
        with path.open("w") as file:
            for seconds, prompt, output, blocks in self.rows:
                blocks = blocks[: -(-prompt // BLOCK)]
                # The last block, which the prompt does not fill, is its own.
                while len(blocks) < -(-prompt // BLOCK):
                    blocks.append(self.next_block)
                    self.next_block += 1
                row = {"timestamp": int(seconds * 1000), "input_length": prompt, "output_length": output}
                file.write(json.dumps(row | {"hash_ids": blocks}) + "\n")


def assistants(trace):
    """Conversations after one of 200 system prompts of about 2,000 tokens, some of which are popular."""
    prompts = []
    for _ in range(200):
        length = trace.lognormal(2000, 0.9, 512, 16384) // BLOCK * BLOCK
        prompts.append((trace.blocks(length), length))
    for seconds in trace.poisson(4):
        blocks, length = prompts[trace.zipf(200, 1.0)]
        turns = min(12, 1 + int(trace.random.expovariate(1 / 2.0)))
        trace.session(
            seconds,
            blocks,
            length,
            turns,
            lambda: trace.lognormal(200, 1, 10, 8000),
            lambda: trace.lognormal(250, 0.8, 5, 3000),
            lambda: trace.random.expovariate(1 / 15),
        )
        if len(trace.rows) >= REQUESTS:
            return


def reasoning(trace):
    """Short prompts that share nothing, and outputs of about 2,500 tokens."""
    for seconds in trace.poisson(4):
        trace.add(seconds, [], trace.lognormal(500, 1, 50, 8000), trace.lognormal(2500, 0.8, 200, 16000))
        if len(trace.rows) == REQUESTS // 2:
            return


def classification(trace):
    """One of 20 instructions of 1,536 tokens, about 250 of text, and an output of one to five tokens."""
    prompts = [(trace.blocks(1536), 1536) for _ in range(20)]
    for seconds in trace.poisson(20):
        blocks, length = prompts[trace.zipf(20, 0.7)]
        trace.add(seconds, blocks, length + trace.lognormal(250, 0.6, 20, 2000), trace.random.randint(1, 5))
        if len(trace.rows) == 4 * REQUESTS:
            return


def retrieval(trace):
    """A system prompt, two to five of 500 documents of 1,024 tokens in any order, and a short question."""
    system = trace.blocks(1024)
    documents = [trace.blocks(1024) for _ in range(500)]
    for seconds in trace.poisson(8):
        content, count, chosen = list(system), trace.random.randint(2, 5), []
        while len(chosen) < count:
            document = trace.zipf(500, 1.1)
            if document not in chosen:
                chosen.append(document)
        for document in chosen:
            content += documents[document]
        blocks, before = [], 0
        for block in content:
            before = trace.chained.setdefault((before, block), len(trace.chained) + 10**7)
            blocks.append(before)
        trace.add(
            seconds, blocks, len(blocks) * BLOCK + trace.lognormal(60, 0.5, 5, 500), trace.lognormal(180, 0.6, 10, 1500)
        )
        if len(trace.rows) == 2 * REQUESTS:
            return


def fan_out(trace):
    """Agents that start three to twelve others at once, which share a context of about 16,000 tokens."""
    requests = 0
    for seconds in trace.poisson(0.4):
        length = trace.lognormal(16000, 0.5, 4096, 60000) // BLOCK * BLOCK
        base = trace.blocks(length)
        trace.add(seconds, base, length + 200, 300)
        for _ in range(trace.random.randint(3, 12)):
            trace.session(
                seconds + 8 + trace.random.random() * 0.3,
                base,
                length,
                trace.random.randint(1, 4),
                lambda: trace.lognormal(600, 0.7, 50, 8000),
                lambda: trace.lognormal(300, 0.7, 20, 2000),
                lambda: trace.random.expovariate(1 / 3),
            )
            requests += 2
        if requests >= REQUESTS:
            return


def mixed_lengths(trace):
    """Short conversations, and in between prompts of about 30,000 tokens that share nothing."""
    for seconds in trace.poisson(5):
        if trace.random.random() < 0.08:
            trace.add(seconds, [], trace.lognormal(30000, 0.5, 8000, 100000), trace.lognormal(400, 0.5, 50, 2000))
        else:
            trace.session(
                seconds,
                [],
                0,
                1 + int(trace.random.expovariate(1 / 2)),
                lambda: trace.lognormal(300, 0.8, 20, 3000),
                lambda: trace.lognormal(200, 0.8, 5, 1500),
                lambda: trace.random.expovariate(1 / 20),
            )
        if len(trace.rows) >= REQUESTS:
            return


def waves(trace):
    """Conversations after five system prompts, at a rate that rises and falls every two minutes."""
    prompts, seconds = [(trace.blocks(3072), 3072) for _ in range(5)], 0
    while len(trace.rows) < REQUESTS:
        rate = 3 * (1 + 0.9 * math.sin(seconds / 120 * 2 * math.pi))
        seconds += trace.random.expovariate(max(rate, 0.1))
        blocks, length = prompts[trace.zipf(5, 1.0)]
        trace.session(
            seconds,
            blocks,
            length,
            1 + int(trace.random.expovariate(1 / 2)),
            lambda: trace.lognormal(250, 0.8, 20, 3000),
            lambda: trace.lognormal(250, 0.8, 5, 1500),
            lambda: trace.random.expovariate(1 / 10),
        )


def code_completion(trace):
    """Completions of about 30 tokens every two seconds, after a file of about 4,000 that changes near its end."""
    for seconds in trace.poisson(1):
        length = trace.lognormal(4000, 0.5, 1024, 12000)
        blocks = trace.blocks(length // BLOCK * BLOCK)
        for _ in range(trace.random.randint(5, 40)):
            kept = blocks[: max(len(blocks) - trace.random.choice([0, 0, 0, 0, 1, 1, 2]), 0)]
            trace.add(seconds, kept, length, trace.random.randint(5, 60))
            trace.fill(kept, length)
            blocks, length = kept, length + trace.random.randint(0, 60)
            trace.fill(blocks, length)
            seconds += 0.5 + trace.random.expovariate(1 / 1.5)
        if len(trace.rows) >= REQUESTS:
            return


def long_chat(trace):
    """Conversations of 8 to 40 turns, which grow to tens of thousands of tokens."""
    for seconds in trace.poisson(0.5):
        trace.session(
            seconds,
            [],
            0,
            trace.random.randint(8, 40),
            lambda: trace.lognormal(900, 1, 20, 16000),
            lambda: trace.lognormal(350, 0.8, 5, 3000),
            lambda: trace.random.expovariate(1 / 8),
        )
        if len(trace.rows) >= REQUESTS:
            return


def two_hot_prefixes(trace):
    """A prefix of 8k tokens in 40 % of the requests, one of 24k in 10 %, and none in the others."""
    hot, longer = trace.blocks(8192), trace.blocks(24576)
    for seconds in trace.poisson(10):
        kind = trace.random.random()
        if kind < 0.4:
            trace.add(
                seconds, hot, 8192 + trace.lognormal(300, 0.8, 20, 4000), trace.lognormal(200, 0.8, 5, 2000)
            )
        elif kind < 0.5:
            trace.add(
                seconds, longer, 24576 + trace.lognormal(300, 0.8, 20, 4000), trace.lognormal(500, 0.8, 5, 2000)
            )
        else:
            trace.add(seconds, [], trace.lognormal(1200, 1, 20, 16000), trace.lognormal(200, 0.8, 5, 2000))
        if len(trace.rows) == REQUESTS:
            return


KINDS = [
    assistants,
    reasoning,
    classification,
    retrieval,
    fan_out,
    mixed_lengths,
    waves,
    code_completion,
    long_chat,
    two_hot_prefixes,
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=pathlib.Path, help="where the traces are written")
parser.add_argument("--seed", type=int, default=7)
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)
for kind in KINDS:
    trace = Trace(options.seed)
    kind(trace)
    path = options.folder / f"{kind.__name__.replace('_', '-')}.jsonl"
    trace.write(path)
    prompt, output = (sum(row[at] for row in trace.rows) // len(trace.rows) for at in (1, 2))
    print(f"{path}: {len(trace.rows)} requests, on average {prompt} tokens of prompt and {output} of output")
