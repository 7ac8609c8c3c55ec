"""Schedule and optimiser of a recipe, put together from optax."""

import jax
import optax


def make_schedule(
    *,
    learning_rate: float,
    reference_batch: int,
    batch_size: int,
    steps: int,
    warmup_until: float,
    warmup_factor: float,
    decay_at: tuple[float, ...],
    decay_factor: float,
) -> optax.Schedule:
    """Linear warm-up, then steps down; the peak follows the global batch (linear scaling rule).

    learning_rate: peak at a global batch of `reference_batch`.
    warmup_until: the fraction of `steps` at which the peak is reached.
    warmup_factor: the first step's share of the peak.
    decay_at: fractions of `steps` after which the rate is multiplied by `decay_factor`.
    """
    peak = learning_rate * batch_size / reference_batch
    if not 0 <= warmup_until <= min(decay_at, default=1.0):
        raise ValueError(
            f"optim.warmup_until is {warmup_until}, expected a fraction of the steps from 0 to the "
            f"first of optim.decay_at {tuple(decay_at)}"
        )
    warmup_steps = round(warmup_until * steps)
    boundaries = {round(at * steps): decay_factor for at in decay_at}
    after = {at - warmup_steps: factor for at, factor in boundaries.items()}
    return optax.join_schedules(
        [
            optax.linear_schedule(peak * warmup_factor, peak, max(warmup_steps, 1)),
            optax.piecewise_constant_schedule(peak, after),
        ],
        [warmup_steps],
    )


def make_optimizer(
    schedule: optax.Schedule,
    params: dict,
    *,
    name: str,
    momentum: float,
    weight_decay: float,
    bias_lr_factor: float,
    clip_norm: float,
    frozen_stages: int,
) -> optax.GradientTransformation:
    """SGD with momentum, or AdamW, with decay on kernels only and without frozen parameters.

    The learning rate is applied before the velocity, as Keras and NVIDIA's TensorFlow recipe do:
    a lower rate then only slows what is added from there on.
    clip_norm: largest global norm of the gradients; 0 leaves them alone.
    """
    decay = optax.add_decayed_weights(weight_decay, mask=_kernels)
    bias_rate = optax.masked(optax.scale(bias_lr_factor), _biases)
    rate = optax.scale_by_learning_rate(schedule)
    if name == "sgd":
        chain = [decay, bias_rate, rate, optax.trace(momentum)]
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


def _kernels(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _biases(params):
    return jax.tree.map(lambda p: p.ndim <= 1, params)


def _is_frozen(path, frozen_stages: int) -> bool:
    """Whether a parameter belongs to the first `frozen_stages` of stem, res2, .. res5."""
    module, name = (key.key for key in path[:2])
    frozen = ["stem", "res2", "res3", "res4", "res5"][:frozen_stages]
    return module == "backbone" and name.split("_")[0] in frozen
