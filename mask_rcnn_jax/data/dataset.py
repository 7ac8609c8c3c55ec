"""The dataset protocol: the images and objects that training and evaluation read.

Everything is in pixels of the original image. `CocoDataset` implements the protocol for a COCO
json; docs/extending.md shows a custom dataset.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS
from mask_rcnn_jax.annotations.faults import crop_fault
from mask_rcnn_jax.annotations.ids import is_id
from mask_rcnn_jax.annotations.keypoints import NO_KEYPOINTS, Keypoints
from mask_rcnn_jax.annotations.segmentation import (
    Segmentation,
    clipped_box,
    mask_to_rle,
    segmentation_area,
    segmentation_box,
    segmentation_fault,
    segmentation_to_mask,
)
from mask_rcnn_jax.images.decode import UndecodableImage as UndecodableImage

MEMBERS = ("class_names", "images", "decode")


@dataclass(frozen=True, slots=True)
class Annotation:
    """One object of an image. Box and segmentation must describe the same object."""

    box: np.ndarray  # [4] float32 (x1, y1, x2, y2), original pixels, clipped to the image
    class_index: int  # 1..K
    # Compact form: float64 arrays of x, y, or compressed RLE; () for a box without a mask.
    segmentation: Segmentation
    area: float  # covered pixels
    iscrowd: bool = False
    # [P, 3] float32: x, y and v, which is 1 for a hidden point, 2 for a visible one; zeros for one
    # that is not labeled. None where no keypoints are read.
    keypoints: np.ndarray | None = None

    @classmethod
    def from_mask(cls, mask: np.ndarray, class_index: int, *, iscrowd: bool = False) -> Self:
        """Build an annotation from a binary mask.

        Args:
            mask: [H, W] of the image's size; bool or integer, nonzero inside the object.
            class_index: 1..K.
            iscrowd: whether the mask covers a group of objects.

        Raises:
            ValueError: the mask has no pixel inside the object, or is not [H, W].
        """
        mask = np.asarray(mask)
        if mask.ndim != 2 or not mask.any():
            raise ValueError(f"mask of shape {mask.shape} is not [H, W] with at least one pixel")
        code = mask_to_rle(mask != 0)
        box = clipped_box(segmentation_box(code, *mask.shape), *mask.shape)
        return cls(box, class_index, code, float(np.count_nonzero(mask)), iscrowd)

    @classmethod
    def from_polygons(
        cls,
        polygons: Sequence[Any],
        class_index: int,
        image_size: tuple[int, int],
        *,
        iscrowd: bool = False,
    ) -> Self:
        """Build an annotation from the outlines of an object.

        Args:
            polygons: one or more outlines, [n, 2] (x, y) or flat [x1, y1, x2, y2, ...], n >= 3.
            class_index: 1..K.
            image_size: (height, width) of the image; the box is clipped to it.
            iscrowd: whether the polygons outline a group of objects.

        Raises:
            ValueError: a polygon has too few points or a value that is not finite, or no area of
                the box is inside the image.
        """
        if np.shape(image_size) != (2,):
            raise ValueError(f"image_size is {image_size}, expected (height, width)")
        segmentation = tuple(np.asarray(part, np.float64).reshape(-1) for part in polygons)
        if fault := segmentation_fault(segmentation, *image_size, is_compact=True):
            raise ValueError(fault)
        box = clipped_box(segmentation_box(segmentation, *image_size), *image_size)
        if fault := _box_fault(box, *image_size):
            raise ValueError(fault)
        area = segmentation_area(segmentation, *image_size)
        return cls(box, class_index, segmentation, area, iscrowd)

    def with_mask(self, mask: np.ndarray) -> Self:
        """Return the same object with another mask, as `from_mask` takes it, and no keypoints."""
        return type(self).from_mask(mask, self.class_index, iscrowd=self.iscrowd)

    def with_polygons(self, polygons: Sequence[Any], image_size: tuple[int, int]) -> Self:
        """Return the same object with other outlines, as `from_polygons` takes them, and no
        keypoints."""
        kept = self.class_index, image_size
        return type(self).from_polygons(polygons, *kept, iscrowd=self.iscrowd)

    def with_keypoints(self, keypoints: Any) -> Self:
        """Return the same object with other keypoints [P, 3]."""
        return replace(self, keypoints=np.asarray(keypoints, np.float32))

    def mask(self, height: int, width: int) -> np.ndarray:
        """Return the object as a binary mask, uint8 [height, width], for an image of that size."""
        return segmentation_to_mask(self.segmentation, height, width)


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image and its objects."""

    id: int | str  # unique in its dataset; results refer to it
    file_name: str  # names the image in messages and output files
    height: int
    width: int
    annotations: tuple[Annotation, ...]


