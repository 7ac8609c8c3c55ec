"""Read polygons of a GeoJSON, without GDAL, which may take one for a list of other files."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.reader import read_json
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.images.geo import import_rasterio

_DEFAULT = "EPSG:4326"  # longitude and latitude
# No addresses, and nothing that PROJ takes for the name of a file.
_AUTHORITY = re.compile(r"(?:urn:(?:x-)?ogc:def:crs:)?(EPSG|ESRI|OGC):(?:[\d.]*:)?(\w+)", re.I)
_WKT = re.compile(r"[A-Z]{4,}\[")
# Kinds of geometries, by their numbers in well-known binary.
_KINDS = {"Point": 1, "LineString": 2, "Polygon": 3, "MultiPoint": 4, "MultiLineString": 5}
_KINDS |= {"MultiPolygon": 6, "GeometryCollection": 7}
Rings = list[np.ndarray]  # [n, 2] each, the first around the others


class GeoJson:
    """The features of a FeatureCollection, or of one Feature.

    Attributes:
        geometries: the kind of each, -1 without one, and its polygons.
        properties: of each.
        crs: rasterio's, None where the file says that it has none.
    """

    def __init__(self, source: Path):
        content = read_json(source)
        kind = content.get("type") if isinstance(content, dict) else None
        features = content.get("features") if kind == "FeatureCollection" else [content]
        if kind not in ("FeatureCollection", "Feature") or not isinstance(features, list):
            found = f"{source}: a JSON of 'type' {show(kind)}"
            raise ValueError(f"{found}, expected a FeatureCollection of GeoJSON")
        self.crs = _crs(source, content)
        self.geometries: list[tuple[int, list[Rings]]] = []
        self.properties: list[dict[str, Any]] = []
        self._corners: list[np.ndarray] = []
        for number, feature in enumerate(features):
            feature = feature if isinstance(feature, dict) else {}
            properties = feature.get("properties") or {}
            try:
                self.geometries.append(_geometry(feature.get("geometry")))
                self._corners.append(_corners(feature.get("geometry") or {}))
                self.properties.append(dict(properties))
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
                found = f"{source}: geometry {number}: no Feature of GeoJSON"
                raise ValueError(found) from error

    def columns(self) -> dict[str, bool]:
        """The properties, and whether each has text."""
        found: dict[str, bool] = {}
        for properties in self.properties:
            for name, value in properties.items():
                found[name] = found.get(name, False) or isinstance(value, str)
        return found

    def within(
        self, box: tuple[float, ...], attribute: str | None
    ) -> tuple[list[int], list[tuple[int, list[Rings]]], list[Any]]:
        """Numbers, geometries and an attribute's values of what touches a box (x1, y1, x2, y2) by
        its own box."""
        numbers = [n for n, corners in enumerate(self._corners) if _touches(corners, box)]
        found = [self.geometries[number] for number in numbers]
        return numbers, found, [self.properties[n].get(attribute or "") for n in numbers]


def _touches(points: np.ndarray, box: tuple[float, ...]) -> bool:
    if not len(points):
        return False
    (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
    return bool(left <= box[2] and right >= box[0] and top <= box[3] and bottom >= box[1])


def _corners(geometry: dict[str, Any]) -> np.ndarray:
    """The lower and upper corner of a geometry, [2, 2], or [0, 2] without points."""
    parts = list(geometry.get("geometries") or [geometry.get("coordinates")])
    points = []
    while parts:
        part = parts.pop()
        part = part.get("coordinates") if isinstance(part, dict) else part
        if part and isinstance(part[0], int | float):
            points.append((float(part[0]), float(part[1])))
        else:
            parts += part or []
    found = np.array(points, np.float64).reshape(-1, 2)
    return np.stack([found.min(axis=0), found.max(axis=0)]) if points else found


def _crs(source: Path, content: dict[str, Any]) -> Any:
    given = content.get("crs", {"properties": {"name": _DEFAULT}})
    if given is None:
        return None
    try:
        name = str(given["properties"]["name"])
    except (TypeError, KeyError, IndexError):
        name = ""
    rasterio = import_rasterio()
    found = _AUTHORITY.fullmatch(name)
    try:
        if found:
            return rasterio.crs.CRS.from_user_input(f"{found[1].upper()}:{found[2]}")
        if _WKT.match(name):
            return rasterio.crs.CRS.from_wkt(name)
    except rasterio.errors.CRSError:
        pass
    raise ValueError(f"{source}: its 'crs' is {show(given)}, expected a name as EPSG:32633")


def _geometry(geometry: Any) -> tuple[int, list[Rings]]:
    """The kind of a geometry and its polygons."""
    if geometry is None:
        return -1, []
    kind, parts = geometry["type"], []
    if kind in ("Polygon", "MultiPolygon"):
        parts = [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
    polygons = [[_ring(ring) for ring in part] for part in parts]
    return _KINDS.get(kind, 0), [rings for rings in polygons if rings and len(rings[0])]


def _ring(points: list[list[float]]) -> np.ndarray:
    return np.array([(float(x), float(y)) for x, y, *_ in points], np.float64).reshape(-1, 2)
