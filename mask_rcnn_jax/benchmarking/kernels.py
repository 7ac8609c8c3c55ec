"""Compare each GPU kernel with the XLA reference that defines it: values and times."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mask_rcnn_jax.benchmarking import devices
from mask_rcnn_jax.ops.nms import xla_nms
from mask_rcnn_jax.ops.polygons import xla_fill_polygons
from mask_rcnn_jax.ops.roi_align import xla_gather_sum, xla_gather_sum_transpose
from pallas_kernels import cases, check_compile, support


@dataclass(frozen=True)
class Pair:
    """A kernel and its XLA reference, with arguments like a model's."""

    name: str
    kernel: Callable
    reference: Callable
    args: tuple
    tolerance: float  # largest allowed difference, as a fraction of the largest value
    tiny: bool = False  # too small for a time to mean anything


def names() -> list[str]:
    """Return the names of all pairs: every case, tiny ones first, RoIAlign in both directions."""
    found = []
    for case in sorted(cases.CASES, key=lambda case: not case.tiny):
        ops = ["gather_sum", "gather_sum_transpose"] if case.op == "gather_sum" else [case.op]
        found += [f"{op} {case.name}" for op in ops]
    return found


def make_pair(name: str) -> Pair:
    """Build one of `names()`."""
    # Imported here because Pallas imports slowly and other commands import this file.
    from pallas_kernels import mask_targets, nms, roi_align

    op, case_name = name.split(" ")
    case = next(c for c in cases.CASES if c.name == case_name and op.startswith(c.op))
    args, options = jax.device_put(cases.example(case)), dict(case.options)
    choices: dict[str, tuple[Callable, Callable]] = {
        "nms": (nms.nms, xla_nms),
        "fill_polygons": (mask_targets.fill_polygons, xla_fill_polygons),
        "gather_sum": (roi_align.gather_sum, xla_gather_sum),
        "gather_sum_transpose": (roi_align.gather_sum_transpose, xla_gather_sum_transpose),
    }
    tolerance = 0.0
    if op.startswith("gather_sum"):
        tables, *taps = args
        channels, dtype = tables[0].shape[1], tables[0].dtype
        # Sums may round differently: on an H200, a transpose's of float32 by up to 6 eps.
        tolerance = max(4 * float(jnp.finfo(dtype).eps), 16 * float(jnp.finfo("float32").eps))
        if op == "gather_sum_transpose":
            options["num_rows"] = sum(len(table) for table in tables)
            shape = (*taps[0].shape[:2], taps[1].shape[1], channels)
            grad = jax.random.normal(jax.random.key(0), shape, jnp.float32)
            args = (grad.astype(dtype), *taps)
    kernel, reference = (jax.jit(partial(function, **options)) for function in choices[op])
    return Pair(name, kernel, reference, args, tolerance, case.tiny)


def compare(pair: Pair) -> str | None:
    """Describe what is wrong with the kernel's values in one line, or return None.

    Runs the kernel twice and expects identical bits.
    """
    actual, repeated, expected = (
        np.asarray(function(*pair.args), np.float32)
        for function in (pair.kernel, pair.kernel, pair.reference)
    )
    if not np.all(np.isfinite(actual)):
        return "values are not finite"
    if not np.array_equal(actual, repeated):
        return f"two runs differ by up to {np.max(np.abs(actual - repeated)):.3g}"
    difference, largest = np.max(np.abs(actual - expected)), np.max(np.abs(expected))
    if difference > pair.tolerance * largest:
        return f"differs from the plain code by {difference:.3g}, largest value {largest:.3g}"
    return None


def measure(pair: Pair) -> dict[str, Any]:
    """Time both, and compute the kernel's bytes/s if every array moved once."""
    kernel = devices.summary(devices.time_calls(pair.kernel, *pair.args))
    xla = devices.summary(devices.time_calls(pair.reference, *pair.args))
    moved = sum(x.nbytes for x in jax.tree.leaves((pair.args, pair.kernel(*pair.args))))
    achieved = moved / (kernel["ms"] / 1e3)
    peak = devices.peak("bytes")
    return {
        "kernel": kernel,
        "xla": xla,
        "xla_over_kernel": round(xla["ms"] / kernel["ms"], 2),
        "megabytes": round(moved / 1e6, 1),
        "gigabytes_per_s": round(achieved / 1e9, 1),
        "percent_of_peak": peak and round(100 * achieved / peak, 1),
    }


def run(
    only: str = "", save: Callable[[dict[str, Any]], object] = lambda figures: None
) -> dict[str, Any]:
    """Check every pair and time those that are not tiny, printing a line for each.

    Args:
        only: run the pairs whose names contain this text.
        save: receives the figures after each pair.

    Returns:
        Figures by pair; `failures` maps wrong pairs, and those without a kernel here, to why.
    """
    rows: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    figures = {**devices.describe(), "kernels": rows, "failures": failures}
    print(f"{'kernel and case':58} {'kernel ms':>10} {'XLA ms':>10} {'GB/s':>8} {'of peak':>8}")
    for name in (name for name in names() if only in name):
        if reason := support.mosaic_unsupported(check_compile.op_of(name)):
            failures[name] = f"no kernel: {reason}"
            save(figures)
            continue
        pair = make_pair(name)
        problem = compare(pair)
        if problem:
            failures[pair.name] = problem
        row = rows[pair.name] = {} if pair.tiny else measure(pair)
        save(figures)
        if pair.tiny:
            print(f"{pair.name:58} {problem or 'right'}", flush=True)
            continue
        share = "" if row["percent_of_peak"] is None else f"{row['percent_of_peak']:.1f} %"
        print(
            f"{pair.name:58} {row['kernel']['ms']:10.3f} {row['xla']['ms']:10.3f} "
            f"{row['gigabytes_per_s']:8.0f} {share:>8} {problem or ''}",
            flush=True,
        )
    return figures
