"""Packets are lost between the processes of a deployment: nothing is refused, no connection is reset.

NATS, a prefill worker, a decode worker and a frontend each have a network namespace of their own, connected by a bridge
that drops packets between two of them. A proxy on one host cannot show this: it accepts connections, and its end of a
connection goes on to acknowledge bytes. This needs root and `ip` of iproute2, and changes nothing outside of its
namespaces.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pytest
from process import Server, binary, environment

PORT = 8100
ADDRESSES = {"nats": "10.77.0.1", "prefill": "10.77.0.2", "decode": "10.77.0.3", "frontend": "10.77.0.4"}
MAX_SECONDS = 90
CLIENTS = 3
PROMPT_TOKENS = 300
CLONE_NEWNET = 0x4000_0000


def ip(*arguments, namespace=None):
    """Runs `ip`. Its error, or nothing."""
    inside = ["-n", namespace] if namespace else []
    done = subprocess.run(["ip", *inside, *arguments], capture_output=True, text=True, timeout=30)
    return None if done.returncode == 0 else f"ip {' '.join(arguments)}: {done.stderr.strip()}"


class Network:
    """A namespace for each process, and one for the bridge that connects them."""

    def __init__(self):
        self.prefix = f"blockyard-test-{os.getpid()}"
        self.bridge = f"{self.prefix}-bridge"

    def name(self, process):
        return f"{self.prefix}-{process}"

    def build(self):
        """The reason why this machine does not allow it, or nothing."""
        bridge = ["link", "add", "bridge", "type", "bridge"]
        if error := ip("netns", "add", self.bridge) or ip(*bridge, namespace=self.bridge):
            return error
        self.run("link", "set", "bridge", "up", namespace=self.bridge)
        for nth, (process, address) in enumerate(ADDRESSES.items()):
            here, port = self.name(process), ["peer", "name", process, "netns", self.bridge]
            self.run("netns", "add", here)
            self.run("link", "add", "eth0", "address", self.hardware(nth), "type", "veth", *port, namespace=here)
            self.run("link", "set", process, "master", "bridge", "up", namespace=self.bridge)
            self.run("address", "add", f"{address}/24", "dev", "eth0", namespace=here)
            self.run("link", "set", "lo", "up", namespace=here)
            self.run("link", "set", "eth0", "up", namespace=here)
            # Otherwise the lost answers of ARP would show the sender that the host is away.
            for other, neighbour in enumerate(ADDRESSES.values()):
                known = ["lladdr", self.hardware(other), "dev", "eth0", "nud", "permanent"]
                self.run("neighbour", "add", neighbour, *known, namespace=here)

    @staticmethod
    def hardware(nth):
        return f"02:00:00:00:00:{nth + 1:02x}"

    @staticmethod
    def run(*arguments, namespace=None):
        error = ip(*arguments, namespace=namespace)
        assert error is None, error

    def remove(self):
        for process in ["bridge", *ADDRESSES]:
            ip("netns", "del", self.name(process))

    @contextlib.contextmanager
    def inside(self, process):
        """This thread, and the processes that it starts, are in the namespace meanwhile."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with open("/proc/thread-self/ns/net") as outside, open(f"/run/netns/{self.name(process)}") as namespace:
            assert setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert setns(outside.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    def port(self, process, *settings):
        self.run("link", "set", process, *settings, namespace=self.bridge)

    @contextlib.contextmanager
    def separated(self, *processes):
        """The processes do not reach each other, and reach all others: the bridge drops packets between such ports."""
        for process in processes:
            self.port(process, "type", "bridge_slave", "isolated", "on")
        try:
            yield
        finally:
            for process in processes:
                self.port(process, "type", "bridge_slave", "isolated", "off")

    @contextlib.contextmanager
    def unplugged(self, process):
        """No process reaches this one, nor does it reach any. Its own interface stays up."""
        self.port(process, "nomaster")
        try:
            yield
        finally:
            self.port(process, "master", "bridge")


class Deployment:
    def __init__(self, network, folder):
        self.network, self.folder, self.servers, self.seeds = network, folder, {}, iter(range(100_000))
        (folder / "secret").write_text("0123456789abcdef" * 2)

    def start(self):
        nats = pathlib.Path(sys.executable).parent / "nats-server"
        if not nats.exists():
            pytest.skip(f"{nats} is not there; `make test` installs it")
        self.launch("nats", [nats, "-js", "-sd", self.folder / "jetstream", "-a", ADDRESSES["nats"], "-m", str(PORT)])
        self.until("nats", "/healthz")
        for role in ("prefill", "decode"):
            url = f"http://{ADDRESSES[role]}:{PORT}"
            command = ["worker", "--model", "tiny", "--workers", f"{role}:1", "--data-dir", self.folder / role]
            command += ["--listen", url.removeprefix("http://"), "--advertise", url]
            for size in ("tiers.g1=32MiB", "tiers.g2=32MiB", "tiers.g3=off"):
                command += ["--set", size]
            self.blockyard(role, command)
        listen = f"{ADDRESSES['frontend']}:{PORT}"
        routing = ["--set", "router.disaggregation=always", "--set", "frontend.shutdown_delay=0s"]
        self.blockyard("frontend", ["frontend", "--listen", listen, *routing])
        self.until("frontend", "/ready")
        self.until_known(2)

    def blockyard(self, name, command):
        common = ["--nats", f"nats://{ADDRESSES['nats']}:4222", "--secret-file", self.folder / "secret"]
        self.launch(name, [binary(), *command, *common])

    def launch(self, name, command):
        with self.network.inside(name):
            server = Server(name, self.folder, command, PORT, environment() | {"HOME": str(self.folder)})
        server.url = f"http://{ADDRESSES[name]}:{PORT}"
        self.servers[name] = server

    def stop(self):
        for server in self.servers.values():
            server.kill()

    def until(self, name, path):
        with self.network.inside(name):
            self.servers[name].wait_until(path)

    def metric(self, name, metric, *labels):
        with self.network.inside(name):
            return self.servers[name].metric(metric, *labels, default=0)

    def until_known(self, workers):
        deadline = time.monotonic() + MAX_SECONDS
        while self.metric("frontend", "blockyard_router_workers") != workers:
            assert time.monotonic() < deadline, f"the frontend does not know {workers} workers: {self.logs()}"
            time.sleep(0.05)

    def complete(self, seed):
        """The text of a request with a prompt of its own. An error fails the test."""
        prompt = [(nth * 7 + seed * 131 + seed // 400 * 17 * nth) % 400 + 5 for nth in range(PROMPT_TOKENS)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with self.network.inside("frontend"):
            status, answer = self.servers["frontend"].post("/v1/completions", json.dumps(body).encode())
        assert status == 200, f"{answer}\n{self.logs()}"
        return json.loads(answer)["choices"][0]["text"]

    def until_handed_over(self):
        """Sends requests until the decode worker has read blocks from the prefill worker."""
        transferred = lambda: self.metric("decode", "blockyard_tier_transfer_bytes_total", 'tier="peer"')
        before, deadline = transferred(), time.monotonic() + MAX_SECONDS
        while transferred() <= before:
            assert time.monotonic() < deadline, f"no block was handed over: {self.logs()}"
            self.complete(next(self.seeds))

    def computed_by_decode(self):
        return self.metric("decode", "blockyard_worker_prompt_tokens_computed_total")

    def logs(self):
        return "\n".join(f"--- {name}:\n{server.log_tail()}" for name, server in self.servers.items())


class Clients:
    """Threads that send requests, one after the other, until the end of the block. None of them may fail."""

    def __init__(self, deployment):
        self.deployment, self.texts, self.failures = deployment, {}, []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(100_000 * (nth + 1),)) for nth in range(CLIENTS)]

    def run(self, seed):
        while not self.stopping.is_set() and not self.failures:
            try:
                self.texts[seed] = self.deployment.complete(seed)
            except Exception as error:
                self.failures.append(error)
            seed += 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        for error in self.failures:
            raise error


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`; on Debian and Ubuntu: apt-get install iproute2")
    network = Network()
    try:
        if reason := network.build():
            pytest.skip(f"this machine does not allow network namespaces: {reason}")
        deployment = Deployment(network, tmp_path_factory.mktemp("partition"))
        try:
            deployment.start()
            yield deployment
        finally:
            deployment.stop()
    finally:
        network.remove()


def check_partition(deployment, partition):
    """Requests go on during the partition and at its edges, and prompts are handed over afterwards."""
    deployment.until_handed_over()
    with Clients(deployment) as clients:
        with partition:
            before = deployment.computed_by_decode()
            answers = {seed: deployment.complete(seed) for seed in (next(deployment.seeds) for _ in range(4))}
            computed = deployment.computed_by_decode() - before
            assert computed >= len(answers) * (PROMPT_TOKENS - PROMPT_TOKENS % 16), "the decode worker computes prompts"
        deployment.until_handed_over()
    for seed, text in [*answers.items(), *clients.texts.items()][:40]:
        assert deployment.complete(seed) == text


def test_prompts_are_computed_while_decode_loses_the_packets_of_prefill(deployment):
    partition = deployment.network.separated("prefill", "decode")
    check_partition(deployment, partition)
    deployment.until_known(2)


def test_requests_go_on_while_all_packets_of_prefill_are_lost(deployment):
    partition = deployment.network.unplugged("prefill")
    check_partition(deployment, partition)
    deployment.until_known(2)
