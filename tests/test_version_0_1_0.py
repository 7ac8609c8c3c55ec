"""What version 0.1.0 wrote is read as it was meant: a run, exported models, and defaults."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import consent, parts
from mask_rcnn_jax.config import load_config, read_workdir
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.models.build import BUILDERS, named_section
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training.setup import open_workdir
from tests.helpers import GOLDENS

SAVED = GOLDENS / "version_0_1_0"
CODE = "tests.small_trunk"  # of the run, which another machine made


@pytest.mark.parametrize("name", ["run", "stablehlo", "onnx"])
@pytest.mark.slow
def test_a_model_finds_what_it_found(name):
    if name == "onnx":
        pytest.importorskip("onnxruntime")
    expected = json.loads((SAVED / "detections.json").read_text())[name]
    allowed = CODE if name == "run" else ()  # an exported model runs without it
    with mrcnn.allow_code(allowed):
        predictor = mrcnn.load(SAVED / name, score_threshold=0.02)
    found = predictor(generate_image(0, "val", 3, (96, 128))[0])
    np.testing.assert_allclose(found.boxes, expected["boxes"], atol=0.02)
    np.testing.assert_allclose(found.scores, expected["scores"], atol=1e-4)
    assert found.classes.tolist() == expected["classes"]
    np.testing.assert_allclose(found.masks.sum((1, 2)), expected["mask_pixels"], atol=3)


def test_a_run_goes_on_and_is_saved_by_what_differs_from_the_defaults(tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(SAVED / "run", workdir)
    with consent.allow_code(CODE):
        before, categories = read_workdir(workdir)
    whole = json.loads((workdir / "config.json").read_text())["config"]
    saved, now = flatten(whole), flatten(json.loads(json.dumps(before.to_dict())))
    assert {name: now.get(name) for name in saved} == saved  # it had all entries of its time
    assert open_workdir(workdir, before, categories, resuming=True) == 40
    short = json.loads((workdir / "config.json").read_text())["config"]
    assert read_workdir(workdir) == (before, categories)
    assert len(flatten(short)) < len(flatten(whole)) / 2
    other = replace(before, train=replace(before.train, seed=1))
    with pytest.raises(ValueError, match="train.seed was 0 and is 1 now"):
        open_workdir(workdir, other, categories, resuming=True)


# Defaults that are others now and change no number of a run.
CHANGED = {"eval.engine": "auto"}


def test_no_default_has_changed():
    """Runs and exported models leave defaults out: another one would change what they are."""
    needed = {"image_size": (64, 64), "resize": "fit", "max_instances": 1}
    now = flatten(Recipe.read({"data": needed}).to_dict())
    for section, builders in BUILDERS.items():
        for name in builders:
            now |= flatten({f"{section}={name}": named_section(section, name)})
    now = json.loads(json.dumps(now))
    saved = json.loads((SAVED / "defaults.json").read_text())
    saved |= CHANGED
    assert {name: now.get(name) for name in saved} == saved


def test_what_differs_is_saved_with_all_that_a_users_own_part_was_given():
    with consent.allow_code(CODE):
        recipe, _ = read_workdir(SAVED / "run")
    assert recipe.changes()["model"]["backbone"] == parts.to_section(recipe.model.backbone)
    assert recipe.model.backbone.widths == (8, 12, 16, 24)  # as by default
    assert load_config("coco_detectron2").changes()["train"] == {"checkpoint_every": 5000}
