"""Estimate a compiled program's GPU run time from its text, without running it.

Each instruction takes the longest of three times: its matrix FLOPs at the device's rate for their
precision, its bytes at the memory rate, and its launches. Instructions run one after the other;
host time, collectives and cache hits are ignored. A sort counts the launches and passes that XLA's
bitonic sort or CUB's radix sort takes, see `traffic.sort_launches`. Otherwise only bytes count for
what is no matrix product, which is too little for NMS: its kernels wait for one another.

Data-sheet peaks are never reached, so each time is a range between two sets of shares, `REACH`:

* "high" has what long-running simple programs reached on an H200: about 790 of 989 TFLOP/s for a
  bfloat16 product of two random 8192 x 8192 matrices, 4.3 of 4.8 TB/s for a copy of gigabytes.
* "low" has shares that are assumed for cuDNN and Triton at a model's sizes. A convolution of at
  least 256 channels reaches 66 % forward, 62 % for the gradient of its input and 52 % for that of
  its kernel, which sums over all positions; 80 % of that with 128 channels and 50 % with 64, where
  tiles are less than full; a stem of 3 channels in bfloat16 5 %, since its rows are not aligned
  (XLA pads them in float16 only). Products reach 60 %, memory 79 %, and the kernels of
  `pallas_kernels`, which gather rows of 512 bytes, 55 % of it.

Neither was measured with this project's programs; all devices use the same shares.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import hlo, traffic
from mask_rcnn_jax.benchmarking.devices import PEAKS

LAUNCH_US = 2.5  # between the starts of two short kernels; assumed
KINDS = ("convolutions", "matmuls", "kernels", "sorts", "rest")
# The H200 runs programs compiled for the H100: same processor, other memory.
DEVICES = {"h100": ("H200", "H100"), "h200": ("H200", "H100"), "a100": ("A100",)}
DEVICES |= {"b200": ("B200",), "rtx5090": ("RTX 5090",)}
DEVICES |= {"l4": ("L4",), "a10": ("A10",), "t4": ("T4",)}
DEVICES |= {"v5e": ("TPU v5 lite",), "v6e": ("TPU v6 lite",)}
# Everything in a prediction outside the scopes of its network, which end in outputs.
NETWORK = "pyramid|rpn_outputs|box_outputs|results"
SELECTION = re.compile(rf"MaskRCNN\.predict/(?!MaskRCNN\.(?:{NETWORK})/)")


@dataclass(frozen=True)
class Reach:
    """Shares of a device's data-sheet rates that are reached."""

    products: dict[str, float]  # by `traffic.Product.role`
    narrow: tuple[tuple[int, float], ...]  # (from so many channels on, share of the share)
    unaligned: float  # the same for channels that are no multiple of 4
    memory: float
    kernels: float  # share of the memory rate in those of `pallas_kernels`

    def share(self, product: traffic.Product) -> float:
        """Return the share of the peak that a product reaches."""
        share = self.products[product.role]
        if product.role == "matmul":
            return share
        if product.channels % 4:
            return share * self.unaligned
        return share * next(part for channels, part in self.narrow if product.channels >= channels)


