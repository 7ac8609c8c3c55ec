"""How fast the training step and the prediction run, without a data set."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from mask_rcnn_jax.benchmarking import devices, inputs, profile
from mask_rcnn_jax.data.options import canvas_size, example_options
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate, shard_batch

WARM_UP = 3  # calls that are not timed


def train(
    config: Mapping[str, Any],
    calls: int,
    profile_dir: str | None = None,
    objects: int = inputs.OBJECTS,
) -> dict[str, Any]:
    """Steady state of the recipe's step at `train.batch_size`, over all devices.

    profile_dir: a folder for a trace of some more steps. objects: of an image.
    """
    mesh, model = make_mesh(), inputs.recipe_model(config)
    variables = init_variables(model, config.train.seed)
    step, tx = inputs.recipe_step(config, model, variables["params"], mesh, config.train.batch_size)
    state = replicate(inputs.fresh_state(variables, tx), mesh)
    batch_size = config.train.batch_size
    batch = inputs.synthetic_batch(config, batch_size, objects=objects)
    batch = shard_batch(batch, mesh)
    compiled, compile_s = _compile(step, state, batch)

    def call():
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    times = _steady(call, calls)
    rss = devices.peak_rss_mb()  # before the program is lowered again, for its operations
    flops = inputs.train_flops(config)
    figures = _report(config, times, batch_size, compiled, compile_s, rss, flops)
    return figures | _profiled(call, compiled, profile_dir)


def infer(config: Mapping[str, Any], calls: int, profile_dir: str | None = None) -> dict[str, Any]:
    """Steady state of the prediction at `eval.batch_size`: images in, detections out, no paste."""
    mesh, model = make_mesh(), inputs.recipe_model(config)
    variables = replicate(init_variables(model, config.train.seed), mesh)
    batch_size = config.eval.batch_size
    batch = shard_batch(inputs.synthetic_batch(config, batch_size), mesh)
    predict = make_predict_step(model, mesh, detect_options(config))
    compiled, compile_s = _compile(predict, variables, batch)
    call = partial(compiled, variables, batch)
    times = _steady(call, calls)
    rss = devices.peak_rss_mb()
    flops = inputs.infer_flops(config)
    figures = _report(config, times, batch_size, compiled, compile_s, rss, flops)
    return figures | _profiled(call, compiled, profile_dir)


def _profiled(call: Callable, compiled: jax.stages.Compiled, folder: str | None) -> dict[str, Any]:
    return {"costliest": profile.costliest(call, compiled, folder)} if folder else {}


def _compile(function: Callable, *args) -> tuple[jax.stages.Compiled, float]:
    started = time.perf_counter()
    compiled = function.lower(*args).compile()
    return compiled, time.perf_counter() - started


def _steady(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds from result to result, the next call always being sent off before one is awaited."""
    for _ in range(WARM_UP):
        out = call()
    jax.block_until_ready(out)
    times, waiting, last = [], call(), time.perf_counter()
    for _ in range(calls):
        following = call()
        jax.block_until_ready(waiting)
        now = time.perf_counter()
        times.append(now - last)
        waiting, last = following, now
    jax.block_until_ready(waiting)
    return times


def _report(
    config: Mapping[str, Any],
    times: list[float],
    batch_size: int,
    compiled: jax.stages.Compiled,
    compile_s: float,
    rss: float,
    flops_per_image: float,
) -> dict[str, Any]:
    """The figures of one benchmark; those that the device does not tell are None.

    `peak_memory_mb` is the device's. `peak_rss_mb` is the process's, on the host; on a CPU it is
    all there is to know, and holds Python, the libraries and what compiling took.
    """
    summary = devices.summary(times)
    images_per_s = batch_size / (summary["ms"] / 1e3)
    peak = devices.peak(config.train.precision)
    memory = jax.local_devices()[0].memory_stats()
    return {
        **devices.describe(),
        "batch_size": batch_size,
        "precision": config.train.precision,
        "implementation": config.train.implementation,
        "image_size": list(canvas_size(example_options(config))),
        "images_per_s": round(images_per_s, 3),
        "ms_per_step": summary["ms"],
        "ms_per_step_25": summary["ms_25"],
        "ms_per_step_75": summary["ms_75"],
        "steps": len(times),
        "compile_s": round(compile_s, 1),
        "planned_peak_memory_mb": round(_planned_bytes(compiled.memory_analysis()) / 1e6, 1),
        "peak_memory_mb": round(memory["peak_bytes_in_use"] / 1e6, 1) if memory else None,
        "peak_rss_mb": rss,
        "gflop_per_image": round(flops_per_image / 1e9, 1),
        "percent_of_peak": peak
        and round(100 * flops_per_image * images_per_s / jax.device_count() / peak, 1),
    }


def _planned_bytes(memory) -> int:
    """XLA's plan for a program with its arguments; a CPU's peak leaves out what is temporary."""
    if jax.default_backend() != "cpu":
        return memory.peak_memory_in_bytes
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
