"""Parameters that `optim.freeze` names stay, and cost nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.training.freezing import check_freeze, frozen_leaves, matches, names_of
from mask_rcnn_jax.training.optim import build_optimizer
from mask_rcnn_jax.training.sparsity import add_group_lasso
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from tests.helpers import any_variables, tiny_batch, tiny_config
from tests.training.test_distill import Trunk
from tests.training.test_distill import small_config as smallest_config
from tests.training.test_step import abstract_state

KERNEL = {"kernel": np.ones((1, 1), np.float32)}
PARAMS = {
    "backbone": {"stem_conv": KERNEL, "res2_0": {"conv1": KERNEL}, "res3_0": {"conv1": KERNEL}},
    "fpn": {"fpn_lateral2": KERNEL, "fpn_output2": KERNEL},
    "box_head": {"cls_score": {**KERNEL, "bias": np.zeros(1, np.float32)}},
}


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (("fpn/*",), {"fpn/fpn_lateral2/kernel", "fpn/fpn_output2/kernel"}),
        (("fpn",), {"fpn/fpn_lateral2/kernel", "fpn/fpn_output2/kernel"}),
        (("backbone/res[23]_*",), {"backbone/res2_0/conv1/kernel", "backbone/res3_0/conv1/kernel"}),
        (("*/bias", "*lateral2"), {"box_head/cls_score/bias", "fpn/fpn_lateral2/kernel"}),
        (("res2_0",), set()),
    ],
)
def test_a_pattern_matches_parameters_and_layers(patterns, frozen):
    leaves = [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]
    assert {"/".join(names) for names in leaves if matches(names, patterns)} == frozen


def test_layers_of_an_nnx_list_have_numbers_for_names():
    params = {"backbone": {"layers": {0: KERNEL, 1: KERNEL}}}
    check_freeze(("backbone/layers/1",), params)
    frozen = frozen_leaves(params, ("backbone/layers/1",))
    assert frozen == {"backbone": {"layers": {0: {"kernel": False}, 1: {"kernel": True}}}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = add_group_lasso(1.0, {}).update(zeros, optax.EmptyState(), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("fpn/*", "fnp/*"), r"optim.freeze has 'fnp/\*', which matches no .*; did you mean fpn\?"),
        (("backbone/res2_1",), "did you mean backbone/res2_0"),
        (("zzz",), "expected names such as backbone, box_head, fpn"),
        (("FPN",), "'FPN', which matches no parameter"),
        (("*",), r"optim.freeze is \('\*',\), which leaves nothing to train"),
    ],
)
def test_a_pattern_that_freezes_nothing_or_all_is_refused(freeze, message):
    with pytest.raises(ValueError, match=message):
        check_freeze(freeze, PARAMS)


def recipe(**optim):
    config = smallest_config()
    config.optim.update(name="adamw", weight_decay=0.1, **optim)
    return as_recipe(config)


@pytest.mark.parametrize(
    "own", [None, pytest.param(optax.adamw(0.1, weight_decay=0.1), marks=pytest.mark.slow)]
)
def test_what_is_frozen_has_no_state_no_decay_and_no_gradient(own):
    """Everything else moves as far as without; the global norm knows nothing of frozen layers."""
    wanted = recipe(freeze=("fpn", "box_head/bbox_pred"))
    model = build_model(wanted.model).clone(backbone=Trunk())
    variables, mesh = any_variables(model, 0), make_mesh()
    tx = build_optimizer(wanted, lambda _: 0.1, variables["params"], Trunk(), own)
    moments = [leaf for leaf in jax.tree.leaves(tx.init(variables["params"])) if np.ndim(leaf)]
    trained = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])
        if "fpn" not in str(path) and "bbox_pred" not in str(path)
    }
    assert len(moments) == 2 * len(trained)
    options = StepOptions(wanted.loss, 0, 0.0, freeze=wanted.optim.freeze)
    step = make_train_step(model, tx, None, mesh, options)
    state = replicate(TrainState.start(variables, tx), mesh)
    before = jax.device_get(state.params)
    state, metrics = step(state, shard_batch(tiny_batch(4), mesh))
    for path, old in jax.tree_util.tree_leaves_with_path(before):
        name, new = jax.tree_util.keystr(path), jax.device_get(state.params)
        for key in path:
            new = new[key.key]
        moved = not np.array_equal(new, old)
        assert moved == (name in trained) or (moved is False and not old.any()), name
    assert np.isfinite(metrics["grad_norm"])


class HalfFrozen(Trunk):
    frozen = ("Conv_0", "Conv_2")


def averaged_over_devices(trunk: Trunk, freeze: tuple[str, ...], parts: int = 1) -> int:
    """How many numbers a step averages: gradients and the terms of the loss."""
    wanted = recipe(freeze=freeze)
    model = build_model(wanted.model).clone(backbone=trunk)
    params = abstract_variables(model)["params"]
    tx = build_optimizer(wanted, lambda _: 0.1, params, trunk)
    options = StepOptions(wanted.loss, 0, 0.0, parts, freeze=freeze)
    step = make_train_step(model, tx, None, make_mesh(), options)
    state = abstract_state(model, tx)
    jaxpr = step.trace(state, tiny_batch(2 * parts)).jaxpr.jaxpr
    while not (sums := [one for one in jaxpr.eqns if "psum" in one.primitive.name]):
        jaxpr = next(one.params["jaxpr"] for one in jaxpr.eqns if "jaxpr" in one.params)
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(x.aval.size for one in sums for x in one.invars)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trunk", "freeze", "parts"),
    [
        (HalfFrozen(), ("fpn",), 2),
        (HalfFrozen(), (), 1),
        (Trunk(), ("fpn",), 2),
        (Trunk(), (), 1),
    ],
)
def test_no_gradient_of_what_is_frozen_is_averaged_over_devices(trunk, freeze, parts):
    """Beside the others, there are the terms of the loss: a few numbers."""
    params = abstract_variables(build_model(recipe().model).clone(backbone=Trunk()))["params"]
    frozen = [params["backbone"][name] for name in getattr(trunk, "frozen", ())]
    frozen += [params[name] for name in freeze]
    every, sizes = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, frozen))
    assert (sizes > 0) == bool(frozen)
    assert 0 < averaged_over_devices(trunk, freeze, parts) - (every - sizes) < 20


def test_the_bias_of_a_frozen_kernel_still_decays():
    decay_on = ("kernel", "kernel_bias")
    params = {"fpn": {"conv": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}, "norm": {"bias": 1.0}}}
    wanted = recipe(decay_on=decay_on, freeze=("*/kernel",))
    tx = build_optimizer(wanted, lambda _: 0.5, params, Trunk())
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(gradients, tx.init(params), params)
    assert updates["fpn"]["conv"]["bias"] == pytest.approx(-0.05)
    assert not updates["fpn"]["conv"]["kernel"].any() and updates["fpn"]["norm"]["bias"] == 0


def flops(**optim) -> float:
    config = tiny_config()
    config.model.backbone.frozen_stages = 0
    config.optim.update(optim)
    step = as_recipe(config)
    return inputs.train_flops(replace(step, model=replace(step.model, num_classes=2)))


@pytest.mark.slow
def test_no_gradient_is_computed_for_what_is_frozen():
    """Of the backbone as a whole as much is saved as by `frozen_stages`."""
    config = tiny_config()
    config.model.backbone.frozen_stages = 5
    stages = inputs.train_flops(as_recipe(config))
    assert flops(freeze=("backbone",)) == pytest.approx(stages, rel=1e-3)
    assert stages < flops(freeze=("backbone/res4_*", "fpn")) < flops()


def test_a_recipe_with_a_wrong_pattern_is_refused():
    wanted = recipe(freeze=("fnp/*",))
    model = build_model(wanted.model)
    params = abstract_variables(model)["params"]
    with pytest.raises(ValueError, match=r"optim.freeze has 'fnp/\*'.*did you mean fpn"):
        build_optimizer(wanted, lambda _: jnp.float32(0.1), params, model.backbone)
