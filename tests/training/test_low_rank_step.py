"""Steps with low-rank adapters on two devices, and in float16 with a loss scale."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.recipe.optimizer import LowRank
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale
from mask_rcnn_jax.training.low_rank import add_adapters
from mask_rcnn_jax.training.optim import train_only
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.weights.run_checkpoint import read_arrays
from tests.bounds import assert_gradients_close, sum_bound
from tests.helpers import any_variables, tiny_batch
from tests.training.test_distill import Trunk, small_config
from tests.training.test_distilled_run import TERMS
from tests.training.test_low_rank import FREEZE, KERNELS, LORA, names, with_random_b
from tests.training.test_step import DIVISIONS, mesh_of

pytestmark = pytest.mark.slow


def program(devices: int, precision: str, scaled=lambda tx: tx):
    """The plain variables, a state with adapters, and its step on four images."""
    loss, sampling, _ = DIVISIONS["whole"]
    config = small_config()
    config.model.update(sampling=sampling, rpn=dict(nms_thresh=1.0))
    model = build_model(config.model, precision=precision).clone(backbone=Trunk())
    variables, mesh = any_variables(model, 0), mesh_of(devices)
    params = add_adapters(variables["params"], LowRank(2, 6.0, KERNELS), Trunk(), seed=0)
    params = with_random_b(params)
    tx = scaled(train_only(optax.sgd(1e-2, momentum=0.9), params, (), FREEZE))
    step = make_train_step(model, tx, None, mesh, StepOptions(loss, 0, 0.5, freeze=FREEZE))
    state = replicate(TrainState.start({**variables, "params": params}, tx), mesh)
    batch = shard_batch(jax.tree.map(lambda x: x[:4], tiny_batch(5)), mesh)
    return variables, state, lambda state: step(state, batch)


def test_two_devices_train_adapters_as_one_does():
    found = []
    for devices in (1, 2):
        _, state, step = program(devices, "float32")
        state, metrics = step(state)
        found.append(jax.device_get((optax.tree.get(state.opt_state, "trace"), metrics)))
    (one, losses), (two, metrics) = found
    assert any(LORA in name for name in names(one))
    assert_gradients_close(two, one, TERMS)
    for name in losses:
        if name.startswith("loss/"):
            np.testing.assert_allclose(metrics[name], losses[name], rtol=sum_bound(TERMS))


def test_an_overflow_in_float16_leaves_adapters_and_the_next_step_moves_them(tmp_path):
    scaled = partial(dynamic_loss_scale, init_scale=2.0**60, growth_interval=2000, floor=1.0)
    variables, state, step = program(2, "float16", scaled)
    before = jax.device_get(state)
    state, metrics = step(state)
    after = jax.device_get(state)
    assert metrics["skipped_steps"] == 1 and after.opt_state.scale == 2.0**59
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state.inner, before.opt_state.inner)

    after = after.replace(opt_state=after.opt_state._replace(scale=np.float32(2.0**8)))
    state, metrics = step(replicate(after, mesh_of(2)))
    assert metrics["skipped_steps"] == 1 and np.isfinite(metrics["grad_norm"])
    old, new = (flatten_dict(x, sep="/") for x in (before.params, jax.device_get(state.params)))
    moved = {name for name in old if np.any(old[name] != new[name])}
    # Of the adapters all but their scale; their kernels, like all that is frozen, stay.
    assert {n for n in old if f"{LORA}/" in n and not n.endswith("scale")} <= moved
    adapted = {n.partition(f"/{LORA}")[0] for n in old if f"/{LORA}/" in n}
    assert not {f"{layer}/kernel" for layer in adapted} & moved

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state)
    checkpoints.close()
    saved = read_arrays(tmp_path / "checkpoints" / "2", lambda tree: tree)["params"]
    assert names(saved) == names(variables["params"])
    saved = flatten_dict(saved, sep="/")
    for layer in adapted:
        kernel = new[f"{layer}/kernel"]
        a, b, scale = (new[f"{layer}/{LORA}/{part}"] for part in ("a", "b", "scale"))
        expected = kernel + (scale * a.reshape(-1, 2) @ b).reshape(kernel.shape)
        np.testing.assert_allclose(saved[f"{layer}/kernel"], expected, atol=1e-6, err_msg=layer)
