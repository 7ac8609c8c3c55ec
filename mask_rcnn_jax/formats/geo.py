"""Read labels on a map: GeoPackage, GeoJSON, Shapefile, and what else GDAL reads as geometries."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS
from mask_rcnn_jax.annotations.segmentation import Segmentation, show, to_rle, union
from mask_rcnn_jax.data.clip import clip_polygon
from mask_rcnn_jax.formats.coco_build import AnnotatedImage
from mask_rcnn_jax.formats.mask_codes import without
from mask_rcnn_jax.formats.reading import Converted, ImageObjects, Options
from mask_rcnn_jax.images.geo import Place, import_pyogrio, import_rasterio, read_place, reprojected

SUFFIXES = (".tif", ".tiff")
_POLYGON, _MULTI, _COLLECTION = 3, 6, 7  # in well-known binary
_NAMES = {1: "a point", 2: "a line", 4: "points", 5: "lines", _COLLECTION: "several geometries"}
Rings = list[np.ndarray]  # [n, 2] each, the first around the others


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
    paths = [p for p in sorted(where.rglob("*")) if p.suffix.lower() in SUFFIXES]
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


class _Layer:
    """The only layer of a file of geometries."""

    def __init__(self, source: Path, options: Options):
        self.source, self._pyogrio = source, import_pyogrio()
        try:
            layers = self._pyogrio.list_layers(source)
            named = [str(name) for name, kind in layers if kind is not None]
            if len(named) != 1:
                listed = ", ".join(map(show, named[:10]))
                raise ValueError(f"{source}: {len(named)} layers ({listed}), expected one")
            self._name = named[0]
            info = self._pyogrio.read_info(source, layer=self._name, force_feature_count=True)
        except (self._pyogrio.errors.DataSourceError, RuntimeError) as error:
            raise ValueError(f"{source}: not a file of geometries ({error})") from error
        self.count, crs = info["features"], info["crs"]
        self.crs = None if crs is None else import_rasterio().crs.CRS.from_user_input(crs)
        self._class_name = options.class_name
        self._attribute = None if options.class_name else _attribute(source, info, options)

    def on(self, path: Path, place: Place) -> Shapes:
        """The shapes that may lie on an image, in its coordinates."""
        if (self.crs is None) != (place.crs is None):
            names = [None if crs is None else crs.to_string() for crs in (self.crs, place.crs)]
            has = f"reference system {names[0]}, {path} has {names[1]}"
            raise ValueError(f"{self.source}: {has}; store both with theirs")
        border = reprojected(place.to_map(_border(place)), place.crs, self.crs)
        if not np.isfinite(border).all():
            raise ValueError(f"{path}: its coordinates are not on the map of {self.source}")
        box = *border.min(axis=0).tolist(), *border.max(axis=0).tolist()
        columns = [] if self._attribute is None else [self._attribute]
        given: dict[str, Any] = dict(layer=self._name, bbox=box, columns=columns, return_fids=True)
        try:
            _, numbers, geometries, values = self._pyogrio.raw.read(self.source, **given)
        except (self._pyogrio.errors.DataSourceError, RuntimeError) as error:
            raise ValueError(f"{self.source}: cannot be read ({error})") from error
        labels = [self._class_name] * len(geometries) if self._class_name else values[0].tolist()
        for number, label in zip(numbers, labels, strict=True):
            if label is None or label != label:  # NaN stands for a number that is absent
                what = f"its {self._attribute!r} is empty"
                raise ValueError(f"{self.source}: geometry {number}: {what}, expected a class")
        shapes = [self._rings(geometry, place) for geometry in geometries]
        return Shapes(shapes, [str(label) for label in labels], numbers.tolist())

    def _rings(self, geometry: bytes | None, place: Place) -> list[Rings] | str:
        if geometry is None:
            return "no geometry"
        kind, polygons = read_wkb(geometry)
        if kind not in (_POLYGON, _MULTI):
            return _NAMES.get(kind, "another geometry")
        return [[reprojected(ring, self.crs, place.crs) for ring in rings] for rings in polygons]


def _border(place: Place) -> np.ndarray:
    """Points around an image, in its pixels, [n, 2]."""
    height, width = place.size
    share = np.linspace(0, 1, 21)
    sides = [(share, 0 * share), (share, 0 * share + 1), (0 * share, share), (0 * share + 1, share)]
    return np.concatenate([np.column_stack(side) for side in sides]) * (width, height)


def _attribute(source: Path, info: dict[str, Any], options: Options) -> str:
    """The field with the class."""
    names = [str(name) for name in info["fields"]]
    listed = ", ".join(map(show, names[:20])) or "none"
    if options.attribute:
        if options.attribute not in names:
            raise ValueError(f"{source}: no attribute {options.attribute!r}, it has {listed}")
        return options.attribute
    texts = [n for n, dtype in zip(names, info["dtypes"], strict=True) if dtype == "object"]
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
