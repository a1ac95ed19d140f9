"""Faults in a deployment under load: what its clients see.

    bench_faults.py BLOCKYARD [--json] [--only FAULT]...

Three workers with an SSD tier, two frontends, NATS and an S3 server as processes on this machine. Eight clients, each of
which sends one request after the other through both frontends in turn: a prompt of about 300 tokens, 150 tokens of
output, streamed, greedy. During this a fault is caused, and 15 s later (NATS: 60 s) undone if it lasts. A client sends a
request that a frontend refuses before it begins (no connection, or 503 with `Retry-After`) to the other frontend, as
load balancers do. For the partition there are one prefill and two decode workers, and all prompts are handed over. In
"killed before first token" prompts have about 3,000 tokens and outputs one, so that every request that the killed worker
has is before its first token. In "killed with seeded choices" each request has two choices of 75 tokens, which are
sampled with a seed.

For each fault: requests, failures (an error, or a stream that ends without its end), requests that were sent again by
the client, and by a frontend to another worker (retried), streams that moved to another worker, the longest pause within
a stream or before it, and the seconds from the fault until requests are finished at 80 % of the rate before. At the end
the requests that ran when the fault was caused, and those with the longest pauses, are sent again: how many texts were
compared, and how many differ.

Exits with 1 if a request failed where none may, a text differs, or a worker still has a request after all clients have
ended. Requests may fail only when a frontend is killed, whose own clients lose their streams.
"""

import argparse
import json
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from deployment import deployment
from proxy import Proxy

CLIENTS = 8
BEFORE_SECONDS = 6
FAULT_SECONDS = 15
# Of faults that last longer.
LONGER = {"nats stopped": 60}
AFTER_SECONDS = 10
# Time for workers to notice that the last clients have ended.
MAX_STRANDED_SECONDS = 10
MAX_TRIES = 20
# Requests with the longest pauses whose texts are compared.
COMPARED = 16
HOUR = 3600
INJECTED = pathlib.Path(__file__).resolve().parent.parent / "it"
WORDS = "block cache prefix token hash tier store load plan route".split()


class Load:
    """Clients that send requests until they are stopped."""

    def __init__(self, frontends, words=230, max_tokens=150, **sampling):
        self.words, self.max_tokens, self.sampling = words, max_tokens, {"temperature": 0} | sampling
        # When the fault was caused, and the requests that ended later: begin, longest pause, body, lines.
        self.caused, self.ended = None, []
        # The list of the deployment, in which a restarted frontend replaces the former one.
        self.frontends = frontends
        self.finished, self.failures, self.pauses, self.sent_again = [], [], [0.0], 0
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(nth,), daemon=True) for nth in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self, nth):
        count = 0
        while not self.stopping.is_set():
            text = " ".join(WORDS[(nth * 31 + count * 7 + word * word) % len(WORDS)] for word in range(self.words))
            body = {"model": "tiny", "prompt": f"{nth} {count // 3} {text}", "max_tokens": self.max_tokens}
            body |= {"ignore_eos": True, "stream": True} | self.sampling
            self.ask(nth + count, body)
            count += 1

    def open(self, nth, body):
        """The response of the first frontend that takes the request."""
        for attempt in range(nth, nth + MAX_TRIES):
            frontend = self.frontends[attempt % len(self.frontends)]
            request = urllib.request.Request(f"{frontend.url}/v1/completions", data=json.dumps(body).encode())
            request.add_header("content-type", "application/json")
            try:
                return urllib.request.urlopen(request, timeout=60)
            except urllib.error.HTTPError as error:
                if error.code != 503 or "retry-after" not in error.headers:
                    raise OSError(error.read().decode()) from error
                last = error
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise
                last = error
            with self.lock:
                self.sent_again += 1
            time.sleep(0.1)
        raise OSError(str(last))

    def ask(self, nth, body):
        began, pause, ended, lines = time.monotonic(), 0.0, False, []
        last = began
        try:
            with self.open(nth, body) as response:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    lines.append(line)
                    if b'"error"' in line:
                        raise OSError(line.decode())
                    ended = ended or line.startswith(b"data: [DONE]")
            if not ended:
                raise OSError("the stream ended without its end")
        except OSError as error:
            with self.lock:
                self.failures.append((time.monotonic(), str(error)))
            time.sleep(0.2)
            return
        with self.lock:
            self.finished.append(time.monotonic())
            self.pauses.append(pause)
            if self.caused:
                self.ended.append((began, pause, body, lines))

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def compare(self, most_later):
        """The number of texts that were compared with those of the same requests now, and of those that differ. Of the
        requests that began after the fault, at most so many."""
        running = [request for request in self.ended if request[0] < self.caused]
        later = sorted((request for request in self.ended if request[0] >= self.caused), key=lambda it: it[1])
        compared = running + later[max(0, len(later) - most_later) :]
        differ = 0
        for nth, (_, _, body, lines) in enumerate(compared):
            try:
                with self.open(nth, body) as response:
                    again = [line for line in response if line.startswith(b"data: ")]
                differ += text_of(lines) != text_of(again)
            except (OSError, KeyError, ValueError):
                # An error instead of the text.
                differ += 1
        return len(compared), differ


