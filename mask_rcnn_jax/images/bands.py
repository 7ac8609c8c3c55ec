"""Which bands and pages of an image file a model sees, and how their values become 0 to 255."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, NamedTuple

import numpy as np

from mask_rcnn_jax.images.decode import UndecodableImage, check_image_size
from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.images.raster import MAX_BANDS, Raster, as_plain
from mask_rcnn_jax.ranges import Count, Counts, Range, Ranged
from mask_rcnn_jax.rle import Window

RGB = ("red", "green", "blue")
# Larger images give their percentiles by a grid of windows.
SAMPLED_PIXELS, SAMPLES, SAMPLE_SIDE = 1 << 24, 8, 512
# Entries that say which numbers a model sees; the others say how files hold them, or show them.
MODEL_ENTRIES = ("names", "scale", "bits", "limits", "percentiles")
_PERCENT = Range("0 <= low < high <= 100", lambda pair: 0 <= pair[0] < pair[1] <= 100)
_FULL = 255.0  # of the scale that `model.input` and colors have
# What stands for no data in float32, as GDAL has it; NaN would be an error of the file.
ABSENT = np.finfo(np.float32).min


class Limits(NamedTuple):
    """The values that become 0 and 255."""

    low: np.ndarray  # [bands] float64
    high: np.ndarray


@dataclass(frozen=True)
class Bands(Ranged):
    """Bands, pages and scaling of image files.

    Attributes:
        names: of the bands that the model sees, in order, such as ("red", "green", "blue", "nir");
            () reads any image as 8-bit red, green and blue, as photographs are. With names, every
            file must have these bands.
        numbers: of a file's bands that are read, from 1, one for each name; () reads all.
        files: part of the file name of each band where every band has a file of its own, such as
            ("_B02", "_B03", "_B04"); the json has the name of the first.
        pages: of a file with several pages, slices or time points: "one" takes `page`, "middle",
            "max" and "mean" take what they say, and "bands" makes each page a band; "none" refuses
            such files.
        page: from 1, with `pages` "one".
        scale: how values become 0 to 255: "none" leaves 8 bits as they are and refuses others;
            "bits" takes the range of `bits`, "fixed" that of `limits`, and "image" the
            `percentiles` of each image and band. What is beyond becomes 0 or 255; fractions are
            kept.
        bits: with `scale` "bits"; 0 takes those of the file's type, which must have 8 or 16.
        limits: with `scale` "fixed": (low, high) of each band, or of all, which become 0 and 255;
            `prepare stats` measures those of a set.
        percentiles: (low, high) of the values that become 0 and 255 with `scale` "image".
        nan: what becomes of values that are not finite: "error", or "zero" after scaling.
        view: three names to be seen as red, green and blue, or one as gray; () takes those of these
            names if there are any, or the first three.
    """

    names: tuple[str, ...] = ()
    numbers: Counts = ()
    files: tuple[str, ...] = ()
    pages: Literal["none", "one", "middle", "max", "mean", "bands"] = "none"
    page: Count = 1
    scale: Literal["none", "bits", "fixed", "image"] = "none"
    bits: Annotated[int, Range("0 to 32", lambda bits: 0 <= bits <= 32)] = 0
    limits: tuple[tuple[float, float], ...] = ()
    percentiles: Annotated[tuple[float, float], _PERCENT] = (0.1, 99.9)
    nan: Literal["error", "zero"] = "error"
    view: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        count = len(self.names)
        if count > MAX_BANDS or len(set(self.names)) < count:
            raise ValueError(f"names is {self.names}, expected up to {MAX_BANDS} different names")
        for name in ("numbers", "files"):
            if getattr(self, name) and len(getattr(self, name)) != count:
                found = f"{name} is {getattr(self, name)}"
                raise ValueError(f"{found}, expected () or one for each of the {count} names")
        if (self.scale == "fixed") != bool(self.limits):
            raise ValueError(f"limits is {self.limits} and scale {self.scale}, expected 'fixed'")
        rising = all(low < high for low, high in self.limits)
        if not rising or len(self.limits) not in (0, 1, count):
            raise ValueError(f"limits is {self.limits}, expected a pair (low, high), or one a band")
        if len(self.view) not in (0, 1, 3) or set(self.view) - set(self.names):
            raise ValueError(f"view is {self.view}, expected one or three of names {self.names}")
        if not count and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise ValueError("names is (), expected a name for each band that the model sees")

    @property
    def count(self) -> int:
        """Channels of the model's input."""
        return len(self.names) or 3

    @property
    def is_scaled(self) -> bool:
        """Whether pixels are float32, and not the file's 8 bits."""
        return self.scale != "none"

    def read(
        self,
        path: str | os.PathLike | bytes,
        *,
        expected_size: tuple[int, int] | None = None,
        window: Window | None = None,
        upright: bool = False,
        name: str = "",
        max_bytes: int | None = None,
    ) -> np.ndarray:
        """[H, W, count] of a file, or of its content, in the numbers that it holds; with `names`.

        What a GeoTIFF calls no data is 0, or, where a scale could make it another number, ABSENT in
        float32.

        Args:
            expected_size: (height, width) that the json states.
            window: (x1, y1, x2, y2), the part to read.
            upright: apply an EXIF rotation.
            name: of the content, for messages.
            max_bytes: of all pixels, which the file's head tells.

        Raises:
            UndecodableImage: the file is damaged, too large, or has values that are not finite.
            ValueError: its size, bands or pages are not those that are expected.
            MissingPackage: the extra for such files is missing.
        """
        if isinstance(path, bytes):
            found = [self._read(path, expected_size, window, upright, name, max_bytes)]
        else:
            given = expected_size, window, upright, "", max_bytes
            found = [self._read(part, *given) for part in self.paths(path)]
        name = name or str(path)
        shapes = {(part.shape[:2], part.dtype) for part, _ in found}
        if len(shapes) > 1:
            kinds = ", ".join(sorted(f"{dtype} {h} x {w}" for (h, w), dtype in shapes))
            raise ValueError(f"{name}: the files of its bands differ: {kinds}")
        pixels, absent = (_joined(parts) for parts in zip(*found, strict=True))
        if self.numbers:
            if max(self.numbers) > pixels.shape[2]:
                has = f"{pixels.shape[2]} bands"
                raise ValueError(f"{name}: {has}, data.bands.numbers asks for {max(self.numbers)}")
            chosen = [number - 1 for number in self.numbers]
            pixels, absent = pixels[..., chosen], absent[..., chosen]
        if pixels.dtype.kind in "iu" and self._lowest_end > np.iinfo(pixels.dtype).max:
            end = f"{self._lowest_end:g}, that of data.bands.{'bits' if self.bits else 'limits'}"
            raise ValueError(f"{name}: numbers of type {pixels.dtype} never reach {end}")
        if not absent.any():
            return self.checked(pixels, name)
        pixels = self.checked(np.where(absent, pixels.dtype.type(0), pixels), name)
        if self.scale not in ("fixed", "image"):
            return pixels  # where 0 becomes 0
        return np.where(absent, ABSENT, pixels.astype(np.float32))

    def checked(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """[H, W, count] of the numbers of an image, in a type that files are read as.

        Raises ValueError, UndecodableImage as `read` does.
        """
        pixels = as_plain(pixels)
        if pixels.shape[2] != self.count:
            has = f"{pixels.shape[2]} bands, expected {self.count}: {', '.join(self.names)}"
            raise ValueError(f"{name}: {has} (data.bands.numbers chooses some)")
        if self.scale == "none" and pixels.dtype != np.uint8:
            how = "data.bands.scale says how they become 0 to 255"
            raise ValueError(f"{name}: numbers of type {pixels.dtype}; {how}")
        if pixels.dtype.kind == "f" and self.nan == "error":
            wrong = int(np.count_nonzero(~np.isfinite(pixels)))
            if wrong:
                raise UndecodableImage(
                    f"{name}: {wrong} values are not finite; data.bands.nan=zero takes them as 0"
                )
        return pixels

    @property
    def _lowest_end(self) -> float:
        """The lowest of the values that become 255, where the entries say it."""
        if self.scale == "bits":
            return float(2**self.bits - 1) if self.bits else 0.0
        return min((high for _, high in self.limits), default=0.0)

    def paths(self, path: str | os.PathLike) -> list[str]:
        """The files that hold the bands of the image with this path.

        Raises ValueError if the path is not that of the first.
        """
        text = os.fspath(path)
        if len(self.files) < 2:
            return [text]
        folder, base = os.path.split(text)
        before, found, after = base.rpartition(self.files[0])
        if not found:
            raise ValueError(
                f"{text}: no {self.files[0]!r} in its name, expected as data.bands.files has it"
            )
        return [os.path.join(folder, before + part + after) for part in self.files]

    def _read(
        self,
        source: str | bytes,
        expected_size: tuple[int, int] | None,
        window: Window | None,
        upright: bool,
        name: str = "",
        max_bytes: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """All bands of a file, and where they are what it calls no data."""
        with open_raster(source, name, upright, max_bytes) as raster:
            if expected_size is not None:
                check_image_size(np.broadcast_to(0, raster.size), expected_size, raster.path)
            if self.pages == "none" and raster.pages + raster.others > 1:
                found = f"{raster.path}: {raster.pages + raster.others} pages"
                raise ValueError(f"{found}; data.bands.pages says which of them are read")
            pixels = self._of_pages(raster, window)
            return pixels, _is_absent(pixels, raster.nodata)

    def _of_pages(self, raster: Raster, window: Window | None) -> np.ndarray:
        if self.pages == "bands":
            if raster.pages * raster.bands > 16 * MAX_BANDS:
                raise ValueError(f"{raster.path}: {raster.pages} pages, too many to be bands")
            pages = [raster.read(page, window) for page in range(raster.pages)]
            return np.concatenate(pages, axis=2)
        if self.pages in ("max", "mean"):
            total = raster.read(0, window)
            dtype = total.dtype
            total = total.astype(np.float64) if self.pages == "mean" else total
            for page in range(1, raster.pages):
                one = raster.read(page, window)
                total = total + one if self.pages == "mean" else np.maximum(total, one)
            if self.pages == "max":
                return total
            total /= raster.pages
            return total.astype(np.float32) if dtype.kind == "f" else np.rint(total).astype(dtype)
        page = {"none": 1, "one": self.page, "middle": raster.pages // 2 + 1}[self.pages]
        if page > raster.pages:
            raise ValueError(
                f"{raster.path}: {raster.pages} pages, data.bands.page asks for {page}"
            )
        return raster.read(page - 1, window)

    def limits_of(self, pixels: np.ndarray) -> Limits:
        """The values of [H, W, count] of an image that become 0 and 255."""
        if self.scale == "image":
            return percentiles(pixels, self.percentiles)
        if self.scale == "fixed":
            low, high = np.array(self.limits, np.float64).T
        elif not self.bits and (pixels.dtype.kind == "f" or pixels.dtype.itemsize > 2):
            raise ValueError(
                f"data.bands.bits is 0, expected the bits of numbers of {pixels.dtype}"
            )
        else:
            full = 2**self.bits - 1 if self.bits else np.iinfo(pixels.dtype).max
            low, high = np.zeros(1), np.full(1, full, np.float64)
        return Limits(*(np.broadcast_to(side, self.count) for side in (low, high)))

    def file_limits(self, path: str | bytes) -> Limits:
        """The limits of a file that is read by windows, or of its content; of a large one by a grid
        of them."""
        with open_raster(path if isinstance(path, bytes) else self.paths(path)[0]) as raster:
            (height, width), by_window = raster.size, raster.by_window
        few = height * width <= SAMPLED_PIXELS or not by_window
        if few or self.scale != "image":
            return self.limits_of(self.read(path))
        tops, lefts = (
            np.linspace(0, max(side - SAMPLE_SIDE, 0), SAMPLES).astype(int).tolist()
            for side in (height, width)
        )
        windows = [
            (x, y, min(x + SAMPLE_SIDE, width), min(y + SAMPLE_SIDE, height))
            for y in tops
            for x in lefts
        ]
        parts = [self.read(path, window=window).reshape(1, -1, self.count) for window in windows]
        return self.limits_of(np.concatenate(parts, axis=1))

    def scaled(self, pixels: np.ndarray, limits: Limits | None = None) -> np.ndarray:
        """Scale [H, W, count], as `read` gives it, to 0..255: float32, or uint8 as it is.

        limits: of the whole image, if these are the pixels of a part.
        """
        if not self.is_scaled:
            return pixels
        is_float = pixels.dtype.kind == "f"
        # Whole numbers of 32 bits are more exact than float32.
        exact: type = np.float32 if is_float or pixels.dtype.itemsize <= 2 else np.float64
        low, high = limits or self.limits_of(pixels)
        values = pixels.astype(exact)
        values -= low.astype(exact)
        values = values.astype(np.float32, copy=False)
        factors = np.divide(_FULL, high - low, out=np.zeros(len(low)), where=high > low)
        with np.errstate(over="ignore"):  # of ABSENT
            values *= factors.astype(np.float32)
        np.clip(values, 0, _FULL, out=values)
        if is_float:
            values[~np.isfinite(pixels)] = 0
        return values

    def to_rgb(self, image: np.ndarray) -> np.ndarray:
        """[H, W, 3] uint8 to look at, of [H, W, count] in 0..255; an RGB image is itself.

        Without names, the first three bands of any number are seen.
        """
        if image.dtype == np.uint8 and image.shape[2] == 3 and self.shown() == [0, 1, 2]:
            return image
        shown = image[..., self.shown()[: image.shape[2]]]
        if shown.shape[2] == 2:
            shown = np.concatenate([shown, np.zeros_like(shown[..., :1])], axis=2)
        shown = np.broadcast_to(shown, (*shown.shape[:2], 3))
        return np.ascontiguousarray(np.rint(shown).astype(np.uint8))

    def shown(self) -> list[int]:
        """Places of the bands that are seen as red, green and blue, of one as gray, or of two."""
        view: Sequence[str] = self.view
        if not view and self.names:
            view = RGB if set(RGB) <= set(self.names) else self.names[:3]
        return [self.names.index(name) for name in view] if view else [0, 1, 2]


RGB_FILES = Bands()


def is_there(pixels: np.ndarray) -> np.ndarray:
    """Where floating-point numbers are finite and not ABSENT."""
    return np.isfinite(pixels) & (pixels != ABSENT)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def _is_absent(pixels: np.ndarray, nodata: float | None) -> np.ndarray:
    """Where the numbers of an image are those that stand for no data; bool, as its pixels."""
    if nodata is None:
        return np.broadcast_to(False, pixels.shape)
    return np.isnan(pixels) if math.isnan(nodata) else pixels == nodata


def percentiles(pixels: np.ndarray, shares: tuple[float, float]) -> Limits:
    """Percentiles of each band of [H, W, C], of the values that are there; 0 and 1 without any."""
    found = []
    for band in np.moveaxis(pixels, 2, 0):
        values = band[is_there(band)] if band.dtype.kind == "f" else band.ravel()
        found.append(np.percentile(values, shares) if values.size else np.array([0.0, 1.0]))
    low, high = np.array(found, np.float64).T
    return Limits(low, high)
