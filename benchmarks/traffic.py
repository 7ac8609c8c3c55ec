"""Estimate memory traffic, matrix FLOPs and sorting passes of optimized XLA instructions."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from benchmarks.hlo import Array, Instruction, Program, operand_arrays

ALIASES = {"bitcast", "reshape"}  # same elements, another shape
PICKING = {"slice", "dynamic-slice", "gather"}  # read a part of their first operand
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> index of the update operand
CONVOLUTION = "__cudnn$conv"  # prefix of cuDNN's convolution targets
CUB_SORT = "__cub$DeviceRadixSort"  # prefix of the targets of CUB's sorts
# On a GPU, XLA takes CUB's radix sort for 32-bit keys of one row that is longer than the first
# number, or of more rows than the second that are longer than the first (sort_rewriter.cc for H100;
# that for the A100 differs little). Other sorts are bitonic.
RADIX_ONE_ROW = 22_000
RADIX_ROWS = ((1 << 17, 26), (1 << 16, 31), (1 << 15, 38), (1 << 14, 44), (1 << 13, 52))
RADIX_LAUNCHES, RADIX_PASSES = 6, 4  # histogram, sums of it, and a pass for each 8 bits of the key
TILE = 1 << 12  # elements of a row that one launch of the bitonic sort merges in shared memory


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


def sort_launches(program: Program, instruction: Instruction) -> tuple[int, float] | None:
    """Return how many launches a GPU needs for a sort and the bytes that each moves on average.

    None for an instruction that does not sort. A program compiled without a GPU has one instruction
    for every sort, whatever the GPU would do.
    """
    inside = program.computations.get(instruction.calls, {}).values()
    sorts = [found for found in (instruction, *inside) if found.opcode == "sort"]
    if instruction.target.startswith(CUB_SORT):
        sorts = [instruction]
    if not sorts:
        return None
    arrays = [array for array in sorts[0].arrays if array.dtype != "u8"]  # CUB's scratch
    place = int(sorts[0].attribute(r"dimensions=\{(\d+)\}", "-1"))
    length, size = arrays[0].shape[place], sum(array.bytes for array in arrays)
    rows, is_last = arrays[0].size // max(length, 1), place in (-1, len(arrays[0].shape) - 1)
    fits = is_last and len(arrays) <= 2 and arrays[0].itemsize == 4
    if instruction.target or (fits and _takes_radix(rows, length)):
        # The histogram reads the keys, each pass reads and writes everything.
        return RADIX_LAUNCHES, (arrays[0].bytes + 2 * RADIX_PASSES * size) / RADIX_LAUNCHES
    stages = max(length - 1, 0).bit_length()
    beyond = max(stages - TILE.bit_length() + 1, 0)
    # A stage of more than a tile first compares elements further apart, one launch a distance.
    return 1 + sum(stage + 1 for stage in range(1, beyond + 1)), 2 * size


def _takes_radix(rows: int, length: int) -> bool:
    """Whether XLA takes CUB's radix sort for so many rows of 32-bit keys."""
    if rows == 1:
        return length > RADIX_ONE_ROW
    return any(length > longer and rows > more for longer, more in RADIX_ROWS)


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product; a multiply-add is two FLOPs, products with padding count."""

    role: str  # "matmul", or what a convolution computes: "forward", "input" or "kernel" gradient
    precision: str  # key of `devices.PEAKS`
    flops: float
    channels: int = 0  # the fewer of a convolution's input (in a group) and output channels


def products(program: Program, computation: str, instruction: Instruction) -> Iterator[Product]:
    """Yield the products in an instruction."""
    scope = program.computations[computation]
    names = instruction.operands
    operands = [arrays[0] for name in names if (arrays := operand_arrays(scope, name))]
    target = instruction.target
    if instruction.calls in program.computations:
        for inner in program.computations[instruction.calls].values():
            yield from products(program, instruction.calls, inner)
    elif target.startswith(CONVOLUTION) or instruction.opcode == "convolution":
        yield _convolution(target, operands, instruction)
    elif instruction.opcode == "dot" or "gemm" in target or "matmul" in target:
        pattern = r'lhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)'  # dot, or a library call
        contracted = [int(n) for n in re.findall(r"\d+", instruction.attribute(pattern))]
        flops = 2 * instruction.arrays[0].size * prod(operands[0].shape[i] for i in contracted)
        yield Product("matmul", _precision(operands[0], instruction), flops)


def _convolution(target: str, operands: list[Array], instruction: Instruction) -> Product:
    """FLOPs are 2 x output size x window x input channels, also for both gradients.

    cuDNN's gradient calls keep the window and dimension labels of the forward convolution.
    """
    labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    kernel_labels = re.split(r"_|->", labels)[1]
    role, output, kernel = "forward", instruction.arrays[0], operands[1]
    if "BackwardInput" in target:
        role, output = "input", operands[0]
    elif "BackwardFilter" in target:
        role, output, kernel = "kernel", operands[1], instruction.arrays[0]
    inputs, outputs = (kernel.shape[kernel_labels.index(label)] for label in "io")
    flops = 2 * output.size * kernel.size / outputs
    return Product(role, _precision(operands[0], instruction), flops, min(inputs, outputs))


def _precision(operand: Array, instruction: Instruction) -> str:
    """XLA lets products of float32 use tf32 unless their precision is the highest."""
    names = {"bf16": "bfloat16", "f16": "float16"}
    highest = r'operand_precision(?:=\{|":\[")highest|dot_f32_f32_f32'
    if operand.dtype in names:
        return names[operand.dtype]
    exact = re.search(highest, instruction.text, re.IGNORECASE)
    return "tf32" if operand.dtype == "f32" and not exact else "float32"
