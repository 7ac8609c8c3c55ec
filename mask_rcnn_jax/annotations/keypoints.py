"""Named points of an object: how COCO writes them, and what their names say.

COCO has x, y, v for each point: v is 0 not labeled, 1 labeled but hidden, 2 visible. x and y are
indices of pixels, or coordinates; `data.keypoint_offset` says which.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.annotations.segmentation import show

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
DESCRIBED = ("id", "name", "keypoints", "skeleton")  # of a category
_PAIRS = (("left", "right"), ("Left", "Right"), ("LEFT", "RIGHT"), ("l", "r"), ("L", "R"))
_SIDES = dict(_PAIRS) | {right: left for left, right in _PAIRS}
# A word of a name: left_eye, front_left_paw, "Left Eye", eyeLeft, L_Eye, hand_r.
_SIDE = re.compile(
    r"(?:(?<![A-Za-z])([Ll]eft|[Rr]ight|LEFT|RIGHT|[LlRr])|(?<=[a-z])(Left|Right|L|R))(?![a-z])"
)
MAX_COORDINATE = 1e6  # pixels


def mirror_places(names: Sequence[str]) -> tuple[int, ...]:
    """For each point, the place of the one that is seen there in a mirror image: left_x for
    right_x, or x_l for x_r. A point without such a partner keeps its own."""
    return tuple(
        names.index(_other(name)) if _other(name) in names else n for n, name in enumerate(names)
    )


def _other(name: str) -> str:
    return _SIDE.sub(lambda found: _SIDES[found[0]], name, count=1)


def skeleton_of(categories: Iterable[Mapping[str, Any]], names: Sequence[str]) -> tuple:
    """Lines between points as pairs of their places in `names`: those of the first category that
    has a skeleton between points of these names, or COCO's for COCO's names, or none."""
    place = {name: n for n, name in enumerate(names)}
    for category in categories:
        own: Any = category.get("keypoints")
        lines = category.get("skeleton")
        if not _are_names(own) or not isinstance(lines, list):
            continue
        pairs = [(own[a - 1], own[b - 1]) for a, b in filter(partial(is_line, own), lines)]
        known = [(place[a], place[b]) for a, b in pairs if a in place and b in place]
        if known:
            return tuple(known)
    pairs = [(PERSON[a], PERSON[b]) for a, b in PERSON_SKELETON]
    return tuple((place[a], place[b]) for a, b in pairs if a in place and b in place)


def is_line(own: Sequence[str], line: Any) -> bool:
    """Whether an entry of a skeleton is two places, from 1, of these names."""
    if not isinstance(line, list | tuple) or len(line) != 2:
        return False
    return all(type(place) is int and 0 < place <= len(own) for place in line)


def listed_names(category: Mapping[str, Any]) -> tuple[str, ...]:
    """The keypoints that a category lists, () if it lists none; ValueError if it is no list."""
    names = category.get("keypoints") or ()
    if not _are_names(names):
        where = f"category {show(category.get('name'))} has the keypoints {show(names)}"
        raise ValueError(f"{where}, expected a list of names")
    return tuple(names)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def described(category: Mapping[str, Any]) -> dict[str, Any]:
    """Its "id" and "name", and "keypoints" and "skeleton" where it has them."""
    return {key: category[key] for key in DESCRIBED if key in category}


class Keypoints(NamedTuple):
    """The keypoints that the objects of a dataset have."""

    names: tuple[str, ...] = ()
    offset: float = 0.0  # pixels that coordinates here are above those of a json and of results
    skeleton: tuple[tuple[int, int], ...] = ()  # lines between places in `names`


NO_KEYPOINTS = Keypoints()


class Layout(NamedTuple):
    """Where a json has the points of some names.

    A category that lists no names has those that are wanted, in their order.
    """

    names: tuple[str, ...]
    own: dict[int | str, tuple[str, ...]]  # the names that each category lists, () if it does not
    offset: float = 0.0  # added to labeled points

    @classmethod
    def of(
        cls, categories: Iterable[Mapping[str, Any]], names: tuple[str, ...], offset: float = 0.0
    ) -> "Layout":
        """Raises ValueError, with both lists, if a category lists others than the names, or what is
        no list."""
        own = {}
        for category in categories:
            listed = listed_names(category)
            if missing := [name for name in names if listed and name not in listed]:
                found = ", ".join(listed)
                raise ValueError(
                    f"category {show(category.get('name'))} has the keypoints {found}, data."
                    f"keypoints has {', '.join(names)}: {show(missing[0])} is missing"
                )
            own[category["id"]] = listed
        return cls(names, own, offset)

    def fault(self, entry: Mapping[str, Any]) -> str | None:
        """Why an annotation's keypoints cannot be used; None if they can, or if it has none."""
        own = self.own.get(entry["category_id"]) or self.names
        return keypoints_fault(entry.get("keypoints"), len(own))

    def read(self, entry: Mapping[str, Any]) -> np.ndarray:
        """[P, 3] float32 x, y, v of a sound annotation, zeros for what is not labeled."""
        return self.read_all([entry.get("keypoints")], [entry["category_id"]])[0][0]

    def pick(self, entry: Mapping[str, Any]) -> list[float]:
        """The numbers of a sound annotation as they are, in the order of the names."""
        values, own = entry.get("keypoints"), self.own.get(entry["category_id"]) or self.names
        places = [3 * own.index(name) for name in self.names]
        return [v for n in places for v in values[n : n + 3]] if values else [0.0] * 3 * len(places)

    def read_all(
        self, values: Sequence[Any], categories: Sequence[int | str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Points [n, P, 3] float32 of annotations of these categories, and which are sound [n]."""
        points = np.zeros((len(values), len(self.names), 3), np.float32)
        sound, rows = np.ones(len(values), bool), defaultdict(list)
        for n, (value, category) in enumerate(zip(values, categories, strict=True)):
            if value:
                own = self.own.get(category) or self.names
                sound[n] = len(value) == 3 * len(own)
                rows[own].extend([n] if sound[n] else [])
        for own, found in rows.items():
            given = np.array([values[n] for n in found], np.float64).reshape(-1, len(own), 3)
            fine = sound[found] = _are_sound(given)
            given = np.where(fine[:, None, None], given, 0)  # float32 may not hold the others
            points[found] = given[:, [own.index(name) for name in self.names]]
        labeled = points[..., 2:] > 0
        points[..., :2] += self.offset
        return np.where(labeled, points, 0), sound


def _are_sound(points: np.ndarray) -> np.ndarray:
    """[n] bool of points [n, P, 3]."""
    with np.errstate(invalid="ignore"):
        near = np.abs(points[..., :2]) <= MAX_COORDINATE
    return near.all(axis=(1, 2)) & np.isin(points[..., 2], (0, 1, 2)).all(axis=1)


def keypoints_fault(values: Any, count: int) -> str | None:
    """Why keypoints of an annotation cannot be used; None for sound ones, and for none."""
    if values is None or values == []:
        return None
    if not isinstance(values, list) or len(values) != 3 * count:
        found = f"{len(values)} numbers" if isinstance(values, list) else show(values)
        return f"keypoints are {found}, expected {3 * count}: x, y, v of {count} points"
    if not all(type(value) in (int, float) for value in values):
        return f"keypoints {show(values)} have a value that is not a number"
    if wrong := [v for v in values[2::3] if v not in (0, 1, 2)]:
        return f"keypoints have v {show(wrong[0])}, expected 0, 1 or 2"
    if wrong := [x for n, x in enumerate(values) if n % 3 < 2 and not abs(x) <= MAX_COORDINATE]:
        return f"keypoints have the coordinate {show(wrong[0])}, expected a finite number of pixels"
    return None


def moved(
    points: np.ndarray | None, matrix: np.ndarray, size: tuple[int, int], mirror: Sequence[int]
) -> np.ndarray | None:
    """Keypoints [P, 3] after a map of coordinates onto a canvas (height, width).

    Those beyond the canvas are not labeled any more, and are zero as all that are not. A map that
    mirrors changes left and right, by `mirror_places`.
    """
    if points is None:
        return None
    if np.linalg.det(matrix[:, :2]) < 0:
        points = points[np.array(mirror, int)]
    places = points[:, :2].astype(np.float64) @ matrix[:, :2].T + matrix[:, 2]
    new = np.concatenate([places, points[:, 2:]], axis=1)
    return inside(new, size).astype(np.float32)


def inside(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Keypoints [.., 3], zero beyond an image (height, width) and where they are not labeled."""
    within = (points[..., :2] >= 0) & (points[..., :2] <= size[::-1])
    return np.where(within.all(axis=-1, keepdims=True) & (points[..., 2:] > 0), points, 0)
