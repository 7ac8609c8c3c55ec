"""Merge the detections in overlapping views of a large image.

The views are the whole image and its tiles. An object comes from the tiles that see all of it; only
if there is none, it is put together from its pieces and its detection in the whole image:

  1. A piece at the border of its tile is dropped if another tile sees all of that piece, and a
     detection in the whole image if any tile does.
  2. Detections of a class in two views are one object if their masks agree where both look, by the
     intersection over union of these pixels. Over all pixels, the two halves of an object would
     agree the less, the longer it is; and the intersection over the smaller mask would give a
     large object all small ones on it, which NMS keeps. Above one half, a mask agrees with at most
     one of the disjoint masks of another view, so that neighbors are not chained together.
  3. Of an object, the best of the detections that see all of it is kept, or else the union of all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.evaluation.encode import ImageDetections, mask_crop
from mask_rcnn_jax.rle import Window, WindowMask, cut

AGREEMENT = 0.5
# A box that ends within this share of a tile's side from its border may be of a piece: predicted
# boxes of pieces do not end at the pixel.
MARGIN = 0.02
OPEN = np.array([-np.inf, -np.inf, np.inf, np.inf])

Crop = tuple[np.ndarray, tuple[int, int]]  # uint8 [h, w] and the (x, y) of its upper left pixel


def with_window_masks(view: ImageDetections, paste: str) -> ImageDetections:
    """The same detections, with masks that take the less memory, the smaller they are."""
    if view.masks is None:
        return view
    size = view.height, view.width
    pairs = zip(view.masks, view.boxes, strict=True)
    masks = [WindowMask.from_crop(*mask_crop(mask, box, *size, paste)) for mask, box in pairs]
    return view._replace(masks=masks)


def merge_views(
    views: Sequence[ImageDetections], windows: Sequence[Window], paste: str
) -> ImageDetections:
    """Merge the detections in the views of one image.

    Args:
        views: of the whole image, and then of its tiles, each in pixels of the view.
        windows: the view's places in the image; the first is the whole image.
        paste: mask pasting rule, see `paste.paste_mask`.

    Returns:
        The objects in pixels of the image, by descending score, with `WindowMask`s. The detections
        of the whole image, as they are, if it is the only view.
    """
    whole = views[0]
    if len(views) == 1:
        return whole
    found = _Found.of(views, windows, paste)
    own, anywhere = _complete(found, windows)
    kept = np.flatnonzero(own | ~anywhere)
    objects = [_chosen(rows, own, found.scores) for rows in _same_objects(found, kept)]
    objects.sort(key=lambda rows: -found.scores[rows].max())
    boxes = [found.united_box(rows) for rows in objects]
    return ImageDetections(
        whole.image_id,
        whole.height,
        whole.width,
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array([found.scores[rows].max() for rows in objects], np.float32),
        [found.category_ids[rows[0]] for rows in objects],
        None if whole.masks is None else [found.united_mask(rows) for rows in objects],
        None if whole.keypoints is None else found.united_keypoints(objects),
    )


class _Found(NamedTuple):
    """The n detections of all views, in pixels of the image."""

    boxes: np.ndarray  # [n, 4] float64
    scores: np.ndarray  # [n]
    category_ids: list
    classes: np.ndarray  # [n] int, equal for equal category ids
    owners: np.ndarray  # [n] int, the view
    rows: np.ndarray  # [n] int, the row there
    views: Sequence[ImageDetections]
    windows: Sequence[Window]
    paste: str

    @classmethod
    def of(
        cls, views: Sequence[ImageDetections], windows: Sequence[Window], paste: str
    ) -> "_Found":
        counts = [len(view.scores) for view in views]
        placed = [
            view.boxes.reshape(-1, 4) + np.tile(window[:2], 2)
            for view, window in zip(views, windows, strict=True)
        ]
        ids = [category for view in views for category in view.category_ids]
        numbers = {category: number for number, category in enumerate(dict.fromkeys(ids))}
        return cls(
            np.concatenate(placed),
            np.concatenate([view.scores for view in views]),
            ids,
            np.array([numbers[category] for category in ids], int),
            np.repeat(np.arange(len(views)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            views,
            windows,
            paste,
        )

    def crop(self, k: int) -> Crop:
        """Paste a detection's mask; all masks together would take too much memory."""
        view, row = self.views[self.owners[k]], self.rows[k]
        assert view.masks is not None
        size = view.height, view.width
        pixels, (x, y) = mask_crop(view.masks[row], view.boxes[row], *size, self.paste)
        left, top, _, _ = self.windows[self.owners[k]]
        return pixels, (x + left, y + top)

    def _window_mask(self, k: int) -> WindowMask | None:
        """A detection's mask in pixels of the image, if it is a code already."""
        masks = self.views[self.owners[k]].masks
        mask = None if masks is None else masks[self.rows[k]]
        if not isinstance(mask, WindowMask):
            return None
        left, top, _, _ = self.windows[self.owners[k]]
        return mask._replace(x=mask.x + left, y=mask.y + top)

    def united_keypoints(self, objects: Sequence[Sequence[int]]) -> np.ndarray:
        """[n, P, 3] keypoints of objects: each point from the piece where its score is highest."""
        pieces = [view.keypoints for view in self.views if view.keypoints is not None]
        shifts = np.array([(*window[:2], 0.0) for window in self.windows])[self.owners]
        points = np.concatenate(pieces) + shifts[:, None]
        best = [
            points[rows][points[rows, :, 2].argmax(axis=0), np.arange(points.shape[1])]
            for rows in objects
        ]
        return np.array(best).reshape(-1, *points.shape[1:])

    def united_box(self, rows: Sequence[int]) -> np.ndarray:
        boxes = self.boxes[rows]
        return np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])

    def united_mask(self, rows: Sequence[int]) -> WindowMask:
        if len(rows) == 1 and (found := self._window_mask(rows[0])):
            return found
        crops = [self.crop(k) for k in rows]
        hull = _hull([_extent(crop) for crop in crops])
        union, *others = (cut(*crop, hull) for crop in crops)
        for other in others:
            union |= other
        return WindowMask.from_crop(union, hull[:2])


