"""TIFFs, of which every band, page and statement about their scale is read."""

import io
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from hypothesis import strategies as st

from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.images.pixel_size import read_pixel_size
from tests.fuzz import hostile

SIZE = (24, 40)


@cache
def files() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 4096, (*SIZE, 4)).astype(np.uint16)
    gray, color = pixels[..., 0], (pixels[..., :3] >> 4).astype(np.uint8)
    kinds: list[tuple[np.ndarray, dict[str, Any]]] = [
        (gray, {"resolution": (4, 2), "resolutionunit": "CENTIMETER"}),
        (color, {"photometric": "rgb", "compression": "zlib", "tile": (16, 16)}),
        (gray, {"imagej": True, "resolution": (4, 4), "metadata": {"unit": "um"}}),
        (np.stack([gray, gray]), {"imagej": True, "metadata": {"axes": "ZYX", "spacing": 2}}),
        (np.moveaxis(pixels, 2, 0), {"ome": True, "metadata": {"axes": "CYX"}}),
        (gray, {"ome": True, "metadata": {"PhysicalSizeX": 0.2, "PhysicalSizeY": 0.3}}),
        (pixels.astype(np.float32), {"planarconfig": "separate", "bigtiff": True}),
    ]
    keys = (1, 1, 0, 2, 1024, 0, 1, 1, 3076, 0, 1, 9001)  # a map in meters
    tags = [(34735, 3, len(keys), keys, False), (33550, 12, 3, (0.5, 0.5, 0.0), False)]
    kinds.append((gray, {"extratags": tags}))
    found = []
    for array, options in kinds:
        file = io.BytesIO()
        tifffile.imwrite(file, array, **{"photometric": "minisblack"} | options)
        found.append(file.getvalue())
    return found


OME = """<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">
<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint16" SizeX="40" SizeY="24" SizeC="2" SizeZ="1"
SizeT="2" PhysicalSizeX="0.2" PhysicalSizeXUnit="um" PhysicalSizeY="0.3"><Channel ID="Channel:0:0"
SamplesPerPixel="1"/><Channel ID="Channel:0:1" SamplesPerPixel="1"/>
<TiffData FirstC="0" FirstZ="0" FirstT="0" IFD="0" PlaneCount="2"/>
<TiffData FirstC="0" FirstZ="0" FirstT="1" IFD="2" PlaneCount="2"><UUID FileName="case.tif">
urn:uuid:0</UUID></TiffData></Pixels></Image></OME>"""
IMAGEJ = """ImageJ=1.53t\nimages=4\nchannels=2\nslices=1\nframes=2\nhyperstack=true\nunit=um
spacing=0.5\nmin=0\nmax=4095\nloop=false\n"""
VALUES = [*map(str, [*hostile.WHOLE, *hostile.REAL]), *hostile.TEXTS, "50000000", "XYZTC", "0.tif"]
texts = st.tuples(
    st.sampled_from([OME, IMAGEJ]),
    st.lists(st.tuples(hostile.places, st.sampled_from(VALUES)), min_size=1, max_size=4),
    st.one_of(hostile.no_edits, hostile.no_edits, hostile.byte_edits),
)


def with_text(text: str, edits: list[tuple[int, str]], changes: list) -> bytes:
    """Four pages with a text about them, of which some values are others."""
    for place, value in edits:
        found = list(re.finditer(r'(?<=")[^"]*(?=")|(?<==)[^"\n]+(?=\n)', text))
        start, end = found[place % len(found)].span()
        text = text[:start] + value.encode("utf-8", "replace").decode() + text[end:]
    file = io.BytesIO()
    pages = np.zeros((4, *SIZE), np.uint16)
    said = hostile.edit_bytes(text.encode(), changes)
    tifffile.imwrite(file, pages, description=said, metadata=None, photometric="minisblack")
    return file.getvalue()


def write(folder: Path, case: Any) -> Path:
    path = folder / "case.tif"
    if isinstance(case[0], str):
        path.write_bytes(with_text(*case))
    else:
        number, edits = case
        path.write_bytes(hostile.edit_bytes(files()[number % len(files())], edits))
    return path


def read(path: Path) -> None:
    size = read_pixel_size(path)
    assert size is None or all(math.isfinite(side) and side > 0 for side in size[:2])
    with open_raster(path) as raster:
        height, width = raster.size
        assert raster.pixel_size == size
        window = (0, 0, min(width, 64), min(height, 64))
        for page in range(min(raster.pages, 3)):
            pixels = raster.read(page, window)
            assert pixels.shape == (window[3], window[2], raster.bands)


TIFFS = {
    "TIFFs": (st.tuples(hostile.places, hostile.byte_edits), write, read),
    "texts of TIFFs": (texts, write, read),
}
