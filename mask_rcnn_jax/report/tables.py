"""Tables of the report: summary, object sizes, categories, confusion, cells."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from mask_rcnn_jax.evaluation.notes import COCO_DETECTIONS
from mask_rcnn_jax.report.analysis import Analysis

# With more categories, the confusion matrix has small cells without numbers.
MAX_NUMBERED = 16
# With more categories, those with the fewest errors share one row and column.
MAX_CONFUSED = 100
# Maximum length of the list of confused category pairs.
MAX_LISTED = 10
# Label, and the names of the AP and the average recall per object size.
_SIZES = (
    ("All", "AP", "AR"),
    ("Small (<\u00a032²)", "APs", "ARs"),
    ("Medium", "APm", "ARm"),
    ("Large (>\u00a096²)", "APl", "ARl"),
)
# Head, and the name of a measure in "cells".
_CELLS = {
    "Precision": "precision",
    "Recall": "recall",
    "F1": "f1",
    "AP": "AP",
    "AP by image": "AP_by_image",
    "Matched IoU": "mean_matched_score",
    "PQ": "panoptic_quality",
}


def tiles(analyses: Sequence[Analysis]) -> str:
    """AP, AP50 and AP75 of each result type in large type; with the number of detections, "AP@K",
    if more are scored than COCO's."""
    parts = []
    for analysis in analyses:
        at = f"@{analysis.detections}" if analysis.detections > COCO_DETECTIONS else ""
        numbers = "".join(
            f"<div><span>{name}{at}</span><b>{_number(analysis.stats[name])}</b></div>"
            for name in ("AP", "AP50", "AP75")
        )
        parts.append(f'<div class="tile"><h3>{_title(analysis)}</h3>{numbers}</div>')
    return f'<div class="tiles">{"".join(parts)}</div>'


def sizes_table(analyses: Sequence[Analysis]) -> str:
    """AP and recall for small, medium and large objects."""
    heads = _heads(analyses, ("AP", "recall"))
    rows = []
    for area, (label, *names) in enumerate(_SIZES):
        count = int(analyses[-1].objects[:, area].sum())
        cells = "".join(bar(analysis.stats[name]) for analysis in analyses for name in names)
        rows.append(f'<tr><th scope="row">{label}</th><td>{count:,}</td>{cells}</tr>')
    return table("AP and average recall by object area in pixels", "Size", heads, rows)


def categories_table(analyses: Sequence[Analysis]) -> str:
    """Sortable table of the AP per category, best first."""
    main = analyses[-1]
    heads = _heads(analyses, ("AP", "AP50"))
    rows = []
    for k in np.argsort(-main.category_ap[:, 0], kind="stable"):
        count = int(main.objects[k, 0])
        cells = "".join(bar(ap) for analysis in analyses for ap in analysis.category_ap[k, :2])
        rows.append(
            f'<tr><th scope="row">{escape(main.categories[k])}</th>'
            f'<td data-v="{count}">{count:,}</td>{cells}</tr>'
        )
    caption = "AP per category; click a column to sort"
    return table(caption, "Category", heads, rows, sorted_by=len(heads) - 1)


def counts_table(main: Analysis, position: int) -> str:
    """Sortable table of the counts per category at a position of the slider.

    Rows hold the counts at all positions, for the page's script.
    """
    objects, found, false = main.counts
    rows = [
        _counts_row(main.categories[k], objects[k], found[k], false[k], position)
        for k in np.argsort(-objects, kind="stable")
    ]
    total = _counts_row("All", objects.sum(), found.sum(axis=0), false.sum(axis=0), position)
    heads = ["Objects", "Found", "Missed", "False", "Precision", "Recall", "F1"]
    counts = table(f"{_title(main)} detections by category", "Category", heads, rows, sorted_by=1)
    counts = counts.replace('class="plain', 'class="counts plain', 1)
    return counts.replace("</tbody>", f"</tbody><tfoot>{total}</tfoot>", 1)


def _counts_row(
    name: str, objects: int, found: np.ndarray, false: np.ndarray, position: int
) -> str:
    right, wrong = int(found[position:].sum()), int(false[position:].sum())
    counts = [int(objects), right, int(objects) - right, wrong]
    shares = [(right, right + wrong), (right, objects), (2 * right, right + wrong + objects)]
    cells = "".join(f'<td data-v="{count}">{count:,}</td>' for count in counts)
    cells += "".join(bar(part / whole if whole else -1) for part, whole in shares)
    return (
        f'<tr data-found="{_joined(found)}" data-false="{_joined(false)}">'
        f'<th scope="row">{escape(name)}</th>{cells}</tr>'
    )


def _joined(counts: np.ndarray) -> str:
    """Join counts with commas; a zero is nothing."""
    return ",".join(str(count) if count else "" for count in counts)


