"""Schedule and optimizer against numbers worked by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.recipe.optimizer import OptimOptions
from mask_rcnn_jax.training.checks import beyond_the_end, check_recipe
from mask_rcnn_jax.training.optim import (
    build_optimizer,
    injected_rate,
    make_optimizer,
    rate_in_state,
    train_only,
)
from tests.helpers import assert_tree_close

SCHEDULE = OptimOptions(
    learning_rate=0.04,
    reference_batch=32,
    warmup_until=0.1,
    warmup_factor=0.1,
    decay_at=(0.6, 0.8),
    decay_levels=(0.1, 0.01),
)
OPTIMIZER = OptimOptions(rate_in_velocity=True, weight_decay=0.0, decay_on=("kernel",))


def rate_at(step, batch_size=32, **changes):
    return float(replace(SCHEDULE, **changes).rates(batch_size, steps=100)(step))


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.004), (5, 0.022), (10, 0.04), (59, 0.04), (60, 0.004), (79, 0.004), (80, 0.0004),
     (99, 0.0004), (500, 0.0004)],
)  # fmt: skip
def test_warm_up_and_steps_down(step, rate):
    assert rate_at(step) == pytest.approx(rate, rel=1e-5)


def test_the_rate_follows_the_global_batch():
    assert rate_at(20, batch_size=8) == pytest.approx(0.01)


def test_no_warm_up_starts_at_the_peak():
    assert rate_at(0, warmup_until=0.0) == pytest.approx(0.04)


def test_a_warm_up_longer_than_the_first_decay_is_refused():
    with pytest.raises(ValueError, match="warmup_until is 0.7"):
        replace(SCHEDULE, warmup_until=0.7)


def test_steps_given_as_fractions_are_noticed():
    def line(**changes):
        recipe = load_config("quickstart:long", {f"optim.{k}": v for k, v in changes.items()})
        return beyond_the_end(recipe)

    assert "optim.decay_at is (6000, 8000)" in line(decay_at=(6000, 8000))
    assert "the learning rate never falls" in line(decay_at=(1.0, 1.5))
    assert "the warm-up never ends" in line(decay_at=(6000, 8000), warmup_until=500)
    assert not line() and not line(decay_at=(0.9, 1.5))
    assert not line(decay_at=(6000, 8000), schedule="cosine")


def params():
    kernel = {"kernel": jnp.ones((1, 1))}
    return {
        "backbone": {
            "stem_conv": kernel,
            "res3_0": kernel,
            "res3_norm": {"scale": jnp.ones(1), "bias": jnp.zeros(1)},
        },  # fmt: skip
        "box_head": {"fc1": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}},
    }


def run(steps=1, schedule=lambda step: 0.1, frozen=(), **options):
    """Parameters after `steps` with all gradients one."""
    return updated(make_optimizer(replace(OPTIMIZER, **options), schedule), steps, frozen)


def updated(tx, steps, frozen):
    values = params()
    tx = train_only(tx, values, frozen)
    state = tx.init(values)
    for _ in range(steps):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, values), state, values)
        values = jax.tree.map(jnp.add, values, updates)
    return values


def test_the_rate_goes_into_the_velocity():
    """v1 = -0.1, v2 = 0.9 v1 - 0.01: a tenth of the rate leaves nine tenths of the first move."""
    head = run(2, schedule=lambda step: jnp.where(step == 0, 0.1, 0.01))["box_head"]["fc1"]
    np.testing.assert_allclose(head["kernel"], 1 - 0.1 - (0.09 + 0.01), rtol=1e-6)


def test_or_it_multiplies_the_velocity():
    """v1 = 1, v2 = 1.9: torch's form, where a lower rate slows the whole move."""
    schedule = lambda step: jnp.where(step == 0, 0.1, 0.01)  # noqa: E731
    head = run(2, schedule=schedule, rate_in_velocity=False)["box_head"]["fc1"]
    np.testing.assert_allclose(head["kernel"], 1 - 0.1 - 0.01 * 1.9, rtol=1e-6)


@pytest.mark.parametrize("decay_on", [("kernel",), ("kernel", "bias"), ("kernel", "scale")])
def test_decay_reaches_what_is_named(decay_on):
    values = run(weight_decay=0.5, decay_on=decay_on)
    leaves = {**values["box_head"]["fc1"], "scale": values["backbone"]["res3_norm"]["scale"]}
    for name, leaf in leaves.items():
        expected = 1 - 0.1 * (1.5 if name in decay_on else 1.0)
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=name)


