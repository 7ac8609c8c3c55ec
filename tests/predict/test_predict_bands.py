"""Images of any bands and depth: files, arrays, tiles and what `infer` reads of a folder."""

import json

import cv2
import jax
import numpy as np
import pytest
from absl import logging
from PIL import Image

from mask_rcnn_jax import infer
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.predict import engines
from mask_rcnn_jax.predict.inputs import find_inputs
from mask_rcnn_jax.predict.pixels import file_size, to_pixels
from mask_rcnn_jax.predict.predictor import Predictor
from tests.small_model import CATEGORIES, SMALL_TRUNK, random_variables, small_config

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")

ARRAYS = ("boxes", "scores", "classes", "mask_grids")
RGB = ("red", "green", "blue")
SIZE = (60, 96)  # height, width
SCENE = generate_image(0, "val", 3, SIZE)[0]
SCALED = {"data__bands__scale": "image", "data__bands__percentiles": (1.0, 99.0)}
DEEP = {"data__bands__scale": "bits", "data__bands__bits": 12}


def recipe(names=(), **changes):
    """Of a small model that sees these bands."""
    if names:
        changes["data__bands__names"] = names
        changes["model__input__mean"] = (120.0,) * len(names)
        changes["model__input__std"] = (57.0,) * len(names)
    changes["data__val_images"] = "absent"
    return small_config("coco_torchvision", (64, 96), **SMALL_TRUNK, **changes)


def make(names=(), tile=0, **changes):
    config = recipe(names, **changes)
    return Predictor(config, random_variables(config), 1, CATEGORIES, tile)


def bands_of(count: int) -> np.ndarray:
    """uint16 [H, W, count] of 12 bits, each band another mix of the scene's colors."""
    rng = np.random.default_rng(count)
    mixed = SCENE.astype(np.float64) @ rng.dirichlet((1, 1, 1), count).T
    return (mixed * 16).astype(np.uint16)


def assert_same(found, expected, atol=0.0):
    assert len(found) == len(expected) >= 3
    for name in ARRAYS:
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=0, atol=atol, err_msg=name
        )


@pytest.fixture(scope="module")
def four():
    return make(("red", "green", "blue", "nir"), **DEEP)


@pytest.mark.slow
def test_a_three_band_tiff_is_its_png(tmp_path):
    mean = {"model__input__mean": (120.0,) * 3, "model__input__std": (57.0,) * 3}
    plain, named = make(**mean), make(RGB)
    Image.fromarray(SCENE).save(tmp_path / "a.png")
    tifffile.imwrite(
        tmp_path / "a.tif", SCENE, photometric="rgb", tile=(32, 32), compression="zlib"
    )
    np.save(tmp_path / "a.npy", SCENE)
    expected = plain(tmp_path / "a.png")
    sources = [*(tmp_path / f"a.{kind}" for kind in ("png", "tif", "npy")), SCENE]
    sources.append(Image.fromarray(SCENE))
    for source in sources:
        found = named(source)
        assert_same(found, expected)
        np.testing.assert_array_equal(found.image, SCENE)
        assert found.pixels is None and found.band_names == RGB
    assert expected.pixels is None and expected.band_names == ()


@pytest.mark.slow
def test_a_scene_in_any_depth_gives_the_same_detections(tmp_path):
    predictor = make(RGB, **SCALED)
    expected = predictor(SCENE)
    depths = {
        "a8.tif": SCENE,
        "a12.tif": SCENE.astype(np.uint16) * 16,
        "a16.png": SCENE.astype(np.uint16) * 257,
        "float.tif": SCENE.astype(np.float32) / 255 - 0.5,
        "double.npy": SCENE / 1e4,
    }
    for name, pixels in depths.items():
        path = tmp_path / name
        if name.endswith(".tif"):
            tifffile.imwrite(path, pixels, photometric="rgb")
        elif name.endswith(".npy"):
            np.save(path, pixels)
        else:
            assert cv2.imwrite(str(path), pixels[..., ::-1])
        found = predictor(str(path))
        assert_same(found, expected, atol=1e-3)
        np.testing.assert_array_equal(found.pixels, pixels.astype(found.pixels.dtype))
        assert np.abs(found.image.astype(int) - expected.image).max() <= 1


