"""Estimate a compiled program's GPU run time from its text, without running it.

Each instruction takes the longest of three times: its matrix FLOPs at the device's rate for their
precision, its bytes at the memory rate, and one launch. Instructions run one after the other; host
time, collectives and cache hits are ignored. Only bytes count for the kernels of `pallas_kernels`
and for everything that is not a matrix product; a sort counts as one pass over its operands,
although it takes several.

Data-sheet peaks are never reached. They are scaled by the share that long-running simple programs
reached on an H200: about 790 of 989 TFLOP/s for a bfloat16 product of two random 8192 x 8192
matrices, 4.3 of 4.8 TB/s for a copy of gigabytes. Other devices use the same shares.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import hlo, traffic
from mask_rcnn_jax.benchmarking.devices import PEAKS

MATRIX_REACH = 0.8
MEMORY_REACH = 0.9
LAUNCH_US = 2.5  # between the starts of two short kernels; assumed
KINDS = ("convolutions", "matmuls", "kernels", "rest")
# The H200 runs programs compiled for the H100: same processor, other memory.
DEVICES = {"h100": ("H200", "H100"), "h200": ("H200", "H100"), "a100": ("A100",)}


@dataclass(frozen=True)
class Launch:
    """One launched instruction."""

    kind: str  # one of KINDS
    times: float  # launches per run of the program
    bytes: float  # per launch
    flops: dict[str, float]  # matrix FLOPs per launch, by precision
    source: str  # shortened name scopes and primitive, see `_source`


def launches(program: hlo.Program) -> list[Launch]:
    """List everything a program launches except collectives."""
    return [
        read_launch(program, *launched)
        for launched in program.launched
        if not launched[-1].opcode.startswith(hlo.COLLECTIVES)
    ]


def read_launch(
    program: hlo.Program, times: float, computation: str, instruction: hlo.Instruction
) -> Launch:
    """Read one entry of `program.launched`."""
    flops: dict[str, float] = defaultdict(float)
    kinds = set()
    for kind, precision, count in traffic.matrix_flops(program, computation, instruction):
        kinds.add(kind)
        flops[precision] += count
    kind = "kernels" if instruction.target == hlo.KERNEL else "rest"
    if kinds:
        kind = "convolutions" if "convolution" in kinds else "matmuls"
    moved = traffic.moved_bytes(program, computation, instruction)
    return Launch(kind, times, moved, dict(flops), _source(program, instruction))


def _source(program: hlo.Program, instruction: hlo.Instruction) -> str:
    """Shorten an instruction's name scopes; layers that differ by a number share one source.

    `jit(step)/transpose(jvp(Model))/backbone/res2_0/add` becomes "backward backbone/res2_*/add".
    An unnamed instruction takes the last name inside the computation it calls.
    """
    inside = program.computations.get(instruction.calls, {})
    named = [inner.source for inner in inside.values() if inner.source]
    source = instruction.source or (named[-1] if named else instruction.opcode)
    direction = "backward " if "transpose(jvp" in source else "forward " if "jvp(" in source else ""
    parts = [part for part in re.split(r"/(?![^()]*\))", source) if "jvp(" not in part]
    parts = [part for part in parts if part not in ("jit(step)", "shard_map", "vmap()", "p)")]
    return direction + "/".join(re.sub(r"\d+$", "*", part) for part in parts)


def microseconds(launch: Launch, device: str) -> float:
    """Estimate the total time for an instruction's launches on a device in `PEAKS`."""
    peaks = PEAKS[device]
    compute = sum(1e-6 * n / (peaks[name] * MATRIX_REACH) for name, n in launch.flops.items())
    memory = 1e-6 * launch.bytes / (peaks["bytes"] * MEMORY_REACH)
    return launch.times * max(compute, memory, LAUNCH_US)


def estimate(found: Sequence[Launch], images: int, device: str) -> dict[str, float]:
    """Return images/s and milliseconds for a step with `images`, in total and by kind."""
    times: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for launch in found:
        times[launch.kind] += microseconds(launch, device) / 1e3
    total = sum(times.values())
    rounded = {f"ms_{kind}": round(ms, 2) for kind, ms in times.items()}
    return {"images_per_s": round(1e3 * images / total, 1), "ms": round(total, 2), **rounded}


def gbytes(found: Sequence[Launch]) -> float:
    """Return the gigabytes read and written."""
    return sum(launch.times * launch.bytes for launch in found) / 1e9


def costliest(found: Sequence[Launch], device: str, count: int = 10) -> list[dict[str, Any]]:
    """List the sources that take longest, matrix products excluded."""
    groups: dict[str, list[Launch]] = defaultdict(list)
    for launch in found:
        if launch.kind in ("kernels", "rest"):
            groups[launch.source].append(launch)
    rows: list[dict[str, Any]] = [
        {
            "source": source,
            "launches": round(sum(launch.times for launch in group)),
            "mbytes": round(1e3 * gbytes(group), 1),
            "us": round(sum(microseconds(launch, device) for launch in group), 1),
        }
        for source, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:count]


def report(estimates: dict[str, dict[str, float]], rows: Sequence[dict[str, Any]]) -> str:
    """Format estimates and costliest sources as text."""
    lines = []
    for device, figures in estimates.items():
        parts = ", ".join(f"{kind} {figures[f'ms_{kind}']}" for kind in KINDS)
        lines.append(
            f"estimate, not a measurement: {device} {figures['images_per_s']} images/s, "
            f"{figures['ms']} ms ({parts})"
        )
    lines.append(f"costliest that is no product, on {next(iter(estimates))}:")
    lines += [
        f"{row['us']:9.1f} us {row['mbytes']:9.1f} MB {row['launches']:4d} x  {row['source']}"
        for row in rows
    ]
    return "\n".join(lines)
