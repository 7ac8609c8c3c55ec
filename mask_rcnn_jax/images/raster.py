"""An open image file: its size, bands, pages and numbers, whatever its format."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mask_rcnn_jax.images.decode import MAX_BYTES, MAX_PIXELS, UndecodableImage, too_many
from mask_rcnn_jax.images.headers import MissingPackage
from mask_rcnn_jax.images.pixel_size import PixelSize
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.terminal.safe_text import cut

MAX_BANDS = 64
KINDS = "buif"  # of NumPy's types: bool, whole and floating-point numbers
INSTALL = "`pip install 'mask-rcnn-jax[tiff]'` installs what is missing"


class ImageTooLarge(UndecodableImage):
    """Raised for an image whose head tells of more bytes than are read."""


@dataclass(frozen=True)
class Raster:
    """An open image file.

    Attributes:
        path: names it in messages.
        size: (height, width), pixels.
        bands: of each page.
        pages: pages, slices or time points, in the file's order.
        dtype: of its numbers.
        kind: "tiff", "numpy" or "image".
        read_page: returns [h, w, bands] of a page, from 0, in a window (x1, y1, x2, y2).
        by_window: whether reading a window takes less than reading all.
    """

    path: str
    size: tuple[int, int]
    bands: int
    pages: int
    dtype: np.dtype
    kind: str
    read_page: Callable[[int, Window], np.ndarray]
    by_window: bool
    colors: str = ""  # of a TIFF of 8 bits, stored upright: "gray", "rgb" or "rgba"
    others: int = 0  # images of other sizes or types in the file; overviews do not count
    pixel_size: PixelSize | None = None  # of a TIFF's pixels, if it says
    nodata: float | None = None  # the number that GDAL calls no data, if a TIFF says

    def read(self, page: int = 0, window: Window | None = None) -> np.ndarray:
        """Read [h, w, bands] of a page: bool as uint8, halves and doubles as float32, others as
        they are stored.

        Raises UndecodableImage for damage, or for more than `MAX_PIXELS` pixels at once.
        """
        height, width = self.size
        x1, y1, x2, y2 = window or (0, 0, width, height)
        if (y2 - y1) * (x2 - x1) > MAX_PIXELS:
            found = f"{self.path}: {y2 - y1} x {x2 - x1} pixels"
            raise UndecodableImage(f"{found}, {too_many(MAX_PIXELS)}")
        check_bytes((y2 - y1) * (x2 - x1) * self.bands * self.dtype.itemsize, MAX_BYTES, self.path)
        with as_undecodable(self.path):
            pixels = self.read_page(page, (x1, y1, x2, y2))
        return as_plain(pixels)


def as_plain(pixels: np.ndarray) -> np.ndarray:
    """Bool becomes uint8, halves and doubles float32; others stay, in this machine's byte order."""
    if pixels.dtype == bool:
        return pixels.astype(np.uint8)
    if pixels.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what is beyond becomes infinite
            return pixels.astype(np.float32, copy=False)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


@contextmanager
def as_undecodable(path: str) -> Iterator[None]:
    """Say of what file it was that a parser failed, whatever it raises."""
    try:
        yield
    except (UndecodableImage, MissingPackage):
        raise
    except MemoryError as error:
        raise UndecodableImage(f"{path}: too large for the memory") from error
    except Exception as error:
        if isinstance(error, ImportError) or "imagecodecs" in str(error):
            raise MissingPackage(f"{path}: {cut(str(error))}; {INSTALL}") from error
        reason = cut(f"{type(error).__name__}: {error}")
        raise UndecodableImage(f"{path}: truncated or damaged ({reason})") from error


def check_bytes(count: int, most: int | None, path: str) -> None:
    """Raise ImageTooLarge for more bytes than `most`, if that is a number."""
    if most is not None and count > most:
        found = f"{path}: pixels of {count:,} bytes"
        raise ImageTooLarge(f"{found}, more than the {most:,} that are read")
