"""Sets of annotations in other formats: what is converted trains without a fault."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import cv2
import numpy as np
from hypothesis import strategies as st

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options
from mask_rcnn_jax.rle import compressed_rle
from tests.formats.test_label_studio import packed
from tests.formats.test_supervisely import bitmap
from tests.fuzz import hostile
from tests.tars.making import member, write_tar

HEIGHT, WIDTH = 64, 48  # of all images
SQUARE = [5, 5, 25, 5, 25, 25, 5, 25]
MASK = np.zeros((HEIGHT, WIDTH), np.uint8)
MASK[10:30, 10:20] = 1


def reads(kind: str, place: str = "") -> Callable[[Path], None]:
    """Convert the set around a file, or the file itself, and load it."""

    def read(path: Path) -> None:
        source = path if place == "" else path.parents[place.count("/")]
        output = path.parents[place.count("/")] / "out.json"
        convert_and_load(kind, source, _images(path), output, class_name="a")

    return read


def convert_and_load(
    kind: str, source: Path, images: Path | None, output: Path, **options: Any
) -> None:
    """What is converted must be one that can be trained on."""
    given = Options(output, boxes=True, classes=("a", "b", "car"), **options)
    content, folder, left_out = convert(kind, source, images, given, other_classes="skip")
    assert all("\n" not in line and len(line) < 1500 for line in left_out), left_out
    output.write_text(json.dumps(content))
    try:
        load_coco(output, folder, require_annotations=False)
    except (ValueError, OSError) as error:
        raise AssertionError(f"converts and does not load: {error}") from error
    finally:
        output.unlink()


def _images(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "shown").is_dir()) / "shown"


def _folder(folder: Path, kind: str) -> Path:
    """A folder for a format, with an image in `shown`."""
    found = folder / kind
    if not found.exists():
        (found / "shown").mkdir(parents=True)
        shutil.copy(folder / "0.png", found / "shown" / "0.png")
    return found


def writes(kind: str, name: str, dump: Callable[[Any, list], bytes], document: Any) -> Callable:
    """A function that writes the document with edits, and then the bytes with edits."""

    def write(folder: Path, case: Any) -> Path:
        edits, changes = case
        path = _folder(folder, kind) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(hostile.edit_bytes(dump(document, edits), changes))
        return path

    return write


def dump_json(document: Any, edits: list) -> bytes:
    return hostile.dump(hostile.edit_json(document, edits))


def dump_xml(document: Any, edits: list) -> bytes:
    return _xml(hostile.edit_json(document, edits)).encode("utf-8", "replace")


def _xml(node: Any) -> str:
    """`[tag, {attribute: value}, child, ..]` as XML, and anything else as text."""
    if not (isinstance(node, list) and len(node) > 1 and isinstance(node[1], dict)):
        return escape(str(node))
    tag, attributes, *children = node
    given = "".join(f" {key}={quoteattr(str(value))}" for key, value in attributes.items())
    return f"<{tag}{given}>{''.join(map(_xml, children))}</{tag}>"


def dump_lines(document: Any, edits: list) -> bytes:
    lines = hostile.edit_json(document, edits)
    texts = (" ".join(map(str, line)) if isinstance(line, list) else str(line) for line in lines)
    return "\n".join(texts).encode("utf-8", "replace")


CVAT = ["annotations", {}, ["meta", {}, ["task", {}, ["labels", {}, ["label", {},
        ["name", {}, "a"]]]]],
    ["image", {"id": 0, "name": "0.png", "width": WIDTH, "height": HEIGHT},
     ["polygon", {"label": "a", "points": "5,5;25,5;25.5,25", "group_id": 1}],
     ["mask", {"label": "a", "rle": "0,2,2,5", "left": 4, "top": 5, "width": 3, "height": 3,
               "group_id": 1}],
     ["box", {"label": "b", "xtl": 1, "ytl": 2, "xbr": 9, "ybr": 9, "rotation": 30}],
     ["ellipse", {"label": "b", "cx": 20, "cy": 20, "rx": 5, "ry": 9}]]]  # fmt: skip
_CORNERS = {"xtl": 1, "ytl": 2, "xbr": 9, "ybr": 9}
TRACKS = ["annotations", {}, ["meta", {}, ["task", {}, ["stop_frame", {}, 9],
        ["original_size", {}, ["width", {}, WIDTH], ["height", {}, HEIGHT]]]],
    ["track", {"id": 0, "label": "a", "group_id": 1},
     ["polygon", {"frame": 0, "outside": 0, "points": "5,5;25,5;25.5,25"}],
     ["polygon", {"frame": 4, "outside": 0, "points": "9,5;29,5;29.5,25"}],
     ["polygon", {"frame": 6, "outside": 1, "points": "9,5;29,5;29.5,25"}]],
    ["track", {"id": 1, "label": "b"}, ["box", {"frame": 0, "rotation": 30, **_CORNERS}],
     ["box", {"frame": 3, "rotation": 300, **_CORNERS}]],
    ["track", {"id": 2, "label": "a"},
     ["mask", {"frame": 1, "rle": "0,2,2,5", "left": 4, "top": 5, "width": 3, "height": 3}],
     ["ellipse", {"frame": 3, "cx": 20, "cy": 20, "rx": 5, "ry": 9}]]]  # fmt: skip
VOC = ["annotation", {}, ["filename", {}, "0.png"],
    ["size", {}, ["width", {}, WIDTH], ["height", {}, HEIGHT]],
    ["object", {}, ["name", {}, "a"], ["bndbox", {}, ["xmin", {}, 2], ["ymin", {}, 3],
                                       ["xmax", {}, 9], ["ymax", {}, 9]]],
    ["object", {}, ["name", {}, "b"],
     ["polygon", {}, *([f"v{n}", {}, value] for n, value in enumerate(SQUARE))]]]  # fmt: skip
YOLO = [[0, 0.1, 0.1, 0.5, 0.1, 0.5, 0.5], [1, 0.5, 0.5, 0.2, 0.3], [0, 0.2, 0.2, 0.7, 0.2, 0.4, 1]]
CITYSCAPES = {
    "imgHeight": HEIGHT, "imgWidth": WIDTH,
    "objects": [
        {"label": "a", "polygon": [[0, 0], [48, 0], [48, 64], [0, 64]]},
        {"label": "car", "polygon": [[5, 5], [25, 5], [25, 25]]},
        {"label": "bus", "polygon": [[15, 5], [35, 5], [35, 25]], "deleted": 0},
        {"label": "cargroup", "polygon": [[5, 40], [25, 40], [25, 50]]},
    ],
}  # fmt: skip
_REGION = {"id": "r", "original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
_BRUSH = packed(np.repeat(MASK.ravel() * 255, 4).tolist())
LABEL_STUDIO = [{
    "id": 1, "data": {"image": "/data/upload/1/0.png"},
    "annotations": [{"id": 3, "was_cancelled": False, "result": [
        {**_REGION, "type": "polygonlabels",
         "value": {"points": [[5, 5], [50, 5], [50, 60]], "polygonlabels": ["a"]}},
        {**_REGION, "type": "rectanglelabels",
         "value": {"x": 5, "y": 5, "width": 20, "height": 9, "rotation": 9,
                   "rectanglelabels": ["b"]}},
        {**_REGION, "type": "ellipse", "value": {"x": 5, "y": 5, "radiusX": 20, "radiusY": 9}},
        {**_REGION, "type": "labels", "value": {"labels": ["b"]}},
        {**_REGION, "type": "brushlabels",
         "value": {"format": "rle", "rle": _BRUSH, "brushlabels": ["a"]}},
    ]}],
}]  # fmt: skip
_SHAPE = {"label_id": 0, "group": 1, "attributes": {}}
DATUMARO = {
    "categories": {"label": {"labels": [{"name": "a"}, {"name": "b"}]}},
    "items": [{
        "id": "0", "image": {"path": "0.png", "size": [HEIGHT, WIDTH]},
        "annotations": [
            {**_SHAPE, "type": "polygon", "points": SQUARE},
            {**_SHAPE, "type": "mask", "rle": compressed_rle(MASK)},
            {**_SHAPE, "type": "bbox", "bbox": [1, 2, 9, 9], "label_id": 1, "group": 0},
            {**_SHAPE, "type": "ellipse", "points": [1, 2, 9, 19], "group": 2},
        ],
    }],
}  # fmt: skip

SUPERVISELY = {
    "size": {"height": HEIGHT, "width": WIDTH},
    "objects": [
        {"classTitle": "a", "geometryType": "polygon",
         "points": {"exterior": [[5, 5], [40, 5], [40, 50]], "interior": [[[20, 9], [30, 9],
                                                                           [30, 20]]]}},
        {"classTitle": "b", "geometryType": "rectangle",
         "points": {"exterior": [[5, 5], [40, 15]], "interior": []}},
        {"classTitle": "b", "geometryType": "bitmap",
         "bitmap": bitmap(np.eye(9, dtype=np.uint8))},
    ],
}  # fmt: skip

WEBDATASET = {
    "image": {"width": WIDTH, "height": HEIGHT},
    "categories": [{"id": 4, "name": "a"}],
    "annotations": [
        {"category_id": 4, "segmentation": [SQUARE, [30, 30, 40, 30, 40, 40]], "iscrowd": 0},
        {"category": "b", "segmentation": compressed_rle(MASK), "bbox": [10, 10, 10, 20]},
        {"category": "b", "segmentation": [SQUARE], "iscrowd": 1},
        {"category": "car", "bbox": [1, 2, 9, 9]},
    ],
}


def write_webdataset(folder: Path, case: Any) -> Path:
    """A tar of the image and its json."""
    text = writes("webdataset", "0.json", dump_json, WEBDATASET)(folder, case).read_bytes()
    image = member("0.png", (folder / "0.png").read_bytes())
    path = folder / "webdataset" / "case.tar"
    return write_tar(path, image, member("0.json", text))


def read_webdataset(path: Path) -> None:
    os.environ["MASK_RCNN_HOME"] = str(path.parent / "home")
    try:
        convert_and_load("webdataset", path, None, path.parent / "out.json")
    finally:
        shutil.rmtree(path.parent / "home", ignore_errors=True)


# Label images, which are the masks of the reader `masks`.


def label_images() -> list[bytes]:
    values = MASK + 2 * np.roll(MASK, 20, axis=0)
    kinds = values, values.astype(np.uint16) * 300, np.dstack([values * 0, values, values * 9])
    return [
        cv2.imencode(suffix, kind)[1].tobytes() for kind in kinds for suffix in (".png", ".tif")
    ]


def write_label_image(folder: Path, case: Any) -> Path:
    number, changes = case
    path = _folder(folder, "masks") / "given" / "0_mask.png"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(hostile.edit_bytes(label_images()[number % 6], changes))
    return path


def write_tracks(folder: Path, case: Any) -> Path:
    path = writes("cvat_video", "case.xml", dump_xml, TRACKS)(folder, case)
    for frame in (0, 2):
        name = path.parent / "shown" / f"frame_{frame:06d}.png"
        if not name.exists():
            shutil.copy(folder / "0.png", name)
    return path


documents = st.one_of(
    st.tuples(hostile.json_edits, hostile.no_edits),
    st.tuples(hostile.json_edits, hostile.no_edits),
    st.tuples(hostile.json_edits, hostile.no_edits),
    st.tuples(hostile.no_edits, hostile.byte_edits),
)
CITY = "0_gtFine_polygons.json"
FORMATS = {
    "CVAT XML": (documents, writes("cvat", "case.xml", dump_xml, CVAT), reads("cvat")),
    "CVAT video XML": (documents, write_tracks, reads("cvat")),
    "VOC XML": (documents, writes("voc", "given/0.xml", dump_xml, VOC), reads("voc", "0.xml")),
    "YOLO labels": (
        documents, writes("yolo", "labels/0.txt", dump_lines, YOLO), reads("yolo", "labels/0.txt"),
    ),
    "Cityscapes json": (
        documents, writes("city", f"given/{CITY}", dump_json, CITYSCAPES),
        reads("cityscapes", CITY),
    ),
    "Label Studio json": (
        documents, writes("labelstudio", "case.json", dump_json, LABEL_STUDIO),
        reads("labelstudio"),
    ),
    "Datumaro json": (
        documents, writes("datumaro", "case.json", dump_json, DATUMARO), reads("datumaro"),
    ),
    "Supervisely json": (
        documents, writes("sly", "ann/0.png.json", dump_json, SUPERVISELY),
        reads("supervisely", "ann/0.png.json"),
    ),
    "WebDataset json": (documents, write_webdataset, read_webdataset),
    "label images": (
        st.tuples(hostile.places, hostile.byte_edits), write_label_image, reads("masks", "0.png"),
    ),
}  # fmt: skip
