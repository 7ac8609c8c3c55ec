"""The whole training step as a GPU would run it, compiled where there is none."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from mask_rcnn_jax.benchmarking import hlo, inputs, roofline
from mask_rcnn_jax.benchmarking.hlo import FREE, KERNEL
from pallas_kernels import check_compile


@dataclass(frozen=True)
class Program:
    """One compiled step. Counts are of the optimised program, the body of a loop counted once."""

    images_per_device: int
    devices: int
    peak_mb: float  # of a device, with parameters and batch; cuDNN's workspace is not in it
    temp_mb: float
    gflop_per_image: float  # forward and backward, of the program before it is optimised
    gbytes_per_image: float  # through memory, with a loop's as often as it turns
    launches: int  # instructions that start work: fusions, library and custom calls, copies, sorts
    kernels_forward: int  # those of `pallas_kernels`
    kernels_backward: int
    convolutions: int
    matmuls: int
    copies: int
    transposes: int  # as part of fusions, too
    converts: int  # likewise
    sorts: int
    scatters: int
    loops: int
    all_reduces: int
    compile_s: float
    estimates: dict[str, dict[str, float]]  # by device, see `roofline.estimate`
    costliest: list[dict[str, Any]]  # on the first of them, see `roofline.costliest`


def compile_steps(
    config: Mapping[str, Any], target: str, shapes: Sequence[tuple[int, int]]
) -> Iterator[Program]:
    """Compile the recipe's training step for (images a device, devices) of GPUs not at hand.

    Raises ValueError if the packages for that are missing or JAX has no kernels for the GPU.
    """
    problem = check_compile.what_is_missing(target)
    if problem:
        raise ValueError(f"cannot compile for {target}: {problem}")
    gpu = check_compile.describe(target)
    gflop = round(inputs.train_flops(config) / 1e9, 1)
    for images_per_device, devices in shapes:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu["text"], topology=f"1x1x{devices}"
        )
        mesh = topologies.make_mesh(topology, (devices,), ("data",))
        context = check_compile.abstract_mesh(mesh, gpu)
        started = time.perf_counter()
        with jax.sharding.use_abstract_mesh(context):
            lowered = inputs.lower_step(config, context, mesh, images_per_device * devices)
        compiled = lowered.compile()
        seconds = time.perf_counter() - started
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        works = roofline.works(hlo.parse(text))
        devices_of = roofline.DEVICES[target]
        yield Program(
            images_per_device=images_per_device,
            devices=devices,
            peak_mb=round(memory.peak_memory_in_bytes / 1e6, 1),
            temp_mb=round(memory.temp_size_in_bytes / 1e6, 1),
            gflop_per_image=gflop,
            gbytes_per_image=round(roofline.gbytes(works) / images_per_device, 2),
            **count_instructions(text),
            compile_s=round(seconds, 1),
            estimates={
                name: roofline.estimate(works, images_per_device, name) for name in devices_of
            },
            costliest=roofline.costliest(works, devices_of[0]),
        )


def count_instructions(text: str) -> dict[str, int]:
    """The counts of `Program` in the text of an optimised XLA program."""
    # Computations that instructions are fused into, or that a reduction applies, are no launches.
    inner = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    launched, everywhere, calls = Counter(), Counter(), Counter()
    computation = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            found = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", line)
            computation = found[1] if found else ""
            continue
        found = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(", line)
        if not found:
            continue
        opcode = found[1]
        everywhere[opcode] += 1
        if computation in inner:
            continue
        launched[opcode] += 1
        target = re.search(r'custom_call_target="([^"]+)"', line)
        if target and target[1] == KERNEL:
            # "transpose(jvp(..))" is what differentiation names the backward pass.
            calls[f"{KERNEL} {'backward' if 'transpose(jvp' in line else 'forward'}"] += 1
        elif target:
            calls[target[1]] += 1
        elif opcode == "fusion" and "__triton_" in line and "gemm" in line:
            calls["gemm fusion"] += 1
    return {
        "launches": sum(n for opcode, n in launched.items() if opcode not in FREE),
        "kernels_forward": calls[f"{KERNEL} forward"],
        "kernels_backward": calls[f"{KERNEL} backward"],
        "convolutions": sum(n for name, n in calls.items() if name.startswith("__cudnn$conv")),
        "matmuls": sum(n for name, n in calls.items() if "gemm" in name or "matmul" in name),
        "copies": launched["copy"],
        "transposes": everywhere["transpose"],
        "converts": everywhere["convert"],
        "sorts": everywhere["sort"],
        "scatters": everywhere["scatter"],
        "loops": everywhere["while"],
        "all_reduces": everywhere["all-reduce"] + everywhere["all-reduce-start"],
    }
