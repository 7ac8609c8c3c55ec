"""What TIFFs say about the size of their pixels, in every way that programs write it."""

import os

import numpy as np
import pytest
import rasterio
import tifffile
from rasterio.transform import Affine

from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.images.pixel_size import read_pixel_size

PIXELS = np.zeros((20, 30), np.uint8)


def ome(x="0.25", y="0.5", units=("µm", "µm")):
    sizes = f'PhysicalSizeX="{x}" PhysicalSizeY="{y}"'
    for axis, unit in zip("XY", units, strict=False):
        sizes += f' PhysicalSize{axis}Unit="{unit}"'
    pixels = f'<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" {sizes} SizeX="30" '
    rest = 'SizeY="20" SizeC="1" SizeZ="1" SizeT="1"><TiffData/></Pixels>'
    schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    image = f'<Image ID="Image:0">{pixels}{rest}</Image>'
    return f'<?xml version="1.0"?><OME xmlns="{schema}">{image}</OME>'


def imagej(unit):
    return {"imagej": True, "resolution": (4, 2), "metadata": {"unit": unit, "spacing": 3}}


CASES = {
    "centimeters": (dict(resolution=(4, 2), resolutionunit="CENTIMETER"), (0.5, 0.25, "cm")),
    "inches": (dict(resolution=(600, 300), resolutionunit="INCH"), (1 / 300, 1 / 600, "inch")),
    "of a screen": (dict(resolution=(72, 72), resolutionunit="INCH"), None),
    "of a screen too": (dict(resolution=(96, 96), resolutionunit="INCH"), None),
    "no unit": (dict(resolution=(4, 4), resolutionunit="NONE"), None),
    "nothing": ({}, None),
    "zero": (dict(resolution=((0, 1), (0, 1)), resolutionunit="CENTIMETER"), None),
    "ImageJ um": (imagej("um"), (0.5, 0.25, "um")),
    "ImageJ micron": (imagej("micron"), (0.5, 0.25, "um")),
    "ImageJ escaped": (imagej("\\u00B5m"), (0.5, 0.25, "um")),
    "ImageJ inch": (imagej("inch"), (0.5, 0.25, "inch")),
    "ImageJ pixel": (imagej("pixel"), None),
    "ImageJ parsecs": (imagej("parsec"), None),
    "ImageJ without": ({"imagej": True}, None),
    "OME": (dict(description=ome()), (0.5, 0.25, "um")),
    "OME by default": (dict(description=ome(units=())), (0.5, 0.25, "um")),
    "OME nm": (dict(description=ome(units=("nm", "nm"))), (0.5, 0.25, "nm")),
    "OME escaped": (dict(description=ome(units=("&#181;m",))), (0.5, 0.25, "um")),
    "OME of two units": (dict(description=ome(units=("nm",))), None),
    "OME pixels": (dict(description=ome(units=("pixel", "pixel"))), None),
    "OME negative": (dict(description=ome(x="-1")), None),
    "OME no number": (dict(description=ome(y="large")), None),
    "OME NaN": (dict(description=ome(y="nan")), None),
    "OME without": (dict(description=ome().replace("PhysicalSize", "Other")), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_microscopes_and_scanners_write(case, tmp_path):
    options, expected = CASES[case]
    path = tmp_path / "a.tif"
    if "description" in options:
        options = {"metadata": None, "description": options["description"].encode()}
    tifffile.imwrite(path, PIXELS, **options)
    found = read_pixel_size(path)
    if expected is None:
        assert found is None
    else:
        assert found[:2] == pytest.approx(expected[:2]) and found.unit == expected[2]
    with open_raster(path) as raster:
        assert raster.pixel_size == found


@pytest.mark.parametrize(
    ("crs", "transform", "expected"),
    [
        ("EPSG:32633", Affine(0.25, 0, 5e5, 0, -0.5, 4e6), (0.5, 0.25, "m")),
        ("EPSG:2263", Affine(0.25, 0, 1e6, 0, -0.5, 2e5), (0.5, 0.25, "us_foot")),
        ("EPSG:32633", Affine(0.3, 0.8, 5e5, 0.4, -0.6, 4e6), (1.0, 0.5, "m")),  # turned
        ("EPSG:4326", Affine(0.25, 0, 10, 0, -0.5, 50), None),
    ],
)
def test_what_maps_write(crs, transform, expected, tmp_path):
    path = tmp_path / "a.tif"
    options = dict(driver="GTiff", height=20, width=30, count=1, dtype="uint8")
    with rasterio.open(path, "w", crs=crs, transform=transform, **options) as file:
        file.write(PIXELS[None])
    found = read_pixel_size(path)
    if expected is None:
        assert found is None
    else:
        assert found[:2] == pytest.approx(expected[:2]) and found.unit == expected[2]


def test_other_files_have_no_size(tmp_path):
    damaged = tmp_path / "a.tif"
    tifffile.imwrite(damaged, PIXELS, **CASES["centimeters"][0])
    content = damaged.read_bytes()
    for length in range(4, len(content), 7):
        damaged.write_bytes(content[:length])
        read_pixel_size(damaged)  # as it would be, or None
    damaged.write_bytes(content[:8])
    other = tmp_path / "a.png"
    other.write_bytes(b"\x89PNG\r\n\x1a\n")
    os.mkfifo(tmp_path / "pipe")
    for path in (other, damaged, tmp_path / "pipe", tmp_path / "nowhere.tif", tmp_path):
        assert read_pixel_size(path) is None


def test_tags_without_meaning_leave_an_image_readable(tmp_path):
    path = tmp_path / "a.tif"
    keys = (34735, 3, 4, (1, 1, 0, 99), False)  # GeoTIFF's, which announce 99 more
    tifffile.imwrite(path, PIXELS, extratags=[keys])
    with open_raster(path) as raster:
        assert raster.pixel_size is None and raster.read().shape == (20, 30, 1)
