"""The tables of a report: summary, sizes, categories, confusion."""

from collections.abc import Sequence
from html import escape

import numpy as np

from mask_rcnn_jax.evaluation.coco import METRIC_NAMES
from mask_rcnn_jax.report.analysis import Findings

# More categories than this and the cells of the confusion matrix are too small for numbers.
MAX_NUMBERED = 16
# More than this, and those with the fewest mistakes share one row and one column.
MAX_CONFUSED = 100
# Confusions of two categories that are listed.
MAX_LISTED = 10
# A size's label, and the names of its AP and of its average recall.
_SIZES = (
    ("All", "AP", "ARmax100"),
    ("Small (<\u00a032²)", "APs", "ARs"),
    ("Medium", "APm", "ARm"),
    ("Large (>\u00a096²)", "APl", "ARl"),
)


def tiles(findings: Sequence[Findings]) -> str:
    """AP, AP50 and AP75 of each type, large."""
    parts = []
    for one in findings:
        numbers = "".join(
            f"<div><span>{name}</span><b>{_number(_stat(one, name))}</b></div>"
            for name in ("AP", "AP50", "AP75")
        )
        parts.append(f'<div class="tile"><h3>{_title(one)}</h3>{numbers}</div>')
    return f'<div class="tiles">{"".join(parts)}</div>'


def sizes_table(findings: Sequence[Findings]) -> str:
    """AP and recall of small, medium and large objects."""
    heads = ["Objects", *(f"{_title(one)} {name}" for one in findings for name in ("AP", "recall"))]
    rows = []
    for area, (label, ap, recall) in enumerate(_SIZES):
        count = int(findings[-1].objects[:, area].sum())
        cells = "".join(_bar(_stat(one, name)) for one in findings for name in (ap, recall))
        rows.append(f'<tr><th scope="row">{label}</th><td>{count:,}</td>{cells}</tr>')
    return _table("AP and average recall by the area of objects in pixels", "Size", heads, rows)


def categories_table(findings: Sequence[Findings]) -> str:
    """AP of each category, best first, to be sorted by a click on a column."""
    main = findings[-1]
    heads = ["Objects", *(f"{_title(one)} {name}" for one in findings for name in ("AP", "AP50"))]
    rows = []
    for k in np.argsort(-main.category_ap[:, 0], kind="stable"):
        count = int(main.objects[k, 0])
        cells = "".join(_bar(one.category_ap[k, column]) for one in findings for column in (0, 1))
        rows.append(
            f'<tr><th scope="row">{escape(main.categories[k])}</th>'
            f'<td data-v="{count}">{count:,}</td>{cells}</tr>'
        )
    caption = "AP of each category; a click on a column sorts"
    return _table(caption, "Category", heads, rows, sorted_by=len(heads) - 1)


def confusion_table(main: Findings) -> str:
    """The confusion matrix, small cells without numbers where there are many categories."""
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
            what = f"{name} found as {names[j]}" if j < len(names) else f"{name} missed"
            kind = "c" if correct[i, j] else "w"
            cells.append(f'<td class="{kind}{level}" title="{escape(what)}: {count}">{count}</td>')
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    dense = " dense" if len(names) > MAX_NUMBERED else ""
    left_out = len(main.categories) - len(names) + 1 if len(main.categories) > len(names) else 0
    note = f"; {left_out} categories with fewer mistakes together as “others”" if left_out else ""
    return (
        '<div class="scroll free" tabindex="0" role="group" aria-label="Confusion matrix">'
        f'<table class="confusion{dense}"><caption>Numbers of objects and false detections{note}'
        f"</caption><thead><tr><td></td>{columns}</tr></thead><tbody>{''.join(rows)}</tbody>"
        "</table></div>"
    )


def confusion_list(main: Findings) -> str:
    """The pairs of categories that are taken for another most often, empty if there are none."""
    matrix = main.confusion[:-1, :-1].copy()
    np.fill_diagonal(matrix, 0)
    share = matrix / np.maximum(main.confusion[:-1].sum(axis=1), 1)[:, None]
    order = np.lexsort((-share.ravel(), -matrix.ravel()))[:MAX_LISTED]
    pairs = [np.unravel_index(place, matrix.shape) for place in order]
    rows = [
        f'<tr><th scope="row">{escape(main.categories[i])}</th>'
        f"<td>{escape(main.categories[j])}</td><td>{matrix[i, j]:,}</td>"
        f"{_bar(share[i, j])}</tr>"
        for i, j in pairs
        if matrix[i, j]
    ]
    if not rows:
        return ""
    heads = ["Found as", "Times", "Share"]
    return _table("Categories most often taken for another", "Object", heads, rows)


def _largest_confusion(main: Findings) -> tuple[list[str], np.ndarray]:
    """Names and matrix of at most MAX_CONFUSED categories; the last are the others together."""
    names, matrix = main.categories, main.confusion
    if len(names) <= MAX_CONFUSED:
        return names, matrix
    mistakes = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * np.diag(matrix)
    kept = np.sort(np.argsort(-mistakes[:-1], kind="stable")[: MAX_CONFUSED - 1])
    place = np.full(len(matrix), len(kept))
    place[kept] = np.arange(len(kept))
    place[-1] = len(kept) + 1
    small = np.zeros((len(kept) + 2, len(kept) + 2), matrix.dtype)
    np.add.at(small, (place[:, None], place[None, :]), matrix)
    return [*(names[k] for k in kept), "others"], small


def _table(
    caption: str,
    first: str,
    heads: Sequence[str],
    rows: Sequence[str],
    sorted_by: int | None = None,
) -> str:
    """sorted_by: the column that the rows fall by, of a table that a click sorts anew."""
    sortable = sorted_by is not None

    def head(column: int, text: str) -> str:
        text = f"<button>{escape(text)}</button>" if sortable else escape(text)
        order = ' aria-sort="descending"' if column == sorted_by else ""
        return f'<th scope="col"{order}>{text}</th>'

    columns = "".join(head(column, text) for column, text in enumerate([first, *heads]))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}">'
        f'<table class="plain{" sortable" if sortable else ""}"><caption>{caption}</caption>'
        f"<thead><tr>{columns}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _bar(value: float) -> str:
    """A cell with a number of 0..1 and a bar of that length behind it; -1 is no number."""
    if value < 0:
        return '<td data-v="">-</td>'
    return f'<td class="bar" data-v="{value:.4f}" style="--w:{value:.2f}">{value:.3f}</td>'


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0 else "-"


def _stat(findings: Findings, name: str) -> float:
    return float(findings.stats[METRIC_NAMES.index(name)])


def _title(findings: Findings) -> str:
    return findings.kind.capitalize()
