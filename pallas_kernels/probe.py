"""Compile a small case of each kernel in a process of its own, where a compiler may crash.

    python -m pallas_kernels.probe nms

An error in LLVM ends the process, without an exception. `failures` starts such processes; what
compiled is remembered in a file. The process compiles for the GPU that is there, or with --target
for one that is not, and leaves with 0, or with `NO_GPU` if it cannot use the GPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import check_compile, support

COMMAND = sys.executable, "-m", "pallas_kernels.probe"
NO_GPU = 3  # exit code
TIMEOUT = 300  # seconds; compiling takes a few
DRIVER = Path("/proc/driver/nvidia/version")


def untested(ops: Collection[str], memory: Path | None) -> list[str]:
    """Return those ops of `support.KERNELS` of which `memory` does not say that they compile."""
    known = _remembered(memory).get(described_gpu(), ())
    return [op for op in ops if op not in known]


def failures(
    ops: Collection[str], memory: Path | None = None, command: Sequence[str] | None = None
) -> dict[str, str]:
    """Return why kernels do not compile for the GPU that JAX uses, in one line, by op.

    Args:
        ops: of `support.KERNELS`, at least one.
        memory: file to add to what has compiled, for this GPU, driver and JAX; what failed is
            tried again the next time, since a missing compiler may have been installed.
        command: to run for each op, which is added to it; None: `COMMAND`.
    """
    with ThreadPoolExecutor(len(ops)) as pool:
        found = list(pool.map(lambda op: _failure([*(command or COMMAND), op]), ops))
    reasons = dict(zip(ops, found, strict=True))
    compiled = [op for op, reason in reasons.items() if reason is None]
    if compiled and memory is not None:
        _remember(memory, described_gpu(), compiled)
    return {op: reason for op, reason in reasons.items() if reason}


def described_gpu() -> str:
    """Return all that what compiles may depend on, in one line."""
    device = jax.local_devices()[0]
    driver = DRIVER.read_text().partition("\n")[0] if DRIVER.is_file() else "driver unknown"
    platform = " ".join(device.client.platform_version.split())
    capability = getattr(device, "compute_capability", "none")
    versions = f"JAX {jax.__version__}, jaxlib {version('jaxlib')}"
    return f"{device.device_kind}, {capability}; {driver}; {platform}; {versions}"


def _failure(command: Sequence[str]) -> str | None:
    """Run a command; return why it failed, or "" where it could not try, without the GPU."""
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    streams["stderr"] = subprocess.PIPE
    try:
        done = subprocess.run(command, env=_environment(), timeout=TIMEOUT, **streams)
    except subprocess.TimeoutExpired:
        return f"its compiler took more than {TIMEOUT} s"
    if done.returncode in (0, NO_GPU):
        return "" if done.returncode else None
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["without a word"]
    told = [line for line in lines if re.search("ERROR|Error: |error +:", line)]
    ended = "failed"
    if done.returncode < 0:
        ended = f"was ended by {signal.Signals(-done.returncode).name}"
    return f"its compiler {ended}: {' '.join((told or lines[-1:])[0].split())[:200]}"


def _environment() -> dict[str, str]:
    """Return that of a process that takes what it needs of this one's GPU, and keeps nothing."""
    quiet = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms:
        quiet["JAX_PLATFORMS"] = platforms
    device = jax.local_devices()[0]
    if device.platform == "gpu":  # a process on all GPUs would take memory of each
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        names, place = visible.split(","), device.local_hardware_id or 0
        quiet["CUDA_VISIBLE_DEVICES"] = names[place] if visible else str(place)
    # Found even where this process was told of the package's folder by its own code.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _remembered(memory: Path | None) -> dict[str, list[str]]:
    try:
        known = json.loads(memory.read_text()) if memory else {}
    except (OSError, ValueError):  # none yet, or damaged
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, key: str, ops: Sequence[str]) -> None:
    """Add ops to the file; where it cannot be written, they are compiled again the next time."""
    known = _remembered(memory)
    known[key] = sorted({*known.get(key, ()), *ops})
    draft = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(known, indent=1) + "\n")
        draft.replace(memory)
    except OSError:
        draft.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    targets = check_compile.targets()
    parser.add_argument("--target", choices=targets, help="compile for this GPU, not the one here")
    parser.add_argument("op", choices=support.KERNELS)
    flags = parser.parse_args(arguments)
    jobs = check_compile.jobs()
    chosen = [n for n in jobs if check_compile.op_of(n) == flags.op and "tiny" in n]
    if flags.target:
        check_compile.use_cuda_tools()
    elif not _has_gpu():
        return NO_GPU
    for name in chosen:
        function, args = jobs[name]
        if flags.target:
            check_compile.compile_one(flags.target, (function, args))
        else:
            jax.jit(function).lower(*args).compile()
    return 0


def _has_gpu() -> bool:
    try:
        return jax.default_backend() == "gpu"
    except RuntimeError:  # such as one that only one process may use
        return False


if __name__ == "__main__":
    sys.exit(main())
