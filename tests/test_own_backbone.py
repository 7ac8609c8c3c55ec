"""The backbone of docs/extending.md: trained, resumed, evaluated, used and exported."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.training.optim import build_optimizer
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.commands.command import ROOT, SMALL, check_done, data_entries, run
from tests.helpers import SHARED, tiny_config

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
ANNOTATIONS = SHARED / "data/coco128/annotations/instances_train2017.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The two files of the page, and eight photographs or, without those, generated images."""
    folder = tmp_path_factory.mktemp("mine")
    for name in ("convnext.py", "my_recipe.py"):
        (folder / name).write_text(FILES[name])
    if ANNOTATIONS.exists():
        content = json.loads(ANNOTATIONS.read_text())
        content["images"] = content["images"][:8]
        ids = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids]
        (folder / "few.json").write_text(json.dumps(content))
        images = ANNOTATIONS.parents[1] / "train2017"
    else:
        from mask_rcnn_jax.formats.shapes import write_shapes

        write_shapes(folder / "shapes", train=8, val=2)
        (folder / "shapes/annotations/instances_train.json").rename(folder / "few.json")
        images = folder / "shapes/train"
    return folder, (folder / "few.json", images)


@pytest.mark.slow
def test_it_trains_resumes_evaluates_infers_and_exports(folder, tmp_path, monkeypatch):
    folder, pair = folder
    monkeypatch.setenv("PYTHONPATH", str(folder))
    entries = {k: v for k, v in SMALL.items() if k != "train.steps"} | data_entries(pair, pair)
    entries |= {"data.bad_annotations": "skip", "train.checkpoint_every": 2}
    entries |= {"train.eval_every": 4, "train.steps": 4, "eval.loss_images": 0, "eval.pictures": 0}
    overrides = [f"--config.{name}={value}" for name, value in entries.items()]
    flags = [f"--config={folder / 'my_recipe.py'}", *overrides, "--workdir", tmp_path / "run"]
    cache = tmp_path / "cache"

    check_done(run("train", *flags, cache=cache))
    first = load_checkpoint(tmp_path / "run")["params"]
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    done = check_done(run("train", *flags, cache=cache))
    assert "resuming at step 2 of 4" in done.stderr
    again = load_checkpoint(tmp_path / "run")["params"]
    jax.tree.map(np.testing.assert_array_equal, again, first)
    backbone = {"/".join(path) for path in flatten_dict(first["backbone"])}
    assert "stage3_0/Conv_0/kernel" in backbone

    check_done(run("evaluate", "--workdir", tmp_path / "run", cache=cache))
    out, photo = tmp_path / "out", sorted(pair[1].glob("*.jpg"))[0]
    arguments = ["--workdir", tmp_path / "run", "--output", out]
    check_done(run("infer", *arguments, "--input", photo, "--score_threshold=0", cache=cache))
    assert (out / photo.name).is_file()

    arguments = ["--workdir", tmp_path / "run", "--output", tmp_path / "exported"]
    check_done(run("export", *arguments, "--format=stablehlo", cache=cache))
    check_done(run("export", *arguments, "--format=onnx", cache=cache))  # compares detections


@pytest.mark.slow
def test_its_frozen_stage_stays_and_its_dtype_follows(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder[0])
    config = tiny_config()
    config.model.backbone = load_tree(folder[0] / "my_recipe.py").model.backbone
    config.model.backbone.frozen_stages = 1
    model = build_model(config.model, precision="bfloat16")
    assert model.backbone.dtype == jax.numpy.bfloat16
    params = init_variables(model, 0)["params"]
    tx = build_optimizer(as_recipe(config), lambda step: 0.1, params, model.backbone)
    grads = jax.tree.map(lambda leaf: jax.numpy.ones_like(leaf), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    for (layer, *_), update in flatten_dict(updates["backbone"]).items():
        assert np.any(update) != layer.startswith("stage0_"), layer


def test_an_entry_that_it_does_not_take_is_named(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder[0])
    config = tiny_config()
    config.model.backbone = dict(name="convnext:ConvNeXt", width=3)
    with pytest.raises(ValueError, match="model.backbone has no entry 'width', expected one of"):
        build_model(config.model)
