"""Images and objects as a few arrays, which take a fraction of the memory and can be shared."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, overload

import numpy as np

from mask_rcnn_jax.annotations.lvis import FREQUENCIES, IMAGE_KEYS, has_labels
from mask_rcnn_jax.annotations.segmentation import Segmentation
from mask_rcnn_jax.annotations.stream import Objects
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord
from mask_rcnn_jax.data.shared_arrays import SharedArrays

LABELS = ("absent", "not_exhaustive")  # lists of classes, LVIS's labels of images


class PackedImages(Sequence[ImageRecord]):
    """Images whose records are made when asked for; `Packer` makes the arrays.

    Arrays of the images: `heights`, `widths`, `names`, `ids`, and `object_bounds`: the objects of
    image k are rows k to k + 1 of it. Of the objects: `boxes`, `classes`, `areas`, `crowds`,
    `are_codes`, and `firsts` and `counts` of their polygons, or of the bytes of their code in
    `codes`. Likewise `part_bounds` divides `coordinates` into polygons, and `name_bounds` and
    `id_bounds` divide texts. With LVIS's labels also `absent` and `not_exhaustive`, which
    `absent_bounds` and `not_exhaustive_bounds` divide, and `frequencies` of the classes from 0 on.
    With keypoints also `keypoints` [m, P, 3], and their `keypoint_rows` of the objects, -1 for one
    of which none is labeled.
    """

    def __init__(self, arrays: SharedArrays):
        self.arrays = arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedImages, (self.arrays,)

    def by_reference(self) -> "PackedImages":
        """The same images, to be pickled for worker processes, which map the arrays."""
        return PackedImages(self.arrays.by_reference())

    def __len__(self) -> int:
        return len(self.arrays["heights"])

    @overload
    def __getitem__(self, index: int) -> ImageRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ImageRecord, ...]: ...
    def __getitem__(self, index):
        places = range(len(self))[index]  # IndexError, as of a tuple
        if isinstance(places, range):
            return tuple(map(self._record, places))
        return self._record(places)

    def id(self, index: int) -> int | str:
        """Return an image's id."""
        if "id_bounds" in self.arrays:
            return _decode(self.arrays["ids"], self.arrays["id_bounds"], index)
        return int(self.arrays["ids"][index])

    def size(self, index: int) -> tuple[int, int]:
        """Return an image's (height, width)."""
        return int(self.arrays["heights"][index]), int(self.arrays["widths"][index])

    def file_name(self, index: int) -> str:
        """Return an image's file name."""
        return _decode(self.arrays["names"], self.arrays["name_bounds"], index)

    @property
    def has_labels(self) -> bool:
        """Whether images say which classes they were searched for, as LVIS's do."""
        return "frequencies" in self.arrays

    def labels(self, name: str, index: int) -> list[int]:
        """The classes in a list of `LABELS` of an image; only with `has_labels`."""
        first, last = self.arrays[f"{name}_bounds"][index : index + 2].tolist()
        return self.arrays[name][first:last].tolist()

    def frequency(self, class_index: int) -> str | None:
        """Return "r", "c" or "f", None if unknown; only with `has_labels`."""
        frequencies = self.arrays["frequencies"]  # up to the last class of the json
        place = int(frequencies[class_index]) if class_index < len(frequencies) else -1
        return FREQUENCIES[place] if place >= 0 else None

    def objects(self, index: int) -> slice:
        """Return the rows for an image's objects."""
        first, last = self.arrays["object_bounds"][index : index + 2].tolist()
        return slice(first, last)

    def vertices(self) -> np.ndarray:
        """[N] vertices in each object's polygons, 0 for codes."""
        arrays = self.arrays
        firsts = np.where(arrays["are_codes"], 0, arrays["firsts"])
        lasts = np.where(arrays["are_codes"], 0, arrays["firsts"] + arrays["counts"])
        return (arrays["part_bounds"][lasts] - arrays["part_bounds"][firsts]) // 2

    def _record(self, index: int) -> ImageRecord:
        annotations = self.annotations(index, self.objects(index))
        return ImageRecord(self.id(index), self.file_name(index), *self.size(index), annotations)

    def annotations(self, index: int, rows: slice | np.ndarray) -> tuple[Annotation, ...]:
        """Return objects of an image by their rows."""
        arrays, size = self.arrays, self.size(index)
        columns = [
            arrays[name][rows].tolist()
            for name in ("classes", "firsts", "counts", "are_codes", "areas", "crowds")
        ]
        boxes = arrays["boxes"][rows]
        return tuple(
            Annotation(
                box,
                class_index,
                self._code(first, count, size) if is_code else self._polygons(first, count),
                area,
                crowd,
                points,
            )
            for box, class_index, first, count, is_code, area, crowd, points in zip(
                boxes, *columns, self._keypoints(rows, len(boxes)), strict=True
            )
        )

    def _keypoints(self, rows: slice | np.ndarray, count: int) -> list[np.ndarray | None]:
        if "keypoints" not in self.arrays:
            return [None] * count
        labeled = self.arrays["keypoints"]
        none = np.zeros(labeled.shape[1:], np.float32)
        places = self.arrays["keypoint_rows"][rows].tolist()
        return [labeled[place] if place >= 0 else none for place in places]

    def _polygons(self, first: int, count: int) -> Segmentation:
        bounds = self.arrays["part_bounds"][first : first + count + 1].tolist()
        coordinates = self.arrays["coordinates"]
        return tuple(coordinates[start:end] for start, end in pairwise(bounds))

    def _code(self, first: int, count: int, size: tuple[int, int]) -> Segmentation:
        return {"size": list(size), "counts": self.arrays["codes"][first : first + count].tobytes()}


