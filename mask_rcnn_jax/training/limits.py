"""What a recipe's limits leave out of a set: lines for the start of a run, each with the share."""

import numpy as np

from mask_rcnn_jax.data.dataset import Dataset, dataset_name
from mask_rcnn_jax.data.overview import num_objects, training_counts
from mask_rcnn_jax.recipe.recipe import Recipe

NOTABLE = 0.01  # of the objects of a step without room in a sample, below which nothing is said


def crowd_line(recipe: Recipe, train_set: Dataset) -> str:
    """Say how many annotations are crowds, which are not trained on; "" if there are none."""
    if not recipe.data.skip_crowd:
        return ""
    total = num_objects(train_set.images, len(train_set.images))
    left_out = total - int(training_counts(train_set, recipe.data)[0].sum())
    if not left_out:
        return ""
    what = "crowds or have no area" if recipe.data.inclusive_boxes else "crowds"
    share = f"{left_out} of {total} objects ({left_out / total:.1%})"
    return f"{dataset_name(train_set)}: {share} are {what}, which are not trained on"


def limit_lines(recipe: Recipe, counts: np.ndarray, val_set: Dataset | None) -> list[str]:
    """Return lines about samples in training and limits in evaluation that are too small.

    counts: objects in each training example, those beyond `data.max_instances` included.
    """
    counts = np.minimum(counts, recipe.data.max_instances)
    lines = []
    for entry, room, what in _samples(recipe):
        share = _beyond(counts, room)
        if share >= NOTABLE:
            lines.append(
                f"{entry} has room for {what} of {room} objects in an image: at each step, "
                f"{share:.1%} of the objects have none; prepare stats suggests values"
            )
    if val_set is None:
        return lines
    in_val, _ = training_counts(val_set, recipe.data)
    in_val = in_val[: recipe.eval.max_images or None]
    wanted = recipe.eval
    for entry, limit in (
        ("eval.detections_per_image", wanted.detections_per_image),
        ("eval.pre_nms_topk", wanted.pre_nms_topk),
        ("model.rpn.post_nms_topk_test", recipe.model.rpn.post_nms_topk_test),
    ):
        share = _beyond(in_val, limit)
        if share:
            lines.append(
                f"{dataset_name(val_set)}: {entry}={limit}, and an image holds up to "
                f"{int(in_val.max())} objects: {share:.1%} of the objects cannot be found"
            )
    return lines


def _samples(recipe: Recipe) -> list[tuple[str, int, str]]:
    """Entry, objects of an image that have room in a sample, and with what."""
    rpn, sampling = recipe.model.rpn, recipe.model.sampling
    positive = round(rpn.batch_size_per_image * rpn.positive_fraction)
    names = ("rpn.batch_size_per_image", rpn), ("sampling.batch_size_per_image", sampling)
    (anchors, rois) = (
        f"model.{name}={part.batch_size_per_image}, {part.positive_fraction:.0%} positive,"
        for name, part in names
    )
    found = [(anchors, positive, "anchors"), (rois, sampling.max_foreground, "RoIs")]
    if sampling.mask_rois_per_image and not recipe.learns_boxes_only:
        entry = f"model.sampling.mask_rois_per_image={sampling.mask_rois_per_image}"
        found.append((entry, sampling.mask_rois_per_image, "masks"))
    return found


def _beyond(counts: np.ndarray, limit: int) -> float:
    """The share of objects beyond a limit on those in an image."""
    return float(np.maximum(counts - limit, 0).sum() / max(counts.sum(), 1))
