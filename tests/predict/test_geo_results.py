"""Results in the coordinates of a GeoTIFF."""

import json
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
import pytest

from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.predict.saving import WRITERS
from mask_rcnn_jax.rle import WindowMask
from tests.predict.conftest import CATEGORIES
from tests.tars.making import member, write_tar

rasterio = pytest.importorskip("rasterio")
pyogrio = pytest.importorskip("pyogrio")

HEIGHT, WIDTH = 60, 80
# Pixels of half a meter, from the upper left corner at (500,000, 4,600,000); south is down.
TRANSFORM = (0.5, 0, 500_000, 0, -0.5, 4_600_000)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tif"
    given = dict(height=HEIGHT, width=WIDTH, count=3, dtype="uint8", crs="EPSG:32633")
    transform = rasterio.Affine(*TRANSFORM)
    with rasterio.open(path, "w", driver="GTiff", transform=transform, **given) as file:
        file.write(np.zeros((3, HEIGHT, WIDTH), np.uint8))
    return path


@pytest.fixture
def result(path):
    """A ring of 20 x 20 pixels with a hole of 10 x 10, and a full square."""
    ring = np.ones((20, 20), np.uint8)
    ring[5:15, 5:15] = 0
    square = np.ones((10, 10), np.uint8)
    masks = [WindowMask.from_crop(ring, (10, 20)), WindowMask.from_crop(square, (50, 0))]
    boxes = np.array([[10, 20, 30, 40], [50, 0, 60, 10]], np.float32)
    scores, classes = np.float32([0.9, 0.8]), np.int32([1, 2])
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    given = image, boxes, scores, classes, None, CATEGORIES, str(path)
    return Result(*given, window_masks=masks)


def write(kind, result, folder):
    WRITERS[kind](result, folder, PurePosixPath("sub/a.tif"))
    return folder / kind / "sub" / f"a.{kind}"


def bounds(rings):
    points = np.concatenate([np.array(ring) for part in rings for ring in part])
    return [*points.min(axis=0), *points.max(axis=0)]


def test_geojson_is_in_the_coordinates_of_the_file(result, tmp_path):
    content = json.loads(write("geojson", result, tmp_path).read_text())
    assert content["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32633"
    ring, square = content["features"]
    assert (ring["properties"]["class"], ring["properties"]["score"]) == ("bolt", 0.9)
    assert ring["properties"]["area"] == pytest.approx(0.25 * 300, rel=0.05)
    assert square["properties"]["area"] == pytest.approx(0.25 * 100, rel=0.05)
    outer, hole = ring["geometry"]["coordinates"]
    np.testing.assert_allclose(
        bounds([[outer]]), [500_005, 4_599_980, 500_015, 4_599_990], atol=0.3
    )
    assert outer[0] == outer[-1] and hole[0] == hole[-1]
    signs = [np.sign(_area(np.array(one))) for one in (outer, hole)]
    assert signs == [1, -1], "RFC 7946: outside counterclockwise, holes clockwise"


def test_a_file_in_a_tar_has_its_coordinates(result, path, tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    tar = write_tar(tmp_path / "a.tar", member("a.tif", path.read_bytes()))
    in_tar = replace(result, path=f"{tar}/a.tif")
    written = [write("geojson", one, tmp_path / str(n)) for n, one in enumerate((result, in_tar))]
    assert written[0].read_bytes() == written[1].read_bytes()


def _area(ring):
    x, y = ring.T
    return (x[:-1] * y[1:] - x[1:] * y[:-1]).sum()


def test_gpkg_is_read_by_gdal_as_it_was_written(result, tmp_path):
    path = write("gpkg", result, tmp_path)
    write("gpkg", result, tmp_path)  # once more
    meta, _, geometries, (names, scores, areas) = pyogrio.raw.read(path)
    assert meta["crs"] == "EPSG:32633" and meta["geometry_type"] == "MultiPolygon"
    assert list(meta["fields"]) == ["class", "score", "area"]
    assert names.tolist() == ["bolt", "nut"]
    np.testing.assert_allclose(scores, [0.9, 0.8])
    np.testing.assert_allclose(areas, [75, 25], rtol=0.05)
    total = pyogrio.read_info(path)["total_bounds"]
    np.testing.assert_allclose(total, [500_005, 4_599_980, 500_030, 4_600_000], atol=0.3)
    assert len(geometries) == 2


def test_without_coordinates_geojson_has_pixels(result, tmp_path):
    content = json.loads(write("geojson", replace(result, path=""), tmp_path).read_text())
    assert "crs" not in content
    box = bounds([content["features"][1]["geometry"]["coordinates"]])
    np.testing.assert_allclose(box, [50, 0, 60, 10], atol=0.5)


def test_boxes_alone_are_rectangles(result, tmp_path):
    boxes = replace(result, window_masks=None)
    content = json.loads(write("geojson", boxes, tmp_path).read_text())
    assert content["features"][1]["properties"]["area"] == 25


@pytest.mark.parametrize("kind", ["geojson", "gpkg"])
def test_an_image_without_objects_has_an_empty_file(result, tmp_path, kind):
    path = write(kind, result[:0], tmp_path)
    assert len(pyogrio.raw.read(path)[2]) == 0
