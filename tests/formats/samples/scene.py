"""Two generated images and the masks of their objects, which every sample shows."""

import numpy as np

CLASSES = ("bird", "cat", "dog")
TRIANGLE = [40.0, 8.0, 72.0, 8.0, 56.0, 40.0]
FRACTIONS = [4.25, 5.5, 30.75, 6.125, 28.5, 33.25, 10.0, 36.75]
SIZES = {"street one": (60, 80), "b": (50, 70)}  # (height, width)
# Cityscapes' labels and polygons of each image: a car that a person covers, and a ring.
STREETS = {
    "street one": [
        ("road", [0, 30, 79, 30, 79, 59, 0, 59]),
        ("car", [10, 20, 60, 20, 60, 45, 10, 45]),
        ("person", [50, 10, 70, 10, 70, 55, 50, 55]),
        ("cargroup", [0, 0, 20, 0, 20, 8, 0, 8]),
    ],
    "b": [("bicycle", [8, 8, 50, 8, 50, 40, 8, 40]), ("sky", [20, 15, 40, 15, 40, 30, 20, 30])],
}


def ring() -> np.ndarray:
    """A mask [H, W] with a hole."""
    y, x = np.mgrid[:60, :80]
    radius = np.hypot(x - 20, y - 24)
    return (radius < 16) & (radius > 6)


def two_parts() -> np.ndarray:
    mask = np.zeros((60, 80), bool)
    mask[46:56, 4:24] = mask[44:58, 50:70] = True
    return mask


def bounds(mask: np.ndarray) -> tuple[int, int, int, int]:
    """y1, x1, y2, x2 of what a mask shows; the ends are behind it."""
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def inside(polygon: list[float], size: tuple[int, int]) -> np.ndarray:
    """Pixels [H, W] whose centers are in a convex polygon, clockwise on screen."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    points = np.reshape(polygon, (-1, 2))
    edges = np.roll(points, -1, axis=0) - points
    sides = [u * (y - b) - v * (x - a) for (a, b), (u, v) in zip(points, edges, strict=True)]
    return np.all(np.array(sides) >= 0, axis=0)


def objects() -> dict[str, list[tuple[str, np.ndarray, list[float] | None]]]:
    """(class, mask [H, W], polygon if it is one) of the objects of each image."""
    first, second = SIZES.values()
    return {
        "street one": [
            ("cat", ring(), None),
            ("dog", two_parts(), None),
            ("cat", inside(TRIANGLE, first), TRIANGLE),
        ],
        "b": [("bird", inside(FRACTIONS, second), FRACTIONS)],
    }


def tracks() -> list[tuple[str, list[list[float] | None]]]:
    """(class, polygon in each of seven frames of 60 x 80, if it is seen there)."""
    wing = np.array([[4, 6], [31, 7], [28, 33], [10, 37]])
    flight = [(wing + [5 * t, 2 * t]).ravel().astype(float).tolist() for t in range(7)]
    return [
        ("bird", [*flight[:3], None, None, *flight[5:]]),
        ("cat", [None, *[TRIANGLE] * 5, None]),
    ]


def image(name: str) -> np.ndarray:
    """[H, W, 3] uint8."""
    pixels = np.full((*SIZES[name], 3), 90, np.uint8)
    for place, (_, mask, _) in enumerate(objects()[name]):
        pixels[mask] = (60 + 60 * place, 200 - 50 * place, 40 * place)
    return pixels
