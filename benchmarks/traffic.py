"""Estimate memory traffic and matrix FLOPs of optimized XLA instructions."""

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod

from benchmarks.hlo import Array, Instruction, Program, operand_arrays

ALIASES = {"bitcast", "reshape"}  # same elements, another shape
PICKING = {"slice", "dynamic-slice", "gather"}  # read a part of their first operand
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> index of the update operand
CONVOLUTION = "__cudnn$conv"  # prefix of cuDNN's convolution targets


def moved_bytes(program: Program, computation: str, instruction: Instruction) -> float:
    """Return the bytes read and written, assuming no cache hits between instructions.

    A sliced or gathered operand counts only the elements taken; an array updated in place counts
    only the update.
    """
    scope = program.computations[computation]
    outputs = program.outputs(computation, instruction)
    if instruction.opcode in ("fusion", "fusion-start"):
        return _fusion_bytes(program.computations[instruction.calls])
    operands = [operand_arrays(scope, name) for name in dict.fromkeys(instruction.operands)]
    sizes = [sum(array.bytes for array in arrays) for arrays in operands]
    written = sum(array.bytes for array in outputs)
    if instruction.opcode in PICKING:
        return 2 * written + sum(sizes[1:])
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if instruction.opcode == "scatter":
        return 3 * sizes[2] + sizes[1]  # read the update and the target, write the sum
    return sum(sizes) + written


def _fusion_bytes(inside: dict[str, Instruction]) -> float:
    """Return the bytes a fusion reads and writes, counting only elements its output needs."""
    root = next(instruction for instruction in inside.values() if instruction.root)
    leaves = root.operands if root.opcode == "tuple" else (root.name,)
    needed: dict[str, float] = defaultdict(float)  # elements used of each instruction
    written = 0.0
    for name in leaves:
        arrays, leaf = operand_arrays(inside, name), inside[name.partition("#")[0]]
        update = _in_place_update(inside, leaf)
        if update:
            # A scatter adds to the existing values, which it therefore reads as well.
            is_scatter = _unalias(inside, leaf).opcode == "scatter"
            written += update.bytes * (2 if is_scatter else 1)
        else:
            written += sum(array.bytes for array in arrays)
        needed[leaf.name] += sum(array.size for array in arrays)
    for instruction in reversed(inside.values()):
        size = sum(array.size for array in instruction.arrays)
        wanted = needed[instruction.name] = min(size, needed[instruction.name])
        if not wanted or instruction.opcode == "tuple":
            continue
        for place, name in enumerate(instruction.operands):
            whole = sum(array.size for array in operand_arrays(inside, name))
            name = name.partition("#")[0]
            if place == 0 and instruction.opcode in PICKING:
                needed[name] += wanted
            elif place == 0 and instruction.opcode in UPDATES:
                needed[name] += 0 if _in_place_update(inside, instruction) else whole
            else:
                # Equal sizes mean elementwise access: additions, conversions, transposes.
                needed[name] += wanted if whole == size else whole
    read = sum(
        instruction.arrays[0].itemsize * needed[instruction.name]
        for instruction in inside.values()
        if instruction.opcode == "parameter" and instruction.arrays
    )
    return read + written


def _unalias(inside: dict[str, Instruction], instruction: Instruction) -> Instruction:
    while instruction.opcode in ALIASES:
        instruction = inside[instruction.operands[0].partition("#")[0]]
    return instruction


def _in_place_update(inside: dict[str, Instruction], instruction: Instruction) -> Array | None:
    """Return the update if the instruction writes into an operand of the fusion."""
    found = _unalias(inside, instruction)
    if found.opcode not in UPDATES:
        return None
    target = inside[found.operands[0].partition("#")[0]]
    if _unalias(inside, target).opcode != "parameter":
        return None
    return operand_arrays(inside, found.operands[UPDATES[found.opcode]])[0]


def matrix_flops(
    program: Program, computation: str, instruction: Instruction
) -> Iterator[tuple[str, str, float]]:
    """Yield ("convolution" or "matmul", precision, FLOPs) for each product in an instruction.

    A multiply-add is two FLOPs; products with padding count. The precision is a key of
    `devices.PEAKS`: float32 products of default precision run in tf32.
    """
    scope = program.computations[computation]
    names = instruction.operands
    operands = [arrays[0] for name in names if (arrays := operand_arrays(scope, name))]
    target = instruction.target
    if instruction.calls in program.computations:
        for inner in program.computations[instruction.calls].values():
            yield from matrix_flops(program, instruction.calls, inner)
    elif target.startswith(CONVOLUTION) or instruction.opcode == "convolution":
        flops = _conv_flops(target, operands, instruction)
        yield "convolution", _precision(operands[0], instruction), flops
    elif instruction.opcode == "dot" or "gemm" in target or "matmul" in target:
        pattern = r'lhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)'  # dot, or a library call
        contracted = [int(n) for n in re.findall(r"\d+", instruction.attribute(pattern))]
        flops = 2 * instruction.arrays[0].size * prod(operands[0].shape[i] for i in contracted)
        yield "matmul", _precision(operands[0], instruction), flops


def _conv_flops(target: str, operands: list[Array], instruction: Instruction) -> float:
    """Return 2 x output size x window x input channels, the same for forward and both gradients.

    cuDNN's gradient calls keep the window and dimension labels of the forward convolution.
    """
    labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    kernel_labels = re.split(r"_|->", labels)[1]
    result = instruction.arrays[0]
    if "BackwardInput" in target:
        output, kernel = operands[0], operands[1]
    elif "BackwardFilter" in target:
        output, kernel = operands[1], result
    else:
        output, kernel = result, operands[1]
    return 2 * output.size * kernel.size / kernel.shape[kernel_labels.index("o")]


def _precision(operand: Array, instruction: Instruction) -> str:
    names = {"bf16": "bfloat16", "f16": "float16"}
    exact = re.search(r"operand_precision=\{high|\"HIGH|dot_f32_f32_f32", instruction.text)
    if operand.dtype in names:
        return names[operand.dtype]
    return "tf32" if operand.dtype == "f32" and not exact else "float32"
