"""The objects found in one image, for use in Python."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.keypoints import skeleton_of
from mask_rcnn_jax.config import check_written
from mask_rcnn_jax.evaluation import visualize
from mask_rcnn_jax.evaluation.encode import ImageDetections, Masks, encode_image, mask_crop
from mask_rcnn_jax.images.pixel_size import PixelSize
from mask_rcnn_jax.predict.regions import measure
from mask_rcnn_jax.rle import Window, WindowMask

RGB = ("red", "green", "blue")


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
            boxes alone, and where `window_masks` takes their place.
        categories: {"id", "name"} for each class.
        path: the image's file, "" for an array.
        paste: how a grid becomes pixels, see `evaluation.paste.paste_mask`.
        inclusive_boxes: x2 and y2 are the last pixels of a box, so that its width in COCO's format
            is x2 - x1 + 1.
        window_masks: the pixels of N masks that were merged from tiles; None without tiles.
        track_ids: [N] int32, equal for an object in all frames of a video; None without tracks.
        pixels: [H, W, C] as the file has them, where `image` is only a view of them; else None.
        band_names: of the C bands; () where `image` is all there is.
        pixel_size: of a TIFF's pixels, in its unit; None if it does not say.
        overview: uint8 [h, w, 3] RGB, an image reduced that was too large to be decoded whole, and
            whose pixels in `image` are black; None for others.
        read: returns [h, w, C] as the file has them in a window of such an image.
        keypoints: [N, P, 3] float32 x, y and score of each point; None for a model without them.
        keypoint_names: of the P points; `categories` may have the lines between them.
        keypoint_offset: what `to_coco` takes off their x and y, see `data.keypoint_offset`.
        keypoint_threshold: `plot` leaves out keypoints with lower scores.
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
    window_masks: Sequence[WindowMask] | None = None
    track_ids: np.ndarray | None = None
    pixels: np.ndarray | None = None
    band_names: tuple[str, ...] = ()
    pixel_size: PixelSize | None = None
    overview: np.ndarray | None = None
    read: Callable[[Window], np.ndarray] | None = None
    keypoints: np.ndarray | None = None
    keypoint_names: tuple[str, ...] = ()
    keypoint_offset: float = 0.0
    keypoint_threshold: float = -np.inf

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: int | slice | np.ndarray | Sequence[int]) -> "Result":
        """Select objects by number, slice, numbers or a boolean mask [N].

        Raises IndexError for a number beyond the objects, a mask with another length, or an array
        with several dimensions.
        """
        if isinstance(rows, np.ndarray) and rows.ndim == 0:
            rows = rows[()]  # a number, as of np.argmax
        if isinstance(rows, int | np.integer):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"object {rows} of {len(self)}")
            rows = [int(rows)]
        if not isinstance(rows, slice):
            rows = np.asarray(rows)
            if rows.ndim != 1:
                raise IndexError(f"rows with {rows.ndim} dimensions, expected 1")
            rows = rows if rows.size else np.zeros(0, int)  # an empty list would be of floats
        grids, windows, tracks = self.mask_grids, self.window_masks, self.track_ids
        numbers = np.arange(len(self))[rows].tolist()
        return replace(
            self,
            boxes=self.boxes[rows],
            scores=self.scores[rows],
            classes=self.classes[rows],
            mask_grids=None if grids is None else grids[rows],
            window_masks=None if windows is None else [windows[k] for k in numbers],
            track_ids=None if tracks is None else tracks[rows],
            keypoints=None if self.keypoints is None else self.keypoints[rows],
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

    @property
    def has_masks(self) -> bool:
        """Whether the model finds masks, and not boxes alone."""
        return self._masks is not None

    @property
    def _masks(self) -> Masks | None:
        return self.mask_grids if self.window_masks is None else self.window_masks

    def crops(self) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
        """Yield the pixels of each mask: a uint8 crop [h, w] of zeros and ones, and the (x, y) of
        its upper left pixel in the image. Nothing for a model of boxes alone."""
        height, width = self.image.shape[:2]
        if self._masks is not None:
            for mask, box in zip(self._masks, self.boxes, strict=True):
                yield mask_crop(mask, box, height, width, self.paste)

    @cached_property
    def masks(self) -> np.ndarray | None:
        """Masks [N, H, W] bool, pasted at first use; None for a model of boxes alone.

        Takes N bytes per pixel. `crops`, `rle` and `polygons` need no full-size masks.
        """
        if not self.has_masks:
            return None
        masks = np.zeros((len(self), *self.image.shape[:2]), bool)
        for mask, (crop, (x, y)) in zip(masks, self.crops(), strict=True):
            mask[y : y + crop.shape[0], x : x + crop.shape[1]] = crop
        return masks

    def labels(self) -> np.ndarray:
        """An image [H, W] with 0 for background and k for object k - 1: uint16, or uint32 of more
        than 65,535 objects. Where masks overlap, the higher score wins; nothing for boxes alone."""
        order = np.argsort(-self.scores, kind="stable").tolist()
        image = np.zeros(self.image.shape[:2], np.uint16 if len(self) < 1 << 16 else np.uint32)
        for k, (crop, (x, y)) in zip(order, self[order].crops(), strict=self.has_masks):
            window = image[y : y + crop.shape[0], x : x + crop.shape[1]]
            window[(crop > 0) & (window == 0)] = k + 1
        return image

    def regions(self) -> dict[str, np.ndarray]:
        """A table of the objects: columns of N values, which `pandas.DataFrame` takes.

        `label` is that of `labels`, then come `class`, `score` and `track_id`, if there are tracks,
        and the properties of skimage.measure.regionprops_table that `regions.measure` has, those of
        intensity for each band. Each mask is measured whole, also where others cover it.
        """
        held = self.image if self.pixels is None else self.pixels
        read = self.read or (lambda window: held[window[1] : window[3], window[0] : window[2]])
        boxes = np.clip(np.nan_to_num(self.boxes), 0, np.tile(self.image.shape[1::-1], 2))
        bands = self.band_names or RGB
        tracks = {} if self.track_ids is None else {"track_id": self.track_ids}
        return {
            "label": np.arange(1, len(self) + 1),
            "class": np.array(self.names, dtype=str),
            "score": self.scores,
            **tracks,
            **measure(self.crops(), boxes, read, bands, self.pixel_size),
        }

    def polygons(self) -> list[list[np.ndarray]]:
        """Outlines for each object: float32 [p, 2] (x, y) with sub-pixel corners, as drawn.

        An object may have several parts; a polygon inside another is a hole (even-odd rule).
        Without a mask or without area there is none.
        """
        outlines = self._outlines() or [[] for _ in self.scores]
        return [[part for part in parts if cv2.contourArea(part) > 0] for parts in outlines]

    def _outlines(self, scale: float = 1.0) -> list[list[np.ndarray]] | None:
        """Trace the masks, for an image enlarged by a factor."""
        if self.window_masks is None:
            grids = self.mask_grids
            return None if grids is None else visualize.trace_masks(grids, self.boxes * scale)
        outlines = []
        for crop, (x, y) in self.crops():
            box = np.array([x, y, x + crop.shape[1], y + crop.shape[0]])
            outlines.append(visualize.trace_mask(crop, box * scale))
        return outlines

    def rle(self) -> list[dict[str, Any]]:
        """Masks as COCO's compressed RLE; empty for a model of boxes alone."""
        return [entry["segmentation"] for entry in self.to_coco() if "segmentation" in entry]

    def to_coco(self, image_id: int | str = 1) -> list[dict[str, Any]]:
        """Results in COCO's format: category id, score, bbox and, with masks, RLE.

        With tracks, `track_id` as well. With keypoints, `keypoints` has x, y and 1 of each, and
        `keypoint_scores` their scores. Raises TypeError for another id than a whole number or text.
        """
        if not isinstance(image_id, str):
            image_id = operator.index(image_id)  # of NumPy, too
        height, width = self.image.shape[:2]
        ids = [self.categories[k - 1]["id"] for k in self.classes.tolist()]
        boxes = self.boxes.astype(np.float64)
        points, offset = self.keypoints, self.keypoint_offset
        points = None if points is None else points.astype(np.float64) - (offset, offset, 0)
        found = boxes, self.scores, ids, self._masks, points
        one = ImageDetections(image_id, height, width, *found)
        entries, masks_of = encode_image(one, self.paste, self.inclusive_boxes)
        for entry, mask in zip(entries, masks_of, strict=self.has_masks):
            entry["segmentation"] = mask["segmentation"]
        if self.track_ids is not None:
            for entry, track in zip(entries, self.track_ids.tolist(), strict=True):
                entry["track_id"] = track
        return entries

    def to_supervision(self) -> Any:
        """`supervision.Detections` with masks, scores, classes counted from 0, and class names.

        With keypoints, its `data["keypoints"]` has them, [N, P, 3] as here.

        Raises ImportError if the package is missing.
        """
        try:
            from supervision import Detections
        except ImportError as error:
            raise ImportError("to_supervision needs the package supervision") from error
        data = {"class_name": np.array(self.names, dtype=str)}
        if self.keypoints is not None:
            data["keypoints"] = self.keypoints
        return Detections(
            xyxy=self.boxes,
            mask=self.masks,
            confidence=self.scores,
            class_id=self.classes - 1,
            tracker_id=self.track_ids,
            data=data,
        )

    def plot(
        self,
        *,
        labels: bool = True,
        scores: bool = True,
        boxes: bool = True,
        masks: bool = True,
        keypoints: bool = True,
        keypoint_threshold: float | None = None,
        color_by: Literal["instance", "class"] = "instance",
        line_width: int = 0,
        min_side: int = visualize.MIN_SIDE,
    ) -> np.ndarray:
        """Draw the objects on a copy, or on the overview of a large image, uint8 RGB.

        Args:
            labels: write class names, and the numbers of tracks; `scores` adds the scores. Labels
                that would cover other objects or labels become smaller, move aside or are left out.
            boxes: draw boxes.
            masks: fill and outline masks.
            keypoints: draw keypoints and the lines between them: those of the categories' skeleton,
                or else COCO's between points of COCO's names.
            keypoint_threshold: score below which a keypoint is not drawn, nor lines to it; None:
                that of the attribute.
            color_by: a color for each object, or its track, or for each class.
            line_width: pixels; 0 grows with the image.
            min_side: enlarge smaller images by an integer factor until the shorter side has this
                many pixels; 0 keeps the size.
        """
        shown = self.image if self.overview is None else self.overview
        scale = shown.shape[0] / self.image.shape[0]
        image, corners = visualize.enlarge(shown, self.boxes * scale, min_side)
        names, colors = self.names, self.classes - 1 if color_by == "class" else self.track_ids
        if self.track_ids is not None:
            pairs = zip(names, self.track_ids.tolist(), strict=True)
            names = [f"{name} {track}" for name, track in pairs]
        drawn = visualize.draw_instances(
            image,
            corners,
            names if labels else [],
            [f"{score:.2f}" if scores else "" for score in self.scores.tolist()],
            self._outlines(image.shape[0] / self.image.shape[0]) if masks else None,
            colors,
            with_boxes=boxes,
            line_width=line_width,
        )
        if keypoints and self.keypoints is not None:
            least = self.keypoint_threshold if keypoint_threshold is None else keypoint_threshold
            points = visualize.sure_points(self.keypoints, least)
            points *= image.shape[0] / self.image.shape[0]
            skeleton = skeleton_of(self.categories, self.keypoint_names)
            visualize.draw_keypoints(drawn, points, skeleton, colors)
        return drawn

    def save(self, path: str | Path, **options: Any) -> None:
        """Write `plot(**options)` as a JPEG or PNG, creating its folder.

        Raises ValueError for another ending, OSError if the file cannot be written.
        """
        check_written(path, "path")
        visualize.write_image(Path(path), self.plot(**options))

    def _repr_png_(self) -> bytes:
        """The drawing, which a notebook shows where a result is the last line of a cell."""
        return cv2.imencode(".png", cv2.cvtColor(self.plot(), cv2.COLOR_RGB2BGR))[1].tobytes()
