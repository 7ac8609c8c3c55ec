"""The curves of a run in a report: its losses, its learning rate and its APs over the steps."""

import math
from collections.abc import Sequence

from mask_rcnn_jax.report.charts import run_chart

# What the metrics of a run are called; losses that are not here keep their own names.
_LOSSES = {
    "loss/total": "Total loss",
    "loss/rpn_cls": "Proposals: object or not",
    "loss/rpn_box": "Proposals: boxes",
    "loss/box_cls": "Categories",
    "loss/box_reg": "Boxes",
    "loss/mask": "Masks",
}


def run_section(records: Sequence[dict]) -> str:
    """The section, empty if the records have no losses."""
    present = {name for record in records for name in record if name.startswith("loss/")}
    names = [name for name in _LOSSES if name in present] + sorted(present - _LOSSES.keys())
    steps = [record["step"] for record in records if _is_number(record.get("step"))]
    span = min(steps, default=0), max(steps, default=0)
    charts = [
        _chart(
            records,
            span,
            _LOSSES.get(name, name),
            (("training", "line", name), ("validation", "also", f"val_{name}")),
        )
        for name in names
    ]
    if not any(charts):
        return ""
    charts.append(_chart(records, span, "Learning rate", (("learning rate", "line", "lr"),)))
    aps = (("box AP", "line", "ap/box"), ("mask AP", "also", "ap/mask"))
    charts.append(_chart(records, span, "AP of boxes (blue) and masks (amber)", aps))
    return (
        "<h2>Training</h2>"
        '<p class="soft">Losses of the run over its steps: <span class="swatch" '
        'style="background:rgb(var(--blue))"></span>training, <span class="swatch" '
        'style="background:rgb(var(--amber))"></span>validation.</p>'
        f'<div class="charts small">{"".join(charts)}</div>'
    )


def _chart(
    records: Sequence[dict],
    span: tuple[float, float],
    what: str,
    lines: Sequence[tuple[str, str, str]],
) -> str:
    """A chart of lines (name, class, key of the records) over a span of steps; empty without a
    number to show."""
    series = [(name, kind, _series(records, key)) for name, kind, key in lines]
    series = [entry for entry in series if entry[2]]
    return f"<div>{run_chart(what, series, span)}</div>" if series else ""


def _series(records: Sequence[dict], key: str) -> list[tuple[float, float]]:
    """(step, value) of the records that have both as finite numbers, by step."""
    pairs = [(record.get("step"), record.get(key)) for record in records]
    return sorted(pair for pair in pairs if all(_is_number(value) for value in pair))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
