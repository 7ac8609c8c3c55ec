"""Read labelme annotations, one json per image."""

import base64
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.reader import below, read_json
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats import coco_build
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.labelme_images import HeldImages, absent_image, find_image
from mask_rcnn_jax.formats.mask_codes import crop_code
from mask_rcnn_jax.formats.reading import ImageObjects
from mask_rcnn_jax.images.decode import check_header

# labelme's special labels, which are not objects.
NOT_OBJECTS = ("__ignore__", "_background_")
OUTLINES = ("polygon", "oriented_rectangle", "rotation")


def read_labelme(
    folder: str | os.PathLike, image_dir: str | os.PathLike | None, output: str | os.PathLike
) -> tuple[list[coco_build.AnnotatedImage], list[str]]:
    """Read every json below `folder` except `output`.

    Shapes with the same label and `group_id` form one object. `image_dir` is the image folder; None
    uses each json's `imagePath`, or else looks for its base name below `folder`. An image that is
    not there and that `imageData` holds is written to a folder beside `output`.

    Returns:
        The images, and one line per image without a json and per shape without area.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    folder, skipped = Path(folder), Path(output).absolute()
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {os.fspath(folder)!r}, expected labelme json files")
    paths = [path for path in below(folder, "*.json") if path.absolute() != skipped]
    if not paths:
        raise ValueError(f"{folder} holds no labelme json")
    contents = {path: _read(path) for path in paths}
    held = HeldImages(skipped.with_name(f"{skipped.stem}_images"))
    image_paths, left_out = _image_paths(contents, folder, image_dir, held)
    images = [_parse(path, contents[path], image_paths[path], left_out) for path in paths]
    return images, left_out


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    found = content if isinstance(content, dict) else {}
    kinds = {"shapes": list, "imagePath": str}
    missing = [key for key, kind in kinds.items() if not isinstance(found.get(key), kind)]
    if missing:
        raise ValueError(f"{path}: not a labelme file: it lacks {', '.join(map(repr, missing))}")
    return content


def _image_paths(
    contents: dict[Path, dict], folder: Path, image_dir: str | os.PathLike | None, held: HeldImages
) -> tuple[dict[Path, Path], list[str]]:
    """The image of each json, where one that only the json holds is written, and a line for each
    image without a json."""
    # What an earlier run wrote may have the name of another json's image.
    files = ImageFiles(folder if image_dir is None else image_dir, without=held.folder)
    found: dict[Path, Path] = {}
    absent: list[str] = []
    for path, content in contents.items():
        name = content["imagePath"].replace("\\", "/")
        image = find_image(path, name, files, image_dir) or held.write(path, name)
        if image is None:
            absent.append(absent_image(path, name, files))
        else:
            found[path] = image
    if absent:
        more = f" (and {len(absent) - 1} more)" if absent[1:] else ""
        raise FileNotFoundError(f"{absent[0]}{more}")
    if held.count:
        text = "%d images that only 'imageData' holds are written to %s"
        logging.info(text, held.count, held.folder)
    used = {os.path.realpath(image) for image in found.values()}
    unused = (n for n in files.paths if os.path.realpath(files.folder / n) not in used)
    return found, [f"{files.folder}: {show(name)}, an image without a json" for name in unused]


def _parse(
    path: Path, content: dict, image_path: Path, left_out: list[str]
) -> coco_build.AnnotatedImage:
    size = coco_build.read_image_size(image_path, path)
    stated = content.get("imageHeight") or size[0], content.get("imageWidth") or size[1]
    if stated != size:
        drawn = f"drawn on {show(stated[0])} x {show(stated[1])} (height x width)"
        raise ValueError(f"{path}: {drawn}, but {image_path.name} is {size[0]} x {size[1]}")
    objects = ImageObjects(size, left_out)
    for number, shape in enumerate(content["shapes"], start=1):
        where = f"{path}: shape {number}"
        label = shape.get("label") if isinstance(shape, dict) else None
        if not isinstance(label, str) or not label.strip():
            is_none = label is None or (isinstance(label, str) and not label.strip())
            has = "has no label" if is_none else f"has the label {show(label, 40)}, expected a text"
            raise ValueError(f"{where} {has}")
        coco_build.check_label(shape["label"], where)
        if shape["label"] in NOT_OBJECTS:
            continue
        group = shape.get("group_id")
        if not isinstance(group, int | str | None):
            raise ValueError(f"{where}: group_id is {show(group)}, expected a number")
        kind, points = shape.get("shape_type") or "polygon", _points(shape, where)
        if kind == "mask" and len(points) == 2:
            objects.add_rle(where, label, _mask(shape, points, size, where), group)
        else:
            objects.add_outline(where, label, _outline(kind, points), kind, group)
    return coco_build.AnnotatedImage(image_path, size, objects.joined())


def _outline(kind: Any, points: list[list[float]]) -> list[list[float]]:
    """Convert a shape to an outline (x, y), empty if it has no area."""
    is_pair = len(points) == 2
    if kind == "circle" and is_pair:
        points = coco_build.ellipse(*points[0], *[math.dist(*points)] * 2)
    elif kind == "rectangle" and is_pair:
        points = coco_build.rectangle(*points[0], *points[1])
    elif kind not in OUTLINES and not (kind == "rectangle" and len(points) == 4):
        return []
    return points


def _points(shape: dict, where: str) -> list[list[float]]:
    points = shape.get("points")
    try:
        array = np.asarray(points, np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        array = np.full((1, 2), np.nan)
    if not isinstance(points, list) or not np.isfinite(array).all():
        raise ValueError(f"{where}: points are not a list of [x, y] in pixels")
    return array.tolist()


def _mask(shape: dict, points: list, size: tuple[int, int], where: str) -> dict:
    """Return the RLE of a mask, which labelme stores as a PNG crop."""
    try:
        content = base64.b64decode(shape["mask"], validate=True)
    except (KeyError, TypeError, ValueError):
        content = b""
    check_header(content, f"{where}: 'mask'")
    data = np.frombuffer(content, np.uint8)
    try:
        crop = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE) if data.size else None
    except cv2.error:
        crop = None
    if crop is None:
        raise ValueError(f"{where}: 'mask' is not a PNG in base64")
    x, y = (max(round(v), 0) for v in np.min(points, axis=0).tolist())
    return crop_code(crop[: max(size[0] - y, 0), : max(size[1] - x, 0)], (x, y), size, where)
