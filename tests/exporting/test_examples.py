"""The clients in examples/: detect.py against Predictor, in onnxruntime and as a client of Triton's
protocol, and the page against detect.py."""

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import cv2
import numpy as np
import pytest
from PIL import Image

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.evaluation.paste import RULES, paste_mask
from mask_rcnn_jax.exporting.manifest import RESIZES, STORED, TURNED
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.images.decode import decode_image
from tests.browser import chromium
from tests.exporting.alone import SCRIPT, run_alone
from tests.small_model import (
    SMALL_TRUNK,
    random_variables,
    small_config,
    write_artifact,
)

PLACEMENTS = [(resize, "floor") for resize in RESIZES]
PLACEMENTS += [("shortest_edge", "round"), ("shortest_edge", "caffe")]
PIXELS = np.add.outer(3 * np.arange(40), 2 * np.arange(61)[:, None] + [0, 9, 30])
PIXELS = (PIXELS % 256).astype(np.uint8)


def _saved(image, suffix, **options):
    def save(folder):
        image.save(folder / f"a{suffix}", **options)
        return folder / f"a{suffix}"

    return save


def _by_opencv(pixels, suffix):
    def save(folder):
        cv2.imwrite(str(folder / f"a{suffix}"), pixels)
        return folder / f"a{suffix}"

    return save


def _exif(entry):
    exif = Image.Exif()
    exif[0x0112] = entry
    return exif


RGB = Image.fromarray(PIXELS)
DEEP = PIXELS.astype(np.uint16) * 256 + 77
KINDS = {
    "color": _saved(RGB, ".png"),
    "gray": _saved(RGB.convert("L"), ".png"),
    "gray and alpha": _saved(RGB.convert("LA"), ".png"),
    "gray of 16 bits": _by_opencv(DEEP[..., 0], ".png"),
    "color of 16 bits": _by_opencv(DEEP, ".png"),
    "TIFF of 16 bits": _by_opencv(DEEP[..., 0], ".tif"),
    "one bit": _saved(RGB.convert("1"), ".png"),
    "palette": _saved(RGB.convert("P"), ".png"),
    "alpha": _saved(Image.merge("RGBA", (*RGB.split(), RGB.split()[0])), ".png"),
    "JPEG": _saved(RGB, ".jpg"),
    "gray JPEG": _saved(RGB.convert("L"), ".jpg"),
    "CMYK": _saved(RGB.convert("CMYK"), ".jpg", quality=100),
    "turned JPEG": _saved(RGB, ".jpg", exif=_exif(6)),
    "mirrored JPEG": _saved(RGB, ".jpg", exif=_exif(2)),
    "WebP": _saved(RGB, ".webp", lossless=True),
    "BMP": _saved(RGB, ".bmp"),
    "GIF": _saved(RGB.convert("P"), ".gif"),
}
_spec = importlib.util.spec_from_file_location("detect", SCRIPT)
client = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(client)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported model, by the rule with the most cases."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    config = small_config("coco_torchvision", (64, 100), data__val_images="absent", **SMALL_TRUNK)
    variables = random_variables(config)
    variables["params"]["box_head"]["cls_score"]["kernel"] *= 0.4  # else all are of one class
    return write_artifact(
        tmp_path_factory.mktemp("examples"), (config, variables), "onnx", picture_size=None
    )


@pytest.fixture(scope="module")
def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def rules_of(options: ExampleOptions, canvas) -> dict:
    """The entries of a manifest that say where an image is."""
    return {
        "resize": options.resize,
        "image_size": options.image_size,
        "rounding_of_sides": options.resize_rounding,
        "canvas": canvas,
    }


@pytest.mark.parametrize(
    ("resize", "rounding"),
    [
        *((resize, "floor") for resize in RESIZES),
        ("shortest_edge", "round"),
        ("shortest_edge", "caffe"),
    ],
)
def test_places_images_as_predictor_does(resize, rounding):
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 3000, (300, 2)).tolist(), [1, 2999], [64, 128], [77, 77], [128, 64]]
    image_size = (600, 1000) if resize == "shortest_edge" else (64 * 9, 64 * 15)
    options = ExampleOptions(image_size, resize, 1, rounding)
    refused = 0
    for height, width in sizes:
        plan = resize_plan(height, width, options)
        canvas = (640, 1024) if resize == "shortest_edge" else image_size
        if plan.canvas != canvas:
            refused += 1
            with pytest.raises(ValueError, match="belongs on a canvas that is turned"):
                client.resized_size(height, width, rules_of(options, canvas))
        else:
            found = client.resized_size(height, width, rules_of(options, canvas))
            assert found == plan.size, (height, width)
    assert bool(refused) == (resize == "shortest_edge")


