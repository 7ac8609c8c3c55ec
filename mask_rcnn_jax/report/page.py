"""An evaluation as one HTML page with everything in it: numbers, curves, tables, pictures.

The page asks for nothing: its stylesheet, its one script (which sorts tables), its charts and its
pictures are inside, and its content security policy forbids the rest. Every name from the data is
escaped. Its size is bounded by the number and the size of the pictures and of the tables.
"""

import base64
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from mask_rcnn_jax.report.analysis import Findings
from mask_rcnn_jax.report.charts import pr_curves, score_histogram
from mask_rcnn_jax.report.error_images import draw_mistake
from mask_rcnn_jax.report.errors import Mistake
from mask_rcnn_jax.report.run_page import run_section
from mask_rcnn_jax.report.style import SCRIPT, STYLE
from mask_rcnn_jax.report.tables import (
    categories_table,
    confusion_list,
    confusion_table,
    sizes_table,
    tiles,
)


def write_report(
    path: str | os.PathLike,
    title: str,
    about: Mapping[str, str],
    findings: Sequence[Findings],
    read_picture: Callable[[dict], np.ndarray | None],
    records: Sequence[dict],
) -> None:
    """Writes the page.

    Args:
        title: what was evaluated.
        about: further facts by their names, shown under the title.
        findings: of each type of result, at least one; confusion and pictures are of the last.
        read_picture: uint8 [H, W, 3] RGB of an image entry of the json, or None where it cannot be
            had; the page then says so in its place.
        records: of the run's metrics.jsonl, or none.
    """
    page = make_page(title, about, findings, read_picture, records)
    # json can hold half of a surrogate pair, which no encoding can.
    Path(path).write_text(page, encoding="utf-8", errors="replace")


