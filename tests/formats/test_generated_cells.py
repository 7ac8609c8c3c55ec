"""Generated cells: exact masks that overlap, 12 bits, two channels or PNGs."""

import json
import sys

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.formats.cells import generate_cells, write_cells
from mask_rcnn_jax.images.opening import open_raster
from tests.commands.command import error_line, run_captured

SMALL = {"train": 2, "val": 1, "size": (96, 128), "objects": (20, 30)}


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    write_cells(folder, **SMALL, bits=8, channels=3)
    return folder


def file_contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def masks_of(annotations, size):
    return [segmentation_to_mask(one["segmentation"], *size) for one in annotations]


def test_sets_are_sound_and_as_asked_for(cells):
    for split in ("train", "val"):
        json_path = cells / "annotations" / f"instances_{split}.json"
        assert check_coco(json_path, cells / split) == []
        dataset = load_coco(json_path, cells / split)
        assert len(dataset.images) == SMALL[split] and dataset.class_names == ("cell",)
        assert all(20 <= len(image.annotations) <= 30 for image in dataset.images)
        assert {(image.height, image.width) for image in dataset.images} == {(96, 128)}


def test_masks_are_whole_cells_that_overlap_and_boxes_are_theirs():
    size = (128, 128)
    _, annotations = generate_cells(0, "train", 0, size, (60, 60))
    masks = masks_of(annotations, size)
    assert len(masks) == 60 and 0.05 < (np.sum(masks, axis=0) > 1).mean()
    touching = 0
    for one, mask in zip(annotations, masks, strict=True):
        assert one["bbox"] == list(cv2.boundingRect(mask)) and one["area"] == mask.sum() > 0
        x, y, width, height = one["bbox"]
        if x and y and x + width < 128 and y + height < 128:  # whole, not cut by other cells
            contours, tree = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
            assert len(contours) == 1 and one["area"] > 20, tree
        else:
            touching += 1
    assert touching


def test_light_is_where_the_masks_are():
    """Membranes are brighter than the background, and most where cells overlap."""
    image, annotations = generate_cells(3, "val", 1, (192, 192), (80, 80))
    covered = np.sum(masks_of(annotations, (192, 192)), axis=0)
    assert image.dtype == np.uint16 and image.shape == (192, 192, 2)
    assert image.min() > 50 and 1000 < image.max() < 2**12
    for channel in (0, 1):
        means = [image[..., channel][covered == depth].mean() for depth in (0, 1, 2)]
        assert means[0] + 100 < means[1] < means[2] - 100
    bright = image[..., 0] > 350
    assert (bright & (covered == 0)).mean() < 0.05


def test_many_cells_keep_their_number():
    image, annotations = generate_cells(0, "train", 0, (256, 256), (400, 400))
    assert len(annotations) == 400
    boxes = np.array([one["bbox"] for one in annotations])
    assert 5 < np.median(boxes[:, 2:]) < 20


def test_images_depend_on_their_arguments_alone(cells, tmp_path):
    write_cells(tmp_path, **SMALL, bits=8, channels=3)
    assert file_contents(tmp_path) == file_contents(cells)
    write_cells(tmp_path, **SMALL, bits=8, channels=3)
    other, _ = generate_cells(1, "train", 0, (96, 128), (20, 30))
    assert (other != generate_cells(0, "train", 0, (96, 128), (20, 30))[0]).any()
    with pytest.raises(ValueError, match="instances_train.json holds other data"):
        write_cells(tmp_path, **SMALL | {"objects": (20, 31)}, bits=8, channels=3)


@pytest.mark.parametrize("bits, channels", [(8, 1), (8, 3), (16, 1), (16, 3)])
def test_pngs(tmp_path, bits, channels):
    write_cells(tmp_path, **SMALL, bits=bits, channels=channels)
    image = cv2.imread(str(tmp_path / "train" / "000001.png"), cv2.IMREAD_UNCHANGED)
    assert image.dtype == f"uint{bits}" and image.ndim == (2 if channels == 1 else 3)
    original, _ = generate_cells(0, "train", 1, (96, 128), (20, 30))
    if channels == 3:
        assert not image[..., 2].any()  # OpenCV has blue first
        nuclei, membranes = image[..., 0], image[..., 1]
        near = np.corrcoef(nuclei.ravel(), original[..., 1].ravel())[0, 1]
        assert near > 0.98 and np.corrcoef(nuclei.ravel(), membranes.ravel())[0, 1] < 0.9
    if bits == 16:
        np.testing.assert_array_equal(
            image,
            original.mean(2).astype(int)
            if channels == 1
            else np.insert(original, 0, 0, 2)[..., ::-1],
        )
    else:
        assert image.max() > 100 and np.median(image) < 40


@pytest.mark.parametrize("size", [(96, 128), (320, 288)])
def test_two_channels_are_a_tiff_of_the_camera_s_values(tmp_path, size):
    tifffile = pytest.importorskip("tifffile")
    write_cells(tmp_path, **SMALL | {"size": size})
    with tifffile.TiffFile(tmp_path / "train" / "000000.tif") as tiff:
        page = tiff.pages[0]
        assert len(tiff.pages) == 1 and page.is_tiled == (min(size) > 256)
        found = page.asarray()
        assert page.tags["ResolutionUnit"].value == 3  # centimeters
    np.testing.assert_array_equal(found, generate_cells(0, "train", 0, size, (20, 30))[0])
    with open_raster(tmp_path / "train" / "000000.tif") as raster:
        np.testing.assert_array_equal(found, raster.read())


def test_the_command(tmp_path, monkeypatch):
    asked = ["--data_dir", tmp_path, "--train=1", "--val=1", "--size=64x96", "--objects=9"]
    done = run_captured("prepare", "cells", *asked, "--bits=8")
    assert done.returncode == 0 and "instances_train.json: 1 images in" in done.stdout
    content = json.loads((tmp_path / "annotations" / "instances_train.json").read_text())
    assert len(content["annotations"]) == 9 and content["images"][0]["width"] == 96
    assert (tmp_path / "train" / "000000.png").is_file()
    monkeypatch.setitem(sys.modules, "tifffile", None)  # as if it were not installed
    for flags, words in (
        (("--size=64x9",), "--size is '64x9', expected a side or HEIGHTxWIDTH, 64 or more"),
        (("--size=a",), "--size is 'a'"),
        (("--objects=9-9",), "--objects is '9-9', expected a number, or two such as 500,2000"),
        (("--objects=9,8",), "objects is (9, 8), expected 1 <= fewest <= most"),
        (("--objects=999",), "expected at most 162 cells of 6 pixels in an image of 64 x 96"),
        (("--bits=12",), "bits=12 and channels=3, expected 8 or 16 bits and 1, 2 or 3 channels"),
        (("--bits=16",), "which need tifffile: pip install 'mask-rcnn-jax[tiff]'"),
    ):
        done = run_captured("prepare", "cells", *asked, *flags)
        assert words in error_line(done.returncode, done.stderr)
