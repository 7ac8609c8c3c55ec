"""Self-contained HTML page about a dataset: sizes, counts, classes, examples, suggestions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.data.coco import CocoDataset, load_coco
from mask_rcnn_jax.data.unused import unused_of
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.report.page import note, write_page
from mask_rcnn_jax.report.set_bands import SetBands, find_bands
from mask_rcnn_jax.report.set_charts import count_chart, ratio_chart, side_chart, size_map
from mask_rcnn_jax.report.set_examples import Example, examples
from mask_rcnn_jax.report.set_objects import (
    SIZE_BOUNDS,
    SIZE_NAMES,
    SetObjects,
    collect,
    size_counts,
)
from mask_rcnn_jax.report.set_tables import classes_table, fits_table, together_table
from mask_rcnn_jax.report.suggestion import Suggestion, show
from mask_rcnn_jax.report.suggestions import AS_IN_RECIPE, Advice, advise

FOOTER = (
    "Objects are the annotations that are no crowds. Suggestions follow from sizes and counts "
    "alone; no training has tried them."
)


def write_set_page(
    path: str | os.PathLike,
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike,
    recipe: Recipe,
    *,
    boxes_only: bool = False,
) -> Advice:
    """Write a page about a COCO json and return the suggestions for a recipe that stand on it.

    path: the HTML file; its folder is created. Others as for `read_set`.
    """
    given = json_path, image_dir, lambda counts: recipe
    dataset, objects, bands, advice = read_set(*given, boxes_only=boxes_only)
    facts = {"Annotations": str(json_path)}
    height, width = np.median(objects.sizes, axis=0)
    facts["Usual size (height × width)"] = f"{height:.0f} × {width:.0f}"
    facts |= {"Crowds": f"{len(objects.crowds):,}", "Left out": f"{dataset.num_left_out:,}"}
    sections = {
        "Suggestions": _suggestions(advice),
        "Images": _images(objects) + (bands.html if bands is not None else ""),
        "Objects": _objects(objects, advice),
        "Classes": _classes(dataset, objects),
        "Examples": _examples(examples(dataset, objects)),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    title = f"Dataset {Path(json_path).name}"
    write_page(path, title, facts, _tiles(objects, len(dataset.class_names)), sections, FOOTER)
    return advice


class StudiedSet(NamedTuple):
    """A set, what was counted in it, and what that suggests."""

    dataset: CocoDataset
    objects: SetObjects
    bands: SetBands | None
    advice: Advice


def read_set(
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike,
    choose: Callable[[np.ndarray], Recipe],
    *,
    boxes_only: bool = False,
) -> StudiedSet:
    """Read a COCO json and make suggestions.

    Only example images are read. Annotations that cannot be trained on are left out and counted.

    Args:
        json_path: the COCO json.
        image_dir: folder of its images.
        choose: returns the recipe for which suggestions are made, by the numbers of objects in the
            images; first of none, to read them.
        boxes_only: objects need no mask, as for `load_coco`.

    Raises ValueError or OSError for a json that cannot be used.
    """
    recipe = choose(np.zeros(1, int))
    dataset = load_coco(
        json_path,
        image_dir,
        bad_annotations="skip",
        require_annotations=False,
        boxes_only=boxes_only,
        bands=recipe.data.bands,
        upright=recipe.data.apply_exif == "always",
    )
    for line in unused_of(dataset):
        logging.warning("%s: %s", json_path, line)
    objects = collect(dataset.images)
    recipe = choose(objects.counts)
    bands, advice = find_bands(dataset, recipe), advise(objects, recipe)
    if bands is not None:
        suggestions = [*bands.suggestions(recipe), *advice.suggestions]
        advice = advice._replace(suggestions=suggestions)
        dataset = replace(dataset, bands=bands.bands)
    return StudiedSet(dataset, objects, bands, advice)


def _tiles(objects: SetObjects, num_classes: int) -> str:
    counts, images = objects.counts, len(objects.sizes)
    total = len(objects.images)
    shares = [f"{count / max(total, 1):.0%}" for count in size_counts(objects.sides)]
    tiles = {
        "Images": (
            ("total", _brief(images)),
            ("empty", _brief(objects.num_empty)),
            ("classes", _brief(num_classes)),
        ),
        "Objects": (
            ("total", _brief(total)),
            ("per image", f"{total / images:.1f}"),
            ("at most", _brief(int(counts.max()))),
        ),
        "Object sizes by COCO's bounds": tuple(zip(SIZE_NAMES, shares, strict=True)),
    }
    return f'<div class="tiles even">{"".join(_tile(*tile) for tile in tiles.items())}</div>'


def _tile(heading: str, numbers: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><span>{name}</span><b>{value}</b></div>" for name, value in numbers)
    return f'<div class="tile"><h3>{heading}</h3>{cells}</div>'


def _brief(count: int) -> str:
    """Three digits of a large number: 118k, 1.3M."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= 10 * unit or (letter == "M" and count >= unit):
            return f"{count / unit:.3g}{letter}"
    return f"{count:,}"


