"""Gather objects by image while another format is read."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.segmentation import (
    Segmentation,
    segmentation_fault,
    show,
    to_rle,
    union,
)
from mask_rcnn_jax.formats.coco_build import (
    AnnotatedImage,
    AnnotatedObject,
    check_label,
    check_outline,
    has_area,
)
from mask_rcnn_jax.formats.mask_codes import check_codes
from mask_rcnn_jax.terminal.safe_text import cut


@dataclass(frozen=True)
class Options:
    """What the annotations do not say themselves."""

    output: Path  # the json to write, which is no annotation
    boxes: bool = False  # boxes become objects, with rectangles as masks
    classes: tuple[str, ...] = ()  # names of class numbers, where a format has no names
    class_name: str | None = None  # class of all objects, where a format has none
    attribute: str | None = None  # VIA's, that has the class
    split_parts: bool = False  # connected parts of a mask become objects
    min_area: int = 0  # pixels of such a part
    split: str | None = None  # the images of YOLO's data.yaml, "train" or "val"; None: all


@dataclass(frozen=True)
class Converted:
    """Annotated images, and where they are."""

    images: Sequence[AnnotatedImage]
    image_dir: Path  # `file_name` is relative to it
    left_out: list[str] = field(default_factory=list)  # a line for each object that is not there
    classes: tuple[str, ...] | None = None  # in their order; None for those with objects


Reader = Callable[[Path, Path | None, Options], Converted]


class ImageObjects:
    """One image's objects, gathered part by part.

    Parts with the same label and group become one object. Parts without area are left out and
    named in `left_out`; those that cannot be drawn raise ValueError.
    """

    def __init__(self, size: tuple[int, int], left_out: list[str]):
        self.size, self._left_out = size, left_out
        self._parts: dict[Hashable, tuple[str, str, list[Segmentation], bool]] = {}
        self._codes = 0  # characters of all run-length codes

    def add_outline(
        self, where: str, label: str, points: list[list[float]], kind: str, group: Hashable = None
    ) -> None:
        """Add a polygon (x, y) in pixels."""
        check_label(label, where)
        if not has_area(points):
            self.leave_out(where, label, f"a {kind} without area")
            return
        check_outline(points, self.size, where)
        flat = [float(value) for point in points for value in point]
        self._add(where, label, [flat], group, crowd=False)

    def add_rle(
        self, where: str, label: str, rle: Any, group: Hashable = None, *, crowd: bool = False
    ) -> None:
        """Add a mask as large as the image, a run-length encoding as in COCO."""
        check_label(label, where)
        fault = segmentation_fault(rle, *self.size) if isinstance(rle, dict) else "no RLE"
        if fault and not (isinstance(rle, dict) and fault == "RLE has no pixel"):
            raise ValueError(f"{where}: {fault}")
        if fault:
            self.leave_out(where, label, "a mask without a pixel")
            return
        code = to_rle(rle, *self.size)["counts"]
        text = code.decode("ascii") if isinstance(code, bytes) else code
        self._count(text, where)
        self._add(where, label, {"size": list(self.size), "counts": text}, group, crowd)

    def leave_out(self, where: str, label: str, reason: str) -> None:
        self._left_out.append(f"{where} ({on_one_line(label)}), {on_one_line(reason)}")

    def joined(self) -> list[AnnotatedObject]:
        """All objects, sorted by their first parts."""
        return [
            AnnotatedObject(label, self._join(where, parts), crowd)
            for where, label, parts, crowd in self._parts.values()
        ]

    def _add(
        self, where: str, label: str, part: Segmentation, group: Hashable, crowd: bool
    ) -> None:
        key = len(self._parts) if group is None else (label, group)
        self._parts.setdefault(key, (where, label, [], crowd))[2].append(part)

    def _count(self, code: str, where: str) -> None:
        self._codes += len(code)
        check_codes(self._codes, where)

    def _join(self, where: str, parts: list[Segmentation]) -> Segmentation:
        if all(isinstance(part, list) for part in parts):
            return [polygon for part in parts for polygon in part]
        if len(parts) == 1:
            return parts[0]
        joined = union(to_rle(part, *self.size) for part in parts)
        text = joined["counts"].decode("ascii")
        self._count(text, where)
        return {"size": list(self.size), "counts": text}


def on_one_line(label: str) -> str:
    """A class name for a message."""
    return cut(label) if label.isprintable() else show(label)


BOX_LEFT_OUT = "a box; --boxes makes objects of boxes"


def number(value: Any, where: str) -> float:
    """Read a finite number from a text or a json; ValueError, starting with `where`, for others."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{where} is {show(value, 40)}, expected a finite number")
    return found


def pairs(values: Any, where: str) -> list[list[float]]:
    """Read points (x, y) from a flat list; ValueError, starting with `where`, for other things."""
    if not isinstance(values, list) or len(values) % 2:
        raise ValueError(f"{where}: {show(values, 40)}, expected x, y, x, y, ..")
    found = [number(value, f"{where}: a coordinate") for value in values]
    return [found[place : place + 2] for place in range(0, len(found), 2)]


def rotated(points: list[list[float]], center: Sequence[float], degrees: float) -> list:
    """Points (x, y), rotated clockwise on screen."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = center
    offsets = [(u - x, v - y) for u, v in points]
    return [[x + u * cos - v * sin, y + u * sin + v * cos] for u, v in offsets]


def check_size(where: str, stated: tuple[float, float], path: Path, size: tuple[int, int]) -> None:
    """Raise ValueError, starting with `where`, if an image has another (height, width)."""
    if stated != size:
        drawn = f"drawn on {stated[0]:g} x {stated[1]:g} (height x width)"
        raise ValueError(f"{where}: {drawn}, but {path.name} is {size[0]} x {size[1]}")


def entries(content: Any, key: str, where: str) -> list[dict]:
    """Read a list with objects in a json; ValueError, starting with `where`, for anything else."""
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{where}: {key!r} is not a list of objects")
    return found
