"""A deployment on one machine, as processes: NATS, frontends, workers with a shared object store. For demonstrations and
benchmarks."""

import contextlib
import json
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request

import run
from ports import free_port

BUCKET = "demo"
MAX_START_SECONDS = 60
MAX_STOP_SECONDS = 40


def fetch(url, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.read().decode()


class Process:
    """A process of the program, once it is ready."""

    def __init__(self, folder, name, url, command, environment):
        self.name, self.url = name, url
        self.log = pathlib.Path(folder) / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def until_ready(self):
        deadline = time.monotonic() + MAX_START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                fetch(f"{self.url}/ready")
                return self
            time.sleep(0.05)
        sys.exit(f"deployment: {self.name} is not ready:\n{self.log.read_text()[-4000:]}")

    def stop(self):
        self.process.terminate()
        status = self.process.wait(MAX_STOP_SECONDS)
        if status != 0:
            sys.exit(f"deployment: {self.name} ended with status {status}:\n{self.log.read_text()[-4000:]}")

    def metric(self, name, label=""):
        lines = (line for line in fetch(f"{self.url}/metrics").splitlines() if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


class Deployment:
    """`workers`: the number of workers, or the value of `--workers` for each. `memory`: of G1, and of G2, per worker.
    `shared_store`: whether the workers have G4. `g3`: the SSD tier per worker. `routing`: settings of frontends."""

    def __init__(
        self,
        program,
        folder,
        s3,
        workers,
        frontends,
        model="tiny",
        memory="64MiB",
        shared_store=True,
        g3="off",
        routing=(),
    ):
        self.program, self.folder, self.s3 = program, folder, s3
        self.model, self.memory, self.shared_store = model, memory, shared_store
        self.roles = ["both:1"] * workers if isinstance(workers, int) else workers
        self.count, self.g3, self.routing = frontends, g3, routing
        # By number of the worker: its model, variables of its environment, the address that it advertises.
        self.models, self.variables, self.advertised = {}, {}, {}
        self.workers, self.frontends, self.twins, self.nats = [], [], [], contextlib.ExitStack()
        self.secret = pathlib.Path(folder) / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.nats_port = free_port()
        self.ports = [free_port() for _ in range(len(self.roles) + frontends)]
        self.environment = {
            "HOME": str(folder),
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
        }

    def start(self):
        self.start_nats()
        self.workers = [self.worker(nth) for nth in range(len(self.roles))]
        self.frontends = [self.frontend(nth) for nth in range(self.count)]
        for process in self.workers + self.frontends:
            process.until_ready()
        self.until_known()

    def start_nats(self):
        nats = [run.nats_server(), "-js", "-sd", f"{self.folder}/nats", "-a", "127.0.0.1", "-p", str(self.nats_port)]
        self.nats = contextlib.ExitStack()
        self.nats.enter_context(run.server("nats", nats, self.nats_port, self.folder))

    def until_known(self):
        """Waits until all frontends know all workers."""
        for frontend in self.frontends:
            known = lambda: frontend.metric("blockyard_router_workers") == len(self.roles)
            until(known, "a frontend knows all workers")

    def common(self):
        return ["--nats", f"nats://127.0.0.1:{self.nats_port}", "--secret-file", str(self.secret)]

    def worker(self, nth):
        url = f"http://127.0.0.1:{self.ports[nth]}"
        variables = self.variables.get(nth, {})
        return self.worker_process(nth, f"worker-{nth + 1}", url, self.advertised.get(nth), variables)

    def twin(self, nth):
        """Another process with the id of a worker: it has the same address in discovery, and listens at another one."""
        address = self.advertised.get(nth, f"http://127.0.0.1:{self.ports[nth]}")
        url = f"http://127.0.0.1:{free_port()}"
        self.twins.append(self.worker_process(nth, f"twin-{nth + 1}", url, address, {}))
        return self.twins[-1]

    def worker_process(self, nth, name, url, advertised, variables):
        tiers = [f"tiers.g1={self.memory}", f"tiers.g2={self.memory}", f"tiers.g3={self.g3}"]
        command = [self.program, "worker", "--data-dir", f"{self.folder}/{name}"]
        command += ["--model", self.models.get(nth, self.model)]
        command += ["--listen", url.removeprefix("http://"), "--workers", self.roles[nth]]
        command += self.common()
        if self.shared_store:
            command += ["--g4", f"s3://{BUCKET}/blocks"]
            tiers.append(f"tiers.g4.endpoint={self.s3}")
        for tier in tiers:
            command += ["--set", tier]
        if advertised:
            command += ["--advertise", advertised]
        return Process(self.folder, name, url, command, self.environment | variables)

    def frontend(self, nth):
        url = f"http://127.0.0.1:{self.ports[len(self.roles) + nth]}"
        command = [self.program, "frontend", "--listen", url.removeprefix("http://")] + self.common()
        for setting in ["frontend.shutdown_delay=0s", *self.routing]:
            command += ["--set", setting]
        return Process(self.folder, f"frontend-{nth + 1}", url, command, self.environment)

    def stop(self):
        for process in self.frontends + self.workers:
            process.stop()
        self.nats.close()

    def kill(self):
        for process in self.frontends + self.workers + self.twins:
            process.process.kill()
        self.nats.close()


@contextlib.contextmanager
def deployment(program, workers, frontends, before_s3=None, **settings):
    """A deployment with an S3 server, not started yet. Its processes are killed at the end. `before_s3`: makes the port at
    which workers reach the S3 server from the server's own."""
    port = free_port()
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryDirectory(prefix="blockyard-cluster-") as folder:
        with run.server("moto", moto, port, folder) as s3:
            run.put(f"{s3}/{BUCKET}", {})
            s3 = f"http://127.0.0.1:{before_s3(port)}" if before_s3 else s3
            processes = Deployment(str(pathlib.Path(program).resolve()), folder, s3, workers, frontends, **settings)
            try:
                yield processes
            finally:
                processes.kill()


def until(condition, what):
    deadline = time.monotonic() + MAX_START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"deployment: it did not happen in {MAX_START_SECONDS} s that {what}")
        time.sleep(0.05)
