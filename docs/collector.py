"""Receives spans as OTLP over HTTP in JSON, and prints each trace as a tree: to try tracing without a collector."""

import argparse
import collections
import http.server
import json
import sys
import threading
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--port", type=int, default=4318)
parser.add_argument("--quiet", type=float, default=4.0, help="a trace is printed after this time without new spans, in s")
parser.add_argument("--traces", type=int, help="end after this number of traces")
parser.add_argument("--hide", default="offload", help="names of first spans whose traces are not shown, with commas")
options = parser.parse_args()

MAX_SPANS = 100_000
spans, seen, lock = collections.defaultdict(list), {}, threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with lock:
            for resource in message["resourceSpans"]:
                service = attributes(resource["resource"])["service.name"]
                for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                    if sum(map(len, spans.values())) < MAX_SPANS:
                        spans[span["traceId"]].append(span | {"service": service})
                    seen[span["traceId"]] = time.monotonic()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def attributes(of):
    values = {entry["key"]: next(iter(entry["value"].values())) for entry in of["attributes"]}
    return {key: [each["stringValue"] for each in value["values"]] if isinstance(value, dict) else value
            for key, value in values.items()}


def show(trace):
    ids = {span["spanId"] for span in trace}
    start = min(int(span["startTimeUnixNano"]) for span in trace)

    def lines(parent, depth):
        children = [span for span in trace
                    if span.get("parentSpanId") == parent or (parent is None and span.get("parentSpanId") not in ids)]
        for span in sorted(children, key=lambda span: int(span["startTimeUnixNano"])):
            begin, end = (int(span[key]) - start for key in ("startTimeUnixNano", "endTimeUnixNano"))
            error = "  ERROR " + span["status"].get("message", "") if "status" in span else ""
            head = f"{'  ' * depth}{span['name']}"
            print(f"{head:34}{begin / 1e6:9.1f} ms {(end - begin) / 1e6:+9.1f} ms  {span['service']}{error}")
            for key, value in attributes(span).items():
                print(f"{'  ' * depth}    {key} = {value}")
            lines(span["spanId"], depth + 1)

    print(f"trace {trace[0]['traceId']}: {len(trace)} spans")
    lines(None, 0)
    print(flush=True)


server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"collector at http://127.0.0.1:{options.port}", flush=True)
shown = 0
while options.traces is None or shown < options.traces:
    time.sleep(0.2)
    with lock:
        quiet = [trace for trace, at in seen.items() if time.monotonic() - at > options.quiet]
        ended = [(seen.pop(trace), spans.pop(trace, [])) for trace in quiet]
    for _, trace in ended:
        ids = {span["spanId"] for span in trace}
        first = next((span["name"] for span in trace if span.get("parentSpanId") not in ids), None)
        if trace and first not in options.hide.split(","):
            show(trace)
            shown += 1
sys.exit(0)
