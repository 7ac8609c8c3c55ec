"""Compile every kernel for a GPU that is not there, and look at the machine code.

    python -m pallas_kernels.check_compile --target h100

Each kernel of each case of `pallas_kernels.cases` is compiled in a process of its own: an error of
the compiler ends the process, and a process remembers kernels that it has compiled for another GPU.
Prints a table; the exit code is 0 only if there is machine code for the GPU and no register is
spilled. Nothing is run, so no time and no value is checked.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from pallas_kernels import cases, support

TARGETS = Path(__file__).parent / "targets"
PACKAGES = {
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    "jax_cuda13_plugin": "jax-cuda13-plugin",
    "nvidia/cu13/bin/ptxas": "nvidia-cuda-nvcc",
    "nvidia/cu13/nvvm/libdevice/libdevice.10.bc": "nvidia-nvvm",
}
TIMEOUT = 600  # seconds a kernel, which takes a few
RESULT = "result of the compiler: "
UNFUSED = "nms"  # kernels whose comparisons must come out as in NumPy, to the last bit


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of one kernel of one case; `failure` is None if all is well."""

    name: str
    failure: str | None = None
    registers: int = 0  # of the kernel that has most, as all of the next
    spill_bytes: int = 0
    smem_bytes: int = 0  # static only
    temp_bytes: int = 0  # of the whole function, with what XLA does around its kernels
    peak_bytes: int = 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    targets = sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    parser.add_argument("--target", required=True, choices=targets, help="the GPU to compile for")
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="how many compile at a time")
    parser.add_argument("--json", help="a file for the table")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)

    problem = what_is_missing(flags.target)
    if problem:
        print(f"check_compile: {problem}", file=sys.stderr)
        return 1
    if flags.child:
        job = jobs()[flags.only]
        print(RESULT + json.dumps(compile_one(flags.target, job)), flush=True)
        return 0
    names = [name for name in jobs() if flags.only in name]
    if not names:
        print(f"check_compile: no case has {flags.only!r} in its name", file=sys.stderr)
        return 1
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        reports = list(pool.map(functools.partial(check_one, flags.target), names))
    print(table(flags.target, reports))
    if flags.json:
        rows = [dataclasses.asdict(report) for report in reports]
        Path(flags.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(report.failure for report in reports))


def what_is_missing(target: str) -> str | None:
    """Why nothing can be compiled for `target` here, in one line, or None."""
    missing = [package for needed, package in PACKAGES.items() if not _is_there(needed)]
    if missing:
        return f"needs the packages {', '.join(missing)}; see pallas_kernels/README.md"
    capability = tuple(map(int, describe(target)["capability"].split(".")))
    return support.mosaic_unsupported(capability)


def _is_there(needed: str) -> bool:
    """A module, or a file of a package of NVIDIA's."""
    if "/" not in needed:
        try:
            return importlib.util.find_spec(needed) is not None
        except ModuleNotFoundError:  # the package around it
            return False
    return any((Path(folder) / needed).is_file() for folder in sys.path)


def describe(target: str) -> dict[str, str]:
    """Name, number of cores and compute capability of a target."""
    text = (TARGETS / f"{target}.txtpb").read_text()
    capability = re.search(r"cuda_compute_capability \{ major: (\d+) minor: (\d+)", text)
    return {
        "text": text,
        "name": re.search(r'  name: "(.*)"', text)[1],
        "cores": re.search(r"core_count: (\d+)", text)[1],
        "capability": ".".join(capability.groups()),
    }


def jobs() -> dict[str, tuple[Callable, tuple]]:
    """Function and abstract arguments by name: those of the cases, forward and transposed."""
    # Here, as Pallas takes longer to import than it takes to see that a package is missing.
    from pallas_kernels import mask_targets, nms, roi_align

    found = {}
    for case in cases.CASES:
        if case.op == "gather_sum":
            table, y_taps, x_taps = case.args[:3]
            shape = (*y_taps.shape[:2], x_taps.shape[1], table.shape[1])
            grad = jax.ShapeDtypeStruct(shape, table.dtype)
            transpose = functools.partial(roi_align.gather_sum_transpose, num_rows=table.shape[0])
            found[f"gather_sum {case.name}"] = roi_align.gather_sum, case.args
            found[f"gather_sum_transpose {case.name}"] = transpose, (grad, *case.args[1:])
        else:
            room = {"nms": nms, "fill_polygons": mask_targets}[case.op]
            function = functools.partial(getattr(room, case.op), **case.options)
            found[f"{case.op} {case.name}"] = function, case.args
    return found


def compile_one(target: str, job: tuple[Callable, tuple]) -> dict[str, int]:
    """Bytes of memory and number of kernels of one job. ptxas writes what it does to the output."""
    from jax.experimental import topologies

    function, args = job
    gpu = describe(target)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu["text"], topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(
        lambda arg: jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=everywhere), args
    )
    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh, gpu)):
        lowered = jax.jit(function).lower(*args)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="mosaic_gpu_v2"'),
    }


def abstract_mesh(mesh: jax.sharding.Mesh, gpu: dict[str, str]) -> jax.sharding.AbstractMesh:
    """A mesh that tells Mosaic GPU what it compiles for: else it takes that for granted."""

    @dataclasses.dataclass(frozen=True)
    class Device(jax.sharding.AbstractDevice):
        compute_capability: str = gpu["capability"]

    device = Device(device_kind=gpu["name"], num_cores=int(gpu["cores"]), platform="gpu")
    return mesh.abstract_mesh.update(abstract_device=device)


def check_one(target: str, name: str) -> Report:
    """Compiles one job in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--target", target, "--only", name, "--child"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    if name.startswith(UNFUSED):
        environment["MOSAIC_GPU_DUMP_PTX"] = "1"
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Report(name, failure=f"took more than {TIMEOUT} s")
    return read_output(name, done.stdout, done.returncode, describe(target)["capability"])


def read_output(name: str, output: str, exit_code: int, capability: str) -> Report:
    """What the output of a child says, ptxas' messages among it."""
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
        failure = "a product is fused with a sum, so it rounds otherwise than NumPy's"
    elif report.spill_bytes:
        failure = f"{report.spill_bytes} bytes of registers are spilled"
    return dataclasses.replace(report, failure=failure)


def table(target: str, reports: list[Report]) -> str:
    """For people, and for a README."""
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
