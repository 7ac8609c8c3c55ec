"""Faults of single annotations, each of which spoils training on it or some of its scores."""

from typing import Any, NamedTuple

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS, is_number
from mask_rcnn_jax.annotations.keypoints import Layout
from mask_rcnn_jax.annotations.segmentation import (
    clipped_box,
    outline_fault,
    outline_length,
    part_fault,
    rle_fault,
    segmentation_box,
    segmentation_fault,
    show,
)

MAX_AREA = 1e10  # of an object in pixels; pycocotools ignores larger ones
# A box may reach this many times the longer side of the image beyond it.
MAX_BOX_SIDES = 100
# Outline of an object in units of its box. Training draws it into a crop of the box.
MAX_RELATIVE_OUTLINE = 10_000

# What a fault may spoil: all but the first are scores.
TRAIN, BOX, MASK, KEYPOINTS = "training", "bbox", "segm", "keypoints"
EVERYTHING = frozenset({TRAIN, BOX, MASK, KEYPOINTS})
WITHOUT_MASK = frozenset({TRAIN, MASK})


class Fault(NamedTuple):
    """Why an annotation cannot be used."""

    text: str
    spoils: frozenset[str]  # of TRAIN, BOX, MASK and KEYPOINTS


class Checked(NamedTuple):
    """The result of checking an annotation."""

    entry: dict[str, Any]  # as in the json, without unusable parts that are not needed
    fault: Fault | None
    dropped: tuple[str, ...]  # why parts of its segmentation were left out


def check_annotation(
    entry: dict[str, Any],
    size: tuple[int, int] | None,
    boxes_only: bool,
    keypoints: Layout | None = None,
) -> Checked:
    """Check one annotation.

    Args:
        size: (height, width) of its image, None if the json does not say.
        boxes_only: an object with a box needs no mask, and a faulty mask is left out.
        keypoints: those that are used; None looks at none.
    """
    segmentation = entry.get("segmentation")
    nulls = [key for key in ("bbox", "area") if key in entry and entry[key] is None]
    if nulls:  # the same as nothing
        entry = {key: value for key, value in entry.items() if key not in nulls}
    faults, dropped = _plain_faults(entry, size), []
    has_box = "bbox" in entry
    if size is not None and isinstance(segmentation, list) and segmentation:
        segmentation, dropped = _without_bad_parts(segmentation, *size)
        if dropped:
            entry = entry | {"segmentation": segmentation}
    fault = _segmentation_fault(segmentation, dropped, size, has_box)
    if fault and has_box and boxes_only:
        entry, fault, dropped = entry | {"segmentation": []}, None, []
    if fault:
        faults.append(fault)
    elif segmentation and size is not None and not any(BOX in f.spoils for f in faults):
        faults += _extent_faults(entry, *size)
    if keypoints is not None and (text := keypoints.fault(entry)):
        faults.append(Fault(text, frozenset({TRAIN, KEYPOINTS})))
    if not faults:
        return Checked(entry, None, tuple(dropped))
    spoils = frozenset().union(*(fault.spoils for fault in faults))
    if MASK in spoils:
        entry = entry | {"segmentation": []}
    return Checked(entry, Fault(faults[0].text, spoils), tuple(dropped))


def _without_bad_parts(polygons: list, height: int, width: int) -> tuple[list, list[str]]:
    """Return the sound polygons and what is wrong with the others."""
    reasons = [part_fault(part, height, width) for part in polygons]
    bad = [reason for reason in reasons if reason is not None]
    if bad:
        polygons = [p for p, reason in zip(polygons, reasons, strict=True) if reason is None]
    return polygons, bad


