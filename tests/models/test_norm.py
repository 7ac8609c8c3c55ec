"""Norm layers: batch norm by torch's rules, alone, with padding and on several devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.models.norm import BatchNorm, GroupNorm, LayerNorm, make_norm, normalize
from tests.bounds import assert_within, rounding_bound
from tests.helpers import load_golden

SHAPE = (4, 3, 5, 6)  # B, H, W, C
FOUR = "MASK_RCNN_TEST_DEVICES"  # in the environment of a process with four devices


def variables_of(channels, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.5, 2.0, (4, channels)).astype(np.float32)
    scale, bias, mean, var = map(jnp.asarray, values)
    return {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var}}


def slow_batch_norm(x, variables, rows, eps=1e-5):
    """float64: output of all elements, new mean and var, from the elements in `rows` [n, C]."""
    params, stats = variables["params"], variables["batch_stats"]
    rows = np.float64(rows)
    mean, var = rows.mean(axis=0), rows.var(axis=0)
    y = (x - mean) / np.sqrt(var + eps) * np.float64(params["scale"])
    y += np.float64(params["bias"])
    unbiased = var * len(rows) / (len(rows) - 1)
    moved = (
        0.9 * np.float64(stats["mean"]) + 0.1 * mean,
        0.9 * np.float64(stats["var"]) + 0.1 * unbiased,
    )
    return y, *moved


def apply(layer, variables, x, valid=None):
    return layer.apply(variables, x, valid, mutable=["batch_stats"])


@pytest.mark.parametrize("padded", [False, True])
def test_batch_norm_in_training_equals_a_slow_one(padded):
    x = np.random.default_rng(1).normal(3.0, 2.0, SHAPE).astype(np.float32)
    valid = np.array([True, False, True, True]) if padded else np.ones(4, bool)
    x[~valid] = 1e6  # padding holds anything
    variables = variables_of(6)
    places = jnp.asarray(valid)[:, None, None, None] if padded else None
    y, updated = apply(BatchNorm(train=True), variables, x, places)
    expected, mean, var = slow_batch_norm(x, variables, x[valid].reshape(-1, 6))
    np.testing.assert_allclose(y[valid], expected[valid], atol=1e-5)
    np.testing.assert_allclose(updated["batch_stats"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(updated["batch_stats"]["var"], var, rtol=1e-5)


def test_worked_by_hand():
    """1, 3 and padding: mean 2, variance 1, unbiased 2."""
    layer, x = BatchNorm(train=True, eps=0.0), jnp.array([[1.0], [3.0], [100.0]])
    variables = {"params": {"scale": jnp.array([2.0]), "bias": jnp.array([1.0])},
                 "batch_stats": {"mean": jnp.array([0.0]), "var": jnp.array([1.0])}}  # fmt: skip
    y, updated = apply(layer, variables, x, jnp.array([[True], [True], [False]]))
    np.testing.assert_allclose(y[:2], [[-1.0], [3.0]], rtol=1e-6)
    assert updated["batch_stats"]["mean"] == pytest.approx(0.2)
    assert updated["batch_stats"]["var"] == pytest.approx(0.9 + 0.1 * 2)


def test_nothing_valid_moves_nothing_and_stays_finite():
    variables, x = variables_of(6), jnp.ones(SHAPE)
    places = jnp.zeros((4, 1, 1, 1), bool)

    def loss(params, x):
        y, updated = apply(BatchNorm(train=True), {**variables, "params": params}, x, places)
        return jnp.sum(jnp.where(places, y, 0.0)), updated["batch_stats"]

    grads, stats = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables["params"], x)
    jax.tree.map(np.testing.assert_array_equal, stats, variables["batch_stats"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_statistics_compute_what_flax_does_to_the_bit(dtype):
    variables, x = variables_of(6), jax.random.normal(jax.random.key(0), SHAPE, dtype)
    theirs = nn.BatchNorm(use_running_average=True, epsilon=1e-5, dtype=dtype)
    ours = make_norm("affine", train=True, dtype=jnp.dtype(dtype), eps=1e-5)()
    np.testing.assert_array_equal(ours.apply(variables, x), theirs.apply(variables, x))
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x)) == jax.tree.map(
        jnp.shape, variables
    )


def test_bfloat16_statistics_keep_small_variances():
    """Mean 100, deviation 0.5, near the stored mean: as precise as the input."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(100 + 0.5 * rng.normal(size=(8, 32, 32, 2)), jnp.bfloat16)
    variables = variables_of(2)
    variables["batch_stats"]["mean"] = jnp.full(2, 99.0)
    _, updated = apply(BatchNorm(train=True, dtype=jnp.bfloat16), variables, x)
    exact = np.asarray(x.astype(jnp.float32), np.float64).reshape(-1, 2)
    moved = (
        np.asarray(updated["batch_stats"]["var"]) - 0.9 * variables["batch_stats"]["var"]
    ) / 0.1
    np.testing.assert_allclose(moved, exact.var(axis=0, ddof=1), rtol=2e-5)


