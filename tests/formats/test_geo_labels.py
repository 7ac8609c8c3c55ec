"""Labels on a map."""

import json
import struct

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import to_rle
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.geo import read_wkb
from mask_rcnn_jax.formats.reading import Options

rasterio = pytest.importorskip("rasterio")
pyogrio = pytest.importorskip("pyogrio")

SIDE, X, Y = 100, 500_000, 4_600_000
UTM = "EPSG:32633"


def write_image(path, left=X, crs=UTM, side=SIDE):
    """A GeoTIFF of half a meter a pixel."""
    place = rasterio.Affine(0.5, 0, left, 0, -0.5, Y)
    given = dict(driver="GTiff", height=side, width=side, count=1, dtype="uint8")
    options = dict(sparse_ok=True, tiled=True) if side > SIDE else {}
    with rasterio.open(path, "w", crs=crs, transform=place, **given, **options) as file:
        if side <= SIDE:
            file.write(np.zeros((1, side, side), np.uint8))


def ring(x, y, width, height):
    """The corners of a rectangle of pixels, on the map."""
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
    return [[X + px / 2, Y - py / 2] for px, py in corners]


def feature(*rings, kind="Polygon", **properties):
    coordinates = list(rings) if kind == "Polygon" else [[one] for one in rings]
    geometry = {"type": kind, "coordinates": coordinates}
    return {"type": "Feature", "properties": properties, "geometry": geometry}


def write_labels(path, *features, crs=UTM):
    content = {"type": "FeatureCollection", "features": list(features)}
    if crs:
        content["crs"] = {"type": "name", "properties": {"name": crs}}
    path.write_text(json.dumps(content))
    return path


def as_layer(source, path, driver, crs=UTM):
    """The same labels in another format, and another reference system."""
    meta, _, geometries, values = pyogrio.raw.read(source)
    pyogrio.raw.write(path, geometries, values, meta["fields"], driver=driver, crs=crs,
                      geometry_type="Unknown" if driver == "GPKG" else "Polygon")  # fmt: skip
    return path


@pytest.fixture
def labels(tmp_path):
    write_image(tmp_path / "a.tif")
    square = feature(ring(10, 20, 30, 40), kind="Polygon", species="oak", height=3.5)
    holed = feature(ring(50, 50, 20, 20), ring(55, 55, 10, 10), species="pine", height=None)
    over = feature(ring(90, 0, 30, 10), species="oak", height=1.0)
    far = feature(ring(900, 900, 30, 10), species="elm", height=1.0)
    return write_labels(tmp_path / "labels.geojson", square, holed, over, far)


def read(source, folder=None, **options):
    return convert("geo", source, folder, Options(source.parent / "out.json", **options))


def masks_of(content):
    image = content["images"][0]
    size = image["height"], image["width"]
    return [coco_mask.decode(to_rle(e["segmentation"], *size)) for e in content["annotations"]]


@pytest.mark.parametrize("kind", ["GeoJSON", "GPKG", "ESRI Shapefile"])
def test_polygons_come_to_pixels(labels, tmp_path, kind):
    suffix = {"GeoJSON": ".geojson", "GPKG": ".gpkg", "ESRI Shapefile": ".shp"}[kind]
    source = labels if kind == "GeoJSON" else as_layer(labels, tmp_path / f"b{suffix}", kind)
    content, folder, left_out = read(source, tmp_path)
    assert (folder, left_out) == (tmp_path, [])
    assert content["images"] == [{"id": 1, "file_name": "a.tif", "height": SIDE, "width": SIDE}]
    assert [entry["name"] for entry in content["categories"]] == ["oak", "pine"]
    square, holed, over = masks_of(content)
    assert square[20:60, 10:40].all() and square.sum() == 1200
    assert holed.sum() == 300 and not holed[55:65, 55:65].any()
    assert over[:10, 90:].all() and over.sum() == 100
    assert [entry["area"] for entry in content["annotations"]] == [1200, 300, 100]


def test_another_reference_system_is_reprojected(labels, tmp_path):
    write_image(tmp_path / "a.tif")
    meta, _, geometries, values = pyogrio.raw.read(labels)
    corners = np.array(read_wkb(geometries[0])[1][0][0])
    x, y = rasterio.warp.transform(UTM, "EPSG:4326", *corners.T)
    degrees = feature([list(pair) for pair in zip(x, y, strict=True)], species="oak")
    source = write_labels(tmp_path / "degrees.geojson", degrees, crs="EPSG:4326")
    content, _, _ = read(source)
    (mask,) = masks_of(content)
    assert mask[20:60, 10:40].all() and mask.sum() == 1200


