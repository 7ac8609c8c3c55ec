"""Images that are too large to be decoded whole: they are read in tiles."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.images import decode, parts
from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.predict.annotate import annotate_images
from mask_rcnn_jax.predict.inputs import find_inputs
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.saving import ResultFiles
from mask_rcnn_jax.rle import WindowMask
from tests.predict.conftest import CATEGORIES, two_canvas_config

tifffile = pytest.importorskip("tifffile")

HEIGHT, WIDTH, TILE = 330, 520, 150


@pytest.fixture(scope="module")
def predictor(variables):
    return Predictor(two_canvas_config(), variables, 2, CATEGORIES, TILE)


@pytest.fixture
def path(tmp_path):
    """A tiled TIFF with blocks of noise."""
    blocks = np.random.default_rng(0).integers(0, 256, (33, 52, 3)).astype(np.uint8)
    pixels = np.kron(blocks, np.ones((10, 10, 1), np.uint8))
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", compression="zlib")
    return path


@pytest.fixture
def no_image_is_whole(monkeypatch):
    monkeypatch.setattr(parts, "MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(decode, "_decoded", None)


@pytest.mark.slow
def test_tiles_have_the_pixels_of_the_whole_image(predictor, path, monkeypatch):
    whole = predictor(path)
    before = predictor.prepare(whole.image)
    monkeypatch.setattr(parts, "MAX_WHOLE_BYTES", 0)
    large = predictor.prepare_large(str(path))
    assert large.windows == before.windows and not large.image.any()
    for number in range(1, len(large.windows)):
        views = (image.view(number, (1, 1), predictor.bands) for image in (large, before))
        np.testing.assert_array_equal(*views)
    result = predictor(str(path))
    assert len(result) and result.path == str(path) and result.image.shape == (HEIGHT, WIDTH, 3)
    assert result.image.strides[:2] == (0, 0), "it takes no memory"


def test_the_overview_is_the_average_of_blocks(predictor, path, no_image_is_whole, monkeypatch):
    monkeypatch.setattr("mask_rcnn_jax.predict.large.OVERVIEW", 33)
    large = predictor.prepare_large(str(path)).large
    overview = large.overview((20, 40))
    pixels = tifffile.imread(path)
    expected = pixels.reshape(33, 10, 52, 10, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(overview, expected, atol=0.5)


@pytest.mark.slow
def test_what_is_drawn_and_written(predictor, path, no_image_is_whole, monkeypatch, tmp_path):
    monkeypatch.setattr("mask_rcnn_jax.predict.large.OVERVIEW", 66)
    result = predictor(path)
    drawn = result.plot(min_side=0, labels=False)
    assert drawn.shape == (66, 104, 3) and len(result)
    empty = replace(result[:0]).plot(min_side=0)
    rows, columns = np.nonzero((drawn != empty).any(axis=2))
    x1, y1 = result.boxes[:, :2].min(axis=0) / 5
    x2, y2 = result.boxes[:, 2:].max(axis=0) / 5
    slack = 3
    assert columns.min() >= x1 - slack and columns.max() <= x2 + slack
    assert rows.min() >= y1 - slack and rows.max() <= y2 + slack
    for entry in result.to_coco():
        assert entry["segmentation"]["size"] == [HEIGHT, WIDTH]
        x, y, width, height = coco_mask.toBbox(entry["segmentation"])
        assert x + width <= WIDTH and y + height <= HEIGHT


def infer(predictor, path, folder, save=()):
    folder.mkdir()
    errors = []
    found, _ = find_inputs([str(path)], folder)
    with ResultFiles(folder, save) as files:
        for records in annotate_images(predictor, found, folder, files, {}, errors.append):
            files.add(records)
    return json.loads((folder / "detections.json").read_text()), errors


def test_infer_writes_results_without_the_image(predictor, path, no_image_is_whole, tmp_path):
    entries, errors = infer(predictor, path, tmp_path / "out", ["csv", "yolo"])
    assert entries and not errors
    assert {entry["file_name"] for entry in entries} == {"a.tif"}
    assert (tmp_path / "out" / "a.jpg").stat().st_size > 0
    assert (tmp_path / "out" / "labels" / "a.txt").read_text().count("\n") == len(entries)


def test_regions_have_the_values_of_the_file(predictor, path, no_image_is_whole, tmp_path):
    result, values = predictor(path)[:20], tifffile.imread(path)
    ones = np.ones((20, 30), np.uint8)
    masks = [WindowMask.from_crop(ones, (20 * k, 13 * k)) for k in range(len(result))]
    result = replace(result, window_masks=masks)
    found = replace(result, read=None, image=values).regions()
    for name, column in result.regions().items():
        np.testing.assert_array_equal(column, found[name], err_msg=name)
    assert len(result) and (found["intensity_mean-green"] > 0).all()
    entries, errors = infer(predictor, path, tmp_path / "out", ["geojson"])
    assert entries and not errors


@pytest.mark.parametrize("kind", ["masks", "label_images", "labelme"])
def test_files_of_whole_images_are_refused(predictor, path, no_image_is_whole, tmp_path, kind):
    entries, (error,) = infer(predictor, path, tmp_path / "out", [kind])
    assert not entries and f"a.tif: --save {kind} would need all of its pixels" in str(error)


def test_a_large_image_without_tiles_names_them(variables, path, monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 1000)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages.first.tags["ImageWidth"].overwrite(2_000_000)
    whole = Predictor(two_canvas_config(), variables, 2, CATEGORIES)
    with pytest.raises(UndecodableImage, match="a.tif.* is read by windows .*--tile"):
        whole(path)
