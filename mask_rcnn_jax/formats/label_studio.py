"""Read Label Studio's JSON export."""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from mask_rcnn_jax.annotations.reader import read_json
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, ellipse, read_image_size, rectangle
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.mask_codes import rows_code
from mask_rcnn_jax.formats.reading import (
    BOX_LEFT_OUT,
    Converted,
    ImageObjects,
    Options,
    check_size,
    entries,
    number,
    rotated,
)
from mask_rcnn_jax.images.file_names import UPLOAD
from mask_rcnn_jax.images.suffixes import IMAGE_SUFFIXES

KINDS = ("polygon", "brush", "rectangle", "ellipse")
# Results that are no region: "labels" is another region's class, others say more about one or all.
NO_REGIONS = frozenset(
    "labels choices taxonomy textarea number rating datetime pairwise ranker relation".split()
)


def read_label_studio(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read the regions in all annotated tasks.

    Where a task has several annotations, one is read: the ground truth, or else the first that has
    regions.

    Args:
        source: the json that was exported as "JSON".
        image_dir: image folder, in which images are found by the names in the tasks; None for the
            folder with the file.
        options: `boxes` makes objects from rectangles.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    if source.is_dir():
        raise IsADirectoryError(f"{source}: a folder, expected the json of Label Studio's export")
    content = read_json(source)
    tasks = entries({"tasks": content}, "tasks", str(source))
    if not tasks or not all("annotations" in task and "data" in task for task in tasks):
        expected = "expected tasks with 'annotations' and 'data', exported as JSON, not as JSON-MIN"
        raise ValueError(f"{source}: {expected}")
    files = ImageFiles(image_dir or source.parent)
    left_out: list[str] = []
    images = []
    for place, task in enumerate(tasks, start=1):
        where = f"{source}: task {show(task.get('id', place), 40)}"
        found = entries(task, "annotations", where)
        sound = [entry for entry in found if not entry.get("was_cancelled")]
        sound.sort(key=lambda one: (one.get("ground_truth") is not True, not _regions(one, where)))
        if not sound:
            left_out.append(f"{where}, without an annotation")
            continue
        if sound[1:]:
            left_out.append(f"{where}, {len(sound) - 1} further annotations of the same image")
        image = files.find(_image_name(task, _regions(sound[0], where), where), where)
        size = read_image_size(image, source)
        objects = ImageObjects(size, left_out)
        _add_regions(entries(sound[0], "result", where), where, image, size, options, objects)
        images.append(AnnotatedImage(image, size, objects.joined()))
    return Converted(images, files.folder, left_out)


def _image_name(task: dict[str, Any], regions: list[dict], where: str) -> str:
    """The only image of a task, of which other entries may be names, too; or of several the one on
    which all regions were drawn."""
    data = task["data"] if isinstance(task["data"], dict) else {}
    texts = {key: value for key, value in data.items() if isinstance(value, str)}
    found = {key: value for key, value in texts.items() if key == "image" or _file_name(value)}
    drawn_on = {str(region.get("to_name", "")) for region in regions}
    count = max(len(drawn_on), len({_file_name(value) for value in found.values()} - {""}))
    if len(drawn_on) == 1 and found.keys() & drawn_on:
        return found[drawn_on.pop()]
    if not found or count > 1:
        raise ValueError(f"{where}: {count} images in its 'data', expected one")
    return found.get("image", next(iter(found.values())))


def _file_name(value: str) -> str:
    """The name of the image that a text names, as it was before the upload; "" if it names none."""
    ends = (value, value.partition("?")[0])
    end = next((end for end in ends if end.lower().endswith(IMAGE_SUFFIXES)), "")
    return UPLOAD.sub("", posixpath.basename(unquote(end.replace("\\", "/"))))


def _regions(annotation: dict[str, Any], where: str) -> list[dict]:
    results = entries(annotation, "result", where)
    return [result for result in results if str(result.get("type")) not in NO_REGIONS]


def _add_regions(
    regions: list[dict],
    where: str,
    path: Path,
    size: tuple[int, int],
    options: Options,
    objects: ImageObjects,
) -> None:
    labels = {
        region["id"]: region["value"].get("labels")
        for region in regions
        if isinstance(region.get("value"), dict) and isinstance(region.get("id"), str)
        if region.get("type") == "labels"
    }
    for place, region in enumerate(regions, start=1):
        at = f"{where}: region {place}"
        kind, value = region.get("type"), region.get("value")
        if isinstance(kind, str) and kind in NO_REGIONS:
            continue
        if not isinstance(kind, str) or not isinstance(value, dict):
            raise ValueError(f"{at}: no type and value")
        shape = kind.removesuffix("labels")
        key = region.get("id") if isinstance(region.get("id"), str) else None
        named = value.get(kind, labels.get(key) if key else None)
        if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
            objects.leave_out(at, show(named, 40), f"a {shape} without exactly one class")
            continue
        stated = [region.get(f"original_{side}", n) for side, n in zip(_SIDES, size, strict=True)]
        height, width = (number(side, f"{at}: original size") for side in stated)
        check_size(at, (height, width), path, size)
        if region.get("image_rotation"):
            objects.leave_out(at, named[0], "drawn on a rotated image")
        elif shape == "brush":
            objects.add_rle(at, named[0], _brush(value, size, at))
        elif shape == "rectangle" and not options.boxes:
            objects.leave_out(at, named[0], BOX_LEFT_OUT)
        elif shape not in KINDS:
            objects.leave_out(at, named[0], f"a {show(shape, 40)}")
        else:
            objects.add_outline(at, named[0], _outline(shape, value, size, at), shape)


_SIDES = ("height", "width")


def _outline(kind: str, value: dict, size: tuple[int, int], where: str) -> list[list[float]]:
    """Points (x, y) in pixels; the file has percent."""
    height, width = size
    if kind == "polygon":
        points = value.get("points")
        if not isinstance(points, list) or not all(
            isinstance(point, list) and len(point) == 2 for point in points
        ):
            raise ValueError(f"{where}: points are not a list of [x, y]")
        found = [[number(v, f"{where}: a coordinate") for v in point] for point in points]
        return [[x * width / 100, y * height / 100] for x, y in found]
    sides = ("width", "height") if kind == "rectangle" else ("radiusX", "radiusY")
    x, y, u, v = (number(value.get(key), f"{where}: {key}") for key in ("x", "y", *sides))
    angle = number(value.get("rotation") or 0, f"{where}: rotation")
    x, u, y, v = x * width / 100, u * width / 100, y * height / 100, v * height / 100
    outline = rectangle(x, y, x + u, y + v) if kind == "rectangle" else ellipse(x, y, u, v)
    # A rectangle rotates about its upper left corner.
    return rotated(outline, (x, y), angle) if angle else outline


def _brush(value: dict, size: tuple[int, int], where: str) -> dict:
    """Return a brush's RLE; its mask is the opacity in an image with four channels."""
    codes: Any = value.get("rle")
    try:
        if value.get("format") != "rle" or not isinstance(codes, list):
            raise TypeError
        packed = bytes(codes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: a brush without a list of bytes in 'rle'") from error
    try:
        edges = _opaque_edges(packed, size)
    except ValueError as error:
        raise ValueError(f"{where}: rle {error}") from error
    return rows_code(edges, (0, 0, size[1], size[0]), size, where)


def _opaque_edges(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """Where pixels with opacity start and end; a place between two runs of them is there twice."""
    edges: list[int] = []
    done = 0  # values; a pixel's fourth is its opacity
    for count, values in unpack(data, 4 * size[0] * size[1]):
        first, end = done // 4, (done + count) // 4
        if len(values) == count:
            opaque = values[(3 - done) % 4 :: 4] > 0
            found = np.flatnonzero(np.diff(opaque, prepend=False, append=False))
            edges += (first + found).tolist()
        elif values[0]:
            edges += first, end
        done += count
    return np.array(edges, np.int64)


def unpack(data: bytes, expected: int) -> Iterator[tuple[int, np.ndarray]]:
    """Decode bit-packed run lengths as thi.ng's rle-pack writes them to counts of values, and the
    values, uint8 [count], or [1] for a value that repeats.

    32 bits count the values, 5 are the bits per value less one, and four times 4 are the bits
    for four kinds, each less one. Then each run has a bit that tells whether it repeats one value,
    two bits for the kind, the length less one, and its value or values.
    """
    if len(data) > 4 * expected + 100:
        raise ValueError(f"has {len(data)} bytes for {expected} values")
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    place = 0

    def take(count: int) -> np.ndarray:
        nonlocal place
        found = bits[place : place + count]
        place += count
        if len(found) < count:
            raise ValueError("ends too early")
        return found

    def take_number(count: int) -> int:
        return int("".join(map(str, take(count).tolist())), 2)

    total, word = take_number(32), take_number(5) + 1
    lengths = [take_number(4) + 1 for _ in range(4)]
    if total != expected or word != 8:
        raise ValueError(f"has {total} values of {word} bits, expected {expected} of 8")
    done = 0
    while done < expected:
        repeats, kind = take_number(1), take_number(2)
        count = take_number(lengths[kind]) + 1
        done += count
        if done > expected:
            raise ValueError("has too many values")
        yield count, np.packbits(take(8 if repeats else 8 * count))
