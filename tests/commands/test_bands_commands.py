"""A run of four 12-bit bands through the commands: evaluate and its report, infer, load, serve."""

import base64
import json
import re
from dataclasses import replace

import cv2
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import export
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.predict.engines import load_exported
from mask_rcnn_jax.training import scored_file
from mask_rcnn_jax.training.evaluator import draw_pictures
from mask_rcnn_jax.training.step import make_mesh
from mask_rcnn_jax.weights.restore import restore_recipe
from tests.commands.command import error_line, run_inside
from tests.commands.small_run import Run, leave_untrained, write_data
from tests.serving.asking import ask, serving
from tests.training.test_drawing import predict

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")

KINDS = "run", "exported"
NAMES = ("red", "green", "blue", "nir")
ENTRIES = {
    "data.bands.names": NAMES,
    "data.bands.scale": "bits",
    "data.bands.bits": 12,
    "model.input.mean": (120.0,) * 4,
    "model.input.std": (60.0,) * 4,
    "eval.score_threshold": 0.05,
}


def to_bands(folder, split: str) -> None:
    """Store a split's images in four bands of 12 bits."""
    path = folder / "annotations" / f"instances_{split}.json"
    content = json.loads(path.read_text())
    for entry in content["images"]:
        image = cv2.imread(str(folder / split / entry["file_name"]))[..., ::-1]
        (folder / split / entry["file_name"]).unlink()
        deep = np.dstack([image, 255 - image[..., 0]]).astype(np.uint16) * 16
        entry["file_name"] = f"{entry['file_name'].split('.')[0]}.tif"
        stored = {"photometric": "rgb", "extrasamples": [0], "tile": (32, 32)}
        tifffile.imwrite(folder / split / entry["file_name"], deep, **stored)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """What training leaves behind, without the training."""
    folder = tmp_path_factory.mktemp("bands")
    run = Run(folder / "run", folder / "shapes", entries=tuple(ENTRIES.items()))
    write_data(run.data_dir)
    for split in ("train", "val"):
        to_bands(run.data_dir, split)
    leave_untrained(run)
    return run


def images_of(run: Run):
    return sorted((run.data_dir / "val").glob("*.tif"))


@pytest.fixture(scope="module")
def predictor(run):
    return mrcnn.load(run.workdir, score_threshold=0.05)


def test_a_run_is_loaded_with_its_bands(run, predictor):
    path = images_of(run)[0]
    found, pixels = predictor(path), tifffile.imread(path)
    assert predictor.bands.names == NAMES == found.band_names and len(found)
    np.testing.assert_array_equal(found.pixels, pixels)
    np.testing.assert_array_equal(found.image, np.rint(pixels[..., :3] * (255 / 4095)))
    for wrong in (pixels[..., :3], pixels[..., 0], pixels.astype(complex)):
        with pytest.raises(ValueError, match="expected numbers .H, W, 4. .red, green, blue, nir."):
            predictor(wrong)


