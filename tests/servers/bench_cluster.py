"""Prompt tokens that are computed for conversations: one process beside frontends and workers as processes.

    bench_cluster.py BLOCKYARD [--json] [--conversations N] [--turns N] [--think SECONDS] [--model NAME] [--memory SIZE]

The same script runs against `serve` with four workers, and against two frontends and four workers over NATS, whose
frontends take turns within each conversation. All conversations share a system prompt of 500 tokens; a turn adds 200
tokens of the user and 100 of the reply before, which is part of the script. Workers have no tier below G2, so that a
prefix that is on another worker is computed again. The lower bound is what any fleet must compute: each distinct block
once, and the partial last block of each prompt.

Exits with 1 if a request fails. The goal is printed beside the result: at most 2 % more than one process.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile
import threading
import time

from deployment import Process, deployment, fetch
from ports import free_port

WORKERS = 4
FRONTENDS = 2
SYSTEM, USER, REPLY = 500, 200, 100
ANSWER = 16
BLOCK = 16
# The memory is that of G1, and of G2, per worker: 58,000 tokens. The conversations have 143,000 tokens, so that nothing
# is evicted if they are spread evenly. With the model tiny, 56MiB hold as many.
MODEL = "small"
MEMORY = "256MiB"
THINK_SECONDS = 0.1
GOAL = 1.02


def conversations(count, turns, seed, think):
    """For each conversation its turns: seconds of thinking before the prompt, and the prompt as token ids.

    The pauses are uniformly distributed; `think` is their mean, except before the first turns.
    """
    source = random.Random(seed)
    tokens = lambda length: [source.randrange(1000, 4000) for _ in range(length)]
    system, script = tokens(SYSTEM), []
    for _ in range(count):
        prompt, steps = list(system), []
        for turn in range(turns):
            prompt = prompt + (tokens(REPLY) if turn else []) + tokens(USER)
            # The first turn is not delayed: each conversation waits for the first answer of the one before it.
            steps.append((source.random() * 2 * (think if turn else THINK_SECONDS), prompt))
        script.append(steps)
    return script


def lower_bound(script):
    known, computed = set(), 0
    for steps in script:
        for _, prompt in steps:
            full = len(prompt) // BLOCK
            chain = fresh = 0
            for nth in range(full):
                chain = hash((chain, *prompt[nth * BLOCK : (nth + 1) * BLOCK]))
                fresh += 0 if chain in known else BLOCK
                known.add(chain)
            # Of a prompt whose blocks are all cached, the last token is computed.
            computed += max(1, fresh + len(prompt) - full * BLOCK)
    return computed


def converse(model, steps, urls, started, errors):
    try:
        for turn, (thinking, prompt) in enumerate(steps):
            time.sleep(thinking)
            body = {"model": model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            fetch(f"{urls[turn % len(urls)]}/v1/completions", body, timeout=300)
            started.set()
    except OSError as error:
        errors.append(str(error))
    finally:
        started.set()


def run_script(model, script, urls):
    """Each conversation starts after the first answer of the one before it; then all run at the same time."""
    threads, errors, began = [], [], time.monotonic()
    for steps in script:
        started = threading.Event()
        threads.append(threading.Thread(target=converse, args=(model, steps, urls, started, errors)))
        threads[-1].start()
        started.wait()
    for thread in threads:
        thread.join()
    if errors:
        sys.exit(f"bench: {len(errors)} conversations failed: {errors[0]}")
    return time.monotonic() - began


def computed(processes):
    """Computed prompt tokens of each worker. A worker has the label `worker` in the metrics of its process."""
    name, found = "blockyard_worker_prompt_tokens_computed_total{", []
    for process in processes:
        lines = [line for line in fetch(f"{process.url}/metrics").splitlines() if line.startswith(name)]
        found += [int(float(line.rsplit(" ", 1)[1])) for line in lines]
    return found


def one_process(program, script, model, memory):
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="blockyard-serve-") as folder:
        url = f"http://127.0.0.1:{port}"
        command = [program, "serve", "--model", model, "--listen", f"127.0.0.1:{port}", "--data-dir", f"{folder}/data"]
        command += ["--workers", f"both:{WORKERS}", "--set", f"tiers.g1={memory}", "--set", f"tiers.g2={memory}"]
        command += ["--set", "tiers.g3=off", "--set", "frontend.shutdown_delay=0s"]
        process = Process(folder, "serve", url, command, {"HOME": folder})
        try:
            process.until_ready()
            seconds = run_script(model, script, [url])
            return computed([process]), seconds
        finally:
            process.process.kill()


def many_processes(program, script, model, memory):
    with deployment(program, WORKERS, FRONTENDS, model=model, memory=memory, shared_store=False) as processes:
        processes.start()
        seconds = run_script(model, script, [frontend.url for frontend in processes.frontends])
        return computed(processes.workers), seconds


def main(program, as_json, count, turns, seed, think, model, memory):
    script = conversations(count, turns, seed, think)
    bound = lower_bound(script)
    rows = []
    for name, arm in (("one process", one_process), ("frontends and workers", many_processes)):
        per_worker, seconds = arm(program, script, model, memory)
        total = sum(per_worker)
        rows.append({"arm": name, "computed_tokens": total, "times_bound": round(total / bound, 4)})
        rows[-1] |= {"computed_per_worker": per_worker, "seconds": round(seconds, 1)}
        if not as_json:
            print(f"{name:24} {total:9} computed  {total / bound:6.3f} of the bound  {per_worker}", flush=True)
    ratio = rows[1]["computed_tokens"] / rows[0]["computed_tokens"]
    met = ratio <= GOAL
    report = {"conversations": count, "turns": turns, "seed": seed, "think_seconds": think, "lower_bound_tokens": bound}
    report |= {"model": model, "memory": memory}
    report |= {"arms": rows, "processes_to_one": round(ratio, 4), "goal": GOAL, "met": met}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print(f"lower bound {bound} tokens; processes ÷ one process {ratio:.3f}, goal {GOAL}: {'met' if met else 'missed'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--conversations", type=int, default=84)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument(
        "--think", type=float, default=THINK_SECONDS, help="mean pause before a turn, seconds; sets the load"
    )
    parser.add_argument("--model", default=MODEL, help="built-in model: small or tiny")
    parser.add_argument("--memory", default=MEMORY, help="size of G1, and of G2, of each worker")
    arguments = parser.parse_args()
    program = str(pathlib.Path(arguments.program).resolve())
    settings = (arguments.conversations, arguments.turns, arguments.seed, arguments.think)
    main(program, arguments.json, *settings, arguments.model, arguments.memory)
