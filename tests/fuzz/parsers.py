"""Every parser of files that may come from strangers: how its cases are made, read and checked.

`read` returns if the file is accepted and what it gives is right, fails an assertion if it
is wrong, and raises as the product does.
"""

import base64
import contextlib
import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save as save_safetensors

from mask_rcnn_jax import consent
from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.coco import check_coco, decode_image, load_coco
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.data.tfrecords import TFRecords
from mask_rcnn_jax.data.transforms import empty_batch, load_row
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.formats.coco_build import build_coco
from mask_rcnn_jax.formats.labelme import read_labelme
from mask_rcnn_jax.formats.tao_recipe import write_recipe
from mask_rcnn_jax.formats.tfrecord_coco import read_tfrecords
from mask_rcnn_jax.formats.via import read_via
from mask_rcnn_jax.predict.engines import load_exported
from mask_rcnn_jax.predict.loading import load_predictor
from mask_rcnn_jax.report.training_section import training_section
from mask_rcnn_jax.rle import encode_window
from mask_rcnn_jax.training.metrics import read_metrics, truncate_metrics
from mask_rcnn_jax.training.scored_file import evaluate_results
from mask_rcnn_jax.training.setup import open_workdir
from mask_rcnn_jax.video.reader import Video
from mask_rcnn_jax.weights.files import read_arrays
from tests import tfrecord_writer
from tests.formats.test_tao_spec import BLOG
from tests.fuzz import hostile
from tests.fuzz.config_files import CONFIGS, read_repaired
from tests.fuzz.format_parsers import FORMATS
from tests.fuzz.map_files import MAPS
from tests.fuzz.numpy_files import NUMPY
from tests.fuzz.tar_files import TARS
from tests.fuzz.tiff_files import TIFFS
from tests.helpers import GOLDENS, tiny_config
from tests.video.videos import write_video
from tests.weights import test_tf_checkpoint as tf
from tests.weights.weight_writers import Call, Name, TorchFile, dumps

SIZE = (64, 48)  # of all images


@dataclass(frozen=True)
class Parser:
    """cases: a strategy. write: (folder, case) -> the file that is read. read: of that file."""

    cases: st.SearchStrategy
    write: Callable[[Path, Any], Path]
    read: Callable[[Path], None]


def set_up(folder: Path) -> None:
    """What files refer to: images, and things with names of images that are none."""
    for number in range(3):
        image = np.random.default_rng(number).integers(0, 255, (*SIZE, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), image)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "truth.json").write_text(json.dumps(COCO))


def _json_file(document: Any, name: str) -> Callable[[Path, Any], Path]:
    def write(folder: Path, case: Any) -> Path:
        edits, changes = case
        path = folder / name
        path.write_bytes(
            hostile.edit_bytes(hostile.dump(hostile.edit_json(document, edits)), changes)
        )
        return path

    return write


json_cases = st.one_of(
    st.tuples(hostile.json_edits, hostile.no_edits),
    st.tuples(hostile.json_edits, hostile.no_edits),
    st.tuples(hostile.json_edits, hostile.no_edits),
    st.tuples(hostile.no_edits, hostile.byte_edits),
)

# COCO: annotations and results.

_CODE = encode_window(np.ones((20, 15), np.uint8), (10, 5), *SIZE)
COCO = {
    "info": {},
    "images": [{"id": i + 1, "file_name": f"{i}.png", "height": 64, "width": 48} for i in range(3)],
    "categories": [{"id": 1, "name": "a", "supercategory": "x"}, {"id": 7, "name": "b"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400,
         "iscrowd": 0, "segmentation": [[5, 5, 25, 5, 25, 25, 5, 25]]},
        {"id": 2, "image_id": 1, "category_id": 7, "bbox": [5, 10, 15, 20], "area": 300,
         "iscrowd": 0, "segmentation": _CODE},
        {"id": 3, "image_id": 2, "category_id": 7, "bbox": [0, 0, 48, 64], "area": 300,
         "iscrowd": 1, "segmentation": {"size": [64, 48], "counts": [100, 200, 64 * 48 - 300]}},
        {"id": 4, "image_id": 3, "category_id": 1, "bbox": [1, 1, 29, 29], "area": 40,
         "iscrowd": 0, "segmentation": [[1, 1, 9, 1, 9, 9], [20, 20, 30, 20, 30, 30, 20, 30]]},
    ],
}  # fmt: skip
_ENTRY = {"image_id": 1, "category_id": 1, "score": 0.5}
RESULTS = [
    {**_ENTRY, "bbox": [5, 5, 20, 20], "segmentation": _CODE},
    {**_ENTRY, "bbox": [1.5, 2, 9, 9], "segmentation": _CODE, "score": 0.25, "category_id": 7},
    {**_ENTRY, "bbox": [0, 0, 48, 64], "segmentation": _CODE, "score": 1, "image_id": 3},
]


