"""Low-rank adapters, `optim.lora`: against dense gradients, in a run, and what they cost."""

import shutil
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax import parts
from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.vit import ViT
from mask_rcnn_jax.ops.low_rank import merge, start_adapter
from mask_rcnn_jax.recipe.averaging import WeightAverage
from mask_rcnn_jax.recipe.optimizer import LowRank, Optimizer, OptimOptions
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.low_rank import abstract_adapters, add_adapters
from mask_rcnn_jax.training.optim import make_optimizer, train_only
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.weights.restore import load_variables
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint, read_arrays
from tests.helpers import any_variables, assert_tree_close, tiny_batch
from tests.test_trunks import vitdet
from tests.training.own_run import sets, small_config
from tests.training.test_distill import Trunk
from tests.training.test_distill import small_config as smallest_config

LORA = "kernel_lora"
PARAMS = {
    "backbone": {
        "patch_embed": {"kernel": np.ones((2, 3, 3, 6), np.float32), "bias": np.ones(6)},
        "block0": {
            "norm1": {"scale": np.ones(6)},
            "attn": {"qkv": {"kernel": np.ones((6, 18), np.float32), "bias": np.ones(18)}},
            "fc1": {"kernel": np.ones((6, 24), np.float32), "bias": np.ones(24)},
        },
    },
    "box_head": {"cls_score": {"kernel": np.ones((6, 3), np.float32), "bias": np.ones(3)}},
}


def names(tree) -> set[str]:
    return set(flatten_dict(tree, sep="/"))


def test_an_adapter_starts_as_nothing():
    """Uniform numbers within one over the root of the inputs, and zeros: the kernel is the same."""
    options = LowRank(2, 8.0, ("backbone/*/attn", "backbone/patch_*"))
    params = add_adapters(PARAMS, options, ViT(), seed=3)
    places = "backbone/block0/attn/qkv", "backbone/patch_embed"
    added = {f"{place}/{LORA}/{part}" for place in places for part in ("a", "b", "scale")}
    assert names(params) - names(PARAMS) == added
    merged = merge(params)
    assert names(merged) == names(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, merged, PARAMS)
    found = params["backbone"]["patch_embed"][LORA]
    assert found["a"].shape == (2, 3, 3, 2) and found["b"].shape == (2, 6)
    assert found["scale"] == 4 and not np.any(found["b"])
    many = start_adapter((500, 7), 40, 1.0, jax.random.key(0))["a"]
    bound = 1 / np.sqrt(500)
    assert abs(many.mean()) < bound / 50 and bound * 0.99 < abs(many).max() <= bound
    again = add_adapters(PARAMS, replace(options, kernels=("backbone",)), ViT(), seed=3)
    assert np.any(again["backbone"]["block0"]["fc1"][LORA]["a"])
    assert add_adapters(PARAMS, LowRank(), ViT(), seed=3) is PARAMS


@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 4, 7)])
def test_a_kernel_has_the_product_in_it(shape):
    rng = np.random.default_rng(0)
    made = {"a": (*shape[:-1], 3), "b": (3, shape[-1])}
    lora = {name: rng.normal(size=size).astype(np.float32) for name, size in made.items()}
    kernel = rng.normal(size=shape).astype(np.float32)
    tree = {"layer": {"kernel": kernel, "bias": 1.0, LORA: lora | {"scale": np.float32(0.5)}}}
    expected = np.float64(kernel.reshape(-1, shape[-1]))
    expected += 0.5 * np.float64(lora["a"]).reshape(-1, 3) @ np.float64(lora["b"])
    merged = merge(tree)["layer"]
    assert merged.keys() == {"kernel", "bias"} and merged["bias"] == 1.0
    np.testing.assert_allclose(merged["kernel"].reshape(-1, shape[-1]), expected, atol=1e-5)


def test_gradients_of_an_adapter_are_those_of_its_kernel_projected():
    """d/da = scale G b' and d/db = scale a' G, with G of the kernel."""
    rng = np.random.default_rng(0)
    a, b, g = (rng.normal(size=size).astype(np.float32) for size in ((7, 2), (2, 5), (7, 5)))
    layer = {"kernel": jnp.zeros((7, 5)), LORA: {"a": a, "b": b, "scale": np.float32(3.0)}}
    gradient = jax.grad(lambda x: jnp.sum(merge({"x": x})["x"]["kernel"] * g))(layer)
    np.testing.assert_allclose(gradient[LORA]["a"], 3 * g @ b.T, atol=1e-4)
    np.testing.assert_allclose(gradient[LORA]["b"], 3 * a.T @ g, atol=1e-4)


KERNELS = ("backbone", "box_head/fc*")
FREEZE = ("backbone", "fpn", "*/bias")


