"""The GPU kernels beside the plain code that defines them: same values, and both times."""

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
from pallas_kernels import cases


@dataclass(frozen=True)
class Pair:
    """A kernel and its definition, on arguments that look like a model's."""

    name: str
    kernel: Callable
    plain: Callable
    args: tuple
    tolerance: float  # largest difference allowed, as a share of the largest value


def names() -> list[str]:
    """Of what is compared: all cases but the tiny ones, RoIAlign forward and transposed."""
    found = []
    for case in cases.CASES:
        ops = ["gather_sum", "gather_sum_transpose"] if case.op == "gather_sum" else [case.op]
        found += [] if case.tiny else [f"{op} {case.name}" for op in ops]
    return found


def make_pair(name: str) -> Pair:
    """One of `names()`."""
    # Here, as Pallas takes long to import, and commands that need no kernel import this file.
    from pallas_kernels import mask_targets, nms, roi_align

    op, case_name = name.split(" ")
    case = next(case for case in cases.CASES if case.name == case_name)
    args, options = jax.device_put(cases.example(case)), dict(case.options)
    kernel, plain, tolerance = {
        "nms": (nms.nms, xla_nms, 0.0),
        "fill_polygons": (mask_targets.fill_polygons, xla_fill_polygons, 0.0),
        "gather_sum": (roi_align.gather_sum, xla_gather_sum, None),
        "gather_sum_transpose": (roi_align.gather_sum_transpose, xla_gather_sum_transpose, None),
    }[op]
    if op.startswith("gather_sum"):
        table, *taps = args
        # One sum may round up where the other does not.
        tolerance = 4 * float(jnp.finfo(table.dtype).eps)
        if op == "gather_sum_transpose":
            options["num_rows"] = table.shape[0]
            shape = (*taps[0].shape[:2], taps[1].shape[1], table.shape[1])
            grad = jax.random.normal(jax.random.key(0), shape, jnp.float32)
            args = (grad.astype(table.dtype), *taps)
    kernel, plain = (jax.jit(partial(function, **options)) for function in (kernel, plain))
    return Pair(name, kernel, plain, args, tolerance)


def compare(pair: Pair) -> str | None:
    """What is wrong with the kernel's values, in one line, or None. Runs it twice for its bits."""
    ours, again, theirs = (
        np.asarray(function(*pair.args), np.float32)
        for function in (pair.kernel, pair.kernel, pair.plain)
    )
    if not np.all(np.isfinite(ours)):
        return "values are not finite"
    if not np.array_equal(ours, again):
        return f"two runs differ by up to {np.max(np.abs(ours - again)):.3g}"
    difference, largest = np.max(np.abs(ours - theirs)), np.max(np.abs(theirs))
    if difference > pair.tolerance * largest:
        return f"differs from the plain code by {difference:.3g}, largest value {largest:.3g}"
    return None


def measure(pair: Pair) -> dict[str, Any]:
    """Times of both, and the bytes/s that reading and writing each array once would have been."""
    kernel = devices.summary(devices.time_calls(pair.kernel, *pair.args))
    plain = devices.summary(devices.time_calls(pair.plain, *pair.args))
    moved = sum(x.nbytes for x in jax.tree.leaves((pair.args, pair.kernel(*pair.args))))
    achieved = moved / (kernel["ms"] / 1e3)
    peak = devices.peak("bytes")
    return {
        "kernel": kernel,
        "xla": plain,
        "xla_over_kernel": round(plain["ms"] / kernel["ms"], 2),
        "megabytes": round(moved / 1e6, 1),
        "gigabytes_per_s": round(achieved / 1e9, 1),
        "percent_of_peak": peak and round(100 * achieved / peak, 1),
    }


def run(only: str = "") -> dict[str, Any]:
    """Check and time every pair; prints a line for each. `failures` names those that are wrong."""
    rows, failures = {}, {}
    print(f"{'kernel and case':58} {'kernel ms':>10} {'XLA ms':>10} {'GB/s':>8} {'of peak':>8}")
    for pair in (make_pair(name) for name in names() if only in name):
        problem = compare(pair)
        row = measure(pair)
        rows[pair.name] = row
        if problem:
            failures[pair.name] = problem
        share = "" if row["percent_of_peak"] is None else f"{row['percent_of_peak']:.1f} %"
        print(
            f"{pair.name:58} {row['kernel']['ms']:10.3f} {row['xla']['ms']:10.3f} "
            f"{row['gigabytes_per_s']:8.0f} {share:>8} {problem or ''}",
            flush=True,
        )
    return {**devices.describe(), "kernels": rows, "failures": failures}
