"""Pages, bands, alpha and bits of images that are not used are named once."""

import ast
import io
import json
import re
import shlex

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.unused import Unused, read_header, unused_of
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import UndecodableImage, decode_bytes
from tests.commands.command import ROOT
from tests.data.small_set import rectangle, write_coco

GRAY = np.tile(np.arange(60, dtype=np.uint8) * 4, (40, 1))
COLOR = np.dstack([GRAY, GRAY[::-1], GRAY])
DEEP = GRAY.astype(np.uint16) * 257


def encoded(ending, image):
    return cv2.imencode(ending, image)[1].tobytes()


def saved(kind, image, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def frames(kind, **options):
    first, *more = (Image.fromarray(COLOR // n) for n in (1, 2, 3))
    return saved(kind, first, save_all=True, append_images=more, **options)


FIVE = np.dstack([COLOR, GRAY, GRAY])
IMAGES = {
    "jpeg": (encoded(".jpg", COLOR), []),
    "gray png": (encoded(".png", GRAY), []),
    "16 bits": (encoded(".png", DEEP), ["bits"]),
    "16 bits tiff": (encoded(".tif", DEEP), ["bits"]),
    "cmyk tiff": (saved("TIFF", Image.fromarray(COLOR).convert("CMYK")), []),
    "bmp": (encoded(".bmp", COLOR), []),
    "alpha png": (saved("PNG", Image.fromarray(COLOR).convert("RGBA")), ["alpha"]),
    "gray alpha png": (saved("PNG", Image.fromarray(GRAY).convert("LA")), ["alpha"]),
    "palette png": (
        saved("PNG", Image.fromarray(COLOR).convert("P"), transparency=0),
        ["alpha"],
    ),
    "alpha tiff": (saved("TIFF", Image.fromarray(COLOR).convert("RGBA")), ["alpha"]),
    "alpha webp": (saved("WEBP", Image.fromarray(np.dstack([COLOR, GRAY]))), ["alpha"]),
    "pages": (frames("TIFF"), ["pages"]),
    "big tiff": (frames("TIFF", big_tiff=True), ["pages"]),
    "animated webp": (frames("WEBP"), ["pages"]),
    "animated png": (frames("PNG"), ["pages"]),
    "12 of 16 bits png": (encoded(".png", DEEP // 16), ["bits", "dark"]),
    "10 of 16 bits tiff": (encoded(".tif", DEEP // 64), ["bits", "dark"]),
    "12 of 16 bits in color": (encoded(".png", np.dstack([DEEP // 16] * 3)), ["bits", "dark"]),
    "12 of 16 bits jp2": (encoded(".jp2", DEEP // 16), ["bits", "dark"]),
    "12 of 16 bits pgm": (encoded(".pgm", DEEP // 16), ["bits", "dark"]),
    "dark, but of 8 bits": (encoded(".png", GRAY // 16), []),
}
WORDS = {
    "alpha": "alpha, so",
    "pages": "pages or frames after the first",
    "bits": "all but 8 of 16 bits",
    "dark": "nearly black",
}


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_not_used_is_found(name):
    content, expected = IMAGES[name]
    unused = Unused()
    unused.add("a", io.BytesIO(content), decode_bytes(content, "a"))
    (*lines,) = unused.lines()
    assert len(lines) == len(expected)
    for kind, line in zip(expected, lines, strict=True):
        assert WORDS[kind] in line and "first: a" in line


def test_bands_beyond_the_third():
    directory = write_bands(5)
    assert read_header(io.BytesIO(directory)).lost == ["bands"]
    assert read_header(io.BytesIO(write_bands(4))).lost == ["bands"]
    assert read_header(io.BytesIO(write_bands(3))).lost == []


def write_bands(count):
    """A TIFF of so many bands, as cameras for plants write it."""
    from PIL import TiffImagePlugin

    directory = TiffImagePlugin.ImageFileDirectory_v2(b"II*\0\x08\0\0\0")
    directory[256], directory[257], directory[258] = 2, 2, (8,) * count
    directory[262], directory[277], directory[273], directory[279] = 2, count, 8, 4 * count
    return b"II*\0\x08\0\0\0" + directory.tobytes(8) + bytes(4 * count)


@pytest.mark.parametrize(
    "content", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"\x89PNG" + bytes(70)]
)
def test_damaged_headers_say_nothing(content):
    assert read_header(io.BytesIO(content)).lost == []


def test_check_and_stats_say_it_once(tmp_path, caplog):
    names = ("pages", "12 of 16 bits png", "alpha png", "alpha tiff")
    json_path, image_dir = write_coco(tmp_path, [(40, 60)] * 5, [rectangle(5, 5, 20, 10)])
    content = json.loads(json_path.read_text())
    for name, entry in zip(names, content["images"][1:], strict=True):
        (image_dir / entry["file_name"]).write_bytes(IMAGES[name][0])
    parts, mixed, dark = inspect_coco(json_path, image_dir).warnings
    assert parts.startswith("of 5 images, what is not used: pages or frames after the first in 1 (")
    assert "alpha, so that what is transparent is seen in 2 (first: 004.png)" in parts
    assert "all but 8 of 16 bits in 1 (first: 003.png)" in parts and "data.bands.names" in parts
    assert mixed.startswith(
        "of 5 images, bits and bands differ: 8 bits in up to 3 bands in 4 (first"
    )
    assert dark.startswith("1 of 5 images have 16 bits and use less than a quarter")
    in_sample = unused_of(load_coco(json_path, image_dir))
    assert [line.split("(")[0] for line in in_sample] == [
        p.split("(")[0] for p in (parts, mixed, dark)
    ]


NOT_READ = {
    "float tiff": (encoded(".tif", DEEP.astype(np.float32)), "32-bit floating-point numbers"),
    "color float": (encoded(".tif", np.dstack([DEEP.astype(np.float32)] * 3)), "TIFF of 32-bit f"),
    "double tiff": (encoded(".tif", DEEP.astype(np.float64)), "a TIFF of 64-bit floating-point"),
    "int tiff": (encoded(".tif", DEEP.astype(np.int32)), "a TIFF of 32-bit whole numbers is not"),
    "five bands": (
        write_bands(5),
        "a TIFF of 5 bands is not read in colors; data.bands",
    ),
    "html": (b"<!DOCTYPE html><p>404</p>", "HTML, SVG or other XML, which is not read"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` gets the image"),
    "empty": (b"", "truncated, damaged or not an image"),
    "photoshop": (b"8BPS\0\1" + bytes(30), "a file of Photoshop"),
    "cut jpeg": (IMAGES["jpeg"][0][:100], "truncated, damaged or not an image"),
    "cut tiff": (IMAGES["pages"][0][:12], "truncated, damaged or not an image"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_images_that_are_not_read_are_named_by_what_they_are(name):
    content, words = NOT_READ[name]
    with pytest.raises(UndecodableImage, match="^a.tif: ") as error:
        decode_bytes(content, "a.tif")
    assert words in str(error.value)


def test_dark_gray_is_stretched_for_a_model_of_photographs_as_the_page_says(tmp_path):
    unused, content = Unused(), encoded(".png", DEEP // 64)
    unused.add("a.png", io.BytesIO(content), decode_bytes(content, "a.png"))
    (line,) = [line for line in unused.lines() if "nearly black" in line]
    page, _, anchor = line.partition("(docs/")[2].rstrip(")").partition("#")
    section = re.split(r"^## ", (ROOT / "docs" / page).read_text(), flags=re.M)
    (text,) = [one for one in section if one.lower().replace(" ", "-").startswith(anchor)]
    words = shlex.split(text.split("```bash")[1].split("```")[0])
    named = [w.removeprefix("--config.data.bands.") for w in words if "data.bands" in w]
    given = dict(word.split("=", 1) for word in named)
    names, numbers = given["names"].split(","), ast.literal_eval(given["numbers"])
    bands = Bands(names=tuple(names), numbers=numbers, scale=given["scale"])
    (tmp_path / "a.png").write_bytes(content)
    (line,) = [line for line in unused.lines(infers=True) if "nearly black" in line]
    assert set(named) <= {w.removeprefix("--config.data.bands.") for w in shlex.split(line)}
    image = bands.scaled(bands.read(tmp_path / "a.png"))
    assert image.shape == (40, 60, 3) and image.min() < 5 and image.max() > 250