def _suggestions(advice: Advice) -> str:
    items = "".join(map(_suggestion, advice.suggestions))
    flags = " \\\n".join(advice.flags)
    pasted = f"<p>As flags of <code>train</code>:</p><pre>{escape(flags)}</pre>" if flags else ""
    return (
        f'<h2>Suggestions for the config</h2><ul class="advice">{items}</ul>{pasted}'
        f"<h3>How anchors fit the boxes</h3>{fits_table(advice.fits)}"
    )


def _suggestion(suggestion: Suggestion) -> str:
    change = f"instead of {show(suggestion.current)}" if suggestion.is_change else AS_IN_RECIPE
    return (
        f"<li><code>{suggestion.entry}</code> <b>{escape(show(suggestion.value))}</b> "
        f'<span class="soft">{escape(change)}</span><br>{escape(suggestion.reason)}</li>'
    )


def _images(objects: SetObjects) -> str:
    ratios = objects.sizes[:, 1] / objects.sizes[:, 0]
    return (
        "<h2>Images</h2>"
        '<div class="charts">'
        f"<div><h3>Sizes in pixels</h3>{size_map(objects.sizes)}</div>"
        f"<div><h3>Width to height</h3>{ratio_chart(ratios, 'Width to height of images')}</div>"
        "</div>"
    )


def _objects(objects: SetObjects, advice: Advice) -> str:
    if not len(objects.images):
        return f"<h2>Objects</h2>{note('There are no objects.')}"
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
    shapes = [height / width for width, height in advice.anchors.aspect_ratios]
    network = advice.boxes.boxes
    spans = np.sqrt(np.prod(network[:, 2:] - network[:, :2], axis=1))
    size = " × ".join(map(str, advice.options.image_size))
    in_image = side_chart(objects.sides, "Side of objects in pixels of the image", SIZE_BOUNDS)
    in_network = side_chart(spans, "Side of boxes in pixels of the network", advice.anchors.sizes)
    ratios = ratio_chart(sides[:, 1] / sides[:, 0], "Height to width of boxes", shapes)
    return (
        "<h2>Objects</h2>"
        '<p class="soft">A side is the square root of an area. Dashed lines are COCO’s bounds of '
        "small, medium and large objects, and the anchors suggested above.</p>"
        '<div class="charts">'
        f"<div><h3>Objects per image</h3>{count_chart(objects.counts)}</div>"
        f"<div><h3>Sides in the image</h3>{in_image}</div>"
        f"<div><h3>Sides of boxes at {size}</h3>{in_network}</div>"
        f"<div><h3>Height to width of boxes</h3>{ratios}</div></div>"
    )


def _classes(dataset: CocoDataset, objects: SetObjects) -> str:
    together = together_table(dataset.class_names, objects)
    return f"<h2>Classes</h2>{classes_table(dataset.class_names, objects)}{together}"


def _examples(shown: Sequence[Example]) -> str:
    figures = "".join(map(_figure, shown))
    return (
        '<h2>Examples</h2><p class="soft">A few images of each class, rare classes first.</p>'
        f'<div class="sheet">{figures}</div>'
    )


def _figure(example: Example) -> str:
    name, (height, width) = escape(example.name), example.size
    classes = ", ".join(f"{escape(n)} {count}" for n, count in example.classes) or "no object"
    content = '<div class="absent">The image could not be read.</div>'
    if example.uri is not None:
        content = f'<img src="{example.uri}" alt="{name} with its objects">'
    caption = f"<b>{classes}</b> · {name} · {height} × {width}"
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>"