def on_devices(count, layer, variables, x, valid, upstream):
    """Loss `sum(y * upstream)`, its gradients and the new statistics, on `count` devices."""
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count])

    def one(params, x, valid, upstream):
        def loss(params, x):
            y, updated = apply(layer, {**variables, "params": params}, x, valid)
            return jnp.sum(y * upstream), (y, updated["batch_stats"])

        grads, (y, stats) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, grads[1], jax.lax.psum(grads[0], "data"), jax.tree.map(lambda s: s[None], stats)

    specs = (P(), P("data"), P("data"), P("data"))
    run = jax.shard_map(
        one, mesh=mesh, in_specs=specs, out_specs=(P("data"), P("data"), P(), P("data")),
        check_vma=False,
    )  # fmt: skip
    return jax.device_get(jax.jit(run)(variables["params"], x, valid, upstream))


@pytest.mark.parametrize("count", [2, 4] if FOUR in os.environ else [2])
@pytest.mark.parametrize("padded", [False, True])
def test_synced_statistics_equal_one_device_with_the_whole_batch(count, padded):
    rng = np.random.default_rng(0)
    x, upstream = rng.normal(2.0, 1.0, (2, 4, 3, 5, 6)).astype(np.float32)
    valid = np.ones((4, 1, 1, 1), bool)
    if padded:  # one of four devices has none
        valid[1] = False
        upstream = upstream * valid
    variables = variables_of(6)
    arguments = BatchNorm(train=True, sync="elements"), variables, x, valid, upstream
    y, gx, gp, stats = on_devices(count, *arguments)
    one_y, one_gx, one_gp, one_stats = on_devices(1, *arguments)
    np.testing.assert_allclose(y, one_y, atol=1e-5)
    np.testing.assert_allclose(gx, one_gx, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gp, one_gp)
    for name, rows in stats.items():
        for row in rows:
            np.testing.assert_allclose(row, one_stats[name][0], rtol=1e-6, err_msg=name)


@pytest.mark.skipif(FOUR in os.environ, reason="runs itself")
@pytest.mark.slow
def test_four_devices():
    """The test above in a process that has them."""
    name = test_synced_statistics_equal_one_device_with_the_whole_batch.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", name]
    done = subprocess.run(command, env={**os.environ, FOUR: "4"}, capture_output=True, text=True)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("mode, sync", [("modeN", "elements"), ("modemean", "devices")])
def test_two_processes_of_detectron2(mode, sync):
    """Shards of unequal size are padded to the same; their running variance is the biased one."""
    golden = {key.removeprefix(f"{mode}/"): value for key, value in
              load_golden("modern/syncbn", whole=True).items() if key.startswith(mode)}  # fmt: skip

    def padded(arrays):
        larger = np.max([a.shape for a in arrays], axis=0)
        rows = [np.pad(a, [(0, n) for n in larger - a.shape]) for a in arrays]
        return np.concatenate(rows).transpose(0, 2, 3, 1)

    x, upstream, their_y, their_gx = (
        padded([golden[f"{name}{rank}"] for rank in (0, 1)])
        for name in ("x", "upstream", "y", "gx")
    )
    valid = padded([np.ones_like(golden[f"x{rank}"], bool)[:, :1] for rank in (0, 1)])
    variables = {
        "params": {"scale": jnp.asarray(golden["weight"]), "bias": jnp.asarray(golden["bias"])},
        "batch_stats": {"mean": jnp.asarray(golden["running_mean"]),
                        "var": jnp.asarray(golden["running_var"])},
    }  # fmt: skip
    layer = BatchNorm(train=True, sync=sync)
    y, gx, gp, stats = on_devices(2, layer, variables, x, valid, upstream)
    keep = np.broadcast_to(valid, y.shape)
    np.testing.assert_allclose(y[keep], their_y[keep], atol=1e-5)
    np.testing.assert_allclose(gx[keep], their_gx[keep], atol=1e-5)
    np.testing.assert_allclose(gp["scale"], golden["gw0"] + golden["gw1"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gp["bias"], golden["gb0"] + golden["gb1"], rtol=1e-4, atol=1e-5)
    count = valid.sum()
    for rank in (0, 1):
        np.testing.assert_allclose(stats["mean"][rank], golden[f"rm{rank}"], rtol=1e-5)
        before = 0.9 * golden["running_var"]
        biased = (stats["var"][rank] - before) * (count - 1) / count + before
        np.testing.assert_allclose(biased, golden[f"rv{rank}"], rtol=1e-5)


def test_one_collective():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
    layer, variables = BatchNorm(train=True, sync="elements"), variables_of(6)
    run = jax.shard_map(
        lambda x: apply(layer, variables, x)[0], mesh=mesh, in_specs=P("data"),
        out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    text = jax.jit(run).lower(jnp.ones(SHAPE)).as_text()
    assert text.count("all_reduce") == 1


def test_group_norm_leaves_out_cells_outside_the_extent():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 6, 64)).astype(np.float32)
    layer = GroupNorm(num_groups=32, epsilon=1e-5)
    variables = layer.init(jax.random.key(0), x)
    inside = np.zeros((1, 4, 6, 1), bool)
    inside[:, :3, :4] = True
    whole = layer.apply(variables, x, jnp.asarray(inside))[:, :3, :4]
    cropped = layer.apply(variables, x[:, :3, :4])
    np.testing.assert_allclose(whole, cropped, atol=1e-5)
    groups = np.float64(cropped).reshape(2, 12, 32, 2)
    np.testing.assert_allclose(groups.mean(axis=(1, 3)), 0.0, atol=1e-6)