def text_of(lines):
    """The text of each choice. Those of a stream alternate in any order."""
    chunks = (json.loads(line.removeprefix(b"data: ")) for line in lines if not line.startswith(b"data: [DONE]"))
    texts = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def kill_worker(processes):
    processes.workers[0].process.kill()
    yield
    processes.workers[0] = processes.worker(0).until_ready()


def claim_id(processes):
    """A second process registers with the id of a worker. The former one stops renewing its lease."""
    twin = processes.twin(0).until_ready()
    yield
    twin.stop()
    restart_worker(processes, 0)


def freeze_worker(processes):
    processes.workers[0].process.send_signal(signal.SIGSTOP)
    yield
    processes.workers[0].process.send_signal(signal.SIGCONT)


def kill_frontend(processes):
    # The clients know both, and their requests to this one fail until it is there again.
    processes.frontends[1].process.kill()
    # Its port is free once it has ended.
    processes.frontends[1].process.wait()
    processes.frontends[1] = processes.frontend(1).until_ready()
    yield


def stop_nats(processes):
    processes.nats.close()
    yield
    processes.start_nats()


def restart_worker(processes, nth):
    processes.workers[nth].stop()
    processes.workers[nth] = processes.worker(nth).until_ready()
    processes.until_known()


def restart_workers(processes):
    for nth in range(len(processes.workers)):
        restart_worker(processes, nth)
    yield


def restart_all(processes):
    for nth in range(len(processes.workers)):
        restart_worker(processes, nth)
    processes.nats.close()
    processes.start_nats()
    time.sleep(2)
    for nth in range(len(processes.frontends)):
        processes.frontends[nth].stop()
        processes.frontends[nth] = processes.frontend(nth).until_ready()
        processes.until_known()
    yield


def stop_store(processes):
    processes.s3_proxy.close()
    yield
    processes.s3_proxy.heal()


def break_disk(processes):
    # Of 1,000 calls all fail.
    processes.faults.write_text("1 1000 1000 0 0 0")
    yield
    processes.faults.unlink()


def shift_clocks(processes):
    for nth, seconds in enumerate([HOUR, -HOUR]):
        injected = processes.variables[nth]
        processes.variables[nth] = {"LD_PRELOAD": str(processes.clock), "CLOCK_OFFSET_SECONDS": str(seconds)}
        restart_worker(processes, nth)
        processes.variables[nth] = injected
    yield
    for nth in range(2):
        restart_worker(processes, nth)


def other_weights(processes):
    """A worker starts again with other weights under the name of the model."""
    (weights,) = pathlib.Path(processes.folder, "worker-1", "models").glob("*/model.safetensors")
    other = pathlib.Path(processes.folder, "other", "tiny")
    shutil.copytree(weights.parent, other)
    weights = other / "model.safetensors"
    data = weights.read_bytes()
    # The second half moves by four bytes, which are whole elements: finite numbers stay finite.
    header = 8 + int.from_bytes(data[:8], "little")
    half = header + (len(data) - header) // 8 * 4
    weights.write_bytes(data[:half] + data[-4:] + data[half:-4])
    processes.models[2] = str(other)
    restart_worker(processes, 2)
    yield
    del processes.models[2]
    restart_worker(processes, 2)
    shutil.rmtree(other)


def partition(processes):
    processes.prefill_proxy.sever()
    yield
    processes.prefill_proxy.heal()


FAULTS = {
    "none": lambda processes: iter([None]),
    "worker killed": kill_worker,
    "killed before first token": kill_worker,
    "killed with seeded choices": kill_worker,
    "two workers with one id": claim_id,
    "worker frozen": freeze_worker,
    "frontend killed": kill_frontend,
    "nats stopped": stop_nats,
    "object store stopped": stop_store,
    "disk of a worker fails": break_disk,
    "clocks wrong by an hour": shift_clocks,
    "worker with other weights": other_weights,
    "workers restarted in turn": restart_workers,
    "all restarted in turn": restart_all,
}
# What the clients send, where it is not the usual.
LOADS = {
    "killed before first token": {"words": 2200, "max_tokens": 1},
    "killed with seeded choices": {"max_tokens": 75, "n": 2, "temperature": 0.8, "seed": 7},
}
# With prefill and decode workers.
PARTITIONS = {"prefill not reached": partition}


def recovery(finished, caused):
    """Seconds from the fault to the end of the last second with less than 80 % of the rate before it."""
    before = sum(1 for at in finished if caused - BEFORE_SECONDS <= at < caused) / BEFORE_SECONDS
    last = max(finished, default=caused)
    seconds = int(last - caused)
    rates = [sum(1 for at in finished if caused + nth <= at < caused + nth + 1) for nth in range(seconds)]
    # Two seconds each: requests take about one.
    smooth = [statistics.mean(rates[nth : nth + 2]) for nth in range(len(rates) - 1)]
    slow = [nth + 1 for nth, rate in enumerate(smooth) if rate < 0.8 * before]
    return before, (max(slow) if slow else 0)


