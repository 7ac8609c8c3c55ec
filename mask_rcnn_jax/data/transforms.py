"""From an image record to one row of a `Batch`: decode, resize, pad, targets."""

from typing import NamedTuple

import cv2
import numpy as np

from mask_rcnn_jax.data.coco import Annotation, CocoDataset, check_image_size, decode_image
from mask_rcnn_jax.data.segmentation import crop_mask
from mask_rcnn_jax.structures import Batch, Targets

# Feature maps of strides 4 to 64 double exactly from level to level on such a canvas.
CANVAS_MULTIPLE = 64


class ResizePlan(NamedTuple):
    """How an image is laid on its canvas, in the upper left corner."""

    canvas: tuple[int, int]  # (H, W)
    size: tuple[int, int]  # (height, width) of the resized image
    scale: tuple[float, float]  # (y, x): network pixels per original pixel


def resize_plan(height: int, width: int, image_size: tuple[int, int], rule: str) -> ResizePlan:
    """The static canvas of an image of this size, and its size on it; the aspect ratio is kept.

    "fit": `image_size` is the canvas (H, W); the image is made as large as it allows.
    "shortest_edge": `image_size` is (short side, longest side allowed); one canvas for landscape
    and square images, one for portraits, both rounded up to a multiple of 64.
    Fractions of a pixel are cut off, as in NVIDIA's TF2 code and in torchvision.
    """
    if rule == "fit":
        canvas = limit = _fit_canvas(image_size)
    elif rule == "shortest_edge":
        short, long = sorted(image_size)
        limit = (short, long) if height <= width else (long, short)
        canvas = tuple(-(-side // CANVAS_MULTIPLE) * CANVAS_MULTIPLE for side in limit)
    else:
        raise ValueError(f"data.resize is {rule!r}, expected 'fit' or 'shortest_edge'")
    # Whole numbers throughout: int(width * scale) may lose a pixel where the product is whole.
    if limit[0] * width <= limit[1] * height:
        size = (limit[0], max(1, width * limit[0] // height))
    else:
        size = (max(1, height * limit[1] // width), limit[1])
    return ResizePlan(canvas, size, (size[0] / height, size[1] / width))


def _fit_canvas(image_size: tuple[int, int]) -> tuple[int, int]:
    if any(side <= 0 or side % CANVAS_MULTIPLE for side in image_size):
        raise ValueError(
            f"data.image_size is {tuple(image_size)}, expected (height, width), both multiples of "
            f"{CANVAS_MULTIPLE}"
        )
    return (int(image_size[0]), int(image_size[1]))


def resize_image(image: np.ndarray, plan: ResizePlan) -> np.ndarray:
    """[H, W, 3] uint8 canvas that holds the resized image, zero right of it and below."""
    canvas = np.zeros((*plan.canvas, 3), np.uint8)
    height, width = plan.size
    canvas[:height, :width] = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return canvas


def load_example(
    dataset: CocoDataset,
    index: int,
    *,
    image_size: tuple[int, int],
    resize: str,
    max_instances: int,
    mask_size: int,
) -> Batch:
    """Image `index` and its objects as a `Batch` without its B axis. Crowds are no targets."""
    record = dataset.images[index]
    path = dataset.image_path(index)
    image = decode_image(path)
    check_image_size(image, (record.height, record.width), path)
    plan = resize_plan(record.height, record.width, image_size, resize)

    objects = keep_largest(record.annotations, max_instances)
    targets = empty_targets(max_instances, mask_size)
    scale_y, scale_x = plan.scale
    for row, annotation in enumerate(objects):
        targets.boxes[row] = annotation.box * (scale_x, scale_y, scale_x, scale_y)
        targets.classes[row] = annotation.class_index
        targets.masks[row] = crop_mask(
            annotation.segmentation, annotation.box, record.height, record.width, mask_size
        )
    targets.valid[: len(objects)] = True
    return Batch(
        images=resize_image(image, plan),
        image_sizes=np.array(plan.size, np.int32),
        scales=np.array(plan.scale, np.float32),
        image_index=np.int32(index),
        targets=targets,
    )


def keep_largest(annotations: tuple[Annotation, ...], max_instances: int) -> list[Annotation]:
    """The objects that are not crowds; the largest, in the json's order, if there are too many."""
    objects = [annotation for annotation in annotations if not annotation.iscrowd]
    by_area = sorted(range(len(objects)), key=lambda i: -objects[i].area)
    return [objects[i] for i in sorted(by_area[:max_instances])]


def empty_targets(max_instances: int, mask_size: int) -> Targets:
    """Targets of one image without objects."""
    return Targets(
        boxes=np.zeros((max_instances, 4), np.float32),
        classes=np.zeros(max_instances, np.int32),
        masks=np.zeros((max_instances, mask_size, mask_size), np.uint8),
        valid=np.zeros(max_instances, bool),
    )


def padding_example(canvas: tuple[int, int], max_instances: int, mask_size: int) -> Batch:
    """The row that fills up a batch: `image_index` -1, a black image of one pixel, no object."""
    return Batch(
        images=np.zeros((*canvas, 3), np.uint8),
        image_sizes=np.ones(2, np.int32),
        scales=np.ones(2, np.float32),
        image_index=np.int32(-1),
        targets=empty_targets(max_instances, mask_size),
    )
