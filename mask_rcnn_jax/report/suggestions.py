"""Config entries that fit a dataset, each with its reason.

All are rules of thumb that follow from sizes and counts; none has seen a training run. They start
from a recipe, so that only the entries that its defaults do not fit are changed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.data.options import CANVAS_MULTIPLE, ExampleOptions
from mask_rcnn_jax.models.build import ModelOptions
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.report.anchor_fit import (
    Fit,
    NetworkBoxes,
    describe_shapes,
    fitting_anchors,
    measure_fit,
    network_boxes,
)
from mask_rcnn_jax.report.set_objects import SetObjects

AS_IN_RECIPE = "as in the recipe"
SMALL_SHARE = 0.1  # of the objects are smaller than what image_size is chosen for
SMALL_SIDE = 20  # network pixels that these shall have: five cells of the finest map
MAX_ENLARGED = 2  # times; beyond, pixels only repeat each other
MAX_SIZE = (800, 1333)  # (short, long side) of the published recipes, which fits most GPUs
SAME_SIZE = 0.1  # relative difference to the recipe's sides below which these stay
MOST_IMAGES = 0.99  # of the images are below the number of objects that limits are chosen for


class Suggestion(NamedTuple):
    """A config entry, which may stay as it is."""

    entry: str  # dotted name
    current: Any
    value: Any
    reason: str

    @property
    def is_change(self) -> bool:
        return self.value != self.current

    @property
    def flag(self) -> str:
        """The value as an argument for a shell."""
        text = str(self.value)
        return f'--config.{self.entry}="{text}"' if "(" in text else f"--config.{self.entry}={text}"


class Advice(NamedTuple):
    """Suggestions for a dataset and a recipe, and how anchors fit with and without them."""

    suggestions: list[Suggestion]
    options: ExampleOptions  # with the suggested image size
    boxes: NetworkBoxes  # at that size
    anchors: AnchorGrid  # as suggested
    fits: list[tuple[str, Fit]]  # by whose anchors at which size: the recipe's, then the suggested

    @property
    def flags(self) -> list[str]:
        """Arguments of `train` for all entries that change."""
        return [suggestion.flag for suggestion in self.suggestions if suggestion.is_change]

    @property
    def lines(self) -> list[str]:
        """All suggestions with their reasons, how anchors fit, and the flags, as plain text."""
        lines = []
        for entry, current, value, reason in self.suggestions:
            change = f"{show(current)} -> {show(value)}"
            change = change if value != current else f"{show(value)}, {AS_IN_RECIPE}"
            lines.append(f"{entry}: {change}. {reason}")
        for name, fit in self.fits:
            if math.isnan(fit.mean):  # no boxes
                continue
            shares = f"{fit.at_50:.1%} of the boxes have an IoU of 0.5, {fit.at_70:.1%} of 0.7"
            lines.append(f"{name}: {shares}")
        return [*lines, " \\\n".join(self.flags)] if self.flags else lines


def advise(objects: SetObjects, recipe: Recipe) -> Advice:
    """Suggest config entries for a dataset; without objects, all stay as they are."""
    options, anchors = recipe.data, recipe.model.anchors
    size = image_size(objects, options)
    if "fixed_size_crop" in options.augment:
        size = options.image_size, "Random crops set the size that training sees; it stays."
    short_sides = _scaled(options.short_sides, min(size[0]), min(options.image_size))
    fitted = replace(options, image_size=size[0], short_sides=short_sides)
    at_recipe, at_fitted = (
        network_boxes(objects.sizes, objects.images, objects.boxes, sizing)
        for sizing in (options, fitted)
    )
    better = fitting_anchors(at_fitted, anchors)
    before, after = measure_fit(at_fitted, anchors), measure_fit(at_fitted, better)
    fits = [(f"recipe's anchors at {_by(options.image_size)}", measure_fit(at_recipe, anchors))]
    if fitted != options:
        fits.append((f"recipe's anchors at {_by(fitted.image_size)}", before))
    if better != anchors:
        fits.append((f"suggested anchors at {_by(fitted.image_size)}", after))
    suggestions = [
        Suggestion("data.image_size", options.image_size, *size),
        *side_suggestions(options.short_sides, short_sides),
        *anchor_suggestions(anchors, better, before, after),
        *count_suggestions(objects.counts, recipe),
    ]
    return Advice(suggestions, fitted, at_fitted, better, fits)


def image_size(objects: SetObjects, options: ExampleOptions) -> tuple[tuple[int, int], str]:
    """Choose `data.image_size` for the recipe's resizing; return it with the reason.

    Images keep their size, but are enlarged where objects are small, up to `MAX_ENLARGED` times,
    and shrunk to `MAX_SIZE`. A size near that of `options` stays.
    """
    if options.resize == "keep" or not len(objects.images):
        return options.image_size, "No object or no resizing asks for another size."
    short, long = objects.sizes.min(axis=1), objects.sizes.max(axis=1)
    usual = float(np.median(short))
    # Sides relative to the short side of the image, which is what resizing fixes.
    small = max(float(np.quantile(objects.sides / short[objects.images], SMALL_SHARE)), 1e-6)
    wanted = max(usual, min(SMALL_SIDE / small, MAX_ENLARGED * usual))
    side = min(_round_up(wanted), MAX_SIZE[0])
    if options.resize == "shortest_edge":
        elongation = float(np.quantile(long / short, 0.95))
        found = side, min(_round_up(side * elongation), MAX_SIZE[1])
    else:
        height, width = np.median(objects.sizes, axis=0)
        scale = min(side / min(height, width), MAX_SIZE[1] / max(height, width))
        found = _round_up(height * scale), _round_up(width * scale)
    pairs = zip(found, options.image_size, strict=True)
    if all(abs(new - old) < SAME_SIZE * old for new, old in pairs):
        found = options.image_size
    seen = small * min(found)
    reason = (
        f"The usual short side is {usual:.0f} pixels; {SMALL_SHARE:.0%} of the objects have a side "
        f"(square root of the area) below {small * usual:.0f} there and {seen:.0f} at a short side "
        f"of {min(found)}"
    )
    if seen < SMALL_SIDE / 2:
        reason += f"; cut images into tiles to find objects below {SMALL_SIDE // 2}"
    return found, f"{reason}."


def side_suggestions(current: tuple[int, ...], scaled: tuple[int, ...]) -> list[Suggestion]:
    """Suggest short sides to draw from that follow the image size; nothing if they stay."""
    reason = "They follow the short side of data.image_size, which is the largest allowed."
    return [Suggestion("data.short_sides", current, scaled, reason)] if scaled != current else []


def anchor_suggestions(
    current: AnchorGrid, better: AnchorGrid, before: Fit, after: Fit
) -> list[Suggestion]:
    """Suggest anchor sizes and aspect ratios, by how both grids fit at the suggested size."""
    if math.isnan(before.mean):
        gain = "There are no boxes to fit."
    elif better == current:
        gain = (
            f"{before.at_50:.0%} of the boxes have an anchor with IoU 0.5 or more, "
            f"{before.at_70:.0%} with 0.7; no other sizes or shapes are much better."
        )
    else:
        gain = (
            f"At this size, {after.at_50:.0%} instead of {before.at_50:.0%} of the boxes have an "
            f"anchor with IoU 0.5 or more, {after.at_70:.0%} instead of {before.at_70:.0%} with "
            "0.7."
        )
    shapes = describe_shapes(better.aspect_ratios)
    return [
        Suggestion("model.anchors.sizes", current.sizes, better.sizes, gain),
        Suggestion(
            "model.anchors.aspect_ratios",
            current.aspect_ratios,
            better.aspect_ratios,
            f"Heights are {shapes} times the widths; as many shapes as in the recipe, so that "
            "pretrained weights fit.",
        ),
    ]


def count_suggestions(counts: np.ndarray, recipe: Recipe) -> list[Suggestion]:
    """Suggest limits for the objects in an image.

    `data.max_instances` follows the set, the others only grow.
    counts: [I] objects in each image.
    """
    most = int(counts.max(initial=0))
    if not most:
        return []
    usual, many = float(np.median(counts)), math.ceil(np.quantile(counts, MOST_IMAGES))
    pasting = "copy_paste" in recipe.data.augment
    pasted = ", twice as many with copy_paste" if pasting else ""
    instances = Suggestion(
        "data.max_instances",
        recipe.data.max_instances,
        _round_up(2 * most if pasting else most, 20),
        f"An image has up to {most} objects{pasted}; more than this limit would not be learned. "
        "Set it higher if the set is going to grow.",
    )
    image = f"{MOST_IMAGES:.0%} of the images have at most {many} objects"
    detections = _raised(
        "eval.detections_per_image",
        recipe.eval.detections_per_image,
        1.5 * many,
        10,
        f"{image}; half as many again leave room.",
    )
    topk = recipe.eval.pre_nms_topk
    limits = _stage_limits(recipe.model, topk, usual, many, image, detections.value)
    return [instances, detections, *limits]


def _stage_limits(
    model: ModelOptions, topk: int, usual: float, many: int, image: str, detections: int
) -> list[Suggestion]:
    """The limits between anchors and detections that have to grow with the objects in an image."""
    four = f"{image}; four proposals for each."
    rpn, sampling = model.rpn, model.sampling
    why = "Two candidates for each detection."
    limits: list[tuple[str, int, float, int, str]] = [
        ("eval.pre_nms_topk", topk, 2 * detections, 100, why)
    ]
    for mode in ("train", "test"):
        if mode == "train" and rpn.post_nms_scope == "batch":
            continue  # counts per device, of which the number of images is not known here
        for stage, least, why in (("post", 4, four), ("pre", 8, "Twice as many before NMS.")):
            name = f"{stage}_nms_topk_{mode}"
            limits.append((f"model.rpn.{name}", getattr(rpn, name), least * many, 100, why))
    for section, name, count, who in (
        (rpn, "rpn", many, f"{image}; each needs a positive anchor"),
        (
            sampling,
            "sampling",
            usual,
            f"An image usually has {usual:.0f} objects; each needs an RoI",
        ),
    ):
        share = section.positive_fraction
        reason = f"{who}, and at most {share:.0%} are for objects."
        entry, current = f"model.{name}.batch_size_per_image", section.batch_size_per_image
        limits.append((entry, current, count / share, 64, reason))
    raised = [_raised(*limit) for limit in limits]
    return [suggestion for suggestion in raised if suggestion.is_change]


def _scaled(sides: tuple[int, ...], new: int, old: int) -> tuple[int, ...]:
    return tuple(max(side * new // old, 1) for side in sides)


def _raised(entry: str, current: int, least: float, unit: int, reason: str) -> Suggestion:
    """Suggest a multiple of a unit that is at least `least`, unless the recipe has as much."""
    value = current if current >= least else _round_up(least, unit)
    return Suggestion(entry, current, value, reason)


def _round_up(value: float, unit: int = CANVAS_MULTIPLE) -> int:
    """Round up to a multiple of a unit, but for rounding noise; at least one unit."""
    return max(math.ceil(value / unit - 1e-6), 1) * unit


def show(value: Any) -> str:
    """Return a number or tuples of numbers as text, with at most two decimals."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show, value))})"
    return f"{round(value, 2):g}" if isinstance(value, float) else str(value)


def _by(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
