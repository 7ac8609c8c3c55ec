"""Count and limit what training or prediction does once compiled for absent GPUs and TPUs.

    python -m benchmarks.compiled_step --config configs/coco.py --target h100 \\
        --budgets benchmarks/budgets.toml
    python -m benchmarks.compiled_step --config configs/coco.py --mode infer --images 8 --devices 1

Compiles as `mask_rcnn_jax.benchmark compile` does, and reads the rest from the program's text:
launches, kernels, copies, memory traffic and an estimated range of times. With `--budgets FILE`,
fails if a figure exceeds the recipe's limit. `--config.section.name=value` changes an entry.
"""

import argparse
import json
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import entries, hlo, roofline
from benchmarks.traffic import CONVOLUTION
from mask_rcnn_jax.benchmarking.absent import MODES, compile_programs
from mask_rcnn_jax.config import load_config

Figures = dict[str, Any]
Limits = dict[str, dict[str, float]]
GRAPH = 5  # launches in XLA's smallest CUDA graph (xla_gpu_graph_min_graph_size)
TABLE = re.compile(r"any|images_\d+|infer|infer_\d+|xla|xla_infer")  # of limits in a recipe's table
TABLES = "any, images_N, infer, infer_N, xla or xla_infer"


def main(arguments: argparse.Namespace) -> None:
    limits = load_limits(arguments.budgets, arguments.config) if arguments.budgets else {}
    shapes = [(images, devices) for devices in arguments.devices for images in arguments.images]
    recipe = load_config(arguments.config, arguments.entries)
    target, names = arguments.target, roofline.DEVICES[arguments.target]
    steps = [
        figures
        | {"implementation": recipe.train.implementation}
        | read(str(compiled.as_text()), figures["images_per_device"], names)
        for figures, compiled in compile_programs(recipe, target, shapes, arguments.mode)
    ]
    print(table(target, steps), flush=True)
    for step in steps:
        print(f"\n{_shape(step)}\n{roofline.report(step['estimates'], step['costliest'])}")
    if arguments.json:
        report = {"target": target, "jax": jax.__version__, "programs": steps}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    over = [line for step in steps for line in violations(step, limits)]
    if over:
        raise SystemExit(f"over the budget of {arguments.budgets}: {'; '.join(over)}")


def read(text: str, images: int, devices: Sequence[str]) -> Figures:
    """Return counts, traffic and estimates of a program for `images` on each of its devices."""
    program = hlo.parse(text)
    launches = roofline.launches(program)
    return {
        "gbytes_per_image": round(roofline.gbytes(launches) / images, 2),
        **count_instructions(program),
        "xla_mcycles": round(roofline.xla_cycles(program) / 1e6, 2),
        "sort_launches": round(sum(one.times for one in launches if one.kind == "sorts")),
        "estimates": {name: roofline.estimate(launches, images, name) for name in devices},
        "costliest": roofline.costliest(launches, devices[0]),
    }


def count_instructions(program: hlo.Program) -> dict[str, int]:
    """Return counts over the whole program, loop bodies once."""
    bodies = program.computations
    everything = [instruction for body in bodies.values() for instruction in body.values()]
    # Computations that are fused or applied by a reduction launch nothing themselves.
    applied = r"\b(?:calls|to_apply)=%?([\w.\-]+)"
    inner = {name for found in everything for name in re.findall(applied, found.text)}
    outer = [body for name, body in bodies.items() if name not in inner]
    launched = [instruction for body in outer for instruction in body.values()]
    opcodes, launched_opcodes = (Counter(x.opcode for x in some) for some in (everything, launched))
    kernels = [found for found in launched if found.target == hlo.KERNEL]
    convolutions = [found for found in launched if found.target.startswith(CONVOLUTION)]
    # Differentiation names the backward pass "transpose(jvp(..))".
    backward = sum("transpose(jvp" in found.text for found in kernels)
    return {
        # A sort counts once; `sort_launches` has those of a GPU.
        "launches": sum(n for opcode, n in launched_opcodes.items() if opcode not in hlo.FREE),
        "host_launches": _host_launches(program),
        "kernels_forward": len(kernels) - backward,  # from `pallas_kernels`
        "kernels_backward": backward,
        "convolutions": len(convolutions),
        "fused_convolutions": sum("BiasActivation" in found.target for found in convolutions),
        "float32_convolutions": sum(found.arrays[0].dtype == "f32" for found in convolutions),
        "matmuls": sum(map(_is_matmul, launched)),
        "copies": launched_opcodes["copy"],
        "transposes": opcodes["transpose"],  # including those inside fusions
        "converts": opcodes["convert"],  # likewise
        "sorts": opcodes["sort"],
        "gathers": opcodes["gather"],
        "scatters": opcodes["scatter"],
        "loops": opcodes["while"],
        # A GPU waits for its host in each turn of these.
        "open_loops": sum(x.opcode == "while" and x.trips is None for x in everything),
        "all_reduces": opcodes["all-reduce"] + opcodes["all-reduce-start"],
        "all_reduces_alone": opcodes["all-reduce"] + _awaited_at_once(program),
    }