@pytest.mark.parametrize(
    ("antialias", "dtype"), [(False, "uint8"), (False, "float32"), (True, "uint8")]
)
@pytest.mark.parametrize("size", [(40, 70), (90, 150)])
def test_resizes_images_as_predictor_does(antialias, dtype, size):
    image = np.random.default_rng(1).integers(0, 256, (61, 103, 3), np.uint8)
    options = ExampleOptions((128, 192), "fit", 1, antialias=antialias, image_dtype=dtype)
    plan = resize_plan(61, 103, options)._replace(size=size)
    expected = resize_image(image, plan, options)[: size[0], : size[1]].astype(np.float32)
    rules = {
        "interpolation": "PIL bilinear" if antialias else "OpenCV INTER_LINEAR",
        "rounded_to_whole_numbers": dtype == "uint8",
    }
    found = client.resize(image, size, rules).astype(np.float32)
    # OpenCV has 11 bits for the weights of whole numbers.
    bound = 0 if antialias else 1 if dtype == "uint8" else 1e-3
    assert np.abs(found - expected).max() <= bound


@pytest.mark.parametrize("rule", RULES)
def test_pastes_masks_as_predictor_does(rule):
    rng = np.random.default_rng(2)
    boxes = rng.uniform(-5, 60, (60, 4)).astype(np.float32)
    boxes[:50] = np.sort(boxes[:50].reshape(-1, 2, 2), axis=1).reshape(-1, 4)
    boxes[50] = 0, 0, 50, 40
    boxes[51] = 7.3, 9.1, 7.3, 20.0
    total = 0
    for box in boxes:
        mask = rng.uniform(0, 1, (14, 14)).astype(np.float32)
        crop, (x, y) = paste_mask(mask, box, 40, 50, rule=rule)
        expected = np.zeros((40, 50), bool)
        expected[y : y + crop.shape[0], x : x + crop.shape[1]] = crop
        np.testing.assert_array_equal(client.paste(mask, box, 40, 50, rule), expected)
        total += expected.sum()
    assert total > 1000


def assert_equal_to_predictor(found, expected):
    assert [item.name for item in found] == expected.names
    np.testing.assert_allclose([item.score for item in found], expected.scores, atol=1e-3)
    np.testing.assert_allclose([item.box for item in found], expected.boxes, atol=0.05)
    for item, mask in zip(found, expected.masks, strict=True):
        assert item.mask.shape == mask.shape
        assert (item.mask != mask).mean() < 2e-3  # pixels whose probability rounds to 0.5


@pytest.fixture(scope="module")
def expected(folder):
    """Images, and what Predictor finds in each."""
    images = [generate_image(0, "val", i, size)[0] for i, size in enumerate([(60, 96), (75, 110)])]
    return images, mrcnn.load(folder, score_threshold=0.3)(images)


def test_finds_what_predictor_finds(folder, manifest, expected):
    run = client.load_onnxruntime(folder / "model.onnx")
    for image, one in zip(*expected, strict=True):
        assert len(one) >= 3 and one.masks.any()
        found = client.detect(run, manifest, image, threshold=0.3)
        assert_equal_to_predictor(found, one)
        drawn = np.asarray(client.draw(image, found))
        assert drawn.shape == image.shape and (drawn != image).any()


@pytest.mark.parametrize("options", [{"batch": 2}, {"deepstream": True}], ids=["two", "any"])
@pytest.mark.slow
def test_batches_of_images_of_one_size(options, tmp_path, monkeypatch):
    """Two interleaved ones, and any number of planar ones."""
    config = small_config("quickstart", (64, 128), data__val_images="absent", **SMALL_TRUNK)
    options = {"picture_size": (64, 100), **options}
    model = config, random_variables(config)
    folder = write_artifact(tmp_path, model, "onnx", **options)
    manifest = json.loads((folder / "manifest.json").read_text())
    run = client.load_onnxruntime(folder / "model.onnx")
    image = generate_image(0, "val", 3, (64, 100))[0]
    found = client.detect(run, manifest, image, threshold=0.3)
    (expected,) = mrcnn.load(folder, score_threshold=0.3)([image])
    assert len(expected) >= 3
    assert_equal_to_predictor(found, expected)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(partial(KServe, run, (folder / "config.pbtxt").read_text())) as address:
        asked = client.triton(f"{address}/v2/models/mine")
        assert_equal_to_predictor(client.detect(asked, manifest, image, threshold=0.3), expected)
    with pytest.raises(ValueError, match=re.escape("the image is 64 x 80, not [64, 100]")):
        client.detect(run, manifest, image[:, :80])


