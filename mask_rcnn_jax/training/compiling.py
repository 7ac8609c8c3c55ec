"""Compile programs, and say which, and for how long."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

from mask_rcnn_jax import device
from mask_rcnn_jax.memory import return_free_memory
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training.step import TrainState, TrainStep


@contextmanager
def compiling(program: str, canvases: Collection[tuple[int, ...]]) -> Iterator[None]:
    """Log how long a program compiles for canvases (height, width), and return its memory."""
    texts = [f"{height} x {width}" for height, width in canvases]
    sizes = " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
    with console.lasting(f"compiling the {program} for images of {sizes}", "compiled"):
        yield
    device.log_kernels()
    return_free_memory()


def announce_compiling(
    program: str, run_batch: Callable[[dict, Any], Any]
) -> Callable[[dict, Any], Any]:
    """Return a jitted function of (variables, batch, or the views of one) that says when it
    compiles: at the first batch of each shape."""
    compiled = set()

    def run(variables: dict, batch: Any) -> Any:
        views = (batch,) if isinstance(batch, Batch) else batch
        shapes = tuple(view.images.shape for view in views)
        first = shapes not in compiled
        compiled.add(shapes)
        canvases = [shape[1:3] for shape in shapes]
        with device.traced_forms(), compiling(program, canvases) if first else nullcontext():
            return run_batch(variables, batch)

    return run


def compile_canvases(
    step: Any, state: TrainState, batches: Mapping[tuple[int, int], Batch], *teacher: Any
) -> TrainStep:
    """Compile a training step for several canvases, as many at the same time as there are cores.

    Args:
        step: from `make_train_step`.
        state: the first state.
        batches: per canvas (height, width) a batch of `jax.ShapeDtypeStruct` with shardings.
        teacher: a teacher's variables, if the step takes them.

    Returns:
        The step, which takes the program of a batch's canvas, and compiles for any other.
    """
    with device.traced_forms():
        lowered = {canvas: step.lower(state, batch, *teacher) for canvas, batch in batches.items()}
    # Processes that compile together must do so in the same order.
    at_once = min(len(lowered), max(2, os.cpu_count() or 1))  # each takes a core and memory
    threads = at_once if jax.process_count() == 1 else 1
    with ThreadPoolExecutor(threads) as pool:
        compiled = pool.map(lambda canvas: lowered[canvas].compile(), lowered)
        programs = dict(zip(lowered, compiled, strict=True))

    def run(state: TrainState, batch: Batch, *teacher: Any) -> tuple[TrainState, dict]:
        with device.traced_forms():
            return programs.get(batch.images.shape[1:3], step)(state, batch, *teacher)

    return run