def make_page(
    title: str,
    about: Mapping[str, str],
    findings: Sequence[Findings],
    read_picture: Callable[[dict], np.ndarray | None],
    records: Sequence[dict],
) -> str:
    """The page that `write_report` writes."""
    main = findings[-1]
    facts = {
        **about,
        "Pictures": f"{main.num_images:,}",
        "Objects": f"{main.num_objects:,}",
        "Categories": f"{len(main.categories):,}",
    }
    sections = {
        "Curves": _curves(findings),
        "Categories": _categories(findings),
        "Scores": _scores(findings),
        "Confusion": _confusion(main),
        "Misses": _gallery(
            main,
            main.misses,
            main.num_objects - main.num_true,
            "Misses",
            "Objects without a detection of their category that reaches the score threshold. The "
            "cost of a miss is 1 minus the score of the detection that does match it, 0 if none "
            "does; of equal costs the larger object comes first.",
            read_picture,
        ),
        "False alarms": _gallery(
            main,
            main.false_alarms,
            main.num_false,
            "False alarms",
            "Detections that reach the score threshold and match no object of their category. "
            "The cost of a false alarm is its score.",
            read_picture,
        ),
        "Training": run_section(records),
    }
    sections = {name: content for name, content in sections.items() if content}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    entries = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    body = "".join(
        f'<section id="{_anchor(name)}">{content}</section>' for name, content in sections.items()
    )
    return (
        f"<!doctype html>\n{_head(title)}\n<body>\n<header><h1>{escape(title)}</h1>"
        f"<dl>{entries}</dl></header>\n<main>\n"
        f'<section aria-label="Summary">{tiles(findings)}</section>\n'
        f"<nav>{links}</nav>\n{body}\n</main>\n"
        "<footer>Scores are those of pycocotools. A detection is right where it matches an object "
        "of its category at IoU 0.50, unless another IoU is named; at most 100 detections of a "
        "category count in a picture.</footer>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


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


def _curves(findings: Sequence[Findings]) -> str:
    charts = "".join(
        f"<div><h3>{_kind(one)}</h3>{pr_curves(one)}</div>"
        for one in findings
        if one.precision is not None
    )
    charts = f'<div class="charts">{charts}</div>' if charts else _note("There are no objects.")
    return (
        "<h2>Precision and recall</h2>"
        '<p class="soft">One line for each IoU that a match needs, the mean over categories.</p>'
        f"{charts}"
    )


def _categories(findings: Sequence[Findings]) -> str:
    return (
        f"<h2>Sizes and categories</h2>{sizes_table(findings)}<p></p>{categories_table(findings)}"
    )


def _scores(findings: Sequence[Findings]) -> str:
    charts = []
    for one in findings:
        found = one.num_true + one.num_false
        precision = f"{one.num_true / found:.2f}" if found else "-"
        recall = f"{one.num_true / one.num_objects:.2f}" if one.num_objects else "-"
        chart = score_histogram(one) if one.histogram.any() else _note("There are no detections.")
        charts.append(
            f"<div><h3>{_kind(one)}</h3>{chart}<p>Score {one.threshold:.2f} or more: precision "
            f"{precision}, recall {recall}.</p></div>"
        )
    return (
        "<h2>Scores of true and false detections</h2>"
        '<p class="soft"><span class="swatch true"></span>True detections point up, <span '
        'class="swatch false"></span>false ones down, each on a scale of its own. '
        "The dashed line is the score with the best F1 over all detections (0.50 if none is true); "
        f'it is the threshold below.</p><div class="charts">{"".join(charts)}</div>'
    )


def _confusion(main: Findings) -> str:
    return (
        "<h2>Confusion</h2>"
        f'<p class="soft">Rows are what is there, columns what it was found as, {main.kind} '
        f"detections with a score of {main.threshold:.2f} or more. Each, the surest first, takes "
        "the free object it overlaps most, at IoU 0.50 or more, whatever its category. Strength "
        "of colour is the share of the row.</p>"
        f'<div class="row">{confusion_table(main)}{confusion_list(main)}</div>'
    )


def _gallery(
    main: Findings,
    mistakes: Sequence[Mistake],
    count: int,
    heading: str,
    meaning: str,
    read_picture: Callable[[dict], np.ndarray | None],
) -> str:
    if not mistakes:
        return f"<h2>{heading}</h2>{_note('None.')}"
    absent, figures = 0, []
    for mistake in mistakes:
        image = read_picture(mistake.image)
        absent += image is None
        figures.append(_figure(mistake, image, heading))
    shown = f"Shown are {len(mistakes)} of {count:,}, the most costly, two of a picture at most."
    return (
        f"<h2>{heading}</h2>"
        f'<p class="soft">{meaning} The threshold is {main.threshold:.2f}. {shown}</p>'
        '<p class="soft">Left the ground truth, right the predictions. The object in question is '
        '<span class="swatch" style="background:#ffd400"></span>yellow, others are '
        '<span class="swatch" style="background:#1595ff"></span>blue.</p>'
        + (_note(f"{absent} of these pictures could not be read.") if absent else "")
        + f'<div class="pictures">{"".join(figures)}</div>'
    )


def _figure(mistake: Mistake, image: np.ndarray | None, heading: str) -> str:
    name = escape(mistake.name)
    file_name = escape(str(mistake.image.get("file_name", mistake.image["id"])))
    what = f"{'missed' if heading == 'Misses' else 'falsely found'} {name} in {file_name}"
    if image is None:
        shown = '<div class="absent">The picture could not be read.</div>'
    else:
        truth, found = draw_mistake(image, mistake)
        shown = (
            f'<div class="pair"><img src="{truth}" alt="Ground truth around the {what}">'
            f'<img src="{found}" alt="Predictions around the {what}"></div>'
        )
    return (
        f"<figure>{shown}<figcaption><b>{name}</b> cost {mistake.cost:.2f}, "
        f"{escape(mistake.note)} · {file_name}</figcaption></figure>"
    )


def _kind(findings: Findings) -> str:
    return "Boxes" if findings.kind == "box" else "Masks"


def _note(text: str) -> str:
    return f'<p class="soft">{text}</p>'
