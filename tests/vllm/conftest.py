"""Two vLLM servers on the CPU that publish KV events, and `blockyard serve` in front of them.

The servers serve the built-in model `tiny`, whose weights are random. They run from the virtual environment of these
tests (`install.py`). The report of a failed test has the ends of all logs.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import openai
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python"))
from process import Server, binary, environment, free_port, serve  # noqa: E402

MODEL = "tiny"
# The template of the built-in model leaves out tools and calls; without these, both render the same.
CHAT_TEMPLATE = """{{- bos_token -}}
{%- if tools -%}{{- '<|im_start|>tools<|im_sep|>' + (tools | tojson) + '<|im_end|>' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- ' ' + call['function']['name'] + (call['function']['arguments'] | tojson) -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}"""
# A start takes 45 s on an idle machine with two cores, nearly all of it imports.
MAX_START_SECONDS = 600
# Longer than the minute after which the speed of a server that gets no requests is forgotten.
MAX_WAIT_SECONDS = 180


class Engine:
    """A vLLM server on fixed ports. It can be killed and started again."""

    def __init__(self, name, folder, model):
        self.name, self.folder, self.model = name, folder, model
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        command = [pathlib.Path(sys.executable).parent / "vllm", "serve", self.model, "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--kv-events-config", json.dumps(events)]
        command += ["--disable-uvicorn-access-log", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
        # 32 tokens are the smallest block of the CPU's attention. 600 blocks hold all prompts of these tests.
        command += ["--block-size", "32", "--num-gpu-blocks-override", "600", "--enable-prompt-tokens-details"]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else both servers bind to the first core
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.server = Server(self.name, self.folder, command, self.port, environment() | settings)

    def wait_until_healthy(self):
        self.server.wait_until("/health", MAX_START_SECONDS)

    def kill(self):
        self.server.kill()

    def signal(self, signal):
        """Sends a signal to its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.process.pid, signal)


def wait_for(condition, what):
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def settle(gateway):
    """Waits until the index has got the events of finished requests: for 0.2 s there was no further one."""
    count = None
    while count != (count := gateway.metric("blockyard_router_index_events_total", default=0)):
        time.sleep(0.2)


def add_key(file, tenant):
    """Adds an API key of a tenant to a file, and returns it."""
    command = [binary(), "key", "add", "--file", file, tenant, "--tenant", tenant]
    return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder):
    """The folder of the model, which the first start of the program writes, with another chat template."""
    writer = serve(folder)
    writer.wait_until("/ready")
    writer.stop()
    [config] = (folder / "data" / "models").glob("*/config.json")
    (config.parent / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return config.parent


@pytest.fixture(scope="session")
def engines(folder, model):
    engines = [Engine(f"vllm-{number}", folder, model) for number in range(2)]
    try:
        for engine in engines:
            engine.wait_until_healthy()
        yield engines
    finally:
        for engine in engines:
            engine.kill()


@contextlib.contextmanager
def gateway_of(folder, engines, *arguments):
    """A gateway of these servers, all of which it knows."""
    urls = [argument for engine in engines for argument in ("--upstream", engine.url)]
    gateway = serve(folder, *urls, *arguments, model=None)
    try:
        gateway.wait_until("/ready")
        wait_for(lambda: gateway.metric("blockyard_router_workers") == len(engines), "all servers are registered")
        yield gateway
    finally:
        gateway.kill()


@pytest.fixture(scope="session")
def gateway(folder, engines):
    with gateway_of(folder, engines) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def client(gateway):
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def pytest_collection_modifyitems(items):
    """The test that leaves a server killed is the last one: the start of a server takes longer than most tests."""
    items.sort(key=lambda item: item.path.name == "test_continuation.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and "folder" in item.funcargs:
        for log in sorted(item.funcargs["folder"].glob("*.log")):
            report.sections.append((f"end of {log.name}", log.read_bytes()[-4_000:].decode(errors="replace")))
    return report
