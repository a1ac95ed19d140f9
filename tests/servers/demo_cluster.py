"""A deployment on one machine, as processes: NATS, an S3 server, two frontends, four workers. Shows that it works.

    demo_cluster.py BLOCKYARD [--json]

1. A conversation of four turns goes through both frontends in turn.
2. A worker is killed while it streams; another one continues the stream.
3. Everything but the S3 server is stopped and started again. The conversation goes on, and its blocks are loaded from
   the object store: the workers have no SSD tier here.

Exits with 1 and the reason if one of these does not happen.
"""

import contextlib
import json
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import run

BUCKET = "demo"
WORKERS = 4
FRONTENDS = 2
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
        sys.exit(f"demo: {self.name} is not ready:\n{self.log.read_text()[-4000:]}")

    def stop(self):
        self.process.terminate()
        status = self.process.wait(MAX_STOP_SECONDS)
        if status != 0:
            sys.exit(f"demo: {self.name} ended with status {status}:\n{self.log.read_text()[-4000:]}")

    def metric(self, name, label=""):
        lines = (line for line in fetch(f"{self.url}/metrics").splitlines() if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


class Deployment:
    def __init__(self, program, folder, s3):
        self.program, self.folder, self.s3 = program, folder, s3
        self.workers, self.frontends, self.up = [], [], contextlib.ExitStack()
        self.secret = pathlib.Path(folder) / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.nats_port = run.free_port()
        self.ports = [run.free_port() for _ in range(WORKERS + FRONTENDS)]
        self.environment = {
            "HOME": str(folder),
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
        }

    def start(self):
        self.up = contextlib.ExitStack()
        nats = [run.nats_server(), "-js", "-sd", f"{self.folder}/nats", "-a", "127.0.0.1", "-p", str(self.nats_port)]
        self.up.enter_context(run.server("nats", nats, self.nats_port, self.folder))
        self.workers = [self.worker(nth) for nth in range(WORKERS)]
        self.frontends = [self.frontend(nth) for nth in range(FRONTENDS)]
        for process in self.workers + self.frontends:
            process.until_ready()
        for frontend in self.frontends:
            until(lambda: frontend.metric("blockyard_router_workers") == WORKERS, "a frontend knows all workers")

    def common(self):
        return ["--nats", f"nats://127.0.0.1:{self.nats_port}", "--secret-file", str(self.secret)]

    def worker(self, nth):
        url = f"http://127.0.0.1:{self.ports[nth]}"
        tiers = ["tiers.g1=64MiB", "tiers.g2=64MiB", "tiers.g3=off", f"tiers.g4.endpoint={self.s3}"]
        command = [self.program, "worker", "--model", "tiny", "--data-dir", f"{self.folder}/worker-{nth + 1}"]
        command += ["--listen", url.removeprefix("http://"), "--g4", f"s3://{BUCKET}/blocks"] + self.common()
        for tier in tiers:
            command += ["--set", tier]
        return Process(self.folder, f"worker-{nth + 1}", url, command, self.environment)

    def frontend(self, nth):
        url = f"http://127.0.0.1:{self.ports[WORKERS + nth]}"
        command = [self.program, "frontend", "--listen", url.removeprefix("http://")] + self.common()
        command += ["--set", "frontend.shutdown_delay=0s"]
        return Process(self.folder, f"frontend-{nth + 1}", url, command, self.environment)

    def stop(self):
        for process in self.frontends + self.workers:
            process.stop()
        self.up.close()

    def kill(self):
        for process in self.frontends + self.workers:
            process.process.kill()
        self.up.close()


def until(condition, what):
    deadline = time.monotonic() + MAX_START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"demo: it did not happen in {MAX_START_SECONDS} s that {what}")
        time.sleep(0.05)


def turn(frontend, messages):
    """One turn of a conversation: prompt tokens, and how many of them were cached."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = json.loads(fetch(f"{frontend.url}/v1/chat/completions", body))
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def killed_stream(deployment):
    """Kills the worker of a stream. The text of the stream, and that of the same request undisturbed."""
    frontend = deployment.frontends[0]
    body = {"model": "tiny", "prompt": "a stream whose worker is killed " * 20, "max_tokens": 1500, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{frontend.url}/v1/completions", data=json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    text, killed = "", None
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit(f"demo: the stream failed: {event}")
                text += event["choices"][0]["text"]
            if killed is None and len(text) > 200:
                busy = (worker for worker in deployment.workers if worker.metric("blockyard_worker_requests_running"))
                killed = next(busy)
                killed.process.kill()
    answer = json.loads(fetch(f"{frontend.url}/v1/completions", body | {"stream": False}))
    return killed, text, answer["choices"][0]["text"]


def show(deployment, say):
    deployment.start()
    say(f"started: {WORKERS} workers, {FRONTENDS} frontends")
    messages, turns = [], []
    for nth in range(4):
        messages.append({"role": "user", "content": f"turn {nth}: " + "the yard sorts wagons into blocks " * 20})
        prompt, cached = turn(deployment.frontends[nth % FRONTENDS], messages)
        turns.append({"frontend": nth % FRONTENDS + 1, "prompt_tokens": prompt, "cached_tokens": cached})
        say(f"turn {nth + 1} through frontend {nth % FRONTENDS + 1}: {cached} of {prompt} prompt tokens cached")
    if turns[-1]["cached_tokens"] == 0:
        sys.exit("demo: the last turn found nothing cached")
    killed, text, undisturbed = killed_stream(deployment)
    say(f"{killed.name} was killed in mid-stream; the text is {'the same' if text == undisturbed else 'ANOTHER ONE'}")
    if text != undisturbed:
        sys.exit("demo: the text of the continued stream differs")
    nth = deployment.workers.index(killed)
    deployment.workers[nth] = deployment.worker(nth).until_ready()
    deployment.stop()
    say("stopped all processes but the S3 server")
    deployment.start()
    messages.append({"role": "user", "content": "after the restart"})
    prompt, cached = turn(deployment.frontends[0], messages)
    loaded = sum(worker.metric("blockyard_worker_prompt_tokens_cached_total", 'tier="g4"') for worker in deployment.workers)
    say(f"started again: {cached} of {prompt} prompt tokens cached, {loaded:.0f} of them from the object store")
    if loaded == 0:
        sys.exit("demo: nothing was loaded from the object store")
    return {
        "turns": turns,
        "continued_text_is_the_same": True,
        "after_restart": {"prompt_tokens": prompt, "cached_tokens": cached, "from_g4": loaded},
    }


def main(program, as_json):
    say = (lambda text: None) if as_json else (lambda text: print(f"  {text}", flush=True))
    port = run.free_port()
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryDirectory(prefix="blockyard-demo-") as folder:
        with run.server("moto", moto, port, folder) as s3:
            run.put(f"{s3}/{BUCKET}", {})
            deployment = Deployment(program, folder, s3)
            try:
                report = show(deployment, say)
            finally:
                deployment.kill()
    if as_json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(str(pathlib.Path(sys.argv[1]).resolve()), "--json" in sys.argv[2:])
