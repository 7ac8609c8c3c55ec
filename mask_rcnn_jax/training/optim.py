"""Schedule and optimiser of a recipe, put together from optax."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale

SCHEDULE_ENTRIES = (
    "learning_rate", "reference_batch", "warmup_until", "warmup_factor", "decay_at", "decay_levels",
)  # fmt: skip
OPTIMIZER_ENTRIES = (
    "name", "momentum", "rate_in_velocity", "weight_decay", "decay_on", "bias_lr_factor",
    "clip_norm",
)  # fmt: skip


def schedule_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `make_schedule` out of a recipe."""
    entries = {name: config["optim"][name] for name in SCHEDULE_ENTRIES}
    train = config["train"]
    return {"batch_size": train["batch_size"], "steps": train["steps"], **entries}


def build_optimizer(
    config: Mapping[str, Any], schedule: optax.Schedule, params: Mapping[str, Any]
) -> optax.GradientTransformation:
    """The optimiser of a recipe, inside a dynamic loss scale if the precision is float16."""
    optim = config["optim"]
    entries = {name: optim[name] for name in OPTIMIZER_ENTRIES}
    frozen_stages = config["model"]["frozen_stages"]
    tx = make_optimizer(schedule, params, frozen_stages=frozen_stages, **entries)
    if config["train"]["precision"] != "float16":
        return tx
    return dynamic_loss_scale(
        tx,
        init_scale=optim["loss_scale"],
        growth_interval=optim["loss_scale_growth"],
        floor=optim["loss_scale_floor"],
    )


def make_schedule(
    *,
    learning_rate: float,
    reference_batch: int,
    batch_size: int,
    steps: int,
    warmup_until: float,
    warmup_factor: float,
    decay_at: tuple[float, ...],
    decay_levels: tuple[float, ...],
) -> optax.Schedule:
    """Linear warm-up, then steps down; the peak follows the global batch (linear scaling rule).

    learning_rate: peak at a global batch of `reference_batch`.
    warmup_until: the fraction of `steps` at which the peak is reached.
    warmup_factor: the first step's share of the peak.
    decay_at, decay_levels: from these fractions of `steps` on the rate is that share of the peak.
    """
    peak = learning_rate * batch_size / reference_batch
    if not 0 <= warmup_until <= min(decay_at, default=1.0):
        raise ValueError(
            f"optim.warmup_until is {warmup_until}, expected a fraction of the steps from 0 to the "
            f"first of optim.decay_at {tuple(decay_at)}"
        )
    if len(decay_at) != len(decay_levels) or list(decay_at) != sorted(decay_at):
        raise ValueError(
            f"optim.decay_at is {tuple(decay_at)} and optim.decay_levels {tuple(decay_levels)}, "
            "expected rising fractions of the steps and a level for each"
        )
    boundaries = [round(at * steps) for at in (warmup_until, *decay_at)]
    warmup = optax.linear_schedule(peak * warmup_factor, peak, max(boundaries[0], 1))
    levels = [optax.constant_schedule(peak * level) for level in (1.0, *decay_levels)]
    return optax.join_schedules([warmup, *levels], boundaries)


def parts_of_batch(
    batch_size: int, devices: int, *, accumulate_steps: int, images_per_device: int
) -> int:
    """In how many parts each device takes its share of the global batch.

    images_per_device: the images of one part, or 0 for `accumulate_steps` parts.
    Raises ValueError, naming the entries of the config, where the batch cannot be divided so.
    """
    if accumulate_steps < 1:
        raise ValueError(f"optim.accumulate_steps is {accumulate_steps}, expected at least 1")
    if images_per_device < 0:
        raise ValueError(f"train.images_per_device is {images_per_device}, expected at least 0")
    parts, divisor = accumulate_steps, devices * accumulate_steps
    share = f"the {devices} devices"
    if images_per_device:
        if accumulate_steps != 1:
            raise ValueError(
                f"train.images_per_device is {images_per_device} and optim.accumulate_steps "
                f"{accumulate_steps}; the first sets the second, which must be left at 1"
            )
        share += f" times train.images_per_device={images_per_device}"
        divisor = devices * images_per_device
        parts = batch_size // divisor
    elif accumulate_steps > 1:
        share += f" times optim.accumulate_steps={accumulate_steps}"
    if batch_size < 1 or batch_size % divisor:
        raise ValueError(f"train.batch_size is {batch_size}, expected a multiple of {share}")
    return parts


def make_optimizer(
    schedule: optax.Schedule,
    params: dict,
    *,
    name: str,
    momentum: float,
    rate_in_velocity: bool,
    weight_decay: float,
    decay_on: tuple[str, ...],
    bias_lr_factor: float,
    clip_norm: float,
    frozen_stages: int,
) -> optax.GradientTransformation:
    """SGD with momentum, or AdamW, without frozen parameters.

    rate_in_velocity: SGD multiplies what enters the velocity by the learning rate (Keras, and
        NVIDIA's TensorFlow 2 recipe: a lower rate only slows what is added from there on), or else
        the velocity itself (torch).
    decay_on: names of the parameters that decay, of "kernel", "bias" and a norm's "scale".
    bias_lr_factor: how much faster biases learn.
    clip_norm: largest global norm of the gradients; 0 leaves them alone.
    """
    unknown = set(decay_on) - {"kernel", "bias", "scale"}
    if unknown:
        raise ValueError(f"optim.decay_on has {unknown}, expected 'kernel', 'bias' or 'scale'")
    decay = optax.add_decayed_weights(weight_decay, mask=lambda tree: _named(tree, decay_on))
    bias_rate = optax.masked(optax.scale(bias_lr_factor), lambda tree: _named(tree, ("bias",)))
    rate, velocity = optax.scale_by_learning_rate(schedule), optax.trace(momentum)
    if name == "sgd":
        chain = [decay, bias_rate, *([rate, velocity] if rate_in_velocity else [velocity, rate])]
    elif name == "adamw":
        chain = [optax.scale_by_adam(), decay, bias_rate, rate]
    else:
        raise ValueError(f"optim.name is {name!r}, expected 'sgd' or 'adamw'")
    if clip_norm > 0:
        chain.insert(0, optax.clip_by_global_norm(clip_norm))
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if _is_frozen(path, frozen_stages) else "trained", params
    )
    return optax.partition({"trained": optax.chain(*chain), "frozen": optax.set_to_zero()}, labels)


def _named(params, names: tuple[str, ...]):
    """Which parameters have one of these names, as a tree of bools."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)


def _is_frozen(path, frozen_stages: int) -> bool:
    """Whether a parameter belongs to the first `frozen_stages` of stem, res2, .. res5."""
    module, name = (key.key for key in path[:2])
    frozen = ["stem", "res2", "res3", "res4", "res5"][:frozen_stages]
    return module == "backbone" and name.split("_")[0] in frozen
