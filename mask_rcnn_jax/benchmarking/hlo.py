"""The text of an optimised XLA program, read into instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

# Instructions that start no work of their own on a device.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "all-reduce-done",
}
KERNEL = "mosaic_gpu_v2"  # what Mosaic GPU kernels are called in a compiled program
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


@dataclass(frozen=True)
class Array:
    """dtype and shape of an array."""

    dtype: str  # XLA's name: f32, bf16, pred, ..
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> float:
        """Bytes of an element; half a byte for those of 4 bits."""
        bits = re.search(r"\d+", self.dtype)
        return 1 if self.dtype == "pred" else int(bits[0]) / 8 if bits else 0

    @property
    def bytes(self) -> float:
        return self.size * self.itemsize


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # the output; several of a tuple, nested ones in their order
    operands: tuple[str, ...]  # names, with "#1" behind for the second array of a tuple
    text: str  # all that follows the operands
    root: bool

    def attribute(self, pattern: str, default: str = "") -> str:
        """The first group of a regular expression in `text`."""
        found = re.search(pattern, self.text)
        return found[1] if found else default

    @property
    def calls(self) -> str:
        """The computation that a fusion or an asynchronous start runs."""
        return self.attribute(r"\bcalls=%?([\w.\-]+)")

    @property
    def target(self) -> str:
        """Of a custom call."""
        return self.attribute(r'custom_call_target="([^"]+)"')

    @property
    def source(self) -> str:
        """What it was in the Python program: JAX's scopes and the primitive."""
        return self.attribute(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Program:
    """Computations by name, their instructions by name and with operands before their users."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @cached_property
    def launched(self) -> list[tuple[float, str, Instruction]]:
        """(times, computation, instruction) for each that starts work on the device.

        Those of a loop count as often as the compiler knows that it turns, else once. Of a
        conditional every branch counts. Of what starts and ends apart, the start stands for it.
        """
        return list(self._walk(self.entry, 1))

    def _walk(self, name: str, times: float) -> Iterator[tuple[float, str, Instruction]]:
        for instruction in self.computations[name].values():
            opcode, text = instruction.opcode, instruction.text
            if opcode == "while":
                turns = int(instruction.attribute(r'known_trip_count"?:\{"n":"(\d+)"', "1"))
                body = instruction.attribute(r"\bbody=%?([\w.\-]+)")
                yield from self._walk(body, times * turns)
            elif opcode == "conditional":
                found = re.search(r"branch_computations=\{([^}]*)\}", text)
                listed = re.findall(r"[\w.\-]+", found[1]) if found else []
                pair = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", text)
                for branch in listed + pair:
                    yield from self._walk(branch, times)
            elif opcode == "call":
                called = instruction.attribute(r"\bto_apply=%?([\w.\-]+)")
                yield from self._walk(called, times)
            elif opcode == "async-start":
                yield from self._walk(instruction.calls, times)
            elif opcode not in FREE and not opcode.endswith(("-done", "-update")):
                yield times, name, instruction

    def outputs(self, computation: str, instruction: Instruction) -> tuple[Array, ...]:
        """Arrays that it writes; those of a start are in its end, its own output has more."""
        if not instruction.opcode.endswith("-start"):
            return instruction.arrays
        for other in self.computations[computation].values():
            if other.opcode.endswith("-done") and instruction.name in other.operands:
                return other.arrays
        return instruction.arrays[:1]


def operand_of(scope: dict[str, Instruction], name: str) -> tuple[Array, ...]:
    """Arrays of an operand in a computation; none if that has no such instruction."""
    name, _, index = name.partition("#")
    if name not in scope:
        return ()
    arrays = scope[name].arrays
    return arrays[int(index) :][:1] if index else arrays


def parse(text: str) -> Program:
    """The program in the text that `jax.stages.Compiled.as_text` gives.

    Raises ValueError if there is no entry computation in it.
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
        end = _closing(rest)
        arguments = "" if opcode in ("constant", "parameter") else rest[:end]
        inside[name] = Instruction(
            name=name,
            opcode=opcode,
            arrays=_arrays(output),
            root=bool(root),
            operands=tuple(_operands(arguments)),
            text=rest[end + 1 :],
        )
    if not entry:
        raise ValueError("the text has no ENTRY computation, expected an XLA program")
    return Program(computations, entry)


def _arrays(text: str) -> tuple[Array, ...]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    return tuple(Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found)


def _operands(text: str) -> list[str]:
    """Names in a list of operands, which may have their shapes before them."""
    named = re.findall(r"%([\w.\-]+(?:#\d+)?)", text)
    return named or [name for name in re.split(r"[\s,]+", text) if name]


def _closing(text: str) -> int:
    """Where the parenthesis ends that was opened before the text."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return at
    return len(text)
