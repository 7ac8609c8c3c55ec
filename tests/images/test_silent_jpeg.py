"""JPEGs from elsewhere: the pixels of OpenCV, and no line of a library's without time and place."""

from io import BytesIO

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import UndecodableImage, decode_bytes
from mask_rcnn_jax.predict.pixels import read_pixels

RNG = np.random.default_rng(0)
SAMPLING = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111}


def jpeg(height=77, width=101, sampling="4:2:0", progressive=0, channels=3) -> bytes:
    y, x = np.mgrid[:height, :width]
    image = np.stack([127 + 100 * np.sin(x / 9), 127 + 90 * np.cos(y / 7), (x * 3 + y) % 256], -1)
    image = (image + RNG.normal(0, 20, image.shape)).clip(0, 255).astype(np.uint8)
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLING[sampling]]
    options += [cv2.IMWRITE_JPEG_PROGRESSIVE, progressive]
    return cv2.imencode(".jpg", image if channels == 3 else image[..., 0], options)[1].tobytes()


@pytest.mark.parametrize("size", [(77, 101), (1, 1), (9, 17), (64, 64), (333, 500)])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("progressive", [0, 1])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_a_file(size, sampling, progressive, channels):
    content = jpeg(*size, sampling, progressive, channels)
    for factor in (1, 2, 3, 4, 8):
        given = dict(at_least=tuple(max(side // factor, 1) for side in size))
        expected = decode_bytes(content, "a.jpg", **given)
        np.testing.assert_array_equal(read_pixels(content, Bands(), False, **given), expected)


@pytest.mark.parametrize("entry", range(1, 9))
def test_an_image_is_turned_as_it_says(entry):
    content = exif_turned(jpeg(), entry)
    expected = decode_bytes(content, "a.jpg", upright=True)
    assert expected.shape[:2] == ((77, 101) if entry < 5 else (101, 77))
    np.testing.assert_array_equal(read_pixels(content, Bands(), True), expected)


def exif_turned(content: bytes, entry: int) -> bytes:
    """A JPEG with an orientation, in a segment behind its first two bytes."""
    exif = Image.Exif()
    exif[0x0112] = entry
    segment = exif.tobytes()
    return content[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2) + segment + content[2:]


def damaged(content: bytes, number: int) -> bytes:
    rng = np.random.default_rng(number)
    changed = bytearray(content)
    for at in rng.integers(700, len(content), 3):
        if number % 3:
            changed[at] = rng.integers(256)
        else:
            del changed[at : at + 9]
    return bytes(changed)


def test_no_library_speaks_of_a_damaged_one(capfd):
    read = refused = 0
    content = [jpeg(), jpeg(progressive=1), jpeg(channels=1)]
    for number in range(90):
        try:
            read_pixels(damaged(content[number % 3], number), Bands(), True, name="image")
            read += 1
        except UndecodableImage as error:
            assert str(error) == "image: truncated, damaged or not an image"
            refused += 1
    assert read > 20 and refused > 0
    assert capfd.readouterr() == ("", "")


def test_four_inks_are_read_as_in_a_file():
    file = BytesIO()
    Image.fromarray(RNG.integers(0, 255, (40, 50, 4), np.uint8), "CMYK").save(file, "JPEG")
    expected = decode_bytes(file.getvalue(), "a.jpg")
    np.testing.assert_array_equal(read_pixels(file.getvalue(), Bands(), False), expected)
