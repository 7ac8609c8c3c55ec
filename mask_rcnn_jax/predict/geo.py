"""Write results as GeoJSON and GeoPackage, in the coordinates of the image's file."""

import json
import shutil
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mask_rcnn_jax.images.geo import Place, import_pyogrio, is_text, read_place
from mask_rcnn_jax.predict.geojson import features
from mask_rcnn_jax.predict.result import Result

_POLYGON, _MULTI = 3, 6  # in well-known binary
_COLUMNS = {"class": object, "score": np.float64, "area": np.float64}


def check_installed(kinds: Sequence[str]) -> None:
    """Raise ValueError if a package for one of the kinds is missing."""
    if "gpkg" in kinds:
        import_pyogrio()


def write_geojson(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write a FeatureCollection, in the file's coordinates, which `crs` names; without them in
    pixels, with y down, as QuPath opens it over the image."""
    place = _place(result)
    content: dict[str, Any] = {"type": "FeatureCollection"}
    if place and place.crs is not None:
        content["crs"] = {"type": "name", "properties": {"name": _urn(place)}}
    content["features"] = features(result, place.to_map if place else None)
    _path(folder, name, "geojson").write_text(json.dumps(content), encoding="utf-8")


def write_gpkg(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write a GeoPackage of multi-polygons in the file's coordinates, or in pixels without."""
    pyogrio, place = import_pyogrio(), _place(result)
    found = features(result, place.to_map if place else None)
    columns = [
        np.array([one["properties"][name] for one in found], dtype)
        for name, dtype in _COLUMNS.items()
    ]
    geometries = np.array([_wkb(one["geometry"]) for one in found], object)
    crs = place.crs.to_wkt() if place and place.crs is not None else None
    path = _path(folder, name, "gpkg")
    path.unlink(missing_ok=True)
    given: dict[str, Any] = dict(layer="objects", driver="GPKG", geometry_type="MultiPolygon")
    with warnings.catch_warnings(), TemporaryDirectory() as other:
        warnings.filterwarnings("ignore", "'crs' was not provided")
        target = str(path) if is_text(str(path)) else f"{other}/objects.gpkg"
        pyogrio.raw.write(target, geometries, columns, list(_COLUMNS), crs=crs, **given)
        if target != str(path):
            shutil.move(target, path)


def _path(folder: Path, name: PurePosixPath, kind: str) -> Path:
    path = folder / kind / name.with_suffix(f".{kind}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _place(result: Result) -> Place | None:
    is_file = result.path and "://" not in result.path
    place = read_place(result.path) if is_file else None
    return place if place and place.size == result.image.shape[:2] else None


def _urn(place: Place) -> str:
    code = place.crs.to_epsg()
    return f"urn:ogc:def:crs:EPSG::{code}" if code else place.crs.to_string()


def _wkb(geometry: dict[str, Any]) -> bytes:
    """A Polygon or MultiPolygon as a multi-polygon in well-known binary."""
    parts = geometry["coordinates"]
    parts = [parts] if geometry["type"] == "Polygon" else parts
    blocks = [struct.pack("<BII", 1, _MULTI, len(parts))]
    for part in parts:
        blocks.append(struct.pack("<BII", 1, _POLYGON, len(part)))
        for ring in part:
            blocks += [struct.pack("<I", len(ring)), np.array(ring, "<f8").tobytes()]
    return b"".join(blocks)
