"""What `prepare stats` finds in images of many bands and bits, and the flags that read them."""

import subprocess
import sys

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.kinds import build_augment
from mask_rcnn_jax.data.source import load_train
from mask_rcnn_jax.data.unused import unused_of
from mask_rcnn_jax.report.preview import preview_sheet
from mask_rcnn_jax.report.set_page import write_set_page
from tests.band_set import with_bands, write_png, write_set

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")
FOUR = ("red", "green", "blue", "nir")


def deep(path, image, dtype=np.uint16, factor=15, offset=70, photometric="rgb"):
    pixels = (with_bands(image, FOUR) * np.float64(factor) + offset).astype(dtype)
    tifffile.imwrite(path, pixels, photometric=photometric, planarconfig="contig")


def fractions(path, image):
    deep(path, image, np.float32, 1 / 255, -0.25, "minisblack")


def stack(path, image):
    pages = np.stack([image[..., 0], image[..., 0] // 2, image[..., 1]]).astype(np.uint16) * 10
    tifffile.imwrite(path, pages, photometric="minisblack")


def gray(path, image):
    cv2.imwrite(str(path), image[..., 0].astype(np.uint16) * 256)


def rgba(path, image):
    cv2.imwrite(str(path), (np.dstack([image, image[..., :1]]).astype(np.uint16)) * 256)


SETS = {
    "colors and more": (deep, "tif", ("red", "green", "blue", "band4"), "fixed"),
    "fractions": (fractions, "tif", ("band1", "band2", "band3", "band4"), "fixed"),
    "pages": (stack, "tif", ("gray",), "fixed"),
    "16 bits": (gray, "png", ("gray",), "fixed"),
    "16 bits with alpha": (rgba, "png", ("red", "green", "blue"), "fixed"),
    "8 bits": (
        lambda path, image: tifffile.imwrite(
            path, with_bands(image, (*"abcde",)), photometric="minisblack", planarconfig="contig"
        ),
        "tif",
        ("band1", "band2", "band3", "band4", "band5"),
        "none",
    ),
}


def suggested(tmp_path, write, ending, **entries):
    files = write_set(tmp_path, write, ending, count=3)
    page = tmp_path / "stats.html"
    recipe = load_config("quickstart", entries)
    advice = write_set_page(page, *files, recipe)
    changes = {s.entry: s.value for s in advice.suggestions if s.is_change}
    return files, page.read_text(), changes


@pytest.mark.parametrize("name", SETS)
def test_the_flags_read_the_set(name, tmp_path):
    write, ending, names, scale = SETS[name]
    files, page, changes = suggested(tmp_path, write, ending)
    assert changes["data.bands.names"] == names
    assert "data.bands.nan" not in changes
    assert changes.get("data.bands.pages") == ("max" if name == "pages" else None)
    assert "<h2>Bands</h2>" in page and f"{names[-1]}</th>" in page and "data:image/jpeg" in page
    given = {"data.train_json": str(files[0]), "data.train_images": str(files[1])}
    recipe = load_config("quickstart", changes | given)
    assert recipe.data.bands.scale == scale and recipe.data.bands.count == len(names)
    dataset = load_train(recipe.data)
    assert unused_of(dataset) == []
    images = np.stack([dataset.decode(n) for n in range(3)]).astype(np.float64)
    mean, std = images.mean(axis=(0, 1, 2)), images.std(axis=(0, 1, 2))
    np.testing.assert_allclose(recipe.model.input.mean, mean, atol=0.06)
    np.testing.assert_allclose(recipe.model.input.std, np.maximum(std, 1), atol=0.06)
    if scale == "fixed":
        assert images.min() == 0 and images.max() == 255 and (std > 15).all()
    sheet = preview_sheet(recipe.data, dataset, 2)
    assert sheet.dtype == np.uint8 and sheet.shape[2] == 3 and sheet.std() > 10
    # And again, they are what the recipe has.
    again = write_set_page(tmp_path / "again.html", *files, recipe)
    assert not [s for s in again.suggestions if s.is_change and "image_size" not in s.entry]


def test_photographs_need_no_bands(tmp_path):
    _, page, changes = suggested(tmp_path, write_png, "png")
    assert "<h2>Bands</h2>" not in page
    assert not [entry for entry in changes if "bands" in entry or "input" in entry]


def test_files_of_other_kinds_are_counted(tmp_path):
    def mixed(path, image):
        deep(path, image, np.uint8 if path.name == "001.tif" else np.uint16, 1, 0)

    _, page, _ = suggested(tmp_path, mixed, "tif")
    assert "uint16, 4 bands, 1 page in 2; uint8, 4 bands, 1 page in 1" in page


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_what_is_no_data_does_not_count(tmp_path, dtype):
    def holed(nodata):
        def write(path, image):
            pixels = np.clip(image[..., :2].astype(dtype), 10, 240)
            tags = [] if nodata is None else [(42113, "s", 0, str(nodata), False)]
            pixels[:9] = pixels[9:10] if nodata is None else nodata
            tifffile.imwrite(
                path, pixels, photometric="minisblack", planarconfig="contig", extratags=tags
            )

        return write

    nodata = 255 if dtype == np.uint8 else -9999
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, page, found = suggested(tmp_path / "a", holed(nodata), "tif")
    _, _, expected = suggested(tmp_path / "b", holed(None), "tif")
    assert f"no data where it is {nodata}" in page
    assert np.isfinite(found["model.input.mean"]).all()
    limits = "data.bands.limits"
    np.testing.assert_allclose(found.get(limits, 0), expected.get(limits, 0), atol=20)


def test_a_mask_or_another_image_in_the_file_leaves_flags_that_read_it(tmp_path):
    def write(path, image):
        with tifffile.TiffWriter(path) as file:
            file.write(image[..., 0].astype(np.uint16) * 16, photometric="minisblack")
            file.write(np.full((8, 8), 255, np.uint8), photometric="minisblack")

    files, page, changes = suggested(tmp_path, write, "tif")
    assert changes["data.bands.pages"] == "one" and "1 of other sizes or types" in page
    given = {"data.train_json": str(files[0]), "data.train_images": str(files[1])}
    assert load_train(load_config("quickstart", changes | given).data).decode(0).shape[2] == 1


@pytest.mark.parametrize("name", SETS)
def test_a_crop_fills_with_the_mean_of_the_set(name, tmp_path):
    write, ending, names, _ = SETS[name]
    entries = {"data.augment": ("fixed_size_crop",)}
    colored = entries | {"data.fixed_size_crop.fill": (123, 117, 104)}  # as torchvision's recipes
    _, _, changes = suggested(tmp_path, write, ending, **colored)
    recipe = load_config("quickstart", entries | changes)
    assert len(build_augment(recipe.data)) == 1
    mean, fill = recipe.model.input.mean, recipe.data.fixed_size_crop.fill
    np.testing.assert_allclose(fill, mean, atol=0.51)
    assert len(fill) == len(names)


@pytest.mark.slow
def test_stats_measures_a_file_for_each_band_before_its_mean_is_known(tmp_path):
    def write(path, image):
        for band in range(2):
            name = path.with_stem(f"{path.stem}_B{band + 1}")
            tifffile.imwrite(name, image[..., band].astype(np.uint16) * 16)

    json_path, images = write_set(tmp_path, write, "tif", count=3)
    json_path.write_text(json_path.read_text().replace(".tif", "_B1.tif"))
    bands = ["--config.data.bands.names=('a', 'b')", "--config.data.bands.files=('_B1', '_B2')"]
    command = [sys.executable, "-m", "mask_rcnn_jax.prepare", "stats", "--config", "quickstart"]
    files = [f"--json={json_path}", f"--images={images}", f"--output={tmp_path / 'a.html'}"]
    command += [*files, *bands, "--config.data.bands.scale=image"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "model.input.mean: (128, 128) -> (" in found.stdout
    check = ["check" if part == "stats" else part for part in command]
    found = subprocess.run(check, capture_output=True, text=True)
    assert found.returncode == 2 and "`prepare stats` measures them" in found.stderr


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_band_without_numbers_leaves_the_others(tmp_path):
    def write(path, image):
        pixels = image[..., :2].astype(np.float32) + 40
        pixels[..., 1] = np.nan
        np.save(path, pixels)

    _, page, changes = suggested(tmp_path, write, "npy")
    limits = changes["data.bands.limits"]
    assert changes["data.bands.nan"] == "zero"
    assert 40 <= limits[0][0] < limits[0][1] <= 295 and limits[1] == (0, 1)
    assert changes["model.input.mean"][1] == 0 and "nan</td>" in page