@cache
def config():
    return tiny_config()


def read_coco(path: Path) -> None:
    """What loads trains and scores; what `check` finds nothing in loads."""
    problems = check_coco(path, path.parent)
    assert all("\n" not in problem for problem in problems), problems
    if not problems:
        load_coco(path, path.parent)
    dataset = load_coco(path, path.parent, bad_annotations="skip", require_annotations=False)
    options = as_recipe(config()).data
    for index, record in enumerate(dataset.images):
        plan = resize_plan(record.height, record.width, options)
        batch = empty_batch(1, plan.canvas, options, np.zeros)
        load_row(batch, 0, dataset, index, options)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(batch))
        for annotation in record.annotations:
            assert np.isfinite(annotation.area) and annotation.area >= 0, annotation
    image, category = dataset.images[0], dataset.category_ids[0]
    found = {"image_id": image.id, "category_id": category, "bbox": [1, 1, 9, 9], "score": 0.5}
    masks = [{**found, "segmentation": _CODE}] if (image.height, image.width) == SIZE else []
    ids = [record.id for record in dataset.images]
    try:
        truth = read_ground_truth(path, scoring=True, skip_bad=True)
        metrics = coco_evaluation.score(truth, [found], masks, image_ids=ids)
    except (ValueError, OSError) as error:
        raise AssertionError(f"loads and does not score: {error}") from error
    assert_metrics(metrics)


def assert_metrics(metrics: dict) -> None:
    numbers = [value for name, value in metrics.items() if name != "per_category"]
    assert all(value == -1 or 0 <= value <= 1 for value in numbers), metrics


def read_results(path: Path) -> None:
    given = config().copy_and_resolve_references()
    given.data.update(val_json=str(path.parent / "truth.json"), val_images=str(path.parent))
    with contextlib.redirect_stdout(io.StringIO()):
        assert_metrics(evaluate_results(path, given))


# Other formats of annotations.

_MASK = np.full((6, 6), 255, np.uint8)
LABELME = {
    "version": "5", "imagePath": "0.png", "imageHeight": 64, "imageWidth": 48, "imageData": None,
    "shapes": [
        {"label": "x", "points": [[1, 1], [9, 1], [9, 9]], "group_id": None,
         "shape_type": "polygon"},
        {"label": "y", "points": [[1, 1], [9, 9]], "group_id": 2, "shape_type": "rectangle"},
        {"label": "y", "points": [[15, 15], [19, 19]], "group_id": 2, "shape_type": "circle"},
        {"label": "m", "points": [[3, 3], [8, 8]], "shape_type": "mask",
         "mask": base64.b64encode(cv2.imencode(".png", _MASK)[1]).decode()},
    ],
}  # fmt: skip


def _region(label, **shape):
    return {"shape_attributes": shape, "region_attributes": {"c": label}}


VIA = {
    "_via_img_metadata": {
        "0.png1": {
            "filename": "0.png",
            "size": 1,
            "regions": [
                _region("x", name="polygon", all_points_x=[1, 9, 9], all_points_y=[1, 1, 9]),
                _region("y", name="rect", x=1, y=1, width=9, height=9),
                _region({"x": True}, name="ellipse", cx=19, cy=19, rx=4, ry=3, theta=0.1),
                _region("x", name="circle", cx=29, cy=29, r=4),
            ],
        }
    }
}


