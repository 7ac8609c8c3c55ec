"""COCO annotations out of TFRecord files that NVIDIA's examples and TAO wrote."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.checks import MAX_PIXELS
from mask_rcnn_jax.annotations.ids import MAX_NAME
from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.data import tfrecords
from mask_rcnn_jax.formats.mask_codes import crop_code
from mask_rcnn_jax.images.decode import check_header
from mask_rcnn_jax.terminal.safe_text import cut

MAX_ID = 2**63 - 1
KEY_HEIGHT, KEY_WIDTH = "image/height", "image/width"
OBJECT = "image/object/"
SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_tfrecords(
    pattern: str,
    categories: list[dict[str, Any]] | None,
    make_progress: Callable[[int], Callable[[int], None]],
) -> tuple[dict[str, Any], list[str]]:
    """The content of a COCO json for the record files that match a pattern.

    Args:
        categories: those of a COCO json; None takes the classes that occur.
        make_progress: a function of the number of bytes, that returns one to be told of each.

    Returns:
        The content, and lines on annotations that cannot be trained on.

    Raises:
        ValueError, OSError: naming file and record, for what is damaged or no such record.
    """
    paths = tfrecords.find_files(pattern)
    advance = make_progress(sum(map(os.path.getsize, paths)))
    images: list[dict] = []
    annotations: list[dict] = []
    names: dict[int, str] = {}
    for path in paths:
        for place, data in tfrecords.scan(path, check_data=True):
            record = _Record(path, place.number, data)
            images.append(record.image())
            for entry, name in record.objects(images[-1]):
                category = entry["category_id"]
                if names.setdefault(category, name) != name:
                    raise record.fault(f"class {category} is {name!r}, was {names[category]!r}")
                annotations.append({"id": len(annotations) + 1, **entry})
            advance(place.size)
    if not images:
        raise ValueError(f"{pattern}: no record in {len(paths)} files")
    _number_ids(images, annotations)
    found = [{"id": k, "name": name or f"class {k}"} for k, name in sorted(names.items())]
    content = {
        "images": images,
        "categories": found if categories is None else categories,
        "annotations": annotations,
    }
    try:
        boxes_only = not any("segmentation" in entry for entry in annotations)
        truth = read_ground_truth(content, boxes_only=boxes_only)
    except ValueError as error:
        raise ValueError(f"{pattern}: {str(error).removeprefix('ground truth: ')}") from error
    left_out = [line.removeprefix("ground truth: ") for line in truth.left_out()]
    return content, [f"{pattern}: {line}" for line in left_out]


def _number_ids(images: list[dict], annotations: list[dict]) -> None:
    """Make the ids of images numbers, as the json had them, if all of the set are some."""
    if not all(map(_is_number, (image["id"] for image in images))):
        return
    for image in images:
        image["id"] = int(image["id"])
    for entry in annotations:
        entry["image_id"] = int(entry["image_id"])


def _is_number(text: str) -> bool:
    """Whether a text is how a number from 0 that fits 64 bits is written."""
    is_short = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID))
    return is_short and str(int(text)) == text and int(text) <= MAX_ID


class _Record:
    """The features of one record."""

    def __init__(self, path: str, number: int, data: memoryview):
        self._where = path, number
        self._features = tfrecords.example_features(data, *self._where)

    def fault(self, what: str) -> ValueError:
        path, number = self._where
        return ValueError(f"{path}, record {number}: {cut(what)}")

    def image(self) -> dict[str, Any]:
        """The entry of the image."""
        height, width = self._number(KEY_HEIGHT), self._number(KEY_WIDTH)
        if min(height, width) < 1 or height * width > MAX_PIXELS:
            raise self.fault(f"an image of {height} x {width} (height x width)")
        image_id, name = self._text(tfrecords.KEY_ID), self._text(tfrecords.KEY_NAME)
        return {"id": image_id, "file_name": name, "height": height, "width": width}

    def objects(self, image: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        """Entries of the objects without ids, each with the name of its class, '' if unknown."""
        labels = tfrecords.read_ints(self._features, f"{OBJECT}class/label", *self._where)
        crowds = tfrecords.read_ints(self._features, f"{OBJECT}is_crowd", *self._where)
        areas = self._floats("area").tolist()
        texts = self._bytes(f"{OBJECT}class/text") or [b""] * len(labels)
        masks = self._bytes(f"{OBJECT}mask")
        lists: dict[str, Any] = {f"bbox/{side}": self._floats(f"bbox/{side}") for side in SIDES}
        sides = list(lists.values())
        lists |= {"is_crowd": crowds, "area": areas, "class/text": texts}
        lists |= {"mask": masks} if masks else {}
        for name, values in lists.items():
            if len(values) != len(labels):
                count = f"{len(values)} values for {len(labels)} objects"
                raise self.fault(f"{OBJECT}{name} has {count}")
        size = image["height"], image["width"]
        corners = np.array(sides, np.float64).T * np.array([*size[::-1]] * 2)
        found = []
        for n, (label, text) in enumerate(zip(labels, texts, strict=True)):
            x1, y1, x2, y2 = corners[n].tolist()
            entry = {"image_id": image["id"], "category_id": label, "iscrowd": crowds[n]}
            entry |= {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": areas[n]}
            if masks:
                entry["segmentation"] = self._segmentation(masks[n], size, n)
            found.append((entry, self._decoded(text, f"{OBJECT}class/text")))
        return found

    def _segmentation(self, png: bytes, size: tuple[int, int], n: int) -> dict[str, Any]:
        """The run-length code of a mask; a mask without a pixel has one, too."""
        path, number = self._where
        name = f"{path}, record {number}: mask {n}"
        check_header(png, name, size)
        data = np.frombuffer(png, np.uint8)
        try:
            mask = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE) if data.size else None
        except cv2.error as error:
            raise ValueError(f"{name}: {error.err or error}") from error
        if mask is None or mask.shape != size:
            raise ValueError(f"{name}: no PNG of {size[0]} x {size[1]} (height x width)")
        return crop_code(mask, (0, 0), size, name)

    def _bytes(self, key: str) -> list[bytes]:
        return tfrecords.read_bytes_list(self._features, key, *self._where)

    def _floats(self, name: str) -> np.ndarray:
        return tfrecords.read_floats(self._features, OBJECT + name, *self._where)

    def _number(self, key: str) -> int:
        values = tfrecords.read_ints(self._features, key, *self._where)
        return tfrecords.single(values, key, *self._where)

    def _text(self, key: str) -> str:
        return self._decoded(tfrecords.single(self._bytes(key), key, *self._where), key)

    def _decoded(self, text: bytes, key: str) -> str:
        try:
            return text[: 4 * MAX_NAME].decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{key} is no text in UTF-8") from error