def test_levels_need_a_place_each():
    with pytest.raises(ValueError, match="optim.decay_levels"):
        replace(SCHEDULE, decay_levels=(0.1,))


def test_decay_on_an_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match="decay_on has {'gamma'}"):
        run(decay_on=("gamma",))


def test_biases_have_their_own_rate():
    head = run(bias_lr_factor=2.0)["box_head"]["fc1"]
    np.testing.assert_allclose(head["bias"], 0.8, rtol=1e-6)
    np.testing.assert_allclose(head["kernel"], 0.9, rtol=1e-6)


def test_frozen_stages_stay_and_do_not_decay():
    values = run(3, frozen=("stem", "res2"), weight_decay=0.5)
    np.testing.assert_array_equal(values["backbone"]["stem_conv"]["kernel"], 1.0)
    assert float(values["backbone"]["res3_0"]["kernel"][0, 0]) < 1.0


def test_any_optimizer_leaves_frozen_stages_alone():
    """Lion moves by the rate whatever the gradient is; weight decay would move everything."""
    values = updated(optax.lion(0.1, weight_decay=0.5), 2, frozen=("stem", "res3"))
    np.testing.assert_array_equal(values["backbone"]["res3_0"]["kernel"], 1.0)
    np.testing.assert_array_equal(values["backbone"]["res3_norm"]["bias"], 0.0)
    after_one = 1 - 0.1 * (1 + 0.5)
    expected = after_one - 0.1 * (1 + 0.5 * after_one)
    np.testing.assert_allclose(values["box_head"]["fc1"]["kernel"], expected, rtol=1e-6)


def test_an_injected_rate_is_found_whatever_is_around_it():
    values = params()
    schedule = optax.linear_schedule(0.5, 0.0, 10)
    for inner, rate in ((0.25, 0.25), (schedule, 0.4)):
        tx = optax.chain(
            optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(inner)
        )
        tx = train_only(tx, values, ("stem",))
        state = tx.init(values)
        for _ in range(3):
            _, state = tx.update(values, state, values)
        assert float(injected_rate(state)) == pytest.approx(rate)
    assert injected_rate(optax.adamw(0.1).init(values)) is None
    assert injected_rate(optax.inject_hyperparams(optax.clip)(1.0).init(values)) is None


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_with_the_rate_in_the_state_runs_with_other_rates_share_a_program(name):
    """And the parameters are those of the recipe's own optimizer."""
    programs, values = [], params()
    for rate in (0.005, 0.02):
        entries = {"train.steps": 40, "train.epochs": 0.0, "optim.name": name}
        recipe = as_recipe(load_config("finetune", entries | {"optim.learning_rate": rate}))
        own, given = make_optimizer(recipe.optim, recipe.schedule()), rate_in_state(recipe)
        expected, state = updated(own, 4, ()), given.init(values)
        assert float(injected_rate(state)) == pytest.approx(rate)
        assert_tree_close(updated(given, 4, ()), expected, rtol=1e-6)
        programs.append(jax.jit(given.update).lower(values, state, values).as_text())
    assert programs[0] == programs[1]


def test_the_rate_in_the_state_needs_the_number_of_steps():
    with pytest.raises(ValueError, match="train.epochs is 10, expected 0, and train.steps set"):
        rate_in_state(as_recipe(load_config("finetune")))


def test_gradients_are_clipped_by_their_global_norm():
    """Ten gradients of one have norm sqrt(10); clipped to 1 each moves by 0.1 / sqrt(10)."""
    head = run(clip_norm=1.0)["box_head"]["fc1"]
    np.testing.assert_allclose(head["kernel"], 1 - 0.1 / np.sqrt(10), rtol=1e-5)


def test_gradients_are_clipped_by_their_value():
    head = run(clip_value=0.25)["box_head"]["fc1"]
    np.testing.assert_allclose(head["kernel"], 1 - 0.1 * 0.25, rtol=1e-6)


def test_values_are_clipped_before_the_norm():
    """Ten gradients of a quarter have norm sqrt(10) / 4, which is above a half."""
    head = run(clip_value=0.25, clip_norm=0.5)["box_head"]["fc1"]
    np.testing.assert_allclose(head["kernel"], 1 - 0.1 * 0.5 / np.sqrt(10), rtol=1e-5)


