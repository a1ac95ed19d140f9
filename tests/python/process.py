"""Server processes for tests: `blockyard serve`, and others.

BLOCKYARD_BIN is the path of the binary. Its default is the debug build of `cargo build` or of the tests.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "servers"))
from ports import free_port  # noqa: E402

MAX_START_SECONDS = 120  # the first start makes the model's weights, perhaps on a busy machine
LOG_TAIL_BYTES = 4_000


def binary():
    if path := os.environ.get("BLOCKYARD_BIN"):
        return pathlib.Path(path)
    metadata = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    path = pathlib.Path(json.loads(metadata.stdout)["target_directory"]) / "debug" / "blockyard"
    if not path.exists():
        pytest.exit(f"{path} is not there: run `cargo build` first, or set BLOCKYARD_BIN", returncode=2)
    return path


def environment():
    """The environment without variables that configure Blockyard."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}


class Server:
    """A process that serves HTTP on a port of this machine, in a process group of its own."""

    def __init__(self, name, folder, command, port, env=None):
        self.name = name
        self.log = folder / f"{name}.log"
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env or environment(), start_new_session=True
            )

    def wait_until(self, path, seconds=MAX_START_SECONDS):
        """Waits until GET of a path answers 200."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                if self.get(path)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        pytest.fail(f"GET {path} of {self.name} did not answer 200 within {seconds} s:\n{self.log_tail()}")

    def get(self, path):
        return self.exchange(urllib.request.Request(self.url + path))[:2]

    def post(self, path, body, **headers):
        return self.post_with_headers(path, body, **headers)[:2]

    def post_with_headers(self, path, body, **headers):
        headers = {"content-type": "application/json"} | headers
        return self.exchange(urllib.request.Request(self.url + path, data=body, headers=headers))

    @staticmethod
    def exchange(request):
        """Sends a request: status, body and headers, also of an error."""
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def metric(self, name, *labels, default=None):
        """The sum of a metric over all its series that have all of the labels. `default`: if it has no series."""
        lines = self.get("/metrics")[1].decode().splitlines()
        lines = [line for line in lines if line.startswith((name + " ", name + "{"))]
        if default is not None and not lines:
            return default
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))

    def log_tail(self):
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def stop(self):
        self.process.terminate()
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self):
        """Kills the process and its children."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def serve(folder, *arguments, model="tiny"):
    """`blockyard serve` with a model, or without one for upstreams."""
    port = free_port()
    command = [
        binary(),
        "serve",
        *(["--model", model] if model else []),
        "--data-dir",
        folder / "data",
        "--listen",
        f"127.0.0.1:{port}",
        "--set",
        "frontend.shutdown_delay=0s",  # no load balancer needs time to notice the stop
        *arguments,
    ]
    return Server("blockyard", folder, command, port)
