"""Outlines with holes and several parts, as one closed line: for formats that know nothing else."""

from collections.abc import Sequence

import numpy as np

from mask_rcnn_jax import opencv as cv2


def outer_parts(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the parts of an object without holes, each of which a slit joins to its part.

    Args:
        parts: float [p, 2] polygons; one inside another is a hole (even-odd rule).
    """
    joined = []
    for part, *holes in with_holes(parts):
        for hole in holes:
            part = _bridged(part, hole)
        joined.append(part)
    return joined


def with_holes(parts: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return each part of an object, followed by its holes, which turn the other way.

    Args:
        parts: float [p, 2] polygons; one inside another is a hole (even-odd rule).
    """
    depths = [_depth(part, parts) for part in parts]
    outer = [_turned(part, 1) for part, depth in zip(parts, depths, strict=True) if not depth % 2]
    holes = [_turned(part, -1) for part, depth in zip(parts, depths, strict=True) if depth % 2]
    if not outer:  # each lies in another, only where polygons cross
        return [[part] for part in parts]
    found = [[part] for part in outer]
    for hole in holes:
        around = [k for k, part in enumerate(outer) if _contains(part, hole)]
        if not around:  # only where polygons cross
            continue
        # The smallest of them is its own: others hold an island in a hole.
        found[min(around, key=lambda k: cv2.contourArea(outer[k]))].append(hole)
    return found


def join_parts(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return one polygon [p, 2] for an object of at least one part: lines of no width join them."""
    first, *others = outer_parts(parts)
    for part in others:
        first = _bridged(first, part)
    return first


def _depth(part: np.ndarray, parts: Sequence[np.ndarray]) -> int:
    return sum(other is not part and _contains(other, part) for other in parts)


def _contains(part: np.ndarray, other: np.ndarray) -> bool:
    x, y = map(float, other[0])
    return cv2.pointPolygonTest(part.astype(np.float32), (x, y), False) > 0


def _turned(part: np.ndarray, sign: int) -> np.ndarray:
    """Return the polygon in the direction that gives its area this sign."""
    area = cv2.contourArea(part.astype(np.float32), oriented=True)
    return part if area * sign >= 0 else part[::-1]


def _bridged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Go around `one`, from its corner nearest to `other` around that, and back."""
    distances = np.linalg.norm(one[:, None] - other[None], axis=-1)
    i, j = np.unravel_index(np.argmin(distances), distances.shape)
    return np.concatenate([one[: i + 1], other[j:], other[: j + 1], one[i:]])
