"""Time the training step and prediction on generated batches."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax import device
from mask_rcnn_jax.benchmarking import devices, inputs, profile
from mask_rcnn_jax.memory import peak_rss_mb
from mask_rcnn_jax.models.build import init_variables, prepare_for_gpu, resolve_precision
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.training.low_rank import add_adapters
from mask_rcnn_jax.training.step import make_mesh, make_predict_step

WARM_UP = 3  # untimed calls
BARRIER_S = 3600  # processes wait for a compilation by others
Save = Callable[[dict[str, Any]], object]  # receives the figures each time some are added


def train(
    recipe: Recipe,
    calls: int,
    profile_dir: str | None = None,
    mesh: Mesh | None = None,
    save: Save = lambda figures: None,
) -> dict[str, Any]:
    """Measure the recipe's training step, with its teacher if it has one, at `train.batch_size`.

    profile_dir: folder for a trace of a few more steps. mesh: devices to use, all if None. save:
        receives the figures before FLOPs and trace are added, which can take long.
    """
    mesh, model = mesh or make_mesh(), inputs.recipe_model(recipe)
    variables = init_variables(model, recipe.train.seed)
    batch_size = recipe.train.batch_size
    lora, backbone = recipe.optim.lora, model.backbone
    variables["params"] = add_adapters(variables["params"], lora, backbone, recipe.train.seed)
    distillation, teacher = inputs.recipe_teacher(recipe, model)
    step, tx = inputs.recipe_step(
        recipe, model, variables["params"], mesh, batch_size, distillation
    )
    state = _place(inputs.TrainState.start(variables, tx), mesh, P())
    batch = _place(inputs.synthetic_batch(recipe, batch_size, training=True), mesh, P("data"))
    teacher = _place(teacher, mesh, P())
    compiled, compile_s = _compile(step, state, batch, *teacher)
    meet(f"compiled for {mesh.size} devices", mesh.devices.flat)

    def call():
        nonlocal state
        state, metrics = compiled(state, batch, *teacher)
        return metrics

    times = _steady(call, calls)
    figures = _figures(recipe, batch, mesh, compiled, compile_s, times, inputs.train_flops, save)
    return figures | _profiled(call, compiled, profile_dir)


def infer(
    recipe: Recipe, calls: int, profile_dir: str | None = None, save: Save = lambda figures: None
) -> dict[str, Any]:
    """Measure prediction of `eval.batch_size` images on each device, without pasting masks.

    profile_dir, save: as in `train`.
    """
    mesh, model = make_mesh(), inputs.recipe_model(recipe)
    variables = init_variables(model, recipe.train.seed)
    if mesh.devices.flat[0].platform == "gpu":
        variables = prepare_for_gpu(model, variables)
    variables = _place(variables, mesh, P())
    batch_size = recipe.eval.batch_size * mesh.size
    batch = _place(inputs.synthetic_batch(recipe, batch_size), mesh, P("data"))
    predict = make_predict_step(model, mesh, recipe.eval)
    compiled, compile_s = _compile(predict, variables, batch)
    meet(f"compiled for {mesh.size} devices", mesh.devices.flat)
    call = partial(compiled, variables, batch)
    times = _steady(call, calls)
    figures = _figures(recipe, batch, mesh, compiled, compile_s, times, inputs.infer_flops, save)
    return figures | _profiled(call, compiled, profile_dir)


def meet(name: str, devices: Iterable[jax.Device]) -> None:
    """Wait until all processes that own some of the devices are here; each name serves once.

    A collective would wait only 30 seconds for a process that still compiles (Gloo, on CPUs).
    """
    if jax.process_count() > 1:
        from jax._src.distributed import global_state  # without a public name

        processes = sorted({device.process_index for device in devices})
        client: Any = global_state.client
        client.wait_at_barrier(name, 1000 * BARRIER_S, process_ids=processes)


def _place(tree: Any, mesh: Mesh, spec: P) -> Any:
    """Place arrays that every process of the mesh has whole; other processes take no part.

    `jax.device_put` would compare the arrays of all processes, those outside the mesh included.
    """
    sharding = NamedSharding(mesh, spec)

    def place(leaf: Any) -> jax.Array:
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(place, tree)


def _profiled(call: Callable, compiled: jax.stages.Compiled, folder: str | None) -> dict[str, Any]:
    if not folder:
        return {}
    operations, idle_ms = profile.costliest(call, compiled, folder)
    return {"idle_ms": idle_ms, "costliest": operations}


def _compile(function: Any, *args) -> tuple[jax.stages.Compiled, float]:
    started = time.perf_counter()
    with device.traced_forms():
        compiled = function.lower(*args).compile()
    seconds = time.perf_counter() - started
    device.log_kernels()
    return compiled, seconds


def _steady(call: Callable[[], Any], calls: int) -> list[float]:
    """Return seconds between results, dispatching each call before waiting for the previous."""
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


def _figures(
    recipe: Recipe,
    batch: Batch,
    mesh: Mesh,
    compiled: jax.stages.Compiled,
    compile_s: float,
    times: list[float],
    count_flops: Callable[[Any], float | None],
    save: Save,
) -> dict[str, Any]:
    """Return the figures of one benchmark; None for those the device does not report.

    `peak_memory_mb` is device memory. `peak_rss_mb` is host memory of the process, which on a CPU
    is the only measure and includes Python, libraries and compilation.
    """
    summary = devices.summary(times)
    batch_size, *image_size = batch.images.shape[:3]
    images_per_s = batch_size / (summary["ms"] / 1e3)
    memory = jax.local_devices()[0].memory_stats()
    precision = resolve_precision(recipe.train.precision)
    figures = {
        **devices.describe(),
        "devices": mesh.size,
        "batch_size": batch_size,
        "precision": precision,
        "implementation": recipe.train.implementation,
        "image_size": image_size,
        "images_per_s": round(images_per_s, 3),
        "ms_per_step": summary["ms"],
        "ms_per_step_25": summary["ms_25"],
        "ms_per_step_75": summary["ms_75"],
        "steps": len(times),
        "compile_s": round(compile_s, 1),
        "planned_peak_memory_mb": round(_planned_bytes(compiled.memory_analysis()) / 1e6, 1),
        "peak_memory_mb": round(memory["peak_bytes_in_use"] / 1e6, 1) if memory else None,
        "peak_rss_mb": round(peak_rss_mb(), 1),
    }
    save(figures)
    flops, peak = count_flops(recipe), devices.peak(precision)  # lowers the program again
    used = flops and peak and flops * images_per_s / mesh.size / peak
    figures["gflop_per_image"] = flops and round(flops / 1e9, 1)
    figures["percent_of_peak"] = used and round(100 * used, 1)
    save(figures)
    return figures


def _planned_bytes(memory) -> int:
    """Return XLA's planned memory including arguments; a CPU's own peak omits temporaries."""
    if jax.default_backend() != "cpu":
        return memory.peak_memory_in_bytes
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
