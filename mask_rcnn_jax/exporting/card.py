"""The model card of a model for a hub: README.md, made from what is known of its run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml

from mask_rcnn_jax.data.overview import class_counts
from mask_rcnn_jax.data.source import load_train, load_val
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.version import __version__
from mask_rcnn_jax.weights.model_folder import WEIGHTS, own_code, portable

TAGS = ["mask-rcnn", "object-detection", "jax", "flax"]
# By the last task of a model, or boxes alone: its name, and the hub's.
KINDS = {
    "boxes": ("R-CNN", "object-detection"),
    "masks": ("Mask R-CNN", "image-segmentation"),
    "keypoints": ("Keypoint R-CNN", "keypoint-detection"),
}


@dataclass(frozen=True)
class Facts:
    """What a card says beside the recipe and the categories.

    Attributes:
        address: what the model is loaded from.
        license: as the user names it; "" states none.
        step: of the run; None for weights of no run.
        evaluation: the record of metrics.jsonl about these weights or the last ones before them;
            empty without one.
        checksum: SHA-256 of the weights.
    """

    address: str
    license: str
    step: int | None
    evaluation: Mapping[str, Any]
    checksum: str


def make_card(recipe: Recipe, categories: Sequence[Mapping[str, Any]], facts: Facts) -> str:
    """Return the text of a card; data that are no longer there are not counted."""
    tags = TAGS + ["instance-segmentation"] * recipe.model.has_masks
    head = {"library_name": "mask_rcnn_jax", "pipeline_tag": _kind(recipe)[1], "tags": tags}
    if facts.license:
        head = {"license": facts.license.lower(), **head}
    counts, sets = _data(recipe, categories) if facts.step is not None else ({}, [])
    parts = (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {facts.address.rpartition('/')[2]}",
        _about(recipe, categories, facts),
        "## Load it",
        _loading(recipe, facts.address),
        "## Data",
        *sets,
        _table(
            ("class", "id", "name", *counts),
            [
                (k, one["id"], one["name"], *(counts[name][k - 1] for name in counts))
                for k, one in enumerate(categories, 1)
            ],
        ),
        "## Metrics",
        _metrics(facts),
        "## Recipe",
        "Entries that are not the defaults:",
        _recipe(recipe),
        "## License",
        facts.license or "None is stated: ask the authors before you use it.",
        "## Versions",
        _versions(facts.checksum),
    )
    return "\n\n".join(parts) + "\n"


def _kind(recipe: Recipe) -> tuple[str, str]:
    model = recipe.model
    with_masks = "masks" if model.has_masks else "boxes"
    return KINDS["keypoints" if model.has_keypoints else with_masks]


def _about(recipe: Recipe, categories: Sequence[Mapping[str, Any]], facts: Facts) -> str:
    backbone, (kind, _) = recipe.model.backbone, _kind(recipe)
    depth = backbone.get("depth", None)
    name = f"{backbone.name}{f'-{depth}' if depth else ''}"
    trained = "" if facts.step is None else f", trained for {facts.step} steps"
    noun = "class" if len(categories) == 1 else "classes"
    text = f"{kind} of mask_rcnn_jax for {len(categories)} {noun}, backbone {name}{trained}."
    start = recipe.model.weights.rstrip("/")
    if facts.step is not None and start:
        text += f" It started from {_code(start if '://' in start else start.rpartition('/')[2])}."
    return text


def _loading(recipe: Recipe, address: str) -> str:
    code = (
        "import mask_rcnn_jax as mrcnn  # pip install 'mask-rcnn-jax[hub]'\n\n"
        f'predictor = mrcnn.load("{address}")\n'
        'result = predictor("photo.jpg")'
    )
    text = "Categories, thresholds and the statistics of its input come with it."
    if names := set(own_code(recipe).values()):
        text += f" It needs code that is not here: {', '.join(map(_code, sorted(names)))}."
    return f"```python\n{code}\n```\n\n{text}"


def _data(
    recipe: Recipe, categories: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the objects of each class in each set, and lines about the sets."""
    counts, rows, missing = {}, [], []
    for split, title in (("train", "training"), ("val", "validation")):
        path = getattr(recipe.data, f"{split}_json")
        if split == "val" and not path:
            continue
        name = path.rpartition("/")[2]
        try:
            given = {"boxes_only": recipe.learns_boxes_only}
            found = load_train(recipe.data, **given) if split == "train" else None
            images = (found or load_val(recipe.data, categories, **given)).images
        except (OSError, ValueError):
            missing.append(name)
            continue
        counts[title] = class_counts(images, len(categories))
        rows.append((title, name, len(images), sum(counts[title])))
    said = [_table(("set", "annotations", "images", "objects"), rows)] if rows else []
    if missing:
        listed = " and ".join(map(_code, missing))
        said.append(f"{listed} could not be read when this was written.")
    return counts, said


def _metrics(facts: Facts) -> str:
    found = {
        name: value
        for name, value in facts.evaluation.items()
        if name.startswith(("ap/", "cells/")) and isinstance(value, int | float)
    }
    if not found:
        return "None: the run measured none." if facts.step is not None else "None are known."
    step = facts.evaluation["step"]
    text = "On the validation set, from 0 to 1"
    if step != facts.step:
        text += f", of step {step}; these weights are of step {facts.step}"
    rows = [(_title(name), f"{value:.4f}") for name, value in found.items()]
    return f"{text}:\n\n{_table(('metric', 'value'), rows)}"


def _title(name: str) -> str:
    kind, _, what = name.partition("/")
    return f"{'AP' if kind == 'ap' else kind}, {what.replace('_', ' ')}"


def _recipe(recipe: Recipe) -> str:
    changes = flatten(portable(recipe).changes())
    lines = (f"{name} = {json.dumps(value, default=repr)}" for name, value in changes.items())
    return "```\n" + "\n".join(lines) + "\n```"


def _versions(checksum: str) -> str:
    names = ("jax", "flax", "numpy")
    rows = [("mask_rcnn_jax", __version__), *((name, version(name)) for name in names)]
    table = _table(("package", "version"), rows)
    return f"{table}\n\nSHA-256 of {WEIGHTS}: `{checksum}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    """Names are the user's: no line end, bar or tag of theirs may end a cell."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"
