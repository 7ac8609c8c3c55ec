"""Read the annotations of a large COCO json as arrays, a few thousand at a time.

As Python objects, a json of COCO's size takes three gigabytes. Here its entries are cut out of the
bytes of the file and converted chunk by chunk. NumPy checks those that are plainly sound, with
bounds no wider than those of `faults.check_annotation`, which judges all others.
"""

import os
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mask_rcnn_jax.annotations import checks, faults
from mask_rcnn_jax.annotations.ids import is_id
from mask_rcnn_jax.annotations.keypoints import Layout
from mask_rcnn_jax.annotations.lvis import with_file_names
from mask_rcnn_jax.annotations.reader import open_annotation_file
from mask_rcnn_jax.annotations.segmentation import MAX_COORDINATE, MAX_OUTLINE, MAX_SIDES

CHUNK = 8192  # annotations
_SLICE = 1 << 24  # bytes that are checked for UTF-8 at a time
_BELOW = 1 - 1e-9  # of a bound, so that rounding makes none wider
_quietly = np.errstate(over="ignore", invalid="ignore")  # values out of bounds are not sound
_ANNOTATION_KEYS = {"annotations": checks.TRAINING_KEYS["annotations"]}


class Unusual(Exception):
    """A file that has to be read as a whole, be it to say what is wrong with it."""


class Objects(NamedTuple):
    """Sound objects that have a box and polygons."""

    positions: np.ndarray  # [n] int64 in 'annotations'
    images: np.ndarray  # [n] int64, positions in 'images'
    categories: np.ndarray  # [n] int64, positions in 'categories'
    boxes: np.ndarray  # [n, 4] float32 (x1, y1, x2, y2), clipped to the image
    areas: np.ndarray  # [n] float64
    crowds: np.ndarray  # [n] bool
    num_parts: np.ndarray  # [n] int64 polygons of each object
    lengths: np.ndarray  # [parts] int64 numbers of each polygon
    coordinates: np.ndarray  # [sum of lengths] float64 x, y, x, y, ..
    keypoints: np.ndarray | None = None  # [n, P, 3] float32, of a layout


class _Image(msgspec.Struct, gc=False):
    id: Any
    height: Any
    width: Any
    file_name: Any = msgspec.UNSET
    coco_url: Any = msgspec.UNSET
    neg_category_ids: Any = msgspec.UNSET
    not_exhaustive_category_ids: Any = msgspec.UNSET


class _File(msgspec.Struct, gc=False):
    images: list[_Image]
    categories: list[dict[str, Any]]
    annotations: list[msgspec.Raw]


class _Entry(msgspec.Struct, gc=False):
    image_id: Any
    category_id: Any
    id: Any = msgspec.UNSET
    bbox: list[float] | None = None
    segmentation: list[list[float]] | dict[str, Any] | None = None
    area: Any = None
    iscrowd: Any = 0


class _PointsEntry(_Entry, gc=False):
    keypoints: list[float] | None = None


