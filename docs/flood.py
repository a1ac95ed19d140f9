"""Sends prompts of several tenants at once, and prints how many were answered and refused."""

import argparse
import collections
import json
import random
import threading
import time
import urllib.error
import urllib.request

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--model", default="tiny")
parser.add_argument("--tenants", default="red,blue")
parser.add_argument("--requests", type=int, default=100, help="per tenant, all at once")
parser.add_argument("--prompt", type=int, default=1500, help="tokens, none of them shared")
parser.add_argument("--json", action="store_true")
options = parser.parse_args()

done, lock, start = [], threading.Lock(), time.monotonic()


def ask(tenant, seed):
    tokens = random.Random(f"{tenant}{seed}").choices(range(10, 500), k=options.prompt)
    body = {"model": options.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    headers = {"content-type": "application/json", "x-tenant": tenant}
    request = urllib.request.Request(f"{options.url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, retry = answer.status, None
    except urllib.error.HTTPError as error:
        status, retry = error.code, error.headers.get("retry-after")
    with lock:
        done.append((time.monotonic() - start, tenant, status, retry))


tenants = options.tenants.split(",")
threads = [threading.Thread(target=ask, args=(tenant, seed)) for seed in range(options.requests) for tenant in tenants]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

answered = sorted(at for at, _, status, _ in done if status == 200)
half = answered[len(answered) // 2] if answered else 0.0
report = {
    "seconds": round(time.monotonic() - start, 1),
    "tenants": {
        tenant: {
            "answered": sum(name == tenant and status == 200 for _, name, status, _ in done),
            "of_the_first_half": sum(name == tenant and status == 200 and at <= half for at, name, status, _ in done),
            "refused": sum(name == tenant and status == 429 for _, name, status, _ in done),
        }
        for tenant in tenants
    },
    "retry_after": dict(collections.Counter(retry for *_, retry in done if retry)),
}
if options.json:
    print(json.dumps(report))
else:
    print(f"{'tenant':10} {'answered':>9} {'first half':>11} {'refused':>8}")
    for tenant, row in report["tenants"].items():
        print(f"{tenant:10} {row['answered']:>9} {row['of_the_first_half']:>11} {row['refused']:>8}")
    print(f"{report['seconds']} s; retry-after: {report['retry_after']}")
