"""The table of regions and the image of labels, beside skimage's numbers and plain sums."""

import json
import math
import tracemalloc
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import tifffile

from mask_rcnn_jax.images.pixel_size import PixelSize, read_pixel_size
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.saving import KINDS, WRITERS, ResultFiles, check_replaced
from mask_rcnn_jax.rle import WindowMask
from tests.predict.shapes_in_labels import BANDS, label_image, make_shapes
from tests.predict.test_result import boxes_alone, make_result

GOLDEN = Path(__file__).parents[1] / "goldens" / "skimage" / "regions.json"
IMAGE = Input("photos/a.tif", PurePosixPath("deep/a.tif"), PurePosixPath("deep/a.jpg"))


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda one: one["spacing"])
def test_regions_are_those_of_skimage(case):
    height, width = case["spacing"]
    size = None if height == 1 else PixelSize(height, width, "um")
    found = make_shapes(pixel_size=size).regions()
    for name, expected in case["table"].items():
        what, _, band = name.rpartition("-")
        name = f"{what}-{BANDS[int(band)]}" if what.startswith("intensity") else name
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
    assert set(found["unit"]) == {"um" if size else "pixel"}
    if height != width:
        assert np.isnan(found["perimeter"]).all()


def test_each_mask_is_measured_whole_where_others_cover_it():
    result = make_result()
    found = result.regions()
    for k, mask in enumerate(result.masks[:3]):
        y, x = np.nonzero(mask)
        assert found["num_pixels"][k] == mask.sum()
        assert found["centroid-1"][k] == pytest.approx(x.mean())
        variances = np.linalg.eigvalsh(np.cov(y, x, bias=True))
        axes = found["axis_minor_length"][k], found["axis_major_length"][k]
        assert axes == pytest.approx(4 * np.sqrt(variances))
        means = [found[f"intensity_mean-{band}"][k] for band in ("red", "green", "blue")]
        assert means == pytest.approx(result.image[mask].mean(axis=0))
    assert found["class"].tolist() == result.names and found["label"].tolist() == [1, 2, 3, 4]


def test_an_object_without_pixels_keeps_its_row():
    for result in (make_result()[3:], boxes_alone()[:1], boxes_alone()):
        found = result.regions()
        assert not found["num_pixels"].any() and not found["area"].any()
        for name in ("centroid-0", "orientation", "perimeter", "intensity_max-red"):
            assert np.isnan(found[name]).all()
        bbox = [found[f"bbox-{k}"][0] for k in (1, 0, 3, 2)]
        assert bbox == result.boxes[0].tolist()
    wild = np.array([[np.nan, 0, np.inf, 1e30]], np.float32)
    assert make_result(boxes=np.repeat(wild, 4, axis=0)).regions()["bbox-2"][0] == 60
    assert all(len(column) == 0 for column in make_result()[:0].regions().values())


def test_tracks_and_values_that_are_not_finite_are_told():
    result = make_shapes(track_ids=np.arange(7, 14, dtype=np.int32))
    assert list(result.regions())[:4] == ["label", "class", "score", "track_id"]
    values = result.pixels.astype(np.float32)
    values[label_image() == 2] = np.nan
    values[7:26:5, 5:30] = np.inf, -np.inf
    values[8:26:5, 5:30] = -np.inf, np.inf
    found = make_shapes(pixels=values).regions()
    assert np.flatnonzero(np.isnan(found["intensity_mean-nuclei"])).tolist() == [0, 1]
    assert found["intensity_max-nuclei"][0] == np.inf


def test_labels_give_shared_pixels_to_the_higher_score():
    result = make_result()
    first = result.masks[0]
    np.testing.assert_array_equal(result.labels() == 2, result.masks[1] & ~first)
    turned = result[[3, 2, 1, 0]].labels()
    np.testing.assert_array_equal(turned == 4, first)
    np.testing.assert_array_equal(turned == 3, result.masks[1] & ~first)
    np.testing.assert_array_equal(make_shapes().labels(), label_image())
    assert not boxes_alone().labels().any() and boxes_alone().labels().dtype == np.uint16


def many(count):
    """An image of `count` objects of a pixel each."""
    side = math.ceil(math.sqrt(count))
    place = np.arange(count)
    corners = np.stack([place % side, place // side], axis=1)
    one = WindowMask.from_crop(np.ones((1, 1), np.uint8), (0, 0))
    return make_shapes(
        image=np.zeros((side, side, 3), np.uint8),
        boxes=np.concatenate([corners, corners + 1], axis=1).astype(np.float32),
        scores=np.ones(count, np.float32),
        classes=np.ones(count, np.int32),
        window_masks=[one._replace(x=x, y=y) for x, y in corners.tolist()],
        pixels=None,
        band_names=(),
    )


def test_beyond_65535_objects_every_one_has_a_number(tmp_path):
    result = many(65_537)
    WRITERS["label_images"](result, tmp_path, IMAGE.target)
    written = tifffile.imread(tmp_path / "label_images" / "deep" / "a.tif")
    assert written.dtype == np.uint32
    np.testing.assert_array_equal(written.ravel()[:65_537], np.arange(1, 65_538))
    with pytest.raises(ValueError, match="deep/a.jpg: 65537 objects, more .*label_images"):
        WRITERS["masks"](result, tmp_path, IMAGE.target)


def test_label_images_are_compressed_and_know_the_size_of_a_pixel(tmp_path):
    result = make_shapes(pixel_size=PixelSize(0.5, 0.25, "um"))
    with ResultFiles(tmp_path, ["label_images"]) as files:
        files.write(result, IMAGE, 1)
    path = tmp_path / "label_images" / "deep" / "a.tif"
    with tifffile.TiffFile(path) as tiff:
        assert tiff.pages.first.compression == tifffile.COMPRESSION.ADOBE_DEFLATE
        np.testing.assert_array_equal(tiff.asarray(), label_image())
    height, width, unit = read_pixel_size(path)
    assert (height, width) == pytest.approx((0.5e-4, 0.25e-4)) and unit == "cm"


def test_without_tifffile_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    with pytest.raises(ValueError, match=r"--save label_images needs tifffile: .*\[tiff\]"):
        check_replaced([IMAGE.source], [IMAGE], tmp_path, ["label_images"])


@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_objects_need_no_masks_of_the_size_of_the_image(kind, tmp_path):
    side, count = 1500, 300
    corners = np.random.default_rng(0).uniform(0, side - 20, (count, 2))
    result = make_shapes(
        image=np.zeros((side, side, 3), np.uint8),
        boxes=np.concatenate([corners, corners + 20], axis=1).astype(np.float32),
        scores=np.ones(count, np.float32),
        classes=np.ones(count, np.int32),
        mask_grids=np.ones((count, 28, 28), np.float16),
        window_masks=None,
        pixels=None,
        band_names=(),
    )
    tracemalloc.start()
    try:
        with ResultFiles(tmp_path, [kind]) as files:
            files.add(files.write(result, IMAGE, 1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20  # masks would take 675 MB