class AnnotationStream:
    """A COCO json whose images and categories are sound.

    Attributes:
        content: 'images' and 'categories', of images the keys that training needs and LVIS's; no
            annotation.
        total: number of annotations.
    """

    def __init__(self, path: str | os.PathLike):
        """Read a file.

        Raises:
            Unusual: it is not JSON, or images or categories have problems.
            OSError: it cannot be read.
        """
        text = open_annotation_file(path)
        try:
            _check_utf8(text)  # msgspec does not look at what it skips
            file = msgspec.json.decode(text, type=_File)
        except (ValueError, RecursionError) as error:
            raise Unusual from error
        images = list(map(_image, file.images))
        sections = {"images": images, "categories": file.categories, "annotations": []}
        self.content = with_file_names(sections)
        _refuse(checks.structure_problems(self.content, checks.TRAINING_KEYS))
        _refuse(checks.id_problems(self.content))
        self.total, self._raw = len(file.annotations), file.annotations
        self._image_places = {entry["id"]: n for n, entry in enumerate(images)}
        self._category_places = {entry["id"]: n for n, entry in enumerate(file.categories)}

    def chunks(
        self, layout: Layout | None = None
    ) -> Iterator[tuple[Objects, list[tuple[int, dict[str, Any]]]]]:
        """Yield plain objects and (position, entry) of all others; may be called once.

        layout: of the keypoints to read; None reads none.

        Raises Unusual if an annotation lacks a key or holds a number that is no float, and for ids
        that are duplicate or dangling.
        """
        sizes = np.array([(int(i["height"]), int(i["width"])) for i in self.content["images"]])
        kind = _Entry if layout is None else _PointsEntry
        decoder, ids = msgspec.json.Decoder(list[kind]), _Ids()  # type: ignore[valid-type]
        for start in range(0, self.total, CHUNK):
            raw = self._raw[start : start + CHUNK]
            entries = _decode(decoder, raw)
            typed = [entry for entry in entries if entry is not None]
            ids.add([entry.id for entry in typed if entry.id is not msgspec.UNSET])
            images = _places(self._image_places, [entry.image_id for entry in typed])
            categories = _places(self._category_places, [e.category_id for e in typed])
            positions = np.flatnonzero([entry is not None for entry in entries])
            columns = positions, images, categories
            points = None if layout is None else _points(typed, layout)
            objects = _plain_objects(typed, columns, sizes[images].reshape(-1, 2), points)
            is_other = np.ones(len(raw), bool)
            is_other[objects.positions] = False
            others = []
            for n in np.flatnonzero(is_other).tolist():
                try:
                    entry = msgspec.json.decode(raw[n])
                except (ValueError, RecursionError) as error:  # such as 1e999, no float
                    raise Unusual from error
                others.append((start + n, entry))
                if entries[n] is None:
                    _refuse(checks.structure_problems({"annotations": [entry]}, _ANNOTATION_KEYS))
                    ids.add([entry["id"]] if "id" in entry else [])
                    _places(self._image_places, [entry["image_id"]])
                    _places(self._category_places, [entry["category_id"]])
            yield objects._replace(positions=objects.positions + start), others
        ids.refuse_duplicates()
        self._raw = []


class _Ids:
    """The ids of all annotations."""

    def __init__(self) -> None:
        self._numbers: list[np.ndarray] = []
        self._texts: list[str] = []

    def add(self, ids: list[Any]) -> None:
        if set(map(type, ids)) - {int}:
            if not all(map(is_id, ids)):
                raise Unusual
            self._texts += [i for i in ids if isinstance(i, str)]
            ids = [i for i in ids if not isinstance(i, str)]
        try:
            self._numbers.append(np.array(ids, np.int64))
        except OverflowError as error:
            raise Unusual from error

    def refuse_duplicates(self) -> None:
        numbers = np.sort(np.concatenate([*self._numbers, np.zeros(0, np.int64)]))
        if (numbers[1:] == numbers[:-1]).any() or len(set(self._texts)) < len(self._texts):
            raise Unusual


def _image(image: _Image) -> dict[str, Any]:
    """The entry of an image, with the keys that it has."""
    values = ((name, getattr(image, name)) for name in _Image.__struct_fields__)
    return {name: value for name, value in values if value is not msgspec.UNSET}


def _check_utf8(text: bytes) -> None:
    decoder = getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _SLICE):
        decoder.decode(memoryview(text)[start : start + _SLICE])
    decoder.decode(b"", final=True)


def _refuse(problems: Iterator[str]) -> None:
    for problem in problems:
        raise Unusual(problem)


def _decode(decoder: msgspec.json.Decoder, raw: list[msgspec.Raw]) -> list[_Entry | None]:
    """The entries; None for those of other types, such as text in a polygon."""
    try:
        return decoder.decode(b"[%b]" % b",".join(raw))
    except (ValueError, RecursionError):
        return list(chain.from_iterable(_decode_one(decoder, entry) for entry in raw))


def _decode_one(decoder: msgspec.json.Decoder, raw: msgspec.Raw) -> list[_Entry | None]:
    try:
        return decoder.decode(b"[%b]" % bytes(raw))
    except (ValueError, RecursionError):
        return [None]


def _places(places: dict[int | str, int], ids: list[Any]) -> np.ndarray:
    """[n] int64 places of these ids."""
    if set(map(type, ids)) - {int, str}:
        raise Unusual
    try:
        return np.fromiter(map(places.__getitem__, ids), np.int64, len(ids))
    except KeyError as error:
        raise Unusual from error


