"""Inline SVG charts: precision-recall curves, histograms, heat maps, training curves.

Colors and text sizes are classes of the report's stylesheet, so charts follow the reader's light or
dark scheme. Coordinates are in viewBox units; the page scales the viewBox to its column.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.report.analysis import Analysis

# Longer lines are averaged down to this many points.
MAX_POINTS = 240


class PlotArea(NamedTuple):
    """Position of a chart's axes in the viewBox, and their value ranges."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def to_viewbox(self, x: float, y: float) -> tuple[float, float]:
        """Convert a data point to viewBox coordinates."""
        right = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + right * self.width, self.top + (1 - up) * self.height


def pr_curves(analysis: Analysis) -> str:
    """Draw precision over recall, one line per IoU threshold, with the AP values beside them."""
    area = PlotArea(44, 12, 300, 240, (0, 1), (0, 1))
    ticks = [(value, f"{value:g}") for value in (0, 0.25, 0.5, 0.75, 1)]
    parts = [_axes(area, ticks, ticks, "Recall", "Precision")]
    parts.append('<text class="key" x="360" y="22">IoU</text>')
    parts.append('<text class="key" x="456" y="22" text-anchor="end">AP</text>')
    assert analysis.precision is not None  # the page leaves the chart out without it
    rows = list(zip(analysis.iou_thresholds, analysis.precision, strict=True))
    for i, (iou, precision) in reversed(list(enumerate(rows))):
        # The strictest threshold is the faintest line.
        opacity = 1 - 0.7 * i / max(len(rows) - 1, 1)
        style = f'class="line" stroke-opacity="{opacity:.2f}"'
        parts.append(_polyline(area, analysis.recalls, precision, style))
        y = 44 + 21 * i
        parts.append(f'<path {style} d="M360 {y - 4}h18"/>')
        parts.append(f'<text x="386" y="{y}">{iou:.2f}</text>')
        parts.append(f'<text x="456" y="{y}" text-anchor="end">{precision.mean():.3f}</text>')
    title = f"Precision over recall of the {analysis.kind} results at ten IoU thresholds"
    return _svg(460, 292, title, parts)


def score_histogram(analysis: Analysis) -> str:
    """Draw true detection scores upward and false ones downward, each to its own scale."""
    true, false = (np.asarray(counts, float) for counts in analysis.histogram)
    low, high = analysis.histogram_range
    bins, left, width, half = len(true), 44, 400, 100
    middle = 12 + half
    parts = []
    for name, counts, sign in (("true", true, -1), ("false", false, 1)):
        highest = max(counts.max(), 1)
        for i in np.flatnonzero(counts):
            size = max(counts[i] / highest * half, 0.75)
            place, top = left + i * width / bins, middle - size if sign < 0 else middle
            start, stop = (low + edge * (high - low) / bins for edge in (i, i + 1))
            parts.append(
                f'<rect class="{name}" x="{place + 0.5:.1f}" y="{top:.1f}" '
                f'width="{width / bins - 1:.1f}" height="{size:.1f}">'
                f"<title>{start:.2f} to {stop:.2f}: {counts[i]:.0f} {name}</title></rect>"
            )
        edge = middle + sign * half
        parts.append(f'<path class="grid" d="M{left} {edge}h{width}"/>')
        parts.append(f'<text x="{left - 6}" y="{edge + 4}" text-anchor="end">{highest:.0f}</text>')
    parts.append(f'<path class="axis" d="M{left} {middle}h{width}"/>')
    bottom = middle + half
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        x = left + fraction * width
        value = _short(low + fraction * (high - low))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value}</text>')
    if low <= analysis.threshold <= high:
        x = left + (analysis.threshold - low) / (high - low) * width
        parts.append(f'<path class="mark" d="M{x:.1f} 12V{bottom}"/>')
    label = f'<text x="{left + width / 2}" y="{bottom + 38}" text-anchor="middle">Score</text>'
    title = f"Histogram of the scores of true and false {analysis.kind} detections"
    return _svg(460, bottom + 46, title, [*parts, label])


