"""Compile the training step for GPUs on a machine without one."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from mask_rcnn_jax.benchmarking import hlo, inputs, roofline
from pallas_kernels import check_compile


@dataclass(frozen=True)
class CompiledStep:
    """Figures of a compiled step. Counts are over the optimized program, loop bodies once."""

    images_per_device: int
    devices: int
    peak_mb: float  # per device, with parameters and batch, without cuDNN's workspace
    temp_mb: float
    gflop_per_image: float  # forward and backward, before optimization
    gbytes_per_image: float  # memory traffic, loop bodies times their trip count
    launches: int  # instructions that start work: fusions, library and custom calls, copies, sorts
    kernels_forward: int  # from `pallas_kernels`
    kernels_backward: int
    convolutions: int
    matmuls: int
    copies: int
    transposes: int  # including those inside fusions
    converts: int  # likewise
    sorts: int
    scatters: int
    loops: int
    all_reduces: int
    compile_s: float
    estimates: dict[str, dict[str, float]]  # by device, see `roofline.estimate`
    costliest: list[dict[str, Any]]  # on the first device, see `roofline.costliest`


def compile_steps(
    config: Any, target: str, shapes: Sequence[tuple[int, int]]
) -> Iterator[CompiledStep]:
    """Compile the recipe's training step for each (images per device, devices) on absent GPUs.

    Raises ValueError if packages are missing or JAX has no kernels for the GPU.
    """
    problem = check_compile.missing_requirement(target)
    if problem:
        raise ValueError(f"cannot compile for {target}: {problem}")
    gpu = check_compile.describe(target)
    gflop = round(inputs.train_flops(config) / 1e9, 1)
    names = roofline.DEVICES[target]
    for images, devices in shapes:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu["text"], topology=f"1x1x{devices}"
        )
        mesh = topologies.make_mesh(topology, (devices,), ("data",))
        context = check_compile.abstract_mesh(mesh, gpu)
        started = time.perf_counter()
        with jax.sharding.use_abstract_mesh(context):
            lowered = inputs.lower_step(config, context, mesh, images * devices)
        compiled = lowered.compile()
        seconds = time.perf_counter() - started
        memory: Any = compiled.memory_analysis()
        program = hlo.parse(str(compiled.as_text()))
        launches = roofline.launches(program)
        yield CompiledStep(
            images_per_device=images,
            devices=devices,
            peak_mb=round(memory.peak_memory_in_bytes / 1e6, 1),
            temp_mb=round(memory.temp_size_in_bytes / 1e6, 1),
            gflop_per_image=gflop,
            gbytes_per_image=round(roofline.gbytes(launches) / images, 2),
            **count_instructions(program),
            compile_s=round(seconds, 1),
            estimates={name: roofline.estimate(launches, images, name) for name in names},
            costliest=roofline.costliest(launches, names[0]),
        )


def count_instructions(program: hlo.Program) -> dict[str, int]:
    """Return the counts of `CompiledStep`."""
    bodies = program.computations
    everything = [instruction for body in bodies.values() for instruction in body.values()]
    # Computations that are fused or applied by a reduction launch nothing themselves.
    applied = r"\b(?:calls|to_apply)=%?([\w.\-]+)"
    inner = {name for found in everything for name in re.findall(applied, found.text)}
    outer = [body for name, body in bodies.items() if name not in inner]
    launched = [instruction for body in outer for instruction in body.values()]
    opcodes, launched_opcodes = (Counter(x.opcode for x in some) for some in (everything, launched))
    kernels = [found for found in launched if found.target == hlo.KERNEL]
    # Differentiation names the backward pass "transpose(jvp(..))".
    backward = sum("transpose(jvp" in found.text for found in kernels)
    return {
        "launches": sum(n for opcode, n in launched_opcodes.items() if opcode not in hlo.FREE),
        "kernels_forward": len(kernels) - backward,
        "kernels_backward": backward,
        "convolutions": sum(found.target.startswith("__cudnn$conv") for found in launched),
        "matmuls": sum(map(_is_matmul, launched)),
        "copies": launched_opcodes["copy"],
        "transposes": opcodes["transpose"],
        "converts": opcodes["convert"],
        "sorts": opcodes["sort"],
        "scatters": opcodes["scatter"],
        "loops": opcodes["while"],
        "all_reduces": opcodes["all-reduce"] + opcodes["all-reduce-start"],
    }


def _is_matmul(instruction: hlo.Instruction) -> bool:
    """Whether an instruction is a library call or a Triton fusion for a matrix product."""
    triton = instruction.opcode == "fusion" and "__triton_" in instruction.text
    return bool(re.search("gemm|matmul", instruction.target)) or (
        triton and "gemm" in instruction.name + instruction.text
    )