@pytest.mark.parametrize(
    "count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 13]
)
def test_finds_objects_in_any_number_of_bands(tmp_path, count, four):
    names = tuple(f"band {k}" for k in range(count))
    predictor = four if count == 4 else make(names, **DEEP)
    pixels, stored = bands_of(count), None if count == 1 else "contig"
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="minisblack", planarconfig=stored)
    found = predictor(tmp_path / "a.tif")
    assert_same(predictor(pixels), found)
    assert [len(one) for one in predictor(np.stack([pixels, pixels]))] == [len(found)] * 2
    if count == 1:
        assert_same(predictor(pixels[..., 0]), found)
    if count < 3:  # what is lost is said by nothing but a difference
        return
    assert found.image.shape == (*SIZE, 3) and found.image.dtype == np.uint8
    np.testing.assert_array_equal(found.pixels, pixels)
    assert found[:1].pixels is found.pixels and len(found[:1].band_names) == count
    with pytest.raises(AssertionError):  # every band counts
        changed = np.concatenate([pixels[..., :-1], 4095 - pixels[..., -1:]], axis=-1)
        assert_same(predictor(changed), found, atol=1e-6)


@pytest.mark.slow
def test_tiles_are_scaled_as_their_image():
    names, pixels = ("a", "b"), bands_of(2)
    predictor = make(names, tile=64, **SCALED)
    scaled = predictor.bands.scaled(pixels)
    image, model, seen = predictor.prepare(pixels), predictor._model, []

    def noted(images, sizes):
        seen.extend(images)
        return model(images, sizes)

    predictor._model = noted
    ((_, _, detections),) = predictor.stream([("key", image)])
    found = predictor.result(image, detections)
    assert len(image.windows) > 1
    for x1, y1, x2, y2 in image.windows:
        tile = scaled[y1:y2, x1:x2]
        plan = resize_plan(*tile.shape[:2], predictor._options)
        canvas = resize_image(tile, plan, predictor._options)
        assert any(np.array_equal(one, canvas) for one in seen)
    np.testing.assert_array_equal(found.image, predictor.bands.to_rgb(scaled))
    np.testing.assert_array_equal(found.pixels, pixels)


