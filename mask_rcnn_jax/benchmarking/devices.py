"""Data-sheet peaks of devices, and timing of calls."""

import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Dense matrix products in TFLOP/s by precision, summed in float32, and memory bandwidth in TB/s.
PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250, "float16": 2250, "tf32": 1125, "float32": 75, "bytes": 8.0},
    "H200": {"bfloat16": 989, "float16": 989, "tf32": 495, "float32": 67, "bytes": 4.8},
    "H100": {"bfloat16": 989, "float16": 989, "tf32": 495, "float32": 67, "bytes": 3.35},
    "A100": {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5, "bytes": 2.0},
    "RTX 5090": {"bfloat16": 209, "float16": 209, "tf32": 105, "float32": 105, "bytes": 1.79},
    "L4": {"bfloat16": 121, "float16": 121, "tf32": 60, "float32": 30.3, "bytes": 0.3},
    "A10": {"bfloat16": 125, "float16": 125, "tf32": 62.5, "float32": 31.2, "bytes": 0.6},
    # float32 takes six products of bfloat16, or one where XLA may round.
    "TPU v5 lite": {"bfloat16": 197, "float16": 197, "tf32": 197, "float32": 33, "bytes": 0.82},
    "TPU v6 lite": {"bfloat16": 918, "float16": 918, "tf32": 918, "float32": 153, "bytes": 1.64},
    # Without tensor cores for bfloat16 and tf32.
    "T4": {"bfloat16": 8.1, "float16": 65, "tf32": 8.1, "float32": 8.1, "bytes": 0.32},
}


def peak(unit: str) -> float | None:
    """Return peak FLOP/s of a precision, or bytes/s for "bytes"; None for an unlisted device."""
    peaks = peaks_of(jax.devices()[0].device_kind)
    return None if peaks is None else 1e12 * peaks[unit]


def peaks_of(kind: str) -> dict[str, float] | None:
    """Return the row of `PEAKS` for a device's kind, which has its name as whole words."""
    found = (name for name in PEAKS if re.search(rf"{name}(?![0-9A-Za-z])", kind))
    return PEAKS.get(next(found, ""))


def describe() -> dict[str, str | int]:
    """Return the device, the JAX version and the date, for comparing figures."""
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def time_calls(
    function: Callable,
    *args,
    repeats: int = 20,
    budget_s: float = 2.0,
    clock: Callable[[], Any] = time.perf_counter,
) -> list:
    """Return seconds per warm call: `repeats` values, fewer (at least 3) after `budget_s` seconds.

    Calls too short for the host clock are dispatched several at a time. `clock` returns seconds, or
    an array with those of several clocks.
    """
    jax.block_until_ready(function(*args))
    started = time.perf_counter()
    jax.block_until_ready(function(*args))
    once = time.perf_counter() - started
    batch = max(1, min(50, round(2e-3 / max(once, 1e-9))))
    times = []
    until = time.perf_counter() + budget_s
    while len(times) < 3 or (len(times) < repeats and time.perf_counter() < until):
        started = clock()
        for _ in range(batch):
            out = function(*args)
        jax.block_until_ready(out)
        times.append((clock() - started) / batch)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return median and quartiles in milliseconds."""
    low, median, high = (float(x) for x in np.percentile(np.array(times) * 1e3, (25, 50, 75)))
    return {"ms": round(median, 4), "ms_25": round(low, 4), "ms_75": round(high, 4)}