def test_script_runs_with_the_packages_alone_that_it_names(folder, expected, tmp_path):
    image, one = (values[0] for values in expected)
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        Image.fromarray(image).save(tmp_path / place / "image.png")
    arguments = [folder, "a/image.png", "b/image.png", "--threshold", "0.3", "--output", "a"]
    done = run_alone(tmp_path, "onnxruntime", *arguments)
    assert done.returncode == 0, done.stderr
    pattern = r"image.png: (class \d) 0\.\d{3} \[\d+\.\d(?:, \d+\.\d){3}\] \d+ pixels"
    assert [re.fullmatch(pattern, x)[1] for x in done.stdout.splitlines()] == 2 * one.names
    np.testing.assert_array_equal(client.read_image(tmp_path / "a" / "image.png", {}), image)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "image.png", "image_2.png", "image_3.png"
    ]  # fmt: skip
    with Image.open(tmp_path / "a" / "image_2.png") as drawn:
        assert drawn.size == (96, 60)


@pytest.mark.parametrize("orientation", [TURNED, STORED])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_images_as_predictor_does(kind, orientation, tmp_path):
    path = KINDS[kind](tmp_path)
    found = client.read_image(path, {"orientation": orientation})
    expected = decode_image(path, upright=orientation == TURNED)
    assert found.shape == expected.shape and found.std() > 20
    if kind == "CMYK":  # which OpenCV and Pillow mix in their own ways
        assert np.abs(found - np.float32(expected)).mean() < 2
    else:
        np.testing.assert_array_equal(found, expected)


