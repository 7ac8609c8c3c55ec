"""What numbers a dataset's images hold, band by band, and the `data.bands` that fit them."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.annotations.reader import open_regular
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.unused import Header, read_header
from mask_rcnn_jax.images.bands import RGB, Bands, is_there, percentiles
from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.report.suggestions import Suggestion
from mask_rcnn_jax.report.tables import table
from mask_rcnn_jax.rle import Window

SAMPLE = 60  # images that are read
VALUES = 1 << 16  # of a band of an image that are looked at
LARGE, PART = 1 << 24, 512  # pixels of an image from which on parts of it are read, and their side
SHARES = (0.1, 99.9)  # percentiles that become 0 and 255
PLAIN = Header()


class SetBands(NamedTuple):
    """What was found in a sample of a dataset's images."""

    kinds: Counter[str]  # such as "uint16, 4 bands, 1 page"
    bands: Bands  # the recipe's, or those that fit
    pixels: np.ndarray  # [n, bands] float64 of the numbers in the files, NaN where there are none
    mean: np.ndarray  # [bands] after scaling to 0..255
    deviation: np.ndarray

    def suggestions(self, recipe: Recipe) -> list[Suggestion]:
        """Entries of `data.bands` and `model.input`."""
        now, found = recipe.data.bands, self.bands
        mixed = " (mixed: see the page)" if len(self.kinds) > 1 else ""
        reasons = {
            "names": f"Images are {self.kinds.most_common(1)[0][0]}{mixed}; rename as they are.",
            "numbers": "The last is alpha.",
            "pages": "Or middle, mean, one (with page), or bands if each page is one.",
            "scale": "The same for all images, so that brightness tells objects apart.",
            "nan": "Some values are not finite, and such images would not be read.",
            "limits": f"Percentiles {SHARES[0]} and {SHARES[1]} of {self._images} images.",
        }
        entries = {name: getattr(found, name) for name in reasons}
        changed = {n: v for n, v in entries.items() if now.names == () and v != getattr(now, n)}
        suggested = [
            Suggestion(f"data.bands.{name}", getattr(now, name), value, reasons[name])
            for name, value in changed.items()
        ]
        mean = _rounded(self.mean)
        statistics = {"mean": mean, "std": _rounded(np.maximum(self.deviation, 1.0))}
        for name, value in statistics.items():
            reason = f"Of {self._images} images after scaling to 0..255."
            current = getattr(recipe.model.input, name)
            suggested.append(Suggestion(f"model.input.{name}", current, value, reason))
        if "fixed_size_crop" in recipe.data.augment:
            current, fill = recipe.data.fixed_size_crop.fill, tuple(round(value) for value in mean)
            reason = "The mean, as padding of the canvas has it."
            suggested.append(Suggestion("data.fixed_size_crop.fill", current, fill, reason))
        return suggested

    @property
    def _images(self) -> int:
        return self.kinds.total()

    @property
    def html(self) -> str:
        """A section of the page."""
        columns = ["Lowest", f"{SHARES[0]} %", "Median", f"{SHARES[1]} %", "Highest"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a band without numbers
            quantiles = np.nanpercentile(self.pixels, [0, SHARES[0], 50, SHARES[1], 100], axis=0).T
        rows = [
            f'<tr><th scope="row">{escape(name)}</th>'
            + "".join(f'<td data-v="{value}">{value:.5g}</td>' for value in values)
            + "</tr>"
            for name, *values in zip(
                self.bands.names, *quantiles.T, self.mean, self.deviation, strict=True
            )
        ]
        files = "; ".join(f"{kind} in {count}" for kind, count in self.kinds.most_common())
        caption = f"Numbers in {self._images} files: {files}. Mean and deviation are after scaling"
        heads = [*columns, "Mean", "Deviation"]
        return f"<h2>Bands</h2>{table(escape(caption), 'Band', heads, rows)}"


def find_bands(dataset: CocoDataset, recipe: Recipe) -> SetBands | None:
    """Look at a sample of the images; None for photographs, and if none can be read."""
    total = len(dataset.images)
    if dataset.records is not None:
        return None
    paths = [dataset.image_path(n) for n in range(0, total, -(-total // SAMPLE) or 1)]
    bands = recipe.data.bands
    if not bands.names:
        headers = [header for path in paths if (header := _header(path)) is not None]
        if not any(header.lost != PLAIN.lost and header.lost != ["alpha"] for header in headers):
            return None
    kinds, images = Counter[str](), []
    for path in paths:
        try:
            kind, wanted = _look(path, bands)
            images.append((wanted, _sample(path, wanted, dataset.upright)))
        except (OSError, ValueError) as error:
            logging.warning("%s", error)
            continue
        kinds[kind] += 1
    if not images:
        return None
    usual = Counter(wanted for wanted, _ in images).most_common(1)[0][0]
    same = [pixels for wanted, pixels in images if wanted == usual]
    return _measured(kinds, bands if bands.names else usual, same)


def _measured(kinds: Counter[str], bands: Bands, images: Sequence[np.ndarray]) -> SetBands:
    """images: [1, n, bands] each."""
    pixels = np.concatenate([image[0] for image in images]).astype(np.float64)
    if not np.isfinite(pixels).all():
        bands = replace(bands, nan="zero")
    pixels = np.where(is_there(pixels), pixels, np.nan)
    if bands.scale == "fixed" and bands.limits == _OPEN:
        low, high = percentiles(pixels[None], SHARES)
        pairs = [(_short(a), _short(b)) for a, b in zip(low, high, strict=True)]
        bands = replace(bands, limits=tuple((a, b if b > a else a + 1) for a, b in pairs))
    scaled = np.concatenate([bands.scaled(image)[0] for image in images]).astype(np.float64)
    scaled = np.maximum(scaled, 0)  # what is absent
    return SetBands(kinds, bands, pixels, scaled.mean(axis=0), scaled.std(axis=0))


_OPEN = ((0.0, 1.0),)  # until they are measured


def _header(path: str) -> Header | None:
    try:
        with open_regular(path) as file:
            start = file.read(8)
            file.seek(0)
            is_array = start.startswith((b"\x93NUMPY", b"PK\x03\x04"))
            return Header(bits=16) if is_array else read_header(file)
    except (OSError, ValueError):
        return None


def _look(path: str, bands: Bands) -> tuple[str, Bands]:
    """What a file holds, and the bands to read: those given, or all that are no alpha."""
    with open_raster(bands.paths(path)[0]) as raster:
        count, pages, dtype, apart = raster.bands, raster.pages, raster.dtype, raster.others
        nodata = [] if raster.nodata is None else [f"no data where it is {raster.nodata:g}"]
        is_image = raster.kind == "image"
    texts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((count, "band"), (pages, "page"))]
    more = [f"{apart} of other sizes or types"] if apart else []
    kind = ", ".join([dtype.name, *texts, *more, *nodata])
    if bands.names:
        return kind, bands
    header = _header(path)
    # In a TIFF, what is called alpha may be any band.
    has_alpha = header is not None and header.has_alpha and is_image
    shown = count - has_alpha
    colors = RGB if shown >= 3 and (is_image or header is not None and header.is_rgb) else ()
    others = [f"band{n + 1}" for n in range(len(colors), shown)]
    return kind, Bands(
        names=(*colors, *others) if shown > 1 else ("gray",),
        numbers=tuple(range(1, count)) if has_alpha else (),
        pages="max" if pages > 1 else "one" if apart else "none",
        scale="none" if dtype == np.uint8 else "fixed",
        limits=() if dtype == np.uint8 else _OPEN,
    )


def _sample(path: str, bands: Bands, upright: bool) -> np.ndarray:
    """[1, n, bands] of the numbers in a file, from all of it."""
    any_type = replace(bands, nan="zero")
    if bands.scale != "bits":  # which whole numbers need, to stay so
        any_type = replace(any_type, scale="image", limits=())
    with open_raster(bands.paths(path)[0]) as raster:
        height, width = raster.size
    windows: list[Window | None] = [None]
    if height * width > LARGE:
        places = [(y, x) for y in (1, 3, 5) for x in (1, 3, 5)]
        starts = [(height * y // 6 - PART // 2, width * x // 6 - PART // 2) for y, x in places]
        windows = [
            (max(x, 0), max(y, 0), min(x + PART, width), min(y + PART, height)) for y, x in starts
        ]
    parts = [any_type.read(path, window=window, upright=upright) for window in windows]
    pixels = np.concatenate([part.reshape(-1, bands.count) for part in parts])
    return pixels[None, :: -(-len(pixels) // VALUES)]


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 1) for value in values)


def _short(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")
