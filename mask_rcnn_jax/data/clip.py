"""Clip polygons to a rectangle exactly; concave ones may split."""

import numpy as np

MIN_SIDE = 1e-6  # pixels; what is narrower is a line along the border, or a point


def shifted(polygon: np.ndarray, corner: tuple[int, int]) -> np.ndarray:
    """[n, 2] points of a flat polygon in a window with this upper left (x, y).

    10.1 - 9 is not 1.1, and pycocotools rounds at tenths: without rounding, masks would differ.
    """
    return np.round(np.asarray(polygon, np.float64).reshape(-1, 2) - corner, 9)


def clip_polygon(points: np.ndarray, size: tuple[int, int]) -> list[np.ndarray]:
    """Return the parts of a polygon [n, 2] (x, y) inside a canvas (height, width).

    The inside of a polygon that crosses itself is given by the even-odd rule.
    """
    height, width = size
    low, high = points.min(axis=0), points.max(axis=0)
    if low.min() >= 0 and high[0] <= width and high[1] <= height:
        return [points]
    parts = [points]
    for axis, limit, sign in ((0, 0.0, 1.0), (0, width, -1.0), (1, 0.0, 1.0), (1, height, -1.0)):
        parts = [piece for part in parts for piece in _halve(part, axis, limit, sign)]
    return parts


def area(points: np.ndarray) -> float:
    """Return the area inside a polygon [n, 2].

    If it crosses itself, lobes of opposite directions cancel.
    """
    x, y = (points - points[0]).T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def _halve(points: np.ndarray, axis: int, limit: float, sign: float) -> list[np.ndarray]:
    """Return the parts on one side of a line: sign * (coordinate - limit) >= 0."""
    distance = sign * (points[:, axis] - limit)
    inside = distance >= 0
    if inside.all():
        return [points]
    if not inside.any():
        return []
    # From here on the polygon begins outside, so that every run of inside points has two ends.
    start = int(np.argmin(inside))
    points, distance, inside = (np.roll(a, -start, axis=0) for a in (points, distance, inside))
    after = np.append(inside[1:], False)
    enters, leaves = (np.flatnonzero(a).tolist() for a in (~inside & after, inside & ~after))
    chains = []
    for first, last in zip(enters, leaves, strict=True):
        ends = [_crossing(points, distance, i, axis, limit) for i in (first, last)]
        chains.append(np.concatenate([ends[:1], points[first + 1 : last + 1], ends[1:]]))
    return [loop for loop in _join(chains, 1 - axis) if np.ptp(loop, axis=0).min() > MIN_SIDE]


def _crossing(
    points: np.ndarray, distance: np.ndarray, i: int, axis: int, limit: float
) -> np.ndarray:
    """Return where the edge from point i to the next one meets the line."""
    k = (i + 1) % len(points)
    share = distance[i] / (distance[i] - distance[k])
    point = points[i] + share * (points[k] - points[i])
    point[axis] = limit
    return point


def _join(chains: list[np.ndarray], along: int) -> list[np.ndarray]:
    """Connect chains, whose ends lie on a line, into closed polygons.

    In order along the line, ends 1 and 2 bound an inner section, ends 3 and 4 the next one, ...
    """
    ends = [(chain[side][along], number, side) for number, chain in enumerate(chains)
            for side in (0, -1)]  # fmt: skip
    order = [end[1:] for end in sorted(ends)]
    partner = {}
    for one, other in zip(order[::2], order[1::2], strict=True):
        partner[one], partner[other] = other, one
    loops, left = [], set(range(len(chains)))
    while left:
        number, side, loop = min(left), 0, []  # `side` is the end at which the chain is entered
        while number in left:
            left.remove(number)
            loop.append(chains[number] if side == 0 else chains[number][::-1])
            number, side = partner[number, -1 if side == 0 else 0]
        loops.append(np.concatenate(loop))
    return loops
