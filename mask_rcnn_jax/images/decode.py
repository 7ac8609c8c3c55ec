"""Decode image files: regular files only, of the size that is expected, and not too large."""

import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, TiffImagePlugin

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.checks import MAX_PIXELS
from mask_rcnn_jax.annotations.reader import NotRegular, read_regular
from mask_rcnn_jax.images.headers import (
    MissingPackage,
    decode_heic_bits,
    decode_rgb,
    is_avif,
    is_heic,
    open_header,
)
from mask_rcnn_jax.terminal.safe_text import cut

MAX_BYTES = 2 << 30  # of an image file
_ROWS = 512  # of an image that are copied at a time
# In a JPEG; those of cameras and encoders have up to a dozen. A scan of 20 bytes takes as long to
# decode as one of the whole image.
MAX_SCANS = 100
_JPEG = b"\xff\xd8"
# Not: stuffed bytes and restarts, which belong to a scan's data, and 01, which has no content.
_JPEG_MARKER = re.compile(rb"\xff+([\x02-\xcf\xd8-\xfe])")
_START_OF_SCAN, _END_OF_IMAGE = b"\xda", b"\xd9"
_BIG_TIFF = (b"II+\0\x08\0\0\0", b"MM\0+\0\x08\0\0")  # how files begin
TIFF = (b"II*\0", b"MM\0*", *_BIG_TIFF)
_OTHER_KINDS = {
    b"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` gets the image)",
    b"<": "HTML, SVG or other XML",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"8BPS": "a file of Photoshop",
    b"\x76\x2f\x31\x01": "OpenEXR",
    b"#?RADIANCE": "a Radiance HDR image",
    b"%PDF": "a PDF",
    b"\x93NUMPY": "an array of NumPy",
    b"\x1f\x8b": "a file compressed by gzip",
    b"PK\x03\x04": "a zip archive",
    b"{": "a JSON",
}
_ARRAYS = (b"\x93NUMPY", b"PK\x03\x04")
WITH_BANDS = "data.bands.names reads them (docs/bands.md)"
_EXIF_ORIENTATION = 0x0112
_PNG = b"\x89PNG\r\n\x1a\n"
# From half of MAX_PIXELS on Pillow warns of each image.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class UndecodableImage(ValueError):
    """Raised by `Dataset.decode` for an image that is damaged; training skips such an image."""


def decode_image(
    path: str | os.PathLike,
    *,
    upright: bool = False,
    expected_size: tuple[int, int] | None = None,
    at_least: tuple[int, int] | None = None,
) -> np.ndarray:
    """[H, W, 3] uint8 RGB of a gray, color, CMYK, RGBA or 16-bit file, as stored.

    Args:
        path: the file.
        upright: apply the EXIF rotation, which is not applied otherwise, since annotations are
            made on the stored pixels.
        expected_size: (height, width) that the json states. The header's size is compared with it
            before pixels are decoded, so that a small file cannot take gigabytes.
        at_least: (height, width) that the caller resizes to. A JPEG twice as large is decoded at
            1/2, 1/4 or 1/8, rounded up; see `reduction`.

    Raises:
        UndecodableImage: the file is damaged, no regular file, or too large.
        ValueError: its size is not the expected one.
        OSError: it cannot be read.
    """
    try:
        content = read_regular(path, MAX_BYTES)
    except NotRegular as error:
        raise UndecodableImage(str(error)) from error
    options = dict(upright=upright, expected_size=expected_size, at_least=at_least)
    return decode_bytes(content, os.fspath(path), **options)  # type: ignore[arg-type]


