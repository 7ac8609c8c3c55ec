"""`check` under a recipe's `data.bands` and `data.apply_exif`: one line for each thing."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax import parts
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.options import DataOptions, ExampleOptions
from mask_rcnn_jax.data.source import load_train
from mask_rcnn_jax.data.transforms import load_example
from mask_rcnn_jax.data.unused import unused_of, unused_of_files
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import decode_image
from tests.data.small_set import rectangle, write_coco
from tests.tfrecord_writer import write_coco as write_records

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")
FOUR = Bands(names=("red", "green", "blue", "nir"), scale="image")
RNG = np.random.default_rng(0)


def deep(*shape, dtype=np.uint16):
    return RNG.integers(0, 4096, shape).astype(dtype)


def save(path, pixels, **options):
    tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig", **options)


def banded(folder, *more):
    """A set of two sound images, and of what `more` writes, each by a function of its path."""
    sizes = [(40, 60)] * (2 + len(more))
    json_path, image_dir = write_coco(folder, sizes, [rectangle(5, 5, 20, 10)])
    content = json.loads(json_path.read_text())
    for n, entry in enumerate(content["images"]):
        (image_dir / entry["file_name"]).unlink()
        entry["file_name"] = f"{n}.tif"
        path = image_dir / entry["file_name"]
        more[n - 2](path) if n >= 2 else save(path, deep(40, 60, 4))
    json_path.write_text(json.dumps(content))
    return json_path, image_dir


WRONG = {
    "bands": (lambda p: save(p, deep(40, 60, 5)), "2.tif: 5 bands, expected 4: red, green, blue"),
    "size": (lambda p: save(p, deep(60, 40, 4)), "file is 60 x 40 .* the json says 40 x 60$"),
    "pages": (
        lambda p: save(p, deep(3, 40, 60, 4)),
        "2.tif: 3 pages; data.bands.pages says which of them are read$",
    ),
    "nan": (
        lambda p: save(p, np.where(deep(40, 60, 4) > 9, 1, np.nan).astype(np.float32)),
        "2.tif: .* values are not finite; data.bands.nan=zero takes them as 0$",
    ),
    "cut": (
        lambda p: (save(p, deep(40, 60, 4)), p.write_bytes(p.read_bytes()[:9000])),
        "2.tif: truncated or damaged .*$",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_line(tmp_path, name):
    write, message = WRONG[name]
    (problem,) = inspect_coco(*banded(tmp_path, write), bands=FOUR).problems
    with pytest.raises(ValueError, match=message) as error:
        raise ValueError(problem)
    assert "\n" not in str(error.value)


def test_mixed_numbers_are_a_line(tmp_path):
    found = inspect_coco(*banded(tmp_path, lambda p: save(p, deep(40, 60, 4, dtype=np.uint8))))
    (line,) = inspect_coco(tmp_path / "instances.json", tmp_path / "images", bands=FOUR).warnings
    assert line.endswith("uint16 in 2 (first: 0.tif); uint8 in 1 (first: 2.tif)")
    # Without names, what is lost is said, and who reads it.
    assert "bands after the third in 3 (first: 0.tif); all but 8" in found.warnings[0]
    assert "data.bands.names" in found.warnings[0]


def test_a_sound_set_has_no_line(tmp_path):
    files = banded(tmp_path)
    found = inspect_coco(*files, bands=FOUR)
    assert not found.problems and not found.warnings
    assert unused_of(load_coco(*files, bands=FOUR)) == []
    assert unused_of(load_coco(*files)) != []


@pytest.mark.parametrize("package", ["tifffile", "imagecodecs"])
def test_a_missing_package_is_named(tmp_path, package):
    """The reader, or of one file the codec."""
    files = banded(tmp_path, lambda p: save(p, deep(40, 60, 4), compression="zstd"))
    program = f"""import sys
