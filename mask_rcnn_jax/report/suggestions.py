"""Config entries that fit a dataset, each with its reason.

All are rules of thumb that follow from sizes and counts; none has seen a training run. They start
from a recipe, so that only the entries that its defaults do not fit are changed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.data.drawn import ImageBoxes, changes_counts, drawn_counts
from mask_rcnn_jax.data.geometry import Geometry
from mask_rcnn_jax.data.kinds import KINDS
from mask_rcnn_jax.data.options import CANVAS_MULTIPLE, DataOptions, ExampleOptions
from mask_rcnn_jax.data.windows import Windows
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.recipe.options import FEW_STEPS
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.report.anchor_fit import (
    Fit,
    NetworkBoxes,
    describe_shapes,
    fitting_anchors,
    measure_fit,
    network_boxes,
)
from mask_rcnn_jax.report.count_limits import count_suggestions
from mask_rcnn_jax.report.overlaps import overlap_suggestions
from mask_rcnn_jax.report.set_objects import SetObjects
from mask_rcnn_jax.report.suggestion import Suggestion, round_up, show

AS_IN_RECIPE = "as in the recipe"
SMALL_SHARE = 0.1  # of the objects are smaller than what image_size is chosen for
SMALL_SIDE = 20  # network pixels that these shall have: five cells of the finest map
MAX_ENLARGED = 2  # times; beyond, pixels only repeat each other
MAX_SIZE = (800, 1333)  # (short, long side) of the published recipes, which fits most GPUs
SAME_SIZE = 0.1  # relative difference to the recipe's sides below which these stay
MIN_COST = 0.005  # of both shares of `Fit` together, below which a size costs nothing
LARGEST_SIZE = (1600, 2666)  # the same where training sees crops, which fit any GPU


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
    size, jitter = image_size(objects, options), options.scale_jitter
    if "fixed_size_crop" in options.augment:
        if _jitters_about_size(options):
            size = image_size(objects, options, LARGEST_SIZE)
            jitter = replace(jitter, size=size[0])
        else:
            size = options.image_size, "Random crops set the size that training sees; it stays."
    elif options.windows.is_on:
        why = "That of data.windows.size, so that `--tile` sees objects as large as training does."
        size = options.windows.size, why
    short_sides = _scaled(options.short_sides, min(size[0]), min(options.image_size))
    sized: dict[str, Any] = {"image_size": size[0], "short_sides": short_sides}
    fitted = replace(options, **sized, scale_jitter=jitter)
    given, now = (objects.sizes, objects.images, objects.boxes), options
    if options.windows.is_on:  # which training never resizes
        given, now = in_windows(objects, options.windows), fitted
    at_recipe, at_fitted = (network_boxes(*given, sizing) for sizing in (now, fitted))
    better = fitting_anchors(at_fitted, anchors)
    before, after = measure_fit(at_fitted, anchors), measure_fit(at_fitted, better)
    fits = [(f"recipe's anchors at {_by(now.image_size)}", measure_fit(at_recipe, anchors))]
    if fitted != now:
        fits.append((f"recipe's anchors at {_by(fitted.image_size)}", before))
    if better != anchors:
        fits.append((f"suggested anchors at {_by(fitted.image_size)}", after))
    value, reason = size
    suggestions = [
        Suggestion("data.image_size", options.image_size, value, reason + _cost(fits[0][1], after)),
        *window_suggestions(objects, options, size[0]),
        *jitter_suggestions(options.scale_jitter.size, jitter.size),
        *side_suggestions(options.short_sides, short_sides),
        *anchor_suggestions(anchors, better, before, after),
        *count_suggestions(objects.counts, recipe, example_counts(objects, fitted)),
        *overlap_suggestions(objects, recipe),
        *length_suggestions(objects, recipe),
    ]
    return Advice(suggestions, fitted, at_fitted, better, fits)


def example_counts(objects: SetObjects, options: DataOptions) -> np.ndarray | None:
    """Draw training examples and count their objects; None where they are those of the images.

    Functions of users in `augment` are not called, and copy-paste alone is not drawn.
    """
    if options.windows.is_on:
        _, cells, _ = in_windows(objects, options.windows)
        return np.bincount(cells)
    kinds = [getattr(options, name) for name in options.augment if name in KINDS]
    if not changes_counts([kind for kind in kinds if isinstance(kind, Geometry)]):
        return None
    bounds = np.searchsorted(objects.images, np.arange(len(objects.sizes) + 1))
    return drawn_counts(ImageBoxes(objects.sizes, bounds, objects.boxes), kinds)


def in_windows(objects: SetObjects, windows: Windows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sizes [W, 2] of the windows of a grid that hold objects, the window [N] in which the center
    of each object is, and boxes [N, 4] in its pixels."""
    side = np.array(windows.size[::-1])
    cells = ((objects.boxes[:, :2] + objects.boxes[:, 2:]) / 2 // side).astype(np.int64)
    places = np.column_stack([objects.images, cells])
    found, window = np.unique(places, axis=0, return_inverse=True)
    sizes = np.broadcast_to(windows.size, (len(found), 2))
    return sizes, window.reshape(-1), objects.boxes - np.tile(cells * side, 2)


def _jitters_about_size(options: DataOptions) -> bool:
    """Check whether training scales images about the size that evaluation has."""
    jitters = "scale_jitter" in options.augment and options.resize == "fit"
    return jitters and options.scale_jitter.size == options.image_size


def image_size(
    objects: SetObjects, options: ExampleOptions, largest: tuple[int, int] = MAX_SIZE
) -> tuple[tuple[int, int], str]:
    """Choose `data.image_size` for the recipe's resizing; return it with the reason.

    Images keep their size, but are enlarged where objects are small, up to `MAX_ENLARGED` times,
    and shrunk to `largest`. A size near that of `options` stays.
    """
    if options.resize == "keep" or not len(objects.images):
        return options.image_size, "No object or no resizing asks for another size."
    short, long = objects.sizes.min(axis=1), objects.sizes.max(axis=1)
    usual = float(np.median(short))
    small = small_side(objects)
    wanted = max(usual, min(SMALL_SIDE / small, MAX_ENLARGED * usual))
    side = min(round_up(wanted), largest[0])
    if options.resize == "shortest_edge":
        elongation = float(np.quantile(long / short, 0.95))
        found = side, min(round_up(side * elongation), largest[1])
    else:
        height, width = np.median(objects.sizes, axis=0)
        scale = min(side / min(height, width), largest[1] / max(height, width))
        found = round_up(height * scale), round_up(width * scale)
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


def small_side(objects: SetObjects) -> float:
    """The side that `SMALL_SHARE` of the objects do not have, as a part of the short side of their
    image, which is what resizing fixes."""
    shorts = objects.sizes.min(axis=1)[objects.images]
    return max(float(np.quantile(objects.sides / shorts, SMALL_SHARE)), 1e-6)


def window_suggestions(
    objects: SetObjects, options: DataOptions, size: tuple[int, int]
) -> list[Suggestion]:
    """Point at windows where images have to be shrunk to `size` until objects are too small."""
    if options.windows.is_on or options.resize == "keep" or not len(objects.images):
        return []
    seen = small_side(objects) * min(size)
    side = max(min(size) // CANVAS_MULTIPLE, 1) * CANVAS_MULTIPLE
    if seen >= SMALL_SIDE / 2 or np.median(objects.sizes.min(axis=1)) < 2 * side:
        return []
    reason = (
        f"Whole images are shrunk until small objects have a side of {seen:.0f}. With "
        f"--config.data.windows.size='({side}, {side})', `train` reads windows that are not "
        "resized, and `prepare stats` suggests what fits them."
    )
    off = options.windows.size
    return [Suggestion("data.windows.size", off, off, reason)]


def jitter_suggestions(current: tuple[int, int], value: tuple[int, int]) -> list[Suggestion]:
    """Suggest a scale jitter about the image size; nothing if it stays."""
    reason = "It follows data.image_size, so that training sees objects as large as evaluation."
    return (
        [Suggestion("data.scale_jitter.size", current, value, reason)] if value != current else []
    )


def side_suggestions(current: tuple[int, ...], scaled: tuple[int, ...]) -> list[Suggestion]:
    """Suggest short sides to draw from that follow the image size; nothing if they stay."""
    reason = "They follow the short side of data.image_size, which is the largest allowed."
    return [Suggestion("data.short_sides", current, scaled, reason)] if scaled != current else []


def length_suggestions(objects: SetObjects, recipe: Recipe) -> list[Suggestion]:
    """Suggest more epochs of a small set; nothing where windows are read, or steps are set."""
    data, train = recipe.data, recipe.train
    images = len(objects.sizes) if data.keep_empty else int((objects.counts > 0).sum())
    enough = train.enough_epochs(images)
    if not (enough and len(objects.images)) or data.windows.is_on:
        return []
    steps = round(train.epochs * images / train.batch_size)
    reason = (
        f"{images} images make {steps} steps of {train.batch_size} in {train.epochs:g} epochs; "
        f"fine-tuning takes about {FEW_STEPS} at least."
    )
    return [Suggestion("train.epochs", train.epochs, float(enough), reason)]


def _cost(before: Fit, after: Fit) -> str:
    """Say what a size costs in fit of anchors; nothing where it does not."""
    if not before.shares - after.shares > MIN_COST:
        return ""
    told = [f"{fit.at_50:.1%} / {fit.at_70:.1%}" for fit in (before, after)]
    return f" It costs fit: {' -> '.join(told)} of the boxes have an anchor with IoU 0.5 / 0.7."


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
    fits = "as many shapes as in the recipe, so that pretrained weights fit"
    return [
        Suggestion("model.anchors.sizes", current.sizes, better.sizes, gain),
        Suggestion(
            "model.anchors.aspect_ratios",
            current.aspect_ratios,
            better.aspect_ratios,
            f"{shapes}; {fits}.",
        ),
    ]


def _scaled(sides: tuple[int, ...], new: int, old: int) -> tuple[int, ...]:
    return tuple(max(side * new // old, 1) for side in sides)


def _by(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