def test_by_default_the_attention_of_a_transformer_is_adapted():
    model = build_model(vitdet().model)
    params = abstract_variables(model)["params"]
    found = abstract_adapters(params, LowRank(4), model.backbone)
    layers = {name.partition(f"/{LORA}")[0] for name in names(found) - names(params)}
    assert layers == {f"backbone/block{i}/attn/{n}" for i in range(3) for n in ("qkv", "proj")}
    assert found["backbone"]["block1"]["attn"]["qkv"][LORA]["b"].shape == (4, 96)


def with_random_b(params):
    """The same with adapters that have learned something."""
    rng = np.random.default_rng(1)

    def draw(path, x):
        is_b = [key.key for key in path][-2:] == [LORA, "b"]
        return jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype) if is_b else x

    return jax.tree_util.tree_map_with_path(draw, params)


@cache
def steps():
    """A step of plain SGD with adapters, and one of all parameters with the adapters in them."""
    wanted = as_recipe(smallest_config())
    model, mesh = build_model(wanted.model).clone(backbone=Trunk()), make_mesh()
    options = LowRank(2, 6.0, KERNELS)
    variables = any_variables(model, 0)
    params = with_random_b(add_adapters(variables["params"], options, Trunk(), seed=0))
    found = []
    for tree, freeze in ((params, FREEZE), (merge(params), ())):
        state, tx = {**variables, "params": tree}, train_only(optax.sgd(1.0), tree, (), freeze)
        step = make_train_step(
            model, tx, None, mesh, StepOptions(wanted.loss, 0, 0.0, 2, freeze=freeze)
        )
        state = replicate(TrainState.start(state, tx), mesh)
        before = jax.device_get(state.params)
        state, metrics = step(state, shard_batch(tiny_batch(4), mesh))
        found.append((before, jax.device_get(state), jax.device_get(metrics)))
    return found


@pytest.mark.slow
def test_gradients_of_a_step_are_the_dense_ones_projected():
    """d/da = scale G b' and d/db = scale a' G, with G of a step that trains the whole kernel; what
    is frozen has the same bits, and what has no adapter and is not frozen moves as without."""
    (before, state, metrics), (dense_before, dense_state, dense_metrics) = steps()
    after, dense = flatten_dict(state.params, sep="/"), flatten_dict(dense_before, sep="/")
    moved = {n: dense[n] - x for n, x in flatten_dict(dense_state.params, sep="/").items()}
    assert metrics["loss/total"] == pytest.approx(float(dense_metrics["loss/total"]), rel=1e-5)
    count = 0
    for name, old in flatten_dict(before, sep="/").items():
        layer, _, leaf = name.rpartition("/")
        if leaf in ("a", "b"):
            kernel = f"{layer.removesuffix(f'/{LORA}')}/kernel"
            gradient = moved[kernel].reshape(-1, moved[kernel].shape[-1])
            lora = {n: before_at(before, f"{layer}/{n}") for n in ("a", "b")}
            a = lora["a"].reshape(len(gradient), -1)
            expected = 3.0 * (gradient @ lora["b"].T if leaf == "a" else a.T @ gradient)
            scale = np.abs(expected).max()
            found = (old - after[name]).reshape(expected.shape)
            np.testing.assert_allclose(found, expected, atol=1e-4 * scale + 1e-7, err_msg=name)
            count += scale > 1e-5
        elif name.startswith(("backbone", "fpn", "box_head/fc")) or leaf == "bias":
            np.testing.assert_array_equal(after[name].view(np.int32), old.view(np.int32), name)
        elif leaf == "scale":
            assert after[name] == old == 3
        else:
            np.testing.assert_allclose(old - after[name], moved[name], atol=1e-6, err_msg=name)
    assert count >= 6


def before_at(tree, name: str):
    return flatten_dict(tree, sep="/")[name]


def test_the_state_has_nothing_for_what_is_frozen():
    """Moments of adapters and free parameters alone, and an average of the kernels as they act."""
    params = add_adapters(PARAMS, LowRank(2), ViT(), seed=0)
    options = OptimOptions(name="adamw", lora=LowRank(2), freeze=("backbone",))
    tx = train_only(make_optimizer(options, lambda _: 0.1, ViT()), params, (), options.freeze)
    state = TrainState.start({"params": params, "batch_stats": {}}, tx, WeightAverage(0.9))
    moments = sorted(np.shape(x) for x in jax.tree.leaves(state.opt_state) if np.ndim(x))
    assert moments == sorted(2 * [(6, 2), (2, 18), (6, 3), (3,)])
    jax.tree.map(np.testing.assert_array_equal, state.average["params"], PARAMS)


