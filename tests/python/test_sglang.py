"""The gateway and the doctor in front of servers that speak as SGLang does (`tests/servers/fake_sglang.py`).

Nothing but the URLs is configured: sockets, page size and ranks are those that `/server_info` says.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time

from process import ROOT, Server, binary, environment, free_port, serve

FAKE = ROOT / "tests" / "servers" / "fake_sglang.py"
PAGE = 64
TIMEOUT = 30


def free_kv_port(ranks):
    """A port that is free, with those after it for the other ranks, and those of the replay sockets."""
    while True:
        first = free_port()
        ports = [first + offset + rank for offset in (0, 100) for rank in range(ranks)]
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
        return first


@contextlib.contextmanager
def sglang(folder, name, ranks=1):
    port, kv_port = free_port(), free_kv_port(ranks)
    options = ["--port", port, "--kv-port", kv_port, "--dp-size", ranks, "--page-size", PAGE]
    server = Server(name, folder, [sys.executable, FAKE, *map(str, options)], port)
    try:
        server.wait_until("/health")
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def gateway(folder, *servers):
    upstreams = [argument for server in servers for argument in ("--upstream", server.url)]
    server = serve(folder, *upstreams, model=None)
    try:
        server.wait_until("/ready")
        yield server
    finally:
        server.kill()


def wait_for_workers(server, count):
    deadline = time.monotonic() + TIMEOUT
    while server.metric("blockyard_router_workers") != count:
        assert time.monotonic() < deadline, "each server, or each rank of one, is a worker"
        time.sleep(0.05)


def ask(server, text):
    """Sends a chat: the worker that was chosen, the cached tokens that were predicted, and those that were reported."""
    body = {"model": "org/model", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    asked = server.post_with_headers("/v1/chat/completions", json.dumps(body).encode(), **{"x-blockyard-explain": "1"})
    status, answer, headers = asked
    assert status == 200, answer
    decision = json.loads(headers["x-blockyard-explain"])
    reported = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return decision["chosen"], decision["cached_tokens"], reported


def ask_again(server, text, cached):
    """Sends a chat again until the events of the first time have arrived."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        chosen, predicted, reported = ask(server, text)
        if predicted == cached or time.monotonic() > deadline:
            assert (predicted, reported) == (cached, cached)
            return chosen


def text(number):
    """A prompt of four pages and a part of one."""
    return " ".join(f"wagon {number} goes to block {word}" for word in range(4 * PAGE // 6 + 2))


def doctor(*servers):
    upstreams = [argument for server in servers for argument in ("--upstream", server.url)]
    command = [binary(), "doctor", "--json", "--listen", f"127.0.0.1:{free_port()}", *upstreams]
    ran = subprocess.run(command, capture_output=True, env=environment(), timeout=60)
    return ran.returncode, json.loads(ran.stdout)


def test_prompts_go_to_the_server_that_has_their_pages(tmp_path):
    with sglang(tmp_path, "one") as one, sglang(tmp_path, "other") as other, gateway(tmp_path, one, other) as front:
        wait_for_workers(front, 2)
        chosen = [ask(front, text(number))[0] for number in range(4)]
        assert [ask_again(front, text(number), 4 * PAGE) for number in range(4)] == chosen


def test_a_rank_is_named_by_the_request(tmp_path):
    with sglang(tmp_path, "sglang", ranks=2) as server, gateway(tmp_path, server) as front:
        wait_for_workers(front, 2)
        # Without a named rank the server takes the next one: half of the prompts would not be cached there.
        chosen = [ask(front, text(number))[0] for number in range(4)]
        assert [ask_again(front, text(number), 4 * PAGE) for number in range(4)] == chosen


def test_the_doctor_finds_no_problem(tmp_path):
    with sglang(tmp_path, "one") as one, sglang(tmp_path, "ranks", ranks=2) as ranks:
        status, checks = doctor(one, ranks)
        faulty = [check for check in checks if check["status"] != "ok" and check["check"] != "open_files"]
        assert (status, faulty) == (0, [])
        details = {(check["target"], check["check"]): check["detail"] for check in checks}
        assert details[one.url + "/", "server"] == "SGLang 0.5.23"
        assert details[one.url + "/", "block_size"] == "64 tokens in the server's /server_info"
        assert details[ranks.url + "/", "kv_events"].count("tcp://127.0.0.1:") == 2
