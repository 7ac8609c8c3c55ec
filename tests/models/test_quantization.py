"""Emulated int8: rounding and its gradient by hand, ranges in training, and a whole model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.exporting.quantize_jax import quantize_jax
from mask_rcnn_jax.models.build import BUILDERS, abstract_variables, build_model
from mask_rcnn_jax.models.conv import Conv, Dense, RoIConv, UpConv
from mask_rcnn_jax.models.quantization import (
    RANGE,
    STEPS,
    Quantization,
    fake_quantize,
    trained_ranges,
    without_ranges,
)
from mask_rcnn_jax.weights.convert import to_ours_flat
from mask_rcnn_jax.weights.pretrained import merge_into
from tests.helpers import any_variables, assert_finite_tree, drawn, tiny_batch, tiny_config
from tests.small_model import generated, predict_function, random_variables, small_config

INT8 = Quantization(int8=True, range_momentum=0.25)


def test_rounding_and_its_gradient_by_hand():
    x = jnp.array([0.4, -0.6, 2.5, -3.5, 126.7, 200.0, -1e30], jnp.float32)
    expected = [0.0, -1.0, 2.0, -4.0, 127.0, 127.0, -127.0]  # ties to even
    limit = jnp.float32(127.0)
    rounded, pull = jax.vjp(lambda x: fake_quantize(x, limit), x)
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(pull(jnp.ones(7))[0], [1, 1, 1, 1, 1, 0, 0])
    largest = jnp.array([127.0, -127.0, 1.2], jnp.float32)  # at the limit, as in each kernel
    np.testing.assert_array_equal(jax.grad(lambda x: fake_quantize(x, limit).sum())(largest), 1)
    half = fake_quantize(x[:5].astype(jnp.bfloat16), jnp.float32(63.5))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, [0.5, -0.5, 2.5, -3.5, 63.5])


@pytest.mark.parametrize("x", [[0.0, 0.0], [-1.5, 3.0]])
def test_a_range_of_zero_rounds_nothing(x):
    rounded, pull = jax.vjp(lambda x: fake_quantize(x, jnp.float32(0.0)), jnp.array(x))
    np.testing.assert_array_equal(rounded, x)
    np.testing.assert_array_equal(pull(jnp.ones(2))[0], [1, 1])


def oracle(x, limit, axis=None):
    """Round to int8 steps in float64; `axis` has a limit of its own for each index."""
    if axis is not None:
        axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
        limit = np.abs(x).max(axes, keepdims=True)
    step = np.float64(limit) / STEPS
    return np.clip(np.round(x / step), -STEPS, STEPS) * step


class Layers(nn.Module):
    """Each kind of layer; the first one is called twice."""

    @nn.compact
    def __call__(self, x, valid):
        conv = Conv(4, (1, 1), name="conv")
        scale = jnp.array([1.0, -2.0, 0.5, 3.0])
        y = conv(x, (scale, jnp.zeros(4))) + conv(3 * x, (scale, jnp.zeros(4)))
        rows = RoIConv(5, (3, 3), padding=1, name="rows")(x, valid)
        up = UpConv(2, jnp.float32, nn.initializers.lecun_normal(), name="up")(x, valid)
        init = nn.initializers.lecun_normal()
        dense = Dense(3, init, nn.initializers.zeros, name="dense")(x)
        last = Dense(3, init, nn.initializers.zeros, name="cls_score")(x)
        return y, rows, up, dense, last


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 4, 6)).astype(np.float32)
    valid = np.array([True, False, True])
    x[1] = 1e4  # unspecified, where a layer is told so
    with nn.intercept_methods(INT8.interceptor()):
        variables = jax.jit(Layers().init)(jax.random.key(1), x, valid)
    return x, valid, variables


@partial(jax.jit, static_argnames="train")
def call(variables, x, valid, *, train):
    mutable = ["batch_stats"] if train else []
    with nn.intercept_methods(INT8.interceptor()):
        return Layers().apply(variables, x, valid, mutable=mutable)


def test_ranges_follow_the_inputs_of_valid_rows(layers):
    x, valid, variables = layers
    assert set(trained_ranges(variables).values()) == {0.0}
    assert "cls_score" not in trained_ranges(variables)
    _, updated = call(variables, x, valid, train=True)
    first = trained_ranges(updated)
    largest, all_rows = np.abs(x[valid]).max(), np.abs(x).max()
    expected = {"conv": 3 * all_rows, "rows": largest, "up": largest, "dense": all_rows}
    assert first == pytest.approx(expected)
    _, updated = call({**variables, **updated}, x / 2, valid, train=True)
    moved = {name: value * (0.75 + 0.25 / 2) for name, value in expected.items()}
    assert trained_ranges(updated) == pytest.approx(moved)
    # Without a valid row, or in a black image, a range stays; 0 still means that none was seen.
    _, still = call({**variables, **updated}, 0 * x, np.zeros(3, bool), train=True)
    assert trained_ranges(still) == trained_ranges(updated)
    _, still = call(variables, 0 * x, np.zeros(3, bool), train=True)
    assert set(trained_ranges(still).values()) == {0.0}
    _, same = call({**variables, **updated}, 9 * x, valid, train=False)
    assert not same


def test_layers_equal_a_slow_int8(layers):
    x, valid, variables = layers
    x = x[valid]
    ranges = {name: 2.0 for name in ("conv", "rows", "up", "dense")}
    stats = {name: {RANGE: jnp.float32(limit)} for name, limit in ranges.items()}
    (y, rows, up, dense, last), _ = call(
        {**variables, "batch_stats": stats}, x, np.ones(2, bool), train=False
    )
    params = jax.tree.map(np.float64, variables["params"])
    kernel = oracle(params["conv"]["kernel"][0, 0] * [1.0, -2.0, 0.5, 3.0], 0, axis=-1)
    np.testing.assert_allclose(y, oracle(x, 2.0) @ kernel + oracle(3 * x, 2.0) @ kernel, atol=1e-4)
    np.testing.assert_allclose(
        dense, oracle(x, 2.0) @ oracle(params["dense"]["kernel"], 0, axis=-1), atol=1e-5
    )
    np.testing.assert_allclose(last, x @ params["cls_score"]["kernel"], atol=1e-5)
    kernel = oracle(params["up"]["kernel"], 0, axis=2)
    np.testing.assert_allclose(
        up, np.einsum("nhwc,abfc->nhwabf", oracle(x, 2.0), kernel), atol=1e-5
    )
    padded = np.pad(oracle(x, 2.0), ((0, 0), (1, 1), (1, 1), (0, 0)))
    kernel, expected = oracle(params["rows"]["kernel"], 0, axis=-1), 0.0
    for i in range(3):
        for j in range(3):
            expected = expected + padded[:, i : i + 2, j : j + 4] @ kernel[i, j]
    np.testing.assert_allclose(rows, expected, atol=1e-5)


@pytest.mark.slow
def test_a_model_predicts_as_the_exported_int8_program():
    config = small_config("coco", (64, 128))
    variables = random_variables(config)
    _, predict = predict_function(config)
    inputs = generated(config, [(64, 96)], (64, 128))
    rounding = small_config("coco", (64, 128), model__quantization__int8=True)
    _, predict_int8 = predict_function(rounding)
    # Some inputs are beyond their range.
    ranges = {path: 1.5 for path in trained_ranges(random_variables(rounding))}
    assert len(ranges) == 12 + 8 + 1 + 2 + 5
    stats = variables["batch_stats"]
    for path in ranges:
        node = stats
        for name in path.split("/"):
            node = node.setdefault(name, {})
        node[RANGE] = jnp.float32(1.5)
    exported, packed = quantize_jax(predict, variables, ranges, inputs[0])
    exported, int8, floats = (
        partial(jax.jit(function), given)
        for function, given in ((exported, packed), (predict_int8, variables), (predict, variables))
    )
    threshold = config.eval.score_threshold
    # Rarely, another order of products rounds a value to the next step.
    found = compare(exported, int8, inputs, threshold)
    assert found.detections >= 3 and found.unmatched == 0, found
    assert found.boxes < 0.1 and found.scores < 0.01, found
    clipped = compare(exported, floats, inputs, threshold)
    assert clipped.unmatched or clipped.boxes > 1, clipped


@pytest.mark.slow
def test_training_measures_ranges_and_a_float_run_is_taken_up():
    config = tiny_config()
    config.model.mask_head.num_convs = 1
    start = any_variables(build_model(config.model))
    config.model.quantization.int8 = True
    model = build_model(config.model)
    assert model.trains_batch_stats
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract_variables(model))
    variables, report = merge_into(zeros, start, source="a run")
    assert any(RANGE in line for line in report)
    batch = jax.tree.map(jnp.asarray, tiny_batch(2))

    @jax.jit
    def step(variables):
        def loss(params):
            options = dict(train=True, method="forward_train", mutable=["batch_stats"])
            outputs, updated = model.apply({**variables, "params": params}, batch, None, **options)
            return jnp.mean(outputs.class_logits**2), updated

        return jax.grad(loss, has_aux=True)(variables["params"])

    grads, updated = step(variables)
    ranges = trained_ranges(updated)
    assert len(ranges) == 25 and min(ranges.values()) > 0
    mean, std = (np.array(config.model.input[name]) for name in ("mean", "std"))
    pixels = np.abs((np.float32(batch.images) - mean) / std).max()
    assert ranges["backbone/stem_conv"] == pytest.approx(pixels, rel=1e-5)
    # A second step rounds, and its gradients still reach the first trained layer.
    grads, _ = step({**variables, **updated})
    kernel = grads["backbone"]["stem_conv"]["kernel"]
    assert np.isfinite(kernel).all() and np.abs(kernel).max() > 0
    assert without_ranges(updated["batch_stats"]) == start["batch_stats"]

    # The weights start a float model, which has no ranges, and are the same from a file.
    trained = {**start, **updated}
    names = to_ours_flat(trained)
    again = unflatten_dict({name: array + 0 for name, array in names.items()}, sep="/")
    jax.tree.map(np.testing.assert_array_equal, again, trained)
    merged, report = merge_into(start, trained, source="a run")
    jax.tree.map(np.testing.assert_array_equal, merged, start)
    assert any(RANGE in line and "not in the model, left out" in line for line in report)
    with pytest.raises(ValueError, match="unexpected 25 .*input_range is of model.quantization"):
        merge_into(start, trained, unused=())


SWIN = dict(depths=(1, 2, 1, 1), width=8, num_heads=(1, 2, 2, 4), windows=(3, 3, 2, 2))
DINO = dict(width=16, depth=2, num_heads=2, layer_scale=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("swin", SWIN),
        ("swin_v2", SWIN),
        ("dino", DINO | dict(gated=True)),
        ("dino", DINO | dict(table_side=3)),
    ],
)
def test_every_layer_of_a_transformer_is_rounded_as_in_the_exported_program(name, entries):
    trunk = BUILDERS["backbone"][name](**entries, remat=True)
    images = np.random.default_rng(0).normal(size=(2, 64, 96, 3)).astype(np.float32)
    start = drawn(trunk, images, train=False)

    @jax.jit
    def step(variables):
        def loss(params):
            options = dict(train=True, mutable=["batch_stats"])
            with nn.intercept_methods(INT8.interceptor()):
                maps, updated = trunk.apply({**variables, "params": params}, images, **options)
            return sum(jnp.sum(x * x) for x in maps), updated

        return jax.grad(loss, has_aux=True)(variables["params"])

    kernels = {path[:-1] for path in flatten_dict(start["params"]) if path[-1] == "kernel"}
    _, updated = step(start)
    ranges = trained_ranges(updated)
    assert set(ranges) == set(map("/".join, kernels)) and min(ranges.values()) > 0
    grads, _ = step({**start, **updated})  # which rounds
    assert_finite_tree(grads)
    assert all(np.any(grad) for grad in jax.tree.leaves(grads))

    def predict(variables, images, _):
        return trunk.apply(variables, images, train=False)

    def emulated(variables, *inputs):
        with nn.intercept_methods(INT8.interceptor()):
            return predict(variables, *inputs)

    program, packed = quantize_jax(predict, start, ranges, (images, None))
    functions = (emulated, {**start, **updated}), (program, packed), (predict, start)
    found = (jax.jit(function)(variables, images, None) for function, variables in functions)
    for int8, exported, exact in zip(*found, strict=True):
        lost = np.median(np.abs(int8 - exact))
        assert lost > 1e-2 * np.median(np.abs(exact))
        # Rarely, another order of products rounds a value to the next step, and changes those of
        # its window.
        assert np.median(np.abs(int8 - exported)) < 0.1 * lost


def test_wrong_momentum_is_named():
    config = tiny_config()
    config.model.quantization.range_momentum = 0.0
    with pytest.raises(ValueError, match="model.quantization.*range_momentum is 0.0, expected"):
        build_model(config.model)
