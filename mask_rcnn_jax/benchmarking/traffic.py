"""Bytes that an instruction of an optimised XLA program moves, and operations it carries out."""

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod

from mask_rcnn_jax.benchmarking.hlo import Array, Instruction, Program, operand_of

ALIASES = {"bitcast", "reshape"}  # the same elements under another shape
PICKING = {"slice", "dynamic-slice", "gather"}  # read a part of their first operand
CONVOLUTION = "__cudnn$conv"  # how the names of cuDNN's calls for them begin


def moved_bytes(program: Program, computation: str, instruction: Instruction) -> float:
    """Bytes read and written, each operand once whoever else reads it: no cache helps.

    Of an operand that is only sliced or gathered from, what that takes; of an array that is
    updated in place, the update.
    """
    scope = program.computations[computation]
    outputs = program.outputs(computation, instruction)
    if instruction.opcode in ("fusion", "fusion-start"):
        return _fusion_bytes(program.computations[instruction.calls])
    operands = [operand_of(scope, name) for name in dict.fromkeys(instruction.operands)]
    sizes = [sum(array.bytes for array in arrays) for arrays in operands]
    written = sum(array.bytes for array in outputs)
    if instruction.opcode in PICKING:
        return 2 * written + sum(sizes[1:])
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if instruction.opcode == "scatter":
        return 3 * sizes[2] + sizes[1]  # an update is read, added to what is read, and written
    return sum(sizes) + written


def _fusion_bytes(inside: dict[str, Instruction]) -> float:
    """What a fusion reads and writes, as far as its output depends on it."""
    root = next(instruction for instruction in inside.values() if instruction.root)
    leaves = root.operands if root.opcode == "tuple" else (root.name,)
    needed: dict[str, float] = defaultdict(float)  # elements of each that are made use of
    written = 0.0
    for name in leaves:
        arrays, leaf = operand_of(inside, name), inside[name.partition("#")[0]]
        update = _in_place(inside, leaf)
        if update:
            # A scatter adds to what is there, so that is read, too.
            source = _behind(inside, leaf)
            written += update.bytes * (2 if source.opcode == "scatter" else 1)
        else:
            written += sum(array.bytes for array in arrays)
        needed[leaf.name] += sum(array.size for array in arrays)
    for instruction in reversed(inside.values()):
        size = sum(array.size for array in instruction.arrays)
        wanted = needed[instruction.name] = min(size, needed[instruction.name])
        if not wanted or instruction.opcode == "tuple":
            continue
        for place, name in enumerate(instruction.operands):
            whole = sum(array.size for array in operand_of(inside, name))
            name = name.partition("#")[0]
            if place == 0 and instruction.opcode in PICKING:
                needed[name] += wanted
            elif place == 0 and instruction.opcode in ("dynamic-update-slice", "scatter"):
                needed[name] += 0 if _in_place(inside, instruction) else whole
            else:
                # Element for element where the sizes agree, as in sums, conversions, transposes.
                needed[name] += wanted if whole == size else whole
    read = sum(
        instruction.arrays[0].itemsize * needed[instruction.name]
        for instruction in inside.values()
        if instruction.opcode == "parameter" and instruction.arrays
    )
    return read + written


def _behind(inside: dict[str, Instruction], instruction: Instruction) -> Instruction:
    while instruction.opcode in ALIASES:
        instruction = inside[instruction.operands[0].partition("#")[0]]
    return instruction


def _in_place(inside: dict[str, Instruction], instruction: Instruction) -> Array | None:
    """The update, if an operand of the fusion is updated where it lies."""
    found = _behind(inside, instruction)
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(found.opcode)
    if place is None:
        return None
    into = inside[found.operands[0].partition("#")[0]]
    if _behind(inside, into).opcode != "parameter":
        return None
    return operand_of(inside, found.operands[place])[0]


def matrix_flops(
    program: Program, computation: str, instruction: Instruction
) -> Iterator[tuple[str, str, float]]:
    """("convolution" or "matmul", precision, operations) of each such product in an instruction.

    A multiplication and an addition are two operations; those with padding count. The precision is
    a key of `devices.PEAKS`: float32 products of the default precision are done in tf32.
    """
    scope = program.computations[computation]
    operands = [arrays[0] for name in instruction.operands if (arrays := operand_of(scope, name))]
    target = instruction.target
    if instruction.calls in program.computations:
        for inner in program.computations[instruction.calls].values():
            yield from matrix_flops(program, instruction.calls, inner)
    elif target.startswith(CONVOLUTION) or instruction.opcode == "convolution":
        flops = _conv_flops(target, operands, instruction)
        yield "convolution", _precision(operands[0], instruction), flops
    elif instruction.opcode == "dot":
        contracted = _numbers(instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
        flops = 2 * instruction.arrays[0].size * prod(operands[0].shape[i] for i in contracted)
        yield "matmul", _precision(operands[0], instruction), flops
    elif "gemm" in target or "matmul" in target:
        contracted = _numbers(instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]'))
        flops = 2 * instruction.arrays[0].size * prod(operands[0].shape[i] for i in contracted)
        yield "matmul", _precision(operands[0], instruction), flops


def _conv_flops(target: str, operands: list[Array], instruction: Instruction) -> float:
    """Every output takes its window times its input channels, whichever of the three is computed.

    cuDNN's calls keep window and dimensions of the forward convolution for its gradients, too.
    """
    labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    of_kernel = re.split(r"_|->", labels)[1]
    result = instruction.arrays[0]
    if "BackwardInput" in target:
        output, kernel = operands[0], operands[1]
    elif "BackwardFilter" in target:
        output, kernel = operands[1], result
    else:
        output, kernel = result, operands[1]
    return 2 * output.size * kernel.size / kernel.shape[of_kernel.index("o")]


def _precision(operand: Array, instruction: Instruction) -> str:
    names = {"bf16": "bfloat16", "f16": "float16"}
    exact = re.search(r"operand_precision=\{high|\"HIGH|dot_f32_f32_f32", instruction.text)
    if operand.dtype in names:
        return names[operand.dtype]
    return "tf32" if operand.dtype == "f32" and not exact else "float32"


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