def test_weights_alone_find_the_same(run, predictor, tmp_path):
    weights = str(tmp_path / "bands.safetensors")
    export.export_weights(None, str(run.workdir), "safetensors", weights)
    alone = mrcnn.load(run.workdir / "config.json", weights, score_threshold=0.05)
    path = images_of(run)[1]
    found, expected = alone(path), predictor(path)
    assert len(expected)
    for name in ("boxes", "scores", "classes", "mask_grids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.slow
def test_an_exported_model_scores_as_its_run(run, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    given = None, str(run.workdir), "onnx", str(tmp_path / "onnx"), ArtifactOptions()
    export.export_model(*given)
    expected = mrcnn.evaluate(run.workdir, output=tmp_path / "run")
    found = mrcnn.evaluate(load_exported(tmp_path / "onnx"), output=tmp_path / "exported")
    for name in ("AP", "AR100", "mask_AP"):
        assert found.get(name) == pytest.approx(expected.get(name), abs=1e-3)
    results = [json.loads((tmp_path / kind / "bbox_results.json").read_text()) for kind in KINDS]
    assert len(results[0]) == len(results[1]) > 3


@pytest.mark.slow
def test_evaluate_reads_bands_and_shows_them(run, tmp_path):
    metrics = mrcnn.evaluate(run.workdir, output=tmp_path, report=True)
    assert metrics["AP"] >= 0
    page = (tmp_path / "report.html").read_text()
    content = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    assert content and all(
        cv2.imdecode(np.frombuffer(base64.b64decode(one), np.uint8), 1).std() > 5 for one in content
    )


def test_a_report_of_results_shows_them(run):
    recipe, _, _ = restore_recipe(None, run.workdir)
    read = scored_file._files_reader(recipe.data)
    entries = json.loads((run.data_dir / "annotations" / "instances_val.json").read_text())
    for entry in entries["images"]:
        image = read(entry)
        pixels = tifffile.imread(run.data_dir / "val" / entry["file_name"])
        np.testing.assert_array_equal(image, np.rint(pixels[..., :3] * (255 / 4095)))


def test_serve_finds_what_the_predictor_does(run, predictor):
    path = images_of(run)[0]
    expected = predictor(path)
    with serving(predictor) as server:
        headers = {"Content-Type": "image/tiff"}
        address = "/detect?score_threshold=0.05&masks=none"
        response = ask(server, path=address, body=path.read_bytes(), headers=headers)
    found = json.loads(response.body)["detections"]
    assert [one["category"] for one in found] == expected.names
    np.testing.assert_allclose([one["score"] for one in found], expected.scores, atol=1e-5)


def test_pictures_of_an_evaluation_show_them(run, tmp_path):
    recipe, _, _ = restore_recipe(None, run.workdir)
    dataset = load_split(recipe.data, "val")
    loader = EvalLoader(dataset, recipe.data, batch_size=2, num_workers=0, max_images=2)
    drawn = draw_pictures(predict, {}, loader, dataset, make_mesh(), tmp_path)
    assert len(drawn) == 2
    assert all(one.dtype == np.uint8 and one.shape[2] == 3 for one in drawn.values())


def test_infer_writes_pictures_and_results(run, tmp_path, capsys):
    given = [f"--workdir={run.workdir}", f"--output={tmp_path}", "--score_threshold=0.05"]
    code = run_inside("infer", *given, f"--input={run.data_dir / 'val'}")
    assert code == 0, capsys.readouterr().err
    assert len(json.loads((tmp_path / "detections.json").read_text())) > 3
    for path in images_of(run):
        assert cv2.imread(str(tmp_path / f"{path.stem}.jpg")).std() > 5


@pytest.mark.parametrize(
    ("entry", "value"), [("scale", "image"), ("bits", 14), ("names", ("a", "b", "c", "d"))]
)
def test_other_bands_than_the_runs_are_told(run, entry, value):
    recipe, _, _ = restore_recipe(None, run.workdir)
    bands = replace(recipe.data.bands, **{entry: value})
    other = replace(recipe, data=replace(recipe.data, bands=bands))
    with pytest.raises(ValueError, match=rf"was trained with data.bands.{entry}=.*, the config"):
        restore_recipe(other, run.workdir)
    for free in ({"nan": "zero"}, {"view": ("nir",)}, {"pages": "max"}, {"numbers": (4, 3, 2, 1)}):
        bands = replace(recipe.data.bands, **free)
        restore_recipe(replace(recipe, data=replace(recipe.data, bands=bands)), run.workdir)


@pytest.mark.parametrize("command", ["infer", "evaluate"])
def test_other_files_are_told_in_a_line(run, tmp_path, command, capsys):
    three = tmp_path / "three.tif"
    tifffile.imwrite(three, np.zeros((64, 64, 3), np.uint16), photometric="rgb")
    given = [f"--workdir={run.workdir}", f"--output={tmp_path / 'out'}"]
    if command == "infer":
        given += [f"--input={three}"]
    else:
        annotations = run.data_dir / "annotations" / "instances_val.json"
        content = json.loads(annotations.read_text())
        content["images"] = content["images"][:1]
        content["images"][0] |= {"file_name": three.name, "width": 64, "height": 64}
        kept = content["images"][0]["id"]
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] == kept]
        (tmp_path / "val.json").write_text(json.dumps(content))
        given += [f"--config.data.val_json={tmp_path / 'val.json'}"]
        given += [f"--config.data.val_images={tmp_path}"]
    line = error_line(run_inside(command, *given), capsys.readouterr().err)
    assert "three.tif: 3 bands, expected 4: red, green, blue, nir" in line
