"""A deployment on one machine, as processes: NATS, an S3 server, two frontends, two prefill and two decode workers. It
shows that it works.

    demo_cluster.py BLOCKYARD [--json]

1. A conversation of four turns goes through both frontends in turn. Prefill workers compute its prompts.
2. A decode worker is killed while it streams; the other one continues the stream.
3. Everything but the S3 server is stopped and started again. The conversation goes on, and its blocks are loaded from
   the object store: the workers have no SSD tier here.

Exits with 1 and the reason if one of these does not happen.
"""

import json
import sys
import urllib.request

from deployment import deployment, fetch

PREFILL, DECODE, FRONTENDS = 2, 2, 2
WORKERS = ["prefill:1"] * PREFILL + ["decode:1"] * DECODE
# By default a prompt as short as these is computed by the decode worker.
ROUTING = ["router.disaggregation=always"]


def turn(frontend, messages):
    """One turn of a conversation: prompt tokens, and how many of them were cached."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer = json.loads(fetch(f"{frontend.url}/v1/chat/completions", body))
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def killed_stream(processes):
    """Kills the decode worker of a stream. The text of the stream, and that of the same request undisturbed."""
    frontend = processes.frontends[0]
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
                decode = processes.workers[PREFILL:]
                killed = next(worker for worker in decode if worker.metric("blockyard_worker_requests_running"))
                killed.process.kill()
    answer = json.loads(fetch(f"{frontend.url}/v1/completions", body | {"stream": False}))
    return killed, text, answer["choices"][0]["text"]


def show(processes, say):
    processes.start()
    say(f"started: {PREFILL} prefill workers, {DECODE} decode workers, {FRONTENDS} frontends")
    messages, turns = [], []
    for nth in range(4):
        messages.append({"role": "user", "content": f"turn {nth}: " + "the yard sorts wagons into blocks " * 20})
        prompt, cached = turn(processes.frontends[nth % FRONTENDS], messages)
        turns.append({"frontend": nth % FRONTENDS + 1, "prompt_tokens": prompt, "cached_tokens": cached})
        say(f"turn {nth + 1} through frontend {nth % FRONTENDS + 1}: {cached} of {prompt} prompt tokens cached")
    if turns[-1]["cached_tokens"] == 0:
        sys.exit("demo: the last turn found nothing cached")
    prefill = processes.workers[:PREFILL]
    computed = sum(worker.metric("blockyard_worker_prompt_tokens_computed_total") for worker in prefill)
    say(f"{computed:.0f} prompt tokens were computed by the prefill workers")
    if computed == 0:
        sys.exit("demo: the prefill workers computed nothing")
    killed, text, undisturbed = killed_stream(processes)
    say(f"{killed.name} was killed in mid-stream; the text is {'the same' if text == undisturbed else 'ANOTHER ONE'}")
    if text != undisturbed:
        sys.exit("demo: the text of the continued stream differs")
    nth = processes.workers.index(killed)
    processes.workers[nth] = processes.worker(nth).until_ready()
    processes.stop()
    say("stopped all processes but the S3 server")
    processes.start()
    messages.append({"role": "user", "content": "after the restart"})
    prompt, cached = turn(processes.frontends[0], messages)
    loaded = sum(worker.metric("blockyard_worker_prompt_tokens_cached_total", 'tier="g4"') for worker in processes.workers)
    say(f"started again: {cached} of {prompt} prompt tokens cached")
    say(f"{loaded:.0f} tokens were loaded from the object store, by the prefill worker and by the decode worker")
    if loaded == 0:
        sys.exit("demo: nothing was loaded from the object store")
    return {
        "turns": turns,
        "computed_by_prefill_workers": computed,
        "continued_text_is_the_same": True,
        "after_restart": {"prompt_tokens": prompt, "cached_tokens": cached, "from_g4": loaded},
    }


def main(program, as_json):
    say = (lambda text: None) if as_json else (lambda text: print(f"  {text}", flush=True))
    with deployment(program, WORKERS, FRONTENDS, routing=ROUTING) as processes:
        report = show(processes, say)
    if as_json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], "--json" in sys.argv[2:])
