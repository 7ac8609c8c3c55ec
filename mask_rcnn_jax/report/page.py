"""Self-contained HTML report of an evaluation: numbers, curves, tables, images.

The page loads nothing: its stylesheet, its one script (which sorts tables, follows the score
threshold and orders images), its charts and its images are inline, and its content security policy
forbids everything else. Every name from the data is escaped. The number and size of images and
tables are bounded, and so is the page.
"""

import base64
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.evaluation.cells import INDICES
from mask_rcnn_jax.report import tables
from mask_rcnn_jax.report.analysis import Analysis
from mask_rcnn_jax.report.charts import found_histogram, pr_curves, score_histogram
from mask_rcnn_jax.report.error_images import draw_error
from mask_rcnn_jax.report.errors import DetectionError
from mask_rcnn_jax.report.explore import images_section, threshold_section
from mask_rcnn_jax.report.training_section import training_section

STYLE, SCRIPT = (
    "".join(
        Path(__file__).with_name(f"{name}.{kind}").read_text(encoding="utf-8")
        for name in ("page", "explore")
    )
    for kind in ("css", "js")
)
_MISSES = (
    "Objects without a detection of their category that reaches the score threshold. The cost of a "
    "miss is 1 minus the score of its matched detection, or 1 without a match; on a tie, larger "
    "objects come first."
)
_FOOTER = (
    "Scores are computed by pycocotools. A detection is true if it matches an object of "
    "its category at IoU 0.50, unless another IoU is given; at most {} detections per category "
    "and image count."
)
_FALSE_POSITIVES = (
    "Detections that reach the score threshold and match no object of their category. The cost of "
    "a false positive is its score."
)


def write_report(
    path: str | os.PathLike,
    title: str,
    about: Mapping[str, str],
    analyses: Sequence[Analysis],
    read_image: Callable[[dict], np.ndarray | None],
    records: Sequence[dict],
    cells: Mapping[str, Any] | None = None,
) -> None:
    """Write the report.

    Args:
        path: the HTML file.
        title: page title; names the evaluated model or results.
        about: further facts by name, shown below the title.
        analyses: one per result type; the last is that of confusion, threshold and images. Without
            one, the page has the training alone.
        read_image: returns uint8 [H, W, 3] RGB for an image entry of the json, or None if it is
            unavailable, which the page then states in its place.
        records: records of the run's metrics.jsonl; may be empty.
        cells: what `evaluation.cells.evaluate` returned.
    """
    facts = dict(about)
    sections = {"Training": training_section(records)}
    if analyses:
        main = analyses[-1]
        counts = {"Images": main.num_images, "Objects": main.num_objects}
        counts["Categories"] = len(main.categories)
        facts |= {name: f"{count:,}" for name, count in counts.items()}
        sections = {
            "Curves": _curves(analyses),
            "Categories": _categories(analyses),
            "Cells": _cells(cells) if cells else "",
            "Threshold": threshold_section(main),
            "Images": images_section(main, read_image),
            "Scores": _scores(analyses),
            "Confusion": _confusion(main),
            "Objects": _objects(main),
            "Misses": _gallery(main, "Misses", _MISSES, read_image),
            "False positives": _gallery(main, "False positives", _FALSE_POSITIVES, read_image),
            **sections,
        }
    summary, footer = "", ""
    if analyses:
        summary, footer = tables.tiles(analyses), _FOOTER.format(analyses[-1].detections)
    write_page(path, title, facts, summary, sections, footer)


