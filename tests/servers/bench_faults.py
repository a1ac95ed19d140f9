"""Faults in a deployment under load: what its clients see.

    bench_faults.py BLOCKYARD [--json] [--only FAULT]...

Three workers, two frontends, NATS and an S3 server as processes on this machine. Eight clients, each of which sends one
request after the other through both frontends in turn: a prompt of about 300 tokens, 150 tokens of output, streamed,
greedy. During this a fault is caused, and 15 s later undone if it lasts. For each fault: requests, failures (an error,
or a stream that ends without its end), streams that moved to another worker, the longest pause within a stream or
before it, and the seconds from the fault until requests are finished at 80 % of the rate before.

Exits with 1 if a request failed where none may: all faults but a killed frontend, whose own clients lose their streams.
"""

import argparse
import json
import signal
import statistics
import sys
import threading
import time
import urllib.request

from deployment import deployment

CLIENTS = 8
BEFORE_SECONDS = 6
FAULT_SECONDS = 15
AFTER_SECONDS = 10
WORDS = "block cache prefix token hash tier store load plan route".split()


class Load:
    """Clients that send requests until they are told to stop."""

    def __init__(self, frontends):
        self.frontends = frontends
        self.finished, self.failures, self.pauses = [], [], [0.0]
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(nth,)) for nth in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self, nth):
        count = 0
        while not self.stopping.is_set():
            frontend = self.frontends[(nth + count) % len(self.frontends)]
            text = " ".join(WORDS[(nth * 31 + count * 7 + word * word) % len(WORDS)] for word in range(230))
            body = {"model": "tiny", "prompt": f"{nth} {count // 3} {text}", "max_tokens": 150, "temperature": 0}
            body |= {"ignore_eos": True, "stream": True}
            self.ask(frontend, body)
            count += 1

    def ask(self, frontend, body):
        request = urllib.request.Request(f"{frontend.url}/v1/completions", data=json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        last, pause, ended = time.monotonic(), 0.0, False
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    if b'"error"' in line:
                        raise OSError(line.decode())
                    ended = ended or line.startswith(b"data: [DONE]")
            if not ended:
                raise OSError("the stream ended without its end")
        except OSError as error:
            with self.lock:
                self.failures.append((time.monotonic(), frontend, str(error)))
            time.sleep(0.2)
            return
        with self.lock:
            self.finished.append(time.monotonic())
            self.pauses.append(pause)

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


def kill_worker(processes):
    processes.workers[0].process.kill()
    yield
    processes.workers[0] = processes.worker(0).until_ready()


def freeze_worker(processes):
    processes.workers[0].process.send_signal(signal.SIGSTOP)
    yield
    processes.workers[0].process.send_signal(signal.SIGCONT)


def kill_frontend(processes):
    # The clients know both, and their requests to this one fail until it is there again.
    processes.frontends[1].process.kill()
    processes.frontends[1] = processes.frontend(1).until_ready()
    yield


def stop_nats(processes):
    processes.nats.close()
    yield
    processes.start_nats()


def restart_workers(processes):
    for nth in range(len(processes.workers)):
        processes.workers[nth].stop()
        processes.workers[nth] = processes.worker(nth).until_ready()
        processes.until_known()
    yield


FAULTS = {
    "none": lambda processes: iter([None]),
    "worker killed": kill_worker,
    "worker frozen": freeze_worker,
    "frontend killed": kill_frontend,
    "nats stopped": stop_nats,
    "workers restarted in turn": restart_workers,
}


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


def measure(processes, fault):
    moved = lambda: sum(f.metric("blockyard_router_stream_moves_total", "continued") for f in processes.frontends)
    load = Load(list(processes.frontends))
    time.sleep(BEFORE_SECONDS)
    moves, caused = moved(), time.monotonic()
    steps = FAULTS[fault](processes)
    next(steps)
    # A frontend that was killed counts from 0 again.
    time.sleep(max(0.0, caused + FAULT_SECONDS - time.monotonic()))
    next(steps, None)
    time.sleep(AFTER_SECONDS)
    load.stop()
    processes.until_known()
    rate, seconds = recovery(load.finished, caused)
    return {
        "fault": fault,
        "requests": len(load.finished) + len(load.failures),
        "failures": len(load.failures),
        "errors": sorted({error for _, _, error in load.failures})[:3],
        "moved_streams": max(0, int(moved() - moves)),
        "longest_pause_s": round(max(load.pauses), 2),
        "requests_per_s_before": round(rate, 1),
        "recovery_s": seconds,
    }


def main(program, as_json, only):
    rows, bad = [], []
    with deployment(program, 3, 2) as processes:
        processes.start()
        if not as_json:
            print(f"{'fault':26} {'requests':>8} {'failures':>8} {'moved':>6} {'pause s':>8} {'rate/s':>7} {'recovery s':>10}")
        for fault in only or FAULTS:
            row = measure(processes, fault)
            rows.append(row)
            bad += [row] if row["failures"] and fault != "frontend killed" else []
            if not as_json:
                print(
                    f"{fault:26} {row['requests']:8} {row['failures']:8} {row['moved_streams']:6} "
                    f"{row['longest_pause_s']:8.2f} {row['requests_per_s_before']:7.1f} {row['recovery_s']:10}",
                    flush=True,
                )
                for error in row["errors"]:
                    print(f"  {error[:200]}")
    if as_json:
        print(json.dumps(rows, indent=2))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=FAULTS, help="this fault; may be repeated")
    arguments = parser.parse_args()
    main(arguments.program, arguments.json, arguments.only)
