"""Annotations of labelme, a json beside each picture, as drawn pictures."""

import base64
import binascii
import json
import math
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from mask_rcnn_jax.formats.coco_build import (
    DrawnObject,
    DrawnPicture,
    check_pictures_exist,
    ellipse,
    has_area,
    join_parts,
    picture_size,
    rectangle,
)

# Labels with a meaning of their own in labelme: no objects.
NOT_OBJECTS = ("__ignore__", "_background_")
OUTLINES = ("polygon", "oriented_rectangle", "rotation")


def read_labelme(
    folder: str | os.PathLike, image_dir: str | os.PathLike | None, output: str | os.PathLike
) -> tuple[list[DrawnPicture], list[str]]:
    """Every json in `folder` and the folders in it, but for `output`.

    Shapes of one label and one `group_id` are one object. Pictures are where `imagePath` says, or
    in `image_dir` under the same name.

    Returns the pictures and a line for each shape that is left out since it has no area.
    Raises ValueError or OSError, naming the file, for what cannot be read or does not fit.
    """
    folder, own = Path(folder), Path(output).absolute()
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {os.fspath(folder)!r}, expected labelme's json files")
    paths = [path for path in sorted(folder.rglob("*.json")) if path.absolute() != own]
    if not paths:
        raise ValueError(f"{folder} holds no json of labelme")
    contents = {path: _read(path) for path in paths}
    pictures = {path: _picture_path(path, contents[path], image_dir) for path in paths}
    check_pictures_exist(folder, list(pictures.values()))
    left_out: list[str] = []
    return [_drawn(path, contents[path], pictures[path], left_out) for path in paths], left_out


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    missing = [
        key
        for key, kind in (("shapes", list), ("imagePath", str))
        if not (isinstance(content, dict) and isinstance(content.get(key), kind))
    ]
    if missing:
        raise ValueError(f"{path}: not a file of labelme: it lacks {', '.join(map(repr, missing))}")
    return content


def _picture_path(path: Path, content: dict, image_dir: str | os.PathLike | None) -> Path:
    name = content["imagePath"].replace("\\", "/")  # as written on Windows
    return path.parent / name if image_dir is None else Path(image_dir) / Path(name).name


def _drawn(path: Path, content: dict, picture: Path, left_out: list[str]) -> DrawnPicture:
    size = picture_size(picture)
    said = content.get("imageHeight") or size[0], content.get("imageWidth") or size[1]
    if said != size:
        raise ValueError(
            f"{path}: drawn on {said[0]} x {said[1]} (height x width), but {picture.name} is "
            f"{size[0]} x {size[1]}"
        )
    objects: dict[Any, tuple[str, list]] = {}
    for number, shape in enumerate(content["shapes"], start=1):
        where = f"{path}: shape {number}"
        if not isinstance(shape, dict) or not isinstance(shape.get("label"), str):
            raise ValueError(f"{where} has no label")
        if shape["label"] in NOT_OBJECTS:
            continue
        part = _part(shape, size, where)
        if part is None:
            kind = shape.get("shape_type") or "polygon"
            left_out.append(f"{where} ({shape['label']}), a {kind} without area")
            continue
        group = shape.get("group_id")
        key = number if group is None else (shape["label"], group)
        objects.setdefault(key, (shape["label"], []))[1].append(part)
    drawn = [DrawnObject(label, join_parts(parts)) for label, parts in objects.values()]
    return DrawnPicture(picture, size, drawn)


def _part(shape: dict, size: tuple[int, int], where: str) -> list | np.ndarray | None:
    """Outline of (x, y) or mask [H, W] of a shape; None if it has no area."""
    kind, points = shape.get("shape_type") or "polygon", _points(shape, where)
    two = len(points) == 2
    if kind == "mask" and two:
        return _mask(shape, points, size, where)
    if kind == "circle" and two:
        points = ellipse(*points[0], *[math.dist(*points)] * 2)
    elif kind == "rectangle" and two:
        points = rectangle(*points[0], *points[1])
    elif kind not in OUTLINES and not (kind == "rectangle" and len(points) == 4):
        return None
    return points if has_area(points) else None


def _points(shape: dict, where: str) -> list[list[float]]:
    points = shape.get("points")
    try:
        array = np.asarray(points, np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        array = np.full((1, 2), np.nan)
    if not isinstance(points, list) or not np.isfinite(array).all():
        raise ValueError(f"{where}: points are not a list of [x, y] in pixels")
    return array.tolist()


def _mask(shape: dict, points: list, size: tuple[int, int], where: str) -> np.ndarray | None:
    """The picture of a mask, which labelme stores as PNG, moved to its upper left corner."""
    try:
        data = np.frombuffer(base64.b64decode(shape["mask"], validate=True), np.uint8)
        crop = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE) if data.size else None
    except (KeyError, TypeError, binascii.Error):
        crop = None
    if crop is None:
        raise ValueError(f"{where}: 'mask' is not a PNG in base64")
    x, y = (max(round(v), 0) for v in np.min(points, axis=0).tolist())
    mask = np.zeros(size, np.uint8)
    window = mask[y : y + crop.shape[0], x : x + crop.shape[1]]
    window[:] = crop[: window.shape[0], : window.shape[1]] > 0
    return mask if mask.any() else None
