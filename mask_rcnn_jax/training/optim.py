"""Optimizer of a recipe, composed from optax."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import optax
from flax import linen as nn

from mask_rcnn_jax import parts
from mask_rcnn_jax.pruning.channel_groups import Group, find_groups
from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale
from mask_rcnn_jax.training.schedule import Schedule
from mask_rcnn_jax.training.sparsity import add_group_lasso

DECAY_ON = ("kernel", "bias", "scale", "kernel_bias", "other")


@dataclass(frozen=True)
class Optimizer:
    """SGD with momentum or AdamW, and what reaches it.

    Attributes:
        name: the optimizer.
        momentum: for "sgd".
        rate_in_velocity: multiply what enters the velocity by the rate, so that a lower rate only
            slows what is added from there on (Keras, NVIDIA's TensorFlow 2 example), instead of
            the velocity itself (torch). Of "sgd".
        betas: ("adamw") decay rates for the averages: gradient, and its square.
        eps: ("adamw") added to the average square's root.
        weight_decay: times the parameter, added to the gradient ("sgd") or to the step before it
            is multiplied by the rate (decoupled, "adamw").
        decay_on: names of the parameters that decay, of "kernel", "bias", a norm's "scale",
            "kernel_bias" (a bias beside a kernel, not a norm's) and "other" for all else, such as
            tables of positions; a backbone may exempt layers.
        bias_lr_factor: how much faster biases learn.
        layer_decay: the rate of a layer is times this to the power of its distance from the heads;
            1 treats all alike. Other values need a backbone that numbers its layers.
        clip_value: largest absolute value of a gradient's entry; 0 leaves them alone.
        clip_norm: largest global norm of the gradients; 0 leaves them alone.
        group_lasso: times a channel's filters divided by their norm, added as `weight_decay` is, so
            that hardly used channels fall to 0 and `prune` finds them; 0 leaves them alone.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    rate_in_velocity: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    decay_on: tuple[str, ...] = ("kernel", "bias")
    bias_lr_factor: float = 1.0
    layer_decay: float = 1.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    group_lasso: float = 0.0

    def __post_init__(self):
        if unknown := set(self.decay_on) - set(DECAY_ON):
            raise ValueError(f"decay_on has {unknown}, expected names of {DECAY_ON}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}, expected two numbers from 0 to below 1")
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}, expected above 0")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay is {self.layer_decay}, expected above 0 and up to 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}, expected from 0 to below 1")
        for name in ("clip_value", "clip_norm", "group_lasso"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 0")


@dataclass(frozen=True)
class OptimOptions(Schedule, Optimizer):
    """Schedule, optimizer, and how a step is divided and scaled.

    Attributes:
        accumulate_steps: microbatches that a device takes its images in, in a step.
        loss_scale: initial loss scale, with `train.precision` "float16".
        loss_scale_growth: finite steps until the loss scale doubles.
        loss_scale_floor: an overflow at this loss scale stops the run.
    """

    accumulate_steps: int = 1
    loss_scale: float = 2.0**16
    loss_scale_growth: int = 2000
    loss_scale_floor: float = 1.0

    def __post_init__(self):
        Schedule.__post_init__(self)
        Optimizer.__post_init__(self)
        if not 0 < self.loss_scale_floor <= self.loss_scale:
            raise ValueError(
                f"loss_scale is {self.loss_scale} and optim.loss_scale_floor "
                f"{self.loss_scale_floor}, expected a floor above 0 and not above the scale"
            )
        if self.loss_scale_growth < 1:
            raise ValueError(f"loss_scale_growth is {self.loss_scale_growth}, expected at least 1")


def optim_options(config: Mapping[str, Any]) -> OptimOptions:
    """The options of a config. Raises ValueError, naming the entry, for a wrong value."""
    return parts.build(OptimOptions, config["optim"], "optim")


def build_optimizer(
    config: Mapping[str, Any],
    schedule: optax.Schedule | None,
    params: Mapping[str, Any],
    backbone: nn.Module,
    optimizer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a recipe, or the given one, for the parameters that are not frozen.

    It is inside a dynamic loss scale if the precision is float16. Raises ValueError, naming the
    entry, for a `layer_decay` or `exempt_from_decay` that does not fit the backbone.
    """
    options = optim_options(config)
    if optimizer is None:
        _check_exempt(getattr(backbone, "exempt_from_decay", ()), params)
        groups: dict[str, Group] = {}
        if options.group_lasso > 0:
            groups = find_groups({**config["model"], "num_classes": 1})  # the number is no matter
        optimizer = make_optimizer(options, schedule, backbone, groups)
    tx = train_only(optimizer, params, getattr(backbone, "frozen", ()))
    if config["train"]["precision"] != "float16":
        return tx
    scale, growth = options.loss_scale, options.loss_scale_growth
    return dynamic_loss_scale(tx, scale, growth, options.loss_scale_floor)


def make_schedule(config: Mapping[str, Any]) -> optax.Schedule:
    """Return the learning rate by step."""
    train = config["train"]
    return optim_options(config).rates(train["batch_size"], train["steps"])


def count_microbatches(config: Mapping[str, Any], batch_size: int, devices: int) -> int:
    """Number of microbatches in which each device takes its share of the global batch.

    Raises ValueError, naming the entries of the config, where the batch cannot be divided so.
    """
    accumulate_steps = config["optim"]["accumulate_steps"]
    images_per_device = config["train"]["images_per_device"]
    if accumulate_steps < 1:
        raise ValueError(f"optim.accumulate_steps is {accumulate_steps}, expected at least 1")
    if images_per_device < 0:
        raise ValueError(f"train.images_per_device is {images_per_device}, expected at least 0")
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

    A backbone may have `exempt_from_decay`, names of layers or parameters at any depth of it, and,
    for `layer_decay`, `num_layers` and `layer_id(name)`: the number of its layer of that name, from
    0 to `num_layers`, counted from the input, or one more for the rate of the heads.

    Raises ValueError, naming the entry, for a `layer_decay` of a backbone without these.
    """
    exempt = getattr(backbone, "exempt_from_decay", ())
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


def train_only(
    tx: optax.GradientTransformation, params: Mapping[str, Any], frozen: tuple[str, ...]
) -> optax.GradientTransformation:
    """An optimizer that leaves frozen layers of the backbone as they are.

    frozen: prefixes of their names.
    """
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if _is_frozen(path, frozen) else "trained", params
    )
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def injected_rate(opt_state: optax.OptState) -> jax.Array | None:
    """The learning rate that `optax.inject_hyperparams` keeps in a state; None without one."""
    found = optax.tree.get_all_with_path(opt_state, "hyperparams")
    rates = [values["learning_rate"] for _, values in found if "learning_rate" in values]
    return rates[0] if len(rates) == 1 else None


def _mask(choose: Callable[[tuple[str, ...], set], bool]) -> Callable:
    """A function from a tree to one of bools: `choose(names, all)`, by the names on the way to a
    leaf and those of all leaves."""

    def mask(tree):
        paths = {_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        return jax.tree_util.tree_map_with_path(lambda path, _: choose(_names(path), paths), tree)

    return mask


def _names(path) -> tuple[str, ...]:
    return tuple(key.key for key in path)


def _decays(
    names: tuple[str, ...], paths: set, *, decay_on: tuple[str, ...], exempt: tuple[str, ...]
) -> bool:
    *layer, name = names
    if layer[:1] == ["backbone"] and not set(exempt).isdisjoint(names[1:]):
        return False
    if name == "bias" and "kernel_bias" in decay_on and (*layer, "kernel") in paths:
        return True
    return (name if name in ("kernel", "bias", "scale") else "other") in decay_on


def _check_exempt(exempt: tuple[str, ...], params: Mapping[str, Any]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params["backbone"]) if exempt else ()
    unknown = set(exempt).difference(*(_names(path) for path, _ in leaves))
    if unknown:
        raise ValueError(
            f"model.backbone.exempt_from_decay has {min(unknown)!r}, expected names of the "
            "backbone's layers or parameters"
        )


def _layer_rates(decay: float, backbone: Any) -> optax.GradientTransformation:
    """Multiply the updates of each layer by the decay to the power of its distance from the heads,
    which are one beyond the backbone's last layer (Clark et al., ELECTRA, 2020)."""
    if not (hasattr(backbone, "num_layers") and hasattr(backbone, "layer_id")):
        raise ValueError(
            f"optim.layer_decay is {decay}, expected 1 with the backbone "
            f"{type(backbone).__name__}, which has no num_layers and layer_id(name)"
        )
    heads = backbone.num_layers + 1

    def scaled(path, update: jax.Array) -> jax.Array:
        names = _names(path)
        number = backbone.layer_id(names[1]) if names[0] == "backbone" else heads
        return update * decay ** (heads - number)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))


def _is_frozen(path, prefixes: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to a layer of the backbone with one of these prefixes."""
    module, layer = (key.key for key in path[:2])
    starts = (layer == prefix or layer.startswith(f"{prefix}_") for prefix in prefixes)
    return module == "backbone" and any(starts)
