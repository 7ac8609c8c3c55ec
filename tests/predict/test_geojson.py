"""GeoJSON, read as its standard has it: closed rings, which turn by their kind."""

import json
from pathlib import PurePosixPath

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.predict.geojson import features
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.saving import ResultFiles
from tests.predict.shapes_in_labels import HEIGHT, WIDTH, label_image, make_shapes
from tests.predict.test_result import BOXES, boxes_alone, make_result

IMAGE = Input("photos/a.tif", PurePosixPath("deep/a.tif"), PurePosixPath("deep/a.jpg"))


def polygons_of(feature):
    geometry = feature["geometry"]
    several = {"Polygon": False, "MultiPolygon": True}[geometry["type"]]
    return geometry["coordinates"] if several else [geometry["coordinates"]]


def signed_area(ring):
    x, y = (np.array(ring, np.float64) - ring[0]).T
    return float(x[:-1] @ y[1:] - y[:-1] @ x[1:]) / 2


@pytest.fixture
def written(tmp_path):
    with ResultFiles(tmp_path, ["geojson"]) as files:
        files.add(files.write(make_shapes(), IMAGE, 1))
    return json.loads((tmp_path / "geojson" / "deep" / "a.geojson").read_text())


def test_objects_are_detections_as_qupath_has_them(written):
    assert written["type"] == "FeatureCollection"
    first = written["features"][0]
    assert first["type"] == "Feature"
    assert first["properties"] == {
        "objectType": "detection",
        "classification": {"name": "cell"},
        "measurements": {"score": 0.9},
        "label": 1,
        "class": "cell",
        "score": 0.9,
        "area": pytest.approx(sum(signed_area(r) for p in polygons_of(first) for r in p), rel=5e-3),
    }


def test_polygons_with_holes_and_parts_cover_the_masks(written):
    labels = label_image()
    kinds = {}
    for feature in written["features"]:
        label = feature["properties"]["label"]
        drawn, parts = np.zeros((HEIGHT * 8, WIDTH * 8), np.uint8), polygons_of(feature)
        for polygon in parts:
            for place, ring in enumerate(polygon):
                assert ring[0] == ring[-1] and len(ring) >= 4
                assert signed_area(ring) * (1 if place == 0 else -1) > 0  # RFC 7946, 3.1.6
                cv2.fillPoly(drawn, [np.round(np.array(ring) * 8).astype(int)], int(place == 0))
        kinds[label] = [len(polygon) for polygon in parts]
        if label in (1, 2, 5, 7):
            mask = np.kron(labels == label, np.ones((8, 8), np.uint8))
            assert (drawn & mask).sum() / (drawn | mask).sum() > 0.8, label
    assert kinds[1] == [1] and kinds[2] == [2]  # a ring has a hole
    assert sorted(kinds[5]) == [1, 1]  # two parts


def test_a_map_has_its_own_coordinates_and_directions():
    def to_map(points):
        return points * (0.5, -0.25) + (5e5, 4e6)

    result = make_shapes()
    for one, other in zip(features(result), features(result, to_map), strict=True):
        area = {"area": pytest.approx(one["properties"]["area"] / 8, rel=1e-9)}
        assert other["properties"] == one["properties"] | area
        for rings, others in zip(polygons_of(one), polygons_of(other), strict=True):
            for place, (ring, moved) in enumerate(zip(rings, others, strict=True)):
                assert signed_area(moved) * (1 if place == 0 else -1) > 0
                area = abs(signed_area(ring)) / 8
                assert abs(signed_area(moved)) == pytest.approx(area, rel=0.02, abs=0.01)
                low = to_map(np.array(ring).max(axis=0))[1]
                assert min(moved, key=lambda point: point[1])[1] == pytest.approx(low, abs=0.01)


def test_boxes_alone_are_rectangles_and_what_has_no_area_is_left_out():
    found = features(boxes_alone())
    assert [one["properties"]["label"] for one in found] == [1, 2, 3]
    for one, (x1, y1, x2, y2) in zip(found, BOXES.tolist(), strict=False):
        ((ring,),) = polygons_of(one)
        assert sorted(map(tuple, ring[:4])) == sorted([(x1, y1), (x1, y2), (x2, y1), (x2, y2)])
    assert [one["properties"]["label"] for one in features(make_result())] == [1, 2, 3]
    assert features(make_result()[:0]) == []
