"""Objects as GeoJSON, with the properties that QuPath reads and, flat, those of a map."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mask_rcnn_jax.predict.outlines import with_holes
from mask_rcnn_jax.predict.result import Result

ToMap = Callable[[np.ndarray], np.ndarray]  # of float64 [n, 2] (x, y) to [n, 2] of a map
# Decimals: a hundredth of a pixel; of a map, a nanometer, or in degrees a tenth of a millimeter.
_PIXEL_DECIMALS, _MAP_DECIMALS = 2, 9


def features(result: Result, to_map: ToMap | None = None) -> list[dict[str, Any]]:
    """Features with a Polygon or MultiPolygon with holes for each object, or with its box if the
    model finds boxes alone; an object without an area has none. `area` is that of the polygons.

    to_map: for coordinates of a map; by default they are pixels, with y down.
    """
    found, decimals = [], _MAP_DECIMALS if to_map else _PIXEL_DECIMALS
    rows = zip(result.names, result.scores, result.boxes, result.polygons(), strict=True)
    for label, (name, score, box, parts) in enumerate(rows, start=1):
        shapes = with_holes(parts) if result.has_masks else [[_corners(box)]]
        lines = [[np.asarray(line, np.float64) for line in shape] for shape in shapes]
        if to_map:
            lines = [[to_map(line) for line in shape] for shape in lines]
        polygons = [[_ring(line, k, decimals) for k, line in enumerate(shape)] for shape in lines]
        polygons = [[ring for ring in polygon if ring] for polygon in polygons if polygon[0]]
        if not polygons:
            continue
        geometry: dict[str, Any] = {"type": "MultiPolygon", "coordinates": polygons}
        if len(polygons) == 1:
            geometry = {"type": "Polygon", "coordinates": polygons[0]}
        value = round(float(score), 4)
        properties = {
            "objectType": "detection",
            "classification": {"name": name},
            "measurements": {"score": value},
            "label": label,
            "class": name,
            "score": value,
            "area": sum(
                abs(_area(shape[0])) - sum(abs(_area(h)) for h in shape[1:]) for shape in lines
            ),
        }
        found.append({"type": "Feature", "geometry": geometry, "properties": properties})
    return found


def _ring(line: np.ndarray, place: int, decimals: int) -> list[list[float]]:
    """A closed ring, rounded: the outer one, of place 0, counterclockwise and holes clockwise where
    y goes up, as RFC 7946 has it. Empty without an area."""
    points = np.round(line, decimals)
    area = _area(points)
    if not area or not np.isfinite(area):
        return []
    if (area > 0) == (place > 0):
        points = points[::-1]
    return [*points.tolist(), points[0].tolist()]


def _area(points: np.ndarray) -> float:
    """The area inside a ring, below 0 for a clockwise one where y goes up."""
    x, y = (points - points[0]).T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _corners(box: np.ndarray) -> np.ndarray:
    x1, y1, x2, y2 = box
    return np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])
