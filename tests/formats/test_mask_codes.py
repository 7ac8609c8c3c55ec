"""Run-length codes that are made without whole images equal those of the images."""

import json

import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.annotations import segmentation
from mask_rcnn_jax.annotations.segmentation import run_lengths, segmentation_to_mask, union
from mask_rcnn_jax.formats import mask_codes
from mask_rcnn_jax.formats.label_image import instances, read_label_image
from mask_rcnn_jax.formats.mask_codes import box_code, crop_code, overlap, rows_code, without
from mask_rcnn_jax.rle import compressed_rle
from tests.formats.converting import box, refuses, write_image, write_values
from tests.formats.test_label_studio import brush
from tests.formats.test_label_studio import write as write_label_studio

SIZES = [(1, 1), (1, 40), (40, 1), (23, 17), (17, 23)]


def masks(size, count=12, seed=0):
    """Noise of all densities, all and nothing."""
    random = np.random.default_rng(seed)
    found = [(random.random(size) < share).astype(np.uint8) for share in np.linspace(0, 1, count)]
    return [*found, np.zeros(size, np.uint8), np.ones(size, np.uint8)]


@pytest.fixture(params=[1, 7, 1 << 21], autouse=True)
def small_blocks(request, monkeypatch):
    """Images are looked at in blocks of a few pixels, and codes in parts of a few runs."""
    monkeypatch.setattr(mask_codes, "_BLOCK", request.param)
    monkeypatch.setattr(segmentation, "_RUNS", request.param)


@pytest.mark.parametrize("size", SIZES)
def test_crops_and_rows_have_the_code_of_the_whole_mask(size):
    for height, width, x, y in ((*size, 0, 0), (*size, 3, 2), (size[0], size[1], 0, 4)):
        for crop in masks((height, width)):
            whole = np.zeros((y + height, x + width + 5), np.uint8)
            whole[y:, x : x + width] = crop
            expected = compressed_rle(whole)
            assert crop_code(crop * 9, (x, y), whole.shape, "it") == expected
            edges = np.flatnonzero(np.diff(crop.ravel(), prepend=0, append=0))
            twice = np.concatenate([edges, [1, 1]])  # a run without a pixel
            assert rows_code(twice, (x, y, width, height), whole.shape, "it") == expected
    nothing = compressed_rle(np.zeros(size, np.uint8))
    assert crop_code(np.zeros((0, 5)), (0, 0), size, "it") == nothing


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("size", SIZES)
def test_every_value_of_a_label_image_has_the_code_of_its_pixels(size, dtype, tmp_path):
    values = np.random.default_rng(1).integers(0, 2 if dtype is bool else 7, size).astype(dtype)
    values *= dtype(40) if dtype is not bool else dtype(1)
    path = tmp_path / "a.tif"
    Image.fromarray(values).save(path)
    found = list(instances(read_label_image(path, size), size, "it"))
    assert [value for value, _ in found] == np.unique(values).tolist()
    for value, code in found:
        assert code == compressed_rle((values == value).astype(np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_codes_are_joined_and_subtracted_as_masks_are(size):
    found = masks(size, 5)
    codes = [compressed_rle(mask) for mask in found]
    packed = [code | {"counts": code["counts"].encode()} for code in codes]
    for one, code in zip(found, packed, strict=True):
        np.testing.assert_array_equal(run_lengths(code)[1::2].sum(), one.sum())
        for other, second in zip(found, packed, strict=True):
            assert overlap(code, second) == (one & other).any()
            rest = without(code, second)["counts"].decode()
            assert rest == compressed_rle(one & ~other & 1)["counts"]
    for count in range(1, len(packed)):
        joined = union(packed[:count])["counts"].decode()
        assert joined == compressed_rle(np.any(found[:count], axis=0).astype(np.uint8))["counts"]


@pytest.mark.parametrize("window", [
    (0, 0, 5, 5), (2, 3, 4, 9), (-9, -9, 99, 99), (3, 0, 5, 23), (4, 5, 2, 9), (4, 9, 6, 3),
    (50, 2, 60, 9),
])  # fmt: skip
def test_a_box_is_the_part_of_it_in_the_image(window):
    mask = np.zeros((23, 17), np.uint8)
    x1, y1, x2, y2 = (max(v, 0) for v in window)
    mask[y1:y2, x1:x2] = 1
    assert box_code(window, mask.shape) == compressed_rle(mask)


# Bounds


def test_more_runs_than_are_read_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(mask_codes, "MAX_RUNS", 100)
    words = "more than 100 runs of equal pixels down the columns, is it a mask"
    checkers = (np.indices((60, 80)).sum(axis=0) % 2).astype(np.uint8)
    write_image(tmp_path / "a.png")
    write_values(tmp_path / "a_mask.png", checkers)
    refuses(f"a_mask.png: {words}", "masks", tmp_path, class_name="x")
    runs = ",".join(["80"] * 60)  # stripes
    mask = f'<mask label="a" rle="{runs}" left="0" top="0" width="80" height="60"/>'
    xml = f'<annotations><image name="a.png" width="80" height="60">{mask}</image></annotations>'
    (tmp_path / "a.xml").write_text(xml)
    refuses(f"a.xml: image 'a.png': shape 1: {words}", "cvat", tmp_path / "a.xml")
    write_label_studio(tmp_path, [brush(checkers)])
    source = tmp_path / "export.json", tmp_path / "media"
    refuses(f"task 5: region 1: {words}", "labelstudio", *source)


def test_longer_codes_than_are_read_are_one_line(tmp_path, monkeypatch):
    """Of all masks of an image together, and of what is covered by polygons."""
    monkeypatch.setattr(mask_codes, "MAX_CODES", 60)
    words = "the masks of its image have more than 60 characters of run-length codes"
    write_label_studio(tmp_path, [brush(box(5, 5, 15, 15))] * 9)
    source = tmp_path / "export.json", tmp_path / "media"
    refuses(rf"task 5: region \d: {words}", "labelstudio", *source)
    write_image(tmp_path / "b.png")
    objects = [{"label": "car", "polygon": [[5, 5], [50, n], [5, 50]]} for n in range(10, 40)]
    content = {"imgHeight": 60, "imgWidth": 80, "objects": objects}
    (tmp_path / "b_gtFine_polygons.json").write_text(json.dumps(content))
    refuses(rf"b_gtFine_polygons.json: object \d+: {words}", "cityscapes", tmp_path)


def test_a_polygon_of_many_parts_is_drawn_as_their_union():
    parts = [[x, 2.0, x + 5, 2.0, x, 30.0] for x in range(40)]
    expected = np.any([segmentation_to_mask([part], 40, 50) for part in parts], axis=0)
    np.testing.assert_array_equal(segmentation_to_mask(parts, 40, 50), expected)
