"""Compile every kernel without a GPU and check the machine code.

    python -m pallas_kernels.check_compile --target h100

Compiles each case in `pallas_kernels.cases` in a separate process: compiler errors end the process,
and a process caches kernels compiled for another GPU. Prints a table; the exit code is 0 only if
there is machine code for the GPU and no register is spilled. Nothing runs, so neither times nor
values are checked.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from pallas_kernels import cases, support

TARGETS = Path(__file__).parent / "targets"
PACKAGES = {"jax_plugins.xla_cuda13": "jax-cuda13-pjrt", "jax_cuda13_plugin": "jax-cuda13-plugin"}
TOOLS = {"bin/ptxas": "nvidia-cuda-nvcc", "nvvm/libdevice/libdevice.10.bc": "nvidia-nvvm"}
PACKAGED = "nvidia/cu13", "nvidia/cuda_nvcc"  # of CUDA 13 and 12, in the order of JAX
TOOLKIT = "/usr/local/cuda"
TIMEOUT = 600  # seconds per kernel; compiling takes a few
RESULT = "compiler result: "
UNFUSED = "nms"  # prefix of kernels whose comparisons must match NumPy bit for bit


@dataclasses.dataclass(frozen=True)
class Report:
    """Compilation result for one kernel and case; `failure` is None on success."""

    name: str
    failure: str | None = None
    registers: int = 0  # maximum over the function's kernels
    spill_bytes: int = 0  # sum over the kernels
    smem_bytes: int = 0  # maximum over the kernels, static only
    temp_bytes: int = 0  # whole function, including XLA's code around its kernels
    peak_bytes: int = 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True, choices=targets(), help="GPU to compile for")
    parser.add_argument("--only", default="", help="compile only jobs whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="parallel compilations")
    parser.add_argument("--json", help="also write the table to this JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)

    problem = missing_requirement(flags.target)
    if problem:
        print(f"check_compile: {problem}", file=sys.stderr)
        return 1
    use_cuda_tools()
    if flags.child:
        job = jobs()[flags.only]
        print(RESULT + json.dumps(compile_one(flags.target, job)), flush=True)
        return 0
    names = [name for name in jobs() if flags.only in name]
    if not names:
        print(f"check_compile: --only {flags.only!r} matches no case", file=sys.stderr)
        return 1
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        reports = list(pool.map(functools.partial(check_one, flags.target), names))
    print(table(flags.target, reports))
    if flags.json:
        rows = [dataclasses.asdict(report) for report in reports]
        Path(flags.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(report.failure for report in reports))


def targets() -> list[str]:
    return sorted(path.stem for path in TARGETS.glob("*.txtpb"))


def missing_requirement(target: str) -> str | None:
    """Return why this machine cannot compile for `target`, in one line, or None."""
    missing = [package for module, package in PACKAGES.items() if not _is_installed(module)]
    missing += missing_tools()
    if missing:
        return (
            f"needs the packages {', '.join(missing)} (for ptxas and libdevice, a CUDA toolkit in "
            f"CUDA_HOME or {TOOLKIT} will do); see pallas_kernels/README.md"
        )
    capability = capability_of(target)
    reasons = (support.mosaic_unsupported(op, capability) for op in support.KERNELS)
    return next(filter(None, reasons), None)


def missing_tools() -> list[str]:
    """Return the packages of the tools that are not in `cuda_root()`."""
    root = cuda_root()
    return [package for tool, package in TOOLS.items() if not (root / tool).is_file()]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def cuda_root() -> Path:
    """Return the folder of ptxas and libdevice.

    The first of CUDA_ROOT and NVIDIA's packages, where JAX looks; CUDA_HOME; and `TOOLKIT`. If it
    has no ptxas, the toolkit of the ptxas on the PATH.
    """
    root = _first_root()
    program = shutil.which("ptxas")
    if program and not (root / "bin/ptxas").is_file():
        toolkit = Path(program).resolve().parents[1]
        if all((toolkit / tool).is_file() for tool in TOOLS):
            return toolkit
    return root


def _first_root() -> Path:
    if os.environ.get("CUDA_ROOT"):
        return Path(os.environ["CUDA_ROOT"])
    for name, folder in itertools.product(PACKAGED, sys.path):
        packaged = Path(folder) / name
        if any((packaged / tool).is_file() for tool in TOOLS):
            return packaged
    return Path(os.environ.get("CUDA_HOME") or TOOLKIT)


def use_cuda_tools() -> None:
    """Point XLA, Mosaic GPU and child processes to `cuda_root()`; call before compiling."""
    from jax.experimental.pallas import mosaic_gpu  # noqa: F401  # sets MOSAIC_GPU_CUDA_ROOT

    root = str(cuda_root())
    os.environ["CUDA_ROOT"] = os.environ["MOSAIC_GPU_CUDA_ROOT"] = root
    os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={root} {os.environ.get('XLA_FLAGS', '')}"


def describe(target: str) -> dict[str, str]:
    """Return a target's name, core count and compute capability."""
    text = (TARGETS / f"{target}.txtpb").read_text()
    capability = re.search(r"cuda_compute_capability \{ major: (\d+) minor: (\d+)", text)
    return {
        "text": text,
        "name": re.search(r'  name: "(.*)"', text)[1],
        "cores": re.search(r"core_count: (\d+)", text)[1],
        "capability": ".".join(capability.groups()),
    }


