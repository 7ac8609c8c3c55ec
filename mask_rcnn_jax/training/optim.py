"""Optimizer of a recipe, composed from optax."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import optax
from flax import linen as nn

from mask_rcnn_jax.models.build import build_model, resolve_precision
from mask_rcnn_jax.models.protocols import BackboneLike, ability
from mask_rcnn_jax.ops.low_rank import LORA
from mask_rcnn_jax.pruning.channel_groups import Group, find_groups
from mask_rcnn_jax.recipe.optimizer import Optimizer
from mask_rcnn_jax.training.freezing import check_freeze, frozen_leaves, names_of
from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale
from mask_rcnn_jax.training.sparsity import add_group_lasso

if TYPE_CHECKING:  # brings in all that reads images
    from mask_rcnn_jax.recipe.recipe import Recipe


def build_optimizer(
    recipe: "Recipe",
    schedule: optax.Schedule | None,
    params: Mapping[str, Any],
    backbone: nn.Module,
    optimizer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a recipe, or the given one, for the parameters that are not frozen.

    It is inside a dynamic loss scale if the precision is float16. Raises ValueError, naming the
    entry, for a `layer_decay` or `exempt_from_decay` that does not fit the backbone, and for a
    pattern of `freeze` that no parameter matches.
    """
    options = recipe.optim
    if optimizer is None:
        _check_exempt(ability(backbone, BackboneLike, "exempt_from_decay"), params)
        optimizer = make_optimizer(options, schedule, backbone, _lasso_groups(recipe))
    check_freeze(options.freeze, params)
    frozen = ability(backbone, BackboneLike, "frozen")
    tx = train_only(optimizer, params, frozen, options.freeze)
    if resolve_precision(recipe.train.precision) != "float16":
        return tx
    scale, growth = options.loss_scale, options.loss_scale_growth
    return dynamic_loss_scale(tx, scale, growth, options.loss_scale_floor)


def count_microbatches(
    accumulate_steps: int, images_per_device: int, batch_size: int, devices: int
) -> int:
    """Number of microbatches in which each device takes its share of the global batch.

    Raises ValueError, naming the entries of the recipe, where the batch cannot be divided so.
    """
    microbatches, divisor = accumulate_steps, devices * accumulate_steps
    share = f"the {devices} devices"
    if images_per_device:
        if accumulate_steps != 1:
            raise ValueError(
                f"train.images_per_device is {images_per_device} and optim.accumulate_steps "
                f"{accumulate_steps}; the first sets the second, which must be left at 1"
            )
        share += f" times train.images_per_device={images_per_device}"
        divisor = devices * images_per_device
        microbatches = batch_size // divisor
    elif accumulate_steps > 1:
        share += f" times optim.accumulate_steps={accumulate_steps}"
    if batch_size < 1 or batch_size % divisor:
        raise ValueError(f"train.batch_size is {batch_size}, expected a multiple of {share}")
    return microbatches


def make_optimizer(
    options: Optimizer,
    schedule: optax.Schedule,
    backbone: nn.Module | None = None,
    groups: Mapping[str, Group] | None = None,
) -> optax.GradientTransformation:
    """SGD with momentum, or AdamW.

    groups: channels for `group_lasso`, from `pruning.channel_groups.find_groups`.

    Raises ValueError, naming the entry, for a `layer_decay` of a backbone without `num_layers` and
    `layer_id`, see `models.protocols.BackboneLike`.
    """
    exempt = ability(backbone, BackboneLike, "exempt_from_decay")
    decays = partial(_decays, decay_on=options.decay_on, exempt=exempt)
    decay = optax.add_decayed_weights(options.weight_decay, mask=_mask(decays))
    is_bias = _mask(lambda names, _: names[-1] == "bias")
    rates = [optax.masked(optax.scale(options.bias_lr_factor), is_bias)]
    if options.layer_decay != 1:
        rates.append(_layer_rates(options.layer_decay, backbone))
    rate, velocity = optax.scale_by_learning_rate(schedule), optax.trace(options.momentum)
    shrinking = [decay]
    if options.group_lasso > 0:
        shrinking.append(add_group_lasso(options.group_lasso, groups or {}))
    if options.name == "sgd":
        last = [rate, velocity] if options.rate_in_velocity else [velocity, rate]
        chain = [*shrinking, *rates, *last]
    else:
        chain = [optax.scale_by_adam(*options.betas, options.eps), *shrinking, *rates, rate]
    if options.clip_norm > 0:
        chain.insert(0, optax.clip_by_global_norm(options.clip_norm))
    if options.clip_value > 0:
        chain.insert(0, optax.clip(options.clip_value))
    return optax.chain(*chain)


