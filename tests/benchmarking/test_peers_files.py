"""Two processes passing over a folder in turns, and whether they found the same."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import jax
import numpy as np
import pytest

from benchmarks import peer_weights, peers_files
from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.coco_categories import COCO_CATEGORIES
from mask_rcnn_jax.models.build import init_variables
from tests.helpers import tiny_config

BOX = [10.0, 20.0, 30.0, 40.0]  # x, y, width, height
# Finds an object in the first image; a pass over all of them takes 4 s, and 6 of processors.
STAND_IN = """#!{python}
import json, sys
settings = json.loads(sys.argv[-1])
found = dict(file_name=settings["files"][0], category_id=3, bbox={box}, score=0.5)
open(settings["output"] + "/detections.json", "w").write(json.dumps([found]))
print("a stand-in", 16, sep="\\n", flush=True)
for _ in sys.stdin:
    print(4, 6, flush=True)
"""


@pytest.fixture
def photos(tmp_path):
    """A folder with two photos of different sizes, their annotations and another file."""
    folder = tmp_path / "photos"
    folder.mkdir()
    categories = [{"id": k, "name": name} for k, name in COCO_CATEGORIES]
    rng, content = np.random.default_rng(0), {"categories": categories}
    content |= {"images": [], "annotations": []}
    for k, (height, width) in enumerate([(60, 90), (80, 50)], start=1):
        name = f"{k}.jpg"
        assert cv2.imwrite(str(folder / name), rng.integers(0, 256, (height, width, 3), np.uint8))
        image = dict(id=7 * k, file_name=name, height=height, width=width)
        content["images"].append(image)
        x, y, w, h = BOX
        outline = [x, y, x + w, y, x + w, y + h, x, y + h]
        entry = dict(id=k, image_id=7 * k, category_id=3, bbox=BOX, area=w * h, iscrowd=0)
        content["annotations"].append(entry | {"segmentation": [outline]})
    (folder / "notes.txt").write_text("no image")
    (tmp_path / "photos.json").write_text(json.dumps(content))
    return folder


def arguments(photos, **changed) -> list[str]:
    given = dict(weights="w.pth", images=photos, output=photos.parent / "out", mode="infer")
    return [f"--{name}={value}" for name, value in (given | changed).items()]


def test_passes_in_turns(photos, tmp_path, monkeypatch, capsys):
    path = tmp_path / "python"
    path.write_text(STAND_IN.format(python=sys.executable, box=BOX))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    peers_files.main(peers_files.parse([*arguments(photos, python=path), "--turns=3"]))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] == 3 and report["images"] == 2
    assert report["ours_s"]["median"] == 2 and report["torchvision_cpu_s"]["median"] == 3
    assert report["torchvision_over_ours_cpu"] == {"low": 1, "median": 1, "high": 1}
    # 16 processor seconds until the first pass had ended, of which a pass takes 6.
    assert report["ours_start_cpu_s"] == report["torchvision_start_cpu_s"] == 10
    assert report["found"] == [1, 1] and report["found_by_both"] == 1
    assert str(tmp_path) not in (tmp_path / "out" / "report.json").read_text()
    assert "ours: a stand-in\ntorchvision: a stand-in\n" in capsys.readouterr().out


def test_both_sides_get_the_same_files(photos, tmp_path):
    output = tmp_path / "out"
    infer = peers_files.chosen(peers_files.parse(arguments(photos)), output)
    assert infer["files"] == ["1.jpg", "2.jpg"] and infer["like"] == 2 and not infer["json"]
    assert infer["threshold"] == 0.5 and infer["size"] == [800, 1333]
    options = dict(mode="evaluate", json=tmp_path / "photos.json", limit=1, like=5000)
    evaluate = peers_files.chosen(peers_files.parse(arguments(photos, **options)), output)
    assert evaluate["files"] == ["1.jpg"] and evaluate["like"] == 5000
    kept = json.loads((output / "annotations.json").read_text())
    assert [entry["image_id"] for entry in kept["annotations"]] == [7]
    assert [entry["id"] for entry in kept["images"]] == [7] and kept["categories"]


def test_what_is_missing_is_told(photos, tmp_path, capsys):
    with pytest.raises(SystemExit):
        peers_files.parse(arguments(photos, mode="evaluate"))
    assert "--mode evaluate needs --json" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"error: --images .*empty has no .jpg"):
        peers_files.chosen(peers_files.parse(arguments(tmp_path / "empty")), tmp_path)


def test_the_closest_boxes_of_a_class_are_the_same_object(tmp_path):
    def write(side: str, rows: list[tuple]) -> None:
        entries = [
            dict(image_id=image, category_id=k, bbox=[x, 0.0, 10.0, 10.0], score=score)
            for image, k, x, score in rows
        ]
        folder = tmp_path / side
        folder.mkdir()
        (folder / "bbox_results.json").write_text(json.dumps(entries))
        (folder / "metrics.json").write_text(json.dumps({"AP": len(rows) / 8, "mask_AP": 0.25}))

    # In image 1: 0.25 px apart, 0.5 apart, and one that only we found, beside another class.
    write("ours", [(1, 2, 5.0, 0.9), (1, 2, 5.75, 0.8), (1, 2, 50.0, 0.7), (2, 2, 5.0, 0.6)])
    write("theirs", [(1, 2, 5.5, 0.85), (1, 2, 4.5, 0.95), (1, 4, 50.0, 0.7)])
    report = peers_files.agreement(tmp_path / "ours", tmp_path / "theirs")
    assert report["found"] == [4, 3] and report["found_by_both"] == 2
    assert report["box_difference_px"] == 0.5 and report["score_difference"] == 0.05
    assert report["AP"] == [0.5, 0.375] and report["mask_AP"] == [0.25, 0.25]


def test_nothing_found_is_no_difference(tmp_path):
    (tmp_path / "detections.json").write_text("[]")
    report = peers_files.agreement(tmp_path, tmp_path)
    assert report == {"found": [0, 0], "found_by_both": 0}


def test_a_calibrated_layer_has_the_deviation_and_mean_0():
    rng = np.random.default_rng(0)
    inputs, kernel = rng.normal(size=(500, 6)), rng.normal(size=(6, 4))
    layer = {"kernel": kernel, "bias": rng.normal(size=4)}
    peer_weights.standardize(layer, inputs @ kernel + layer["bias"], deviation=2.0)
    outputs = inputs @ layer["kernel"] + layer["bias"]
    np.testing.assert_allclose(outputs.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(outputs.std(), 2, rtol=1e-4)
    np.testing.assert_allclose(layer["kernel"] / kernel, layer["kernel"][0, 0] / kernel[0, 0])


@pytest.mark.slow
def test_calibrated_heads_find_objects():
    config = tiny_config()
    model, detect = inputs.recipe_model(as_recipe(config)), as_recipe(config).eval
    variables = init_variables(model, 0)
    images = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8)
    sizes = np.array([[60, 64]], np.int32)
    peer_weights.calibrate(model, variables, images, sizes, detect)
    call = jax.jit(lambda *inputs: model.apply(*inputs, method="predict", detect=detect))
    found = call(variables, images, sizes)
    assert found.valid.any() and found.scores.max() > 0.5
    assert 0.1 < found.masks[found.valid].std() < 0.5  # neither flat nor nothing but 0 and 1


@pytest.mark.slow
def test_our_side_finds_objects_with_calibrated_weights(photos, tmp_path, monkeypatch):
    weights = tmp_path / "calibrated.safetensors"
    given = dict(image=photos / "1.jpg", output=weights, backbone=None, size="64,96", seed=0)
    peer_weights.main(SimpleNamespace(**given))
    passes = []
    monkeypatch.setattr(peers_files, "serve_passes", lambda step, name: passes.append(step))
    for mode, name in [
        ("predict", "detections.json"),
        ("infer", "1.jpg"),
        ("evaluate", "metrics.json"),
    ]:
        options = dict(mode=mode, json=tmp_path / "photos.json", weights=weights, size="64,96")
        parsed = peers_files.parse(arguments(photos, **options))
        folder = tmp_path / mode
        folder.mkdir()
        settings = peers_files.chosen(parsed, tmp_path / "out") | {"output": str(folder)}
        peers_files.work(settings)
        passes.pop()()
        assert (folder / name).is_file(), mode
        assert peers_files.agreement(folder, folder)["found_by_both"] > 0, mode
    annotations = Path(settings["json"])
    content = json.loads(annotations.read_text())
    del content["categories"][3:]
    annotations.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has 3 categories, .*calibrated.* has 90"):
        peers_files.work(settings)
