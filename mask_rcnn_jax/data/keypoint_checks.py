"""What is odd about the keypoints of a COCO json, whether a recipe reads them or not."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.checks import annotation_name
from mask_rcnn_jax.annotations.keypoints import Layout, inside, keypoints_fault
from mask_rcnn_jax.annotations.reader import GroundTruth


def other_names(categories: list[dict[str, Any]], names: tuple[str, ...]) -> list[str]:
    """Why the names that a recipe reads cannot be found in a json; nothing if they can."""
    try:
        if names:
            Layout.of(categories, names)
    except ValueError as error:
        return [str(error)]
    return []


def keypoint_warnings(truth: GroundTruth) -> Iterator[str]:
    """Find keypoints that cannot be used, that lie outside their image, or that are miscounted."""
    listed = {c["id"]: c.get("keypoints") for c in truth.content["categories"]}
    found: dict[str, list[str]] = {}
    for position, entry in enumerate(truth.content["annotations"]):
        if values := entry.get("keypoints"):
            kind, text = _oddity(entry, values, listed, truth.sizes[entry["image_id"]])
            if kind:
                name = annotation_name(entry, position)
                found.setdefault(kind, []).append(f"{name}{text}")
    for kind, names in found.items():
        yield f"{len(names)} annotations have {kind}; first: {names[0]}"


def _oddity(
    entry: dict[str, Any],
    values: Any,
    listed: dict[int | str, Any],
    size: tuple[int, int] | None,
) -> tuple[str, str]:
    """What is odd about an annotation, "" for nothing, and more about it."""
    names = listed.get(entry["category_id"])
    count = len(values) // 3 if isinstance(values, list) else 1
    if fault := keypoints_fault(values, len(names) if isinstance(names, list) and names else count):
        return "keypoints that data.keypoints cannot use", f": {fault}"
    points = np.reshape(np.array(values, np.float64), (-1, 3))
    labeled = points[:, 2] > 0
    if size is not None and (labeled != (inside(points, size)[:, 2] > 0)).any():
        return "labeled keypoints outside their image, which are not learned from", ""
    if entry.get("num_keypoints", labeled.sum()) != labeled.sum():
        text = f" has {entry['num_keypoints']}, and {labeled.sum()} with v above 0"
        return "another num_keypoints than labeled keypoints", text
    return "", ""
