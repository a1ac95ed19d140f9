"""Draws the panels of the Grafana dashboard from a Prometheus, where there is no Grafana. Needs matplotlib.

    dashboard.py [--prometheus URL] [--seconds N] [--end TIME] PICTURE
"""

import argparse
import json
import pathlib
import re
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402

DASHBOARD = pathlib.Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "blockyard.json"
COLUMNS, STEP_SECONDS, RATE_INTERVAL = 4, 5, "30s"
PANEL_INCHES = (3.4, 1.9)
TITLE_INCHES = 0.35
MAX_SERIES_IN_LEGEND = 12

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
parser.add_argument("--seconds", type=int, default=360, help="length of the axis of time")
parser.add_argument("--end", type=float, default=time.time(), help="its end, in seconds since 1970")
parser.add_argument("picture")
options = parser.parse_args()


def series(target):
    """Each series of a query: its label in the legend, and its points."""
    start = options.end - options.seconds
    query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
    values = {"query": query, "start": start, "end": options.end, "step": STEP_SECONDS}
    url = f"{options.prometheus}/api/v1/query_range?{urllib.parse.urlencode(values)}"
    with urllib.request.urlopen(url) as response:
        found = json.load(response)["data"]["result"]
    for each in found:
        label = re.sub(r"\{\{(\w+)\}\}", lambda name, of=each: of["metric"].get(name[1], ""), target["legendFormat"])
        points = [(at - start, float(value)) for at, value in each["values"]]
        yield label, [point for point in points if point[1] == point[1]]  # without NaN


def axis_format(unit):
    if unit == "percentunit":
        return ticker.PercentFormatter(1.0, decimals=0)
    return ticker.EngFormatter(sep="", places=None)


def draw(panel, axes):
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults.get("unit", "short")
    found = [(label, points) for target in panel["targets"] for label, points in series(target) if points]
    for label, points in found:
        axes.plot(*zip(*points), label=label, linewidth=0.9)
    if not found:
        axes.text(0.5, 0.5, "no events", transform=axes.transAxes, ha="center", va="center", fontsize=7, color="gray")
    elif len(found) <= MAX_SERIES_IN_LEGEND:
        axes.legend(fontsize=5, ncols=3, loc="upper left", frameon=False, handlelength=1)
    axes.set_title(panel["title"] if unit in ("short", "percentunit") else f"{panel['title']} ({unit})", fontsize=8)
    axes.set_xlim(0, options.seconds)
    largest = max((value for _, points in found for _, value in points), default=0)
    axes.set_ylim(0, largest * 1.4 or 1)
    axes.yaxis.set_major_formatter(axis_format(unit))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.2)


def main():
    rows = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    lines = [(title if first == 0 else None, panels[first : first + COLUMNS])
             for title, panels in rows for first in range(0, len(panels), COLUMNS)]
    heights = [PANEL_INCHES[1] + (TITLE_INCHES if title else 0) for title, _ in lines]
    figure = pyplot.figure(figsize=(PANEL_INCHES[0] * COLUMNS, sum(heights)), dpi=100)
    whole, y = sum(heights), sum(heights)
    for (title, panels), height in zip(lines, heights):
        if title:
            figure.text(0.02, (y - TITLE_INCHES * 0.7) / whole, title, fontsize=10, fontweight="bold")
        y -= height
        for column, panel in enumerate(panels):
            place = [(column + 0.14) / COLUMNS, (y + 0.3) / whole, 0.82 / COLUMNS, (PANEL_INCHES[1] - 0.62) / whole]
            draw(panel, figure.add_axes(place))
    figure.savefig(options.picture)


main()
