"""Parse optimized XLA programs from their text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

# Opcodes that launch no work on the device.
FREE = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "partition-id replica-id all-reduce-done".split()
)
KERNEL = "mosaic_gpu_v2"  # custom call target of Mosaic GPU kernels
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


@dataclass(frozen=True)
class Array:
    """Dtype and shape."""

    dtype: str  # as XLA spells it: f32, bf16, pred, ..
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> float:
        """Bytes per element; 0.5 for 4-bit types."""
        bits = re.search(r"\d+", self.dtype)
        return 1 if self.dtype == "pred" else int(bits[0]) / 8 if bits else 0

    @property
    def bytes(self) -> float:
        return self.size * self.itemsize


@dataclass(frozen=True)
class Instruction:
    """One instruction line."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # outputs; nested tuples are flattened
    operands: tuple[str, ...]  # names; "name#1" is the second array of a tuple
    text: str  # everything after the operands
    root: bool

    def attribute(self, pattern: str, default: str = "") -> str:
        """Search `text` for a regular expression and return its first group."""
        found = re.search(pattern, self.text)
        return found[1] if found else default

    @property
    def calls(self) -> str:
        """Computation name run by a fusion or an asynchronous start."""
        return self.attribute(r"\bcalls=%?([\w.\-]+)")

    @property
    def target(self) -> str:
        """Custom call target."""
        return self.attribute(r'custom_call_target="([^"]+)"')

    @property
    def trips(self) -> int | None:
        """Turns of a loop; None if they depend on what it computes, or the compiler cannot tell."""
        found = self.attribute(r'known_trip_count"?:\{"n":"(\d+)"')
        return int(found) if found else None

    @property
    def source(self) -> str:
        """Origin in the Python program: JAX's name scopes and the primitive."""
        return self.attribute(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Program:
    """Computations by name; each lists its instructions by name, operands before users."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @cached_property
    def launched(self) -> list[tuple[float, str, Instruction]]:
        """(times, computation, instruction) for every instruction that starts device work.

        Instructions in a loop count once per iteration if the compiler knows the trip count, else
        once. Of a conditional's branches, the one that writes the fewest bytes counts: others are
        for batches beyond what is usual. Asynchronous pairs count at their start.
        """
        return list(self._walk(self.entry, 1))

    def _walk(self, name: str, times: float) -> Iterator[tuple[float, str, Instruction]]:
        for instruction in self.computations[name].values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = instruction.trips or 1
                body = instruction.attribute(r"\bbody=%?([\w.\-]+)")
                yield from self._walk(body, times * trips)
            elif opcode in ("conditional", "call", "async-start"):
                branches = instruction.attribute(r"branch_computations=\{([^}]*)\}")
                keys = "true_computation|false_computation|to_apply|calls"
                single = re.findall(rf"\b(?:{keys})=%?([\w.\-]+)", instruction.text)
                called = re.findall(r"[\w.\-]+", branches) + single
                each = (list(self._walk(name, times)) for name in called)
                yield from min(each, key=_written, default=[])
            elif opcode not in FREE and not opcode.endswith(("-done", "-update")):
                yield times, name, instruction

    def outputs(self, computation: str, instruction: Instruction) -> tuple[Array, ...]:
        """Return the arrays an instruction writes.

        For a `-start` these are the outputs of its `-done`; its own output lists more arrays.
        """
        if not instruction.opcode.endswith("-start"):
            return instruction.arrays
        for other in self.computations[computation].values():
            if other.opcode.endswith("-done") and instruction.name in other.operands:
                return other.arrays
        return instruction.arrays[:1]


def _written(launched: list[tuple[float, str, Instruction]]) -> float:
    return sum(times * sum(array.bytes for array in i.arrays) for times, _, i in launched)


def operand_arrays(scope: dict[str, Instruction], name: str) -> tuple[Array, ...]:
    """Return an operand's arrays; none if the computation lacks the instruction."""
    name, _, index = name.partition("#")
    if name not in scope:
        return ()
    arrays = scope[name].arrays
    return arrays[int(index) :][:1] if index else arrays


def parse(text: str) -> Program:
    """Parse text from `jax.stages.Compiled.as_text`.

    Raises ValueError if it has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, inside = "", {}
    for line in text.splitlines():
        if not line.startswith(" "):
            found = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if found and not line.startswith("HloModule"):
                inside = computations[found[2]] = {}
                entry = found[2] if found[1] else entry
            continue
        found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$", line)
        if not found:
            continue
        root, name, output, opcode, rest = found.groups()
        end = _closing_parenthesis(rest)
        operands = () if opcode in ("constant", "parameter") else _operands(rest[:end])
        inside[name] = Instruction(
            name, opcode, _arrays(output), operands, text=rest[end + 1 :], root=bool(root)
        )
    if not entry:
        raise ValueError("the text has no ENTRY computation, expected an XLA program")
    return Program(computations, entry)


def _arrays(text: str) -> tuple[Array, ...]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    return tuple(Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found)


def _operands(text: str) -> tuple[str, ...]:
    """Return the names in an operand list, in which shapes may precede names."""
    named = re.findall(r"%([\w.\-]+(?:#\d+)?)", text)
    return tuple(named or [name for name in re.split(r"[\s,]+", text) if name])


def _closing_parenthesis(text: str) -> int:
    """Return the index where a parenthesis opened before the text closes."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return index
    return len(text)
