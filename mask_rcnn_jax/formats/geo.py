"""Read labels on a map: GeoJSON, and GeoPackage and Shapefile by GDAL.

GDAL takes a file for what its content says, which may be a list of other files and addresses; so it
gets only the two kinds whose first bytes are no text.
"""

import os
import re
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS
from mask_rcnn_jax.annotations.reader import below, open_regular
from mask_rcnn_jax.annotations.segmentation import Segmentation, show, to_rle, union
from mask_rcnn_jax.data.clip import clip_polygon
from mask_rcnn_jax.formats.coco_build import AnnotatedImage
from mask_rcnn_jax.formats.geojson import GeoJson, Rings
from mask_rcnn_jax.formats.mask_codes import without
from mask_rcnn_jax.formats.reading import Converted, ImageObjects, Options
from mask_rcnn_jax.images.geo import Place, import_pyogrio, import_rasterio, read_place, reprojected

SUFFIXES = (".tif", ".tiff")
_POLYGON, _MULTI, _COLLECTION = 3, 6, 7  # in well-known binary
_NAMES = {1: "a point", 2: "a line", 4: "points", 5: "lines", _COLLECTION: "several geometries"}
# How files begin, and GDAL's drivers for them; a GeoPackage says so at its byte 68.
_SHAPEFILE, _SQLITE = b"\0\0\x27\x0a", b"SQLite format 3\0"
_GPKG, _DRIVERS = (b"GPKG", b"GP10", b"GP11"), ("GPKG", "ESRI Shapefile")
_OF_SHAPEFILE = ("shx", "dbf", "prj", "cpg", "cst", "qix", "sbn", "sbx", "idm", "ind", "shp.xml")
# What names a file in a reference system.
_NAMES_FILE = re.compile(r"grids=(?!@null)|\+init=|PARAMETERFILE", re.I)
# What is no table of stored columns, those of a spatial index apart.
_CALCULATED = """SELECT name FROM sqlite_master WHERE type = 'view'
    OR sql LIKE 'CREATE VIRTUAL%' AND sql NOT LIKE '% USING rtree%'
    OR type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'
    AND EXISTS (SELECT * FROM pragma_table_xinfo(name) WHERE hidden > 0)"""


class Shapes(NamedTuple):
    """The geometries of a layer that may lie on an image."""

    rings: list[list[Rings] | str]  # the polygons of each, or what it is instead
    labels: list[str]
    numbers: list[int]  # in the file


