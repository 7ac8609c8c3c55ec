"""The charts of a report as inline SVG: precision over recall, score histograms, curves of a run.

Colours and text sizes are classes of the report's stylesheet, so that a chart follows the reader's
light or dark scheme. Coordinates are those of the viewBox, which the page stretches to its column.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.report.analysis import Findings

# A line of more points than this is drawn through the means of so many stretches of it.
MAX_POINTS = 240


class Frame(NamedTuple):
    """Where a chart's axes lie, and what they span."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Viewbox coordinates of a value."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height


def pr_curves(findings: Findings) -> str:
    """Precision over recall, a line for each IoU threshold, with the AP of each beside it."""
    frame = Frame(44, 12, 300, 240, (0, 1), (0, 1))
    ticks = [(value, f"{value:g}") for value in (0, 0.25, 0.5, 0.75, 1)]
    parts = [_axes(frame, ticks, ticks, "Recall", "Precision")]
    parts.append('<text class="key" x="360" y="22">IoU</text>')
    parts.append('<text class="key" x="456" y="22" text-anchor="end">AP</text>')
    rows = list(zip(findings.iou_thresholds, findings.precision, strict=True))
    for i, (iou, precision) in reversed(list(enumerate(rows))):
        # The strictest threshold is the faintest line.
        opacity = 1 - 0.7 * i / max(len(rows) - 1, 1)
        style = f'class="line" stroke-opacity="{opacity:.2f}"'
        parts.append(_polyline(frame, findings.recalls, precision, style))
        y = 44 + 21 * i
        parts.append(f'<path {style} d="M360 {y - 4}h18"/>')
        parts.append(f'<text x="386" y="{y}">{iou:.2f}</text>')
        parts.append(f'<text x="456" y="{y}" text-anchor="end">{precision.mean():.3f}</text>')
    what = f"Precision over recall of the {findings.kind} results at ten IoU thresholds"
    return _svg(460, 292, what, parts)


def score_histogram(findings: Findings) -> str:
    """Scores of true detections upwards, of false ones downwards, each on a scale of its own."""
    true, false = (np.asarray(counts, float) for counts in findings.histogram)
    low, high = findings.histogram_range
    bins, left, width, half = len(true), 44, 400, 100
    middle = 12 + half
    parts = []
    for name, counts, sign in (("true", true, -1), ("false", false, 1)):
        highest = max(counts.max(), 1)
        for i, count in enumerate(counts):
            if count:
                size = max(count / highest * half, 0.75)
                x = left + i * width / bins
                y = middle - size if sign < 0 else middle
                span = low + i * (high - low) / bins, low + (i + 1) * (high - low) / bins
                parts.append(
                    f'<rect class="{name}" x="{x + 0.5:.1f}" y="{y:.1f}" '
                    f'width="{width / bins - 1:.1f}" height="{size:.1f}">'
                    f"<title>{span[0]:.2f} to {span[1]:.2f}: {count:.0f} {name}</title></rect>"
                )
        edge = middle + sign * half
        parts.append(f'<path class="grid" d="M{left} {edge}h{width}"/>')
        parts.append(f'<text x="{left - 6}" y="{edge + 4}" text-anchor="end">{highest:.0f}</text>')
    parts.append(f'<path class="axis" d="M{left} {middle}h{width}"/>')
    bottom = middle + half
    for part in (0, 0.25, 0.5, 0.75, 1):
        x = left + part * width
        value = _short(low + part * (high - low))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value}</text>')
    if low <= findings.threshold <= high:
        x = left + (findings.threshold - low) / (high - low) * width
        parts.append(f'<path class="mark" d="M{x:.1f} 12V{bottom}"/>')
    label = f'<text x="{left + width / 2}" y="{bottom + 38}" text-anchor="middle">Score</text>'
    what = f"Histogram of the scores of true and false {findings.kind} detections"
    return _svg(460, bottom + 46, what, [*parts, label])


def run_chart(
    what: str,
    series: Sequence[tuple[str, str, list[tuple[float, float]]]],
    steps: tuple[float, float],
) -> str:
    """Lines over the steps of a run.

    Args:
        series: (name, class of the line, [(step, value)]), values finite, none of the lists empty.
        steps: the first and the last of the run.
    """
    lines = [(kind, _thinned(line)) for _, kind, line in series]
    values = [value for _, line in lines for _, value in line]
    low, high = min(0.0, *values), _ceiling(max(0.0, *values))
    span = (low, high if high > low else low + 1)
    first, last = steps
    frame = Frame(46, 30, 260, 110, (first, last if last > first else first + 1), span)
    y_ticks = [(value, _short(value)) for value in np.linspace(*span, 3)]
    x_ticks = [(value, _short(value)) for value in np.linspace(*frame.x, 3)]
    parts = [_axes(frame, x_ticks, y_ticks, "", "")]
    parts.append(f'<text class="key" x="0" y="12">{escape(what)}</text>')
    for kind, line in lines:
        x, y = zip(*line, strict=True)
        if len(line) == 1:
            cx, cy = frame.place(x[0], y[0])
            parts.append(f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="3"/>')
        else:
            parts.append(_polyline(frame, x, y, f'class="{kind}"'))
    names = " and ".join(name for name, _, _ in series)
    return _svg(320, 166, f"{what}, {names}, over the steps of the run", parts)


def _ceiling(high: float) -> float:
    """A round number that is no less, of which the half is round too."""
    if high <= 0:
        return high
    unit = 10.0 ** math.floor(math.log10(high))
    # Float32 noise is not to double an axis.
    return next(unit * times for times in (1, 2, 4, 6, 8, 10, 20) if unit * times > 0.999 * high)


def _thinned(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The line itself, or the means of MAX_POINTS stretches of it."""
    if len(line) <= MAX_POINTS:
        return line
    return [tuple(part.mean(axis=0)) for part in np.array_split(np.array(line), MAX_POINTS)]


def _axes(frame: Frame, x_ticks, y_ticks, x_name: str, y_name: str) -> str:
    """Grid lines with their numbers, and the names of the axes."""
    parts = []
    bottom = frame.top + frame.height
    for value, text in y_ticks:
        _, y = frame.place(frame.x[0], value)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}h{frame.width}"/>')
        parts.append(f'<text x="{frame.left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in x_ticks:
        x, _ = frame.place(value, frame.y[0])
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
    middle = frame.left + frame.width / 2
    parts.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{x_name}</text>')
    across = frame.top + frame.height / 2
    turned = f'transform="rotate(-90 12 {across})"'
    parts.append(f'<text x="12" y="{across}" text-anchor="middle" {turned}>{y_name}</text>')
    return "".join(parts)


def _polyline(frame: Frame, x: Sequence[float], y: Sequence[float], style: str) -> str:
    points = (frame.place(*pair) for pair in zip(x, y, strict=True))
    text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline {style} points="{text}"/>'


def _short(value: float) -> str:
    """A number in few characters: 0.25, 1.5, 300, 90k, 1e-05."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    if abs(value) >= 10_000 and math.isfinite(value):
        return f"{value / 1000:.4g}k"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _svg(width: float, height: float, what: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(what)}">'
        f"<title>{escape(what)}</title>{''.join(parts)}</svg>"
    )
