"""Serving a model of other bands: bodies, limits before anything is decoded, and what is seen."""

import base64
import io
import json
import zipfile

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.images.bands import Bands
from tests.predict.stub_predictor import StubPredictor
from tests.serving.asking import ask, error_of, png, serving

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")

NAMES = ("red", "green", "blue", "nir")
BYTES = {"Content-Type": "application/octet-stream"}
DEEP = np.random.default_rng(0).integers(2000, 4096, (60, 40, 4)).astype(np.uint16)


class BandsPredictor(StubPredictor):
    """Of four bands, which finds an object of class 1 in any image."""

    def __init__(self, bands: Bands, upright: bool = True):
        super().__init__()
        self.bands, self.upright = bands, upright

    def samples(self):
        return [np.zeros((8, 8, self.bands.count), np.uint8)]

    def prepare(self, image, size=None):
        scaled = self.bands.scaled(image)
        prepared = super().prepare(self.bands.to_rgb(scaled))
        return prepared._replace(canvas=np.ones((1, 1, scaled.shape[2]), scaled.dtype))


@pytest.fixture(scope="module")
def server():
    bands = Bands(names=NAMES, scale="bits", bits=12)
    with serving(BandsPredictor(bands), content=100_000, pixels=10_000) as server:
        yield server


def stored(kind: str, pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    if kind == "tiff":
        options = dict(photometric="rgb", extrasamples=[0])
        tifffile.imwrite(file, pixels, compression="zlib", **options)
    elif kind == "pages":
        tifffile.imwrite(file, pixels, compression="zlib", photometric="minisblack")
    elif kind == "png":
        file.write(cv2.imencode(".png", pixels[..., [2, 1, 0, 3]])[1].tobytes())
    else:
        (np.savez_compressed if kind == "npz" else np.save)(file, pixels)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["tiff", "png", "npy", "npz"])
def test_bodies_hold_bands(server, kind):
    response = ask(server, body=stored(kind, DEEP), headers=BYTES, path="/detect?view=1")
    assert response.status == 200, response.body
    answer = json.loads(response.body)
    assert (answer["image"]["width"], answer["image"]["height"]) == (40, 60)
    assert answer["detections"][0]["bbox"] == [20, 30, 20, 30]
    head, _, content = answer["image"]["view"].partition(",")
    assert head == "data:image/jpeg;base64"
    seen = cv2.imdecode(np.frombuffer(base64.b64decode(content), np.uint8), 1)[..., ::-1]
    expected = DEEP[..., :3].mean(axis=(0, 1)) * (255 / 4095)
    np.testing.assert_allclose(seen.mean(axis=(0, 1)), expected, atol=4)


@pytest.mark.parametrize("shape", [(1, 5000, 4), (5000, 1, 4)])
def test_a_thin_image_is_seen(shape):
    body = stored("npy", np.full(shape, 4095, np.uint16))
    with serving(BandsPredictor(Bands(names=NAMES, scale="bits", bits=12))) as server:
        answer = json.loads(ask(server, body=body, headers=BYTES, path="/detect?view=1").body)
    content = base64.b64decode(answer["image"]["view"].partition(",")[2])
    seen = cv2.imdecode(np.frombuffer(content, np.uint8), 1)
    assert sorted(seen.shape) == [1, 3, 2048] and seen.mean() > 250
    assert (answer["image"]["height"], answer["image"]["width"]) == shape[:2]


def test_the_page_asks_for_the_view_where_a_browser_has_none(server):
    assert json.loads(ask(server, "GET", "/model").body)["view"] is True
    for predictor, expected in (
        (StubPredictor(), False),
        (BandsPredictor(Bands(), upright=False), True),
    ):
        with serving(predictor) as other:
            assert json.loads(ask(other, "GET", "/model").body)["view"] is expected
            answer = json.loads(ask(other, body=png(), path="/detect?view=0").body)
            assert "view" not in answer["image"]
    assert "view is 'yes'" in error_of(ask(server, body=png(), path="/detect?view=yes"))


def zeros(kind: str, shape: tuple[int, ...], dtype=np.uint8) -> bytes:
    return stored(kind, np.zeros(shape, dtype))


def bomb() -> bytes:
    """A small npz whose array says that it is small, and is large."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": "<u2", "fortran_order": False, "shape": (20, 20, 4)}
        )
        archive.writestr("a.npy", head.getvalue() + bytes(50_000_000))
    return file.getvalue()


TOO_LARGE = {
    "pixels of a TIFF": lambda: zeros("tiff", (150, 100, 4)),
    "bytes of a TIFF": lambda: zeros("tiff", (90, 90, 4), np.uint16),
    "pages of a TIFF": lambda: zeros("pages", (50, 90, 90)),
    "bytes of an array": lambda: zeros("npz", (90, 90, 4), np.float64),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_sizes_are_known_before_anything_is_decoded(server, what, monkeypatch):
    def decoded(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr("numpy.lib.format.read_array", decoded)
    monkeypatch.setattr("mask_rcnn_jax.images.tiff._read_segments", decoded)
    response = ask(server, body=TOO_LARGE[what](), headers=BYTES)
    assert response.status == 413, response.body
    assert "more than the" in error_of(response)


def test_pixels_are_limited_whatever_they_take():
    bands = Bands(names=("gray",), scale="bits")
    with serving(BandsPredictor(bands), content=100_000, pixels=10_000) as server:
        for width, status in ((9_000, 200), (11_000, 413)):
            assert ask(server, body=zeros("npy", (1, width)), headers=BYTES).status == status


def test_a_bomb_is_read_no_further_than_its_head_says(server):
    response = ask(server, body=bomb(), headers=BYTES)
    assert response.status == 200, response.body


def test_a_huge_tile_is_refused(server):
    file = io.BytesIO()
    tifffile.imwrite(file, np.zeros((16, 16, 4), np.uint8), tile=(16, 16), photometric="rgb")
    content = bytearray(file.getvalue())
    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        for name in ("TileWidth", "TileLength"):
            tag = tiff.pages[0].tags[name]
            content[tag.valueoffset : tag.valueoffset + 2] = (65_520).to_bytes(2, "little")
    response = ask(server, body=bytes(content), headers=BYTES)
    assert response.status == 413 and "a tile" in error_of(response)


WRONG = {
    "three bands": (lambda: stored("npy", DEEP[..., :3]), "3 bands, expected 4: red, green"),
    "pages": (
        lambda: stored("pages", DEEP[:, :, 0].reshape(3, 20, 40)),
        "3 pages; data.bands.pages",
    ),
    "a cut TIFF": (lambda: stored("tiff", DEEP)[:-200], "truncated or damaged"),
    "a cut array": (lambda: stored("npy", DEEP)[:-200], "truncated or damaged"),
    "no numbers": (lambda: stored("npy", np.array([["a", "b"]])), "expected numbers"),
    "not finite": (lambda: stored("npy", np.full((4, 4, 4), np.nan)), "64 values are not finite"),
    "a text": (lambda: b"hello", "not an image, expected"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_a_line(server, what):
    make, message = WRONG[what]
    response = ask(server, body=make(), headers=BYTES)
    assert response.status == 400 and message in error_of(response)
