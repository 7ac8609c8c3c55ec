"""How long a compiled program would take on a GPU: an estimate from its text, no measurement.

Each instruction takes the longest of: its matrix operations at the device's rate for their
precision, its bytes at the rate of the memory, and one launch. They run one after the other; time
of the host, collectives and what a cache may spare are not in it. Of the kernels in
`pallas_kernels` and of everything that is no product, bytes are all that counts; a sort counts as
one pass over its operands, though it takes several.

Peaks are those of data sheets, which nothing reaches. What counts is the share that long-running
simple programs have been seen to reach on an H200: about 790 of 989 TFLOP/s in a bfloat16 product
of two 8192 x 8192 matrices of random numbers, 4.3 of 4.8 TB/s in a copy of gigabytes. The same
shares are taken for the other devices.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mask_rcnn_jax.benchmarking import hlo, traffic
from mask_rcnn_jax.benchmarking.devices import PEAKS

MATRIX_REACH = 0.8
MEMORY_REACH = 0.9
LAUNCH_US = 2.5  # from the start of one short kernel to that of the next; assumed
KINDS = ("convolutions", "matmuls", "kernels", "rest")
# The H200 runs what is compiled for the H100: the same processor with other memory.
DEVICES = {"h100": ("H200", "H100"), "h200": ("H200", "H100"), "a100": ("A100",)}


@dataclass(frozen=True)
class Work:
    """One launched instruction."""

    kind: str  # of KINDS
    times: float  # that it is launched, for one in a loop
    bytes: float  # of one launch
    flops: dict[str, float]  # of its matrix products, by precision, of one launch
    source: str  # scopes and primitive it comes from, as in `source_of`


def works(program: hlo.Program) -> list[Work]:
    """All that a program launches, without its collectives."""
    found = []
    for times, computation, instruction in program.launched:
        if instruction.opcode.startswith(hlo.COLLECTIVES):
            continue
        flops: dict[str, float] = defaultdict(float)
        kinds = set()
        for kind, precision, count in traffic.matrix_flops(program, computation, instruction):
            kinds.add(kind)
            flops[precision] += count
        kind = "kernels" if instruction.target == hlo.KERNEL else "rest"
        if kinds:
            kind = "convolutions" if "convolution" in kinds else "matmuls"
        moved = traffic.moved_bytes(program, computation, instruction)
        found.append(Work(kind, times, moved, dict(flops), source_of(program, instruction)))
    return found


def source_of(program: hlo.Program, instruction: hlo.Instruction) -> str:
    """The scopes of an instruction, shortened; layers that differ by a number are one.

    `jit(step)/transpose(jvp(Model))/backbone/res2_0/add` is "backward backbone/res2_*/add". Where
    an instruction has no name, it is the last one inside it that has.
    """
    inside = program.computations.get(instruction.calls, {})
    named = [inner.source for inner in inside.values() if inner.source]
    source = instruction.source or (named[-1] if named else instruction.opcode)
    direction = "backward " if "transpose(jvp" in source else "forward " if "jvp(" in source else ""
    parts = [part for part in re.split(r"/(?![^()]*\))", source) if "jvp(" not in part]
    parts = [part for part in parts if part not in ("jit(step)", "shard_map", "vmap()", "p)")]
    return direction + "/".join(re.sub(r"\d+$", "*", part) for part in parts)


def microseconds(work: Work, device: str) -> float:
    """Of all launches of an instruction on a device of `PEAKS`."""
    peaks = PEAKS[device]
    compute = sum(1e-6 * n / (peaks[name] * MATRIX_REACH) for name, n in work.flops.items())
    memory = 1e-6 * work.bytes / (peaks["bytes"] * MEMORY_REACH)
    return work.times * max(compute, memory, LAUNCH_US)


def estimate(found: Sequence[Work], images: int, device: str) -> dict[str, float]:
    """Milliseconds of a step with `images`, in all and by kind, and images/s."""
    times: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for work in found:
        times[work.kind] += microseconds(work, device) / 1e3
    total = sum(times.values())
    rounded = {f"ms_{kind}": round(ms, 2) for kind, ms in times.items()}
    return {"images_per_s": round(1e3 * images / total, 1), "ms": round(total, 2), **rounded}


def gbytes(found: Sequence[Work]) -> float:
    """Gigabytes through memory."""
    return sum(work.times * work.bytes for work in found) / 1e9


def costliest(found: Sequence[Work], device: str, count: int = 10) -> list[dict[str, Any]]:
    """What takes longest of all that is no product, summed by source."""
    groups: dict[str, list[Work]] = defaultdict(list)
    for work in found:
        if work.kind in ("kernels", "rest"):
            groups[work.source].append(work)
    rows = [
        {
            "source": source,
            "launches": round(sum(work.times for work in group)),
            "mbytes": round(1e3 * gbytes(group), 1),
            "us": round(sum(microseconds(work, device) for work in group), 1),
        }
        for source, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:count]


def report(estimates: dict[str, dict[str, float]], rows: Sequence[dict[str, Any]]) -> str:
    """Both for people."""
    lines = []
    for device, figures in estimates.items():
        parts = ", ".join(f"{kind} {figures[f'ms_{kind}']}" for kind in KINDS)
        lines.append(
            f"estimate, not a measurement: {device} {figures['images_per_s']} images/s, "
            f"{figures['ms']} ms ({parts})"
        )
    lines.append(f"costliest that is no product, on {next(iter(estimates))}:")
    for row in rows:
        lines.append(
            f"{row['us']:9.1f} us {row['mbytes']:9.1f} MB {row['launches']:4d} x  {row['source']}"
        )
    return "\n".join(lines)
