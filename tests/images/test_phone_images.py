"""AVIF and HEIC: colors, orientation, bits, sizes, damage, and the extra that HEIC needs."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.data.unused import Unused, read_header
from mask_rcnn_jax.formats.coco_build import read_image_size
from mask_rcnn_jax.images import decode, headers
from mask_rcnn_jax.images.decode import (
    UndecodableImage,
    decode_all,
    decode_bytes,
    header_size,
    upright_size,
)
from mask_rcnn_jax.images.headers import MissingPackage
from mask_rcnn_jax.images.suffixes import IMAGE_SUFFIXES, endings
from mask_rcnn_jax.predict.inputs import find_inputs

COLOR = np.full((40, 60, 3), 128, np.uint8)
COLOR[:20, :30] = (250, 10, 20)
ORIENTATION = 0x0112
HEIC_STUB = b"\0\0\0\x18ftypheic" + bytes(40)
NO_HEIF = not headers.reads_heic()
KINDS = ["AVIF", pytest.param("HEIF", marks=pytest.mark.skipif(NO_HEIF, reason="no extra heif"))]


def encoded(kind, image=COLOR, turn=1):
    """A file of Pillow's writer, which puts an orientation into the container."""
    if kind == "HEIF":
        import pillow_heif

        pillow_heif.register_heif_opener()  # its writer
    exif, file = Image.Exif(), io.BytesIO()
    exif[ORIENTATION] = turn
    Image.fromarray(image).save(file, kind, quality=95, exif=exif.tobytes())
    return file.getvalue()


def near(image, expected):
    assert image.dtype == np.uint8 and image.shape == expected.shape
    assert np.abs(image.astype(int) - expected).mean() < 3


@pytest.mark.parametrize("kind", KINDS)
def test_colors_gray_and_alpha_are_read(kind):
    near(decode_bytes(encoded(kind), "a", expected_size=(40, 60)), COLOR)
    gray = COLOR[..., 0]
    near(decode_bytes(encoded(kind, gray), "a"), np.dstack([gray] * 3))
    alpha = np.dstack([COLOR, np.full((40, 60), 77, np.uint8)])
    near(decode_bytes(encoded(kind, alpha), "a"), COLOR)
    every = decode_all(encoded(kind, alpha), "a")
    assert every.shape == (40, 60, 4) and np.abs(every[..., 3].astype(int) - 77).max() < 3
    near(every[..., :3], COLOR)


@pytest.mark.parametrize("turn", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_orientation(kind, turn, tmp_path):
    """AVIF is turned where a JPEG is; HEIC, as all its readers turn it, always."""
    content = encoded(kind, turn=turn)
    expected = decode.turned(COLOR, turn)
    near(decode_bytes(content, "a", upright=True), expected)
    near(decode_all(content, "a", upright=True), expected)
    assert upright_size(io.BytesIO(content)) == expected.shape[:2]
    stored = COLOR if kind == "AVIF" else expected
    near(decode_bytes(content, "a"), stored)
    assert header_size(content, "a") == stored.shape[:2]
    path = tmp_path / "a"
    path.write_bytes(content)
    if kind == "AVIF" and turn > 1:
        with pytest.raises(ValueError, match="rotated by its EXIF entry"):
            read_image_size(path, "json")
    else:
        assert read_image_size(path, "json") == stored.shape[:2]


def deep_avif():
    values = (np.arange(40 * 60 * 3).reshape(40, 60, 3) % 1024).astype(np.uint16)
    depth = [cv2.IMWRITE_AVIF_DEPTH, 10, cv2.IMWRITE_AVIF_QUALITY, 100]
    return cv2.imencode(".avif", values, depth)[1].tobytes()


def deep_heic():
    pillow_heif = pytest.importorskip("pillow_heif")
    values = (np.arange(40 * 60 * 3).reshape(40, 60, 3) % 1024 * 64).astype(np.uint16)
    file = io.BytesIO()
    pillow_heif.from_bytes(mode="RGB;16", size=(60, 40), data=values.tobytes()).save(file)
    return file.getvalue()


@pytest.mark.parametrize("write", [deep_avif, deep_heic])
def test_ten_bits(write):
    content = write()
    assert read_header(io.BytesIO(content)).bits == 10
    unused = Unused()
    unused.add("a.x", io.BytesIO(content), None)
    assert "all but 8 of 10 bits in 1 (first: a.x)" in unused.lines()[0]
    assert decode_bytes(content, "a").dtype == np.uint8
    values = decode_all(content, "a")
    assert values.dtype == np.uint16 and 900 < values.max() < 1024
    assert read_header(io.BytesIO(encoded("AVIF"))).bits == 8


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_compared_before_pixels_are_decoded(kind):
    content = encoded(kind)
    with pytest.raises(ValueError, match=r"a: the file is 40 x 60 .*, the json says 41 x 60"):
        decode_bytes(content, "a", expected_size=(41, 60))
    with pytest.raises(UndecodableImage, match="40 x 60 pixels, more than the 2,399 pixels"):
        header_size(content, "a", 2399)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_line(kind):
    content = encoded(kind)
    for end in (14, 40, len(content) // 2, len(content) - 20):
        with pytest.raises(UndecodableImage, match="^a: ") as error:
            decode_bytes(content[:end], "a")
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not NO_HEIF, reason="the extra heif is there")
def test_heic_without_its_extra_is_named_with_it(tmp_path):
    words = r"HEIC is read by pillow-heif: `pip install 'mask-rcnn-jax\[heif\]'`"
    path = tmp_path / "a.heic"
    path.write_bytes(HEIC_STUB)
    for read in (decode_bytes, decode_all):
        with pytest.raises(MissingPackage, match=f"^a: {words}"):
            read(HEIC_STUB, "a")
    with pytest.raises(MissingPackage, match=words):
        read_image_size(path, "a.json")
    assert ".heic" not in IMAGE_SUFFIXES
    assert endings(["a.HEIC", "b.psd"]).startswith("1 .heic, 1 .psd; HEIC is read by pillow-heif")


@pytest.mark.skipif(NO_HEIF, reason="no extra heif")
def test_heic_is_found_in_folders(tmp_path):
    (tmp_path / "a.HEIC").write_bytes(encoded("HEIF"))
    images, _ = find_inputs([str(tmp_path)], tmp_path / "out")
    assert [image.name.name for image in images] == ["a.HEIC"]
    with pytest.raises(UndecodableImage, match="truncated or damaged"):
        decode_bytes(HEIC_STUB, "a")


@pytest.mark.parametrize("pattern", ["{}", "{}/*", "{}/**"])
def test_files_that_a_pattern_or_folder_passes_over_are_counted(pattern, tmp_path, caplog):
    (tmp_path / "a.avif").write_bytes(encoded("AVIF"))
    for name in ("b.psd", "c", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    with caplog.at_level("INFO"):
        images, _ = find_inputs([pattern.format(tmp_path)], tmp_path / "out")
    assert len(images) == 1
    assert "these files are not read: 1 .psd, 1 without ending" in caplog.text