def _plain_faults(entry: dict, size: tuple[int, int] | None) -> list[Fault]:
    """Faults of `iscrowd`, `area` and `bbox`."""
    crowd, area, box = (entry.get(key, 0) for key in ("iscrowd", "area", "bbox"))
    if not isinstance(crowd, int | float) or crowd not in (0, 1):
        return [Fault(f"iscrowd is {show(crowd)}, expected 0 or 1", EVERYTHING)]
    if not (is_number(area) and 0 <= area <= MAX_AREA):
        expected = f"expected a number of pixels from 0 to {MAX_AREA:g}"
        return [Fault(f"area is {show(area)}, {expected}", EVERYTHING)]
    if "bbox" in entry:
        if fault := box_fault(box, size):
            return [Fault(fault, EVERYTHING)]
        if size and (fault := _training_box_fault(box, *size)):
            return [Fault(fault, frozenset({TRAIN}))]
    return []


def box_fault(box: Any, size: tuple[int, int] | None) -> str | None:
    """Return why a box cannot even be scored."""
    if not isinstance(box, list) or len(box) != 4:
        return f"box {show(box)}, expected [x, y, width, height]"
    limit = MAX_BOX_SIDES * (max(size) if size else MAX_STATED_PIXELS)
    for value in box:
        if not is_number(value) or not -float("inf") < value < float("inf"):
            return f"box {show(box)} has a value that is not a finite number"
        if not -limit <= value <= limit:
            return f"box {show(box)} has the value {show(value)}, expected {-limit} to {limit}"
    if min(box[2:]) < 0:
        return f"box {box} has no area, expected [x, y, width, height]"
    return None


def _training_box_fault(box: list[float], height: int, width: int) -> str | None:
    """Return why nothing can be learned from a box that can be scored."""
    x, y, box_width, box_height = box
    if min(box_width, box_height) == 0:
        return f"box {box} has no area, expected [x, y, width, height]"
    if x >= width or y >= height or x + box_width <= 0 or y + box_height <= 0:
        return f"box {box} lies outside the image of {height} x {width} (height x width)"
    x1, y1, x2, y2 = clipped_box(box, height, width)
    if x1 >= x2 or y1 >= y2:
        return f"box {box} has no area in single precision inside the image"
    return None


def _segmentation_fault(
    segmentation: Any, dropped: list[str], size: tuple[int, int] | None, has_box: bool
) -> Fault | None:
    spoils = WITHOUT_MASK if has_box else EVERYTHING
    if dropped and not segmentation:
        return Fault(dropped[0], spoils)
    if segmentation is None or segmentation == []:
        advice = "; loss.mask_weight=0 trains on boxes alone" if has_box else " and 'bbox'"
        return Fault(f"lacks 'segmentation'{advice}", spoils)
    if size is None:  # an image of a file that nobody trains on
        spoils = frozenset({MASK}) if has_box else EVERYTHING
        return Fault("refers to an image without 'height' or 'width'", spoils)
    if isinstance(segmentation, list):
        fault = outline_fault(segmentation)
        return Fault(fault, spoils) if fault else None
    if fault := rle_fault(segmentation, *size):
        return Fault(fault, spoils)
    if fault := segmentation_fault(segmentation, *size):  # no pixel
        return Fault(fault, frozenset({TRAIN}) if has_box else EVERYTHING)
    return None


def _extent_faults(entry: dict, height: int, width: int) -> list[Fault]:
    """Faults of a sound segmentation together with the box, or of the box made from it."""
    segmentation, box = entry["segmentation"], entry.get("bbox")
    if box is None:
        box = segmentation_box(segmentation, height, width)
        fault = box_fault(box, (height, width)) or _training_box_fault(box, height, width)
        if fault:
            return [Fault(fault, frozenset({TRAIN}))]
    if isinstance(segmentation, dict):
        return []
    x1, y1, x2, y2 = clipped_box(box, height, width)
    if x1 < x2 and y1 < y2 and crop_fault(segmentation, (float(x2 - x1), float(y2 - y1))):
        text = f"box {show(box)} is too small for the polygons, which reach far beyond it"
        return [Fault(text, frozenset({TRAIN}))]
    return []


def crop_fault(polygons: Any, sides: tuple[float, float]) -> bool:
    """Check whether polygons are too long to be drawn into a crop of a box of these sides."""
    return outline_length(polygons, sides, MAX_RELATIVE_OUTLINE) > MAX_RELATIVE_OUTLINE
