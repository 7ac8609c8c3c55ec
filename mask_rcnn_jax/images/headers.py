"""Open the headers of image files, AVIF's and HEIC's among them.

HEIC is read by pillow-heif, the extra `heif`, which turns an image as the file says; so it has no
other orientation. AVIF may be turned by its file, too, which Pillow gives as an EXIF orientation.
"""

import io
import os
from functools import cache
from importlib.util import find_spec
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

# Formats whose headers Pillow reads. `mask_rcnn_jax/opencv.py` gives OpenCV, which knows more, the
# same limit.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000", "AVIF")
HEIF_SUFFIXES = (".heic", ".heif", ".hif")
READ_HEIC = "HEIC is read by pillow-heif: `pip install 'mask-rcnn-jax[heif]'`"
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_AVIF = {b"avif", b"avis"}
_HEAD = 1 << 16  # bytes in which an AVIF says how many bits it has


class MissingPackage(ImportError, ValueError):
    """Raised for an image whose reader, or codec, is not installed: a user's mistake."""


@cache
def reads_heic() -> bool:
    """Whether the extra for HEIC is installed."""
    return find_spec("pillow_heif") is not None


def is_avif(head: bytes) -> bool:
    return bool(_brands(head) & _AVIF)


def is_heic(head: bytes) -> bool:
    return bool(_brands(head) & _HEIC) and not is_avif(head)


def _brands(head: bytes) -> set[bytes]:
    """What a file of ISO's media format says it is, of its first bytes."""
    if head[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(head[:4]), len(head), 256)
    return {head[at : at + 4] for at in (8, *range(16, end, 4))}


def open_header(file: str | os.PathLike | BinaryIO) -> Image.Image:
    """Open an image whose pixels are not decoded yet.

    Raises MissingPackage for HEIC without its extra, and anything for damaged files.
    """
    if isinstance(file, str | os.PathLike):
        with open(file, "rb") as opened:
            head = opened.read(256)
    else:
        head = file.read(256)
        file.seek(0)
    if is_heic(head):
        return _pillow_heif().HeifImageFile(file)
    return Image.open(file, formats=FORMATS)


def decode_rgb(content: bytes) -> np.ndarray:
    """[H, W, 3] uint8 RGB by Pillow; errors as for `open_header`."""
    with open_header(io.BytesIO(content)) as image:
        return np.array(image.convert("RGB"))


def decode_heic_bits(content: bytes) -> np.ndarray:
    """[H, W] or [H, W, C] of a HEIC, gray or red, green, blue and alpha, turned as it says: uint16
    of more than 8 bits, in the numbers that it has; errors as for `open_header`."""
    image = _pillow_heif().open_heif(io.BytesIO(content), convert_hdr_to_8bit=False)
    pixels = np.array(image)
    return pixels >> (16 - image.info["bit_depth"]) if pixels.dtype == np.uint16 else pixels


def bits_of(image: Image.Image, file: BinaryIO) -> int:
    """The bits per band of an open AVIF or HEIC, and of the file that it is read from."""
    if image.format != "AVIF":
        return image.info.get("bit_depth", 8)
    file.seek(0)
    head = file.read(_HEAD)
    at = head.find(b"av1C")
    flags = head[at + 6] if 0 <= at < len(head) - 6 else 0  # behind version, profile and level
    return (12 if flags & 32 else 10) if flags & 64 else 8


def _pillow_heif() -> Any:
    try:
        import pillow_heif
    except ImportError as error:
        raise MissingPackage(READ_HEIC) from error
    return pillow_heif