def decode_bytes(
    content: bytes,
    path: str,
    *,
    upright: bool = False,
    expected_size: tuple[int, int] | None = None,
    at_least: tuple[int, int] | None = None,
    is_foreign: bool = False,
) -> np.ndarray:
    """Like `decode_image`, for the content of the file `path`.

    is_foreign: it came from elsewhere. The library in OpenCV prints a line about a damaged JPEG,
        which says neither when nor of what; Pillow's, the same one, finds the same pixels in
        silence, in about a tenth more time and a quarter more memory.
    """
    size = check_header(content, path, expected_size)
    factor = 1
    if at_least is not None and size is not None and content.startswith(_JPEG):
        factor = reduction(size, at_least)
    flags = cv2.IMREAD_COLOR_RGB
    if factor > 1:  # that of IMREAD_REDUCED_COLOR_2 and so on without its bit for BGR
        flags |= getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{factor}")
    if not upright:
        flags |= cv2.IMREAD_IGNORE_ORIENTATION
    image = _silent_jpeg(content, path, factor) if is_foreign else None
    is_unturned = image is not None or is_avif(content)  # whose own orientation no decoder applies
    image = _decoded(content, path, flags) if image is None else image
    if upright and is_unturned:
        image = np.ascontiguousarray(turned(image, orientation(content)))
    if expected_size is not None:
        height, width = (-(-side // factor) for side in expected_size)
        if image.shape[:2] != (height, width):
            found = image.shape[:2] if size is None or factor == 1 else size
            advice = _exif_advice(content, expected_size, upright)
            raise ValueError(_other_size(path, found, expected_size) + advice)
    return image


def decode_all(content: bytes, path: str, *, upright: bool = False) -> np.ndarray:
    """[H, W, C] with all bands and bits of the file `path`, uint8 or another type of NumPy's;
    colors are red, green, blue and alpha. Arguments and errors as for `decode_bytes`."""
    check_header(content, path)
    image = _decoded(content, path, cv2.IMREAD_UNCHANGED)
    image = image.reshape(*image.shape[:2], -1)
    if image.shape[2] in (3, 4) and not is_heic(content):
        image = image[..., [2, 1, 0, 3][: image.shape[2]]]
    if upright:
        image = turned(image, orientation(content))
    return np.ascontiguousarray(image)


# What an EXIF orientation asks for, of [H, W, C].
_TURNS = {
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[::-1],
}


def turned(image: np.ndarray, entry: int) -> np.ndarray:
    """[H, W, C] as an EXIF orientation asks for; as it is for one that is unknown."""
    return _TURNS.get(entry, lambda x: x)(image)


def _decoded(content: bytes, path: str, flags: int) -> np.ndarray:
    """What OpenCV makes of a file whose header was checked, or Pillow."""
    all_bits = flags == cv2.IMREAD_UNCHANGED
    if is_heic(content) or is_avif(content) and not all_bits:
        return _decoded_by_pillow(content, path, all_bits)
    if _is_cut_png(content):
        raise UndecodableImage(f"{path}: truncated or damaged")
    if _has_too_many_scans(content):
        raise UndecodableImage(f"{path}: a JPEG with more than the {MAX_SCANS} scans that are read")
    data = np.frombuffer(content, np.uint8)
    # imdecode refuses truncated data; imread would return it with the rest of the image gray.
    try:
        image = cv2.imdecode(data, flags) if data.size else None
    except cv2.error as error:  # more pixels than it allows
        raise UndecodableImage(f"{path}: {error.err or error}") from error
    if image is None:
        reason = _other_kind(content) or "truncated, damaged or not an image"
        raise UndecodableImage(f"{path}: {reason}")
    return image


def _silent_jpeg(content: bytes, path: str, factor: int) -> np.ndarray | None:
    """RGB of a JPEG by Pillow, reduced by a factor; None for another file, also one of four inks,
    which OpenCV mixes in its own way."""
    if not content.startswith(_JPEG) or _has_too_many_scans(content):
        return None
    try:
        with open_header(io.BytesIO(content)) as image:
            if image.mode not in ("L", "RGB"):
                return None
            if factor > 1:
                width, height = image.size
                image.draft(None, (max(width // factor, 1), max(height // factor, 1)))
            image.load()
            width, height = image.size
            pixels = np.empty((height, width, 3), np.uint8)
            for top in range(0, height, _ROWS):  # Pillow's pixels have four bytes: no copy of all
                part = image.crop((0, top, width, min(top + _ROWS, height)))
                pixels[top : top + _ROWS] = np.asarray(part.convert("RGB"))
            return pixels
    except Exception as error:  # whatever its parsers raise on damaged files
        raise UndecodableImage(f"{path}: truncated, damaged or not an image") from error


def _decoded_by_pillow(content: bytes, path: str, all_bits: bool) -> np.ndarray:
    """A HEIC, or 8 bits of an AVIF: with alpha, OpenCV 5 has red and blue of these swapped."""
    try:
        return decode_heic_bits(content) if all_bits else decode_rgb(content)
    except MissingPackage as error:
        raise MissingPackage(f"{path}: {error}") from error
    except Exception as error:  # whatever its parsers raise on damaged files
        reason = cut(" ".join(str(error).split()))
        raise UndecodableImage(f"{path}: truncated or damaged ({reason})") from error


def _other_kind(content: bytes) -> str | None:
    """Say what a file is that OpenCV does not decode."""
    found = (kind for magic, kind in _OTHER_KINDS.items() if content.startswith(magic))
    if kind := next(found, None):
        more = f"; {WITH_BANDS}" if content.startswith(_ARRAYS) else ""
        return f"{kind}, which is not read{more}"
    if not content.startswith(TIFF):
        return None
    try:
        tags = next(tiff_directories(io.BytesIO(content)))
        bits, is_float = max(tags.get(258, (1,))), 3 in tags.get(339, ())
        bands = tags.get(277, 1)
    except Exception:  # whatever its parsers raise on damaged files
        return None
    if bands > 4:
        return f"a TIFF of {bands} bands is not read in colors; {WITH_BANDS}"
    if bits <= 16 and not is_float:
        return None
    numbers = "floating-point" if is_float else "whole"
    return f"a TIFF of {bits}-bit {numbers} numbers is not read in colors; {WITH_BANDS}"


def tiff_directories(file: BinaryIO) -> Iterator[Mapping[int, Any]]:
    """Yield the tags of each page; may raise anything for damaged files."""
    file.seek(0)
    begin = file.read(8)
    begin += file.read(8) if begin in _BIG_TIFF else b""
    directory, seen = TiffImagePlugin.ImageFileDirectory_v2(begin), set[int]()
    while directory.next and directory.next not in seen:
        seen.add(directory.next)
        file.seek(directory.next)
        directory.load(file)
        yield directory


def reduction(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """Return by which factor a JPEG may be reduced while it is decoded: 1, 2, 4 or 8.

    Both sizes are (height, width); the image may yet be turned by its EXIF entry. Rounded up, a
    side that the factor does not divide is a little longer than the image; resized pixels are
    misplaced by at most half a pixel.
    """
    pairs = list(zip(sorted(size), sorted(at_least), strict=True))
    for factor in (8, 4, 2):
        if all(
            side // factor >= needed and 2 * needed * (-side % factor) <= side
            for side, needed in pairs
        ):
            return factor
    return 1


def check_header(
    content: bytes, path: str, expected_size: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """Check the size that an image's header states, without decoding it; return it as
    `header_size` does.

    Raises:
        UndecodableImage: it has more than `MAX_PIXELS` pixels.
        ValueError: it is not the expected (height, width), nor that of the image turned.
    """
    size = header_size(content, path)
    if size and expected_size and sorted(size) != sorted(expected_size):
        raise ValueError(_other_size(path, size, expected_size))
    return size


def header_size(content: bytes, path: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int] | None:
    """Read the (height, width) that an image's header states.

    Returns None for damaged headers and unknown formats; decoding names the damage.

    Raises UndecodableImage if there are more than `max_pixels` pixels.
    """
    limit = too_many(max_pixels)
    try:
        with open_header(io.BytesIO(content)) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise UndecodableImage(f"{path}: {limit}") from error
    except Exception:  # whatever its parsers raise on damaged files
        return None
    if height * width > max_pixels:
        raise UndecodableImage(f"{path}: {height} x {width} pixels, {limit}")
    return height, width


def too_many(limit: int) -> str:
    """Say of an image that it is too large to be read whole."""
    by_parts = "a tiled TIFF is read by windows (data.windows, --tile)"
    return f"more than the {limit:,} pixels that are read at once; {by_parts}"


def upright_size(file: str | os.PathLike | BinaryIO) -> tuple[int, int] | None:
    """Read the (height, width) that `decode_image(.., upright=True)` gives from a file's header.

    Returns None for files that cannot be read and unknown formats.
    """
    try:
        with open_header(file) as image:
            turned = image.getexif().get(_EXIF_ORIENTATION) in (5, 6, 7, 8)
            width, height = image.size
    except Exception:  # whatever its parsers raise on damaged files
        return None
    return (width, height) if turned else (height, width)


def orientation(content: bytes) -> int:
    """Return what an image's EXIF entry asks for, 1 to 8; 1, as it is stored, without an entry."""
    try:
        with open_header(io.BytesIO(content)) as image:
            found = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # whatever its parsers raise on damaged files
        return 1
    return found if found in _TURNS else 1


def _exif_advice(content: bytes, stated: tuple[int, int], upright: bool) -> str:
    """Name the entry with which an image has the size that the json states."""
    if orientation(content) < 5 or header_size(content, "") not in (stated, stated[::-1]):
        return ""
    right = "predict reads it as it is stored" if upright else "always turns it"
    return f"; it has an EXIF entry, data.apply_exif={right}"


def _is_cut_png(content: bytes) -> bool:
    """Whether a chunk of a PNG ends beyond the file: OpenCV takes up to 4 GB of memory for it."""
    at = len(_PNG)
    if not content.startswith(_PNG):
        return False
    while at < len(content) and content[at + 4 : at + 8] != b"IEND":
        at += 12 + int.from_bytes(content[at : at + 4])  # length, name, data and checksum
    return at > len(content)


def _has_too_many_scans(content: bytes) -> bool:
    """Whether a JPEG has more than MAX_SCANS, up to its end: phones append videos."""
    at, scans = len(_JPEG), 0
    if not content.startswith(_JPEG):
        return False
    while scans <= MAX_SCANS and (marker := _JPEG_MARKER.search(content, at)):
        if marker[1] == _END_OF_IMAGE:
            return False
        scans += marker[1] == _START_OF_SCAN
        at = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2])
    return scans > MAX_SCANS


def check_image_size(image: np.ndarray, record_size: tuple[int, int], path: str) -> None:
    """Raise ValueError if a decoded image does not have the json's (height, width)."""
    if image.shape[:2] != record_size:
        raise ValueError(_other_size(path, image.shape[:2], record_size))


def _other_size(path: str, found: tuple[int, ...], stated: tuple[int, int]) -> str:
    found_text, stated_text = (f"{height} x {width}" for height, width in (found, stated))
    return f"{path}: the file is {found_text} (height x width), the json says {stated_text}"
