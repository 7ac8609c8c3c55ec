"""About how much memory a training step takes, known before it is compiled."""

import math
import shlex
from typing import Any

import jax
from absl import logging
from jax.extend import core
from jax.sharding import Mesh

from mask_rcnn_jax.device import traced_forms
from mask_rcnn_jax.memory import available_bytes
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training.optim import count_microbatches


def log_memory(
    recipe: Recipe, step: Any, arguments: tuple, canvas: tuple[int, int], mesh: Mesh
) -> None:
    """Log what a step on a canvas (height, width) is expected to take of a device's memory, and, if
    that is too much, what would fit. Devices of a CPU share its memory.

    arguments: of the step; those but the batch are in memory.
    """
    device = mesh.local_devices[0]
    unused = available_bytes(device)
    if unused is None or not hasattr(step, "trace"):  # which only jitted steps have
        return
    devices = len(mesh.local_devices) if device.platform == "cpu" else 1
    fixed, peak = (devices * size for size in step_bytes(step, *arguments))
    free = unused + fixed  # which is there already
    text = f"a step on {canvas[0]} x {canvas[1]} is expected to take {peak / 1e9:.1f} GB"
    if peak <= free:
        logging.info("%s, %.1f GB are free for it", text, free / 1e9)
        return
    train = recipe.train
    given = recipe.optim.accumulate_steps, train.images_per_device, train.batch_size
    at_once = train.batch_size // mesh.size // count_microbatches(*given, mesh.size)
    advice = as_flags(what_fits(recipe.data.image_size, at_once, fixed, peak, free))
    if "images_per_device" in advice and recipe.optim.accumulate_steps > 1:
        advice += "; it sets optim.accumulate_steps, which must be 1 then"
    logging.warning("%s, but %.1f GB are free for it: %s", text, free / 1e9, advice)


def what_fits(
    size: tuple[int, int], at_once: int, fixed: int, peak: int, free: int
) -> dict[str, Any]:
    """Entries with which a step fits into `free` bytes; none if only a smaller model does.

    Args:
        size: data.image_size.
        at_once: images that a device computes at once.
        fixed: bytes that do not depend on the images.
        peak: bytes of a step as it is.
    """
    each = (peak - fixed) / at_once
    fewer = min(int((free - fixed) / each), at_once - 1)
    while fewer > 0 and at_once % fewer:
        fewer -= 1
    if fewer > 0:
        return {"train.images_per_device": fewer}
    scale = math.sqrt(max(free - fixed, 0) / each)
    height, width = (int(side * scale) // 64 * 64 for side in size)
    if min(height, width) < 64:
        return {}
    return {"data.image_size": (height, width), "train.images_per_device": 1}


def as_flags(entries: dict[str, Any]) -> str:
    """What `what_fits` found, as advice."""
    if not entries:
        return "take a machine with more memory, or a smaller model"
    flags = [f"--config.{name}={shlex.quote(str(value))}" for name, value in entries.items()]
    return f"{' '.join(flags)} would fit"


def step_bytes(step: Any, *arguments: Any) -> tuple[int, int]:
    """Bytes of a device: of the state and other arguments but the batch, and at most in a step.

    The jitted step is traced for its arguments (state, batch, ..), as it would be anyway, and what
    each operation leaves is counted until its last use. XLA fuses operations and adds buffers of
    its own: its plans differ by up to a third.
    """
    with traced_forms():
        jaxpr = step.trace(*arguments).jaxpr.jaxpr
    fixed = sum(_bytes(leaf) for leaf in jax.tree.leaves((arguments[0], arguments[2:])))
    return fixed, fixed + _peak(jaxpr)


def _peak(jaxpr: core.Jaxpr) -> int:
    """The most bytes that are alive at once, without those of its own arguments."""
    last_use = {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, core.Var)}
    for index in reversed(range(len(jaxpr.eqns))):
        for variable in _variables(jaxpr.eqns[index]):
            last_use.setdefault(variable, index)
    made, alive, most = set[core.Var](), 0, 0
    for index, equation in enumerate(jaxpr.eqns):
        out = sum(_bytes(v.aval) for v in equation.outvars)
        inside = max(map(_peak, _programs(equation)), default=0)
        most = max(most, alive + max(out, inside))
        kept = [v for v in equation.outvars if last_use.get(v, -1) > index]
        made.update(kept)
        alive += sum(_bytes(v.aval) for v in kept)
        ended = {v for v in _variables(equation) if last_use[v] == index} & made
        alive -= sum(_bytes(v.aval) for v in ended)
    return most


def _variables(equation: core.JaxprEqn) -> list[core.Var]:
    return [v for v in equation.invars if isinstance(v, core.Var)]


def _programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Those that an equation runs, such as the body of a loop."""
    values = (v if isinstance(v, list | tuple) else [v] for v in equation.params.values())
    found = (getattr(one, "jaxpr", one) for value in values for one in value)
    return [one for one in found if isinstance(one, core.Jaxpr)]


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize if hasattr(array, "dtype") else 0
