"""Training section of the report: losses, learning rate and APs over the steps of the run."""

import math
from collections.abc import Sequence

from mask_rcnn_jax.recipe.stopping import ap, comparable, measure
from mask_rcnn_jax.report.charts import training_curve

# Chart titles by metric name; other losses use their metric name.
_LOSSES = {
    "loss/total": "Total loss",
    "loss/rpn_cls": "Proposals: object or not",
    "loss/rpn_box": "Proposals: boxes",
    "loss/box_cls": "Categories",
    "loss/box_reg": "Boxes",
    "loss/mask": "Masks",
    "loss/keypoint": "Keypoints",
}


def training_section(records: Sequence[dict]) -> str:
    """Return the section's HTML; empty if the records have no losses."""
    present = {name for record in records for name in record if name.startswith("loss/")}
    names = [name for name in _LOSSES if name in present] + sorted(present - _LOSSES.keys())
    steps = [record["step"] for record in records if _is_number(record.get("step"))]
    span = min(steps, default=0), max(steps, default=0)
    charts = []
    for name in names:
        lines = (("training", "line", name), ("validation", "line2", f"val_{name}"))
        charts.append(_chart(records, span, _LOSSES.get(name) or name, lines))
    if not any(charts):
        return ""
    charts.append(_chart(records, span, "Learning rate", (("learning rate", "line", "lr"),)))
    evaluated = comparable([record for record in records if {"ap/box", "ap/mask"} & record.keys()])
    aps = [
        {"step": record.get("step"), **{kind: ap(record, kind) for kind in ("box", "mask")}}
        for record in evaluated
    ]
    limit = measure(evaluated[-1]).partition("_at_")[2] if evaluated else ""
    name = f"AP@{limit}" if limit else "AP"
    lines = ((f"box {name}", "line", "box"), (f"mask {name}", "line2", "mask"))
    charts.append(_chart(aps, span, f"{name} of boxes (blue) and masks (amber)", lines))
    return (
        "<h2>Training</h2>"
        '<p class="soft">Losses over the training steps: <span class="swatch" '
        'style="background:rgb(var(--blue))"></span>training, <span class="swatch" '
        'style="background:rgb(var(--amber))"></span>validation.</p>'
        f'<div class="charts small">{"".join(charts)}</div>'
    )


def _chart(
    records: Sequence[dict],
    span: tuple[float, float],
    title: str,
    lines: Sequence[tuple[str, str, str]],
) -> str:
    """Draw lines (name, CSS class, record key) over a range of steps; empty without values."""
    series = [(name, css_class, _series(records, key)) for name, css_class, key in lines]
    series = [line for line in series if line[2]]
    return f"<div>{training_curve(title, series, span)}</div>" if series else ""


def _series(records: Sequence[dict], key: str) -> list[tuple[float, float]]:
    """(step, value) of each record with finite values for both, by increasing step."""
    pairs = [(record["step"], record[key]) for record in records if {"step", key} <= record.keys()]
    return sorted(pair for pair in pairs if all(_is_number(value) for value in pair))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