class Packer:
    """Collects the objects of images and packs them."""

    def __init__(self, num_keypoints: int = 0) -> None:
        self._blocks: dict[str, list[np.ndarray]] = {
            "positions": [np.zeros(0, np.int64)],
            "images": [np.zeros(0, np.int64)],
            "classes": [np.zeros(0, np.int32)],
            "boxes": [np.zeros((0, 4), np.float32)],
            "areas": [np.zeros(0)],
            "crowds": [np.zeros(0, bool)],
            "are_codes": [np.zeros(0, bool)],
            "firsts": [np.zeros(0, np.int64)],
            "counts": [np.zeros(0, np.int64)],
        }
        self._points: list[np.ndarray] = []
        if num_keypoints:
            self._blocks["keypoint_rows"] = [np.zeros(0, np.int32)]
            self._points.append(np.zeros((0, num_keypoints, 3), np.float32))
        self._lengths, self._num_parts = [np.zeros(0, np.int64)], 0
        self._coordinates = [np.zeros(0)]
        self._codes, self._code_bytes = [np.zeros(0, np.uint8)], 0

    def add_objects(self, objects: Objects, classes: np.ndarray) -> None:
        """Add objects of the classes [n]."""
        counts = objects.num_parts
        firsts = self._num_parts + np.cumsum(counts) - counts
        given = objects.positions, objects.images, classes, objects.boxes, objects.areas
        spans = objects.crowds, np.zeros(len(counts), bool), firsts, counts
        self._add_columns(*given, *spans, *self._add_points(objects.keypoints))
        self._add_parts(objects.lengths, objects.coordinates)

    def add(self, entries: Iterable[tuple[int, int, Annotation]]) -> None:
        """Add (position, index of the image, annotation); positions order an image's objects."""
        rows, points = [], []
        for position, image, annotation in entries:
            segmentation = annotation.segmentation
            if isinstance(segmentation, dict):
                code = np.frombuffer(segmentation["counts"], np.uint8)
                span = True, self._code_bytes, len(code)
                self._codes.append(code)
                self._code_bytes += len(code)
            else:
                span = False, self._num_parts, len(segmentation)
                self._add_parts(np.array(list(map(len, segmentation)), np.int64), *segmentation)
            row = position, image, annotation.class_index, annotation.box, annotation.area
            rows.append((*row, annotation.iscrowd, *span))
            points.append(annotation.keypoints)
        if rows:
            more = self._add_points(np.array(points) if self._points else None)
            self._add_columns(*map(np.array, zip(*rows, strict=True)), *more)

    def pack(self, content: dict[str, Any], class_of: Mapping[int | str, int]) -> PackedImages:
        """Return the images of a json with the objects that were added.

        class_of: the class 1..K of each category id.
        """
        images = content["images"]
        columns = {name: np.concatenate(blocks) for name, blocks in self._blocks.items()}
        image = columns.pop("images")
        order = np.lexsort((columns.pop("positions"), image))
        arrays = {name: [column[order]] for name, column in columns.items()}
        arrays["object_bounds"] = [_bounds(np.bincount(image, minlength=len(images)))]
        arrays["part_bounds"] = [_bounds(np.concatenate(self._lengths))]
        arrays |= {"coordinates": self._coordinates, "codes": self._codes}
        arrays |= {"keypoints": self._points} if self._points else {}
        for side in ("height", "width"):
            arrays[f"{side}s"] = [np.array([int(entry[side]) for entry in images], np.int32)]
        arrays |= _texts([entry["id"] for entry in images], [e["file_name"] for e in images])
        if has_labels(content):
            arrays |= _labels(content, class_of)
        return PackedImages(SharedArrays(arrays))

    def _add_points(self, points: np.ndarray | None) -> list[np.ndarray]:
        """Keep those of objects with labeled ones, and return the column of their rows."""
        if points is None or not self._points:
            return []
        labeled = (points[..., 2] > 0).any(axis=1)
        first = sum(map(len, self._points))
        self._points.append(points[labeled].astype(np.float32))
        return [np.where(labeled, first + np.cumsum(labeled) - 1, -1)]

    def _add_columns(self, *columns: np.ndarray) -> None:
        for blocks, column in zip(self._blocks.values(), columns, strict=True):
            blocks.append(np.asarray(column, blocks[0].dtype))

    def _add_parts(self, lengths: np.ndarray, *coordinates: np.ndarray) -> None:
        self._num_parts += len(lengths)
        self._lengths.append(lengths)
        self._coordinates += [np.asarray(part, np.float64) for part in coordinates]


