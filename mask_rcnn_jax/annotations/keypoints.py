"""Named points of an object: how COCO writes them, and what their names say.

COCO has x, y, v for each point: v is 0 not labelled, 1 labelled but hidden, 2 visible. x and y are
indices of pixels, or coordinates; `data.keypoint_offset` says which.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PERSON = (
    "nose",
    *("left_eye", "right_eye", "left_ear", "right_ear"),
    *("left_shoulder", "right_shoulder", "left_elbow", "right_elbow", "left_wrist", "right_wrist"),
    *("left_hip", "right_hip", "left_knee", "right_knee", "left_ankle", "right_ankle"),
)  # COCO's
# Lines between COCO's points, places in `PERSON`.
PERSON_SKELETON = (
    *((15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8)),
    *((7, 9), (8, 10), (1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6)),
)
_SIDES = {"left": "right", "right": "left"}
MAX_COORDINATE = 1e6  # pixels


def mirror_places(names: Sequence[str]) -> tuple[int, ...]:
    """For each point, the place of the one that is seen there in a mirror image: left_x for
    right_x. A point without such a partner keeps its own."""
    return tuple(
        names.index(_other(name)) if _other(name) in names else n for n, name in enumerate(names)
    )


def _other(name: str) -> str:
    side, _, rest = name.partition("_")
    return f"{_SIDES[side]}_{rest}" if side in _SIDES else name


def skeleton_of(categories: Iterable[Mapping[str, Any]], names: Sequence[str]) -> tuple:
    """Lines between points as pairs of their places in `names`: those of the first category that
    has a skeleton between points of these names, or COCO's for COCO's names, or none."""
    place = {name: n for n, name in enumerate(names)}
    for category in categories:
        own, lines = category.get("keypoints") or [], category.get("skeleton") or []
        pairs = [
            (own[a - 1], own[b - 1]) for a, b in lines if max(a, b) <= len(own) and min(a, b) > 0
        ]
        known = [(place[a], place[b]) for a, b in pairs if a in place and b in place]
        if known:
            return tuple(known)
    pairs = [(PERSON[a], PERSON[b]) for a, b in PERSON_SKELETON]
    return tuple((place[a], place[b]) for a, b in pairs if a in place and b in place)
