"""Compile kernels for a GPU that is not there: the PTX, and what the host passes to it."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from pallas_kernels import check_compile


@dataclasses.dataclass(frozen=True)
class Launch:
    """One compiled kernel."""

    ptx: str
    grid: tuple[int, int, int]  # blocks along x, y, z
    shared_bytes: int
    parameters: tuple[int, ...]  # number of the operand that each parameter points to


def compile_launch(target: str, function: Callable, args: tuple) -> Launch:
    """Compile a function that is one kernel. A process compiles the same kernel only once.

    JAX goes on to call ptxas for the first GPU of a process, which fails for most others; the PTX
    that it has written before is for this one.
    """
    with tempfile.TemporaryDirectory() as folder, _dumping(folder):
        try:
            check_compile.compile_one(target, (function, args))
        except jax.errors.JaxRuntimeError:
            if not any(Path(folder).glob("*.ptx")):
                raise
        [file] = Path(folder).glob("*.ptx")
        ptx, host = file.read_text(), file.with_name(file.stem + ".mlir-passes.log").read_text()
    architecture = "sm_" + check_compile.describe(target)["capability"].replace(".", "")
    assert re.search(rf"^\.target {architecture}a?$", ptx, re.MULTILINE), ptx[:200]
    return read_launch(ptx, host)


@contextlib.contextmanager
def _dumping(folder: str) -> Iterator[None]:
    """Let Mosaic GPU write what it compiles, and JAX take nothing from its own cache."""
    seconds = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, seconds)
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    jax.config.update(seconds, 1e9)
    try:
        yield
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
        jax.config.update(seconds, before)


def read_launch(ptx: str, passes: str) -> Launch:
    """Find the launch in the host's program, as it is before the last pass that has it."""
    dumps = [dump for dump in passes.split("IR Dump Before ") if "gpu.launch_func" in dump]
    host = dumps[-1].partition("return")[0]
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) :", host))
    # There is an array of them: %b = getelementptr %a[2], %c = load %b is the third.
    elements = dict(re.findall(r"(%\w+) = llvm\.getelementptr %\w+\[(\d+)\]", host))
    loads = re.findall(r"(%\w+) = llvm\.load (%\w+) ", host)
    operands = {name: int(elements.get(pointer, 0)) for name, pointer in loads}
    launch = re.search(
        r"gpu\.launch_func .*? blocks in \((.*?)\) threads in \((.*?)\).*?"
        r"dynamic_shared_memory_size (%\w+) args\((.*?)\)",
        host,
    )
    blocks, threads, shared, arguments = launch.groups()
    assert [constants[name] for name in threads.split(", ")] == ["128", "1", "1"]
    return Launch(
        ptx=ptx,
        grid=tuple(int(constants[name]) for name in blocks.split(", ")),
        shared_bytes=int(constants[shared]),
        parameters=tuple(operands[name] for name in re.findall(r"(%\w+) :", arguments)),
    )