def concatenate(
    parts: Sequence[PackedImages],
    classes: Sequence[np.ndarray],
    ids: Sequence[int | str] | None = None,
    names: Sequence[str] | None = None,
) -> PackedImages:
    """Return the images of all parts.

    Args:
        classes: of each part, the new class of each of its classes from 0 on.
        ids: new ids of all images; None keeps those of a single part.
        names: new file names, likewise.
    """
    found = [part.arrays for part in parts]
    kept = "heights widths boxes areas crowds are_codes counts codes coordinates".split()
    arrays = {name: [a[name] for a in found] for name in kept}
    arrays["classes"] = [new[a["classes"]] for new, a in zip(classes, found, strict=True)]
    parts_before = _bounds(np.array([len(a["part_bounds"]) - 1 for a in found]))
    bytes_before = _bounds(np.array([len(a["codes"]) for a in found]))
    arrays["firsts"] = [
        a["firsts"] + np.where(a["are_codes"], bytes_before[k], parts_before[k])
        for k, a in enumerate(found)
    ]
    if all("keypoints" in a for a in found):
        before = _bounds(np.array([len(a["keypoints"]) for a in found]))
        rows = [a["keypoint_rows"] for a in found]
        arrays["keypoints"] = [a["keypoints"] for a in found]
        arrays["keypoint_rows"] = [
            np.where(r >= 0, r + before[k], -1).astype(np.int32) for k, r in enumerate(rows)
        ]
    for name in ("object_bounds", "part_bounds"):
        arrays[name] = [_bounds(np.concatenate([np.diff(a[name]) for a in found]))]
    if all(part.has_labels for part in parts):
        arrays |= _merged_labels(parts, classes)
    if ids is None or names is None:
        (part,) = parts
        ids, names = zip(*((part.id(i), part.file_name(i)) for i in range(len(part))), strict=True)
    return PackedImages(SharedArrays(arrays | _texts(ids, names)))


