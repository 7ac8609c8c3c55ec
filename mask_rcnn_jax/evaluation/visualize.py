"""Draw boxes, masks, class names and scores on images.

Line widths and text scale with the image, from 64 pixels to many megapixels. Each instance, or in
videos each class, has its own color. Small objects are drawn over large ones.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.evaluation.labels import draw_labels
from mask_rcnn_jax.structures import Detections

Lines = Sequence[tuple[int, int]]  # between points, by their places
FILL_OPACITY = 0.42
PALETTE_SIZE = 60
# Images with a shorter side below this have no room for text beside their objects.
MIN_SIDE = 320
_DARK, _WHITE = (30, 30, 30), (255, 255, 255)  # of keypoints
# Fractional bits of cv2's integer coordinates.
_SHIFT = 4
# Approximate number of grid cells per box side for contour tracing. A contour goes through the
# centers of cells: finer masks are enlarged as well, up to a size where half a cell is nothing.
_TRACE_SIDE, _LARGE_SIDE = 224, 2048


def draw_detections(
    image: np.ndarray,
    detections: Detections,
    class_names: Sequence[str],
    *,
    score_threshold: float = 0.5,
    min_side: int = MIN_SIDE,
    color_by: str = "instance",
    skeleton: Lines = (),
    keypoint_threshold: float = -np.inf,
) -> np.ndarray:
    """Draw the detections that reach the score threshold.

    Args:
        image: uint8 [H, W, 3] RGB; not modified.
        detections: of this image, with boxes in its pixels; `masks` may be None.
        class_names: class k is `class_names[k - 1]`; padding has class 0.
        score_threshold: minimum score.
        min_side: enlarge smaller images by an integer factor until the shorter side has this many
            pixels; 0 keeps the size.
        color_by: "instance" distinguishes the objects of an image; "class" gives a class the same
            color in all images.
        skeleton: lines between keypoints, if there are any.
        keypoint_threshold: minimum score of a keypoint.

    Returns:
        uint8 [f * H, f * W, 3] RGB with the enlargement factor f, usually 1.
    """
    scores, classes = np.asarray(detections.scores), np.asarray(detections.classes)
    keep = np.flatnonzero((scores >= score_threshold) & (classes > 0))
    keep = keep[np.argsort(-scores[keep], kind="stable")]
    names = [str(class_names[classes[i] - 1]) for i in keep]
    values = [f"{float(scores[i]):.2f}" for i in keep]
    masks = None if detections.masks is None else np.asarray(detections.masks)[keep]
    height = image.shape[0]
    image, boxes = enlarge(image, np.asarray(detections.boxes)[keep], min_side)
    color_indices = classes[keep] - 1 if color_by == "class" else None
    outlines = None if masks is None else trace_masks(masks, boxes)
    drawn = draw_instances(image, boxes, names, values, outlines, color_indices)
    if detections.keypoints is not None:
        points = sure_points(np.asarray(detections.keypoints)[keep], keypoint_threshold)
        draw_keypoints(drawn, points * (image.shape[0] / height), skeleton, color_indices)
    return drawn


def draw_ground_truth(
    image: np.ndarray,
    boxes: np.ndarray,
    classes: np.ndarray,
    masks: np.ndarray | None,
    class_names: Sequence[str],
    *,
    min_side: int = MIN_SIDE,
    keypoints: tuple[np.ndarray, Lines] | None = None,
) -> np.ndarray:
    """Draw ground truth like `draw_detections`.

    Args:
        image: uint8 [H, W, 3] RGB; not modified.
        boxes: [n, 4] in image pixels.
        classes: [n] int, 0 for padding.
        masks: [n, M, M] uint8 crops in 0..255, or None.
        class_names: class k is `class_names[k - 1]`.
        min_side: as for `draw_detections`.
        keypoints: [n, P, 3] x, y, v in image pixels, and the lines between them.
    """
    keep = np.flatnonzero(np.asarray(classes) > 0)
    names = [str(class_names[classes[i] - 1]) for i in keep]
    masks = None if masks is None else np.asarray(masks)[keep].astype(np.float32) / 255
    height = image.shape[0]
    image, boxes = enlarge(image, np.asarray(boxes)[keep], min_side)
    outlines = None if masks is None else trace_masks(masks, boxes)
    drawn = draw_instances(image, boxes, names, [""] * len(keep), outlines)
    if keypoints is not None:
        points = np.asarray(keypoints[0])[keep]
        places = points[..., :2] * (image.shape[0] / height)
        draw_keypoints(drawn, np.where(points[..., 2:] > 0, places, np.nan), keypoints[1])
    return drawn


def side_by_side(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Join two images of equal height with a thin white line."""
    line = np.full((left.shape[0], max(2, left.shape[1] // 200), 3), 255, np.uint8)
    return np.concatenate([left, line, right], axis=1)


def write_image(path: Path, image: np.ndarray) -> None:
    """Write a uint8 [H, W, 3] RGB image as JPEG or PNG, creating its folder.

    Raises ValueError for another ending, OSError if the file cannot be written.
    """
    try:
        write_pixels(path, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    except cv2.error as error:
        raise ValueError(f"{path}: no format for this ending, expected .jpg or .png") from error


def write_pixels(path: Path, pixels: np.ndarray) -> None:
    """Write an image as OpenCV has its bands, creating its folder.

    Not by `cv2.imwrite`, which ends the process at a name that is no valid text. Raises cv2.error
    for an unknown ending, OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written, content = cv2.imencode(path.suffix, pixels)
    if not written:
        raise OSError(f"{path}: the image cannot be written")
    path.write_bytes(content.tobytes())


def enlarge(image: np.ndarray, boxes: np.ndarray, min_side: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale image and boxes by the smallest integer factor that reaches `min_side` pixels."""
    factor = -(-min_side // min(image.shape[:2]))
    if factor <= 1:
        return image, boxes
    image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    return image, boxes * factor


def draw_instances(
    image: np.ndarray,
    boxes: np.ndarray,
    names: Sequence[str],
    values: Sequence[str],
    outlines: Sequence[Sequence[np.ndarray]] | None,
    color_indices: np.ndarray | None = None,
    *,
    with_boxes: bool = True,
    line_width: int = 0,
) -> np.ndarray:
    """Draw n instances, given in decreasing order of label priority, on a copy of the image.

    Args:
        image: uint8 [H, W, 3] RGB.
        boxes: [n, 4] in image pixels.
        names: first part of each label, see `draw_labels`; without any there are no labels.
        values: second part of each label.
        outlines: polygons of each mask, see `trace_masks`; None draws no masks.
        color_indices: [n] int index for `instance_color`; None gives each instance its own.
        with_boxes: draw the boxes.
        line_width: pixels; 0 grows with the image.
    """
    canvas = np.ascontiguousarray(image).copy()
    height, width = canvas.shape[:2]
    scale = float(np.sqrt(height * width))
    thickness = line_width or max(1, round(scale / 480))
    boxes = _moderate(boxes)
    areas = np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)
    indices = range(len(boxes)) if color_indices is None else color_indices
    colors = [instance_color(i) for i in indices]
    for i in np.argsort(-areas, kind="stable"):
        if outlines is not None:
            _fill(canvas, outlines[i], colors[i])
            lines = [_fixed(polygon) for polygon in outlines[i]]
            cv2.polylines(canvas, lines, True, colors[i], thickness, cv2.LINE_AA, _SHIFT)
        if with_boxes:
            _rectangle(canvas, boxes[i], colors[i], thickness)
    if len(names) and len(boxes):
        draw_labels(canvas, boxes, names, values, colors)
    return canvas


def draw_keypoints(
    canvas: np.ndarray,
    points: np.ndarray,
    skeleton: Lines,
    color_indices: np.ndarray | None = None,
) -> None:
    """Draw the lines between keypoints in each instance's color, and the points as white dots.

    Both have dark borders, so that no color has to be told from another.

    Args:
        canvas: uint8 [H, W, 3] RGB, modified in place.
        points: [n, P, 2] x, y in its pixels; NaN for one that is not drawn, nor lines to it.
        skeleton: lines between them.
        color_indices: as for `draw_instances`.
    """
    indices = range(len(points)) if color_indices is None else color_indices
    width = max(1, round(float(np.sqrt(canvas.shape[0] * canvas.shape[1])) / 320))
    for i, of_one in zip(indices, np.asarray(points, np.float64), strict=True):
        drawn = np.isfinite(of_one).all(axis=1)
        places = _fixed(np.clip(np.nan_to_num(of_one), -1e6, 1e6))
        pairs = [(places[a], places[b]) for a, b in skeleton if drawn[a] and drawn[b]]
        for color, thickness in ((_DARK, width + 2), (instance_color(i), width)):
            for start, end in pairs:
                ends = tuple(start.tolist()), tuple(end.tolist())
                cv2.line(canvas, *ends, color, thickness, cv2.LINE_AA, _SHIFT)
        for color, radius in ((_DARK, width + 2), (_WHITE, width + 1)):
            for place in places[drawn].tolist():
                center, size = tuple(place), radius << _SHIFT
                cv2.circle(canvas, center, size, color, cv2.FILLED, cv2.LINE_AA, _SHIFT)


def sure_points(keypoints: np.ndarray, threshold: float) -> np.ndarray:
    """Return x, y of keypoints [n, P, 3], [n, P, 2]; NaN for scores below the threshold."""
    return np.where(keypoints[..., 2:] >= threshold, keypoints[..., :2], np.nan)


def instance_color(i: int) -> tuple[int, int, int]:
    """RGB color number i of the palette, which repeats."""
    return _palette()[int(i) % PALETTE_SIZE]


@functools.cache
def _palette() -> tuple[tuple[int, int, int], ...]:
    """Bright colors, each at the largest CIE Lab distance from all earlier ones."""
    levels = np.linspace(0, 1, 13, dtype=np.float32)
    rgb = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    rgb = rgb[(rgb.max(axis=1) > 0.85) & (rgb.max(axis=1) - rgb.min(axis=1) > 0.5)]
    lab = cv2.cvtColor(rgb[None], cv2.COLOR_RGB2LAB)[0]
    lab[:, 0] *= 0.6  # lightness separates colors less than hue
    chosen = [int(np.argmin(np.abs(rgb - [0.08, 0.58, 1.0]).sum(axis=1)))]
    distance = np.full(len(lab), np.inf)
    while len(chosen) < PALETTE_SIZE:
        distance = np.minimum(distance, np.linalg.norm(lab - lab[chosen[-1]], axis=1))
        chosen.append(int(np.argmax(distance)))
    rows = np.round(255 * rgb[chosen].astype(np.float64)).astype(int)
    return tuple((int(r), int(g), int(b)) for r, g, b in rows)


def trace_masks(
    masks: np.ndarray | Sequence[np.ndarray], boxes: np.ndarray
) -> list[list[np.ndarray]]:
    """Trace n masks, each on a grid over its box [n, 4], as `trace_mask` does."""
    return [trace_mask(mask, box) for mask, box in zip(masks, _moderate(boxes), strict=True)]


def _moderate(boxes: np.ndarray) -> np.ndarray:
    """Return float64 boxes [n, 4] for cv2: a diverged model may return any value."""
    return np.clip(np.nan_to_num(np.asarray(boxes, np.float64).reshape(-1, 4)), -1e6, 1e6)


def trace_mask(mask: np.ndarray, box: np.ndarray) -> list[np.ndarray]:
    """Trace the contours of probability 0.5, including holes.

    The mask is enlarged first for sub-pixel contours, which are then smoothed over a few grid cells
    to remove staircase artifacts.

    Args:
        mask: [M, M] probabilities on a grid over the box; without a pixel there is no polygon.
        box: [4] in image pixels.

    Returns:
        Closed polygons, float32 [p, 2] (x, y) in image pixels.
    """
    if not mask.size:
        return []
    side = max(mask.shape)
    factor = max(_TRACE_SIDE // side, 2 if side < _LARGE_SIDE else 1)
    # Pad with zeros: the object ends at its box, as in a pasted mask.
    padded = np.pad(mask.astype(np.float32), 1)
    fine = cv2.resize(padded, None, fx=factor, fy=factor, interpolation=cv2.INTER_LINEAR)
    inside = (fine >= 0.5).astype(np.uint8)
    contours, _ = cv2.findContours(inside, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    size = np.array([box[2] - box[0], box[3] - box[1]])
    cell = size / (np.array(mask.shape[::-1]) * factor)
    polygons = []
    for contour in contours:
        points = contour[:, 0].astype(np.float32)
        if len(points) < 6:  # a speck of one or two cells
            continue
        points = _smooth(points) + 0.5 - factor
        points = (points * cell + box[:2]).astype(np.float32)
        polygons.append(cv2.approxPolyDP(points[:, None], 0.2, True)[:, 0])
    return polygons


def _smooth(points: np.ndarray) -> np.ndarray:
    """Moving average over up to seven points of a closed polygon [p, 2], at least six points."""
    reach = min(3, (len(points) - 1) // 2)
    around = np.concatenate([points[-reach:], points, points[:reach]])
    total = np.cumsum(np.concatenate([np.zeros((1, 2)), around]), axis=0)
    window = 2 * reach + 1
    return (total[window:] - total[:-window]) / window


def _fill(canvas: np.ndarray, polygons: Sequence[np.ndarray], color: tuple[int, int, int]) -> None:
    """Tint the inside of the polygons; the even-odd rule keeps holes clear."""
    if not polygons:
        return
    points = np.concatenate(polygons)
    height, width = canvas.shape[:2]
    x0, y0 = np.clip(np.floor(points.min(axis=0)).astype(int), 0, (width, height))
    x1, y1 = np.clip(np.ceil(points.max(axis=0)).astype(int) + 1, 0, (width, height))
    if x1 <= x0 or y1 <= y0:
        return
    window = canvas[y0:y1, x0:x1]
    stencil = np.zeros(window.shape[:2], np.uint8)
    cv2.fillPoly(stencil, [_fixed(p - (x0, y0)) for p in polygons], 255, cv2.LINE_8, _SHIFT)
    shades = np.arange(256)[:, None] * (1 - FILL_OPACITY) + np.array(color) * FILL_OPACITY
    tinted = cv2.LUT(window, np.round(shades).astype(np.uint8)[:, None])
    cv2.copyTo(tinted, stencil, window)


def _rectangle(
    canvas: np.ndarray, box: np.ndarray, color: tuple[int, int, int], thickness: int
) -> None:
    """Draw the box, clipped to the image border."""
    height, width = canvas.shape[:2]
    x1, x2 = np.clip(np.round(box[[0, 2]]), (0, 1), (width - 1, width)).astype(int)
    y1, y2 = np.clip(np.round(box[[1, 3]]), (0, 1), (height - 1, height)).astype(int)
    cv2.rectangle(canvas, (x1, y1), (max(x2 - 1, x1), max(y2 - 1, y1)), color, thickness)


def _fixed(points: np.ndarray) -> np.ndarray:
    """Convert continuous coordinates to cv2's fixed point with integer pixel centers."""
    return np.round((points - 0.5) * (1 << _SHIFT)).astype(np.int32)