def write_labelme(folder: Path, case: Any) -> Path:
    (folder / "labelme").mkdir(exist_ok=True)
    if not (folder / "labelme" / "0.png").exists():
        shutil.copy(folder / "0.png", folder / "labelme" / "0.png")
    return _json_file(LABELME, "labelme/case.json")(folder, case)


def converted(images, folder: Path) -> None:
    """What was converted is a COCO json that training takes."""
    content = build_coco(images, folder)
    path = folder / "converted" / "converted.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    if not content["annotations"]:
        return
    try:
        load_coco(path, folder, bad_annotations="skip", require_annotations=False)
    except (ValueError, OSError) as error:
        raise AssertionError(f"converts and does not load: {error}") from error
    finally:
        path.unlink()


def read_labelme_file(path: Path) -> None:
    images, _ = read_labelme(path.parent, None, path.parent / "out.json")
    converted(images, path.parent)


def read_via_file(path: Path) -> None:
    images, _ = read_via(path, path.parent)
    converted(images, path.parent)


# Images and videos.


@cache
def image_files() -> list[bytes]:
    color = cv2.GaussianBlur(
        np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8), (9, 9), 3
    )
    found = [cv2.imencode(kind, color)[1].tobytes() for kind in (".png", ".jpg", ".bmp", ".webp")]
    found.append(cv2.imencode(".tif", color)[1].tobytes())
    found.append(cv2.imencode(".png", color.astype(np.uint16) * 257)[1].tobytes())
    for mode, kind, options in (
        ("P", "PNG", {}), ("L", "JPEG", {"progressive": True}), ("CMYK", "JPEG", {}),
        ("RGBA", "PNG", {}), ("P", "GIF", {}),
    ):  # fmt: skip
        file = io.BytesIO()
        Image.fromarray(color).convert(mode).save(file, kind, **options)
        found.append(file.getvalue())
    return found


def resized(data: bytes, width: int, height: int) -> bytes:
    """With another size in the header: of a PNG, checksum included, a JPEG, a BMP or a GIF."""
    found = bytearray(data)
    if data.startswith(b"\x89PNG"):
        found[16:24] = struct.pack(">II", width % 2**31, height % 2**31)
        found[29:33] = struct.pack(">I", zlib.crc32(bytes(found[12:29])))
    elif data.startswith(b"\xff\xd8"):
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        found[at + 5 : at + 9] = struct.pack(">HH", height % 2**16, width % 2**16)
    elif data.startswith(b"BM"):
        found[18:26] = struct.pack("<II", width % 2**32, height % 2**32)
    elif data.startswith(b"GIF"):
        found[6:10] = struct.pack("<HH", width % 2**16, height % 2**16)
    return bytes(found)


image_cases = st.one_of(
    st.tuples(hostile.places, st.just("bytes"), hostile.byte_edits),
    st.tuples(hostile.places, st.just("bytes"), hostile.byte_edits),
    st.tuples(hostile.places, st.just("size"), st.tuples(hostile.numbers, hostile.numbers)),
)


def write_image(folder: Path, case: Any) -> Path:
    number, kind, change = case
    data = image_files()[number % len(image_files())]
    data = resized(data, *change) if kind == "size" else hostile.edit_bytes(data, change)
    path = folder / "case.img"
    path.write_bytes(data)
    return path


def read_image(path: Path) -> None:
    image = decode_image(path)
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    with contextlib.suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        with Image.open(path) as header:
            if header.format in ("PNG", "JPEG", "BMP"):
                assert header.size == image.shape[1::-1]


@cache
def videos() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_video(Path(folder) / name, 4) for name in ("a.mp4", "a.mkv")]
        paths.append(write_video(Path(folder) / "a.avi", 4, "mpeg4"))
        return [path.read_bytes() for path in paths]


def write_video_case(folder: Path, case: Any) -> Path:
    number, edits = case
    path = folder / "case.mp4"
    path.write_bytes(hostile.edit_bytes(videos()[number % len(videos())], edits))
    return path