def _complete(found: _Found, windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """Whether its own tile, and whether any, contains a box and does not cut it, [n] each; the
    whole image counts as none."""
    image = np.array(windows[0])
    own, anywhere = np.zeros((2, len(found.boxes)), bool)
    for view, window in enumerate(np.array(windows[1:]), start=1):
        margin = MARGIN * np.tile(window[2:] - window[:2], 2)
        # Nothing is cut at the image's own border, which boxes may exceed by rounding.
        limits = np.where(window == image, OPEN, window + margin * (1, 1, -1, -1))
        inside = (found.boxes >= limits)[:, :2] & (found.boxes <= limits)[:, 2:]
        inside = inside[:, 0] & inside[:, 1]
        own |= inside & (found.owners == view)
        anywhere |= inside
    return own, anywhere


def _same_objects(found: _Found, kept: np.ndarray) -> list[list[int]]:
    """The rows that are kept, grouped by object."""
    groups = {int(k): [int(k)] for k in kept}
    for i, candidates in _candidates(found, kept):
        first = None
        for j in candidates:
            if groups[i] is groups[j]:
                continue
            first = first or (None if found.views[0].masks is None else found.crop(i))
            if _agreement(found, i, j, first) > AGREEMENT:
                groups[i] += groups[j]
                for k in groups[j]:
                    groups[k] = groups[i]
    return [sorted(rows) for rows in {id(rows): rows for rows in groups.values()}.values()]


def _candidates(found: _Found, kept: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Each row that is kept, and those whose boxes in other views overlap its own; each pair once.

    From the top down, so that a box is compared only with those that begin beside it.
    """
    kept = kept[np.argsort(found.boxes[kept, 1], kind="stable")]
    boxes, classes, owners = found.boxes[kept], found.classes[kept], found.owners[kept]
    ends = np.searchsorted(boxes[:, 1], boxes[:, 3])
    for at, (i, end) in enumerate(zip(kept.tolist(), ends.tolist(), strict=True)):
        later = slice(at + 1, end)
        meets = (boxes[later, :2] < boxes[at, 2:]) & (boxes[later, 2:] > boxes[at, :2])
        wanted = meets[:, 0] & meets[:, 1] & (classes[later] == classes[at])
        wanted &= owners[later] != owners[at]
        yield i, kept[later][wanted].tolist()


def _agreement(found: _Found, i: int, j: int, first: Crop | None) -> float:
    """Intersection over union of two detections where both views look; `first` is the crop of i."""
    pair = np.array([found.windows[found.owners[k]] for k in (i, j)])
    shared = *pair[:, :2].max(axis=0), *pair[:, 2:].min(axis=0)
    if first is None:
        return _box_agreement(found.boxes[[i, j]], np.array(shared))
    second = found.crop(j)
    one, other = _part(first, shared), _part(second, shared)
    common = _part(one, _extent(other))[0] & _part(other, _extent(one))[0]
    both = int(np.count_nonzero(common))
    either = int(np.count_nonzero(one[0])) + int(np.count_nonzero(other[0])) - both
    return both / max(1, either)


def _part(crop: Crop, region: Window) -> Crop:
    """The part of a crop inside a region, without a copy."""
    pixels, (x, y) = crop
    x0, y0, x1, y1 = region
    left, top = max(x, x0), max(y, y0)
    rows, columns = slice(top - y, max(top, y1) - y), slice(left - x, max(left, x1) - x)
    return pixels[rows, columns], (left, top)


def _box_agreement(boxes: np.ndarray, shared: np.ndarray) -> float:
    corners = np.clip(boxes.reshape(2, 2, 2), shared[:2], shared[2:])
    one, other = np.prod(corners[:, 1] - corners[:, 0], axis=1)
    sides = corners[:, 1].min(axis=0) - corners[:, 0].max(axis=0)
    common = float(np.prod(np.maximum(sides, 0)))
    return common / max(1e-9, one + other - common)


def _chosen(rows: list[int], own: np.ndarray, scores: np.ndarray) -> list[int]:
    """The detections that make up an object: the best that is complete, or else all pieces."""
    complete = [k for k in rows if own[k]]
    return [max(complete, key=lambda k: scores[k])] if complete else rows


def _extent(crop: Crop) -> Window:
    pixels, (x, y) = crop
    return x, y, x + pixels.shape[1], y + pixels.shape[0]


def _hull(windows: Sequence[Window]) -> Window:
    corners = np.array(windows)
    x0, y0 = corners[:, :2].min(axis=0).tolist()
    x1, y1 = corners[:, 2:].max(axis=0).tolist()
    return x0, y0, x1, y1
