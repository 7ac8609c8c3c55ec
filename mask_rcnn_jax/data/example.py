"""An image with its objects on the way to a batch, and what an affine map makes of it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.faults import crop_fault
from mask_rcnn_jax.annotations.keypoints import inside, moved
from mask_rcnn_jax.annotations.segmentation import Segmentation, segmentation_to_mask, to_rle
from mask_rcnn_jax.data.affine import Affine, compose, is_axis_aligned, reveals, transform
from mask_rcnn_jax.data.clip import area, clip_polygon
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.warp import warp_image, warp_mask
from mask_rcnn_jax.rle import encode_window

MIN_SIDE = 1e-5  # pixels of a box, as in Detectron2


@dataclass(frozen=True)
class Example:
    """An image and its objects, in original pixels, before it is resized."""

    # [H, W, C], uint8 or float32 in 0..255, RGB or `data.bands`; a copy, which may be written to
    image: np.ndarray
    objects: tuple[Annotation, ...]  # crowds included; must not be written to
    # A map that is yet to be applied to both. Functions of users never see one.
    pending: Affine | None = None
    mirror: tuple[int, ...] = ()  # `mirror_places` of the keypoints

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) after the pending map."""
        height, width = self.image.shape[:2]
        return (height, width) if self.pending is None else self.pending.size

    def then(self, affine: Affine) -> "Example":
        """Return the example with another map to apply after the pending one."""
        example = self
        if self.pending is not None:
            if reveals(self.pending, affine, self.image.shape[:2]):
                example = self.read()
            else:
                affine = compose(self.pending, affine)
        return replace(example, pending=affine)

    def read(self, out: np.ndarray | None = None) -> "Example":
        """Return the example with the pending map applied, its image in `out` if there is one."""
        if self.pending is None:
            return self
        image = warp_image(self.image, self.pending, out)
        size = self.image.shape[:2]
        objects = map_objects(self.objects, self.pending, size, self.mirror)
        return Example(image, objects, mirror=self.mirror)


def map_objects(
    objects: tuple[Annotation, ...],
    affine: Affine,
    size: tuple[int, int],
    mirror: tuple[int, ...] = (),
) -> tuple[Annotation, ...]:
    """Map the objects of an image (height, width); those that are cut off are left out."""
    mapped = (_mapped(annotation, affine, size, mirror) for annotation in objects)
    return tuple(annotation for annotation in mapped if annotation is not None)


def _mapped(
    annotation: Annotation, affine: Affine, size: tuple[int, int], mirror: tuple[int, ...]
) -> Annotation | None:
    if isinstance(annotation.segmentation, dict):
        segmentation, covered, extent = _map_code(annotation.segmentation, affine, size)
    else:
        segmentation, covered, extent = _map_polygons(annotation.segmentation, affine, size)
    recomputes = affine.tight or not is_axis_aligned(affine.matrix)
    if recomputes and annotation.segmentation:
        if extent is None:
            return None
        box, smallest = extent.astype(np.float32), MIN_SIDE
    else:
        box, smallest = _map_box(annotation.box, affine), 0.0
    if (box[2:] - box[:2]).min() <= smallest:
        return None
    sides = float(box[2] - box[0]), float(box[3] - box[1])
    if segmentation and not isinstance(segmentation, dict) and crop_fault(segmentation, sides):
        return None
    if covered is None:
        covered = annotation.area * abs(np.linalg.det(affine.matrix[:, :2]))
    points = annotation.keypoints
    if points is not None:
        points = moved(inside(points, size), affine.matrix, affine.size, mirror)
    return replace(
        annotation, box=box, segmentation=segmentation, area=float(covered), keypoints=points
    )


def _map_box(box: np.ndarray, affine: Affine) -> np.ndarray:
    """Return the box around the mapped box, clipped to the canvas."""
    x1, y1, x2, y2 = box.astype(np.float64)
    corners = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])
    corners = transform(affine.matrix, corners).clip(0, affine.size[::-1])
    return np.concatenate([corners.min(axis=0), corners.max(axis=0)]).astype(np.float32)


def _map_polygons(
    polygons: Any, affine: Affine, size: tuple[int, int]
) -> tuple[Segmentation, float | None, np.ndarray | None]:
    """Return the polygons on the canvas, their area if they are cut, and their extent.

    What lies beyond the image does not come onto the canvas, as it does not with codes.
    """
    whole = [np.asarray(part, np.float64).reshape(-1, 2) for part in polygons]
    shown, cut_first = _clip(whole, size)
    parts, cut_then = _clip([transform(affine.matrix, part) for part in shown], affine.size)
    if not parts:
        return (), 0.0 if polygons else None, None
    points = np.concatenate(parts)
    extent = np.concatenate([points.min(axis=0), points.max(axis=0)])
    covered = sum(map(area, parts)) if cut_first or cut_then else None
    return tuple(part.reshape(-1) for part in parts), covered, extent


def _clip(polygons: list[np.ndarray], size: tuple[int, int]) -> tuple[list[np.ndarray], bool]:
    """Return the parts of polygons inside (height, width), and whether any of them is cut."""
    clipped = [clip_polygon(points, size) for points in polygons]
    cut = any(len(p) != 1 or p[0] is not old for p, old in zip(clipped, polygons, strict=True))
    return [part for parts in clipped for part in parts], cut


def _map_code(
    code: dict[str, Any], affine: Affine, size: tuple[int, int]
) -> tuple[Segmentation, float | None, np.ndarray | None]:
    """Return the run-length code on the canvas, () without any pixel, its area and its extent."""
    x, y, width, height = coco_mask.toBbox(to_rle(code, *size))
    corners = transform(
        affine.matrix, np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])
    )
    low = np.floor(corners.min(axis=0) - 1).clip(0, affine.size[::-1]).astype(int)
    high = np.ceil(corners.max(axis=0) + 1).clip(0, affine.size[::-1]).astype(int)
    if (high <= low).any():
        return (), 0.0, None
    window = (*low.tolist(), *high.tolist())
    mask = warp_mask(segmentation_to_mask(code, *size), affine, window)
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not rows.size:
        return (), 0.0, None
    left, top = low.tolist()
    extent = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) + (left, top, left, top)
    encoded = encode_window(mask, (left, top), *affine.size)
    return encoded, float(np.count_nonzero(mask)), extent