def confusion_table(main: Analysis) -> str:
    """Confusion matrix, with small cells without numbers if there are many categories."""
    names, matrix = _largest_confusion(main)
    correct = np.eye(len(matrix), dtype=bool)
    totals = np.maximum(matrix.sum(axis=1), 1)
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in [*names, "missed"])
    rows = []
    for i, row in enumerate(matrix):
        name = names[i] if i < len(names) else "nothing there"
        cells = []
        for j, count in enumerate(row):
            if not count:
                cells.append("<td></td>")
                continue
            level = int(np.ceil(9 * count / totals[i]))
            title = f"{name} found as {names[j]}" if j < len(names) else f"{name} missed"
            kind = "c" if correct[i, j] else "w"
            cells.append(f'<td class="{kind}{level}" title="{escape(title)}: {count}">{count}</td>')
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    dense = " dense" if len(names) > MAX_NUMBERED else ""
    merged = len(main.categories) - len(names) + 1
    note = f"; {merged} categories with fewer errors are merged into “others”" if merged > 1 else ""
    return (
        '<div class="scroll free" tabindex="0" role="group" aria-label="Confusion matrix">'
        f'<table class="confusion{dense}"><caption>Counts of objects and false positives{note}'
        f"</caption><thead><tr><td></td>{columns}</tr></thead><tbody>{''.join(rows)}</tbody>"
        "</table></div>"
    )


def confusion_list(main: Analysis) -> str:
    """Table of the most frequently confused category pairs; empty if there are none."""
    matrix = main.confusion[:-1, :-1].copy()
    np.fill_diagonal(matrix, 0)
    share = matrix / np.maximum(main.confusion[:-1].sum(axis=1), 1)[:, None]
    order = np.lexsort((-share.ravel(), -matrix.ravel()))[:MAX_LISTED]
    pairs = [np.unravel_index(index, matrix.shape) for index in order]
    rows = [
        f'<tr><th scope="row">{escape(main.categories[i])}</th>'
        f"<td>{escape(main.categories[j])}</td><td>{matrix[i, j]:,}</td>"
        f"{bar(share[i, j])}</tr>"
        for i, j in pairs
        if matrix[i, j]
    ]
    if not rows:
        return ""
    return table("Most confused categories", "Object", ["Found as", "Times", "Share"], rows)


def cells_table(cells: Mapping[str, Any]) -> str:
    """Measures of `evaluation.cells` at each IoU threshold, and their means."""
    rows = [
        [f"{threshold:.2f}", *(cells[name][t] for name in _CELLS.values())]
        for t, threshold in enumerate(cells["thresholds"])
    ]
    rows.append(["Mean", *(cells["mean"][name] for name in _CELLS.values())])
    lines = [
        f'<tr><th scope="row">{label}</th>{"".join(map(bar, values))}</tr>'
        for label, *values in rows
    ]
    return table("Measures by IoU threshold", "IoU", list(_CELLS), lines)


def cells_categories_table(cells: Mapping[str, Any]) -> str:
    """Sortable table of the measures of each category at IoU 0.50, best first; empty for one."""
    own = sorted(cells["per_category"].items(), key=lambda pair: -pair[1]["f1"][0])
    rows = [
        f'<tr><th scope="row">{escape(category)}</th>'
        f"{''.join(bar(measures[name][0]) for name in _CELLS.values())}</tr>"
        for category, measures in own
    ]
    heads = list(_CELLS)
    caption = "Measures at IoU 0.50 per category; click a column to sort"
    by = 1 + heads.index("F1")
    return table(caption, "Category", heads, rows, sorted_by=by) if len(rows) > 1 else ""


def _largest_confusion(main: Analysis) -> tuple[list[str], np.ndarray]:
    """Names and matrix of at most MAX_CONFUSED categories, the rest merged into the last."""
    names, matrix = main.categories, main.confusion
    if len(names) <= MAX_CONFUSED:
        return names, matrix
    errors = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * np.diag(matrix)
    kept = np.sort(np.argsort(-errors[:-1], kind="stable")[: MAX_CONFUSED - 1])
    target = np.full(len(matrix), len(kept))
    target[kept] = np.arange(len(kept))
    target[-1] = len(kept) + 1
    small = np.zeros((len(kept) + 2, len(kept) + 2), matrix.dtype)
    np.add.at(small, (target[:, None], target[None, :]), matrix)
    return [*(names[k] for k in kept), "others"], small


def _heads(analyses: Sequence[Analysis], names: Sequence[str]) -> list[str]:
    return ["Objects", *(f"{_title(analysis)} {name}" for analysis in analyses for name in names)]


def table(
    caption: str, first: str, heads: list[str], rows: list[str], sorted_by: int | None = None
) -> str:
    """Return a table that scrolls on its own.

    Args:
        caption: plain text.
        first: head of the first column.
        heads: of the other columns.
        rows: HTML.
        sorted_by: index of the initially sorted (descending) column; None if not sortable.
    """
    sortable = sorted_by is not None

    def head(column: int, text: str) -> str:
        text = f"<button>{escape(text)}</button>" if sortable else escape(text)
        order = ' aria-sort="descending"' if column == sorted_by else ""
        return f'<th scope="col"{order}>{text}</th>'

    columns = "".join(head(column, text) for column, text in enumerate([first, *heads]))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}">'
        f'<table class="plain{" sortable" if sortable else ""}"><caption>{caption}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def bar(value: float) -> str:
    """Return a table cell with a value in 0..1 and a bar as long; a dash for -1."""
    if value < 0:
        return '<td data-v="">-</td>'
    return f'<td class="bar" data-v="{value:.4f}" style="--w:{value:.2f}">{value:.3f}</td>'


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0 else "-"


def _title(analysis: Analysis) -> str:
    return analysis.kind.capitalize()