def slow_adamw(gradients, rates, betas, eps, decay, value=1.0):
    """Loshchilov and Hutter (2019), algorithm 2, for one parameter."""
    first = second = 0.0
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        mean, square = first / (1 - betas[0] ** t), second / (1 - betas[1] ** t)
        value -= rate * (mean / (np.sqrt(square) + eps) + decay * value)
    return value


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.5, 0.9), 0.1)])
@pytest.mark.parametrize("decay_on", [("kernel",), ("kernel", "bias")])
def test_adamw_is_the_paper_s(betas, eps, decay_on):
    gradients, rates = (1.0, -0.5, 2.0), (0.1, 0.05, 0.2)
    options = dict(name="adamw", betas=betas, eps=eps, weight_decay=0.3, decay_on=decay_on)
    tx = make_optimizer(replace(OPTIMIZER, **options), lambda step: jnp.array(rates)[step])
    values = {"head": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    state = tx.init(values)
    for gradient in gradients:
        updates, state = tx.update(optax.tree.full_like(values, gradient), state, values)
        values = jax.tree.map(jnp.add, values, updates)
    for name, value in values["head"].items():
        decay = 0.3 if name in decay_on else 0.0
        expected = slow_adamw(gradients, rates, betas, eps, decay)
        np.testing.assert_allclose(value, expected, rtol=2e-6, err_msg=name)


class Trunk(nn.Module):
    """A transformer's names: a table of positions, two blocks, and a norm behind them."""

    num_layers = 2
    exempt_from_decay = ("norm1", "pos_embed")

    def layer_id(self, name: str) -> int:
        return {"pos_embed": 0, "block0": 1, "block1": 2, "last": 3}[name]


def trunk_params():
    norm = {"scale": jnp.ones(1), "bias": jnp.ones(1)}
    block = {"norm1": norm, "attn": {"rel_pos": jnp.ones(2), "proj": {"kernel": jnp.ones(2)}}}
    trunk = {"pos_embed": jnp.ones(3), "block0": block, "block1": block, "last": norm}
    return {"backbone": trunk, "fpn": {"norm1": norm}}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_rates_of_layers_fall_towards_the_input(name):
    """All else is one beyond the last layer; decay goes with the rate."""
    decay = dict(layer_decay=0.5, weight_decay=0.5, decay_on=("kernel", "bias", "scale", "other"))
    options = replace(OPTIMIZER, name=name, rate_in_velocity=False, **decay)
    tx, values = make_optimizer(options, lambda step: 0.1, Trunk()), trunk_params()
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, values), tx.init(values), values)
    trunk = updates["backbone"]
    np.testing.assert_allclose(trunk["pos_embed"], -0.1 / 8, rtol=1e-5)
    np.testing.assert_allclose(trunk["block0"]["norm1"]["scale"], -0.1 / 4, rtol=1e-5)
    np.testing.assert_allclose(trunk["block0"]["attn"]["rel_pos"], -0.15 / 4, rtol=1e-5)
    np.testing.assert_allclose(trunk["block1"]["attn"]["proj"]["kernel"], -0.15 / 2, rtol=1e-5)
    np.testing.assert_allclose(trunk["last"]["bias"], -0.15, rtol=1e-5)
    np.testing.assert_allclose(updates["fpn"]["norm1"]["scale"], -0.15, rtol=1e-5)


@pytest.mark.parametrize("decay_on", [("kernel",), ("other",), ("kernel", "bias", "scale")])
def test_other_names_decay_where_named(decay_on):
    options = replace(OPTIMIZER, weight_decay=0.5, decay_on=decay_on)
    tx, values = make_optimizer(options, lambda step: 0.1, Trunk()), trunk_params()
    trunk = tx.update(values, tx.init(values), values)[0]["backbone"]
    attention = trunk["block0"]["attn"]
    decays = lambda kind: -0.1 * (1.5 if kind in decay_on else 1.0)  # noqa: E731
    np.testing.assert_allclose(attention["rel_pos"], decays("other"), rtol=1e-6)
    np.testing.assert_allclose(attention["proj"]["kernel"], decays("kernel"), rtol=1e-6)
    np.testing.assert_allclose(trunk["last"]["scale"], decays("scale"), rtol=1e-6)
    np.testing.assert_allclose(trunk["block0"]["norm1"]["bias"], -0.1, rtol=1e-6)