ROLES = ("forward", "input", "kernel", "matmul")
REACH = {
    "low": Reach(
        products=dict(zip(ROLES, (0.66, 0.62, 0.52, 0.6), strict=True)),
        narrow=((256, 1.0), (128, 0.8), (16, 0.5), (0, 0.25)),
        unaligned=0.075,
        memory=0.79,
        kernels=0.55,
    ),
    "high": Reach(dict.fromkeys(ROLES, 0.8), narrow=((0, 1.0),), unaligned=1.0, memory=0.9,
                  kernels=0.9),
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launched instruction."""

    kind: str  # one of KINDS
    times: float  # launches per run of the program
    bytes: float  # per launch
    products: tuple[traffic.Product, ...]  # per launch
    source: str  # shortened name scopes and primitive, see `_source`


def launches(program: hlo.Program) -> list[Launch]:
    """List everything a program launches except collectives."""
    return [
        read_launch(program, *launched)
        for launched in program.launched
        if not launched[-1].opcode.startswith(hlo.COLLECTIVES)
    ]


def xla_cycles(program: hlo.Program) -> float:
    """Return the cycles that XLA writes beside a TPU's fusions and copies; 0 for other devices.

    It has none for gathers, scatters, sorts and collectives, which are left out.
    """
    pattern = r'"estimated_cycles":"(\d+)"'
    return sum(n * int(one.attribute(pattern, "0")) for n, _, one in program.launched)


def read_launch(
    program: hlo.Program, times: float, computation: str, instruction: hlo.Instruction
) -> Launch:
    """Read one entry of `program.launched`."""
    source = _source(program, instruction)
    if passes := traffic.sort_launches(program, instruction):
        return Launch("sorts", times * passes[0], passes[1], (), source)
    products = tuple(traffic.products(program, computation, instruction))
    kind = "kernels" if instruction.target == hlo.KERNEL else "rest"
    if products:
        is_matmul = all(product.role == "matmul" for product in products)
        kind = "matmuls" if is_matmul else "convolutions"
    moved = traffic.moved_bytes(program, computation, instruction)
    return Launch(kind, times, moved, products, source)


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


def microseconds(launch: Launch, device: str, reach: Reach) -> float:
    """Estimate the total time for an instruction's launches on a device in `PEAKS`."""
    peaks = PEAKS[device]
    compute = sum(
        1e-6 * product.flops / (peaks[product.precision] * reach.share(product))
        for product in launch.products
    )
    share = reach.kernels if launch.kind == "kernels" else reach.memory
    memory = 1e-6 * launch.bytes / (peaks["bytes"] * share)
    return launch.times * max(compute, memory, LAUNCH_US)


def estimate(found: Sequence[Launch], images: int, device: str) -> dict[str, dict[str, float]]:
    """Return images/s and milliseconds for a program with `images`, for each of `REACH`.

    Milliseconds are in total, by kind, and as `ms_selection` those of a prediction's top-k, NMS and
    what belongs to them, 0 in training; masks are pasted on the host.
    """
    return {name: _estimate(found, images, device, reach) for name, reach in REACH.items()}


def _estimate(found: Sequence[Launch], images: int, device: str, reach: Reach) -> dict[str, float]:
    times: dict[str, float] = dict.fromkeys((*KINDS, "selection"), 0.0)
    for launch in found:
        ms = microseconds(launch, device, reach) / 1e3
        times[launch.kind] += ms
        if SELECTION.match(launch.source) and not launch.products:
            times["selection"] += ms
    total = sum(times[kind] for kind in KINDS)
    rounded = {f"ms_{kind}": round(ms, 2) for kind, ms in times.items()}
    return {"images_per_s": round(1e3 * images / total, 1), "ms": round(total, 2), **rounded}


def gbytes(found: Sequence[Launch]) -> float:
    """Return the gigabytes read and written."""
    return sum(launch.times * launch.bytes for launch in found) / 1e9


def costliest(found: Sequence[Launch], device: str, count: int = 10) -> list[dict[str, Any]]:
    """List the sources that take longest with low shares, matrix products excluded."""
    groups: dict[str, list[Launch]] = defaultdict(list)
    for launch in found:
        if not launch.products:
            groups[launch.source].append(launch)
    rows: list[dict[str, Any]] = [
        {
            "source": source,
            "launches": round(sum(launch.times for launch in group)),
            "mbytes": round(1e3 * gbytes(group), 1),
            "us": round(sum(microseconds(launch, device, REACH["low"]) for launch in group), 1),
        }
        for source, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:count]


def report(
    estimates: dict[str, dict[str, dict[str, float]]], rows: Sequence[dict[str, Any]]
) -> str:
    """Format estimates and costliest sources as text."""
    lines = []
    for device, found in estimates.items():
        low, high = found["low"], found["high"]
        kinds = [kind for kind in (*KINDS, "selection") if low[f"ms_{kind}"]]
        names = {"selection": "of all this selection of boxes"}
        parts = [
            f"{names.get(kind, kind)} {high[f'ms_{kind}']} to {low[f'ms_{kind}']}" for kind in kinds
        ]
        lines.append(
            f"estimate, not a measurement: {device} {low['images_per_s']} to "
            f"{high['images_per_s']} images/s, {high['ms']} to {low['ms']} ms ({', '.join(parts)})"
        )
    lines.append(f"costliest that is no product, on {next(iter(estimates))}, at the longer times:")
    lines += [
        f"{row['us']:9.1f} us {row['mbytes']:9.1f} MB {row['launches']:4d} x  {row['source']}"
        for row in rows
    ]
    return "\n".join(lines)
