"""Time the training step on growing numbers of devices with the same images on each."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mask_rcnn_jax.benchmarking import steps
from mask_rcnn_jax.recipe.recipe import Recipe

SHARED = ("device", "jax", "date", "precision", "implementation", "image_size", "steps")
OF_A_ROW = ("ms_per_step", "ms_per_step_25", "ms_per_step_75", "compile_s", "peak_memory_mb")


def weak_scaling(recipe: Recipe, calls: int, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure the recipe's training step on each number of devices.

    Every device has as many images as each of the largest number has of `train.batch_size`. All
    processes of a run must call this; a row uses the first devices in the order of the processes,
    and only the processes that have them.

    Yields:
        After each number the common figures and the `rows` so far, one per number, with
        `efficiency`: images/s per device relative to the first row. Only process 0 has all rows.
    """
    total, largest = jax.device_count(), max(counts)
    if len(set(counts)) < len(counts):
        raise ValueError(f"--devices is {','.join(map(str, counts))}, expected different numbers")
    if largest > total:
        raise ValueError(f"--devices has {largest}, this run has {total}")
    if recipe.train.batch_size % largest:
        raise ValueError(
            f"train.batch_size is {recipe.train.batch_size}, expected a multiple of {largest}, the "
            "largest number of --devices"
        )
    images = recipe.train.batch_size // largest
    table: dict[str, Any] = {"processes": jax.process_count(), "images_per_device": images}
    rows: list[dict[str, Any]] = []
    for count in counts:
        used = jax.devices()[:count]
        if jax.process_index() in {device.process_index for device in used}:
            train = replace(recipe.train, batch_size=images * count)
            mesh = Mesh(np.array(used), ("data",))
            figures = steps.train(replace(recipe, train=train), calls, mesh=mesh)
            table |= {name: figures[name] for name in SHARED}
            row = _row(count, figures)
            first = (rows or [row])[0]["images_per_s_per_device"]
            rows.append(row | {"efficiency": round(row["images_per_s_per_device"] / first, 3)})
        # None may go on to compile, or end, while others measure.
        steps.meet(f"measured on {count} devices", jax.devices())
        yield table | {"rows": list(rows)}


def _row(count: int, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "devices": count,
        "batch_size": figures["batch_size"],
        "images_per_s": figures["images_per_s"],
        "images_per_s_per_device": round(figures["images_per_s"] / count, 3),
        **{name: figures[name] for name in OF_A_ROW},
    }
