"""The pull of `optim.group_lasso`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.channels import Channels
from mask_rcnn_jax.pruning.channel_groups import Axis, Group
from mask_rcnn_jax.training.optim import build_optimizer, make_optimizer
from mask_rcnn_jax.training.sparsity import add_group_lasso
from tests.helpers import tiny_config

AXES = (
    Axis("params/a/kernel", 3, 1, True),
    Axis("params/b/kernel", 2, 1, True),  # a transposed convolution
    Axis("params/norm/scale", 0, 1, True),
    Axis("params/a/bias", 0, 1, True),
    Axis("params/reader/kernel", 0, 2, False),
)


def groups(unit=1):
    return {"x": Group(Channels(6, unit, 6), AXES)}


def params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"a": (1, 3, 2, 6), "b": (2, 2, 6, 5), "reader": (12, 3)}
    made = {name: {"kernel": rng.normal(size=shape)} for name, shape in shapes.items()}
    made["a"]["bias"] = rng.normal(size=6)
    made["norm"] = {"scale": rng.normal(size=6)}
    return jax.tree.map(lambda x: x.astype(np.float32), made)


def penalty(params, unit):
    """The sum of the norms, one channel after the other."""
    total = 0.0
    for first in range(0, 6, unit):
        squares = scales = 0.0
        for channel in range(first, first + unit):
            squares += np.sum(np.float64(params["a"]["kernel"][..., channel]) ** 2)
            squares += np.sum(np.float64(params["b"]["kernel"][:, :, channel]) ** 2)
            scales += np.float64(params["norm"]["scale"][channel]) ** 2
        total += squares**0.5 + scales**0.5
    return total


def pull(params, strength=1.0, unit=1):
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = add_group_lasso(strength, groups(unit))
    return jax.device_get(tx.update(zeros, tx.init(params), params)[0])


@pytest.mark.parametrize("unit", [1, 3])
def test_it_is_the_gradient_of_the_sum_of_norms(unit):
    at, rng = params(), np.random.default_rng(1)
    found = pull(at, strength=0.5, unit=unit)
    for _ in range(5):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), at)
        ahead, behind = (
            jax.tree.map(lambda x, d, s=s: x + s * d, at, direction) for s in (1e-3, -1e-3)
        )
        numeric = 0.5 * (penalty(ahead, unit) - penalty(behind, unit)) / 2e-3
        along = optax.tree.vdot(found, direction)
        assert float(along) == pytest.approx(numeric, rel=1e-3)
    assert not np.any(found["reader"]["kernel"]) and not np.any(found["a"]["bias"])


def test_a_channel_at_zero_stays_there():
    at = params()
    at["a"]["kernel"][..., 2] = at["b"]["kernel"][:, :, 2] = at["norm"]["scale"][2] = 0
    found = pull(at)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not np.any(found["a"]["kernel"][..., 2]) and found["norm"]["scale"][2] == 0
    assert np.any(found["a"]["kernel"][..., 1])


def test_frozen_layers_are_no_part_of_it():
    """As the optimizer sees them: without their arrays."""
    at = params()
    alone = {name: at[name] for name in ("a", "norm", "reader")}
    found = pull(alone)
    norms = np.sqrt(np.sum(np.square(at["a"]["kernel"]), (0, 1, 2)))
    np.testing.assert_allclose(found["a"]["kernel"], at["a"]["kernel"] / norms, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_only_what_the_loss_needs_survives(name):
    """Least squares with channels 0 to 2 of both layers as its aim."""
    config = tiny_config()
    config.optim.update(name=name, momentum=0.5, weight_decay=0.0, group_lasso=0.1)
    tx = make_optimizer(as_recipe(config).optim, lambda _: 0.02, None, groups())
    at, aim = params(), params(seed=2)

    def loss(params):
        errors = [
            params["a"]["kernel"] - aim["a"]["kernel"],
        ]
        errors = [*errors, jnp.moveaxis(params["b"]["kernel"] - aim["b"]["kernel"], 2, 3)]
        return sum(0.5 * jnp.sum(jnp.square(e[..., :3])) for e in errors)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (end, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=3000))((at, tx.init(at)))
    before, after = (np.sqrt(np.sum(np.square(p["a"]["kernel"]), (0, 1, 2))) for p in (at, end))
    assert np.all(after[3:] < 0.02) and np.all(before[3:] > 0.5)
    assert np.all(after[:3] > 0.5)


def test_it_is_absent_unless_it_is_asked_for():
    """No entry of it in the program of the step, and none in a recipe."""
    config, tree = tiny_config(), {"backbone": {"stem_conv": {"kernel": jnp.ones((2, 2, 3, 64))}}}

    def program(**entries):
        config.optim.update(entries)
        tx = build_optimizer(as_recipe(config), lambda _: 0.1, tree, None)
        return str(jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(tree, tx.init(tree), tree))

    assert config.optim.group_lasso == 0
    off, on = program(), program(group_lasso=1e-3)
    assert "rsqrt" in on and "rsqrt" not in off and len(off) < len(on)


def test_a_negative_strength_is_named():
    config = tiny_config()
    config.optim.group_lasso = -1.0
    with pytest.raises(ValueError, match="optim.group_lasso is -1.0, expected at least 0"):
        as_recipe(config)