def read_video(path: Path) -> None:
    video = Video(str(path))
    assert 0 < video.rate < 10**6 and 0 < video.pixel_aspect < 10**6
    last = Fraction(-1)
    for frame in video.frames(max_frames=20):
        assert frame.image.dtype == np.uint8 and frame.image.shape[2] == 3
        assert frame.time > last
        last = frame.time


# Weights.

ARRAYS = {
    "conv.weight": np.arange(24, dtype="<f4").reshape(2, 3, 4),
    "conv.bias": np.ones(2, "<f4"),
}
SNIPPETS = [
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"cnumpy\nndarray\n", b"R", b"b", b"(", b"t", b")", b"}", b"]", b".", b"0", b"2", b"Q",
    b"K\x00", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"X\xff\xff\xff\x7f",
    b"\x85", b"\x93", b"\x81", b"h\x00", b"N", b"s", b"\x95" + b"\xff" * 8,
    b"\x8e" + b"\xff" * 7 + b"\x7f",
    b"u", b"I" + b"9" * 5000 + b"\n", b"]" * 20_000 + b"a" * 19_999,
]  # fmt: skip
pickle_edits = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete", "double"]),
        hostile.places,
        st.sampled_from(SNIPPETS),
    ),
    min_size=1,
    max_size=3,
)


def edit_pickle(data: bytes, edits: list) -> bytes:
    """Change single instructions, as long as the rest can be told apart."""
    for kind, place, snippet in edits:
        try:
            starts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
        except Exception:  # of pickletools, for a pickle that earlier edits broke
            break
        at = place % (len(starts) - 1)
        start, end = starts[at], starts[at + 1]
        old = data[start:end]
        new = {"replace": snippet, "insert": snippet + old, "delete": b"", "double": old + old}[
            kind
        ]
        data = data[:start] + new + data[end:]
    return data


@cache
def pickles() -> list[bytes]:
    legacy = TorchFile(legacy=True)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"legacy{os.getpid()}.pth"
    legacy.write(path, {name: legacy.tensor(array) for name, array in ARRAYS.items()})
    data = path.read_bytes()
    path.unlink()
    whole = {"model": ARRAYS, "__author__": "us", "epoch": 3, "args": [1.5, None, (True, b"x")]}
    return [*(pickle.dumps(whole, protocol) for protocol in (0, 1, 2, 3, 4, 5)), data]


pickle_cases = st.one_of(
    st.tuples(hostile.places, pickle_edits, hostile.no_edits),
    st.tuples(hostile.places, pickle_edits, hostile.no_edits),
    st.tuples(hostile.places, st.just([]), hostile.byte_edits),
)


def write_pickle(folder: Path, case: Any) -> Path:
    number, edits, changes = case
    data = edit_pickle(pickles()[number % len(pickles())], edits)
    path = folder / "case.pth"
    path.write_bytes(hostile.edit_bytes(data, changes))
    return path


REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
KINDS = ["FloatStorage", "HalfStorage", "DoubleStorage", "BFloat16Storage", "LongStorage"]
KINDS += ["UntypedStorage", "BoolStorage", "ComplexFloatStorage", "Tensor"]
sizes = st.one_of(
    st.integers(0, 30), st.sampled_from([-1, 2**24, 2**31, 2**40, 2**62, 2**70, True])
)
tensor = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS), "numel": sizes, "offset": sizes,
     "shape": st.lists(sizes, max_size=4), "strides": st.lists(sizes, max_size=4),
     "same": st.booleans(), "times": st.sampled_from([1, 1, 1, 100])}
)  # fmt: skip
zip_cases = st.one_of(
    st.tuples(st.just("tensor"), st.lists(tensor, min_size=1, max_size=3), st.none()),
    st.tuples(st.just("pickle"), pickle_edits, st.none()),
    st.tuples(st.just("member"), hostile.places, hostile.byte_edits),
    st.tuples(st.just("bytes"), hostile.byte_edits, st.none()),
)