def test_adapters_decay_and_slow_down_as_their_kernels_do():
    params = with_random_b(add_adapters(PARAMS, LowRank(2, kernels=("*",)), ViT(), seed=0))
    options = Optimizer("sgd", momentum=0.0, weight_decay=0.5, layer_decay=0.5)
    tx = train_only(
        make_optimizer(options, lambda _: 1.0, ViT(depth=2, global_blocks=())), params, (), ("*",)
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = flatten_dict(tx.update(zeros, tx.init(params), params)[0], sep="/")
    layers = {"box_head/cls_score": 1, "backbone/block0/fc1": 1 / 4, "backbone/patch_embed": 1 / 8}
    for layer, rate in layers.items():
        for part in ("a", "b"):
            name = f"{layer}/{LORA}/{part}"
            np.testing.assert_allclose(updates[name], -0.5 * rate * before_at(params, name))
        assert not np.any(updates[f"{layer}/kernel"])
        assert not np.any(updates[f"{layer}/{LORA}/scale"])


def run_config():
    config = small_config()
    config.model.init_from = "random"
    config.optim.update(name="adamw", learning_rate=0.01, freeze=("backbone", "fpn"))
    config.optim.lora.update(rank=2, kernels=("backbone", "box_head/fc*"))
    config.train.ema_decay = 0.5
    config.eval.update(pictures=0, loss_images=0)
    return config


@pytest.mark.slow
def test_a_run_resumes_to_the_last_bit_and_gives_plain_parameters(tmp_path):
    run = partial(train, run_config(), tmp_path, **sets())
    state = jax.device_get(run())
    last = tmp_path / "checkpoints" / "6"
    saved, whole = (read_arrays(last, lambda tree: tree), load_checkpoint(tmp_path))
    first = read_arrays(tmp_path / "checkpoints" / "3", lambda tree: tree)["adapters"]
    assert names(saved["params"]) == names(whole["params"])  # orbax alone is enough
    kernel, lora = (saved["adapters"]["backbone"]["conv2"][name] for name in ("kernel", LORA))
    np.testing.assert_array_equal(kernel, first["backbone"]["conv2"]["kernel"])
    assert np.any(lora["b"]) and np.any(lora["a"] != first["backbone"]["conv2"][LORA]["a"])

    plain = names(abstract_variables(build_model(load_config(tmp_path).with_classes(4).model)))
    assert names(whole) == plain
    jax.tree.map(np.testing.assert_array_equal, whole["params"], state.evaluated["params"])
    raw = load_checkpoint(tmp_path, raw=True)["params"]
    expected = kernel + lora["scale"] * (lora["a"] @ lora["b"])
    np.testing.assert_allclose(raw["backbone"]["conv2"]["kernel"], expected, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, raw, state.variables["params"])
    taken = load_variables(tmp_path, load_config(tmp_path))
    assert_tree_close(taken["params"], whole["params"])

    shutil.rmtree(last)
    run()
    again = read_arrays(last, lambda tree: tree)
    jax.tree.map(np.testing.assert_array_equal, again, saved)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (("backbone", "backbone/*/atn"), r"has 'backbone/\*/atn', .* no kernel; did you mean"),
        (("zzz",), "which matches no kernel; expected names such as backbone, box_head"),
        (("*/bias",), "which matches no kernel"),
    ],
)
def test_a_pattern_that_adapts_nothing_is_refused(kernels, message):
    with pytest.raises(ValueError, match=f"^optim.lora.kernels {message}|{message}"):
        add_adapters(PARAMS, LowRank(2, kernels=kernels), ViT(), seed=0)


def test_a_kernel_in_a_frozen_stage_is_refused():
    params = {"backbone": {f"res{k}_0": {"conv1": {"kernel": np.ones((2, 3))}} for k in (2, 3)}}
    trunk = ResNet(frozen_stages=2)
    with pytest.raises(ValueError, match="names backbone/res2_0/conv1/kernel, which gets no grad"):
        add_adapters(params, LowRank(1, kernels=("backbone",)), trunk, seed=0)
    found = add_adapters(params, LowRank(1, kernels=("backbone/res3_*",)), trunk, seed=0)
    assert LORA in found["backbone"]["res3_0"]["conv1"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"lora": {"rank": -1}}, "optim.lora.rank is -1, expected at least 0"),
        ({"lora": {"alpha": 0.0}}, "optim.lora.alpha is 0.0, expected above 0"),
        ({"lora": {"kernels": ()}}, r"optim.lora.kernels is \(\), expected patterns"),
        ({"lora": {"rank": 8}, "group_lasso": 0.1}, "optim.group_lasso is 0.1, which pulls"),
    ],
)
def test_faulty_entries_are_named(entries, words):
    with pytest.raises(ValueError, match=words):
        parts.build(OptimOptions, entries, "optim")


@pytest.mark.slow
def test_a_step_with_adapters_of_a_frozen_trunk_costs_less():
    config = run_config()
    config.model.num_classes = 2
    config.optim.update(freeze=("backbone",))
    config.optim.lora.kernels = ("backbone/conv3",)
    adapted = inputs.train_flops(as_recipe(config))
    config.optim.update(freeze=())
    config.optim.lora.rank = 0
    assert adapted < inputs.train_flops(as_recipe(config))