def _host_launches(program: hlo.Program) -> int:
    """Return what the host starts: CUDA graphs, and one by one what is in none.

    XLA leaves convolutions and collectives out of graphs by default, and runs too short for one.
    That it takes in everything else is assumed; `+convolution` leaves collectives and short runs.
    """
    count = run = 0
    for _, _, found in program.launched:
        if found.target.startswith(CONVOLUTION) or found.opcode.startswith(hlo.COLLECTIVES):
            count, run = count + _started(run) + 1, 0
        else:
            run += 1
    return count + _started(run)


def _started(run: int) -> int:
    return 1 if run >= GRAPH else run


def _awaited_at_once(program: hlo.Program) -> int:
    """Return how many all-reduces the entry starts and awaits with nothing launched between."""
    launched, started, count = 0, {}, 0
    for found in program.computations[program.entry].values():
        if found.opcode == "all-reduce-start":
            started[found.name] = launched
        elif found.opcode == "all-reduce-done":
            count += started[found.operands[0]] == launched
        elif found.opcode not in hlo.FREE:
            launched += 1
    return count


def _is_matmul(instruction: hlo.Instruction) -> bool:
    """Whether an instruction is a library call or a Triton fusion for a matrix product."""
    triton = instruction.opcode == "fusion" and "__triton_" in instruction.text
    return bool(re.search("gemm|matmul", instruction.target)) or (
        triton and "gemm" in instruction.name + instruction.text
    )


def load_limits(path: str, recipe: str) -> Limits:
    """Load a recipe's limits from a TOML file.

    The recipe has a table by its name, "coco" or "coco_torchvision:v2" wherever its file lies; in
    it are tables for the training step, `any` and `images_N` by images per device, for prediction,
    `infer` and `infer_N`, and for both with `train.implementation=xla`, `xla` and `xla_infer`.

    Raises ValueError for a file that is no TOML, a recipe without limits, a table of another name,
    or a limit of an unknown figure.
    """
    counted = count_instructions(hlo.Program({"": {}}, ""))
    known = ["compile_s", "gbytes_per_image", "gflop_per_image", "peak_mb", "temp_mb"]
    known += ["sort_launches", "xla_mcycles", *counted]
    try:
        recipes = tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    file, colon, variant = recipe.partition(":")
    name = Path(file).stem + colon + variant
    if name not in recipes:
        raise ValueError(f"{path} has no limits for {name!r}, expected one of {sorted(recipes)}")
    for table_name, limits in recipes[name].items():
        if not TABLE.fullmatch(table_name):
            text = f"{path} has [{name}.{table_name}], expected {TABLES}"
            raise ValueError(text)
        for entry in limits:
            if entry.removeprefix("least_") not in known:
                text = f"{path}: [{name}.{table_name}] has {entry!r}, expected one of {known}"
                raise ValueError(text)
    return recipes[name]


def violations(step: Figures, limits: Limits) -> list[str]:
    """Describe each figure above its limit, or below a limit named `least_..`."""
    found, images = [], step["images_per_device"]
    if step["mode"] == "infer":
        names, without_kernels = ["infer", f"infer_{images}"], ["xla_infer"]
    else:
        names, without_kernels = ["any", f"images_{images}"], ["xla"]
    if step["implementation"] == "xla":
        names = without_kernels
    for table_name in names:
        for name, limit in limits.get(table_name, {}).items():
            value = step[name.removeprefix("least_")]
            if value < limit if name.startswith("least_") else value > limit:
                found.append(f"{name} is {value} with {_shape(step)}, the limit is {limit}")
    return found


def _shape(step: Figures) -> str:
    mode = "prediction, " if step["mode"] == "infer" else ""
    return f"{mode}{step['images_per_device']} images on each of {step['devices']} devices"


def table(target: str, steps: Sequence[Figures]) -> str:
    """Format the figures as a Markdown table with one column per step."""
    lines = [f"| {target} |" + " |" * len(steps), "|---|" + "---|" * len(steps)]
    for name in (name for name, value in steps[0].items() if isinstance(value, int | float)):
        lines.append(f"| {name} | " + " | ".join(str(step[name]) for step in steps) + " |")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    def counts(text: str) -> list[int]:
        return [int(count) for count in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help=entries.CONFIG_HELP)
    parser.add_argument("--mode", default="train", choices=MODES, help="the step, or prediction")
    parser.add_argument("--target", default="h100", choices=roofline.DEVICES)
    parser.add_argument("--images", type=counts, default=[2, 8], help="numbers per device")
    parser.add_argument("--devices", type=counts, default=[1, 4], help="numbers of devices")
    parser.add_argument("--budgets", help="TOML file with limits for the figures")
    parser.add_argument("--json", help="write the figures to this file")
    return entries.parse(parser, arguments)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured too
    jax.config.update("jax_platforms", "cpu")  # do not look for a GPU
    try:
        main(parse())
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