def test_layer_norm_is_of_each_pixel():
    x = np.random.default_rng(0).normal(2.0, 3.0, (1, 2, 3, 16)).astype(np.float32)
    layer = make_norm("layer", train=True, dtype=jnp.float32)()
    assert isinstance(layer, LayerNorm) and layer.epsilon == 1e-6
    y = layer.apply(layer.init(jax.random.key(0), x), x, jnp.zeros((1, 2, 3, 1), bool))
    exact = np.float64(x)
    expected = exact - exact.mean(axis=-1, keepdims=True)
    expected /= np.sqrt(exact.var(axis=-1, keepdims=True) + 1e-6)
    assert_within(y, expected, rounding_bound(200, 10.0))


@pytest.mark.parametrize("norm", ["frozen", "none"])
def test_a_frozen_norm_is_folded_and_none_is_none(norm):
    layer = None
    if norm == "frozen":
        stats = {"scale": jnp.array([2.0]), "bias": jnp.array([3.0])}
        layer = make_norm(norm, train=True, dtype=jnp.float32)().bind({"batch_stats": stats})

    def convolve(affine):
        return jnp.zeros(1) if affine is None else 10 * affine[0] + affine[1]

    assert normalize(convolve, layer, 1) == (0.0 if layer is None else 23.0)


@pytest.mark.parametrize("norm", ["affine", "batch", "sync_batch", "naive_sync_batch"])
def test_stored_statistics_are_folded_in_prediction(norm):
    """A convolution with its kernel scaled gives what batch norm makes of the plain one."""
    rng = np.random.default_rng(3)
    x, kernel = rng.normal(size=(2, 5, 7, 4)), rng.normal(size=(4, 6))
    variables = variables_of(6, seed=4)
    layer = make_norm(norm, train=False, dtype=jnp.float32, eps=1e-3)().bind(variables)
    shape = layer.init(jax.random.key(0), 6)
    assert jax.tree.map(jnp.shape, shape) == jax.tree.map(jnp.shape, variables)

    def convolve(affine):
        assert affine is not None, "a pass over the output"
        return x @ (kernel * np.float64(affine[0])) + np.float64(affine[1])

    params, stats = (jax.tree.map(np.float64, tree) for tree in variables.values())
    expected = (x @ kernel - stats["mean"]) / np.sqrt(stats["var"] + 1e-3)
    expected = expected * params["scale"] + params["bias"]
    assert_within(normalize(convolve, layer, 6), expected, rounding_bound(8, 40.0))


@pytest.mark.parametrize("norm", ["frozen", "affine", "batch", "layer"])
def test_a_module_of_ones_own_calls_a_norm_on_its_output(norm):
    """Not by `normalize`, which folds it into the convolution."""
    x = np.random.default_rng(5).normal(2.0, 3.0, (2, 3, 5, 4)).astype(np.float32)
    layer = make_norm(norm, train=False, dtype=jnp.bfloat16)()
    variables = layer.init(jax.random.key(0), x)
    if norm != "layer":
        variables = jax.tree.map(lambda v: v + jnp.arange(1.0, 5.0), variables)
    y = layer.apply(variables, x)

    def convolve(affine):
        return x if affine is None else x * np.asarray(affine[0]) + np.asarray(affine[1])

    expected = normalize(convolve, layer.bind(variables), 4)
    assert y.shape == x.shape and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jnp.asarray(expected, jnp.bfloat16))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="norm is 'instance', expected one of"):
        make_norm("instance", train=True, dtype=jnp.float32)
    with pytest.raises(ValueError, match="norm_eps is 0, expected above 0"):
        make_norm("batch", train=True, dtype=jnp.float32, eps=0)
