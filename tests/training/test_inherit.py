"""Initial weights of a student that are its teacher's."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.training import setup
from mask_rcnn_jax.training.teacher import inherit
from tests.training.test_distill import Trunk, small_config, variables


def student_of(config, seed=0):
    """A model of that config, its initial variables, and those of a teacher like it."""
    student = build_model(config.model).clone(backbone=Trunk())
    return student, init_variables(student, seed), init_variables(student, seed + 1)


def test_inherited_layers_are_those_of_equal_shapes(caplog):
    config = small_config()
    config.model.mask_head.channels = 16  # other than the teacher's
    _, ours, _ = student_of(config)
    with caplog.at_level("INFO"):
        found = inherit(ours, variables(1))
    assert "has none of that shape: 3 (mask_head/mask_deconv, mask_head/mask_fcn1, " in caplog.text
    flat, start, taught = (flatten_dict(tree, sep="/") for tree in (found, ours, variables(1)))
    own = re.compile("params/(backbone|mask_head)/")
    assert flat.keys() == start.keys()
    assert {n.split("/")[1] for n in flat if not own.match(n)} == {"fpn", "rpn_head", "box_head"}
    for name, array in flat.items():
        np.testing.assert_array_equal(array, (start if own.match(name) else taught)[name])


def test_a_student_in_int8_inherits_kernels_and_keeps_its_ranges():
    _, ours, taught = student_of(small_config())
    ours["batch_stats"] = {"fpn": {"fpn_output2": {RANGE: np.float32(3.0)}}}
    found = inherit(ours, taught)
    assert found["batch_stats"]["fpn"]["fpn_output2"][RANGE] == 3.0
    kernels = (tree["params"]["fpn"]["fpn_output2"]["kernel"] for tree in (found, taught))
    np.testing.assert_array_equal(*kernels)


def test_a_teacher_of_which_nothing_fits_is_refused():
    ours = {"params": {"backbone": {"x": np.ones(3)}, "fpn": {"a": {"kernel": np.ones((1, 2))}}}}
    taught = {"params": {"backbone": {"x": np.ones(3)}, "fpn": {"a": {"kernel": np.ones((2, 1))}}}}
    with pytest.raises(ValueError, match="^distill.inherit: no layer of pyramid, RPN and heads"):
        inherit(ours, taught)


def test_a_run_inherits_once_and_after_its_own_weights():
    config = small_config()
    config.distill.teacher = "a run"
    student, ours, taught = student_of(config, config.train.seed)

    def params(inherit: bool, resuming: bool = False):
        config.distill.inherit = inherit
        start = functools.partial(setup.initial_state, config, student, None, optax.sgd(1.0))
        return start(taught, resuming=resuming)[0].params

    for kept in (params(False), params(True, resuming=True)):
        jax.tree.map(np.testing.assert_array_equal, kept, ours["params"])
    found = params(True)
    jax.tree.map(np.testing.assert_array_equal, found.pop("backbone"), ours["params"]["backbone"])
    jax.tree.map(np.testing.assert_array_equal, found, {n: taught["params"][n] for n in found})
