"""What is odd about the keypoints of a COCO json, whether a recipe reads them or not."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.checks import annotation_name
from mask_rcnn_jax.annotations.faults import BOX
from mask_rcnn_jax.annotations.keypoints import Layout, inside, is_line, keypoints_fault
from mask_rcnn_jax.annotations.reader import GroundTruth
from mask_rcnn_jax.annotations.segmentation import show

UNUSABLE = "keypoints that data.keypoints cannot use"


def other_names(categories: list[dict[str, Any]], names: tuple[str, ...]) -> list[str]:
    """Why the names that a recipe reads cannot be found in a json; nothing if they can."""
    try:
        if names:
            Layout.of(categories, names)
    except ValueError as error:
        return [str(error)]
    return []


def keypoint_warnings(truth: GroundTruth) -> Iterator[str]:
    """Find keypoints that cannot be used, that lie outside their image or their object, or that are
    miscounted, and lines of skeletons that cannot be drawn.

    Those that `truth` uses and cannot are faults of it, and not named again.
    """
    categories = truth.content["categories"]
    yield from filter(None, map(_wrong_line, categories))
    listed = {c["id"]: c.get("keypoints") for c in categories}
    found: dict[str, list[str]] = {}
    labels = False
    for position, entry in enumerate(truth.content["annotations"]):
        if values := entry.get("keypoints"):
            fault = truth.checked[position].fault
            box = None if fault and BOX in fault.spoils else entry.get("bbox")
            size = truth.sizes[entry["image_id"]]
            kind, text = _oddity(entry, values, listed, size, box)
            labels |= kind != UNUSABLE and any(v > 0 for v in values[2::3])
            if kind and not (kind == UNUSABLE and truth.keypoints):
                name = annotation_name(entry, position)
                found.setdefault(kind, []).append(f"{name}{text}")
    for kind, names in found.items():
        yield f"{len(names)} annotations have {kind}; first: {names[0]}"
    if truth.keypoints and not labels:
        yield "no annotation has labeled keypoints: there are none to learn from, or to score"


def _wrong_line(category: dict[str, Any]) -> str:
    """What is wrong with the first line of a category's skeleton that is not drawn, or ""."""
    own, lines = category.get("keypoints"), category.get("skeleton")
    if not lines or not own or not isinstance(own, list):
        return ""
    wrong = (
        [line for line in lines if not is_line(own, line)] if isinstance(lines, list) else [lines]
    )
    if not wrong:
        return ""
    what = f"category {show(category.get('name'))} has {show(wrong[0])} in its skeleton"
    return f"{what}, expected pairs of places from 1 to {len(own)}: it is not drawn"


def _oddity(
    entry: dict[str, Any],
    values: Any,
    listed: dict[int | str, Any],
    size: tuple[int, int] | None,
    box: Sequence[float] | None,
) -> tuple[str, str]:
    """What is odd about an annotation, "" for nothing, and more about it."""
    names = listed.get(entry["category_id"])
    count = len(values) // 3 if isinstance(values, list) else 1
    if fault := keypoints_fault(values, len(names) if isinstance(names, list) and names else count):
        return UNUSABLE, f": {fault}"
    points = np.reshape(np.array(values, np.float64), (-1, 3))
    labeled = points[:, 2] > 0
    if size is not None and (labeled != (inside(points, size)[:, 2] > 0)).any():
        return "labeled keypoints outside their image, which are not learned from", ""
    if box is not None and labeled.any() and not _are_near(points[labeled, :2], box).any():
        x, y = points[labeled][0, :2]
        place = f" has one at {x:g}, {y:g}, and the box {show(list(box))}"
        return "no keypoint in their box, expected x and y in pixels of the image", place
    if entry.get("num_keypoints", labeled.sum()) != labeled.sum():
        text = f" has {entry['num_keypoints']}, and {labeled.sum()} with v above 0"
        return "another num_keypoints than labeled keypoints", text
    return "", ""


def _are_near(points: np.ndarray, box: Sequence[float]) -> np.ndarray:
    """Whether points [n, 2] lie in a box (x, y, width, height) or, by a tenth of it, beside it."""
    corner, size = np.reshape(np.array(box, np.float64), (2, 2))
    return np.all(np.abs(points - corner - size / 2) <= 0.6 * size + 1, axis=1)