def write_page(
    path: str | os.PathLike,
    title: str,
    facts: Mapping[str, str],
    summary: str,
    sections: Mapping[str, str],
    footer: str,
) -> None:
    """Write a page of sections.

    Args:
        path: the HTML file.
        title: plain text.
        facts: plain text by name, shown below the title.
        summary: HTML above the links to the sections; may be empty.
        sections: HTML by name; empty ones are left out.
        footer: HTML; may be empty.
    """
    sections = {name: content for name, content in sections.items() if content}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    pairs = [(escape(name), escape(value)) for name, value in facts.items()]
    entries = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    parts = [(_anchor(name), content) for name, content in sections.items()]
    body = "".join(f'<section id="{anchor}">{content}</section>' for anchor, content in parts)
    summary = f'<section aria-label="Summary">{summary}</section>\n' if summary else ""
    footer = f"<footer>{footer}</footer>\n" if footer else ""
    page = (
        f"<!doctype html>\n{_head(title)}\n<body>\n<header><h1>{escape(title)}</h1>"
        f"<dl>{entries}</dl></header>\n<main>\n"
        f"{summary}<nav>{links}</nav>\n{body}\n</main>\n{footer}"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
    # A json may contain lone surrogates, which UTF-8 cannot encode.
    write_whole(path, page.encode(errors="replace"))


def _head(title: str) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    allowed = "img-src data:; style-src 'unsafe-inline'; script-src"
    policy = f"default-src 'none'; {allowed} 'sha256-{digest}'"
    return (
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>"
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _curves(analyses: Sequence[Analysis]) -> str:
    charts = "".join(
        f"<div><h3>{_heading(analysis)}</h3>{pr_curves(analysis)}</div>"
        for analysis in analyses
        if analysis.precision is not None
    )
    charts = f'<div class="charts">{charts}</div>' if charts else note("There are no objects.")
    return (
        "<h2>Precision and recall</h2>"
        '<p class="soft">One line per IoU threshold for a match, averaged over categories.</p>'
        f"{charts}"
    )


def _categories(analyses: Sequence[Analysis]) -> str:
    sizes, categories = tables.sizes_table(analyses), tables.categories_table(analyses)
    return f"<h2>Sizes and categories</h2>{sizes}<p></p>{categories}"


def _cells(cells: Mapping[str, Any]) -> str:
    indices = [f"{cells[name]:.3f} ({who})" for name, who in INDICES.items() if name in cells]
    aji = f"<p>Aggregated Jaccard index: {', '.join(indices)}.</p>" if indices else ""
    return (
        "<h2>Microscopy's measures</h2>"
        f'<p class="soft">Objects and {cells["geometry"]} detections with a score of '
        f"{cells['score_threshold']:.2f} or more, paired one to one by IoU.</p>"
        f"{tables.cells_table(cells)}{aji}{tables.cells_categories_table(cells)}"
    )


def _objects(main: Analysis) -> str:
    sides, aspects, found = main.shapes
    if not len(sides):
        return ""
    size = found_histogram(
        "Objects by size", "Square root of the area in pixels", sides, found, (1, 10)
    )
    aspect = found_histogram("Objects by aspect ratio", "Width by height", aspects, found, (-3, 3))
    return (
        "<h2>Objects by size and aspect ratio</h2>"
        '<p class="soft"><span class="swatch true"></span>Found with a score of '
        f'{main.threshold:.2f} or more, <span class="swatch false"></span>missed.</p>'
        f'<div class="charts"><div><h3>Size</h3>{size}</div>'
        f"<div><h3>Aspect ratio</h3>{aspect}</div></div>"
    )


def _scores(analyses: Sequence[Analysis]) -> str:
    charts = []
    for analysis in analyses:
        num_true, count = analysis.num_true, analysis.num_true + analysis.num_false
        precision = f"{num_true / count:.2f}" if count else "-"
        recall = f"{num_true / analysis.num_objects:.2f}" if analysis.num_objects else "-"
        has_scores = analysis.histogram.any()
        chart = score_histogram(analysis) if has_scores else note("There are no detections.")
        charts.append(
            f"<div><h3>{_heading(analysis)}</h3>{chart}<p>Score {analysis.threshold:.2f} or more: "
            f"precision {precision}, recall {recall}.</p></div>"
        )
    return (
        "<h2>Scores of true and false detections</h2>"
        '<p class="soft"><span class="swatch true"></span>True detections point up, <span '
        'class="swatch false"></span>false ones down, each to its own scale. The dashed line is '
        "the score with the best F1 over all detections (0.50 if none is true); "
        f'it is the threshold below.</p><div class="charts">{"".join(charts)}</div>'
    )


def _confusion(main: Analysis) -> str:
    return (
        "<h2>Confusion</h2>"
        f'<p class="soft">Rows are ground-truth categories, columns detected categories, for '
        f"{main.kind} detections with a score of {main.threshold:.2f} or more. By decreasing "
        "score, each detection takes the free object with the highest IoU of at least 0.50, "
        "regardless of category. Color strength is the share of the row.</p>"
        f'<div class="row">{tables.confusion_table(main)}{tables.confusion_list(main)}</div>'
    )


def _gallery(
    main: Analysis,
    heading: str,
    meaning: str,
    read_image: Callable[[dict], np.ndarray | None],
) -> str:
    if heading == "Misses":
        errors, count = main.misses, main.num_objects - main.num_true
    else:
        errors, count = main.false_positives, main.num_false
    if not errors:
        return f"<h2>{heading}</h2>{note('None.')}"
    unread, figures = 0, []
    for error in errors:
        image = read_image(error.image)
        unread += image is None
        figures.append(_figure(error, image, heading))
    return (
        f"<h2>{heading}</h2>"
        f'<p class="soft">{meaning} The threshold is {main.threshold:.2f}. Shown are the '
        f"{len(errors)} costliest of {count:,}, at most two per image.</p>"
        '<p class="soft">Left: ground truth; right: predictions. The error is '
        '<span class="swatch" style="background:#ffd400"></span>yellow, everything else '
        '<span class="swatch" style="background:#1595ff"></span>blue.</p>'
        + (note(f"{unread} of these images could not be read.") if unread else "")
        + f'<div class="gallery">{"".join(figures)}</div>'
    )


def _figure(error: DetectionError, image: np.ndarray | None, heading: str) -> str:
    name = escape(error.name)
    file_name = escape(str(error.image.get("file_name", error.image["id"])))
    kind = "missed" if heading == "Misses" else "false positive"
    if image is None:
        content = '<div class="absent">The image could not be read.</div>'
    else:
        truth, predictions = draw_error(image, error)
        subject = f"{kind} {name} in {file_name}"
        content = (
            f'<div class="pair"><img src="{truth}" alt="Ground truth around the {subject}">'
            f'<img src="{predictions}" alt="Predictions around the {subject}"></div>'
        )
    return (
        f"<figure>{content}<figcaption><b>{name}</b> cost {error.cost:.2f}, "
        f"{escape(error.note)} · {file_name}</figcaption></figure>"
    )


def _heading(analysis: Analysis) -> str:
    return "Boxes" if analysis.kind == "box" else "Masks"


def note(text: str) -> str:
    """Return a paragraph of secondary text, given as HTML."""
    return f'<p class="soft">{text}</p>'
