"""Write what was found in images for other tools."""

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation.visualize import write_image, write_pixels
from mask_rcnn_jax.predict.geo import write_geojson, write_gpkg
from mask_rcnn_jax.predict.inputs import Input, resolved
from mask_rcnn_jax.predict.outlines import join_parts, outer_parts
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.predict.tables import import_tifffile, region_rows, write_label_image
from mask_rcnn_jax.rle import cut
from mask_rcnn_jax.terminal.safe_text import file_name

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


def write_crops(result: Result, folder: Path, name: PurePosixPath) -> None:
    """Write each object's box as a PNG in a folder for its class, transparent outside its mask."""
    for k, one in enumerate(result, start=1):
        x1, y1 = np.floor(one.boxes[0, :2]).astype(int).tolist()
        x2, y2 = np.ceil(one.boxes[0, 2:]).astype(int).tolist()
        crop = one.image[y1:y2, x1:x2]
        if not crop.size:
            continue
        alpha = np.full(crop.shape[:2], 255, np.uint8)
        for pixels, origin in one.crops():
            alpha = 255 * cut(pixels, origin, (x1, y1, x2, y2))[: crop.shape[0], : crop.shape[1]]
        path = folder / "crops" / file_name(f"{one.names[0]}.x", "", set()) / name
        path = path.with_name(f"{name.stem}_{k}.png")
        write_pixels(path, np.dstack([crop[..., ::-1], alpha]))


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


def label_studio_task(result: Result, name: PurePosixPath | str) -> dict[str, Any]:
    """Return a Label Studio task with predictions, polygons in percent.

    `data.image` is the path below its local storage; the label config has an <Image name="image">
    and <PolygonLabels name="label">, and <RectangleLabels name="box"> for boxes alone.
    """
    height, width = result.image.shape[:2]
    size = {"original_width": width, "original_height": height, "image_rotation": 0}
    found = []
    for one, parts in zip(result, result.polygons(), strict=True):
        common = {**size, "to_name": "image", "score": round(float(one.scores[0]), 4)}
        if parts:
            points = (join_parts(parts) / (width, height) * 100).round(3).tolist()
            value: dict[str, Any] = {"points": points, "closed": True, "polygonlabels": one.names}
            found.append({**common, "from_name": "label", "type": "polygonlabels", "value": value})
        else:
            x1, y1, x2, y2 = one.boxes[0] / (width, height, width, height) * 100
            value = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1, "rotation": 0}
            value = {key: round(float(number), 3) for key, number in value.items()}
            value["rectanglelabels"] = one.names
            found.append({**common, "from_name": "box", "type": "rectanglelabels", "value": value})
    mean = float(np.mean(result.scores)) if len(result) else 0.0
    prediction = {"model_version": "mask_rcnn_jax", "score": round(mean, 4), "result": found}
    image = f"/data/local-files/?d={quote(os.fsencode(name))}"
    return {"data": {"image": image}, "predictions": [prediction]}


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
    "crops": write_crops,
    "yolo": write_yolo,
    "labelme": write_labelme,
    "label_images": write_label_image,
    "geojson": write_geojson,
    "gpkg": write_gpkg,
}
KINDS = (*WRITERS, "labelstudio", "csv", "regions")
WITHOUT_KEYPOINTS = ("yolo", "labelme", "labelstudio", "geojson", "gpkg", "regions")
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


class Records(NamedTuple):
    """What the lists hold about one image."""

    entries: list[dict[str, Any]]  # COCO results with `file_name` and `category`, box and mask
    task: dict[str, Any] | None  # of Label Studio
    regions: tuple[list[str], list[list[Any]]] | None = None  # head and rows


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
        self._entries = self._list("detections.json")
        self._tasks = self._list("labelstudio.json") if "labelstudio" in kinds else None
        self._csv = self._table("detections.csv") if "csv" in kinds else None
        if self._csv:
            self._csv.writerow(csv_head(keypoints))
        self._regions = self._table("regions.csv") if "regions" in kinds else None
        self._regions_head: list[str] = []
        self._written = None
        if not LABELS.keys().isdisjoint(kinds):
            # Without a buffer, so that each line is written whole, by any thread.
            self._written = self._opened.enter_context(open(folder / WRITTEN, "ab", 0))

    def write(self, result: Result, image: Input, number: int) -> Records:
        """Write the files of one image, with `number` as its id, and return what to `add`.

        May be called from several threads.
        """
        for kind in per_image(self.kinds):
            WRITERS[kind](result, self._folder, image.target)
        if self._written:
            for path in _label_files(self._folder, image.target, self.kinds):
                self._written.write(f"{_digest(path, self._folder)}\n".encode())
        named = {"file_name": str(image.name)}
        entries = [named | entry for entry in named_results(result, number)]
        task = label_studio_task(result, image.name) if self._tasks else None
        regions = region_rows(result, str(image.name)) if self._regions else None
        return Records(entries, task, regions)

    def add(self, records: Records) -> None:
        """Append an image to the lists."""
        for entry in records.entries:
            self._entries.append(entry)
            if self._csv:
                self._csv.writerow(csv_row(entry))
        if self._tasks:
            self._tasks.append(records.task)
        if self._regions and records.regions:
            head, rows = records.regions
            if not self._regions_head:  # bands have names when the first image is read
                self._regions_head = head
                self._regions.writerow(head)
            self._regions.writerows(rows)
        self.count += len(records.entries)

    def _table(self, name: str) -> Any:
        return csv.writer(self._opened.enter_context(open(self._folder / name, "w", **TABLE)))

    def _list(self, name: str) -> "JsonList":
        return self._opened.enter_context(closing(JsonList(self._folder / name)))

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