def _texts(ids: Sequence[int | str], names: Sequence[str]) -> dict[str, list[np.ndarray]]:
    """Pack ids and file names."""
    arrays = dict(zip(("names", "name_bounds"), _encode(names), strict=True))
    if any(isinstance(i, str) for i in ids):
        return arrays | dict(zip(("ids", "id_bounds"), _encode(ids), strict=True))
    return arrays | {"ids": [np.array(ids, np.int64)]}


def _labels(
    content: dict[str, Any], class_of: Mapping[int | str, int]
) -> dict[str, list[np.ndarray]]:
    """Pack LVIS's labels."""
    arrays = {}
    for name, key in zip(LABELS, IMAGE_KEYS, strict=True):
        ids = [entry.get(key, []) for entry in content["images"]]
        arrays |= _lists(name, [[class_of[i] for i in one] for one in ids])
    frequencies = np.full(1 + max(class_of.values(), default=0), -1, np.int8)
    for entry in content["categories"]:
        if entry.get("frequency") in FREQUENCIES:
            frequencies[class_of[entry["id"]]] = FREQUENCIES.index(entry["frequency"])
    return arrays | {"frequencies": [frequencies]}


def _merged_labels(
    parts: Sequence[PackedImages], classes: Sequence[np.ndarray]
) -> dict[str, list[np.ndarray]]:
    """The arrays of all parts; a class of several has the highest of their frequencies."""
    labels = [entry for pair in zip(parts, classes, strict=True) for entry in _new_labels(*pair)]
    arrays = {}
    for name, lists in zip(LABELS, zip(*labels, strict=True), strict=True):
        arrays |= _lists(name, lists)
    frequencies = np.full(1 + max(int(new.max()) for new in classes), -1, np.int8)
    for part, new in zip(parts, classes, strict=True):
        np.maximum.at(frequencies, new, part.arrays["frequencies"])
    return arrays | {"frequencies": [frequencies]}


def _new_labels(part: PackedImages, classes: np.ndarray) -> Iterator[tuple[list[int], list[int]]]:
    """Yield `LABELS` of each image. Of several classes that become one, an absent one leaves it
    absent only if all are; one that is not exhaustive, or not searched for, makes it so."""
    new, sources = classes.tolist(), defaultdict(set)
    for old, k in enumerate(new):
        sources[k].add(old)
    for index in range(len(part)):
        absent, partial = (set(part.labels(name, index)) for name in LABELS)
        present = set(part.arrays["classes"][part.objects(index)].tolist())
        searched = absent | present
        partial |= {old for old in present if not sources[new[old]] <= searched}
        absent = {old for old in absent if sources[new[old]] <= absent}
        yield sorted({new[old] for old in absent}), sorted({new[old] for old in partial})


def _lists(name: str, lists: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
    """The arrays of a list of classes for each image."""
    values = np.fromiter(chain.from_iterable(lists), np.int32)
    return {name: [values], f"{name}_bounds": [_bounds(np.array(list(map(len, lists)), np.int64))]}


def _bounds(lengths: np.ndarray) -> np.ndarray:
    """[n + 1] int64: item k goes from bound k to bound k + 1."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _encode(texts: Sequence[int | str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Blocks of bytes and bounds of texts, which may hold surrogates, as JSON may."""
    encoded = [str(text).encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.array(list(map(len, encoded)), np.int64)
    return [np.frombuffer(b"".join(encoded), np.uint8)], [_bounds(lengths)]


def _decode(text: np.ndarray, bounds: np.ndarray, index: int) -> str:
    return text[bounds[index] : bounds[index + 1]].tobytes().decode("utf-8", "surrogatepass")