def capability_of(target: str) -> tuple[int, int]:
    major, minor = describe(target)["capability"].split(".")
    return int(major), int(minor)


def jobs() -> dict[str, tuple[Callable, tuple]]:
    """Return function and abstract arguments by job name, with transposes."""
    # Imported here: importing Pallas takes longer than finding that a package is missing.
    from pallas_kernels import mask_targets, nms, roi_align

    found = {}
    for case in cases.CASES:
        if case.op == "gather_sum":
            tables, y_taps, x_taps = case.args[:3]
            shape = (*y_taps.shape[:2], x_taps.shape[1], tables[0].shape[1])
            grad = jax.ShapeDtypeStruct(shape, tables[0].dtype)
            num_rows = sum(table.shape[0] for table in tables)
            transpose = functools.partial(roi_align.gather_sum_transpose, num_rows=num_rows)
            found[f"gather_sum {case.name}"] = roi_align.gather_sum, case.args
            found[f"gather_sum_transpose {case.name}"] = transpose, (grad, *case.args[1:])
        else:
            module = {"nms": nms, "fill_polygons": mask_targets}[case.op]
            function = functools.partial(getattr(module, case.op), **case.options)
            found[f"{case.op} {case.name}"] = function, case.args
    return found


def op_of(name: str) -> str:
    """Return the op of a job, a key of `support.KERNELS`."""
    return name.partition(" ")[0].removesuffix("_transpose")


def compile_one(target: str, job: tuple[Callable, tuple]) -> dict[str, int]:
    """Compile one job and return its memory in bytes and kernel count; ptxas logs to the output."""
    function, args = job
    mesh, context = absent_gpus(target, 1)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(
        lambda arg: jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=everywhere), args
    )
    with jax.sharding.use_abstract_mesh(context):
        lowered = jax.jit(function).lower(*args)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="mosaic_gpu_v2"'),
    }


def absent_gpus(target: str, count: int) -> tuple[jax.sharding.Mesh, jax.sharding.AbstractMesh]:
    """Return a mesh for arguments, axis "data", and one that tells Mosaic GPU what GPU it has."""
    from jax.experimental import topologies

    gpu = describe(target)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu["text"], topology=f"1x1x{count}"
    )
    mesh = topologies.make_mesh(topology, (count,), ("data",))

    @dataclasses.dataclass(frozen=True)
    class Device(jax.sharding.AbstractDevice):
        compute_capability: str = gpu["capability"]

    device = Device(device_kind=gpu["name"], num_cores=int(gpu["cores"]), platform="gpu")
    return mesh, mesh.abstract_mesh.update(abstract_device=device)


def check_one(target: str, name: str) -> Report:
    """Compile one job in a separate process."""
    command = [sys.executable, "-m", __spec__.name, "--target", target, "--only", name, "--child"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    if name.startswith(UNFUSED):
        environment["MOSAIC_GPU_DUMP_PTX"] = "1"
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        done = subprocess.run(command, env=environment, timeout=TIMEOUT, **streams)
    except subprocess.TimeoutExpired:
        return Report(name, failure=f"took more than {TIMEOUT} s")
    return read_output(name, done.stdout, done.returncode, describe(target)["capability"])


def read_output(name: str, output: str, exit_code: int, capability: str) -> Report:
    """Parse a child's output, including the messages from ptxas."""
    results = re.findall(rf"^{RESULT}(.*)$", output, re.MULTILINE)
    if exit_code or not results:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return Report(name, failure=f"exit code {exit_code}: {last}")
    result = json.loads(results[0])
    architectures = re.findall(r"Compiling entry function .* for '(sm_\d+)", output)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", output)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    report = Report(
        name,
        registers=max(registers, default=0),
        spill_bytes=sum(int(n) for pair in spills for n in pair),
        smem_bytes=max((int(n) for n in re.findall(r"(\d+) bytes smem", output)), default=0),
        temp_bytes=result["temp_bytes"],
        peak_bytes=result["peak_bytes"],
    )
    expected = "sm_" + capability.replace(".", "")
    failure = None
    if not result["kernels"]:
        failure = "the program has no Mosaic GPU kernel"
    elif set(architectures) != {expected} or len(registers) != len(architectures):
        failure = f"machine code for {sorted(set(architectures))}, expected {expected}"
    elif name.startswith(UNFUSED) and re.search(r"\bfma\.\S*f32", output):
        failure = "a product is fused with a sum, so its rounding differs from NumPy's"
    elif report.spill_bytes:
        failure = f"{report.spill_bytes} bytes of registers are spilled"
    return dataclasses.replace(report, failure=failure)


def table(target: str, reports: list[Report]) -> str:
    """Format the reports as Markdown."""
    lines = [
        f"JAX {jax.__version__}, {describe(target)['name']}, nothing run",
        "",
        "| kernel and case | registers | spilled, B | static smem, B | temporary, MB | peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        lines.append(
            f"| {report.name} | {report.registers} | {report.spill_bytes} | {report.smem_bytes} "
            f"| {report.temp_bytes / 1e6:.2f} | {report.peak_bytes / 1e6:.1f} |"
        )
    failed = [report for report in reports if report.failure]
    lines += ["", f"{len(reports) - len(failed)} of {len(reports)} compiled without a spill"]
    lines += [f"FAILED {report.name}: {report.failure}" for report in failed]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