def write_zip(folder: Path, case: Any) -> Path:
    kind, change, edits = case
    path, file = folder / "case.pth", TorchFile()
    tree = {name: file.tensor(array) for name, array in ARRAYS.items()}
    if kind == "tensor":
        hooks = Call(Name("collections", "OrderedDict"), ())
        for number, view in enumerate(change):
            storage = file.storage(view["kind"], bytes(96), view["numel"])
            strides = view["strides"]
            if view["same"]:  # as many strides as sizes
                strides = (strides + [0] * 4)[: len(view["shape"])]
            args = (storage, view["offset"], tuple(view["shape"]), tuple(strides), False, hooks)
            for repeat in range(view["times"]):
                tree[f"tensor{number}.{repeat}"] = Call(REBUILD, args)
    extra = {"data.pkl": edit_pickle(dumps(tree), change)} if kind == "pickle" else {}
    file.write(path, tree, **extra)
    if kind == "member":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = list(members)[change % len(members)]
        members[name] = hostile.edit_bytes(members[name], edits)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if change % 5 == 0 else 0) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    if kind == "bytes":
        path.write_bytes(hostile.edit_bytes(path.read_bytes(), change))
    return path


def read_weights(path: Path) -> None:
    arrays = read_arrays(path)
    assert arrays and all(isinstance(name, str) for name in arrays)
    for array in arrays.values():
        assert isinstance(array, np.ndarray) and array.dtype.kind in "fiubc"
        assert array.flags.c_contiguous
    assert sum(array.nbytes for array in arrays.values()) < 2**29


def write_safetensors(folder: Path, case: Any) -> Path:
    edits, changes, length = case
    data = save_safetensors(ARRAYS)
    size = int.from_bytes(data[:8], "little")
    header = hostile.dump(hostile.edit_json(json.loads(data[8 : 8 + size]), edits))
    stated = len(header) if length is None else length % 2**64
    path = folder / "case.safetensors"
    whole = stated.to_bytes(8, "little") + header + data[8 + size :]
    path.write_bytes(hostile.edit_bytes(whole, changes))
    return path


safetensors_cases = st.one_of(
    st.tuples(hostile.json_edits, hostile.no_edits, st.none()),
    st.tuples(hostile.json_edits, hostile.no_edits, st.none()),
    st.tuples(hostile.no_edits, hostile.no_edits, hostile.numbers),
    st.tuples(hostile.no_edits, hostile.byte_edits, st.none()),
)

# The fields of an entry: dtype, shape, shard, offset and size of the data.
tf_cases = st.one_of(
    st.tuples(st.just("entry"), hostile.places, hostile.byte_edits),
    st.tuples(st.just("entry"), hostile.places, hostile.byte_edits),
    st.tuples(st.just("name"), hostile.places, hostile.byte_edits),
    st.tuples(st.just("fields"), hostile.places, st.tuples(*[hostile.numbers] * 5)),
    st.tuples(st.just("index"), hostile.places, hostile.byte_edits),
    st.tuples(st.just("data"), hostile.places, hostile.byte_edits),
)


def write_tf(folder: Path, case: Any) -> Path:
    """Entries and names are changed before the checksums are computed, bytes after."""
    kind, place, change = case
    for old in folder.glob("case.ckpt*"):
        old.unlink()
    pairs, data = [(b"", tf.field(1, 1) + tf.field(3, tf.field(1, 1)))], b""
    for number in range(6):
        array = np.arange(number + 1, dtype="<f4")
        message = tf.entry(tf.FLOAT, array.shape, 0, len(data), array.tobytes())
        pairs.append((f"resnet50/layer_{number}/kernel".encode(), message))
        data += array.tobytes()
    at = place % len(pairs)
    key, message = pairs[at]
    if kind == "entry":
        pairs[at] = key, hostile.edit_bytes(message, change)
    elif kind == "name":
        pairs[at] = hostile.edit_bytes(key or b"x", change), message
    elif kind == "fields":
        dtype, *dims, shard, size = change
        shape = tf.field(2, b"".join(tf.field(2, tf.field(1, dim)) for dim in dims))
        message = tf.field(1, dtype) + shape + tf.field(3, shard) + tf.field(5, size)
        pairs[at] = key, message + tf.varint(6 << 3 | 5) + bytes(4)
    index = tf.table(pairs)
    index = hostile.edit_bytes(index, change) if kind == "index" else index
    data = hostile.edit_bytes(data, change) if kind == "data" else data
    (folder / "case.ckpt.index").write_bytes(index)
    (folder / "case.ckpt.data-00000-of-00001").write_bytes(data)
    return folder / "case.ckpt"