def test_script_names_an_image_that_the_model_does_not_take(folder, tmp_path, monkeypatch, capsys):
    Image.new("RGB", (60, 96)).save(tmp_path / "high.png")
    arguments = [SCRIPT.name, str(folder), str(tmp_path / "high.png")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        client.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "high.png: an image of 96 x 60 belongs on a canvas that is turned" in line


class KServe(BaseHTTPRequestHandler):
    """A model in KServe's protocol with binary tensors, as Triton answers."""

    TYPES = {"UINT8": "B", "FP32": "f", "INT32": "i", "BOOL": "?"}

    def __init__(self, run, config, *arguments):
        self.run, self.config = run, config
        super().__init__(*arguments)

    def do_POST(self):
        assert self.path == "/v2/models/mine/infer"
        length = int(self.headers["Inference-Header-Content-Length"])
        request = json.loads(self.rfile.read(length))
        inputs = {}
        for tensor in request["inputs"]:
            batches = "max_batch_size: 0\n" not in self.config  # whose axis is not in dims
            dims = ", ".join(map(str, tensor["shape"][batches:]))
            typed = f"data_type: TYPE_{tensor['datatype']}\n    dims: [ {dims} ]"
            assert f'name: "{tensor["name"]}"\n    {typed}' in self.config
            data = self.rfile.read(tensor["parameters"]["binary_data_size"])
            values = np.array(list(struct.iter_unpack(f"<{self.TYPES[tensor['datatype']]}", data)))
            dtype = {"UINT8": np.uint8, "FP32": np.float32, "INT32": np.int32}[tensor["datatype"]]
            inputs[tensor["name"]] = values.reshape(tensor["shape"]).astype(dtype)
        assert request["parameters"]["binary_data_output"] is True
        described, parts = [], []
        for name, array in self.run(inputs).items():
            datatype = {"float32": "FP32", "int32": "INT32", "bool": "BOOL"}[array.dtype.name]
            code = f"<{array.size}{self.TYPES[datatype]}"
            parts.append(struct.pack(code, *array.reshape(-1).tolist()))
            size = {"binary_data_size": len(parts[-1])}
            entry = {"name": name, "datatype": datatype, "shape": array.shape, "parameters": size}
            described.append(entry)
        header = json.dumps({"model_name": "mine", "outputs": described}).encode()
        body = header + b"".join(parts)
        self.send_response(200)
        self.send_header("Inference-Header-Content-Length", str(len(header)))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(handler):
    """The address of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_asks_triton(folder, manifest, expected, monkeypatch):
    run = client.load_onnxruntime(folder / "model.onnx")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    image, one = (values[1] for values in expected)
    with serving(partial(KServe, run, (folder / "config.pbtxt").read_text())) as address:
        asked = client.triton(f"{address}/v2/models/mine")
        found = client.detect(asked, manifest, image, threshold=0.3)
    assert_equal_to_predictor(found, one)


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def web_folder(folder, tmp_path_factory):
    """The model, the page and onnxruntime-web, as the documentation says."""
    if shutil.which("npm") is None:
        pytest.skip("no npm, which installs onnxruntime-web")
    web = tmp_path_factory.mktemp("web")
    install = ["npm", "install", "--no-audit", "--no-fund", "onnxruntime-web"]
    done = subprocess.run(install, cwd=web, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm install onnxruntime-web: {done.stderr[-200:]}")
    for path in (*(ROOT / "examples" / "web").iterdir(), folder / "model.onnx"):
        shutil.copy(path, web)
    shutil.copy(folder / "manifest.json", web)
    return web


@pytest.mark.slow
def test_page_finds_the_same_in_a_browser(web_folder, folder, manifest, expected, tmp_path):
    run = client.load_onnxruntime(folder / "model.onnx")
    handler = partial(Files, directory=web_folder)
    with chromium(tmp_path / "profile") as page, serving(handler) as address:
        page.open(f"{address}/index.html", 1000)
        page.wait_for("!document.getElementById('file').disabled")
        for number, image in enumerate(expected[0]):
            path = tmp_path / f"{number}.png"
            Image.fromarray(image).save(path)
            page.run("shown = null")
            page.choose_file("#file", path)
            page.wait_for("shown !== null && document.getElementById('status').textContent !== ''")
            drawn = page.run("document.querySelectorAll('#objects li').length")
            text = (
                "shown.objects.map((o) => ({...o, mask: {...o.mask, inside: [...o.mask.inside]}}))"
            )
            found = page.run(text)
            ours = client.detect(run, manifest, image, threshold=0.05)
            assert drawn == sum(one.score >= 0.5 for one in ours) > 0
            assert [one["name"] for one in found] == [one.name for one in ours]
            scores, boxes = ([one[key] for one in found] for key in ("score", "box"))
            np.testing.assert_allclose(scores, [one.score for one in ours], atol=1e-3)
            np.testing.assert_allclose(boxes, [one.box for one in ours], atol=0.05)
            for one, other in zip(found, ours, strict=True):
                mask, place = np.zeros_like(other.mask), one["mask"]
                rows = slice(place["top"], place["top"] + place["height"])
                columns = slice(place["left"], place["left"] + place["width"])
                inside = np.array(place["inside"], bool).reshape(place["height"], place["width"])
                mask[rows, columns] = inside
                assert (mask != other.mask).mean() < 2e-3
            assert sum(one.mask.sum() for one in ours) > 100
        portrait = tmp_path / "portrait.png"
        Image.fromarray(np.ascontiguousarray(np.rot90(expected[0][0]))).save(portrait)
        page.choose_file("#file", portrait)
        page.wait_for("document.getElementById('error').textContent.includes('is turned')")
        assert page.complaints() == []
        assert all(request.startswith(address) for request in page.requests())


@pytest.mark.slow
def test_page_places_and_resizes_images_as_the_script_does(web_folder, tmp_path):
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 3000, (200, 2)).tolist(), [1, 2999], [64, 128], [77, 77]]
    image = rng.integers(0, 256, (61, 103, 3), np.uint8)
    rgba = np.concatenate([image, np.full((61, 103, 1), 255, np.uint8)], axis=2).ravel().tolist()
    with (
        chromium(tmp_path / "profile") as page,
        serving(partial(Files, directory=web_folder)) as at,
    ):
        page.open(f"{at}/index.html", 1000)
        for resize, rounding in PLACEMENTS:
            image_size = (600, 1000) if resize == "shortest_edge" else (576, 960)
            options = ExampleOptions(image_size, resize, 1, rounding)
            rules = rules_of(options, (640, 1024) if resize == "shortest_edge" else image_size)
            fitting = [one for one in sizes if resize != "shortest_edge" or one[0] <= one[1]]
            call = f"{json.dumps(fitting)}.map(([h, w]) => resizedSize(h, w, {json.dumps(rules)}))"
            expected = [list(client.resized_size(*one, rules)) for one in fitting]
            assert page.run(call) == expected, (resize, rounding)
        for interpolation, whole in (("PIL bilinear", True), ("OpenCV INTER_LINEAR", False)):
            rules = {"interpolation": interpolation, "rounded_to_whole_numbers": whole}
            for size in ((40, 70), (90, 150)):
                picture = f"{{width: 103, height: 61, data: {rgba}}}"
                given = f"resize({picture}, {json.dumps(size)}, {json.dumps(rules)})"
                found = np.reshape(page.run(f"[...{given}]"), (*size, 3))
                bound = 1 if whole else 1e-3
                assert np.abs(found - client.resize(image, size, rules)).max() <= bound