class Dataset(Protocol):
    """Images with objects. Class k (1..K) is `class_names[k - 1]`.

    Worker processes (`data.num_workers` above 0) receive a pickled copy; on Linux, those of a
    `CocoDataset` share its annotations. A dataset may also have `category_ids`, the ids of the
    classes in COCO results; they are 1..K without it. With `boxes_only`, if true, objects need no
    masks; `loss.mask_weight` is 0 then. With `keypoints`, a `Keypoints`, all objects have some.
    """

    @property
    def class_names(self) -> Sequence[str]:
        """Names of the classes, class 1 first."""

    @property
    def images(self) -> Sequence[ImageRecord]:
        """The images and their objects, without pixels."""

    def decode(self, index: int) -> np.ndarray:
        """Return the pixels of `images[index]`: uint8 [height, width, 3], RGB, or as many channels
        as `data.bands.names` has; float32 in 0..255 with `data.image_dtype` "float32".

        Raises:
            UndecodableImage: the image is damaged. Training skips it, evaluation stops.
        """


def category_ids(dataset: Dataset) -> tuple[int | str, ...]:
    """Return the category id of each class, class 1 first."""
    ids = getattr(dataset, "category_ids", None)
    ids = range(1, len(dataset.class_names) + 1) if ids is None else ids
    return tuple(i.item() if isinstance(i, np.generic) else i for i in ids)


def categories(dataset: Dataset) -> list[dict[str, Any]]:
    """Return `[{"id", "name"}, ...]`, class 1 first, with COCO's "keypoints" and "skeleton" where
    there are any."""
    pairs, points = zip(category_ids(dataset), dataset.class_names, strict=True), keypoints(dataset)
    lines = [[a + 1, b + 1] for a, b in points.skeleton]
    more = {"keypoints": list(points.names), "skeleton": lines} if points.names else {}
    return [{"id": category_id, "name": str(name), **more} for category_id, name in pairs]


def keypoints(dataset: Dataset) -> Keypoints:
    """Return what keypoints the objects of a dataset have."""
    found = getattr(dataset, "keypoints", None)
    return NO_KEYPOINTS if found is None else found


def dataset_name(dataset: Dataset) -> str:
    """Return how messages refer to a dataset: its json, or the name of its class."""
    return getattr(dataset, "json_path", None) or type(dataset).__name__


def image_name(dataset: Dataset, index: int) -> str:
    """Return how messages refer to an image: its path, or its name and dataset."""
    path = getattr(dataset, "image_path", None)
    if path is not None:
        return path(index)
    return f"{dataset_name(dataset)}: image {dataset.images[index].file_name!r}"


def check_classes(dataset: Dataset, expected: list[dict], where: str) -> None:
    """Raise ValueError if the categories of a dataset differ from those a model was trained on."""
    ours = [(category["id"], category["name"]) for category in categories(dataset)]
    theirs = [(category["id"], category["name"]) for category in expected]
    if ours != theirs:
        different = [pair for pair in ours + theirs if (pair in ours) != (pair in theirs)]
        raise ValueError(
            f"{dataset_name(dataset)} has {len(ours)} categories, {where} has {len(theirs)}; "
            f"not in both (id, name): {different[:5]}"
        )


def check_scored_keypoints(dataset: Dataset, names: tuple[str, ...]) -> None:
    """Raise ValueError if a dataset has other keypoints than a model finds, or in another order;
    not if one of the two has none."""
    found = keypoints(dataset).names
    if found and names and found != names:
        raise ValueError(
            f"{dataset_name(dataset)} has the keypoints {found}, data.keypoints is {names}"
        )


def check_dataset(dataset: Dataset, argument: str) -> None:
    """Raise ValueError, naming the argument, for the first thing that training could not use."""
    name = f"{argument} ({type(dataset).__name__})"
    missing = [member for member in MEMBERS if not hasattr(dataset, member)]
    if missing:
        expected = f"expected a dataset with {', '.join(MEMBERS)}"
        raise ValueError(f"{name} has no {', '.join(map(repr, missing))}; {expected}")
    for problem in _dataset_problems(dataset):
        raise ValueError(f"{name}: {problem}")


def is_boxes_only(dataset: Dataset) -> bool:
    """Check whether the objects of a dataset may have no mask."""
    return bool(getattr(dataset, "boxes_only", False))


