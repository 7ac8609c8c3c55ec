import os
import subprocess
import sys

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.images.decode import (
    UndecodableImage,
    check_image_size,
    decode_bytes,
    decode_image,
)
from tests.helpers import shared

# A red upper left quarter on gray, 20 x 30.
COLOR = np.full((20, 30, 3), 128, np.uint8)
COLOR[:10, :15] = (250, 10, 20)


@pytest.mark.parametrize("suffix, tolerance", [("png", 0), ("jpg", 12), ("bmp", 0)])
def test_color_is_rgb(tmp_path, suffix, tolerance):
    path = tmp_path / f"a.{suffix}"
    quality = {"quality": 100, "subsampling": 0} if suffix == "jpg" else {}
    Image.fromarray(COLOR).save(path, **quality)
    image = decode_image(path)
    assert image.dtype == np.uint8
    np.testing.assert_allclose(image.astype(int), COLOR, atol=tolerance)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_gray_becomes_three_equal_channels(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    gray = np.tile(np.arange(0, 240, 8, dtype=np.uint8), (20, 1))
    Image.fromarray(gray).save(path)
    image = decode_image(path)
    np.testing.assert_allclose(image[..., 0].astype(int), gray, atol=4 if suffix == "jpg" else 0)
    assert (image == image[..., :1]).all()


def test_cmyk_becomes_rgb(tmp_path):
    path = tmp_path / "a.jpg"
    Image.fromarray(COLOR).convert("CMYK").save(path, quality=100, subsampling=0)
    np.testing.assert_allclose(decode_image(path).astype(int), COLOR, atol=12)


def test_alpha_is_dropped(tmp_path):
    path = tmp_path / "a.png"
    alpha = np.full((20, 30, 1), 77, np.uint8)
    Image.fromarray(np.concatenate([COLOR, alpha], axis=2)).save(path)
    np.testing.assert_array_equal(decode_image(path), COLOR)


def test_sixteen_bits_become_eight(tmp_path):
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), COLOR[:, :, ::-1].astype(np.uint16) * 256)
    np.testing.assert_array_equal(decode_image(path), COLOR)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_ignored(tmp_path, orientation):
    path = tmp_path / "a.jpg"
    image = Image.fromarray(COLOR)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(path, exif=exif, quality=100, subsampling=0)
    np.testing.assert_allclose(decode_image(path).astype(int), COLOR, atol=12)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_truncated_file_is_named(tmp_path, suffix, part):
    path = tmp_path / f"broken.{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(UndecodableImage, match=f"broken.{suffix}: truncated"):
        decode_image(path)


def test_other_file_is_named(tmp_path):
    path = tmp_path / "notes.jpg"
    path.write_text("hello " * 100)
    with pytest.raises(ValueError, match="notes.jpg: .*not an image"):
        decode_image(path)


def test_absent_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        decode_image(tmp_path / "gone.jpg")


def test_size_that_disagrees_is_named():
    check_image_size(COLOR, (20, 30), "a.jpg")
    with pytest.raises(ValueError, match=r"a.jpg: the file is 20 x 30 .* says 30 x 20"):
        check_image_size(COLOR, (30, 20), "a.jpg")


def bomb(path, height=16000, width=65500):
    """A JPEG of a few bytes whose header claims a gigapixel."""
    Image.fromarray(COLOR).save(path)
    content = bytearray(path.read_bytes())
    start = content.index(b"\xff\xc0") + 5  # the frame header: height, then width
    content[start : start + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    path.write_bytes(content)
    return path


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path, monkeypatch):
    path = bomb(tmp_path / "a.jpg")
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(UndecodableImage, match="a.jpg: more than the 178,956,970 pixels that are"):
        decode_image(path)


AT_ONCE = """import sys
from mask_rcnn_jax.images import decode, headers
headers.FORMATS = ()
try:
    decode.decode_image(sys.argv[-1])
except decode.UndecodableImage as error:
    print(error)
"""
IN_A_COMMAND = """from mask_rcnn_jax import cli
def main(_):
    import cv2
    import mask_rcnn_jax.opencv
    mask_rcnn_jax.opencv.set_limits = lambda: None
    exec(AT_ONCE)
cli.run(main, lambda: None, positional=True)
"""


@pytest.mark.parametrize("program", [AT_ONCE, f"AT_ONCE = {AT_ONCE!r}\n{IN_A_COMMAND}"])
def test_opencv_has_the_same_limit(program, tmp_path):
    """For formats that Pillow does not know. It is looked up when OpenCV is imported first, in a
    command perhaps by a module of the user."""
    command = [sys.executable, "-c", program, bomb(tmp_path / "a.jpg")]
    clean = {name: v for name, v in os.environ.items() if not name.startswith("OPENCV_")}
    said = subprocess.check_output(command, text=True, timeout=120, env=clean)
    assert "a.jpg: " in said and "MAX_IMAGE_PIXELS" in said


def test_a_png_that_states_gigabytes_is_not_decoded(tmp_path, monkeypatch):
    """OpenCV would take as much memory as a chunk says it is long."""
    path = tmp_path / "a.png"
    Image.fromarray(COLOR).save(path)
    content = path.read_bytes()
    at = content.index(b"IDAT") - 4
    path.write_bytes(content[:at] + b"\xe2" + content[at + 1 :])
    with monkeypatch.context() as without:
        without.setattr(cv2, "imdecode", None)
        with pytest.raises(UndecodableImage, match="a.png: truncated"):
            decode_image(path)
    path.write_bytes(content + b"what comes after the end")
    assert (decode_image(path) == COLOR).all()


def test_another_size_than_expected_is_not_decoded(tmp_path, monkeypatch):
    path = bomb(tmp_path / "a.jpg", 9000, 9000)
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(ValueError, match="the file is 9000 x 9000 .* the json says 20 x 30"):
        decode_image(path, expected_size=(20, 30))


def test_a_turned_image_is_decoded_and_then_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(COLOR).save(path)
    assert decode_image(path, expected_size=(20, 30)).shape == (20, 30, 3)
    with pytest.raises(ValueError, match="the file is 20 x 30 .* the json says 30 x 20"):
        decode_image(path, expected_size=(30, 20))


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(UndecodableImage, match="a.jpg is not a regular file"):
        decode_image(tmp_path / "a.jpg")


def test_real_jpegs_equal_pillow():
    for path in sorted(shared("data/coco_mini/val2017").glob("*.jpg"))[:8]:
        with Image.open(path) as image:
            expected = np.asarray(image.convert("RGB")).astype(int)
        # Two JPEG libraries may round the color conversion differently.
        np.testing.assert_allclose(decode_image(path).astype(int), expected, atol=4)


def _progressive_jpeg(extra_scans: int) -> bytes:
    """A JPEG whose last scan comes so many times more."""
    content = cv2.imencode(".jpg", COLOR, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * extra_scans + content[-2:]


def test_scans_without_end_are_refused():
    assert decode_bytes(_progressive_jpeg(0), "a.jpg").shape == COLOR.shape
    with pytest.raises(UndecodableImage, match=r"a\.jpg: a JPEG with more than the 100 scans"):
        decode_bytes(_progressive_jpeg(1000), "a.jpg")


def test_what_looks_like_scans_is_no_scan():
    """In a comment, and in what follows the image."""
    content, scans = _progressive_jpeg(0), b"\xff\xda" * 1000
    comment = b"\xff\xfe" + (len(scans) + 2).to_bytes(2) + scans
    assert decode_bytes(content[:2] + comment + content[2:] + scans, "a.jpg").shape == COLOR.shape
