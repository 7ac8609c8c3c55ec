"""Images of the evaluated set to browse: objects and detections as outlines over each image.

The page's script hides detections below the threshold, tells missed objects from found ones, and
filters and orders the images.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.segmentation import code_box
from mask_rcnn_jax.data.cut import cut_mask
from mask_rcnn_jax.report.error_images import data_uri
from mask_rcnn_jax.report.outcomes import Outcome, last_positions

# Limits of the page's size: images, and outlines of each kind, about 200 bytes each, in all and in
# an image of many.
MAX_IMAGES, ALL_OUTLINES, MAX_OUTLINES = 32, 4000, 40
# Longer side of an image in pixels and its JPEG quality: about 40 kB each.
SIDE, QUALITY = 512, 75
# Longer side of the drawing over it, in its own units.
UNITS = 1000
# Largest distance of an outline from that of the mask, in units.
TOLERANCE = 1.5
MAX_PARTS = 64  # of a mask, with holes; a speckled one has thousands


class BrowsedImage(NamedTuple):
    """An image with the outlines over it."""

    image: dict  # entry of the json's `images`
    objects: list[Outcome]
    detections: list[Outcome]  # by decreasing score


def browsed_images(
    images: Sequence[dict],
    objects: Sequence[Outcome],
    detections: Sequence[Outcome],
    threshold: float,
) -> list[BrowsedImage]:
    """Choose images: half have most errors, the rest are spread evenly over all others."""
    errors = Counter(o.annotation["image_id"] for o in objects if o.score < threshold)
    false = [d for d in detections if d.score >= threshold and not d.is_true]
    errors.update(d.annotation["image_id"] for d in false)
    order = sorted(range(len(images)), key=lambda n: -errors[images[n]["id"]])
    if len(order) > MAX_IMAGES:
        worst, others = order[: MAX_IMAGES // 2], sorted(order[MAX_IMAGES // 2 :])
        places = np.linspace(0, len(others) - 1, MAX_IMAGES - len(worst)).round().astype(int)
        order = worst + [others[n] for n in places]
    chosen = [images[n] for n in sorted(order)]
    by_image: dict = {image["id"]: BrowsedImage(image, [], []) for image in chosen}
    for kind in ("objects", "detections"):
        for one in objects if kind == "objects" else detections:
            if one.annotation["image_id"] in by_image:
                getattr(by_image[one.annotation["image_id"]], kind).append(one)
    most = max_outlines(len(chosen))
    for shown in by_image.values():
        shown.detections.sort(key=lambda one: -one.score)
        for outcomes in (shown.objects, shown.detections):
            del outcomes[most:]
    return list(by_image.values())


def max_outlines(images: int) -> int:
    """Return how many outlines of each kind an image gets, on a page of so many."""
    return max(MAX_OUTLINES, ALL_OUTLINES // max(1, images))


def browser(
    browsed: Sequence[BrowsedImage],
    categories: Sequence[str],
    limits: np.ndarray,
    has_masks: bool,
    read_image: Callable[[dict], np.ndarray | None],
) -> str:
    """Return the HTML of the images, in the order of the json. Arguments as for `write_report`.

    limits: score threshold by position. has_masks: outline masks, not boxes.
    """
    figures = (
        _figure(one, categories, limits, has_masks, read_image(one.image)) for one in browsed
    )
    return f'<div class="browser">{"".join(figures)}</div>'


def _figure(
    shown: BrowsedImage,
    categories: Sequence[str],
    limits: np.ndarray,
    has_masks: bool,
    image: np.ndarray | None,
) -> str:
    name = escape(str(shown.image.get("file_name", shown.image["id"])))
    if image is None:
        content = '<div class="absent">The image could not be read.</div>'
    else:
        height, width = image.shape[:2]
        unit = UNITS / max(height, width)
        shapes = [
            _shape(one, kind, categories, limits, unit, has_masks)
            for kind, outcomes in (("object", shown.objects), ("found", shown.detections))
            for one in outcomes
        ]
        box = f"0 0 {max(1, round(width * unit))} {max(1, round(height * unit))}"
        content = (
            '<button class="frame" aria-expanded="false" title="Larger or smaller">'
            f'<img src="{data_uri(_shrunk(image), QUALITY)}" alt="{name}">'
            f'<svg viewBox="{box}" role="img" aria-label="Objects and detections in {name}">'
            f"{''.join(shapes)}</svg></button>"
        )
    return f"<figure>{content}<figcaption><b>{name}</b> <span></span></figcaption></figure>"


def _shape(
    one: Outcome,
    kind: str,
    categories: Sequence[str],
    limits: np.ndarray,
    unit: float,
    has_masks: bool,
) -> str:
    """An outline with its name; `data-k` is the category, `data-p` the position of the score."""
    name = escape(categories[one.category])
    label = name if kind == "object" else f"{name} {one.score:.2f}"
    kind = kind if kind == "object" or one.is_true else "wrong"
    (position,) = last_positions([one.score], limits)
    x, y = (max(0, _units(value, unit)) for value in one.annotation["bbox"][:2])
    outline = _mask_path(one.annotation["segmentation"], unit) if has_masks else ""
    tag = "" if kind == "object" else f'<text x="{x}" y="{y}" dy="-.3em">{label}</text>'
    return (
        f'<g class="{kind}" data-k="{one.category}" data-p="{position}"><title>{label}</title>'
        f'<path d="{outline or _box_path(one.annotation["bbox"], unit)}"/>{tag}</g>'
    )


def _box_path(box: Sequence[float], unit: float) -> str:
    x, y, width, height = (_units(value, unit) for value in box)
    return f"M{x} {y}h{width}v{height}h{-width}z"


def _units(pixels: float, unit: float) -> int:
    """Convert pixels, of which a results file may have any number."""
    return round(min(max(pixels * unit, -UNITS), 2 * UNITS))


def _mask_path(code: dict, unit: float) -> str:
    """Trace the largest outlines of a mask, with those of its holes; empty if it has no pixel."""
    x, y, width, height = map(int, code_box(code))
    if not width * height:
        return ""
    mask = cut_mask(code, (x, y, x + width, y + height))
    # A border, since an outline runs through the centers of pixels.
    found, _ = cv2.findContours(np.pad(mask, 1), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    parts = []
    for contour in sorted(found, key=cv2.contourArea)[-MAX_PARTS:]:
        corner = np.array([x - 0.5, y - 0.5])
        points = cv2.approxPolyDP((contour + corner).astype(np.float32) * unit, TOLERANCE, True)
        corners = points.reshape(-1, 2).round().astype(int).tolist()
        parts.append("M" + "L".join(f"{x} {y}" for x, y in corners) + "z")
    return "".join(parts)


def _shrunk(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    scale = SIDE / max(height, width)
    if scale >= 1:
        return image
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA)
