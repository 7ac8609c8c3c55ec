"""Compile the training step or prediction for GPUs and TPUs on a machine without one."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mask_rcnn_jax.benchmarking import inputs, tpus
from mask_rcnn_jax.recipe.recipe import Recipe
from pallas_kernels import check_compile

MODES = ("train", "infer")


def targets() -> list[str]:
    return [*check_compile.targets(), *tpus.TARGETS]


def compile_programs(
    recipe: Recipe, target: str, shapes: Sequence[tuple[int, int]], mode: str = "train"
) -> Iterator[tuple[dict[str, Any], jax.stages.Compiled]]:
    """Compile a recipe's program for each (images per device, devices) on absent GPUs or TPUs.

    mode: "train" for the training step, "infer" for prediction without pasting masks.

    Yields figures and the program. `peak_mb` is XLA's plan for one device with parameters and
    batch, without cuDNN's workspace; `gflop_per_image` counts before optimization, forward and
    backward in training. TPUs' programs are compiled with `tpus.COMPILER_OPTIONS`.

    Raises ValueError if packages are missing, JAX has no kernels for the GPU, or there is no TPU
    slice of that size.
    """
    absent_devices, platform = _devices_of(target)
    lower, count = {
        "train": (inputs.lower_step, inputs.train_flops),
        "infer": (inputs.lower_predict, inputs.infer_flops),
    }[mode]
    recipe = inputs.for_platform(recipe, *platform)
    flops = count(recipe)
    gflop = flops and round(flops / 1e9, 1)
    for images, devices in shapes:
        mesh, context = absent_devices(target, devices)
        started = time.perf_counter()
        with jax.sharding.use_abstract_mesh(context):
            lowered = lower(recipe, context, mesh, images * devices, platform[0])
        compiled = _compile(lowered, tpus.COMPILER_OPTIONS if target in tpus.TARGETS else {})
        seconds = time.perf_counter() - started
        memory: Any = compiled.memory_analysis()
        figures = {
            "mode": mode,
            "images_per_device": images,
            "devices": devices,
            "peak_mb": round(memory.peak_memory_in_bytes / 1e6, 1),
            "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
            "gflop_per_image": gflop,
            "compile_s": round(seconds, 1),
        }
        yield figures, compiled


def _devices_of(target: str) -> tuple[Callable, tuple]:
    """Return the maker of a target's absent devices and the arguments of `inputs.for_platform`."""
    if target in tpus.TARGETS:
        problem = tpus.missing_requirement()
    else:
        problem = check_compile.missing_requirement(target)
    if problem:
        raise ValueError(f"cannot compile for {target}: {problem}")
    if target in tpus.TARGETS:
        return tpus.absent_tpus, ("tpu",)
    check_compile.use_cuda_tools()
    return check_compile.absent_gpus, ("cuda", check_compile.capability_of(target))


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile, with products from cuBLAS alone where XLA's first choice does not work.

    Its Triton code generator has no tiles for some products with fused reads, such as those behind
    the windowed attention of `ViT`. On a GPU, autotuning may find another way (openxla/xla pull
    request 36792).
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
        return lowered.compile(options | {"xla_gpu_enable_triton_gemm": False})
