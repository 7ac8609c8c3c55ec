"""Initial weights of a student that are its teacher's."""

import re

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.recipe.distillation import DistillOptions
from mask_rcnn_jax.training import loop, setup, work
from mask_rcnn_jax.training.teacher import check_fit, inherit
from mask_rcnn_jax.weights.convert import to_ours_flat
from tests.helpers import any_variables
from tests.training.stubbed_run import run as stubbed_run
from tests.training.stubbed_run import stubbed
from tests.training.test_distill import (
    Trunk,
    abstract_outputs,
    distillation,
    model,
    small_config,
    variables,
)

__all__ = ["stubbed"]


def student_of(config, seed=0):
    """A model of that config, its initial variables, and those of a teacher like it."""
    student = build_model(config.model).clone(backbone=Trunk())
    return student, any_variables(student, seed), any_variables(student, seed + 1)


def test_heads_are_inherited_whole_and_the_pyramid_by_layers(caplog):
    config = small_config()
    config.model.mask_head.channels = 16  # the teacher has 8
    _, ours, _ = student_of(config)
    ours["params"]["fpn"]["fpn_lateral3"]["kernel"] = np.zeros((1, 1, 4, 8), np.float32)
    with caplog.at_level("INFO"):
        found = inherit(ours, variables(1))
    assert "with others than the teacher's weights: fpn/fpn_lateral3, mask_head\n" in caplog.text
    flat, start, taught = (flatten_dict(tree, sep="/") for tree in (found, ours, variables(1)))
    own = re.compile("params/(backbone|mask_head|fpn/fpn_lateral3)/")
    assert flat.keys() == start.keys()
    kept = {n.split("/")[1] for n in flat if not own.match(n)}
    assert kept == {"fpn", "rpn_head", "box_head"}
    for name, array in flat.items():
        np.testing.assert_array_equal(array, (start if own.match(name) else taught)[name])


def test_stages_of_a_cascade_are_heads():
    def tree(value, classes):
        heads = {f"heads_{i}": {"cls_score": {"kernel": np.full(3, value)}} for i in range(2)}
        heads["heads_1"]["cls_score"]["bias"] = np.full(classes, value)
        return {"params": {"backbone": {"x": np.full(2, value)}, "cascade": heads}}

    found = inherit(tree(0.0, 5), tree(1.0, 4))["params"]
    heads = [found["cascade"][f"heads_{i}"]["cls_score"]["kernel"][0] for i in range(2)]
    assert (found["backbone"]["x"][0], *heads) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_layers_with_other_arrays_are_others(side):
    """A norm with statistics and one without: the same scale means something else."""
    trees = {}
    for name, value in (("student", 0.0), ("teacher", 1.0)):
        norm = {"scale": np.full(4, value)} | ({"var": np.full(4, value)} if name == side else {})
        trees[name] = {"params": {"fpn": {"a": norm, "b": {"kernel": np.full(4, value)}}}}
    found = inherit(trees["student"], trees["teacher"])["params"]["fpn"]
    assert (found["a"]["scale"][0], found["b"]["kernel"][0]) == (0.0, 1.0)


def test_a_student_in_int8_inherits_kernels_and_keeps_its_ranges():
    _, ours, taught = student_of(small_config())
    ours["batch_stats"] = {"fpn": {"fpn_output2": {RANGE: np.float32(3.0)}}}
    found = inherit(ours, taught)
    assert found["batch_stats"]["fpn"]["fpn_output2"][RANGE] == 3.0
    kernels = (tree["params"]["fpn"]["fpn_output2"]["kernel"] for tree in (found, taught))
    np.testing.assert_array_equal(*kernels)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"box_coder": BoxCoder(weights=(1.0, 2.0, 3.0, 4.0))}, "model.box_coder"),
        ({"anchors": AnchorGrid(sizes=(8, 16, 32, 64, 128))}, "model.anchors"),
    ],
)
@pytest.mark.slow
def test_heads_that_mean_something_else_are_not_inherited(fields, name):
    outputs, taught = abstract_outputs()
    for inherits in (False, True):
        options = DistillOptions(teacher="a run", inherit=inherits)
        found = distillation(options, teacher=model().clone(**fields))
        if not inherits:
            check_fit(found, outputs, taught)
            continue
        with pytest.raises(ValueError, match=f"a run has another {name}, expected distill.inherit"):
            check_fit(found, outputs, taught)


def drawn(model, seed, given):
    """As `init_variables`, without a program."""
    own = any_variables(model, seed)
    return jax.tree.map(lambda x, y: y if isinstance(x, jax.ShapeDtypeStruct) else x, given, own)


def test_a_run_inherits_once_and_its_own_weights_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "init_variables", drawn)
    config = small_config()
    config.distill.teacher = "a run"
    student, ours, taught = student_of(config, config.train.seed)

    def params(inherits: bool, resuming: bool = False):
        config.distill.inherit = inherits
        given = as_recipe(config), student, None, optax.sgd(1.0)
        return setup.initial_state(*given, taught, resuming=resuming)[0].params

    jax.tree.map(np.testing.assert_array_equal, params(False), ours["params"])
    assert not any(leaf.any() for leaf in jax.tree.leaves(params(True, resuming=True)))
    found = params(True)
    jax.tree.map(np.testing.assert_array_equal, found["backbone"], ours["params"]["backbone"])
    others = {name: taught["params"][name] for name in found if name != "backbone"}
    jax.tree.map(np.testing.assert_array_equal, found, {**found, **others})
    trained = {name: any_variables(student, 5)["params"][name] for name in ("backbone", "fpn")}
    config.model.init_from = str(tmp_path / "trained.safetensors")
    save_file(to_ours_flat({"params": trained, "batch_stats": {}}), config.model.init_from)
    jax.tree.map(np.testing.assert_array_equal, params(True), {**found, **trained})


def test_the_run_gives_the_teacher_to_its_initial_state(tmp_path, stubbed, monkeypatch):
    class Given(Exception):
        pass

    def initial_state(recipe, model, schedule, optimizer, teacher, **options):
        raise Given(teacher)

    monkeypatch.setattr(loop, "initial_state", initial_state)
    monkeypatch.setattr(work, "open_teacher", lambda *_: (None, ("its variables",)))
    with pytest.raises(Given, match="its variables"):
        stubbed_run(tmp_path, steps=4)