def found_histogram(
    title: str, unit: str, values: np.ndarray, found: np.ndarray, limits: tuple[int, int]
) -> str:
    """Draw how many objects of each value there are, those that were found below the others.

    Bins are half powers of two from 2^limits[0] to 2^limits[1]; values beyond are in the outer
    bins. values: [n] float; found: [n] bool; unit: of the values, for the labels.
    """
    low, high = limits
    bins = 2 * (high - low)
    powers = np.log2(np.clip(values, 2.0**low, 2.0**high))
    places = np.minimum(2 * (powers - low), bins - 1).astype(int)
    counts = np.stack([np.bincount(places[part], minlength=bins) for part in (found, ~found)])
    top = max(1.0, _round_up(float(counts.sum(axis=0).max())))
    area = PlotArea(46, 12, 400, 150, (low, high), (0, top))
    ticks = [(power, f"{2.0**power:g}") for power in range(low, high + 1)]
    parts = [_axes(area, ticks, [(y, _short(y)) for y in (0, top / 2, top)], unit, "")]
    width = area.width / bins
    for i in np.flatnonzero(counts.sum(axis=0)):
        edges = " to ".join(f"{2.0 ** (low + edge / 2):.3g}" for edge in (i, i + 1))
        told = f"<title>{edges}: {counts[0, i]} found, {counts[1, i]} missed</title>"
        base = 0
        for name, number in zip(("true", "false"), counts[:, i], strict=True):
            (x, y), (_, bottom) = (area.to_viewbox(low + i / 2, base + n) for n in (number, 0))
            parts.append(
                f'<rect class="{name}" x="{x + 0.5:.1f}" y="{y:.1f}" width="{width - 1:.1f}" '
                f'height="{bottom - y:.1f}">{told}</rect>'
            )
            base += number
    return _svg(460, 204, title, parts)