def test_each_image_has_what_lies_on_it(labels, tmp_path):
    write_image(tmp_path / "b.tif", left=X + SIDE / 2)  # to the east
    assert cv2.imwrite(str(tmp_path / "c.tif"), np.zeros((9, 9), np.uint8))
    content, _, left_out = read(labels)
    assert [entry["image_id"] for entry in content["annotations"]] == [1, 1, 1, 2]
    assert left_out == [f"{tmp_path / 'c.tif'}: an image without coordinates"]


def test_an_image_may_be_very_large(tmp_path):
    side = 30_000
    write_image(tmp_path / "a.tif", side=side)
    holed = feature(ring(20_000, 29_000, 200, 200), ring(20_050, 29_050, 100, 100), species="oak")
    content, _, _ = read(write_labels(tmp_path / "l.geojson", holed))
    (entry,) = content["annotations"]
    assert entry["bbox"] == [20_000, 29_000, 200, 200] and entry["area"] == 30_000


def test_parts_of_a_geometry_are_one_object(tmp_path):
    write_image(tmp_path / "a.tif")
    parts = feature(ring(0, 0, 10, 10), ring(20, 0, 10, 10), kind="MultiPolygon", species="oak")
    content, _, _ = read(write_labels(tmp_path / "l.geojson", parts))
    (entry,) = content["annotations"]
    assert len(entry["segmentation"]) == 2 and entry["area"] == 200


def test_the_class_is_an_attribute_or_given(labels, tmp_path):
    content, _, _ = read(labels, class_name="tree")
    assert [entry["name"] for entry in content["categories"]] == ["tree"]
    with pytest.raises(ValueError, match="no attribute 'kind', it has 'species', 'height'"):
        read(labels, attribute="kind")
    with pytest.raises(ValueError, match="geometry 1: its 'height' is empty, expected a class"):
        read(labels, attribute="height")
    numbers = write_labels(tmp_path / "n.geojson", feature(ring(0, 0, 9, 9), kind="Polygon", k=1))
    with pytest.raises(ValueError, match="n.geojson: --attribute says which of its attributes"):
        read(numbers)
    assert read(numbers, attribute="k")[0]["categories"] == [{"id": 1, "name": "1"}]


def test_what_is_no_polygon_is_left_out(tmp_path):
    write_image(tmp_path / "a.tif")
    point = feature(ring(0, 0, 9, 9), species="oak")
    point["geometry"] = {"type": "Point", "coordinates": [X + 5, Y - 5]}
    square = feature(ring(0, 0, 9, 9), species="oak")
    content, _, (line,) = read(write_labels(tmp_path / "l.geojson", point, square))
    assert len(content["annotations"]) == 1
    assert line == f"{tmp_path / 'l.geojson'}: geometry 0 (oak), a point"


def test_heights_do_not_count(tmp_path):
    write_image(tmp_path / "a.tif")
    flat = ring(0, 0, 9, 9)
    tall = feature([[*corner, 17.0] for corner in flat], species="oak")
    content, _, _ = read(write_labels(tmp_path / "l.geojson", tall))
    assert content["annotations"][0]["bbox"] == [0, 0, 9, 9]


def test_bad_files_are_one_line(labels, tmp_path):
    bad = tmp_path / "bad.gpkg"
    bad.write_bytes(b"no package")
    with pytest.raises(ValueError, match="bad.gpkg: not a GeoPackage, GeoJSON or Shapefile by its"):
        read(bad)
    write_image(tmp_path / "a.tif", crs=None)
    with pytest.raises(
        ValueError, match="labels.geojson: reference system EPSG:32633, .*a.tif has"
    ):
        read(labels)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no TIFF with coordinates on a map, of 0"):
        read(labels, tmp_path / "empty")
    square = feature(ring(0, 0, 9, 9), species="oak")
    two = as_layer(write_labels(tmp_path / "s.geojson", square), tmp_path / "two.gpkg", "GPKG")
    meta, _, geometries, values = pyogrio.raw.read(two)
    pyogrio.raw.write(two, geometries, values, meta["fields"], layer="more", append=True, crs=UTM,
                      geometry_type="Unknown")  # fmt: skip
    with pytest.raises(ValueError, match="two.gpkg: 2 layers .'two', 'more'., expected one"):
        read(two, tmp_path)


@pytest.mark.parametrize("size", range(1, 93, 7))
def test_geometries_that_are_cut_off(size):
    whole = struct.pack("<BIII8d", 1, 3, 1, 4, *range(8))
    with pytest.raises(ValueError, match="cut off"):
        read_wkb(whole[: min(size, len(whole) - 1)])


def test_labels_beside_the_images_are_counted(labels, tmp_path, caplog):
    read(labels)
    expected = f"{labels}: 1 of 4 geometries lie on none of the images with coordinates"
    assert caplog.messages == [expected]
    caplog.clear()
    read(write_labels(tmp_path / "on.geojson", feature(ring(1, 1, 5, 5), species="oak")))
    assert caplog.messages == []
