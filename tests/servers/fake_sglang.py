"""A server that speaks as SGLang 0.5.23 does, without a model: OpenAI's API, `/server_info`, and KV events over ZMQ.

    fake_sglang.py [--port 30000] [--kv-port 5557] [--dp-size 1] [--page-size 64]

A token is a word, and takes half a millisecond to compute, so that a cached prefix is worth a choice of the router.
Each data-parallel rank has a cache of whole pages, which nothing evicts, and a publisher at the KV port plus the rank;
its replay socket is a hundred ports above. A request is served by the rank in its header `X-Data-Parallel-Rank`, else
by the ranks in turn. Names and types of the fields of `/server_info`, and of the events, are those of the published
package (`upstream/tests/fixtures/server_info`).
"""

import argparse
import hashlib
import http.server
import itertools
import json
import pathlib
import re
import struct
import threading
import time
import zlib

import zmq

MODEL = "org/model"
CONTEXT = 8192
FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "upstream" / "tests" / "fixtures"
REPLAY_PORTS = 100
SECONDS_PER_TOKEN = 0.0005
BUFFERED = 10_000


def packed(value):
    """A value in msgpack."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if isinstance(value, str):
        return b"\xda" + struct.pack(">H", len(value.encode())) + value.encode()
    if isinstance(value, dict):
        pairs = itertools.chain.from_iterable(value.items())
        return b"\xde" + struct.pack(">H", len(value)) + b"".join(map(packed, pairs))
    return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def tokens_of(request):
    """The tokens of a prompt or of messages."""
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if prompt is None:
        turns = (f"<|{one['role']}|> {one.get('content') or ''}" for one in request["messages"])
        prompt = " ".join(turns) + " <|assistant|>"
    return [zlib.crc32(word.encode()) % 100_000 for word in re.findall(r"\S+", prompt)]


class Rank:
    """The cache of a data-parallel rank, and its publisher."""

    def __init__(self, number, page_size, kv_port):
        self.number, self.page_size = number, page_size
        self.pages, self.buffer, self.lock = set(), [], threading.Lock()
        context = zmq.Context.instance()
        self.publisher = context.socket(zmq.PUB)
        self.publisher.bind(f"tcp://127.0.0.1:{kv_port + number}")
        replay = context.socket(zmq.ROUTER)
        replay.bind(f"tcp://127.0.0.1:{kv_port + REPLAY_PORTS + number}")
        threading.Thread(target=self.replay, args=(replay,), daemon=True).start()

    def replay(self, router):
        while True:
            identity, _, start = router.recv_multipart()
            with self.lock:
                frames = [frames for frames in self.buffer if frames[1] >= start]
            for batch in frames:
                router.send_multipart([identity, b"", *batch])
            router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])

    def compute(self, tokens, salt):
        """Stores the whole pages of a prompt. Returns the number of tokens that were there before."""
        size, parent, hashes, cached = self.page_size, None, [], 0
        chain = hashlib.sha256((salt or "").encode()).digest()
        with self.lock:
            new_parent, new_tokens = None, []
            for start in range(0, len(tokens) - size + 1, size):
                page = tokens[start : start + size]
                chain = hashlib.sha256(chain + json.dumps(page).encode()).digest()
                page_hash = int.from_bytes(chain[:8], "big", signed=True)
                if page_hash in self.pages and not hashes:
                    # The last token is computed in any case.
                    cached += size if start + size < len(tokens) else 0
                else:
                    if not hashes:
                        new_parent = parent
                    hashes.append(page_hash)
                    new_tokens += page
                parent = page_hash
            if hashes:
                self.pages.update(hashes)
                self.publish(self.stored(hashes, new_parent, new_tokens, salt))
        return cached

    def stored(self, hashes, parent, tokens, salt):
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self.page_size,
            "lora_id": None,
            "medium": "GPU",
        }
        return event | ({"cache_salt": salt} if salt else {})

    def publish(self, event):
        number = self.buffer[-1][1] if self.buffer else None
        number = 0 if number is None else int.from_bytes(number, "big") + 1
        frames = [b"", number.to_bytes(8, "big"), packed([time.time(), [event], self.number])]
        self.buffer = (self.buffer + [frames])[-BUFFERED:]
        self.publisher.send_multipart(frames)


class Sglang(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, options):
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        self.ranks = [Rank(number, options.page_size, options.kv_port) for number in range(options.dp_size)]
        self.turns = itertools.cycle(self.ranks)

    def pages(self):
        salted = {"properties": {"cache_salt": {"type": "string"}}}
        ranks = range(self.options.dp_size) if self.options.dp_size > 1 else [None]
        label = lambda rank: "" if rank is None else f'{{dp_rank="{rank}"}}'
        names = ["num_running_reqs", "num_queue_reqs", "token_usage", "max_total_num_tokens"]
        values = dict.fromkeys(names, 0) | {"max_total_num_tokens": 20480}
        metrics = [f"sglang:{name}{label(rank)} {values[name]}" for name in names for rank in ranks]
        card = {"id": MODEL, "object": "model", "owned_by": "sglang", "root": MODEL, "max_model_len": CONTEXT}
        return {
            "/health": {},
            "/v1/models": {"object": "list", "data": [card | {"created": int(time.time()), "parent": None}]},
            "/server_info": self.info(),
            "/openapi.json": {"paths": {}, "components": {"schemas": {"ChatCompletionRequest": salted}}},
            "/metrics": "\n".join(metrics) + "\n",
        }

    def info(self):
        info = json.loads((FIXTURES / "server_info" / "sglang-0.5.23.json").read_text())
        kv_port, page_size, dp_size = self.options.kv_port, self.options.page_size, self.options.dp_size
        config = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{kv_port}",
            "replay_endpoint": f"tcp://*:{kv_port + REPLAY_PORTS}",
        }
        described = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": kv_port,
            "topic": "",
            "block_size": page_size,
            "dp_size": dp_size,
            "replay_endpoint_port_base": kv_port + REPLAY_PORTS,
        }
        changed = {"model_path": MODEL, "served_model_name": MODEL, "port": self.options.port, "page_size": page_size}
        changed |= {"tp_size": dp_size, "dcp_size": 1, "dp_size": 1, "attn_dp_size": dp_size}
        return info | changed | {"kv_events_config": json.dumps(config), "kv_events": described}

    def answer(self, path, request, rank):
        """The answer to a completion, or its parts if it is streamed."""
        tokens = tokens_of(request)
        rank = next(self.turns) if rank is None else self.ranks[int(rank)]
        cached = rank.compute(tokens, request.get("cache_salt"))
        time.sleep((len(tokens) - cached) * SECONDS_PER_TOKEN)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        is_chat = path == "/v1/chat/completions"
        kind = "chat.completion" if is_chat else "text_completion"
        common = {"id": f"cmpl-{time.time_ns()}", "created": int(time.time()), "model": MODEL}
        choice = {"index": 0, "finish_reason": "length", "logprobs": None}
        if not request.get("stream"):
            output = {"message": {"role": "assistant", "content": "ok"}} if is_chat else {"text": "ok"}
            return common | {"object": kind, "choices": [choice | output], "usage": usage}
        output = {"delta": {"role": "assistant", "content": "ok"}} if is_chat else {"text": "ok"}
        chunk = common | {"object": "chat.completion.chunk" if is_chat else kind}
        parts = [chunk | {"choices": [choice | output]}]
        if (request.get("stream_options") or {}).get("include_usage"):
            parts.append(chunk | {"choices": [], "usage": usage})
        return parts


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        page = self.server.pages().get(self.path)
        self.send(404 if page is None else 200, {"detail": "Not Found"} if page is None else page)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        if self.path == "/tokenize":
            tokens = tokens_of(request)
            self.send(200, {"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT})
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            answer = self.server.answer(self.path, request, self.headers.get("x-data-parallel-rank"))
            if isinstance(answer, list):
                events = [compact(part) for part in answer] + ["[DONE]"]
                self.send(200, "".join(f"data: {event}\n\n" for event in events), "text/event-stream")
            else:
                self.send(200, answer)
        else:
            self.send(404, {"detail": "Not Found"})

    def send(self, status, body, kind="text/plain"):
        if not isinstance(body, str):
            body, kind = compact(body), "application/json"
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(description="A server that speaks as SGLang 0.5.23 does, without a model.")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--kv-port", type=int, default=5557)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=64)
    Sglang(parser.parse_args()).serve_forever()


if __name__ == "__main__":
    main()
