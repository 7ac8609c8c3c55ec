"""From an image record to one row of a `Batch`: decode, resize, pad, targets."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mask_rcnn_jax.annotations.keypoints import inside, mirror_places
from mask_rcnn_jax.data.affine import moves_full_pixels, scaling
from mask_rcnn_jax.data.augment import is_image, read_pending
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Annotation, Dataset, ImageRecord, image_name
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import ResizePlan, resize_image, resize_mask, resize_plan
from mask_rcnn_jax.data.segmentation import crop_mask, polygon_vertices
from mask_rcnn_jax.images.decode import check_image_size
from mask_rcnn_jax.structures import Batch, Targets

# Pixels that a mapped box may be off. Masks are drawn into boxes, which must not be that narrow.
ROUNDING = 0.01


def load_example(
    dataset: Dataset, index: int, options: ExampleOptions, short_side: int | None = None
) -> Batch:
    """Image `index` and its objects as a `Batch` without its B axis; `load_row` fills it."""
    record = dataset.images[index]
    canvas = resize_plan(record.height, record.width, options).canvas
    batch = empty_batch(1, canvas, options)
    load_row(batch, 0, dataset, index, options, short_side)
    return jax.tree.map(lambda leaf: leaf[0], batch)


def load_row(
    batch: Batch,
    row: int,
    dataset: Dataset,
    index: int,
    options: ExampleOptions,
    short_side: int | None = None,
    augment: Callable[[Example], Example] | None = None,
    window: Example | None = None,
) -> None:
    """Write image `index` and its objects into an empty row of a batch of its canvas.

    Args:
        short_side: the one drawn for this image; None takes that of `options.image_size`.
        augment: changes the example, in original pixels, before it is resized.
        window: takes the place of the image.

    Raises:
        UndecodableImage: the row is still empty then.
    """
    canvas = batch.images.shape[1:3]
    if augment is None and window is None:
        record = dataset.images[index]
        size = record.height, record.width
        plan = resize_plan(*size, options, short_side, canvas=canvas)
        example = read_example(
            dataset, index, options, plan.size if options.scaled_decoding else None
        )
    else:
        example = read_example(dataset, index, options) if window is None else window
        example = example if augment is None else augment(example)
        size = example.size
        plan = resize_plan(*size, options, short_side, canvas=canvas)
    batch.image_sizes[row] = plan.size
    batch.scales[row] = plan.scale
    pixel = smallest = 1.0, 1.0  # (y, x)
    if example.pending is None or moves_full_pixels(example.pending.matrix):
        example = read_pending(example, dataset, index)
        resize_image(example.image, plan, options, out=batch.images[row])
    else:  # it is resampled anyway: only once
        height, width = plan.size
        last, out = scaling(size, plan.size), batch.images[row, :height, :width]
        example = read_pending(example, dataset, index, last, out)
        pixel, plan = plan.scale, plan._replace(scale=(1.0, 1.0))
        smallest = pixel[0] + ROUNDING, pixel[1] + ROUNDING
        size = plan.size

    batch.image_index[row] = index
    objects = training_objects(example.objects, options, smallest)
    objects = keep_largest(objects, options.max_instances)
    offset = np.array([0, 0, *pixel[::-1]], np.float32) * options.inclusive_boxes
    targets = jax.tree.map(lambda leaf: leaf[row], batch.targets)
    _write_targets(targets, objects, size, plan, offset, options)


def _write_targets(
    targets: Targets,
    objects: Sequence[Annotation],
    size: tuple[int, int],
    plan: ResizePlan,
    offset: np.ndarray,
    options: ExampleOptions,
) -> None:
    """Write objects of an image of this size, which `plan` resizes, into targets without B axis.

    offset: [4], taken from their boxes.
    """
    (height, width), (scale_y, scale_x) = size, plan.scale
    for place, annotation in enumerate(objects):
        box = annotation.box - offset
        targets.boxes[place] = box * (scale_x, scale_y, scale_x, scale_y)
        targets.classes[place] = annotation.class_index
        if options.mask_frame == "box":
            crop = crop_mask(annotation.segmentation, box, height, width, options.mask_size)
            targets.masks[place] = crop
        else:
            mask = resize_mask(annotation.mask(height, width), plan)
            targets.masks[place] = mask * np.uint8(255)
        if options.max_vertices:
            vertices = polygon_vertices(annotation.segmentation, options.max_vertices)
            targets.polygons[place, : len(vertices)] = vertices * (scale_x, scale_y, 1)
        if targets.keypoints is not None and annotation.keypoints is not None:
            points = inside(annotation.keypoints, (height, width))
            targets.keypoints[place] = points * (scale_x, scale_y, 1)
    targets.valid[: len(objects)] = True


def read_example(
    dataset: Dataset,
    index: int,
    options: ExampleOptions,
    at_least: tuple[int, int] | None = None,
) -> Example:
    """Image `index` and its objects as they are.

    at_least: the pixels may be fewer, as `decode_image` has it.
    """
    record = dataset.images[index]
    image = _decode(dataset, index, record, options, at_least)
    return Example(image, record.annotations, mirror=mirror_places(options.keypoints))


def _decode(
    dataset: Dataset,
    index: int,
    record: ImageRecord,
    options: ExampleOptions,
    at_least: tuple[int, int] | None,
) -> np.ndarray:
    """The pixels of an image; ValueError unless they are as its record says."""
    if at_least and type(dataset) is CocoDataset:
        return dataset.decode(index, at_least)  # which checks the size
    image, size = dataset.decode(index), (record.height, record.width)
    if isinstance(dataset, CocoDataset):
        if image.shape[:2] != size:  # the name of an image costs a record
            check_image_size(image, size, image_name(dataset, index))
    elif fault := _fault(image, (*size, options.bands.count), options.image_dtype):
        raise ValueError(f"{image_name(dataset, index)}: decoded to {fault}")
    return image


def _fault(image: Any, shape: tuple[int, ...], dtype: str) -> str | None:
    """Return what is wrong with an image that a custom dataset decoded; None if nothing is."""
    types = ["uint8"] + ["float32"] * (dtype == "float32")
    if not is_image(image, shape[2]) or image.shape != shape or image.dtype not in types:
        found = f"{getattr(image, 'dtype', type(image).__name__)} {np.shape(image)}"
        return f"{found}, expected {' or '.join(types)} {shape} as recorded"
    if image.dtype == np.float32 and not np.isfinite(image).all():
        return "values that are not finite"
    return None


def training_objects(
    annotations: Sequence[Annotation],
    options: ExampleOptions,
    smallest: tuple[float, float] = (1.0, 1.0),
) -> list[Annotation]:
    """The objects to learn from: no crowds if so chosen, no box without area at its offset.

    smallest: (y, x) sides up to which a box has no area with `inclusive_boxes`.
    """
    return [
        annotation
        for annotation in annotations
        if not (annotation.iscrowd and options.skip_crowd)
        and not (
            options.inclusive_boxes
            and (annotation.box[2:] - annotation.box[:2] <= smallest[::-1]).any()
        )
    ]


def keep_largest(objects: Sequence[Annotation], max_instances: int) -> list[Annotation]:
    """All objects, or the largest, in the same order, if there are too many."""
    by_area = sorted(range(len(objects)), key=lambda i: -objects[i].area)
    return [objects[i] for i in sorted(by_area[:max_instances])]


def empty_batch(
    rows: int,
    canvas: tuple[int, int],
    options: ExampleOptions,
    zeros: Callable[..., np.ndarray] = np.zeros,
) -> Batch:
    """A batch of padding: `image_index` -1, black images of one pixel, no object.

    `zeros(shape, dtype)` makes the images.
    """
    objects, side = options.max_instances, options.mask_size
    mask_shape = canvas if options.mask_frame == "image" else (side, side)
    batch = Batch(
        images=zeros((rows, *canvas, options.bands.count), options.image_dtype),
        image_sizes=np.ones((rows, 2), np.int32),
        scales=np.ones((rows, 2), np.float32),
        image_index=np.full(rows, -1, np.int32),
        targets=Targets(
            boxes=np.zeros((rows, objects, 4), np.float32),
            classes=np.zeros((rows, objects), np.int32),
            masks=np.zeros((rows, objects, *mask_shape), np.uint8),
            valid=np.zeros((rows, objects), bool),
            polygons=np.zeros((rows, objects, options.max_vertices, 3), np.float32),
            keypoints=_no_keypoints((rows, objects), options),
        ),
    )
    batch.targets.polygons[..., 2] = -1
    return batch


def shared_bytes(
    rows: int, canvases: Iterable[tuple[int, int]], options: ExampleOptions, objects: float = 0.0
) -> int:
    """Bytes that a compact batch on the largest canvas, with so many objects, takes of the blocks
    that are used again: those of masks twice, since a block is for numbers of up to double."""
    largest = max(canvases, key=math.prod)
    batch = empty_batch(1, largest, replace(options, max_instances=1))
    of_objects = sum(getattr(batch.targets, name).nbytes for name in ("masks", "polygons"))
    return round(rows * batch.images.nbytes + 2 * objects * of_objects)


def _no_keypoints(shape: tuple[int, ...], options: ExampleOptions) -> np.ndarray | None:
    count = len(options.keypoints)
    return np.zeros((*shape, count, 3), np.float32) if count else None
