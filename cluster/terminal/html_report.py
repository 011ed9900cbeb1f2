"""A measurement as one HTML file with SVG charts, without scripts or network access."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 220
LEFT, BOTTOM, TOP, RIGHT = 56, 28, 12, 12  # margins of a chart
NUM_BINS = 60  # bins of a rate over time
MAX_POINTS = 400  # points of a curve
STYLE = """
:root { --page: #f6f8f9; --surface: #fff; --ink: #15212b; --muted: #566572; --line: #dde4e8; --accent: #0b7285; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1317; --surface: #141c22; --ink: #e4ecf1; --muted: #8fa1ae; --line: #26323b; --accent: #3fc3d6; }
}
body { margin: 0 auto; padding: 32px 20px; max-width: 1200px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; } h2 { font-size: 15px; margin: 0 0 8px; } small { color: var(--muted); font-weight: 400; }
main { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 12px; padding: 16px; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 4px 20px; margin: 0; }
dt { color: var(--muted); } dd { margin: 0; }
svg { width: 100%; height: auto; } text { font-size: 11px; fill: var(--muted); }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--accent); stroke-width: 2; }
.area { fill: var(--accent); opacity: .1; } .labels { float: right; font-size: 13px; color: var(--muted); }
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A curve. Both axes begin at 0."""

    title: str
    x: str
    y: str
    points: Sequence[Point]
    labels: str = ""
    """Figures to show besides the curve."""
    y_at_least: float = 0.0
    """Minimum end of the second axis, so that counts get whole numbers."""

    def svg(self) -> str:
        x_max = max((x for x, _ in self.points), default=0.0) or 1.0
        y_max = nice_above(max([y for _, y in self.points] + [self.y_at_least]))
        x_step = nice_above(x_max / 6)
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

        def point(x: float, y: float) -> str:
            return f"{LEFT + across * x / x_max:.1f},{TOP + up * (1 - y / y_max):.1f}"

        parts = []
        for i in range(5):
            y = TOP + up * (1 - i / 4)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(y_max * i / 4)}</text>')
        for i in range(math.floor(x_max / x_step * (1 + 1e-9)) + 1):
            x = LEFT + across * i * x_step / x_max
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{short(i * x_step)}</text>')
        line = " ".join(point(x, y) for x, y in thinned(self.points))
        below = " ".join(point(x, 0) for x, _ in [*self.points[-1:], *self.points[:1]])
        parts.append(f'<polygon class="area" points="{line} {below}"/><polyline class="curve" points="{line}"/>')
        title = f"{escape(self.title)}: {escape(self.y)}, by {escape(self.x)}"
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def distribution(title: str, unit: str, values: Sequence[float]) -> Chart:
    """Return a chart of the values by percentile."""
    ordered = sorted(values)
    last = max(1, len(ordered) - 1)
    labels = [f"P{p} {short(float(np.percentile(ordered, p)))}" for p in (50, 90, 99) if ordered]
    points = [(100 * i / last, value) for i, value in enumerate(ordered)]
    return Chart(title, "percentile", unit, points, " · ".join(labels))


def rate_over_time(title: str, unit: str, events: Sequence[Point], duration_s: float) -> Chart:
    """Return a chart of amounts per second. events: (second, amount)."""
    width = max(duration_s, 1e-9) / NUM_BINS
    sums = [0.0] * NUM_BINS
    for at, amount in events:
        sums[min(NUM_BINS - 1, max(0, int(at / width)))] += amount
    return Chart(title, "seconds", unit, [((i + 0.5) * width, total / width) for i, total in enumerate(sums)])


def steps_over_time(title: str, unit: str, changes: Sequence[Point], duration_s: float) -> Chart:
    """Return a chart of a value that changes in steps. changes: (second, value from then on), in order."""
    points: list[Point] = []
    for at, value in changes:
        points += [(at, points[-1][1] if points else value), (at, value)]
    return Chart(title, "seconds", unit, [*points, (duration_s, points[-1][1])] if points else [], y_at_least=4)


def write_report(path: Path, title: str, figures: Sequence[tuple[str, str]], charts: Sequence[Chart]) -> None:
    """Write one self-contained HTML file."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in figures)
    sections = "".join(
        f'<section><span class="labels">{chart.labels}</span>'
        f"<h2>{escape(chart.title)} <small>{escape(chart.y)}, by {escape(chart.x)}</small></h2>{chart.svg()}</section>"
        for chart in charts
    )
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
        f"<main><section><h2>Figures</h2><dl>{rows}</dl></section>{sections}</main></html>\n",
        encoding="utf-8",
    )


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points without those that no pixel would show; the last one is always kept."""
    step = math.ceil(len(points) / MAX_POINTS)
    return points if step < 2 else [*points[::step], points[-1]]


def nice_above(value: float) -> float:
    """Return the next of 1, 2, 4 or 8 times a power of ten, so that quarters of it are round numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 4, 8, 10) if power * factor >= value * (1 - 1e-9))


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