def read_geo(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read the labels of all GeoTIFFs in a folder, or of one.

    Args:
        source: a file of one layer of polygons.
        image_dir: the folder of the images, or an image; None for the folder of the labels.
        options: `attribute` has the class, the only one with text if it is None; or `class_name` is
            that of all objects.

    Polygons are cut at the border of an image; those that lie on several are in each.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read, has no class, or has another
            reference system that cannot be related to that of an image.
    """
    if source.is_dir():
        raise ValueError(f"{source}: a folder, expected a GeoPackage, GeoJSON or Shapefile")
    where = source.parent if image_dir is None else image_dir
    folder = where if where.is_dir() else where.parent
    paths = [p for p in below(where) if p.suffix.lower() in SUFFIXES]
    paths = paths if where.is_dir() else [where]
    found = {path: read_place(path) for path in paths}
    places = {path: place for path, place in found.items() if place is not None}
    if not places:
        raise ValueError(f"{where} holds no TIFF with coordinates on a map, of {len(paths)} TIFFs")
    layer = _Layer(source, options)
    left_out = [f"{path}: an image without coordinates" for path in paths if path not in places]
    used = set[int]()
    images = [_annotated(layer, path, place, left_out, used) for path, place in places.items()]
    if layer.count > len(used):
        what = "geometries lie on none of the images with coordinates"
        logging.warning("%s: %d of %d %s", source, layer.count - len(used), layer.count, what)
    return Converted(images, folder, left_out)


def _check_systems(source: Path, path: Path, crs: Any, place: Place) -> None:
    """Check that geometries and an image, or neither, have reference systems, which name no file:
    PROJ would open it."""
    if (crs is None) != (place.crs is None):
        names = [None if one is None else one.to_string() for one in (crs, place.crs)]
        has = f"reference system {names[0]}, {path} has {names[1]}"
        raise ValueError(f"{source}: {has}; store both with theirs")
    for name, one in ((source, crs), (path, place.crs)):
        if one is not None and _NAMES_FILE.search(one.to_wkt()):
            raise ValueError(f"{name}: its reference system names a file, expected one without")


class _Layer:
    """The only layer of a file of geometries."""

    def __init__(self, source: Path, options: Options):
        self.source = source
        with open_regular(source) as file:
            begin = file.read(72)
        self._json, self._class_name = None, options.class_name
        if begin.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            self._json = GeoJson(source)
            self.count, self.crs = len(self._json.geometries), self._json.crs
            columns = self._json.columns()
        else:
            _check_kind(source, begin)
            self.count, self.crs, columns = self._open()
        self._attribute = None if options.class_name else _attribute(source, columns, options)

    def _open(self) -> tuple[int, Any, dict[str, bool]]:
        """By GDAL: the number of geometries, their reference system, and the columns."""
        self._pyogrio, self._path = import_pyogrio(), os.path.abspath(self.source)
        # A NameError: of pyogrio itself, where PROJ refuses a reference system.
        self._errors = self._pyogrio.errors.DataSourceError, RuntimeError, UnicodeError, NameError
        try:
            layers = self._pyogrio.list_layers(self._path)
            named = [str(name) for name, kind in layers if kind is not None]
            if len(named) != 1:
                listed = ", ".join(map(show, named[:10]))
                raise ValueError(f"{self.source}: {len(named)} layers ({listed}), expected one")
            self._name = named[0]
            given: dict[str, Any] = dict(layer=self._name, force_feature_count=True)
            info = self._pyogrio.read_info(self._path, **given)
        except self._errors as error:
            raise ValueError(f"{self.source}: not a file of geometries ({error})") from error
        if info["driver"] not in _DRIVERS:
            raise ValueError(f"{self.source}: read as {info['driver']}, expected {_DRIVERS}")
        texts = (dtype == "object" for dtype in info["dtypes"])
        columns = dict(zip(map(str, info["fields"]), texts, strict=True))
        crs = info["crs"]
        crs = None if crs is None else import_rasterio().crs.CRS.from_user_input(crs)
        return info["features"], crs, columns

    def on(self, path: Path, place: Place) -> Shapes:
        """The shapes that may lie on an image, in its coordinates."""
        _check_systems(self.source, path, self.crs, place)
        border = reprojected(place.to_map(_border(place)), place.crs, self.crs)
        if not np.isfinite(border).all():
            raise ValueError(f"{path}: its coordinates are not on the map of {self.source}")
        box = *border.min(axis=0).tolist(), *border.max(axis=0).tolist()
        if self._json:
            numbers, found, labels = self._json.within(box, self._attribute)
        else:
            numbers, found, labels = self._read(box)
        labels = [self._class_name] * len(numbers) if self._class_name else labels
        for number, label in zip(numbers, labels, strict=True):
            if label is None or label != label:  # NaN stands for a number that is absent
                what = f"its {self._attribute!r} is empty"
                raise ValueError(f"{self.source}: geometry {number}: {what}, expected a class")
        shapes = [self._rings(kind, polygons, place) for kind, polygons in found]
        return Shapes(shapes, [str(label) for label in labels], numbers)

    def _read(
        self, box: tuple[float, ...]
    ) -> tuple[list[int], list[tuple[int, list[Rings]]], list]:
        """Numbers, geometries and labels in a box, by GDAL."""
        columns = [] if self._attribute is None else [self._attribute]
        given: dict[str, Any] = dict(layer=self._name, bbox=box, columns=columns, return_fids=True)
        try:
            _, numbers, geometries, values = self._pyogrio.raw.read(self._path, **given)
        except self._errors as error:
            raise ValueError(f"{self.source}: cannot be read ({error})") from error
        found = [(-1, []) if one is None else read_wkb(one) for one in geometries]
        return numbers.tolist(), found, values[0].tolist() if columns else []

    def _rings(self, kind: int, polygons: list[Rings], place: Place) -> list[Rings] | str:
        if kind not in (_POLYGON, _MULTI):
            return "no geometry" if kind < 0 else _NAMES.get(kind, "another geometry")
        return [[reprojected(ring, self.crs, place.crs) for ring in rings] for rings in polygons]


def _check_kind(source: Path, begin: bytes) -> None:
    """Refuse what GDAL may take for another kind, and parts of a shapefile that are no files."""
    if begin.startswith(_SHAPEFILE):
        for suffix in _OF_SHAPEFILE:
            for part in (
                source.with_suffix(f".{suffix}"),
                source.with_suffix(f".{suffix.upper()}"),
            ):
                if os.path.lexists(part):
                    open_regular(part).close()
    elif not (begin.startswith(_SQLITE) and begin[68:72] in _GPKG):
        raise ValueError(f"{source}: not a GeoPackage, GeoJSON or Shapefile by its first bytes")
    else:
        _check_tables(source)
    if "!" in os.path.abspath(source):  # behind which GDAL's paths name a member of an archive
        raise ValueError(f"{source}: a path with '!', expected one without")


def _check_tables(source: Path) -> None:
    """Refuse a GeoPackage with calculated layers, which may call anything, and never end."""
    try:
        address = f"{Path(os.path.abspath(source)).as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            wrong = database.execute(_CALCULATED).fetchone()
    except sqlite3.Error as error:
        raise ValueError(f"{source}: not a file of geometries ({error})") from error
    if wrong:
        raise ValueError(f"{source}: {show(wrong[0])} is calculated, expected tables alone")


def _border(place: Place) -> np.ndarray:
    """Points around an image, in its pixels, [n, 2]."""
    height, width = place.size
    share = np.linspace(0, 1, 21)
    sides = [(share, 0 * share), (share, 0 * share + 1), (0 * share, share), (0 * share + 1, share)]
    return np.concatenate([np.column_stack(side) for side in sides]) * (width, height)


def _attribute(source: Path, columns: dict[str, bool], options: Options) -> str:
    """The column with the class; of each is known whether it has text."""
    listed = ", ".join(map(show, list(columns)[:20])) or "none"
    if options.attribute:
        if options.attribute not in columns:
            raise ValueError(f"{source}: no attribute {options.attribute!r}, it has {listed}")
        return options.attribute
    texts = [name for name, is_text in columns.items() if is_text]
    if len(texts) == 1:
        return texts[0]
    which = f"--attribute says which of its attributes ({listed}) is the class"
    raise ValueError(f"{source}: {which}, or --class_name names that of all objects")


def _annotated(
    layer: _Layer, path: Path, place: Place, left_out: list[str], used: set[int]
) -> AnnotatedImage:
    """The objects of an image; adds to `used` the numbers of their geometries."""
    height, width = place.size
    if height * width > MAX_STATED_PIXELS:
        raise ValueError(f"{path}: {height} x {width} pixels, at most {MAX_STATED_PIXELS:,}")
    objects, shapes = ImageObjects(place.size, left_out), layer.on(path, place)
    for polygons, label, number in zip(*shapes, strict=True):
        where = f"{layer.source}: geometry {number}"
        if isinstance(polygons, str):
            objects.leave_out(where, label, polygons)
            used.add(number)
            continue
        for segmentation in _segmentations(polygons, place):
            used.add(number)
            if isinstance(segmentation, dict):
                objects.add_rle(where, label, segmentation, number)
            else:
                points = np.reshape(segmentation[0], (-1, 2)).tolist()
                objects.add_outline(where, label, points, "polygon", number)
    return AnnotatedImage(path, place.size, objects.joined())


def _segmentations(polygons: list[Rings], place: Place) -> Iterator[Segmentation]:
    """The parts of polygons on an image: outlines, or run-length codes of those with holes."""
    for rings in polygons:
        outer, *holes = ([_flat(p) for p in _on(ring, place)] for ring in rings)
        cut = [part for hole in holes for part in hole]
        if not outer:
            continue
        if cut:
            hidden = union(to_rle([part], *place.size) for part in cut)
            yield without(to_rle(outer, *place.size), hidden)
        else:
            yield from ([part] for part in outer)


def _on(ring: np.ndarray, place: Place) -> list[np.ndarray]:
    """The parts of a ring inside the image, in its pixels; none of one that is not finite."""
    points = place.to_pixels(ring)
    if len(points) > 1 and (points[0] == points[-1]).all():
        points = points[:-1]
    if len(points) < 3 or not np.isfinite(points).all():
        return []
    return clip_polygon(points, place.size)


def _flat(points: np.ndarray) -> list[float]:
    return np.round(points, 3).ravel().tolist()


def read_wkb(content: bytes) -> tuple[int, list[Rings]]:
    """Return the kind of a geometry in well-known binary, without its dimensions, and the rings
    [n, 2] of its polygons.

    Raises ValueError if it is cut off.
    """
    try:
        kind, polygons, _ = _geometry(content, 0)
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError("a geometry that is cut off") from error
    return kind, polygons


def _geometry(content: bytes, at: int) -> tuple[int, list[Rings], int]:
    order = "<" if content[at] else ">"
    (code,) = struct.unpack_from(f"{order}I", content, at + 1)
    # With a height, a measure or both: by flags, or by thousands.
    flags, code = code >> 30, code & (1 << 30) - 1
    sides = 2 + flags.bit_count() + (0, 1, 1, 2)[code // 1000 % 4]
    kind, at = code % 1000, at + 5
    polygons: list[Rings] = []
    if kind not in (_POLYGON, _MULTI):
        return kind, [], at
    (count,) = struct.unpack_from(f"{order}I", content, at)
    at += 4
    if kind == _MULTI:
        for _ in range(count):
            _, more, at = _geometry(content, at)
            polygons += more
        return kind, polygons, at
    rings = []
    for _ in range(count):
        (points,) = struct.unpack_from(f"{order}I", content, at)
        values = np.frombuffer(content, f"{order}f8", sides * points, at + 4)
        rings.append(values.reshape(points, sides)[:, :2].astype(np.float64))
        at += 4 + 8 * sides * points
    return kind, [rings] if rings else [], at