def rate_in_state(recipe: "Recipe") -> optax.GradientTransformation:
    """The optimizer of a recipe with the learning rate in its state, for `train(optimizer=..)`.

    Runs that differ in `optim.learning_rate` alone share a compiled step then. The updates are
    those of the recipe but for rounding; the metric `lr` is the peak at the reference batch.

    Raises ValueError if the recipe has epochs: the schedule needs the number of steps.
    """
    if recipe.train.epochs:
        raise ValueError(
            f"train.epochs is {recipe.train.epochs:g}, expected 0, and train.steps set"
        )
    options = replace(recipe.optim, learning_rate=1.0)
    schedule = options.rates(recipe.train.batch_size, recipe.train.steps)
    backbone = build_model(replace(recipe.model, num_classes=1)).backbone

    def scaled(learning_rate: jax.Array) -> optax.GradientTransformation:
        at_one = make_optimizer(options, schedule, backbone, _lasso_groups(recipe))
        return optax.chain(at_one, optax.scale(learning_rate))

    return optax.inject_hyperparams(scaled)(learning_rate=recipe.optim.learning_rate)


def _lasso_groups(recipe: "Recipe") -> dict[str, Group]:
    if recipe.optim.group_lasso <= 0:
        return {}
    return find_groups(replace(recipe.model, num_classes=1))  # the number is no matter


def train_only(
    tx: optax.GradientTransformation,
    params: Mapping[str, Any],
    frozen: tuple[str, ...],
    freeze: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    """An optimizer that leaves frozen layers of the backbone as they are, what `freeze` names, and
    kernels with adapters.

    frozen: prefixes of the layers' names. freeze: see `recipe.optimizer.Optimizer`.
    """
    leaves = frozen_leaves(params, freeze, frozen)
    labels = jax.tree.map(lambda is_frozen: "frozen" if is_frozen else "trained", leaves)
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def injected_rate(opt_state: optax.OptState) -> jax.Array | None:
    """The learning rate that `optax.inject_hyperparams` keeps in a state; None without one."""
    found = optax.tree.get_all_with_path(opt_state, "hyperparams")
    rates = [values["learning_rate"] for _, values in found if "learning_rate" in values]
    return rates[0] if len(rates) == 1 else None


def _mask(choose: Callable[[tuple[str, ...], set], bool]) -> Callable:
    """A function from a tree to one of bools: `choose(names, all)`, by the names on the way to a
    leaf and those of all leaves, frozen ones among them."""

    def mask(tree):
        every = jax.tree_util.tree_leaves_with_path(tree, lambda x: isinstance(x, optax.MaskedNode))
        paths = {names_of(path) for path, _ in every}
        return jax.tree_util.tree_map_with_path(lambda path, _: choose(names_of(path), paths), tree)

    return mask


def _decays(
    names: tuple[str, ...], paths: set, *, decay_on: tuple[str, ...], exempt: tuple[str, ...]
) -> bool:
    *layer, name = names
    if layer[-1:] == [LORA]:
        name = "kernel"
    if layer[:1] == ["backbone"] and not set(exempt).isdisjoint(names[1:]):
        return False
    if name == "bias" and "kernel_bias" in decay_on and (*layer, "kernel") in paths:
        return True
    return (name if name in ("kernel", "bias", "scale") else "other") in decay_on


def _check_exempt(exempt: tuple[str, ...], params: Mapping[str, Any]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params["backbone"]) if exempt else ()
    unknown = set(exempt).difference(*(names_of(path) for path, _ in leaves))
    if unknown:
        raise ValueError(
            f"model.backbone.exempt_from_decay has {min(unknown)!r}, expected names of the "
            "backbone's layers or parameters"
        )


def _layer_rates(decay: float, backbone: Any) -> optax.GradientTransformation:
    """Multiply the updates of each layer by the decay to the power of its distance from the heads,
    which are one beyond the backbone's last layer (Clark et al., ELECTRA, 2020)."""
    num_layers, layer_id = (ability(backbone, BackboneLike, n) for n in ("num_layers", "layer_id"))
    if num_layers is None or layer_id is None:
        raise ValueError(
            f"optim.layer_decay is {decay}, expected 1 with the backbone "
            f"{type(backbone).__name__}, which has no num_layers and layer_id(name)"
        )
    heads = num_layers + 1

    def scaled(path, update: jax.Array) -> jax.Array:
        names = names_of(path)
        number = layer_id(names[1]) if names[0] == "backbone" else heads
        return update * decay ** (heads - number)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))