# What a run leaves.


@cache
def run_config() -> dict:
    content = {"config": config().to_dict(), "categories": [{"id": 1, "name": "a"}]}
    return json.loads(json.dumps(content))


def write_config(folder: Path, case: Any) -> Path:
    (folder / "run").mkdir(exist_ok=True)
    return _json_file(run_config(), "run/config.json")(folder, case)


def read_config(path: Path) -> None:
    """As commands read it, and as a run that goes on."""
    load_config(path.parent).to_dict()
    with contextlib.suppress(ValueError):
        load_config(path)
    open_workdir(path.parent, as_recipe(config()), run_config()["categories"], resuming=True)


MODEL = GOLDENS / "version_0_1_0" / "stablehlo"


@cache
def manifest() -> dict:
    return json.loads((MODEL / "manifest.json").read_text())


def write_manifest(folder: Path, case: Any) -> Path:
    (folder / "exported").mkdir(exist_ok=True)
    shutil.copy(MODEL / "model.stablehlo", folder / "exported")
    return _json_file(manifest(), "exported/manifest.json")(folder, case)


def read_manifest_file(path: Path) -> None:
    """What loads finds objects, and can be loaded as a recipe, its own code aside."""
    exported = load_exported(path.parent)
    assert all(0 < side < 2**16 for size in exported.sample_sizes for side in size)
    load_predictor(exported, 0.5, None)
    with consent.allow_code("tests.small_trunk"), contextlib.suppress(ValueError):
        load_config(path.parent)


RECORDS = [
    {"step": step, "loss/total": 1.5 / step, "lr": 0.1, "perf/images_per_s": 10.0, "ap/box": 0.25}
    for step in range(1, 6)
]


def write_records(folder: Path, case: Any) -> Path:
    edits, changes = case
    path = folder / "metrics.jsonl"
    lines = [hostile.dump(record) for record in hostile.edit_json(RECORDS, edits)]
    path.write_bytes(hostile.edit_bytes(b"\n".join(lines) + b"\n", changes))
    return path


def read_records(path: Path) -> None:
    records = read_metrics(path)
    assert training_section(records).count("<script") == 0
    truncate_metrics(path, 3)
    assert all(record["step"] <= 3 for record in read_metrics(path))


# TFRecords: a feature is replaced, or bytes are, of the messages (before checksums are made) or of
# the file.


@cache
def record_features() -> list[dict]:
    file = cv2.imencode(".png", np.full((*SIZE, 3), 99, np.uint8))[1].tobytes()
    return [tfrecord_writer.coco_features(COCO, image, file) for image in COCO["images"]]


FEATURES: list[Any] = [[], [b""], [b"1"], [b"\xff"], [b"x" * 5000], [b"a", b"b"], [b"../../x"]]
FEATURES += [[0], [1], [-1], [2**63 - 1], [7, 7], [1] * 100, [0.0], [float("nan")], [1e38, -1e38]]
FEATURES += [[float("inf")] * 2, [0.5, 0.5], [64], [48], [10**9], [1.0, 1.0], [b"17", b"17"]]
record_cases = st.one_of(
    st.tuples(st.just("feature"), hostile.places, st.sampled_from(FEATURES)),
    st.tuples(st.just("feature"), hostile.places, st.sampled_from(FEATURES)),
    st.tuples(st.just("message"), hostile.places, hostile.byte_edits),
    st.tuples(st.just("file"), hostile.places, hostile.byte_edits),
)


