"""Receives spans as OTLP over HTTP in JSON, and prints each trace as a tree: to try tracing without a collector."""

import argparse
import collections
import html
import http.server
import json
import sys
import threading
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--port", type=int, default=4318)
parser.add_argument("--quiet", type=float, default=4.0, help="a trace is printed after this time without new spans, in s")
parser.add_argument("--traces", type=int, help="end after this number of traces")
parser.add_argument("--svg", help="draw each trace into this file, too; a later one replaces it")
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


def tree(trace):
    """Each span after its parent: the depth, the span, and its begin and end after the first one's begin, in ms."""
    ids = {span["spanId"] for span in trace}
    start = min(int(span["startTimeUnixNano"]) for span in trace)

    def below(parent, depth):
        children = [span for span in trace
                    if span.get("parentSpanId") == parent or (parent is None and span.get("parentSpanId") not in ids)]
        for span in sorted(children, key=lambda span: int(span["startTimeUnixNano"])):
            yield depth, span, *((int(span[key]) - start) / 1e6 for key in ("startTimeUnixNano", "endTimeUnixNano"))
            yield from below(span["spanId"], depth + 1)

    return list(below(None, 0))


def show(trace):
    print(f"trace {trace[0]['traceId']}: {len(trace)} spans")
    for depth, span, begin, end in tree(trace):
        error = "  ERROR " + span["status"].get("message", "") if "status" in span else ""
        head = f"{'  ' * depth}{span['name']}"
        print(f"{head:34}{begin:9.1f} ms {end - begin:+9.1f} ms  {span['service']}{error}")
        for key, value in attributes(span).items():
            print(f"{'  ' * depth}    {key} = {value}")
    print(flush=True)


# Colors of processes that people with color blindness tell apart (Okabe and Ito).
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"]
LABELS, BARS, DURATIONS, ROW = 240, 620, 100, 22


def draw(trace, path):
    """The spans as bars on an axis of time, in the color of their process."""
    rows = tree(trace)
    whole = max(end for *_, end in rows)
    services = list(dict.fromkeys(span["service"] for _, span, *_ in rows))
    color = {service: COLORS[nth % len(COLORS)] for nth, service in enumerate(services)}
    width, height = LABELS + BARS + DURATIONS, (len(rows) + 2) * ROW
    text = lambda x, y, content: f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(content)}</text>'
    box = lambda x, y, w, h, fill: f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h}" fill="{fill}"/>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" '
             'font-family="sans-serif">', box(0, 0, width, height, "white")]
    for nth, service in enumerate(services):
        parts += [box(10 + 180 * nth, 6, 12, 12, color[service]), text(28 + 180 * nth, 16, service)]
    for nth, (depth, span, begin, end) in enumerate(rows):
        y = (nth + 1.5) * ROW
        values = attributes(span)
        tier = f" {values['blockyard.tier']}" if "blockyard.tier" in values else ""
        parts += [box(0, y - ROW / 2, width, ROW, "#f5f5f5")] if nth % 2 == 0 else []
        parts.append(text(10 + 14 * depth, y + 5, span["name"] + tier))
        left, right = (LABELS + at / whole * BARS for at in (begin, end))
        parts.append(box(left, y - 6, max(right - left, 1.5), 12, color[span["service"]]))
        parts.append(text(right + 6, y + 5, f"{end - begin:.1f} ms"))
    with open(path, "w") as file:
        file.write("\n".join([*parts, "</svg>\n"]))


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
            if options.svg:
                draw(trace, options.svg)
            shown += 1
sys.exit(0)
