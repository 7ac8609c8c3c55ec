"""Run functions with kernels in them, the kernels as compiled for a GPU and emulated on the CPU."""

import ctypes
import dataclasses
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.extend import core

from pallas_kernels import check_compile
from tests.kernels.ptx import launches, translate

# Products and sums stay as in the PTX, integers wrap around.
GCC = "gcc -O1 -std=gnu17 -mfma -mf16c -ffp-contract=off -fwrapv -shared -fPIC -w".split()
KERNEL = "custom_vmap_call"  # what a Pallas kernel is to JAX before it is lowered


def run(target: str, function: Callable, *args, seed: int = 0, edit: Callable = str):
    """Call a function with its kernels emulated and the rest on the CPU.

    Args:
        seed: of the order in which the warps run.
        edit: changes the PTX of each kernel, to break it.

    Raises:
        AssertionError: a kernel does what a GPU leaves undefined, or leaves bytes unwritten, or
            none was launched: those in a branch are not, since a CPU chooses the branch.
    """
    launched = 0

    def launch(equation, inputs):
        nonlocal launched
        launched += 1
        compiled = _compiled(target, _Kernel(equation.params["call"]))
        compiled = dataclasses.replace(compiled, ptx=edit(compiled.ptx))
        out_types = [(var.aval.shape, var.aval.dtype) for var in equation.outvars]
        outs, faults = run_launch(compiled, inputs, out_types, seed=seed)
        assert not faults, "\n".join(faults)
        return outs

    with jax.sharding.use_abstract_mesh(_gpu(target)):
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    values = _evaluate(closed, jax.tree.leaves(args), launch)
    assert launched, "no kernel was launched"
    return jax.tree.unflatten(jax.tree.structure(out), values)


@functools.cache
def _gpu(target: str) -> jax.sharding.AbstractMesh:
    """The GPU to trace for, the same one each time, so that JAX traces only once."""
    return check_compile.absent_gpus(target, 1)[1]


def _evaluate(closed: core.ClosedJaxpr, args: list, launch: Callable) -> list:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def value(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [value(atom) for atom in equation.invars]
        if name == KERNEL:
            outs = launch(equation, inputs)
        elif name in ("jit", "custom_vjp_call"):
            inner = equation.params["jaxpr" if name == "jit" else "call_jaxpr"]
            outs = _evaluate(inner, inputs, launch)
        else:
            outs = equation.primitive.bind(*inputs, **equation.params)
            outs = outs if equation.primitive.multiple_results else [outs]
        values |= dict(zip(equation.outvars, outs, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


class _Kernel:
    """A kernel that is equal to another if it prints the same."""

    def __init__(self, jaxpr: core.ClosedJaxpr):
        self.jaxpr, self.text = jaxpr, str(jaxpr)

    def __eq__(self, other) -> bool:
        return self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@functools.cache
def _compiled(target: str, kernel: _Kernel) -> launches.Launch:
    args = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.jaxpr.in_avals)
    return launches.compile_launch(target, core.jaxpr_as_fun(kernel.jaxpr), args)


def run_launch(
    launch: launches.Launch, inputs: list, out_types: list[tuple], *, seed: int = 0
) -> tuple[list[np.ndarray], list[str]]:
    """Return the results, and a line for each kind of fault."""
    outs = [np.full(np.prod(shape) * dtype.itemsize, 0xA5, np.uint8) for shape, dtype in out_types]
    operands = [*(np.array(x, order="C") for x in inputs), *outs]
    stored = [*(None for _ in inputs), *(np.zeros_like(out) for out in outs)]
    memory = [operands[i] for i in launch.parameters]
    marks = [stored[i] for i in launch.parameters]
    count = len(memory)
    library = _built(launch.ptx, launch.shared_bytes)
    library.run(
        (ctypes.c_void_p * count)(*(x.ctypes.data for x in memory)),
        (ctypes.c_void_p * count)(*(None if x is None else x.ctypes.data for x in marks)),
        (ctypes.c_uint64 * count)(*(x.nbytes for x in memory)),
        (ctypes.c_uint32 * 3)(*launch.grid),
        ctypes.c_uint32(seed),
    )
    faults = _faults(library, launch.ptx)
    if missing := sum(np.count_nonzero(x == 0) for x in stored if x is not None):
        faults.append(f"{missing} bytes of the output not stored")
    typed = zip(outs, out_types, strict=True)
    return [out.view(dtype).reshape(shape) for out, (shape, dtype) in typed], faults


@functools.cache
def _built(ptx: str, shared_bytes: int) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        source.write_text(translate.translate(ptx, shared_bytes))
        here = Path(__file__).parent
        subprocess.run([*GCC, "-I", here, "-o", library, source, "-lm"], check=True)
        return ctypes.CDLL(str(library))


def _faults(library: ctypes.CDLL, ptx: str) -> list[str]:
    count = ctypes.c_int.in_dll(library, "num_faults").value
    names, counts, lines = (
        (kind * count).in_dll(library, name)
        for kind, name in (
            (ctypes.c_char_p, "names"), (ctypes.c_uint64, "counts"), (ctypes.c_int, "lines"),
        )
    )  # fmt: skip
    text = ptx.splitlines()
    return [
        f"{name.decode()}, {times} times, first at PTX line {line}: {text[line - 1].strip()}"
        for name, times, line in zip(names, counts, lines, strict=True)
        if times
    ]
