"""Models of other bands than red, green and blue: programs, manifest, calibration, round trip."""

import json
from dataclasses import replace

import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.exporting.artifact import build_artifact
from mask_rcnn_jax.exporting.images import image_paths
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.predict.engines import load_exported
from tests.predict.test_predict_bands import CATEGORIES, SCALED, bands_of, recipe
from tests.small_model import random_variables, write_artifact

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

KINDS = {
    "one, deep": (("gray",), {"data__bands__scale": "bits", "data__bands__bits": 12}),
    "two": (("membrane", "nucleus"), SCALED),
    "four": (
        ("red", "green", "blue", "nir"),
        {"data__bands__scale": "fixed", "data__bands__limits": ((0.0, 4095.0),)},
    ),
    "thirteen, 8 bits": (tuple(f"B{k}" for k in range(13)), {"data__image_dtype": "uint8"}),
}


def model_of(kind: str):
    names, changes = KINDS[kind]
    config = recipe(names, **changes)
    return config, random_variables(config)


def image_of(kind: str) -> np.ndarray:
    pixels = bands_of(len(KINDS[kind][0]))
    return (pixels // 16).astype(np.uint8) if "8 bits" in kind else pixels


def assert_close(found, expected, scores=1e-4):
    assert len(found) == len(expected) >= 3
    np.testing.assert_allclose(found.boxes, expected.boxes, atol=1e-2)
    np.testing.assert_allclose(found.scores, expected.scores, atol=scores)
    np.testing.assert_allclose(found.mask_grids, expected.mask_grids, atol=1e-2)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.slow if "deep" not in kind else ()) for kind in KINDS
    ],
)
def case(request, tmp_path_factory):
    """A kind, what its model finds, and the folder of its ONNX model."""
    kind, folder = request.param, tmp_path_factory.mktemp("exported")
    model = model_of(kind)
    expected = mrcnn.Predictor(*model, 1, CATEGORIES)(image_of(kind))
    return kind, expected, write_artifact(folder, model, "onnx")


@pytest.mark.slow
def test_an_exported_model_finds_what_the_original_does(case):
    kind, expected, folder = case
    predictor = mrcnn.load(folder, score_threshold=0.05)
    found = predictor(image_of(kind))
    assert_close(found, expected)
    np.testing.assert_array_equal(found.image, expected.image)
    assert found.band_names == KINDS[kind][0] == predictor.bands.names
    assert predictor.bands == as_recipe(recipe(KINDS[kind][0], **KINDS[kind][1])).data.bands


def test_a_client_reads_of_the_manifest_what_to_do(case):
    kind, _, folder = case
    names, changes = KINDS[kind]
    tree = json.loads((folder / "manifest.json").read_text())
    dtype = "uint8" if "8 bits" in kind else "float32"
    images = tree["inputs"]["images"]
    assert (images["dtype"], images["shape"][1:]) == (dtype, [64, 128, len(names)])
    preprocessing = tree["preprocessing"]
    assert preprocessing["channels"] == list(names)
    assert preprocessing["orientation"].startswith("turned as the EXIF")
    rule = preprocessing["scaling"]
    assert rule["rule"] == changes.get("data__bands__scale", "none") and rule["means"]
    values = {"bits": 12, "limits": [[0.0, 4095.0]], "percentiles": [1.0, 99.0]}
    expected = {"bits": "bits", "fixed": "limits", "image": "percentiles"}.get(rule["rule"])
    given = rule.keys() - {"rule", "means"}
    assert given == ({expected} if expected else set())
    assert all(rule[name] == values[name] for name in given)
    shape = "dims: [ -1, 64, 128" if images["shape"][0] == "batch" else "64, 128"
    assert f"{shape}, {len(names)} ]" in (folder / "config.pbtxt").read_text()


def test_other_numbers_are_another_model(case):
    kind, _, folder = case
    names, _ = KINDS[kind]
    exported = load_exported(folder)
    config = as_recipe(recipe(names, data__bands__scale="bits", data__bands__bits=10))
    with pytest.raises(ValueError, match=r"data.bands.\w+ is .*, but the model was exported with"):
        exported.check_unchanged(config)
    bands = replace(exported.recipe.data.bands, view=names[:1], nan="zero", pages="max")
    data = replace(exported.recipe.data, bands=bands)
    exported.check_unchanged(replace(exported.recipe, data=data))  # files may be others


def test_openvino_takes_them(case):
    pytest.importorskip("openvino")
    kind, expected, folder = case
    assert_close(
        mrcnn.load(folder, score_threshold=0.05, engine="openvino")(image_of(kind)), expected
    )


@pytest.mark.slow
def test_stablehlo_is_compared_with_the_original(tmp_path):
    config, variables = model_of("two")
    given = config, variables, CATEGORIES, "stablehlo", ArtifactOptions(batch=1), tmp_path
    made = build_artifact(*given)
    assert made.self_check["float"]["pictures"] == 4 and made.self_check["float"]["detections"] > 3
    assert made.interface.inputs["images"]["shape"] == [1, 64, 128, 2]


@pytest.mark.slow
def test_int8_is_calibrated_with_files_of_bands(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    names = ("membrane", "nucleus")
    config = recipe(names, **SCALED, data__bands__files=("_0", "_1"))
    for scene in range(3):
        for band in range(2):
            path = tmp_path / "images" / f"s{scene}_{band}.tif"
            path.parent.mkdir(exist_ok=True)
            tifffile.imwrite(path, np.roll(bands_of(2)[..., band], 10 * scene, axis=1))
    (tmp_path / "images" / "notes.txt").touch()
    bands = as_recipe(config).data.bands
    found = image_paths(str(tmp_path / "images"), bands)
    assert [path.name for path in found] == ["s0_0.tif", "s1_0.tif", "s2_0.tif"]
    model, options = (
        (config, random_variables(config)),
        dict(int8=True, calibration=str(found[0].parent)),
    )
    folder = write_artifact(tmp_path / "out", model, "onnx", **options)
    predictor = mrcnn.load(folder, score_threshold=0.05, precision="int8")
    assert len(predictor(found[0])) >= 3


@pytest.mark.parametrize("kind", ["two", "thirteen, 8 bits"])
def test_deepstream_has_no_other_bands(kind, tmp_path):
    options = ArtifactOptions(deepstream=True, picture_size=(60, 96))
    with pytest.raises(ValueError, match="--deepstream: its frames have 8-bit red, green, blue"):
        build_artifact(*model_of(kind), CATEGORIES, "onnx", options, tmp_path)