def bar_chart(
    title: str,
    counts: np.ndarray,
    edges: Sequence[float],
    ticks: Sequence[tuple[float, str]],
    x_name: str,
    labels: Sequence[str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw a histogram.

    Args:
        title: for those who cannot see the chart.
        counts: [n] int.
        edges: n + 1 rising positions of the bars' sides.
        ticks: (position, text) below the axis.
        x_name: what the axis shows.
        labels: n texts that name the bars.
        marks: (position, text) of dashed lines.
    """
    top = _round_up(max(int(np.max(counts, initial=0)), 1))
    area = PlotArea(44, 24, 400, 190, (edges[0], edges[-1]), (0, top))
    values = (0, top / 2, top) if top >= 2 else (0, top)
    parts = [_axes(area, ticks, [(value, _short(value)) for value in values], x_name, "")]
    bottom = area.top + area.height
    for i in np.flatnonzero(counts).tolist():
        left, y = area.to_viewbox(edges[i], counts[i])
        width = area.to_viewbox(edges[i + 1], 0)[0] - left
        gap, height = min(1.0, width / 5), max(bottom - y, 0.75)
        parts.append(
            f'<rect class="true" x="{left:.1f}" y="{bottom - height:.1f}" '
            f'width="{width - gap:.1f}" height="{height:.1f}">'
            f"<title>{escape(labels[i])}: {counts[i]:,}</title></rect>"
        )
    for value, text in marks:
        x, _ = area.to_viewbox(value, 0)
        parts.append(f'<path class="mark" d="M{x:.1f} {area.top - 6}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{area.top - 10}" text-anchor="middle">{text}</text>')
    return _svg(460, bottom + 46, title, parts)


def heat_map(
    title: str, counts: np.ndarray, edges: Sequence[float], x_name: str, y_name: str
) -> str:
    """Draw a square 2-D histogram; color strength is the logarithm of the count.

    Args:
        title: for those who cannot see the chart.
        counts: [rows, columns] int, the lowest row first.
        edges: rising positions of the cells' sides along both axes.
        x_name: what columns are.
        y_name: what rows are.
    """
    area = PlotArea(60, 12, 300, 300, (edges[0], edges[-1]), (edges[0], edges[-1]))
    ticks = [(value, _short(value)) for value in np.linspace(edges[0], edges[-1], 5)]
    parts = [_axes(area, ticks, ticks, x_name, y_name)]
    side, most = area.width / (len(edges) - 1), np.log1p(max(int(np.max(counts, initial=0)), 1))
    for row, column in np.argwhere(counts):
        x, y = area.to_viewbox(edges[column], edges[row + 1])
        strength = 0.25 + 0.75 * np.log1p(counts[row, column]) / most
        low, high = ((edges[i], edges[i + 1]) for i in (column, row))
        label = f"{low[0]:.0f} to {low[1]:.0f} by {high[0]:.0f} to {high[1]:.0f}"
        parts.append(
            f'<rect class="true" x="{x:.1f}" y="{y:.1f}" width="{side - 0.5:.1f}" '
            f'height="{side - 0.5:.1f}" fill-opacity="{strength:.2f}">'
            f"<title>{label}: {counts[row, column]:,}</title></rect>"
        )
    return _svg(460, 360, title, parts)


def training_curve(
    title: str,
    series: Sequence[tuple[str, str, list[tuple[float, float]]]],
    steps: tuple[float, float],
) -> str:
    """Draw lines over the training steps, from the first to the last of `steps`.

    `series` has (name, CSS class, [(step, value)]) per line; values are finite, no list is empty.
    """
    lines = [(css_class, _downsample(line)) for _, css_class, line in series]
    values = [value for _, line in lines for _, value in line]
    low, high = min(0.0, *values), _round_up(max(0.0, *values))
    span = (low, high if high > low else low + 1)
    first, last = steps
    area = PlotArea(46, 30, 260, 110, (first, last if last > first else first + 1), span)
    y_ticks = [(value, _short(value)) for value in np.linspace(*span, 3)]
    x_ticks = [(value, _short(value)) for value in np.linspace(*area.x, 3)]
    parts = [_axes(area, x_ticks, y_ticks, "", "")]
    parts.append(f'<text class="key" x="0" y="12">{escape(title)}</text>')
    for css_class, line in lines:
        x, y = zip(*line, strict=True)
        if len(line) == 1:
            cx, cy = area.to_viewbox(x[0], y[0])
            parts.append(f'<circle class="{css_class}" cx="{cx:.1f}" cy="{cy:.1f}" r="3"/>')
        else:
            parts.append(_polyline(area, x, y, f'class="{css_class}"'))
    names = " and ".join(name for name, _, _ in series)
    return _svg(320, 166, f"{title}, {names}, over the steps of the run", parts)


def _round_up(high: float) -> float:
    """Round up to a number whose half is round too."""
    if high <= 0:
        return high
    unit = 10.0 ** math.floor(math.log10(high))
    # The tolerance keeps float32 noise from doubling an axis.
    return next(unit * times for times in (1, 2, 4, 6, 8, 10, 20) if unit * times > 0.999 * high)


def _downsample(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average a long line over MAX_POINTS segments."""
    if len(line) <= MAX_POINTS:
        return line
    return [tuple(part.mean(axis=0)) for part in np.array_split(np.array(line), MAX_POINTS)]


def _axes(area: PlotArea, x_ticks, y_ticks, x_name: str, y_name: str) -> str:
    """Draw grid lines, tick labels and axis names."""
    parts = []
    bottom = area.top + area.height
    for value, text in y_ticks:
        _, y = area.to_viewbox(area.x[0], value)
        parts.append(f'<path class="grid" d="M{area.left} {y:.1f}h{area.width}"/>')
        parts.append(f'<text x="{area.left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in x_ticks:
        x, _ = area.to_viewbox(value, area.y[0])
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
    middle = area.left + area.width / 2
    parts.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{x_name}</text>')
    middle = area.top + area.height / 2
    rotation = f'transform="rotate(-90 12 {middle})"'
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" {rotation}>{y_name}</text>')
    return "".join(parts)


def _polyline(area: PlotArea, x: Iterable[float], y: Iterable[float], style: str) -> str:
    points = (area.to_viewbox(*pair) for pair in zip(x, y, strict=True))
    text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline {style} points="{text}"/>'


def _short(value: float) -> str:
    """Format a number briefly: 0.25, 1.5, 300, 90k, 1e-05."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    if abs(value) >= 10_000 and math.isfinite(value):
        return f"{value / 1000:.4g}k"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
