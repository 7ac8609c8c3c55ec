"""A COCO json and its folder of images: read, checked, ready for the loaders.

Two kinds of problem are told apart. What makes the file unusable as a whole (a missing key,
duplicate ids, an absent image) always stops. What spoils single annotations (a box without area, a
polygon of two points) stops too, or leaves those annotations out if the user says so.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.annotations import checks
from mask_rcnn_jax.annotations.faults import TRAIN, check_annotation
from mask_rcnn_jax.annotations.keypoints import (
    NO_KEYPOINTS,
    Keypoints,
    Layout,
    described,
    skeleton_of,
)
from mask_rcnn_jax.annotations.reader import (
    dropped_lines,
    fault_line,
    left_out,
    raise_first,
    read_ground_truth,
)
from mask_rcnn_jax.annotations.segmentation import (
    clipped_box,
    compact,
    segmentation_area,
    segmentation_box,
)
from mask_rcnn_jax.annotations.stream import AnnotationStream, Unusual
from mask_rcnn_jax.data.checking import ALL_CROWDS, inspect_coco
from mask_rcnn_jax.data.dataset import Annotation, Dataset, ImageRecord
from mask_rcnn_jax.data.packed import PackedImages, Packer
from mask_rcnn_jax.data.records import Records
from mask_rcnn_jax.data.tfrecords import TFRecords
from mask_rcnn_jax.images.bands import RGB_FILES, Bands
from mask_rcnn_jax.images.decode import decode_bytes, decode_image
from mask_rcnn_jax.images.parts import has_parts, read_part
from mask_rcnn_jax.rle import Window

# Each class costs the model a row of weights, so an id that is no count of classes is refused.
MAX_RAW_ID = 10_000


@dataclass(frozen=True)
class CocoDataset:
    """A checked COCO json. Implements the protocol `Dataset`."""

    json_path: str
    image_dir: str
    class_names: tuple[str, ...]
    category_ids: tuple[int | str, ...]  # rising; the json's, or 1..K with raw class ids
    images: Sequence[ImageRecord]
    records: Records | TFRecords | None = None  # where the images are, if not files in `image_dir`
    bad_annotations: str = "error"  # as for `load_coco`; scores leave out what training does
    boxes_only: bool = False  # objects may have no mask
    bands: Bands = Bands()
    upright: bool = False  # images are turned as their EXIF entry says
    num_left_out: int = 0  # annotations that cannot be trained on, with `bad_annotations` "skip"
    keypoints: Keypoints = NO_KEYPOINTS  # of all objects

    def image_path(self, index: int) -> str:
        return os.path.join(self.image_dir, self.images[index].file_name)

    def decode(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        """[H, W, 3] uint8 RGB of an image, as `decode_image` gives it, of the json's size; with
        names of bands what `Bands.scaled` makes of it."""
        source, path, size = self._source(index)
        given: dict[str, Any] = {"expected_size": size, "upright": self.upright}
        if self.bands.names:
            return self.bands.scaled(self.bands.read(source, name=path, **given))
        if isinstance(source, bytes):
            return decode_bytes(source, path, at_least=at_least, **given)
        return decode_image(source, at_least=at_least, **given)

    def decode_window(self, index: int, window: Window) -> np.ndarray:
        """A window (x1, y1, x2, y2) of what `decode` gives, decoded alone if `has_windows`."""
        source, path, size = self._source(index)
        part = read_part(source, path, window, self.bands, size, upright=self.upright)
        x1, y1, x2, y2 = window
        return self.decode(index)[y1:y2, x1:x2].copy() if part is None else part

    def has_windows(self, index: int) -> bool:
        """Whether the file of an image allows to decode a window alone."""
        source, path, _ = self._source(index)
        return has_parts(source, path, self.bands)

    def _source(self, index: int) -> tuple[str | bytes, str, tuple[int, int]]:
        """The file of an image, or its content, its path, and its (height, width)."""
        images = self.images
        if isinstance(images, PackedImages):  # a record has all objects
            name, size, image_id = images.file_name(index), images.size(index), images.id(index)
        else:
            record = images[index]
            name, size, image_id = record.file_name, (record.height, record.width), record.id
        path = os.path.join(self.image_dir, name)
        content = None if self.records is None else self.records.read(index, image_id)
        return path if content is None else content, path, size


def load_coco(
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike,
    *,
    bad_annotations: str = "error",
    require_annotations: bool = True,
    class_ids: str = "contiguous",
    records: Records | TFRecords | None = None,
    boxes_only: bool = False,
    bands: Bands = RGB_FILES,
    upright: bool = False,
    keypoints: Keypoints = NO_KEYPOINTS,
) -> CocoDataset:
    """Read and check a COCO json.

    Args:
        bad_annotations: "error", or "skip" (left out and counted).
        require_annotations: a json without any annotation is an error.
        class_ids: "contiguous" numbers the categories 1..K by rising id. "raw" makes the id the
            class, as torchvision and NVIDIA's TensorFlow code do: K is the highest id, and a class
            without a category is named "unused 12".
        records: hold the images; no file is looked for in `image_dir`, which only names the images
            in messages.
        boxes_only: objects need no mask; one without has an empty segmentation.
        bands: what is read of each image.
        upright: turn images as their EXIF entry says; the json has the size that they then have.
        keypoints: those to read; their skeleton is found in the json.

    Raises ValueError for a json that cannot be used, FileNotFoundError if it is not there.
    """
    if bad_annotations not in ("error", "skip"):
        raise ValueError(f"data.bad_annotations is {bad_annotations!r}, expected 'error' or 'skip'")
    if class_ids not in ("contiguous", "raw"):
        raise ValueError(f"data.class_ids is {class_ids!r}, expected 'contiguous' or 'raw'")
    json_path, image_dir = os.fspath(json_path), os.fspath(image_dir)
    folder = image_dir if records is None else None
    request = _Request(
        json_path,
        folder,
        bad_annotations == "skip",
        require_annotations,
        class_ids,
        boxes_only,
        keypoints,
    )
    images, classes, num_left_out, points = _load_stream(request) or _load_any(request)
    if points.names and require_annotations and not len(images.arrays["keypoints"]):
        expected = f"expected {', '.join(points.names)} of data.keypoints"
        raise ValueError(f"{json_path}: no annotation has labeled keypoints, {expected}")
    crowds = images.arrays["crowds"]
    if crowds.size and crowds.all():
        logging.warning("%s: %s", json_path, ALL_CROWDS % len(crowds))
    names, ids = tuple(classes.values()), tuple(classes)
    return CocoDataset(
        json_path,
        image_dir,
        names,
        ids,
        images,
        records,
        bad_annotations=bad_annotations,
        boxes_only=boxes_only,
        bands=bands,
        upright=upright,
        num_left_out=num_left_out,
        keypoints=points,
    )


class _Request(NamedTuple):
    """What `load_coco` was called with."""

    json_path: str
    image_dir: str | None
    skip_bad: bool
    require_annotations: bool
    class_ids: str
    boxes_only: bool
    keypoints: Keypoints = NO_KEYPOINTS

    def layout(self, categories: list[dict]) -> Layout | None:
        """Where the json has the keypoints to read; None if there are none to read."""
        names, offset, _ = self.keypoints
        return Layout.of(categories, names, offset) if names else None

    def points(self, categories: list[dict]) -> Keypoints:
        """The keypoints to read, with the skeleton of the json."""
        names = self.keypoints.names
        return (
            self.keypoints._replace(skeleton=skeleton_of(categories, names))
            if names
            else NO_KEYPOINTS
        )


# And the names of the classes by category id, the number of annotations that are left out, and the
# keypoints.
_Loaded = tuple[PackedImages, dict[int | str, str], int, Keypoints]


def _load_stream(request: _Request) -> _Loaded | None:
    """Load in little memory; None for a file that is not sound, of which nothing is kept."""
    try:
        return _load_sound(request)
    except Unusual:
        return None


def _load_sound(request: _Request) -> _Loaded:
    """Load in little memory; raises `Unusual` for a file that is not sound."""
    stream, packer = AnnotationStream(request.json_path), Packer(len(request.keypoints.names))
    content, required = stream.content, request.require_annotations and not stream.total
    for problem in checks.training_problems(content, request.image_dir, required):
        raise Unusual(problem)
    try:
        classes = _classes(request.json_path, content["categories"], request.class_ids)
        layout = request.layout(content["categories"])
    except ValueError as error:
        raise Unusual from error
    class_of = {category_id: k for k, category_id in enumerate(classes, start=1)}
    class_of_place = np.array([class_of[entry["id"]] for entry in content["categories"]])
    sizes = checks.image_sizes(content)
    place = {image_id: n for n, image_id in enumerate(sizes)}
    faults: list[str] = []
    dropped: list[str] = []
    for objects, others in stream.chunks(layout):
        packer.add_objects(objects, class_of_place[objects.categories])
        sound = []
        for position, entry in others:
            given = entry, sizes[entry["image_id"]], request.boxes_only, layout
            checked = check_annotation(*given)
            if not checked.fault:
                dropped += dropped_lines(entry, position, checked)
                sound.append((position, checked.entry))
            elif request.skip_bad:
                faults.append(fault_line(entry, position, checked))
            else:
                raise Unusual
        packer.add(_annotations(sound, sizes, place, class_of, layout))
    for line in left_out(request.json_path, stream.total, faults, dropped):
        logging.warning("%s", line)
    points = request.points(content["categories"])
    return packer.pack(content, class_of), classes, len(faults), points


def _load_any(request: _Request) -> _Loaded:
    """Load any file, or say what is wrong with it."""
    json_path = request.json_path
    rules: dict[str, Any] = {"boxes_only": request.boxes_only, "skip_bad": request.skip_bad}
    truth = read_ground_truth(json_path, **rules, keypoints=request.keypoints.names)
    problems = checks.training_problems(
        truth.content, request.image_dir, request.require_annotations
    )
    raise_first(json_path, problems)
    entries = truth.usable(TRAIN)
    for line in truth.left_out():
        logging.warning("%s", line)
    classes = _classes(json_path, truth.content["categories"], request.class_ids)
    class_of = {category_id: k for k, category_id in enumerate(classes, start=1)}
    place = {entry["id"]: n for n, entry in enumerate(truth.content["images"])}
    packer = Packer(len(request.keypoints.names))
    layout = request.layout(truth.content["categories"])
    packer.add(_annotations(enumerate(entries), truth.sizes, place, class_of, layout))
    num_left_out = len(truth.checked) - len(entries)
    points = request.points(truth.content["categories"])
    return packer.pack(truth.content, class_of), classes, num_left_out, points


def for_workers(dataset: Dataset) -> Dataset:
    """The same dataset, whose pickle is for worker processes: they share its annotations."""
    if isinstance(dataset, CocoDataset) and isinstance(dataset.images, PackedImages):
        return replace(dataset, images=dataset.images.by_reference())
    return dataset


def load_categories(json_path: str | os.PathLike, *, class_ids: str = "contiguous") -> list[dict]:
    """`[{"id", "name"}, ...]` of a COCO json, class 1 first; `class_ids` as for `load_coco`."""
    listed = read_coco(json_path)["categories"]
    known = {entry["id"]: described(entry) for entry in listed}
    classes = _classes(os.fspath(json_path), listed, class_ids)
    return [known.get(k, {"id": k, "name": name}) for k, name in classes.items()]


def read_coco(json_path: str | os.PathLike, *, same_annotations: bool = False) -> dict[str, Any]:
    """The content of a COCO json whose sections and ids can be looked up; ValueError if not.

    `same_annotations` lets annotations have the same id.
    """
    return read_ground_truth(json_path, same_annotations=same_annotations).content


def check_coco(json_path: str | os.PathLike, image_dir: str | os.PathLike) -> list[str]:
    """Every problem of a COCO json and its images, one line each; decodes every image."""
    return inspect_coco(json_path, image_dir).problems


def _classes(json_path: str, categories: list[dict], class_ids: str) -> dict[int | str, str]:
    """Category id -> name of the classes 1..K, in their order."""
    names = {entry["id"]: entry["name"] for entry in categories}
    if class_ids == "contiguous":
        return {category_id: names[category_id] for category_id in sorted(names)}
    for category_id in names:
        if not isinstance(category_id, int) or not 1 <= category_id <= MAX_RAW_ID:
            expected = f"data.class_ids='raw' expects whole numbers from 1 to {MAX_RAW_ID}"
            raise ValueError(
                f"{json_path}: category id {category_id!r} cannot be a class, {expected}"
            )
    return {k: names.get(k, f"unused {k}") for k in range(1, max(names, default=0) + 1)}


def _annotations(
    entries: Iterable[tuple[int, dict[str, Any]]],
    sizes: Mapping[int | str, tuple[int, int] | None],
    place: Mapping[int | str, int],
    class_of: Mapping[int | str, int],
    layout: Layout | None,
) -> Iterator[tuple[int, int, Annotation]]:
    """(position, place of the image, annotation) of sound entries at these positions."""
    for position, entry in entries:
        size = sizes[entry["image_id"]]
        assert size is not None  # `TRAINING_KEYS` has it
        points = None if layout is None else layout.read(entry)
        annotation = _annotation(entry, class_of[entry["category_id"]], size, points)
        yield position, place[entry["image_id"]], annotation


def _annotation(
    entry: dict, class_index: int, size: tuple[int, int], points: np.ndarray | None
) -> Annotation:
    """A sound annotation; what the json leaves out is made from the segmentation."""
    height, width = size
    segmentation = compact(entry.get("segmentation") or [], height, width)
    box = entry.get("bbox") or segmentation_box(segmentation, height, width)
    area = entry.get("area")
    if area is None:
        area = segmentation_area(segmentation, height, width) if segmentation else box[2] * box[3]
    crowd = bool(entry.get("iscrowd", 0))
    box = clipped_box(box, height, width)
    return Annotation(box, class_index, segmentation, float(area), crowd, points)