def test_biases_of_layers_may_decay_without_those_of_norms():
    """As in detectron2's longer recipes."""
    values = run(weight_decay=0.5, decay_on=("kernel", "kernel_bias"), frozen=("stem",))
    np.testing.assert_allclose(values["box_head"]["fc1"]["bias"], 1 - 0.15, rtol=1e-6)
    np.testing.assert_allclose(values["box_head"]["fc1"]["kernel"], 1 - 0.15, rtol=1e-6)
    np.testing.assert_allclose(values["backbone"]["res3_norm"]["bias"], -0.1, rtol=1e-6)
    np.testing.assert_allclose(values["backbone"]["res3_norm"]["scale"], 0.9, rtol=1e-6)


def test_the_factors_of_vitdet_are_detectron2_s():
    """.7 to the 13th for the embeddings of twelve blocks, 1 for the pyramid."""

    class ViT(Trunk):
        num_layers = 12

    values = {"backbone": {"pos_embed": jnp.ones(1), "block0": {"kernel": jnp.ones(1)}}}
    tx = make_optimizer(replace(OPTIMIZER, layer_decay=0.7), lambda step: 1.0, ViT())
    factors = tx.update(values, tx.init(values), values)[0]["backbone"]
    np.testing.assert_allclose(-factors["pos_embed"], 0.00969, rtol=1e-3)
    np.testing.assert_allclose(-factors["block0"]["kernel"], 0.0138, rtol=5e-3)


@pytest.mark.parametrize("optimizer", [None, optax.sgd(0.1)])
def test_exempt_names_are_of_the_backbone(optimizer):
    class Other(Trunk):
        exempt_from_decay = ("pos_embed", "norm_1")

    recipe = replace(load_config("coco"), optim=OPTIMIZER)
    given = recipe, lambda step: 0.1, trunk_params()
    build_optimizer(*given, Trunk(), optimizer)
    if optimizer is not None:
        build_optimizer(*given, Other(), optimizer)
        return
    message = "^model.backbone.exempt_from_decay has 'norm_1', expected names"
    with pytest.raises(ValueError, match=message):
        build_optimizer(*given, Other())


def test_a_backbone_without_numbers_of_layers_has_one_rate():
    message = "optim.layer_decay is 0.9, expected 1 with the backbone ResNet"
    with pytest.raises(ValueError, match=message):
        make_optimizer(replace(OPTIMIZER, layer_decay=0.9), lambda step: 0.1, ResNet())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\), expected two numbers from 0"),
        ({"eps": 0.0}, "eps is 0.0, expected above 0"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0, expected above 0 and up to 1"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5"),
        ({"clip_value": -1.0}, "clip_value is -1.0, expected at least 0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0, expected at least 0"),
        ({"momentum": 5.0}, "momentum is 5.0, expected from 0 to below 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"decay_on": ("gamma",)}, "decay_on has {'gamma'}, expected"),
    ],
)
def test_what_no_optimizer_takes_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(OPTIMIZER, **options)


def test_adamw_moves_by_the_rate():
    head = run(name="adamw")["box_head"]["fc1"]
    np.testing.assert_allclose(head["kernel"], 0.9, rtol=1e-5)


def microbatches(batch, devices, steps, each):
    entries = {"optim.accumulate_steps": steps, "train.images_per_device": each}
    return check_recipe(load_config("coco", entries | {"train.batch_size": batch}), devices, None)


@pytest.mark.parametrize(
    ("batch", "devices", "steps", "each", "parts"),
    [(8, 8, 1, 0, 1), (8, 2, 4, 0, 4), (8, 2, 1, 0, 1), (8, 2, 1, 1, 4), (8, 8, 1, 1, 1),
     (8, 1, 1, 2, 4)],
)  # fmt: skip
def test_a_batch_is_divided_among_devices_and_parts(batch, devices, steps, each, parts):
    assert microbatches(batch, devices, steps, each) == parts


@pytest.mark.parametrize(
    ("batch", "devices", "steps", "each", "message"),
    [
        (6, 4, 1, 0, "train.batch_size is 6, expected a multiple of the 4 devices$"),
        (0, 1, 1, 0, "train.batch_size is 0"),
        (8, 2, 0, 0, "optim.accumulate_steps is 0, expected at least 1"),
        (8, 2, 1, -1, "train.images_per_device is -1, expected at least 0"),
        (8, 2, 3, 0, "the 2 devices times optim.accumulate_steps=3"),
        (8, 2, 1, 3, "the 2 devices times train.images_per_device=3"),
        (8, 2, 4, 1, "optim.accumulate_steps 4; the first sets the second"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(batch, devices, steps, each, message):
    with pytest.raises(ValueError, match=message):
        microbatches(batch, devices, steps, each)
