"""Limits that fit the number of objects in an image."""

import math
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.models.build import ModelOptions
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.report.suggestion import Suggestion, raised, round_up

MOST_IMAGES = 0.99  # of the images are below the number of objects that limits are chosen for
FULL_PROPOSALS = 2000  # up to which an object gets four proposals; beyond, two
MAX_ROIS = 1024  # sampled per image; more objects take turns
DENSE = 300  # objects in an image, above which whole images are hard to train on
ROOM = 1.2  # for examples that were not drawn


class Density(NamedTuple):
    """Objects in an image, or in an example of one."""

    usual: float  # the median
    many: int  # that 99% of the images have at most
    where: str


def count_suggestions(
    counts: np.ndarray, recipe: Recipe, examples: np.ndarray | None = None
) -> list[Suggestion]:
    """Suggest limits for the objects in an image.

    `data.max_instances` follows the set, the others only grow.

    Args:
        counts: [I] objects in each image.
        examples: [n] objects in examples of them, as training crops them; None: the images'.
    """
    if not counts.max(initial=0):
        return []
    image = _density(counts, "image")
    example = image if examples is None else _density(examples, "crop")
    detections = raised(
        "eval.detections_per_image",
        recipe.eval.detections_per_image,
        1.5 * image.many,
        10,
        f"{MOST_IMAGES:.0%} of the images have at most {image.many} objects; half as many again "
        "leave room.",
    )
    topk, why = recipe.eval.pre_nms_topk, "Two candidates for each detection."
    limits = [
        raised("eval.pre_nms_topk", topk, 2 * detections.value, 100, why),
        *_proposal_limits(recipe, example, example if recipe.data.windows.is_on else image),
        *_sample_limits(recipe.model, example),
    ]
    changed = [suggestion for suggestion in limits if suggestion.is_change]
    return [_instances(counts, recipe, examples), detections, *changed]


def _density(counts: np.ndarray, where: str) -> Density:
    return Density(float(np.median(counts)), math.ceil(np.quantile(counts, MOST_IMAGES)), where)


def _instances(counts: np.ndarray, recipe: Recipe, examples: np.ndarray | None) -> Suggestion:
    most = int(counts.max())
    if examples is not None:
        value, seen = ROOM * max(int(examples.max()), 1), f"A crop has up to {examples.max()}"
        said = f"{seen} objects in {len(examples)} draws, and an image up to {most}"
    else:
        pasting = "copy_paste" in recipe.data.augment
        pasted = ", twice as many with copy_paste" if pasting else ""
        value, said = 2 * most if pasting else most, f"An image has up to {most} objects{pasted}"
    reason = (
        f"{said}; more than this limit would not be learned. Set it higher if the set is going to "
        "grow."
    )
    if examples is None and most > DENSE:
        reason += " The recipe dense trains on crops of images with so many."
    entry, current = "data.max_instances", recipe.data.max_instances
    return Suggestion(entry, current, round_up(value, 20), reason)


def _proposal_limits(recipe: Recipe, example: Density, image: Density) -> list[Suggestion]:
    """The limits between anchors and RoIs, which have to grow with the objects in an image."""
    limits, rpn = [], recipe.model.rpn
    for mode, density in (("train", example), ("test", image)):
        if mode == "train" and rpn.post_nms_scope == "batch":
            continue  # counts per device, of which the number of images is not known here
        many = density.many
        after = max(2 * many, min(4 * many, FULL_PROPOSALS))
        each = "four" if after == 4 * many else "two" if after == 2 * many else "two to four"
        reason = (
            f"{MOST_IMAGES:.0%} of the {density.where}s have at most {many} objects; {each} "
            "proposals for each."
        )
        for stage, least, why in (
            ("post", after, reason),
            ("pre", 2 * after, "Twice as many before NMS."),
        ):
            name = f"{stage}_nms_topk_{mode}"
            limits.append(raised(f"model.rpn.{name}", getattr(rpn, name), least, 100, why))
    return limits


def _sample_limits(model: ModelOptions, example: Density) -> list[Suggestion]:
    """Samples of anchors and RoIs with room for the objects of an example."""
    rpn, sampling = model.rpn, model.sampling
    found, share = [], rpn.positive_fraction
    reason = (
        f"{MOST_IMAGES:.0%} of the {example.where}s have at most {example.many} objects; each "
        f"needs a positive anchor, and at most {share:.0%} are for objects."
    )
    entry, least = "model.rpn.batch_size_per_image", example.many / share
    found.append(raised(entry, rpn.batch_size_per_image, least, 64, reason))
    share, usual = sampling.positive_fraction, example.usual
    if usual / share > MAX_ROIS and share < 0.5:
        entry = "model.sampling.positive_fraction"
        reason = f"Objects need {usual / share:.0f} RoIs at {share:.0%}."
        found.append(Suggestion(entry, share, 0.5, reason))
        share = 0.5
    article = "An" if example.where[0] in "aeio" else "A"
    reason = (
        f"{article} {example.where} usually has {usual:.0f} objects; each needs an RoI, and at "
        f"most {share:.0%} are for objects."
    )
    if usual / share > MAX_ROIS:
        reason += f" Beyond {MAX_ROIS}, which cost memory and time, objects take turns."
    entry, least = "model.sampling.batch_size_per_image", min(usual / share, MAX_ROIS)
    found.append(raised(entry, sampling.batch_size_per_image, least, 64, reason))
    return found