def _points(entries: Sequence[Any], layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    categories = [entry.category_id for entry in entries]
    return layout.read_all([entry.keypoints for entry in entries], categories)


def _plain_objects(
    entries: Sequence[_Entry],
    columns: tuple[np.ndarray, np.ndarray, np.ndarray],
    sizes: np.ndarray,
    points: tuple[np.ndarray, np.ndarray] | None = None,
) -> Objects:
    """The plain objects of entries with these first three columns and image sizes [n, 2].

    points: keypoints [n, P, 3], and which are sound [n].
    """
    looks_plain = np.array([_looks_plain(entry) for entry in entries], bool)
    if points is not None:
        looks_plain &= points[1]
    entries = [entry for entry, plain in zip(entries, looks_plain, strict=True) if plain]
    polygons: list[Any] = [entry.segmentation for entry in entries]
    parts: list[list[float]] = list(chain.from_iterable(polygons))
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    boxes = np.array([entry.bbox for entry in entries], np.float64).reshape(-1, 4)
    coordinates = np.fromiter(chain.from_iterable(parts), np.float64, int(lengths.sum()))
    num_parts = np.fromiter(map(len, polygons), np.int64, len(entries))
    sizes = sizes[looks_plain]
    clipped = _clipped(boxes, sizes)
    sound = _are_sound(boxes, clipped, sizes, num_parts, lengths, coordinates)
    sound_parts = np.repeat(sound, num_parts)
    positions, images, categories = (column[looks_plain][sound] for column in columns)
    return Objects(
        positions,
        images,
        categories,
        boxes=clipped[sound],
        areas=np.array([entry.area for entry in entries], np.float64)[sound],
        crowds=np.array([bool(entry.iscrowd) for entry in entries], bool)[sound],
        num_parts=num_parts[sound],
        lengths=lengths[sound_parts],
        coordinates=coordinates[np.repeat(sound_parts, lengths)],
        keypoints=None if points is None else points[0][looks_plain][sound],
    )


def _looks_plain(entry: _Entry) -> bool:
    box, polygons = entry.bbox, entry.segmentation
    return (
        type(polygons) is list
        and len(polygons) > 0
        and all(len(part) >= 6 and not len(part) % 2 for part in polygons)
        and box is not None
        and len(box) == 4
        and type(entry.iscrowd) in (int, bool)
        and entry.iscrowd in (0, 1)
        and checks.is_number(entry.area)
        and 0 <= entry.area <= faults.MAX_AREA
    )


@_quietly
def _clipped(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`clipped_box` of many boxes."""
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    limits = sizes[:, [1, 0, 1, 0]].astype(np.float32)
    return np.minimum(np.maximum(corners.astype(np.float32), 0), limits)


@_quietly
def _are_sound(
    boxes: np.ndarray,
    clipped: np.ndarray,
    sizes: np.ndarray,
    num_parts: np.ndarray,
    lengths: np.ndarray,
    coordinates: np.ndarray,
) -> np.ndarray:
    """[n] bool: nothing is wrong with box and polygons, by the bounds of `checks`."""
    if not len(boxes):
        return np.zeros(0, bool)
    longer, (x, y, width, height) = sizes.max(axis=1), boxes.T
    sound = (np.abs(boxes) <= faults.MAX_BOX_SIDES * longer[:, None]).all(axis=1)
    sound &= (width > 0) & (height > 0)
    sound &= (x < sizes[:, 1]) & (y < sizes[:, 0]) & (x + width > 0) & (y + height > 0)
    sides = (clipped[:, 2:] - clipped[:, :2]).min(axis=1).astype(np.float64)
    sound &= sides > 0
    starts, first_parts = np.cumsum(lengths) - lengths, np.cumsum(num_parts) - num_parts
    low, high = np.minimum.reduceat(coordinates, starts), np.maximum.reduceat(coordinates, starts)
    far = np.maximum(-np.minimum.reduceat(low, first_parts), np.maximum.reduceat(high, first_parts))
    sound &= far <= np.minimum(MAX_SIDES * longer, MAX_COORDINATE)
    # The quick bound of `outline_length`.
    outlines = np.add.reduceat(lengths * (high - low), first_parts) / 2
    sound &= outlines <= MAX_OUTLINE * _BELOW
    return sound & (outlines <= faults.MAX_RELATIVE_OUTLINE * _BELOW * sides)
