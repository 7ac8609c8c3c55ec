"""The objects found in one image, for use in Python."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np

from mask_rcnn_jax.evaluation import visualize
from mask_rcnn_jax.evaluation.encode import ImageDetections, encode_image
from mask_rcnn_jax.evaluation.paste import paste_mask


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """N objects in one image, by descending score; coordinates are its pixels.

    `len(result)` is N. `result[k]`, `result[:5]` and `result[result.scores > 0.7]` are results
    with some objects, and iterating gives one for each.

    Attributes:
        image: uint8 [H, W, 3] RGB.
        boxes: [N, 4] float32 (x1, y1, x2, y2), inside the image.
        scores: [N] float32.
        classes: [N] int32, 1..K; class k is `categories[k - 1]`.
        mask_grids: [N, M, M] float32 probabilities on a grid over each box; None for a model of
            boxes alone.
        categories: {"id", "name"} for each class.
        path: the image's file, "" for an array.
        paste: how a grid becomes pixels, see `evaluation.paste.paste_mask`.
        inclusive_boxes: x2 and y2 are the last pixels of a box, so that its width in COCO's format
            is x2 - x1 + 1.
    """

    image: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    mask_grids: np.ndarray | None
    categories: Sequence[Mapping[str, Any]]
    path: str = ""
    paste: str = "continuous"
    inclusive_boxes: bool = False

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: int | slice | np.ndarray | Sequence[int]) -> "Result":
        """Select objects by number, slice, numbers or a boolean mask [N].

        Raises IndexError for a number beyond the objects or a mask with another length.
        """
        if isinstance(rows, int | np.integer):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"object {rows} of {len(self)}")
            rows = [int(rows)]
        if not isinstance(rows, slice):
            rows = np.asarray(rows)
            rows = rows if rows.size else np.zeros(0, int)  # an empty list would be of floats
        grids = self.mask_grids
        return replace(
            self,
            boxes=self.boxes[rows],
            scores=self.scores[rows],
            classes=self.classes[rows],
            mask_grids=None if grids is None else grids[rows],
        )

    def __iter__(self) -> Iterator["Result"]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        height, width = self.image.shape[:2]
        counts = ", ".join(f"{n} {name}" for name, n in Counter(self.names).most_common())
        of = f" {self.path}" if self.path else ""
        return f"<Result{of} {height} x {width}: {counts or 'no objects'}>"

    @property
    def names(self) -> list[str]:
        """Class name for each object."""
        return [str(self.categories[k - 1]["name"]) for k in self.classes.tolist()]

    @cached_property
    def masks(self) -> np.ndarray | None:
        """Masks [N, H, W] bool, pasted at first use; None for a model of boxes alone.

        Takes N bytes per pixel. `rle` and `polygons` need no full-size masks.
        """
        if self.mask_grids is None:
            return None
        height, width = self.image.shape[:2]
        masks = np.zeros((len(self), height, width), bool)
        for mask, grid, box in zip(masks, self.mask_grids, self.boxes, strict=True):
            crop, (x, y) = paste_mask(grid, box, height, width, rule=self.paste)
            mask[y : y + crop.shape[0], x : x + crop.shape[1]] = crop
        return masks

    def polygons(self) -> list[list[np.ndarray]]:
        """Outlines for each object: float32 [p, 2] (x, y) with sub-pixel corners, as drawn.

        An object may have several parts; a polygon inside another is a hole (even-odd rule).
        Without a mask or without area there is none.
        """
        if self.mask_grids is None:
            return [[] for _ in self.scores]
        pairs = zip(self.mask_grids, self.boxes, strict=True)
        outlines = [visualize.trace_mask(grid, box) for grid, box in pairs]
        return [[part for part in parts if cv2.contourArea(part) > 0] for parts in outlines]

    def rle(self) -> list[dict[str, Any]]:
        """Masks as COCO's compressed RLE; empty for a model of boxes alone."""
        return [entry["segmentation"] for entry in self.to_coco() if "segmentation" in entry]

    def to_coco(self, image_id: int | str = 1) -> list[dict[str, Any]]:
        """Results in COCO's format: category id, score, bbox and, with masks, RLE."""
        height, width = self.image.shape[:2]
        ids = [self.categories[k - 1]["id"] for k in self.classes.tolist()]
        boxes = self.boxes.astype(np.float64)
        one = ImageDetections(image_id, height, width, boxes, self.scores, ids, self.mask_grids)
        boxes_of, masks_of = encode_image(one, self.paste, self.inclusive_boxes)
        if self.mask_grids is None:
            return boxes_of
        pairs = zip(boxes_of, masks_of, strict=True)
        return [{**box, "segmentation": mask["segmentation"]} for box, mask in pairs]

    def to_supervision(self) -> Any:
        """`supervision.Detections` with masks, scores, classes counted from 0, and class names.

        Raises ImportError if the package is missing.
        """
        try:
            from supervision import Detections
        except ImportError as error:
            raise ImportError("to_supervision needs the package supervision") from error
        return Detections(
            xyxy=self.boxes,
            mask=self.masks,
            confidence=self.scores,
            class_id=self.classes - 1,
            data={"class_name": np.array(self.names, dtype=str)},
        )

    def plot(
        self,
        *,
        labels: bool = True,
        scores: bool = True,
        boxes: bool = True,
        masks: bool = True,
        color_by: Literal["instance", "class"] = "instance",
        line_width: int = 0,
        min_side: int = visualize.MIN_SIDE,
    ) -> np.ndarray:
        """Draw the objects on a copy, uint8 RGB.

        Args:
            labels: write class names; `scores` adds the scores. Labels that would cover other
                objects or labels become smaller, move aside or are left out.
            boxes: draw boxes.
            masks: fill and outline masks.
            color_by: a color for each object or for each class.
            line_width: pixels; 0 grows with the image.
            min_side: enlarge smaller images by an integer factor until the shorter side has this
                many pixels; 0 keeps the size.
        """
        image, corners = visualize.enlarge(self.image, self.boxes, min_side)
        return visualize.draw_instances(
            image,
            corners,
            self.names if labels else [],
            [f"{score:.2f}" if scores else "" for score in self.scores.tolist()],
            self.mask_grids if masks else None,
            self.classes - 1 if color_by == "class" else None,
            with_boxes=boxes,
            line_width=line_width,
        )

    def save(self, path: str | Path, **options: Any) -> None:
        """Write `plot(**options)` as a JPEG or PNG, creating its folder.

        Raises ValueError for another ending, OSError if the file cannot be written.
        """
        visualize.write_image(Path(path), self.plot(**options))