def annotation_fault(
    annotation: Any, height: int, width: int, num_classes: int, *, boxes_only: bool = False
) -> str | None:
    """Return why an annotation does not fit an image of this size; None if it does."""
    if not isinstance(annotation, Annotation):
        return f"{type(annotation).__name__}, expected an Annotation"
    index = annotation.class_index
    if not isinstance(index, int | np.integer) or not 1 <= index <= num_classes:
        return f"class_index {index!r}, expected 1 to {num_classes}"
    if fault := _box_fault(annotation.box, height, width):
        return fault
    if not math.isfinite(annotation.area) or annotation.area < 0:
        return f"area {annotation.area}, expected a number of pixels"
    if fault := _keypoints_fault(annotation.keypoints):
        return fault
    segmentation = annotation.segmentation
    if boxes_only and not segmentation:
        return None
    if fault := segmentation_fault(segmentation, height, width, is_compact=True):
        return fault
    x1, y1, x2, y2 = map(float, annotation.box)
    if not isinstance(segmentation, dict) and crop_fault(segmentation, (x2 - x1, y2 - y1)):
        return f"box {[x1, y1, x2, y2]} is too small for the polygons, which reach far beyond it"
    return None


def _dataset_problems(dataset: Dataset) -> Iterator[str]:
    for member, kind in (("class_names", "names"), ("images", "ImageRecord")):
        value = getattr(dataset, member)
        if isinstance(value, str) or not hasattr(value, "__len__"):
            yield f"{member} is {value!r}, expected a sequence of {kind}"
    try:
        inspect.signature(dataset.decode).bind(0)
    except TypeError as error:
        yield f"decode: {error}, expected a method that takes an image's index"
    if not isinstance(found := keypoints(dataset), Keypoints):
        yield f"'keypoints' is {found!r}, expected an annotations.keypoints.Keypoints(names)"
    names, ids = list(dataset.class_names), category_ids(dataset)
    if not names or len(set(map(str, names))) < len(names):
        yield f"class_names is {names!r}, expected different names, at least one"
    if len(ids) != len(names) or len(set(ids)) < len(ids):
        yield f"category_ids is {ids!r}, expected {len(names)} different ids, one for each class"
    for category_id in ids:
        if not is_id(category_id):
            yield f"category_ids has {category_id!r}, expected a whole number or a string"
    if not len(dataset.images):
        yield "'images' is empty"
    seen, objects = set(), 0
    for record in dataset.images:
        if not isinstance(record, ImageRecord):
            yield f"'images' holds {type(record).__name__}, expected ImageRecord"
        where = f"image {record.file_name!r}"
        if not is_id(record.id) or record.id in seen:
            yield f"{where} has the id {record.id!r}, expected a whole number or string of its own"
        if not all(isinstance(side, int) and side > 0 for side in (record.height, record.width)):
            yield f"{where} has the size {record.height} x {record.width}, expected whole numbers"
        elif record.height * record.width > MAX_STATED_PIXELS:
            yield f"{where} has more than {MAX_STATED_PIXELS:,} pixels"
        seen.add(record.id)
        for number, annotation in enumerate(record.annotations):
            size = record.height, record.width
            boxes_only = is_boxes_only(dataset)
            if fault := annotation_fault(annotation, *size, len(names), boxes_only=boxes_only):
                yield f"{where}, object {number}: {fault}"
            elif (points := annotation.keypoints) is not None or keypoints(dataset).names:
                count = len(keypoints(dataset).names)
                if points is None or len(points) != count:
                    yield f"{where}, object {number}: expected {count} keypoints, as in 'keypoints'"
        objects += len(record.annotations)
    if not objects:
        yield "no image has an annotation, expected at least one object"


def _keypoints_fault(points: Any) -> str | None:
    if points is None:
        return None
    if np.ndim(points) != 2 or np.shape(points)[1] != 3 or not np.isfinite(points).all():
        return f"keypoints of shape {np.shape(points)}, expected finite [P, 3]: x, y, v"
    if wrong := [v for v in np.asarray(points)[:, 2].tolist() if v not in (0, 1, 2)]:
        return f"keypoints have v {wrong[0]:g}, expected 0, 1 or 2"
    return None


def _box_fault(box: Any, height: int, width: int) -> str | None:
    """Boxes are those of annotations: (x1, y1, x2, y2) inside the image."""
    values = np.asarray(box, np.float64)
    if values.shape != (4,) or not np.isfinite(values).all():
        return f"box {values.tolist()}, expected four finite numbers (x1, y1, x2, y2)"
    x1, y1, x2, y2 = values
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        size = f"{height} x {width} (height x width)"
        return f"box {values.tolist()} (x1, y1, x2, y2) has no area inside the image of {size}"
    return None
