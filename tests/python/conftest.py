"""A real `blockyard serve` on a free port, and the official client for it.

BLOCKYARD_BIN is the path of the binary. Its default is the debug build of `cargo build` or of the tests. The report of
a failed test has the end of the server's log.
"""

import json
import os
import pathlib
import socket
import subprocess
import time
import urllib.error
import urllib.request

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    """The environment without variables that configure the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One `blockyard serve` process."""

    def __init__(self, folder, *arguments):
        self.log = folder / "blockyard.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            binary(),
            "serve",
            "--model",
            "tiny",
            "--data-dir",
            folder / "data",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--set",
            "frontend.shutdown_delay=0s",  # no load balancer needs time to notice the stop
            *arguments,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())

    def wait_until_ready(self):
        deadline = time.monotonic() + MAX_START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"blockyard serve ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        pytest.fail(f"blockyard serve was not ready in {MAX_START_SECONDS} s:\n{self.log_tail()}")

    def get(self, path):
        return self.exchange(urllib.request.Request(self.url + path))

    def post(self, path, body, **headers):
        headers = {"content-type": "application/json"} | headers
        return self.exchange(urllib.request.Request(self.url + path, data=body, headers=headers))

    @staticmethod
    def exchange(request):
        """Sends a request: status and body, also of an error."""
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name):
        """The sum of a metric over all its series."""
        lines = self.get("/metrics")[1].decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{"))]
        assert values, f"no metric {name}"
        return sum(values)

    def log_tail(self):
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def stop(self):
        self.process.terminate()
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("blockyard"))
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    server = item.funcargs.get("server")
    if report.failed and server is not None:
        report.sections.append(("blockyard serve, end of its log", server.log_tail()))
    return report
