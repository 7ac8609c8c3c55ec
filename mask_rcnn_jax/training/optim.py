"""Learning-rate schedule and optimizer of a recipe, composed from optax."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import optax
from flax import linen as nn

from mask_rcnn_jax import parts
from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer and schedule: linear warm-up, then steps down.

    The peak rate follows the global batch (linear scaling rule, Goyal et al., 2017).

    Attributes:
        name: the optimizer.
        learning_rate: peak at a global batch of `reference_batch`.
        reference_batch: the global batch that `learning_rate` is for.
        warmup_until: the fraction of `train.steps` at which the peak is reached.
        warmup_factor: the first step's share of the peak.
        decay_at: fractions of `train.steps` from which on the rate is lower.
        decay_levels: the share of the peak from each of `decay_at` on.
        momentum: of "sgd".
        rate_in_velocity: multiply what enters the velocity by the rate, so that a lower rate only
            slows what is added from there on (Keras, NVIDIA's TensorFlow 2 example), instead of
            the velocity itself (torch). Of "sgd".
        weight_decay: added to the gradients, times the parameter.
        decay_on: names of the parameters that decay, of "kernel", "bias" and a norm's "scale".
        bias_lr_factor: how much faster biases learn.
        clip_norm: largest global norm of the gradients; 0 leaves them alone.
        accumulate_steps: microbatches that a device takes its images in, in a step.
        loss_scale: initial loss scale, with `train.precision` "float16".
        loss_scale_growth: finite steps until the loss scale doubles.
        loss_scale_floor: an overflow at this loss scale stops the run.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.02
    reference_batch: int = 16
    warmup_until: float = 1000 / 90_000
    warmup_factor: float = 1e-3
    decay_at: tuple[float, ...] = (60 / 90, 80 / 90)
    decay_levels: tuple[float, ...] = (0.1, 0.01)
    momentum: float = 0.9
    rate_in_velocity: bool = False
    weight_decay: float = 1e-4
    decay_on: tuple[str, ...] = ("kernel", "bias")
    bias_lr_factor: float = 1.0
    clip_norm: float = 0.0
    accumulate_steps: int = 1
    loss_scale: float = 2.0**16
    loss_scale_growth: int = 2000
    loss_scale_floor: float = 1.0

    def __post_init__(self):
        if not 0 <= self.warmup_until <= min(self.decay_at, default=1.0):
            raise ValueError(
                f"warmup_until is {self.warmup_until}, expected a fraction of the steps from 0 to "
                f"the first of optim.decay_at {self.decay_at}"
            )
        rising = list(self.decay_at) == sorted(self.decay_at)
        if len(self.decay_at) != len(self.decay_levels) or not rising:
            raise ValueError(
                f"decay_at is {self.decay_at} and optim.decay_levels {self.decay_levels}, expected "
                "rising fractions of the steps and a level for each"
            )
        unknown = set(self.decay_on) - {"kernel", "bias", "scale"}
        if unknown:
            raise ValueError(f"decay_on has {unknown}, expected 'kernel', 'bias' or 'scale'")
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

    It is inside a dynamic loss scale if the precision is float16.
    """
    options = optim_options(config)
    optimizer = make_optimizer(options, schedule) if optimizer is None else optimizer
    tx = train_only(optimizer, params, getattr(backbone, "frozen", ()))
    if config["train"]["precision"] != "float16":
        return tx
    scale, growth = options.loss_scale, options.loss_scale_growth
    return dynamic_loss_scale(tx, scale, growth, options.loss_scale_floor)


def make_schedule(config: Mapping[str, Any]) -> optax.Schedule:
    """The learning rate as a function of the step."""
    options, train = optim_options(config), config["train"]
    peak = options.learning_rate * train["batch_size"] / options.reference_batch
    boundaries = [round(at * train["steps"]) for at in (options.warmup_until, *options.decay_at)]
    warmup = optax.linear_schedule(peak * options.warmup_factor, peak, max(boundaries[0], 1))
    levels = [optax.constant_schedule(peak * level) for level in (1.0, *options.decay_levels)]
    return optax.join_schedules([warmup, *levels], boundaries)


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


def make_optimizer(options: OptimOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    """SGD with momentum, or AdamW."""
    decay = optax.add_decayed_weights(options.weight_decay, mask=_named(options.decay_on))
    bias_rate = optax.masked(optax.scale(options.bias_lr_factor), _named(("bias",)))
    rate, velocity = optax.scale_by_learning_rate(schedule), optax.trace(options.momentum)
    if options.name == "sgd":
        last = [rate, velocity] if options.rate_in_velocity else [velocity, rate]
        chain = [decay, bias_rate, *last]
    else:
        chain = [optax.scale_by_adam(), decay, bias_rate, rate]
    if options.clip_norm > 0:
        chain.insert(0, optax.clip_by_global_norm(options.clip_norm))
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


def _named(names: tuple[str, ...]) -> Callable:
    """Which parameters have one of these names: a function from a tree to one of bools."""
    return partial(jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key in names)


def _is_frozen(path, prefixes: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to a layer of the backbone with one of these prefixes."""
    module, layer = (key.key for key in path[:2])
    starts = (layer == prefix or layer.startswith(f"{prefix}_") for prefix in prefixes)
    return module == "backbone" and any(starts)