sys.modules[{package!r}] = None
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.data.checking import inspect_coco
found = inspect_coco(*sys.argv[1:], bands=Bands(names=tuple("abcd"), scale="image"))
print(*found.problems, sep="\\n")
"""
    command = [sys.executable, "-c", program, *files]
    *others, problem = subprocess.check_output(command, text=True, timeout=120).splitlines()
    assert len(others) == (2 if package == "tifffile" else 0)
    assert "2.tif: " in problem and "`pip install 'mask-rcnn-jax[tiff]'` installs what" in problem


def photos(folder, size):
    """A set with one photo of 40 x 60 stored pixels that its EXIF entry turns to 60 x 40."""
    json_path, image_dir = write_coco(folder, [size], [rectangle(5, 5, 20, 10)])
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20, :30] = 255
    content = json.loads(json_path.read_text())
    content["images"][0]["file_name"] = "a.jpg"
    json_path.write_text(json.dumps(content))
    Image.fromarray(pixels).save(image_dir / "a.jpg", exif=exif, quality=98)
    return (json_path, image_dir), pixels


@pytest.mark.parametrize("bands", [Bands(), Bands(names=("red", "green", "blue"))])
def test_photos_are_read_stored_or_turned(tmp_path, bands):
    files, pixels = photos(tmp_path, (60, 40))
    options = ExampleOptions((64, 64), "keep", 4, bands=bands, mask_size=8)
    image = load_example(load_coco(*files, bands=bands, upright=True), 0, options).images
    expected = np.rot90(pixels, -1).astype(int)  # clockwise
    assert np.abs(image[:60, :40] - expected).mean() < 3
    with pytest.raises(ValueError, match="the file is 40 x 60 .* the json says 60 x 40"):
        load_coco(*files, bands=bands).decode(0)


def test_check_says_which_exif_entry_fits(tmp_path):
    (tmp_path / "turned").mkdir()
    files, _ = photos(tmp_path / "turned", (60, 40))
    found = inspect_coco(*files)
    assert found.problems[0].endswith("; it has an EXIF entry, data.apply_exif=always turns it")
    (line,) = found.warnings
    assert line.startswith("1 images are to be turned by their EXIF entry (first: a.jpg); the json")
    assert "of 0 as they are stored" in line and "of 1 turned (data.apply_exif=always)" in line
    assert not inspect_coco(*files, upright=True).problems
    files, _ = photos(tmp_path, (40, 60))
    assert not inspect_coco(*files).problems
    (problem,) = inspect_coco(*files, upright=True).problems
    assert problem.endswith("data.apply_exif=predict reads it as it is stored")


def test_arrays_of_numpy_are_named(tmp_path):
    np.save(tmp_path / "a.npy", deep(4, 5, 4))
    with pytest.raises(ValueError, match="an array of NumPy, which is not read; data.bands"):
        decode_image(tmp_path / "a.npy")


@pytest.mark.parametrize("source", ["tfrecord", "tfds"])
def test_records_hold_files_with_bands(tmp_path, source):
    json_path, image_dir = banded(tmp_path)
    bands = {"names": FOUR.names, "scale": "image"}
    given = {"source": source, "bands": bands, "image_size": (64, 64), "resize": "fit"}
    given |= {"max_instances": 4, "train_json": str(json_path)}
    if source == "tfds":
        pytest.importorskip("tensorflow_datasets")
        from mask_rcnn_jax.formats.tfds_coco_instances import prepare_tfds

        prepare_tfds(tmp_path / "tfds", {"train": (json_path, image_dir)}, lambda total: int)
        given["tfds_dir"] = str(tmp_path / "tfds")
    else:
        given["train_images"] = write_records(json_path, image_dir, tmp_path / "train")
    found = load_train(parts.build(DataOptions, given, "data"))
    files = load_coco(json_path, image_dir, bands=FOUR)
    np.testing.assert_array_equal(found.decode(1), files.decode(1))
    assert unused_of(found) == []
    photos = load_train(parts.build(DataOptions, given | {"bands": {}}, "data"))
    assert "bands after the third in 2 (first: 0.tif); all but 8" in unused_of(photos)[0]
    with pytest.raises(ValueError, match="data.source is .* expected .json. with data.bands.files"):
        parts.build(DataOptions, given | {"bands": bands | {"files": (*"abcd",)}}, "data")


@pytest.mark.parametrize("bands", [2, 3])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_bands_that_are_no_colors_are_said_to_be_lost(tmp_path, bands, planar):
    def write(path):
        pixels = deep(40, 60, bands, dtype=np.uint8)
        pixels = pixels if planar == "contig" else np.moveaxis(pixels, 2, 0)
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig=planar)

    (line,) = inspect_coco(*banded(tmp_path, write)).warnings[:1]
    assert "bands after the first, which is seen as gray in 1 (first: 2.tif)" in line
    assert "data.bands.names" in line


def test_overviews_are_no_pages_that_are_lost(tmp_path):
    path, pixels = tmp_path / "a.tif", deep(64, 64, 3, dtype=np.uint8)
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, photometric="rgb")
        file.write(pixels[::2, ::2], photometric="rgb", subfiletype=1)
    assert unused_of_files([str(path)]) == []


def test_files_with_and_without_no_data_are_of_one_type(tmp_path):
    def holed(path):
        pixels = deep(40, 60, 4)
        pixels[:9] = 65535
        save(path, pixels, extratags=[(42113, "s", 0, "65535", False)])

    found = inspect_coco(*banded(tmp_path, holed), bands=FOUR)
    assert not found.problems and not found.warnings
