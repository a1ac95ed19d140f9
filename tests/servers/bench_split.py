"""The cost of the split: prefill and decode on two workers, compared with two workers that do both.

    bench_split.py BLOCKYARD [--json] [--rounds N]

Both arms have two worker processes with one compute thread each, pinned to one core each (taskset), the same two cores.
Four clients decode short prompts, and a further one sends long prompts one after the other. All of them, a frontend and
NATS run on the same machine. The arms run in turns, each on processes of its own. Printed are, for the running decodes,
the time between two tokens while long prompts arrive; and for the hand-over its duration, from the end of the last
chunk of the prefill to the first step with the request, beside the transfer of the bytes that were still missing plus a
step of the decode worker; and how many of the bytes were there when the prefill ended.

Exits with 1 if a goal is missed.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request

from deployment import Deployment, Process

DECODES = 4
SECONDS = 20
LONG_PROMPTS = 6000
MODEL = "small"
ARMS = {"aggregated": ["both:1", "both:1"], "split": ["prefill:1", "decode:1"]}


class Pinned(Deployment):
    """A deployment without a store, each worker on a core of its own."""

    def __init__(self, program, folder, roles, disaggregation):
        super().__init__(program, folder, None, roles, 1)
        self.disaggregation = disaggregation

    def worker(self, nth):
        url = f"http://127.0.0.1:{self.ports[nth]}"
        core = sorted(os.sched_getaffinity(0))[nth]
        command = ["taskset", "-c", str(core), self.program, "worker", "--model", MODEL, "--workers", self.roles[nth]]
        command += ["--data-dir", f"{self.folder}/worker-{nth + 1}", "--listen", url.removeprefix("http://")]
        command += self.common()
        for setting in ["threads=1", "tiers.g1=512MiB", "tiers.g2=256MiB", "tiers.g3=off"]:
            command += ["--set", setting]
        return Process(self.folder, f"worker-{nth + 1}", url, command, self.environment)

    def frontend(self, nth):
        url = f"http://127.0.0.1:{self.ports[len(self.roles) + nth]}"
        command = [self.program, "frontend", "--listen", url.removeprefix("http://")] + self.common()
        command += ["--set", "frontend.shutdown_delay=0s", "--set", f"router.disaggregation={self.disaggregation}"]
        return Process(self.folder, f"frontend-{nth + 1}", url, command, self.environment)


@contextlib.contextmanager
def deployment(program, roles, disaggregation):
    with tempfile.TemporaryDirectory(prefix="blockyard-split-") as folder:
        processes = Pinned(program, folder, roles, disaggregation)
        try:
            processes.start()
            yield processes
        finally:
            processes.kill()


def stream(url, prompt, tokens, stopping=None):
    """Times between two tokens, and the time to the first."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["stream"] = True
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    began, last, first, gaps = time.monotonic(), None, None, []
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if last is None:
                first = now - began
            else:
                gaps.append((now, now - last))
            last = now
            if stopping is not None and stopping.is_set():
                break
    return first, gaps


def prompt(seed, tokens):
    return [(nth * 7 + nth * nth // 13 + seed * 131) % 30000 + 1000 for nth in range(tokens)]


def measure(processes, round_number):
    url = processes.frontends[0].url
    stopping, gaps, lock = threading.Event(), [], threading.Lock()

    def decode(nth):
        count = 0
        while not stopping.is_set():
            _, own = stream(url, prompt(1000 + round_number * 100 + nth * 10 + count, 64), 4000, stopping)
            with lock:
                gaps.extend(own)
            count += 1

    threads = [threading.Thread(target=decode, args=(nth,)) for nth in range(DECODES)]
    for thread in threads:
        thread.start()
    # The speeds of the workers are measured before anything counts.
    stream(url, prompt(1, LONG_PROMPTS), 2)
    time.sleep(1)
    before = counters(processes)
    began, firsts = time.monotonic(), []
    while time.monotonic() - began < SECONDS:
        firsts.append(stream(url, prompt(2 + round_number * 1000 + len(firsts), LONG_PROMPTS), 8)[0])
    ended = time.monotonic()
    after = counters(processes)
    stopping.set()
    for thread in threads:
        thread.join()
    times = sorted(gap for at, gap in gaps if began <= at < ended)
    result = {
        "prompts": len(firsts),
        "ttft_s": statistics.median(firsts),
        "tokens": len(times),
        "itl_p50_s": times[len(times) // 2],
        "itl_p99_s": times[len(times) * 99 // 100],
    }
    return result | handoffs({name: after[name] - before[name] for name in after})


def counters(processes):
    decode = processes.workers[1]
    read = lambda name, label="": decode.metric(f"blockyard_{name}", label)
    return {
        "handoffs": read("worker_handoff_seconds_count"),
        "seconds": read("worker_handoff_seconds_sum"),
        "during": read("worker_handoff_received_bytes_total", 'phase="prefill"'),
        "after": read("worker_handoff_received_bytes_total", 'phase="after_prefill"'),
        "peer_bytes": read("tier_transfer_bytes_total", 'tier="peer"'),
        "peer_seconds": read("tier_transfer_seconds_sum", 'tier="peer"'),
        "steps": read("worker_step_seconds_count", 'kind="decode"'),
        "step_seconds": read("worker_step_seconds_sum", 'kind="decode"'),
    }


def handoffs(counted):
    if counted["handoffs"] == 0:
        return {}
    step = counted["step_seconds"] / counted["steps"]
    transfer = counted["after"] / counted["handoffs"] * counted["peer_seconds"] / counted["peer_bytes"]
    return {
        "handoffs": int(counted["handoffs"]),
        "handoff_s": counted["seconds"] / counted["handoffs"],
        "last_transfer_s": transfer,
        "step_s": step,
        "there_before_end": counted["during"] / (counted["during"] + counted["after"]),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rounds = {arm: [] for arm in ARMS}
    for round_number in range(options.rounds):
        for arm, roles in ARMS.items():
            mode = "always" if arm == "split" else "never"
            with deployment(os.path.abspath(options.program), roles, mode) as processes:
                rounds[arm].append(measure(processes, round_number))
    if options.json:
        print(json.dumps(rounds, indent=1))
    median = lambda arm, name: statistics.median(result[name] for result in rounds[arm])
    ratio = statistics.median(
        split["itl_p99_s"] / both["itl_p99_s"] for split, both in zip(rounds["split"], rounds["aggregated"])
    )
    handoff, there = median("split", "handoff_s"), median("split", "there_before_end")
    bound = median("split", "last_transfer_s") + median("split", "step_s")
    goals = [
        ("p99 time between tokens, split / aggregated", ratio, "≤ 0.5", ratio <= 0.5),
        ("hand-over / (last transfer + one step)", handoff / bound, "≤ 1", handoff <= bound),
        ("bytes there when the prefill ends", there, "≥ 0.8", there >= 0.8),
    ]
    if not options.json:
        for arm in ARMS:
            p50, p99, ttft = (median(arm, name) * 1e3 for name in ("itl_p50_s", "itl_p99_s", "ttft_s"))
            print(f"{arm:<11} between tokens: p50 {p50:.1f} ms, p99 {p99:.1f} ms; first token: {ttft:.0f} ms")
        last, step = (median("split", name) * 1e3 for name in ("last_transfer_s", "step_s"))
        print(f"hand-over {handoff * 1e3:.1f} ms; last transfer {last:.1f} ms, step {step:.1f} ms")
        for what, value, goal, met in goals:
            print(f"{what:<46} {value:5.2f}  {goal:<6} {'met' if met else 'missed'}")
    return 0 if all(met for *_, met in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
