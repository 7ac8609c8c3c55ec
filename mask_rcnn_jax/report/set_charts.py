"""Charts of a dataset: image sizes, objects per image, sides and shapes of objects."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from mask_rcnn_jax.report.charts import bar_chart, heat_map

SIZE_CELLS = 24  # along each side of the map of image sizes
COUNT_BARS = 40
PER_OCTAVE = 4  # bars from a side to its double
WIDEST = 8  # ratio at the ends of the charts of shapes
# Objects per image beyond this multiple of the 99th percentile share the last bar.
TAIL = 1.5


def size_map(sizes: np.ndarray) -> str:
    """Draw image sizes [I, 2] (height, width)."""
    unit = 10 ** max(math.floor(math.log10(sizes.max())) - 1, 0) * 4
    edges = np.linspace(0, -(-int(sizes.max()) // unit) * unit, SIZE_CELLS + 1)
    counts, _, _ = np.histogram2d(sizes[:, 0], sizes[:, 1], (edges, edges))
    return heat_map("Image sizes", counts.astype(int), edges.tolist(), "Width", "Height")


def count_chart(counts: np.ndarray) -> str:
    """Draw the number of objects per image, given for each image [I]."""
    most = int(counts.max(initial=0))
    last = min(most, max(COUNT_BARS - 1, math.ceil(TAIL * np.quantile(counts, 0.99))))
    step = -(-(last + 1) // COUNT_BARS)
    starts = np.arange(0, last + 1, step)
    found = np.bincount(np.minimum(counts, last) // step, minlength=len(starts))
    ends = [*(starts[1:] - 1).tolist(), most]
    pairs = zip(starts.tolist(), ends, strict=True)
    labels = [
        f"{low} objects" if low == high else f"{low} to {high} objects" for low, high in pairs
    ]
    every = max(len(starts) // 6, 1)
    ticks = [(i + 0.5, str(starts[i])) for i in range(0, len(starts), every)]
    edges = list(range(len(starts) + 1))
    return bar_chart("Objects per image", found, edges, ticks, "Objects per image", labels)


def side_chart(sides: np.ndarray, name: str, marks: Iterable[float]) -> str:
    """Draw sides [N] in pixels on a logarithmic axis, with marks at some."""
    logs, marks = np.log2(np.maximum(sides, 1)), list(marks)
    low, high = math.floor(logs.min()), math.ceil(logs.max() + 1e-9)
    high = max(high, low + 1)
    edges = np.linspace(low, high, (high - low) * PER_OCTAVE + 1)
    found, _ = np.histogram(logs, edges)
    ticks = [(power, str(2**power)) for power in range(low, high + 1)]
    shown = [(math.log2(m), f"{m:g}") for m in marks if low <= math.log2(m) <= high]
    return bar_chart(
        name, found, edges.tolist(), ticks, name, _spans((2**edges).tolist(), "px"), shown
    )


def ratio_chart(ratios: np.ndarray, name: str, marks: Iterable[float] = ()) -> str:
    """Draw ratios [N] on a logarithmic axis, with marks at some of them."""
    reach = math.log2(WIDEST)
    logs = np.clip(np.log2(ratios), -reach, reach)
    edges = np.linspace(-reach, reach, 2 * int(reach) * PER_OCTAVE + 1)
    found, _ = np.histogram(logs, edges)
    powers = range(-int(reach), int(reach) + 1)
    ticks = [(p, f"{2**p}:1" if p >= 0 else f"1:{2**-p}") for p in powers]
    shown = [(math.log2(m), f"{m:.2g}") for m in marks if -reach <= math.log2(m) <= reach]
    return bar_chart(
        name, found, edges.tolist(), ticks, name, _spans((2**edges).tolist(), ""), shown
    )


def _spans(edges: Sequence[float], unit: str) -> list[str]:
    pairs = zip(edges[:-1], edges[1:], strict=True)
    return [f"{low:.3g} to {high:.3g} {unit}".strip() for low, high in pairs]