def stranded(processes):
    """The requests that workers still have, although all clients have ended."""
    states = ["running", "waiting", "paused"]
    count = lambda: sum(it.metric(f"blockyard_worker_requests_{of}") for it in processes.workers for of in states)
    deadline = time.monotonic() + MAX_STRANDED_SECONDS
    while count() and time.monotonic() < deadline:
        time.sleep(0.1)
    return int(count())


def measure(processes, fault):
    moved = lambda: sum(f.metric("blockyard_router_stream_moves_total", "continued") for f in processes.frontends)
    retried = lambda: sum(f.metric("blockyard_router_retries_total") for f in processes.frontends)
    load = Load(processes.frontends, **LOADS.get(fault, {}))
    time.sleep(BEFORE_SECONDS)
    moves, retries, caused = moved(), retried(), time.monotonic()
    load.caused = caused
    steps = (FAULTS | PARTITIONS)[fault](processes)
    next(steps)
    # A frontend that was killed counts from 0 again.
    time.sleep(max(0.0, caused + LONGER.get(fault, FAULT_SECONDS) - time.monotonic()))
    next(steps, None)
    time.sleep(AFTER_SECONDS)
    load.stop()
    processes.until_known()
    rate, seconds = recovery(load.finished, caused)
    # Before the comparison, whose requests count too.
    moves, retries = moved() - moves, retried() - retries
    left = stranded(processes)
    # A worker with other weights has other texts.
    compared, differ = load.compare(0 if fault == "worker with other weights" else COMPARED)
    return {
        "fault": fault,
        "requests": len(load.finished) + len(load.failures),
        "failures": len(load.failures),
        "errors": sorted({error for _, error in load.failures})[:3],
        "sent_again": load.sent_again,
        "retried": max(0, int(retries)),
        "moved_streams": max(0, int(moves)),
        "texts_compared": compared,
        "texts_that_differ": differ,
        "stranded": left,
        "longest_pause_s": round(max(load.pauses), 2),
        "requests_per_s_before": round(rate, 1),
        "recovery_s": seconds,
    }


def compile_injected(folder, name):
    library = pathlib.Path(folder) / f"{name}.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, INJECTED / f"{name}.c", "-ldl"]
    subprocess.run(command, check=True)
    return library


def show(row):
    print(
        f"{row['fault']:26} {row['requests']:8} {row['failures']:8} {row['sent_again']:10} {row['retried']:7} "
        f"{row['moved_streams']:6} {row['longest_pause_s']:8.2f} {row['requests_per_s_before']:7.1f} "
        f"{row['recovery_s']:10} {row['texts_that_differ']:7} of {row['texts_compared']}",
        flush=True,
    )
    for error in row["errors"]:
        print(f"  {error[:200]}")
    if row["stranded"]:
        print(f"  workers still have {row['stranded']} requests of clients that have ended")


def measure_all(program, only, report):
    """Rows of all faults, or of those in `only`."""
    wanted = lambda faults: [fault for fault in faults if not only or fault in only]
    proxies = []

    def before_s3(port):
        proxies.append(Proxy(port))
        return proxies[-1].port

    with tempfile.TemporaryDirectory(prefix="blockyard-faults-") as folder:
        clock, faults = compile_injected(folder, "clock"), compile_injected(folder, "faults")
        if wanted(FAULTS):
            with deployment(program, 3, 2, g3="64MiB", before_s3=before_s3) as processes:
                processes.s3_proxy, processes.clock = proxies[-1], clock
                processes.faults = pathlib.Path(folder) / "profile"
                data = f"{processes.folder}/worker-1/"
                injected = {"LD_PRELOAD": str(faults), "FAULTS_FOLDER": data, "FAULTS_PROFILE": str(processes.faults)}
                processes.variables = {0: injected, 1: {}}
                processes.start()
                for fault in wanted(FAULTS):
                    report(measure(processes, fault))
        if wanted(PARTITIONS):
            roles, routing = ["prefill:1", "decode:1", "decode:1"], ["router.disaggregation=always"]
            with deployment(program, roles, 2, routing=routing) as processes:
                processes.prefill_proxy = Proxy(processes.ports[0], http1_only=True)
                processes.advertised[0] = f"http://127.0.0.1:{processes.prefill_proxy.port}"
                processes.start()
                for fault in wanted(PARTITIONS):
                    report(measure(processes, fault))


def main(program, as_json, only):
    rows = []

    def report(row):
        rows.append(row)
        if not as_json:
            show(row)

    if not as_json:
        header = f"{'fault':26} {'requests':>8} {'failures':>8} {'sent again':>10} {'retried':>7} {'moved':>6}"
        print(f"{header} {'pause s':>8} {'rate/s':>7} {'recovery s':>10} {'differ':>7} of the texts")
    measure_all(program, only, report)
    if as_json:
        print(json.dumps(rows, indent=2))
    failed = any(row["failures"] and row["fault"] != "frontend killed" for row in rows)
    sys.exit(1 if failed or any(row["texts_that_differ"] or row["stranded"] for row in rows) else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=[*FAULTS, *PARTITIONS], help="this fault; may be repeated")
    arguments = parser.parse_args()
    main(arguments.program, arguments.json, arguments.only)
