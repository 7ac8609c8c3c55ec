"""The worst set of each format, small files about an image of any size, and what reading it takes.

    python -m tests.fuzz.largest "label image" 13377 13377      converts one, prints what it took

Without arguments, lines `["label image", 13377, 13377]` are read from stdin; each is answered.
"""

import base64
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image

from mask_rcnn_jax.formats.coco_build import write_json
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options
from mask_rcnn_jax.formats.tfrecord_coco import read_tfrecords
from tests import tfrecord_writer

OUTLINE = 1_900_000  # pixels of a zigzag, nearly as many as are drawn
Size = tuple[int, int]  # (height, width)


def png(size: Size, kind: str = "zeros") -> bytes:
    """A PNG of one bit per pixel, or of 16 or 24 for "gray" and "color"."""
    height, width = size
    if kind in ("gray", "color"):
        image = Image.new({"gray": "I;16", "color": "RGB"}[kind], (width, height), 1)
    else:
        bits = {"zeros": (0, 0), "ones": (255, 255), "checkers": (0x55, 0xAA)}[kind]
        lines = [bytes([value]) * (-(-width // 8)) for value in bits]
        data = b"".join(lines) * (height // 2) + lines[0] * (height % 2)
        image = Image.frombytes("1", (width, height), data)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)


def triangles(size: Size, count: int) -> list[list[list[int]]]:
    """That overlap."""
    height, width = size
    return [[[9 + n, 9], [width - 9, 9 + n], [9, height - 9]] for n in range(count)]


def zigzags(size: Size, count: int) -> list[list[list[float]]]:
    """Of many edges from the left to the right, the last one up again."""
    height, width = size
    edges = (OUTLINE - height) // width // 2 * 2
    return [
        [[width * (k % 2), n + (height - count) * k / edges] for k in range(edges)]
        for n in range(count)
    ]


def city(outlines: Callable, count: int, label: str = "car") -> Callable[[Path, Size], None]:
    def make(folder: Path, size: Size) -> None:
        objects = [{"label": label, "polygon": points} for points in outlines(size, count)]
        write(folder / "a.png", png(size))
        content = {"imgHeight": size[0], "imgWidth": size[1], "objects": objects}
        write(folder / "a_gtFine_polygons.json", content)

    return make


def city_values(folder: Path, size: Size) -> None:
    write(folder / "a.png", png(size))
    file = io.BytesIO()
    Image.new("I;16", size[::-1], 26_001).save(file, "PNG", compress_level=1)
    write(folder / "a_gtFine_instanceIds.png", file.getvalue())


def labelme(folder: Path, size: Size) -> None:
    """A group of masks of the whole image, and of polygons."""
    mask = {"shape_type": "mask", "points": [[0, 0], size[::-1]]}
    mask |= {"mask": base64.b64encode(png(size, "ones")).decode()}
    shapes = [{"shape_type": "polygon", "points": points} for points in zigzags(size, 3)]
    shapes = [{"label": "a", "group_id": 1, **shape} for shape in [mask] * 20 + shapes]
    write(folder / "a.png", png(size))
    write(folder / "a.json", {"imagePath": "a.png", "shapes": shapes})


def label_image(kind: str) -> Callable[[Path, Size], None]:
    def make(folder: Path, size: Size) -> None:
        write(folder / "a.png", png(size))
        write(folder / "a_mask.png", png(size, kind))

    return make


def scattered(folder: Path, size: Size) -> None:
    """As many values as are read, each all over the image, of up to 4,000,000 pixels."""
    size = min(size[0], 2000), min(size[1], 2000)
    write(folder / "a.png", png(size))
    values = np.random.default_rng(0).integers(0, 20_000, size).astype(np.uint16)
    Image.fromarray(values).save(folder / "a_mask.png", compress_level=1)


def voc(folder: Path, size: Size) -> None:
    """Objects in stripes, with boxes of the whole image."""
    height, width = size
    write(folder / "JPEGImages" / "a.png", png(size))
    (folder / "SegmentationObject").mkdir()
    values = np.resize(np.arange(255, dtype=np.uint8), width)
    image = Image.fromarray(np.broadcast_to(values, size))
    image.save(folder / "SegmentationObject" / "a.png", compress_level=1)
    box = f"<xmin>1</xmin><ymin>1</ymin><xmax>{width}</xmax><ymax>{height}</ymax>"
    objects = f"<object><name>a</name><bndbox>{box}</bndbox></object>" * 254
    write(folder / "Annotations" / "a.xml", f"<annotation>{objects}</annotation>")


def cvat(rle: Callable[[Size], str], count: int = 1) -> Callable[[Path, Size], None]:
    def make(folder: Path, size: Size) -> None:
        sides = f'width="{size[1]}" height="{size[0]}"'
        mask = f'<mask label="a" rle="{rle(size)}" left="0" top="0" {sides}/>' * count
        write(folder / "a.png", png(size))
        text = f'<annotations><image name="a.png" {sides}>{mask}</image></annotations>'
        write(folder / "annotations.xml", text)

    return make


def one_run(size: Size) -> str:
    return f"0,{size[0] * size[1]}"


def stripes(size: Size) -> str:
    return ",".join([str(size[1])] * size[0])


def cvat_video(folder: Path, size: Size) -> None:
    for frame in (0, 1):
        write(folder / f"frame_{frame:06d}.png", png(size))
    sides = f'left="0" top="0" width="{size[1]}" height="{size[0]}"'
    masks = f'<mask frame="0" rle={quoteattr(one_run(size))} {sides}/>'
    tracks = f'<track id="0" label="a" group_id="1">{masks}</track>' * 10
    write(folder / "annotations.xml", f"<annotations>{tracks}</annotations>")


def supervisely(folder: Path, size: Size) -> None:
    """Bitmaps of the whole image, and polygons with holes."""
    data = base64.b64encode(zlib.compress(png(size, "ones"))).decode()
    shape = {"geometryType": "bitmap", "bitmap": {"data": data, "origin": [0, 0]}}
    exterior, *holes = zigzags(size, 5)
    points = {"exterior": exterior, "interior": holes}
    shapes = [shape] * 3 + [{"geometryType": "polygon", "points": points}] * 3
    objects = [{"classTitle": "a", **shape} for shape in shapes]
    write(folder / "img" / "a.png", png(size))
    content = {"size": {"height": size[0], "width": size[1]}, "objects": objects}
    write(folder / "ann" / "a.png.json", content)


def brush(runs: Callable[[Size], list[tuple[int, int]]]) -> Callable[[Path, Size], None]:
    """Three brushes of runs of values."""

    def make(folder: Path, size: Size) -> None:
        bits = [f"{4 * size[0] * size[1]:032b}{7:05b}" + f"{15:04b}" * 4]
        for count, value in runs(size):
            for start in range(0, count, 1 << 16):
                bits.append(f"100{min(count - start, 1 << 16) - 1:016b}{value:08b}")
        text = "".join(bits)
        text += "0" * (-len(text) % 8)
        codes = list(int(text, 2).to_bytes(len(text) // 8))
        value = {"format": "rle", "rle": codes, "brushlabels": ["a"]}
        region = {"type": "brushlabels", "value": value}
        write(folder / "a.png", png(size))
        task = {"data": {"image": "a.png"}, "annotations": [{"result": [region] * 3}]}
        write(folder / "export.json", [task])

    return make


def datumaro(folder: Path, size: Size) -> None:
    """A group of a mask of the whole image, and polygons."""
    code = {"size": size, "counts": [0, size[0] * size[1]]}
    shapes = [{"type": "mask", "rle": code}] * 20
    for points in zigzags(size, 3):
        shapes.append({"type": "polygon", "points": [v for point in points for v in point]})
    annotations = [{"label_id": 0, "group": 1, **shape} for shape in shapes]
    item = {"id": "a", "image": {"path": "a.png"}, "annotations": annotations}
    content = {"categories": {"label": {"labels": [{"name": "a"}]}}, "items": [item]}
    write(folder / "images" / "a.png", png(size))
    write(folder / "annotations" / "default.json", content)


def yolo(folder: Path, size: Size) -> None:
    lines = [
        " ".join(["0", *(f"{x / size[1]} {y / size[0]}" for x, y in points)])
        for points in zigzags(size, 20)
    ]
    write(folder / "images" / "a.png", png(size))
    write(folder / "labels" / "a.txt", "\n".join(lines))


def via(folder: Path, size: Size) -> None:
    regions = []
    for points in zigzags(size, 20):
        xs, ys = zip(*points, strict=True)
        shape = {"name": "polygon", "all_points_x": xs, "all_points_y": ys}
        regions.append({"shape_attributes": shape, "region_attributes": {"c": "a"}})
    write(folder / "a.png", png(size))
    write(folder / "via.json", {"a": {"filename": "a.png", "regions": regions}})


def tfrecord(folder: Path, size: Size) -> None:
    name = "image/object/"
    features = {"image/height": size[0], "image/width": size[1], "image/source_id": b"1"}
    features |= {"image/filename": b"a.png", "image/encoded": b"", f"{name}is_crowd": [0] * 3}
    features |= {f"{name}bbox/{side}": [0.0] * 3 for side in ("xmin", "ymin")}
    features |= {f"{name}bbox/{side}": [1.0] * 3 for side in ("xmax", "ymax")}
    features |= {f"{name}area": [9.0] * 3, f"{name}class/label": [1] * 3}
    features |= {f"{name}mask": [png(size, "ones")] * 3}
    write(folder / "a.tfrecord", tfrecord_writer.record(tfrecord_writer.example(features)))


# Name: the reader, what it reads in a folder, the bytes per pixel of the largest image it decodes
# (to read EXIF entries from a PNG, Pillow decodes it), and a function that writes the set.
SETS: dict[str, tuple[str, str, int, Callable[[Path, Size], None]]] = {
    "Cityscapes json": ("cityscapes", "", 1, city(triangles, 1000)),
    "Cityscapes json, few": ("cityscapes", "", 1, city(triangles, 50)),
    "Cityscapes json, zigzags": ("cityscapes", "", 1, city(zigzags, 20, "cargroup")),
    "Cityscapes image": ("cityscapes", "", 2, city_values),
    "labelme json": ("labelme", "", 1, labelme),
    "label image": ("masks", "", 1, label_image("ones")),
    "label image, 16 bits": ("masks", "", 2, label_image("gray")),
    "label image, colors": ("masks", "", 4, label_image("color")),
    "label image, checkers": ("masks", "", 1, label_image("checkers")),
    "label image, scattered": ("masks", "", 1, scattered),
    "VOC image": ("voc", "", 1, voc),
    "CVAT XML": ("cvat", "", 1, cvat(one_run, 20)),
    "CVAT XML, stripes": ("cvat", "", 1, cvat(stripes)),
    "CVAT video XML": ("cvat", "", 1, cvat_video),
    "Supervisely json": ("supervisely", "", 1, supervisely),
    "Label Studio json": ("labelstudio", "export.json", 1, brush(lambda s: [(4 * s[0] * s[1], 9)])),
    "Label Studio json, stripes": (
        "labelstudio", "export.json", 1,
        brush(lambda s: [(4 * s[1], 9 * (y % 2)) for y in range(s[0])]),
    ),
    "Datumaro json": ("datumaro", "", 1, datumaro),
    "YOLO labels": ("yolo", "", 1, yolo),
    "VIA json": ("via", "via.json", 1, via),
    "TFRecords": ("tfrecord", "a.tfrecord", 1, tfrecord),
}  # fmt: skip


def _read(kind: str, source: Path, folder: Path) -> None:
    if kind == "tfrecord":
        content, _ = read_tfrecords(str(source), None, lambda total: lambda size: None)
    else:
        options = Options(folder / "out.json", classes=("a",), class_name="a")
        content = convert(kind, source, None, options, other_classes="skip")[0]
    with contextlib.redirect_stdout(io.StringIO()):
        write_json(folder / "out.json", content)


def _memory(key: str) -> int:
    """MiB of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


def outcome(name: str, height: int, width: int) -> dict[str, Any]:
    """How a set ends, its bytes, and CPU seconds and MiB that reading it took in a process of its
    own, without those of one decoded image."""
    kind, place, depth, make = SETS[name]
    folder = Path(tempfile.mkdtemp(prefix="largest"))
    if not os.fork():  # what this takes would be there for the reader to use again
        make(folder, (height, width))
        os._exit(0)
    os.wait()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    reading, writing = os.pipe()
    if not os.fork():
        before, started = _memory("VmRSS"), time.process_time()
        try:
            _read(kind, folder / place, folder)
            end = "converted"
        except (ValueError, OSError) as error:
            end = str(error).replace(str(folder), "")
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
        found = {"end": end, "seconds": round(time.process_time() - started, 1)}
        found["memory"] = _memory("VmHWM") - before - height * width * depth // 2**20
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.loads(pipe.read() or '{"end": "died"}')
    os.wait()
    shutil.rmtree(folder)
    return {"bytes": size, **found}


if __name__ == "__main__":
    if sys.argv[1:]:
        names = list(SETS) if sys.argv[1] == "all" else [sys.argv[1]]
        for name in names:
            print(name, outcome(name, *map(int, sys.argv[2:4])), flush=True)
    for line in [] if sys.argv[1:] else sys.stdin:
        print(json.dumps(outcome(*json.loads(line))), flush=True)
