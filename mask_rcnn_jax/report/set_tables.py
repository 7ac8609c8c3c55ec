"""Tables of a dataset: classes, classes that occur together, how anchors fit."""

from collections.abc import Sequence
from html import escape

import numpy as np

from mask_rcnn_jax.report.anchor_fit import Fit
from mask_rcnn_jax.report.set_objects import SetObjects, shared_images
from mask_rcnn_jax.report.tables import bar, table

MAX_TOGETHER = 16  # classes, those in the most images


def classes_table(names: Sequence[str], objects: SetObjects) -> str:
    """Tabulate all classes, sortable, the most frequent first."""
    rows, slots = [], len(names) + 1
    count = np.bincount(objects.classes, minlength=slots)
    images = np.bincount(objects.pairs()[:, 1], minlength=slots)
    crowds = np.bincount(objects.crowds[:, 1], minlength=slots)
    medians = _medians(objects, slots)
    for k in 1 + np.argsort(-count[1:], kind="stable"):
        share = bar(count[k] / max(len(objects.classes), 1))
        numbers = "".join(f'<td data-v="{n}">{n:,}</td>' for n in (images[k], crowds[k]))
        side = "-" if np.isnan(medians[k]) else f"{medians[k]:.0f}"
        value = "" if np.isnan(medians[k]) else f"{medians[k]:.2f}"
        rows.append(
            f'<tr><th scope="row">{escape(names[k - 1])}</th><td data-v="{count[k]}">'
            f'{count[k]:,}</td>{share}{numbers}<td data-v="{value}">{side}</td></tr>'
        )
    heads = ["Objects", "Share", "Images", "Crowds", "Median side"]
    caption = "Objects per class, and images that have any; click a column to sort"
    return table(caption, "Class", heads, rows, sorted_by=1)


def _medians(objects: SetObjects, slots: int) -> np.ndarray:
    """[slots] float64, the median side of each class; NaN without objects."""
    order = np.lexsort((objects.sides, objects.classes))
    sides, ends = objects.sides[order], np.cumsum(np.bincount(objects.classes, minlength=slots))
    medians = np.full(slots, np.nan)
    for k in np.unique(objects.classes):
        medians[k] = np.median(sides[ends[k - 1] : ends[k]])
    return medians


def together_table(names: Sequence[str], objects: SetObjects) -> str:
    """Tabulate the classes in the most images, and in how many they meet; empty for one class."""
    pairs = objects.pairs()
    images = np.bincount(pairs[:, 1], minlength=len(names) + 1)
    classes = np.argsort(-images, kind="stable")[:MAX_TOGETHER]
    classes = classes[images[classes] > 0]
    if len(classes) < 2:
        return ""
    shared, rows = shared_images(pairs, classes), []
    columns = "".join(f'<th scope="col">{escape(names[k - 1])}</th>' for k in classes)
    for i, k in enumerate(classes):
        cells = "".join(
            _shared_cell(names[k - 1], names[other - 1], int(count), int(shared[i, i]))
            for other, count in zip(classes, shared[i], strict=True)
        )
        rows.append(f'<tr><th scope="row">{escape(names[k - 1])}</th>{cells}</tr>')
    note = f", for the {len(classes)} in the most images" if len(classes) == MAX_TOGETHER else ""
    return (
        "<h3>Together in an image</h3>"
        '<div class="scroll free" tabindex="0" role="group" aria-label="Classes together">'
        f'<table class="confusion"><caption>Images that have both classes{note}; color '
        f"strength is the share of the row’s images</caption><thead><tr><td></td>{columns}</tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _shared_cell(one: str, other: str, count: int, total: int) -> str:
    if not count:
        return "<td></td>"
    level = int(np.ceil(9 * count / total))
    title = f"{one} with {other}" if one != other else one
    return f'<td class="c{level}" title="{escape(title)}: {count}">{count}</td>'


def fits_table(fits: Sequence[tuple[str, Fit]]) -> str:
    """Tabulate how many boxes have an anchor with enough overlap."""
    rows = [
        f'<tr><th scope="row">{escape(name)}</th>'
        f"{''.join(bar(-1 if np.isnan(value) else value) for value in fit)}</tr>"
        for name, fit in fits
    ]
    heads = ["IoU 0.5 or more", "0.7 or more", "Mean best IoU"]
    return table("Share of boxes with an anchor of this IoU", "Anchors", heads, rows)