def write_record_file(folder: Path, case: Any) -> Path:
    kind, place, change = case
    records = [dict(features) for features in record_features()]
    record = place % len(records)
    names = list(records[record])
    if kind == "feature":
        records[record][names[place // len(records) % len(names)]] = change
    messages = [tfrecord_writer.example(features, packed=place % 2 == 0) for features in records]
    if kind == "message":
        messages[record] = hostile.edit_bytes(messages[record], change)
    data = b"".join(map(tfrecord_writer.record, messages))
    path = folder / "case.tfrecord"
    path.write_bytes(hostile.edit_bytes(data, change) if kind == "file" else data)
    return path


def read_record_file(path: Path) -> None:
    """What becomes a json trains from the same records."""
    content, _ = read_tfrecords(str(path), None, lambda total: lambda done: None)
    output = path.parent / "case.json"
    output.write_text(json.dumps(content))
    records = TFRecords(str(path))
    try:
        options = {"bad_annotations": "skip", "require_annotations": False, "records": records}
        dataset = load_coco(output, str(path), **options)
        records.select([image.id for image in dataset.images])
    finally:
        output.unlink()
    for index in range(len(dataset.images)):
        dataset.decode(index)


# Specs of TAO: a value of the blog's is replaced, or bytes are.

SPEC_VALUES = ['"[]"', '"()"', '"[1, 2, 3]"', '"((1, 2), (3, 4))"', '"' + "(" * 500 + '"']
SPEC_VALUES += ['"[1e999]"', '"[nan]"', '"{1: 2}"', '"(64, 64)"', '"9**9**9"', '"\\\\d"', "true"]
SPEC_VALUES += ["9" * 5000, "a" * 5000, "'" + "a" * 5000, "'" + "a" * 5000 + "'"]
SPEC_VALUES += ["0", "-1", "1.5", "nan", "inf", "1e308", "4294967295", "4294967296", "{}", "[1]"]
spec_cases = st.one_of(
    st.tuples(hostile.places, st.sampled_from(SPEC_VALUES), hostile.no_edits),
    st.tuples(hostile.places, st.sampled_from(SPEC_VALUES), hostile.no_edits),
    st.tuples(hostile.places, st.none(), hostile.byte_edits),
)


def write_spec(folder: Path, case: Any) -> Path:
    place, value, changes = case
    lines = BLOG.splitlines()
    given = [number for number, line in enumerate(lines) if ": " in line]
    number = given[place % len(given)]
    if value is not None:
        lines[number] = f"{lines[number].partition(':')[0]}: {value}"
    path = folder / "spec.txt"
    path.write_bytes(hostile.edit_bytes("\n".join(lines).encode(), changes))
    return path


def read_spec(path: Path) -> None:
    notes = write_recipe(path, path.parent / "recipe.py", 8)
    assert all("\n" not in note and len(note) < 4000 for note in notes)


PARSERS = {
    "COCO json": Parser(json_cases, _json_file(COCO, "case.json"), read_coco),
    "jsons to repair": Parser(json_cases, _json_file(COCO, "case.json"), read_repaired),
    "results json": Parser(json_cases, _json_file(RESULTS, "results.json"), read_results),
    "labelme json": Parser(json_cases, write_labelme, read_labelme_file),
    "VIA json": Parser(json_cases, _json_file(VIA, "via.json"), read_via_file),
    **{name: Parser(*parts) for name, parts in FORMATS.items()},
    **{name: Parser(*parts) for name, parts in CONFIGS.items()},
    "images": Parser(image_cases, write_image, read_image),
    **{name: Parser(*parts) for name, parts in (TIFFS | MAPS).items()},
    "arrays of NumPy": Parser(*NUMPY),
    "tars": Parser(*TARS),
    "videos": Parser(st.tuples(hostile.places, hostile.byte_edits), write_video_case, read_video),
    "pickles": Parser(pickle_cases, write_pickle, read_weights),
    "torch zips": Parser(zip_cases, write_zip, read_weights),
    "safetensors": Parser(safetensors_cases, write_safetensors, read_weights),
    "TensorFlow checkpoints": Parser(tf_cases, write_tf, read_weights),
    "TFRecords": Parser(record_cases, write_record_file, read_record_file),
    "TAO specs": Parser(spec_cases, write_spec, read_spec),
    "config.json": Parser(json_cases, write_config, read_config),
    "manifest.json": Parser(json_cases, write_manifest, read_manifest_file),
    "metrics.jsonl": Parser(json_cases, write_records, read_records),
}
