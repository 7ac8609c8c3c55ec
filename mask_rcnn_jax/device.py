"""What a command computes with, which it says at its start."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import jax
from absl import logging

from mask_rcnn_jax.models.build import AUTO_PRECISION, resolve_precision
from mask_rcnn_jax.ops import dispatch
from mask_rcnn_jax.platforms import traced_for
from mask_rcnn_jax.terminal import console
from pallas_kernels import probe, support

MEMORY = "kernels.json"  # in the folder of compiled programs

_said = ""  # the last line about kernels


@cache
def log_devices() -> None:
    """Log what JAX computes with, once.

    Raises ValueError on one of several hosts of a TPU that was started alone.
    """
    kinds = Counter(device.device_kind for device in jax.devices())
    where = ""
    if (hosts := jax.process_count()) > 1:
        if not jax.distributed.is_initialized():
            raise ValueError(
                f"this TPU belongs to {hosts} hosts, expected --coordinator_address=auto on each"
            )
        where = f" of {hosts} processes"
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    logging.info("computing on %s%s", devices, where)


def traced_forms() -> AbstractContextManager[None]:
    """Trace only what this process's devices compute, in programs that run on them.

    All forms where `jax.default_device` chooses another device, or the platform is not known.
    """
    known = {"cpu": "cpu", "tpu": "tpu"} | ({"gpu": "cuda"} if _is_nvidia() else {})
    config: Any = jax.config
    chosen = config.jax_default_device is not None
    return traced_for(None if chosen else known.get(jax.default_backend()))


def log_precision(precision: str, gather: Callable[[Any], list] = lambda value: [value]) -> None:
    """Log what `train.precision` "auto" stands for here.

    gather: returns what each of several processes has. Raises ValueError if they differ.
    """
    if precision != AUTO_PRECISION:
        return
    own = [resolve_precision(precision), jax.local_devices()[0].device_kind]
    logging.info("train.precision=auto is %s on %s", *own)
    first, *others = gather(own)
    for other in others:
        if other[0] != first[0]:
            raise ValueError(
                f"train.precision=auto is {' on '.join(first)} and {' on '.join(other)}, expected "
                "the same for all processes of a run: pass one, such as "
                "--config.train.precision=float16"
            )


def check_kernels(
    implementation: str, gather: Callable[[Any], list] = lambda value: [value]
) -> None:
    """Have ops take XLA's form where a kernel does not compile on this GPU.

    A compiler's error would end this process, so each kernel is compiled in another one first.

    Args:
        implementation: `train.implementation`; only "auto" has a choice.
        gather: returns what each of several processes has, which must make the same choice.
    """
    if implementation != "auto" or not _is_nvidia():
        return
    for reasons in gather(_failures()):
        support.refuse(reasons)


def _failures() -> dict[str, str]:
    config: Any = jax.config
    folder = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    memory = Path(folder) / MEMORY if folder and "://" not in folder else None
    ops = [op for op in support.KERNELS if not support.mosaic_unsupported(op)]
    ops = probe.untested(ops, memory)
    if not ops:
        return {}
    with console.lasting("trying to compile the GPU kernels", "tried"):
        return probe.failures(ops, memory)


def log_kernels() -> None:
    """Log which GPU kernels are in the programs traced so far, unless nothing has changed."""
    global _said
    line = dispatch.chosen_forms()
    if _is_nvidia() and line != _said:
        _said = line
        logging.info("%s", line)


def _is_nvidia() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return "rocm" not in jax.local_devices()[0].client.platform_version.lower()
