"""Write what was found in images for other tools."""

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation.visualize import write_image, write_pixels
from mask_rcnn_jax.images.pixel_size import METERS
from mask_rcnn_jax.predict.geo import write_geojson, write_gpkg
from mask_rcnn_jax.predict.inputs import Input, resolved
from mask_rcnn_jax.predict.outlines import join_parts, outer_parts
from mask_rcnn_jax.predict.result import Result

CSV_HEAD = "file_name category category_id score x y width height mask_area".split()


def write_masks(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write one uint16 PNG as large as the image: 0 is background, k the k-th object by score.

    Where masks overlap, the higher score wins. Boxes alone give an empty image. Raises ValueError
    for more objects than 65,535.
    """
    if len(result) >= 1 << 16:
        found = f"{name}: {len(result)} objects, more than the 65,535 that a PNG of 16 bits numbers"
        raise ValueError(f"{found}; --save label_images has more")
    path = folder / "masks" / name.with_suffix(".png")
    write_pixels(path, result.labels())


def import_tifffile() -> Any:
    """Return tifffile. Raises ValueError, naming the extra to install, if it is missing."""
    try:
        import tifffile
    except ImportError as error:
        install = "pip install 'mask-rcnn-jax[tiff]'"
        raise ValueError(f"--save label_images needs tifffile: {install}") from error
    return tifffile


def write_label_image(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write `Result.labels` as a TIFF, zlib-compressed, with the size of its pixels if known."""
    path = folder / "label_images" / name.with_suffix(".tif")
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {}
    if result.pixel_size:
        height, width, unit = result.pixel_size
        a_centimeter = METERS["cm"] / METERS[unit]
        options["resolution"] = a_centimeter / width, a_centimeter / height
        options["resolutionunit"] = "CENTIMETER"
    given = {"compression": "zlib", "photometric": "minisblack", "metadata": None}
    import_tifffile().imwrite(path, result.labels(), **given, **options)


def write_yolo(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write a text file in Ultralytics' segmentation format: a line per object, its class counted
    from 0 and one polygon, as fractions. Boxes alone give their corners."""
    height, width = result.image.shape[:2]
    lines = []
    for one, parts in zip(result, result.polygons(), strict=True):
        outline = join_parts(parts) if parts else _corners(one.boxes[0])
        points = np.clip(outline / (width, height), 0, 1)
        values = " ".join(f"{value:.6g}" for value in points.ravel())
        lines.append(f"{one.classes[0] - 1} {values}\n")
    path = folder / "labels" / name.with_suffix(".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def write_labelme(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write a labelme json beside a copy of the image; the parts of an object share a group."""
    height, width = result.image.shape[:2]
    shapes = []
    for k, (one, parts) in enumerate(zip(result, result.polygons(), strict=True)):
        common = {"label": one.names[0], "group_id": k, "flags": {}}
        outlines = outer_parts(parts)
        for outline in outlines:
            points = [[round(float(x), 2), round(float(y), 2)] for x, y in outline]
            shapes.append({**common, "points": points, "shape_type": "polygon"})
        if not outlines:
            x1, y1, x2, y2 = map(float, one.boxes[0])
            points = [[x1, y1], [x2, y2]]
            shapes.append({**common, "points": points, "shape_type": "rectangle"})
    target = folder / "labelme" / name
    if target.suffix.lower() not in (".jpg", ".jpeg", ".png"):
        target = target.with_suffix(".png")
    write_image(target, result.image)
    content = {
        "version": "5.5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": target.name,
        "imageData": None,
        "imageHeight": height,
        "imageWidth": width,
    }
    target.with_suffix(".json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def named_results(result: Result, number: int) -> list[dict[str, Any]]:
    """Return the COCO results of an image with this id, each with its `category` first."""
    named = zip(result.names, result.to_coco(number), strict=True)
    return [{"category": name, **entry} for name, entry in named]


def csv_head(keypoints: Sequence[str] = ()) -> list[str]:
    """Return the head of detections.csv: `CSV_HEAD`, then x, y and score of each keypoint."""
    return [*CSV_HEAD, *(f"{name}_{part}" for name in keypoints for part in ("x", "y", "score"))]


def csv_row(entry: Mapping[str, Any]) -> list[Any]:
    """Return a row of `csv_head` for a COCO result; the area is in pixels, "" for boxes alone."""
    mask = entry.get("segmentation")
    area = "" if mask is None else int(coco_mask.area(mask))
    names = ("file_name", "category", "category_id")
    row = [*(entry[name] for name in names), round(entry["score"], 4), *entry["bbox"], area]
    points, scores = entry.get("keypoints", []), entry.get("keypoint_scores", [])
    for x, y, score in zip(points[::3], points[1::3], scores, strict=True):
        row += [x, y, score]
    return row


def _corners(box: np.ndarray) -> np.ndarray:
    x1, y1, x2, y2 = box
    return np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])


Write = Callable[[Result, Path, PurePosixPath], None]
WRITERS: dict[str, Write] = {
    "masks": write_masks,
    "yolo": write_yolo,
    "labelme": write_labelme,
    "label_images": write_label_image,
    "geojson": write_geojson,
    "gpkg": write_gpkg,
}
KINDS = (*WRITERS, "csv")
WITHOUT_KEYPOINTS = ("yolo", "labelme", "geojson", "gpkg")
FOLDERS = {kind: kind for kind in WRITERS} | {"yolo": "labels"}
LABELS = {"yolo": ".txt", "labelme": ".json", "geojson": ".geojson"}  # what people correct by hand
# How tables are opened: names of files and classes may hold lone surrogates.
TABLE: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
WRITTEN = ".written"  # digests of labels as they were written, a line each


def check_replaced(
    sources: Iterable[str], images: Iterable[Input], folder: Path, kinds: Sequence[str]
) -> None:
    """Raise ValueError if some `kinds` would replace an input, or labels of another origin, or need
    a package that is missing.

    Labels may be replaced as long as they are what `ResultFiles` wrote into the folder.
    """
    if "label_images" in kinds:
        import_tifffile()
    if not per_image(kinds):
        return
    found = list(resolved(sources))
    for kind in per_image(kinds):
        place = folder / FOLDERS[kind]
        inside = [path for path in found if path.is_relative_to(place.resolve())]
        if inside:
            what = f"--save {kind} writes to {place}, which holds files of --input"
            raise ValueError(f"{what}, such as {min(inside)}; choose another --output")
    paths = [path for image in images for path in _label_files(folder, image.target, kinds)]
    paths = [path for path in paths if path.exists()]
    written = folder / WRITTEN
    known = set(written.read_text().split()) if paths and written.exists() else set()
    others = {path for path in paths if _digest(path, folder) not in known}
    if others:
        raise ValueError(
            f"--save would replace {len(others)} files that infer did not write, or that were "
            f"corrected since, such as {min(others)}; move them or choose another --output"
        )


def per_image(kinds: Sequence[str]) -> list[str]:
    """Those of the kinds that have files for each image."""
    return [kind for kind in WRITERS if kind in kinds]


def _label_files(folder: Path, name: PurePosixPath, kinds: Sequence[str]) -> list[Path]:
    saved = [kind for kind in LABELS if kind in kinds]
    return [folder / FOLDERS[kind] / name.with_suffix(LABELS[kind]) for kind in saved]


def _digest(path: Path, folder: Path) -> str:
    name = os.fsencode(path.relative_to(folder))
    return hashlib.sha256(name + b"\0" + path.read_bytes()).hexdigest()


class ResultFiles:
    """What `infer` writes beside drawings: some files per image, some that list all images.

    detections.json is always written. A context manager, which ends the lists on any exit, so that
    they can be read.

    Attributes:
        count: objects in the lists.
        kinds: as given.
    """

    def __init__(self, folder: Path, kinds: Sequence[str] = (), keypoints: Sequence[str] = ()):
        """Open the lists of the `kinds`, out of KINDS, in a folder that exists.

        keypoints: names of those that each object has.
        """
        self.count = 0
        self._folder, self.kinds = folder, kinds
        self._opened = ExitStack()
        self._entries = self._opened.enter_context(closing(JsonList(folder / "detections.json")))
        self._csv: Any = None
        if "csv" in kinds:
            table = self._opened.enter_context(open(folder / "detections.csv", "w", **TABLE))
            self._csv = csv.writer(table)
            self._csv.writerow(csv_head(keypoints))
        self._written = None
        if not LABELS.keys().isdisjoint(kinds):
            # Without a buffer, so that each line is written whole, by any thread.
            self._written = self._opened.enter_context(open(folder / WRITTEN, "ab", 0))

    def write(self, result: Result, image: Input, number: int) -> list[dict[str, Any]]:
        """Write the files of one image, with `number` as its id, and return what to `add`: COCO
        results with `file_name` and `category`, box and mask.

        May be called from several threads.
        """
        for kind in per_image(self.kinds):
            WRITERS[kind](result, self._folder, image.target)
        if self._written:
            for path in _label_files(self._folder, image.target, self.kinds):
                self._written.write(f"{_digest(path, self._folder)}\n".encode())
        named = {"file_name": str(image.name)}
        return [named | entry for entry in named_results(result, number)]

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Append an image to the lists."""
        for entry in entries:
            self._entries.append(entry)
            if self._csv:
                self._csv.writerow(csv_row(entry))
        self.count += len(entries)

    def __enter__(self) -> "ResultFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class JsonList:
    """A json file with a list, one entry a line, which `close` makes valid."""

    def __init__(self, path: Path):
        self._file, self._between = open(path, "w", encoding="utf-8"), ""
        self._file.write("[")

    def append(self, entry: Any) -> None:
        self._file.write(self._between + json.dumps(entry))
        self._between = ",\n"

    def close(self) -> None:
        try:
            self._file.write("]\n")
        finally:
            self._file.close()
