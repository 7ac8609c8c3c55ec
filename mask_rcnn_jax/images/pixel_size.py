"""How large a pixel is where a TIFF says so: OME, ImageJ, GeoTIFF, or its resolution."""

import html
import logging
import math
import os
import re
from typing import Any, NamedTuple

from mask_rcnn_jax.annotations.reader import open_regular
from mask_rcnn_jax.images.decode import TIFF

METERS = {
    **{"pm": 1e-12, "nm": 1e-9, "um": 1e-6, "mm": 1e-3, "cm": 1e-2, "m": 1.0, "km": 1e3},
    **{"inch": 0.0254, "foot": 0.3048, "us_foot": 1200 / 3937},
}
_OTHER_NAMES = {
    **dict.fromkeys(["µm", "μm", "\\u00b5m", "micron", "microns", "micrometer"], "um"),
    **{"in": "inch", "inches": "inch", "ft": "foot", "meter": "m", "metre": "m"},
    **{"nanometer": "nm", "millimeter": "mm", "centimeter": "cm"},
}
_X_RESOLUTION, _Y_RESOLUTION, _RESOLUTION_UNIT = 282, 283, 296
_RESOLUTION_UNITS = {2: "inch", 3: "cm"}
_SCREENS = (72, 96)  # pixels an inch that programs write of images of any scale
_PROJECTED = 1
_GEO_UNITS = {9001: "m", 9002: "foot", 9003: "us_foot"}
_OME_PIXELS = re.compile(r"<(?:\w+:)?Pixels\b[^>]*")


class PixelSize(NamedTuple):
    """Height and width of a pixel in a `unit`, a key in METERS."""

    height: float
    width: float
    unit: str


def read_pixel_size(path: str | os.PathLike) -> PixelSize | None:
    """The size of a file's pixels.

    None if it is no TIFF that can be read, if it does not say, or if tifffile is missing.
    """
    try:
        file = open_regular(path)
    except OSError:  # also of what is no regular file
        return None
    with file:
        begin = file.read(8)
        if not begin.startswith(TIFF):
            return None
        file.seek(0)
        try:
            import tifffile

            logging.getLogger("tifffile").setLevel(logging.CRITICAL)
            with tifffile.TiffFile(file, name=os.path.basename(path)) as tiff:
                return tiff_pixel_size(tiff)
        except Exception:  # of the parser, in a damaged file
            return None


def tiff_pixel_size(tiff: Any) -> PixelSize | None:
    """The size of the pixels of a `tifffile.TiffFile`; None if it does not say.

    Degrees, and resolutions of 72 and 96 pixels an inch, are no sizes.
    """
    page = tiff.pages.first
    try:
        if page.is_geotiff:
            found = _of_map(page.geotiff_tags)
        elif page.is_ome:
            found = _of_ome(page.description)
        elif tiff.is_imagej:
            unit = tiff.imagej_metadata.get("unit", "")
            found = (*_resolution(page), unit)
        else:
            height, width = _resolution(page)
            unit = _RESOLUTION_UNITS.get(page.tags[_RESOLUTION_UNIT].value, "")
            is_of_screen = unit == "inch" and round(1 / width) in _SCREENS
            found = (height, width, "" if is_of_screen else unit)
    except Exception:  # not there, or without meaning: tags hold anything
        return None
    height, width, unit = found
    unit = _OTHER_NAMES.get(str(unit).lower(), unit)
    sides = height, width
    if unit not in METERS or not all(math.isfinite(side) and side > 0 for side in sides):
        return None
    return PixelSize(*sides, unit)


def _resolution(page: Any) -> tuple[float, float]:
    """Height and width of a pixel, by the pixels in a unit of length."""
    across, down = (page.tags[tag].value for tag in (_X_RESOLUTION, _Y_RESOLUTION))
    return down[1] / down[0], across[1] / across[0]


def _of_ome(text: str) -> tuple[float, float, str]:
    """KeyError or ValueError if an OME-XML does not say."""
    pixels = _OME_PIXELS.search(text)
    if not pixels:
        raise ValueError("an OME-XML without pixels")
    found = dict(re.findall(r'\b(PhysicalSize\w+)\s*=\s*"([^"]*)"', pixels[0]))
    units = {html.unescape(found.get(f"PhysicalSize{axis}Unit", "µm")) for axis in "XY"}
    if len(units) > 1:
        raise ValueError("two units")
    return float(found["PhysicalSizeY"]), float(found["PhysicalSizeX"]), units.pop()


def _of_map(keys: dict) -> tuple[float, float, str]:
    """KeyError if a GeoTIFF does not say; lengths on its map, which may differ from the earth's."""
    if keys["GTModelTypeGeoKey"] != _PROJECTED:
        raise ValueError("degrees")
    unit = _GEO_UNITS[int(keys["ProjLinearUnitsGeoKey"])]
    if "ModelPixelScale" in keys:
        width, height = keys["ModelPixelScale"][:2]
        return height, width, unit
    (a, b, *_), (c, d, *_) = keys["ModelTransformation"][:2]
    return math.hypot(b, d), math.hypot(a, c), unit
