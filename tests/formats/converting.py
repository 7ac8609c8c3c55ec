"""Convert a small set of one image, and what tests of all formats look at."""

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options

SIZE = (60, 80)


def write_image(path, size=SIZE):
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((*size, 3), 90, np.uint8))


def write_values(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), values)


def convert_set(kind, source, image_dir=None, **options):
    """The COCO content, and what was left out."""
    others = {"other_classes": options.pop("other_classes", "error")}
    found = convert(kind, source, image_dir, Options(source / "out.json", **options), **others)
    return found[0], found[2]


def objects_of(content):
    """(class, mask) of each object, of images of SIZE."""
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    return [
        (names[entry["category_id"]], segmentation_to_mask(entry["segmentation"], *SIZE))
        for entry in content["annotations"]
    ]


def box(x1, y1, x2, y2):
    """A mask [H, W] of a rectangle."""
    mask = np.zeros(SIZE, np.uint8)
    mask[y1:y2, x1:x2] = 1
    return mask


def refuses(words, kind, source, *args, **options):
    """Check that a set ends in one line that names the folder and has these words."""
    with pytest.raises((ValueError, OSError), match=words) as error:
        convert_set(kind, source, *args, **options)
    assert str(source) in str(error.value) and "\n" not in str(error.value)