@pytest.mark.slow
def test_samples_and_other_numbers_are_taken(four):
    for image in four.samples():
        assert image.shape[2] == 4 and four(image).image.shape == image.shape[:2] + (3,)
    pixels = bands_of(4)
    expected = four(pixels)
    for dtype in (np.int32, np.float64, np.dtype(">u2")):
        assert_same(four(pixels.astype(dtype)), expected, atol=1e-5)
    assert four.decoded_size((6000, 6000)) is None


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (bands_of(4)[..., :3], r"uint16 \(60, 96, 3\), expected numbers \[H, W, 4\] .red, green"),
        (bands_of(4)[..., 0], r"uint16 \(60, 96, 1\), expected numbers \[H, W, 4\]"),
        (bands_of(4).astype(complex), r"complex128 .*, expected numbers \[H, W, 4\]"),
        (bands_of(4)[:0], r"uint16 \(0, 96, 4\), expected numbers"),
        (np.full((8, 8, 4), np.nan), "256 values are not finite; data.bands.nan=zero"),
        (Image.new("RGB", (8, 8)), r"uint8 \(8, 8, 3\), expected numbers \[H, W, 4\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(four, image, message):
    with pytest.raises(ValueError, match=message) as raised:
        four(image)
    assert "\n" not in str(raised.value)


def test_deep_numbers_without_a_rule_are_refused(tmp_path):
    predictor = make(RGB)
    with pytest.raises(ValueError, match="image: numbers of type uint16; data.bands.scale says"):
        predictor(bands_of(3))
    np.save(tmp_path / "a.npy", bands_of(3))
    with pytest.raises(ValueError, match="a.npy: numbers of type uint16; data.bands.scale says"):
        predictor(tmp_path / "a.npy")


@pytest.mark.slow
def test_images_of_pillow_have_their_numbers(four):
    gray = make(("gray",), **DEEP)
    pixels = bands_of(1)
    assert_same(gray(Image.fromarray(pixels[..., 0])), gray(pixels))
    rgba = np.dstack([SCENE, SCENE[..., 0]])
    assert_same(four(Image.fromarray(rgba)), four(rgba))


@pytest.mark.parametrize("names", [(), RGB])
@pytest.mark.parametrize("rule", ["never", "predict", "always"])
def test_images_are_turned_by_their_exif_entry_or_not(tmp_path, names, rule):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(SCENE).save(tmp_path / "a.png", exif=exif)
    predictor = make(names, data__apply_exif=rule)
    image = SCENE if rule == "never" else np.rot90(SCENE, -1)
    with Image.open(tmp_path / "a.png") as opened:
        given = predictor.bands, predictor.upright
        for source in (opened, tmp_path / "a.png", str(tmp_path / "a.png")):
            np.testing.assert_array_equal(to_pixels(source, *given), image)
        np.testing.assert_array_equal(predictor.read(tmp_path / "a.png"), image)
        content = (tmp_path / "a.png").read_bytes()
        np.testing.assert_array_equal(predictor.read(content, name="a.png"), image)
        assert file_size(str(tmp_path / "a.png"), *given) == image.shape[:2]


def test_what_is_read_of_a_folder_depends_on_the_bands(tmp_path):
    for name in ("a.npy", "b.tif", "c.npz", "d.png", "._e.npy", "f.txt"):
        (tmp_path / name).touch()
    out = tmp_path / "out"
    named = find_inputs([str(tmp_path)], out, bands=Bands(names=("a",)))[0]
    assert [one.name.name for one in named] == ["a.npy", "b.tif", "c.npz", "d.png"]
    assert [str(one.target) for one in named] == ["a.jpg", "b.jpg", "c.jpg", "d.png"]
    plain = find_inputs([str(tmp_path)], out)[0]
    assert [one.name.name for one in plain] == ["b.tif", "d.png"]


def test_the_file_of_the_first_band_is_the_image(tmp_path, caplog):
    for scene in ("s", "t"):
        for band in ("_B1", "_B2", "_B11"):
            (tmp_path / f"{scene}{band}.tif").touch()
    (tmp_path / "cloud.tif").touch()
    bands = Bands(names=("a", "b", "c"), files=("_B1", "_B2", "_B11"), scale="bits")
    for item in (str(tmp_path), f"{tmp_path}/*.tif"):
        found = find_inputs([item], tmp_path / "out", bands=bands)[0]
        assert [one.name.name for one in found] == ["cloud.tif", "s_B1.tif", "t_B1.tif"]


def test_a_video_has_no_other_bands(tmp_path):
    (tmp_path / "a.mp4").touch()
    for bands in (Bands(names=("a", "b")), Bands(names=RGB, scale="bits")):
        with pytest.raises(ValueError, match=r"a.mp4 is a video, of 8-bit red, green, blue"):
            find_inputs([str(tmp_path / "a.mp4")], tmp_path / "out", bands=bands)
    assert find_inputs([str(tmp_path / "a.mp4")], tmp_path / "out", bands=Bands(names=RGB))[1]


def test_infer_reads_each_image_or_says_why_not(four, tmp_path, caplog):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    tifffile.imwrite(folder / "a.tif", bands_of(4), photometric="rgb", extrasamples=[0])
    np.save(folder / "b.npy", bands_of(4))
    np.save(folder / "c.npy", bands_of(3))
    tifffile.imwrite(folder / "d.tif", np.stack([bands_of(4)] * 2), metadata={"axes": "ZYXS"})
    (folder / "e.tif").write_bytes((folder / "a.tif").read_bytes()[:99])
    config = recipe(four.bands.names, **DEEP)
    exported = engines.Exported(config, CATEGORIES, 1, (live(four, config),), "stub", True)
    logging.use_absl_handler()
    with caplog.at_level("INFO"):
        infer.infer(None, exported, [str(folder)], str(out), infer.Options(0.05))
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "c.npy: 3 bands, expected 4: red, green, blue, nir" in text
    assert "d.tif: 2 pages; data.bands.pages says which of them are read" in text
    assert "e.tif: truncated or damaged" in text and "3 of 5 inputs skipped" in text
    entries = json.loads((out / "detections.json").read_text())
    assert {entry["file_name"] for entry in entries} == {"a.tif", "b.npy"}
    assert cv2.imread(str(out / "a.jpg")) is not None and (out / "b.jpg").exists()
    with pytest.raises(UndecodableImage, match="e.tif"):
        four(folder / "e.tif")


def live(predictor, config) -> engines.ExportedModel:
    """A compiled model in the place of an exported one."""

    def run(images, sizes):
        rows = np.resize(np.arange(len(images)), predictor.images_at_once)
        found = jax.device_get(predictor._model(images[rows], sizes[rows]))
        return jax.tree.map(lambda array: array[: len(images)], found)

    return engines.ExportedModel(predictor.canvases[0], None, run)


@pytest.mark.parametrize("tile", [0, 64])
@pytest.mark.slow
def test_what_a_file_calls_no_data_is_found_and_measured_around(tmp_path, tile):
    pixels = bands_of(2)
    pixels[:20] = 65535
    given = dict(photometric="minisblack", planarconfig="contig")
    tags = [(42113, "s", 0, "65535", False)]
    tifffile.imwrite(tmp_path / "a.tif", pixels, extratags=tags, **given)
    predictor = make(("a", "b"), tile, data__bands__scale="image", eval__score_threshold=0.0)
    found = predictor(tmp_path / "a.tif")
    assert len(found) and not found.image[:20].any() and found.image[20:].any()
    regions = found.regions()
    touches = [bool(mask[:20].any()) for mask in found.masks]
    sized = regions["num_pixels"] > 0
    for name in ("intensity_mean-a", "intensity_max-b"):
        np.testing.assert_array_equal(np.isnan(regions[name])[sized], np.array(touches)[sized])
    assert not (regions["intensity_max-a"] > 4096).any()
